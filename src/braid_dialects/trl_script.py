"""Python scripts that call a trainer of TRL: their literal arguments are the config.

The script is parsed, never executed. Names that are assigned once are resolved; arguments that are computed in
other ways are problems, unless the command line sets them.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from braid.config.source import Written, text_of
from braid.errors import ConfigError, Problem

_PIPELINES = {"GRPO": "grpo", "DPO": "dpo", "SFT": "sft", "Reward": "reward"}
_OTHERS = (
    "KTO",
    "RLOO",
    "PPO",
    "PPOv2",
    "OnlineDPO",
    "NashMD",
    "XPO",
    "CPO",
    "ORPO",
    "BCO",
    "PRM",
    "GKD",
    "GOLD",
    "AsyncGRPO",
    "MiniLLM",
    "Distillation",
)
_ADAPTERS = {"r": "lora_r", "task_type": "lora_task_type", "bias": "lora_bias", "modules_to_save": "lora_modules_to_save", "use_rslora": "use_rslora",
             "use_dora": "use_dora"}  # fmt: skip
"""Arguments of peft's LoraConfig -> arguments of ModelConfig, where the name is not `lora_` and its own."""
_MAX_NAMES = 20
"""Longest chain of names that stand for each other."""
_FROM_COMMAND_LINE = ("parse_args_and_config", "parse_args_into_dataclasses", "parse_args")


class _Computed(Exception):
    """The value of an expression is not told by the script's text."""


class _CommandLine(Exception):
    """The value of an expression is an argument of the script's command line."""


def read_script(path: Path) -> Written:
    """Read the arguments of the script's trainer and of its config, with their lines. Raises ConfigError if the
    script is not valid Python, or calls no trainer, several, or one that braid does not have."""
    try:
        script = ast.parse(text_of(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError([Problem("config", f"cannot read the script: {error}", path.name)]) from None
    calls = [node for node in ast.walk(script) if isinstance(node, ast.Call)]
    trainers = [call for call in calls if _name(call).endswith("Trainer")]
    known = [call for call in trainers if _name(call).removesuffix("Trainer") in _PIPELINES]
    if len(known) != 1:
        others = sorted({_name(call) for call in trainers if _name(call).removesuffix("Trainer") in _OTHERS})
        one = " or ".join(f"{name}Trainer" for name in _PIPELINES)
        why = f"the script calls {len(known)} of TRL's trainers that braid reads; it must call one {one}"
        if others and not known:
            why = f"braid has no {', '.join(others)} of TRL; it reads {one}"
        raise ConfigError([Problem("config", why, path.name)])
    return _Script(path, script, known[0]).read()


def _name(call: ast.Call) -> str:
    """The last name of what is called."""
    match call.func:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


def _pairs(node: ast.Dict | ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """The names and values of a mapping, or of a call of dict."""
    if isinstance(node, ast.Call):
        pairs: list[tuple[Any, ast.expr]] = [(word.arg, word.value) for word in node.keywords]
    else:
        keys = (key.value if isinstance(key, ast.Constant) else None for key in node.keys)
        pairs = list(zip(keys, node.values, strict=True))
    if not all(isinstance(name, str) for name, _ in pairs):
        raise _Computed
    yield from pairs


class _Script:
    """A script, and the values of its names."""

    def __init__(self, path: Path, script: ast.Module, trainer: ast.Call) -> None:
        self._file, self._trainer, self._written = path.name, trainer, Written()
        self._assigned: dict[str, ast.expr] = {}
        self._attributes: list[tuple[str, str, ast.expr]] = []
        self._defined = {
            node.name for node in ast.walk(script) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        times = Counter[str]()
        for node in ast.walk(script):
            match node:
                case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(
                    ast.Name(name), value=ast.expr() as value
                ):
                    times[name] += 1
                    self._assigned[name] = value
                case ast.Assign([ast.Tuple(names)], value):
                    for at, one in enumerate(names):
                        if isinstance(one, ast.Name):
                            times[one.id] += 1
                            self._assigned[one.id] = ast.Subscript(value, ast.Constant(at))
                case ast.Assign([ast.Attribute(ast.Name(owner), name)], value):
                    self._attributes.append((owner, name, value))
                case ast.AugAssign(ast.Name(name)):
                    times[name] += 2
        self._repeated = {name for name, num in times.items() if num > 1}

    def read(self) -> Written:
        """The arguments as a config."""
        pipeline = _PIPELINES[_name(self._trainer).removesuffix("Trainer")]
        self._put("trainer", pipeline, self._trainer)
        arguments = {word.arg: word.value for word in self._trainer.keywords if word.arg}
        arguments |= dict(zip(("model",), self._trainer.args, strict=False))
        for name, node in arguments.items():
            match name:
                case "args":
                    self._config(node)
                case "peft_config":
                    self._adapters(node)
                case "model" | "ref_model":
                    self._model(name, node)
                case "train_dataset" | "eval_dataset":
                    self._data(name, node)
                case "reward_funcs":
                    self._rewards(node)
                case _:
                    self._value(name, node)
        return self._written

    def _put(self, key: str, value: Any, node: ast.AST) -> None:
        section, _, name = key.rpartition(".")
        at = self._written.tree.setdefault(section, {}) if section else self._written.tree
        at[name] = value
        self._written.origins[key] = self._origin(node)

    def _origin(self, node: ast.AST) -> str:
        return f"{self._file}:{getattr(node, 'lineno', 1)}"

    def _problem(self, key: str, why: str, node: ast.AST) -> None:
        self._written.problems.append(Problem(key, why, self._origin(node)))

    def _value(self, key: str, node: ast.expr) -> None:
        """Set a key to the value of an expression, or report that it has none."""
        try:
            value = self._resolved(node)
        except _CommandLine:
            return
        except (_Computed, RecursionError):
            shown = " ".join(ast.unparse(node).split())
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            self._problem(key, f"{shown} is not a literal; set it on the command line: {key}=VALUE", node)
            return
        if isinstance(value, Mapping) and value:
            for name, item in value.items():
                self._put(f"{key}.{name}", item, node)
        else:
            self._put(key, value, node)

    def _followed(self, node: ast.expr) -> ast.expr:
        """The expression that a name stands for."""
        for _ in range(_MAX_NAMES):
            if not isinstance(node, ast.Name) or node.id not in self._assigned or node.id in self._repeated:
                break
            node = self._assigned[node.id]
        return node

    def _resolved(self, node: ast.expr) -> Any:
        """The value of a literal, a name, or a sum of them."""
        node = self._followed(node)
        match node:
            case ast.Constant(value):
                return value
            case ast.List(items) | ast.Tuple(items):
                return [self._resolved(item) for item in items]
            case ast.Dict() | ast.Call(ast.Name("dict"), []):
                return {name: self._resolved(value) for name, value in _pairs(node)}
            case ast.Attribute(ast.Name("torch"), name):
                return name
            case ast.UnaryOp(ast.USub(), operand):
                return -self._number(operand)
            case ast.BinOp():
                return self._calculated(node)
            case ast.JoinedStr(parts):
                return "".join(
                    str(self._resolved(part.value if isinstance(part, ast.FormattedValue) else part))
                    for part in parts
                )
        if any(isinstance(one, ast.Call) and _name(one) in _FROM_COMMAND_LINE for one in self._reached(node)):
            raise _CommandLine
        raise _Computed

    def _calculated(self, node: ast.BinOp) -> Any:
        """A sum, product or quotient of numbers, or texts put together."""
        if isinstance(node.op, ast.Add):
            parts = [self._resolved(node.left), self._resolved(node.right)]
            if all(isinstance(part, str) for part in parts):
                return "".join(parts)
        left, right = self._number(node.left), self._number(node.right)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Mult():
                return left * right
            case ast.FloorDiv() if right:
                return left // right
        raise _Computed

    def _number(self, node: ast.expr) -> Any:
        value = self._resolved(node)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Computed
        return value

    def _reached(self, node: ast.expr, depth: int = 0) -> Iterator[ast.AST]:
        """The parts of an expression, and of those of the names in it."""
        for one in ast.walk(node):
            yield one
            if isinstance(one, ast.Name) and one.id in self._assigned and depth < 5:
                yield from self._reached(self._assigned[one.id], depth + 1)

    def _config(self, node: ast.expr) -> None:
        """The arguments of the trainer's config, and those that are assigned to it afterwards."""
        call = self._followed(node)
        if isinstance(call, ast.Call) and _name(call).endswith("Config"):
            for word in call.keywords:
                if word.arg is None:
                    self._problem(
                        "args", f"**{ast.unparse(word.value)} is not a literal; write the arguments out", node
                    )
                else:
                    self._value(word.arg, word.value)
            for name, value in zip(("output_dir",), call.args, strict=False):
                self._value(name, value)
        else:
            self._value("args", node)
        names = {one.id for one in (node,) if isinstance(one, ast.Name)}
        for owner, name, value in self._attributes:
            if owner in names:
                self._value(name, value)

    def _adapters(self, node: ast.expr) -> None:
        call = self._followed(node)
        if isinstance(call, ast.Call) and _name(call) == "LoraConfig":
            self._put("use_peft", True, node)
            for word in call.keywords:
                name = word.arg or "peft_config"
                self._value(
                    _ADAPTERS.get(name, name if name.startswith("lora_") else f"lora_{name}"), word.value
                )
        elif not (isinstance(call, ast.Call) and _name(call) == "get_peft_config"):  # of the command line
            self._value("peft_config", node)

    def _model(self, key: str, node: ast.expr) -> None:
        """The name of a model, or of that which from_pretrained loads with its settings."""
        call = self._followed(node)
        if isinstance(call, ast.Call) and _name(call) == "from_pretrained" and call.args:
            self._value(key, call.args[0])
            for word in call.keywords if key == "model" else ():
                if word.arg in ("num_labels", "device_map", "use_cache"):
                    continue
                self._value(f"model_init_kwargs.{word.arg}" if word.arg else "model_init_kwargs", word.value)
        else:
            self._value(key, node)

    def _data(self, key: str, node: ast.expr) -> None:
        """The data set of load_dataset, as a whole or one of its splits."""
        is_train, split, call = key == "train_dataset", None, self._followed(node)
        if isinstance(call, ast.Constant) and call.value is None:
            return
        if (
            isinstance(call, ast.Subscript)
            and isinstance(call.slice, ast.Constant)
            and isinstance(call.slice.value, str)
        ):
            split, call = call.slice, self._followed(call.value)
        if not (isinstance(call, ast.Call) and _name(call) == "load_dataset"):
            if any(isinstance(one, ast.Call) and _name(one) == "get_dataset" for one in self._reached(node)):
                return  # of the command line
            changed = " ".join(ast.unparse(call).split())[:60]
            why = f"{changed} is computed by the script; write its rows to a file, and set it: dataset_name=FILE"
            self._problem("dataset_name" if is_train else key, why, node)
            return
        words = {word.arg: word.value for word in call.keywords if word.arg}
        words |= dict(zip(("path", "name", "data_dir", "data_files", "split"), call.args, strict=False))
        path = words.get("data_files") or words["path"]
        if is_train:
            self._value("dataset_name", path)
            if "name" in words:
                self._value("dataset_config", words["name"])
        elif self._written.tree.get("dataset_name") != self._told(path):
            self._problem(
                key, "is another data set; set braid.data.eval (or sft.eval_data, prefer.eval_data)", node
            )
        if split := split or words.get("split"):
            self._value("dataset_train_split" if is_train else "dataset_test_split", split)

    def _told(self, node: ast.expr) -> Any:
        try:
            return self._resolved(node)
        except (_Computed, _CommandLine, RecursionError):
            return None

    def _rewards(self, node: ast.expr) -> None:
        """Names of rewards: those of TRL, models, or FILE.py:NAME of a function in the script."""
        items = self._followed(node)
        names = []
        for item in items.elts if isinstance(items, ast.List | ast.Tuple) else [items]:
            one = self._followed(item)
            if isinstance(one, ast.Constant):
                names.append(one.value)
            elif isinstance(one, ast.Name):
                names.append(f"{self._file}:{one.id}" if one.id in self._defined else one.id)
            else:
                names.append(" ".join(ast.unparse(one).split())[:60])
        self._put("reward_funcs", names, node)
