"""Training rows of a round on disk with all of their arrays, for debugging and comparison with other systems.

    batches/round_000010.json           index: metadata of each row and its offset in the arrays
    batches/round_000010.safetensors    the arrays, concatenated over all rows

`read_batch` is the inverse of `write_batch`; docs/run_directory.md describes the files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from braid.types import Group, Row

from .files import to_json, write_atomically

_ARRAYS = ("inputs", "mask", "decision", "policy_versions", "fields", "observations")
"""Fields of Row stored in the arrays; the others are stored in the index."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a stored row: the prompt's uid and source, and the trajectory's index in its group, status
    and reward."""

    uid: str
    source: str
    sample: int
    status: str
    reward: float | None


def write_batch(path: Path, groups: Sequence[Group], rows: Sequence[Row]) -> None:
    """Write the `rows` of `groups` to `path`.safetensors and `path`.json. The index is written last: if it
    exists, both files are complete. Raises OSError.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    index = []
    start = first = 0
    for row in rows:
        trajectory = trajectories[row.trajectory]
        origin = Origin(
            trajectory.prompt.uid,
            trajectory.prompt.source,
            trajectory.sample,
            str(trajectory.status),
            trajectory.reward,
        )
        plain = {f.name: getattr(row, f.name) for f in fields(Row) if f.name not in _ARRAYS}
        index.append({"start": start, "length": len(row), **plain, "origin": asdict(origin)})
        if row.observations:
            num = len(next(iter(row.observations.values())))
            index[-1]["observations"] = [first, num]
            first += num
        start += len(row)
    parts: dict[str, list[NDArray[Any]]] = {}
    for row in rows:
        for name, array in _arrays(row).items():
            parts.setdefault(name, []).append(array)
    assert all(len(pieces) == len(rows) for pieces in parts.values()), "all rows have the same arrays"
    arrays = {name: np.ascontiguousarray(np.concatenate(pieces)) for name, pieces in parts.items()}
    path.parent.mkdir(exist_ok=True)
    write_atomically(path.with_suffix(".safetensors"), [save(arrays)])
    write_atomically(
        path.with_suffix(".json"), [to_json({"arrays": sorted(arrays), "rows": index}, indent=1)]
    )


def read_batch(path: Path) -> list[tuple[Row, Origin]]:
    """Read the rows that `write_batch` stored at `path`, each with its origin."""
    index = json.loads(path.with_suffix(".json").read_text("utf-8"))
    arrays = load_file(path.with_suffix(".safetensors"))
    return [_row(record, arrays) for record in index["rows"]]


def _arrays(row: Row) -> dict[str, NDArray[Any]]:
    """The arrays of a row by name: `mask`, `fields/advantages`, ..."""
    named: dict[str, NDArray[Any]] = {}
    for name in _ARRAYS:
        value = getattr(row, name)
        named |= (
            {f"{name}/{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        )
    return named


def _row(record: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> tuple[Row, Origin]:
    start, length = record.pop("start"), record.pop("length")
    first, num = record.pop("observations", (0, 0))
    origin = Origin(**record.pop("origin"))

    def stored(name: str) -> Any:
        part = slice(first, first + num) if name == "observations" else slice(start, start + length)
        if name in arrays:
            return arrays[name][part]
        prefix = f"{name}/"
        return {n.removeprefix(prefix): a[part] for n, a in arrays.items() if n.startswith(prefix)}

    return Row(**{name: stored(name) for name in _ARRAYS}, **record), origin
