"""Differences between two versions of a run's config, and which of them a resume has to accept explicitly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from .source import DEFAULT, leaves, path_text

GUARDED = (
    "algorithm",
    "model",
    "critic",
    "reference",
    "data",
    "env",
    "reward",
    "sft",
    "prefer",
    "sac",
    "pipeline",
)
"""Sections that determine what is trained, and on what."""
_FREE = (
    "data.eval",
    "critic.train",
    "reference.train",
    "model.low_memory_load",
    "env.processes",
    "sft.steps",
    "sft.epochs",
    "sft.eval_data",
    "prefer.steps",
    "prefer.epochs",
    "prefer.eval_data",
)
"""Keys of these sections about evaluation, layout or length, which a resume may change."""
_OF_THE_START = ("run.resume", "run.allow_changes", "run.if_exists")
"""Keys that affect only how a run starts."""

_Loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""Reads strings only. Resumes wait for it; in Python it takes a tenth of a second."""


class Change(NamedTuple):
    """A key whose value changed from `before` to `after`, both as YAML text; None where the key is absent."""

    key: str
    before: str | None
    after: str | None

    @property
    def is_guarded(self) -> bool:
        return self.key.startswith(tuple(f"{name}." for name in GUARDED)) and not self.key.startswith(_FREE)

    def __str__(self) -> str:
        return f"{self.key}: was {self.before or 'absent'}, is now {self.after or 'absent'}"


def changes(before: str, after: str, origins: Mapping[str, str]) -> list[Change]:
    """Changes between two outputs of `config.load.to_yaml`, in key order. `origins` are those of `after`: a
    key that `before` lacks and that is null by default was added by a newer version, which is no change."""
    if before == after:
        return []
    old, new = dict(_values(before)), dict(_values(after))
    added = {key for key in new.keys() - old.keys() if new[key] == "null" and origins.get(key) == DEFAULT}
    return [
        Change(key, old.get(key), new.get(key))
        for key in dict.fromkeys([*new, *old])
        if old.get(key) != new.get(key) and key not in _OF_THE_START and key not in added
    ]


def _values(text: str) -> Iterator[tuple[str, str]]:
    tree = yaml.load(text, Loader=_Loader)
    for path, value in leaves(tree):
        yield path_text(path), str(value) if value != "" else "''"
