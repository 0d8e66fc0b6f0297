"""The training rows of a round on disk, every array of them, for a debugger or a comparison with another system.

    batches/round_000010.json           what the rows are and where each lies in the arrays
    batches/round_000010.safetensors    the arrays, those of all rows end to end

`write_batch` and `read_batch` mirror each other; docs/run_directory.md describes the files.
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

_ARRAYS = ("inputs", "mask", "fields")
"""Members of a Row that go into the arrays; the others into the index."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose episode a stored row is: the prompt's uid and source, the place in its group, and how it ended."""

    uid: str
    source: str
    sample: int
    status: str
    reward: float | None


def write_batch(path: Path, groups: Sequence[Group], rows: Sequence[Row]) -> None:
    """Write the `rows` of `groups` as `path`.safetensors and `path`.json. The index comes last: with it, both are whole.

    An OSError is passed on.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    index = []
    start = 0
    for row in rows:
        of = trajectories[row.trajectory]
        origin = Origin(of.prompt.uid, of.prompt.source, of.sample, str(of.status), of.reward)
        plain = {f.name: getattr(row, f.name) for f in fields(Row) if f.name not in _ARRAYS}
        index.append({"start": start, "length": len(row), **plain, "origin": asdict(origin)})
        start += len(row)
    arrays = {name: np.ascontiguousarray(np.concatenate(parts)) for name, parts in _parts(rows).items()}
    write_atomically(path.with_suffix(".safetensors"), [save(arrays)])
    write_atomically(
        path.with_suffix(".json"), [to_json({"arrays": sorted(arrays), "rows": index}, indent=1)]
    )


def read_batch(path: Path) -> list[tuple[Row, Origin]]:
    """The rows that `write_batch` stored as `path`, each with where it comes from."""
    index = json.loads(path.with_suffix(".json").read_text("utf-8"))
    arrays = load_file(path.with_suffix(".safetensors"))
    return [_row(record, arrays) for record in index["rows"]]


def _parts(rows: Sequence[Row]) -> dict[str, list[NDArray[Any]]]:
    """Array name -> its piece of each row. All rows have the same arrays."""
    parts: dict[str, list[NDArray[Any]]] = {}
    for row in rows:
        named = {
            **{f"inputs/{name}": array for name, array in row.inputs.items()},
            "mask": row.mask,
            **{f"fields/{name}": array for name, array in row.fields.items()},
        }
        for name, array in named.items():
            parts.setdefault(name, []).append(array)
    assert all(len(pieces) == len(rows) for pieces in parts.values()), "all rows have the same arrays"
    return parts


def _row(record: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> tuple[Row, Origin]:
    start, length = record.pop("start"), record.pop("length")
    part = slice(start, start + length)
    origin = Origin(**record.pop("origin"))
    row = Row(
        inputs={
            name.removeprefix("inputs/"): a[part] for name, a in arrays.items() if name.startswith("inputs/")
        },
        mask=arrays["mask"][part],
        fields={
            name.removeprefix("fields/"): a[part] for name, a in arrays.items() if name.startswith("fields/")
        },
        **record,
    )
    return row, origin
