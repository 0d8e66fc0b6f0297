"""Steps of conversions, shared by all dialects: what a value becomes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from .table import Became, Convert, Source, implied, no_effect, unsupported


def computed(function: Callable[[Source], Any]) -> Convert:
    """A value that follows from the file, whichever of several keys is converted."""
    return lambda _, source: function(source)


def sets(*parts: Any) -> Convert:
    """The value of each of the rule's native paths: a constant, or a step."""

    def convert(value: Any, source: Source) -> Became:
        made = [part(value, source) if callable(part) else part for part in parts]
        texts = zip(source.rule.native.split(), made, strict=True)
        return Became({path: part for text, part in texts for path in source.placed(text)})

    return convert


def as_is(value: Any, _: Source) -> Any:
    """The value itself."""
    return value


def part_of(key: str) -> Convert:
    """What the row of `key` becomes, whose value this key is a part of."""

    def convert(_: Any, source: Source) -> Any:
        if (value := source[key]) is None:
            return no_effect(f"{key} is not set")
        return source.dialect.rules[key].become(value, replace(source, at=key))

    return convert


def listed(value: Any, _: Source) -> list[Any]:
    """A list of one for a single value."""
    return value if isinstance(value, list) else [value]


def positive(value: Any, _: Source) -> bool:
    return value > 0


def mapped(values: Mapping[Any, Any]) -> Convert:
    """Look up the native value, the result or the next step in a table."""

    def convert(value: Any, source: Source) -> Any:
        result = values[value]
        return result(value, source) if callable(result) else result

    return convert


def algorithm(note: str = "", **parts: Any) -> Became:
    """Native keys of `algorithm`. A mapping stands for keys below it, such as a kind and its settings."""
    native: dict[str, Any] = {}
    for name, value in parts.items():
        if isinstance(value, dict):
            native |= {f"algorithm.{name}.{setting}": item for setting, item in value.items()}
        else:
            native[f"algorithm.{name}"] = value
    return Became(native, note=note)


def policy_loss(kind: str, note: str = "", *, old_logprobs: str | None = None, **settings: Any) -> Became:
    """Native keys of a kind of `algorithm.policy_loss`, and algorithm.old_logprobs."""
    native = {f"algorithm.policy_loss.{name}": value for name, value in {"kind": kind, **settings}.items()}
    if old_logprobs is not None:
        native["algorithm.old_logprobs"] = old_logprobs
    return Became(native, note=note)


def as_int(value: Any, _: Source) -> int:
    return int(value)


def opposite(value: Any, _: Source) -> Any:
    """Negate the value: the native key has the opposite meaning."""
    return not value


def or_null(value: Any, _: Source) -> Any:
    """Null for 0."""
    return value or None


def at_least_0(value: Any, _: Source) -> Any:
    """0 for negative values, which mean never."""
    return max(value, 0)


def greedy_at_0(value: float, source: Source) -> Any:
    """A temperature; 0 asks for greedy decoding."""
    greedy = {path.replace("temperature", "greedy"): True for path in source.native}
    return float(value) if value else Became(greedy, note="greedy decoding")


def null_as(native: Any) -> Convert:
    """Replace null by `native`."""
    return lambda value, _: native if value is None else value


def unless_null(why: str = "not set", result: Callable[[str], Became] = no_effect) -> Convert:
    """No effect (or another result) for null."""
    return lambda value, _: result(f"null: {why}") if value is None else value


def only(usual: Any, instead: str, why: str = "braid always does this") -> Convert:
    """Accept the one value that braid supports; other values are unsupported, with `instead` as the
    alternative."""
    return lambda value, _: implied(why) if value == usual else unsupported(instead)


def folder_name(text: str, _: Source | None = None) -> str:
    """Convert a run name to a valid folder name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)


def wandb_mode() -> tuple[str, str]:
    """Return (report.wandb.mode, reason). The original systems always log online; braid does only if
    WANDB_API_KEY is set."""
    if os.environ.get("WANDB_API_KEY"):
        return "online", "online, because WANDB_API_KEY is set"
    return "offline", "offline, because WANDB_API_KEY is not set; upload later with `wandb sync`"


def trackers(names: Collection[str], *, others: Collection[str] = ()) -> Became:
    """The trackers with these names; braid has all that `others` write."""
    unknown = sorted({*names} - {"tensorboard", "wandb", "swanlab", *others})
    if unknown:
        return unsupported(f"{', '.join(unknown)}: use tensorboard, wandb or swanlab, or read metrics.jsonl")
    native: dict[str, Any] = {"report.tensorboard": "tensorboard" in names}
    if "swanlab" in names:
        native["report.swanlab.mode"] = "cloud"
    if "wandb" not in names:
        return Became(native)
    mode, why = wandb_mode()
    return Became(native | {"report.wandb.mode": mode}, note=why)


def presets(value: Any, _: Source) -> Became:
    """Hydra's `defaults`: compose.py has merged the files that it lists."""
    entries = value if isinstance(value, list) else []
    names = [item for item in entries if item != "_self_" and "hydra/" not in str(item)]
    if not names:
        return no_effect("it lists no presets")
    return implied("the keys of the listed presets are in separate rows, with file and line")


def already(why: str) -> Convert:
    """A flag for something that braid always does; false has no effect."""
    return lambda value, _: implied(why) if value else no_effect(why)
