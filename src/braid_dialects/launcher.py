"""Shell scripts that start a run of SkyRL: the overrides on their command line are the config.

Only what such scripts consist of is read: assignments of variables, comments, continued lines, and one
command with `key=value` arguments. Nothing is executed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from braid.config.source import Written, apply_override, is_within, text_of
from braid.errors import ConfigError, Problem

_ASSIGNMENT = re.compile(r"(?:(?:export|local|declare|readonly)\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):[-=]((?:[^{}]|\$\{[^{}]*\})*)\}")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.[\w\[\]]+)+=", re.ASCII)
_BLOCK, _END = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")


def read_launcher(path: Path) -> Written:
    """Read the overrides of a script as a config, with the lines that they are on. Variables that the script
    does not set are those of the environment. Raises ConfigError if there is no command with overrides, or if
    it launches another file."""
    lines = text_of(path).splitlines()
    written, variables, doubtful, depth, num_found = Written(), dict[str, str](), set[str](), 0, 0
    for number, words in _commands(lines, path.name):
        origin = f"{path.name}:{number}"
        depth += (words[0] in _BLOCK) - (words[0] in _END)
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
        if any(word.startswith(("--config-name", "--config-path")) for word in words):
            why = (
                "the script launches a config file (--config-name); pass that file, and the script's "
                "overrides after it"
            )
            raise ConfigError([Problem("config", why, origin)])
        for word in words:
            if not _OVERRIDE.match(word):
                continue
            num_found += 1
            text = re.sub(r"^\+{1,2}", "", _expanded(word, variables))
            key = text.partition("=")[0]
            at = next((i for i, line in enumerate(lines[number - 1 :], number) if f"{key}=" in line), number)
            origin = f"{path.name}:{at}"
            used = {name for pair in _VARIABLE.findall(word) for name in pair if name} & doubtful
            if depth or used or "$(" in text or "`" in text:
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

    text = _DEFAULT.sub(
        lambda m: variables.get(m[1], f"${{oc.env:{m[1]},{m[2]}}}" if m[2] else f"${{oc.env:{m[1]},''}}"),
        text,
    )
    return _VARIABLE.sub(value_of, text)
