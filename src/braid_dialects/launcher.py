"""Shell scripts that start a run of SkyRL or verl: the overrides on their command line are the config.

Only what such scripts consist of is read: assignments of variables and arrays, sums of integers, comments,
continued lines, and one command with `key=value` arguments. Nothing is executed.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from braid.config.source import Written, apply_override, is_within, plain_scalar, text_of
from braid.errors import ConfigError, Problem

_ASSIGNMENT = re.compile(r"(?:(?:export|local|declare|readonly)\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*([A-Za-z_]\w*)(\+?)=\(")
_ITEMS = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_DEFAULT = re.compile(r"\$\{(\w+):?[-=]((?:[^{}]|\$\{[^{}]*\})*)\}")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_SUM = re.compile(r"\$\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
_OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "int_div"}
_OVERRIDE = re.compile(r"\+{0,2}(model_engine|[A-Za-z_]\w*(\.[\w\[\]]+)+)=", re.ASCII)
_CONFIGS = ("--config-name", "--config-path")
CONFIG_NAME = "config_name"
"""Key of the config that a script of verl chooses by `--config-name`."""
VERL_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer")
_BLOCK, _END = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")


def read_launcher(path: Path) -> Written:
    """Read the overrides of a script as a config, with the lines that they are on. Variables that the script
    does not set are those of the environment. Raises ConfigError if there is no command with overrides, or if
    it launches another file."""
    lines = text_of(path).splitlines()
    written, variables, doubtful, depth, num_found = Written(), dict[str, str](), set[str](), 0, 0
    arrays: dict[str, list[tuple[int, str]]] = {}
    for number, words in _commands(lines, path.name):
        origin = f"{path.name}:{number}"
        depth += (words[0] in _BLOCK) - (words[0] in _END)
        if match := _ARRAY.match(words[0]):
            items = [word for word in (words[0][match.end() :], *words[1:]) if word.strip(")")]
            earlier = arrays.get(match[1], []) if match[2] else []
            arrays[match[1]] = [*earlier, *_items([(number, word) for word in items], arrays)]
            doubtful |= {match[1]} if depth else set()
            continue
        if words[0] == ":":
            words = [f"{name}={default}" for word in words[1:] for name, default in _DEFAULT.findall(word)]
        while words and (
            match := _ASSIGNMENT.fullmatch(
                " ".join(words[:2]) if words[0] in ("export", "readonly") else words[0]
            )
        ):
            name, value = match[1], _expanded(match[2], variables)
            if depth or variables.get(name, value) != value:
                doubtful.add(name)
            variables[name] = value
            words = words[2 if words[0] in ("export", "readonly") else 1 :]
        is_doubtful = depth or any(name in doubtful for word in words for name in _ITEMS.findall(word))
        for first, word in _items([(number, word) for word in words], arrays):
            if word.startswith(_CONFIGS):
                _choose(written, word, origin)
                continue
            if not _OVERRIDE.match(word):
                continue
            num_found += 1
            text = re.sub(r"^\+{1,2}", "", _expanded(word, variables))
            key = text.partition("=")[0]
            at = next((i for i, line in enumerate(lines[first - 1 :], first) if f"{key}=" in line), first)
            origin = f"{path.name}:{at}"
            used = {name for pair in _VARIABLE.findall(word) for name in pair if name} & doubtful
            if is_doubtful or used or "$(" in text or "`" in text:
                what = f"${', $'.join(sorted(used))}" if used else "it"
                why = (
                    f"{what} depends on what the script does when it runs; set it on the command line: "
                    f"{key}=VALUE"
                )
                written.problems.append(Problem(key, why, origin))
                continue
            apply_override(written, text)
            written.origins |= {
                name: origin for name in written.origins if is_within(name, key) or is_within(key, name)
            }
    if not num_found:
        why = "the script has no command with key=value arguments; pass the config file that it launches"
        raise ConfigError([Problem("config", why, path.name)])
    return written


def _choose(written: Written, word: str, origin: str) -> None:
    """Keep the name of one of verl's own configs, which its dialect knows. Raises ConfigError if the script
    launches another file."""
    name = word.partition("=")[2].removesuffix(".yaml")
    if word.startswith("--config-path") and "/" not in name.strip("./") and "$" not in name:
        return  # relative to the module that is launched
    if not word.startswith("--config-path") and name in VERL_CONFIGS:
        apply_override(written, f"{CONFIG_NAME}={name}")
        written.origins[CONFIG_NAME] = origin
        return
    why = (
        "the script launches a config file (--config-name); pass that file, and the script's "
        "overrides after it"
    )
    raise ConfigError([Problem("config", why, origin)])


def _items(
    words: Sequence[tuple[int, str]], arrays: Mapping[str, list[tuple[int, str]]]
) -> list[tuple[int, str]]:
    """The words with the items of arrays in place of `"${NAME[@]}"`."""
    out = []
    for number, word in words:
        match = _ITEMS.fullmatch(word)
        out += arrays.get(match[1], []) if match else [(number, word)]
    return out


def _commands(lines: Sequence[str], file: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, words) of each command; continued lines are one command, and arguments to pass on are
    left out."""
    pending, start = "", 1
    for number, line in enumerate(lines, 1):
        if not pending:
            start = number
        elif line.lstrip().startswith("#"):  # a comment between continued lines
            continue
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        pending += line
        if _ARRAY.match(pending):
            pending = re.sub(r"(^|\s)#.*", "", pending)
            if not pending.rstrip().endswith(")"):
                pending += " "
                continue
        pending = _SUM.sub(lambda match: match[0].replace(" ", ""), pending)
        try:
            words = shlex.split(pending, comments=True)
        except ValueError as error:
            if number - start < 50 and "quotation" in str(error):  # a text of several lines
                pending += "\n"
                continue
            raise ConfigError(
                [Problem("config", f"cannot read the script: {error}", f"{file}:{start}")]
            ) from None
        pending = ""
        if words := [word for word in words if word not in ("$@", "${@}")]:
            yield start, words
    if pending.strip():
        raise ConfigError(
            [Problem("config", "cannot read the script: a quotation is not closed", f"{file}:{start}")]
        )


def _expanded(text: str, variables: dict[str, str]) -> str:
    """The text with the script's variables; others become interpolations of environment variables."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name, f"${{oc.env:{name}}}")

    text = _SUM.sub(lambda match: _sum(match[1], variables) or match[0], text)

    def default_of(match: re.Match[str]) -> str:
        name, default = match[1], match[2] or "''"
        text = f"${{oc.env:{name},{default}}}"
        return variables.get(name, text if plain_scalar(default) == default else f"${{oc.decode:{text}}}")

    text = _DEFAULT.sub(default_of, text)
    return _VARIABLE.sub(value_of, text)


def _sum(text: str, variables: dict[str, str]) -> str:
    """An arithmetic expression of integers and variables as interpolations; empty if it is another one."""

    def made(node: ast.expr) -> str:
        match node:
            case ast.Constant(int(number)):
                return str(number)
            case ast.Name(name):
                value = variables.get(name, f"${{oc.env:{name}}}")
                return f"${{oc.decode:{value}}}" if value.startswith("${oc.env") else value
            case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
                return f"${{{_OPERATORS[type(operator)]}:{made(left)},{made(right)}}}"
        raise SyntaxError

    try:
        return made(ast.parse(_VARIABLE.sub(lambda m: m[1] or m[2], text).strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return ""
