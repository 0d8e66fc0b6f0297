"""Hydra's `defaults` lists: presets mounted at a package, found in `hydra.searchpath`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from braid.config.source import Written, read_file


def compose(path: Path, overrides: Sequence[str] = ()) -> Written:  # noqa: ARG001
    """The file with its presets below it."""
    return read_file(path)
