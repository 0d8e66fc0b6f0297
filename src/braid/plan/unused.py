"""Keys that have no effect in a run, each with the reason, which the sections of the config give.

Where several rules name a key, the first gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any

from braid.config.schema import RunConfig
from braid.config.shape import fields_of, sections_of
from braid.sections import Section, Unused

from .plan import Plan

ONLY_EVALUATES = "an evaluation trains nothing"
_ALL = tuple(path for path, field in fields_of(RunConfig) if not sections_of(field))


def unused_keys(config: RunConfig, plan: Plan) -> dict[str, str]:
    """Unused key or section -> the reason, whether or not it is set. `key[]` stands for all items of a
    list."""
    sections = [("env", config.env), *_sections_below("", config)]  # "a simulator has no text" explains most
    rules = chain(
        (
            _placed(rule, at)
            for at, section in sections
            for rule in (*section.unused_settings(), *section.unused(config, plan))
        ),
        _shared_weights(config, plan),
        ((ONLY_EVALUATES, section.only_for_training) for _, section in sections if plan.verb == "eval"),
    )
    reasons: dict[str, str] = {}
    for why, patterns in rules:
        for key in (key for pattern in patterns.split() for key in _keys(pattern)):
            reasons.setdefault(key, why)
    return reasons


def _sections_below(at: str, section: Section) -> Iterator[tuple[str, Section]]:
    """(path, section) of `section` at the path `at` and of those in it, but not in its lists."""
    yield at, section
    for name in type(section).model_fields:
        if isinstance(below := getattr(section, name), Section):
            yield from _sections_below(f"{at}.{name}".removeprefix("."), below)


def _placed(rule: tuple[str, str], at: str) -> tuple[str, str]:
    why, keys = rule
    return why.replace("@", at), keys.replace("@", at)


def why_unused(reasons: Mapping[str, str], key: str) -> str:
    """The reason that `unused_keys` gives for a key or a section that contains it; empty if there is none."""
    parts = re.sub(r"\[\d+\]", "[]", key).split(".")
    above = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((reasons[name] for name in above if name in reasons), "")


def set_keys(section: Any, key: str, at: str = "") -> Iterator[str]:
    """The keys that `key` stands for whose values differ from their defaults."""
    name, _, rest = key.partition(".")
    is_list, name = name.endswith("[]"), name.removesuffix("[]")
    if isinstance(section, dict):
        yield from set_keys(section[name], rest, f"{at}{name}.")
        return
    field = type(section).model_fields.get(name)
    value = None if field is None else getattr(section, name)
    if not rest:
        if field is not None and value != field.get_default(call_default_factory=True):
            yield f"{at}{name}"
    elif is_list:
        for i, item in enumerate(value or ()):
            yield from set_keys(item, rest, f"{at}{name}[{i}].")
    elif value is not None:
        yield from set_keys(value, rest, f"{at}{name}.")


@cache
def _keys(pattern: str) -> tuple[str, ...]:
    """The keys that a pattern stands for."""
    if braces := re.search(r"\{([^{}]*)\}", pattern):
        before, after = pattern[: braces.start()], pattern[braces.end() :]
        return tuple(key for option in braces[1].split(",") for key in _keys(before + option + after))
    if pattern.endswith(".*"):
        return tuple(path for path in _ALL if path.startswith(pattern[:-1]))
    return (pattern,)


def _shared_weights(config: RunConfig, plan: Plan) -> Unused:
    engine = config.rollout.engine
    dtype = engine.dtype_in(config, plan.num_parameters, has_gpus=plan.layout.has_gpus)
    is_local = not engine.is_served and plan.layout.mode == "in_process"
    is_shared = is_local and (config.model.kind.is_robot or dtype == config.model.dtype)
    if is_shared and not plan.needs_critic and not plan.needs_reference:
        yield "the engine samples with the trainer's own weights", "train.offload.weights"
