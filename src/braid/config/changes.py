"""What has changed between two texts of a run's config, and which of it a resume must be told to accept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import yaml

from .load import leaves
from .source import path_text

GUARDED = ("algorithm", "model", "critic", "reference", "data", "env", "reward", "sft")
"""Sections that say what is trained, on what."""
_FREE = ("data.eval",)
_OF_THE_START = ("run.resume", "run.allow_changes", "run.if_exists")
"""Keys that say how a run starts, and nothing of what it does."""


class Change(NamedTuple):
    """A key whose value was `before` and is `after`, as written in YAML; None where there is none."""

    key: str
    before: str | None
    after: str | None

    @property
    def is_guarded(self) -> bool:
        return self.key.startswith(tuple(f"{name}." for name in GUARDED)) and not self.key.startswith(_FREE)

    def __str__(self) -> str:
        return f"{self.key} was {self.before or 'absent'} and is {self.after or 'absent'}"


def changes(before: str, after: str) -> list[Change]:
    """Those from one text of `config.load.to_yaml` to another, in the order of the keys."""
    old, new = dict(_values(before)), dict(_values(after))
    return [
        Change(key, old.get(key), new.get(key))
        for key in dict.fromkeys([*new, *old])
        if old.get(key) != new.get(key) and key not in _OF_THE_START
    ]


def _values(text: str) -> Iterator[tuple[str, str]]:
    tree = yaml.load(text, Loader=yaml.BaseLoader)  # texts and no objects
    for path, value in leaves(tree):
        yield path_text(path), str(value) if value != "" else "''"
