"""Packing of rows into micro-batches, and of per-position outputs back into rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from braid.models.batch import PackedBatch
from braid.models.transfer import to_device
from braid.types import Row


class OfTrajectory(Protocol):
    """A row or its metadata."""

    @property
    def trajectory(self) -> int: ...


def micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    max_rows: int | None = None,
    counts: Sequence[int] | None = None,
) -> list[list[int]]:
    """Indices of rows in as few batches of at most `max_tokens` positions and `max_rows` rows as this order
    allows, nearly equal in size.

    Rows are sorted from longest to shortest, so that rows of similar length share a batch and attention pads
    little; a row longer than `max_tokens` is a batch by itself. `counts` is the number of rows that each
    index represents (default 1). The result depends only on these numbers.
    """
    assert max_tokens > 0, "max_tokens and max_rows must be positive"
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    counts = counts or [1] * len(lengths)
    most = sum(counts) if max_rows is None else max_rows

    def cut(room: int) -> list[list[int]]:
        """Fill batches of `room` positions one after the other."""
        out: list[list[int]] = []
        tokens = rows = 0
        for index in order:
            tokens, rows = tokens + lengths[index], rows + counts[index]
            if not out or tokens > room or rows > most:
                out.append([])
                tokens, rows = lengths[index], counts[index]
            out[-1].append(index)
        return out

    fewest = len(cut(max_tokens))
    return cut(1 + bisect_left(range(1, max_tokens), True, key=lambda room: len(cut(room)) <= fewest))


def trajectories_of(rows: Iterable[OfTrajectory]) -> list[list[int]]:
    """Indices of the rows of each trajectory."""
    indices: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        indices.setdefault(row.trajectory, []).append(index)
    return list(indices.values())


def grouped_micro_batches(
    rows: Sequence[Row], max_tokens: int, max_rows: int | None = None, *, whole_trajectories: bool = False
) -> list[list[int]]:
    """Micro-batches of rows (indices) in which rows with the same prompt stay together, so that `pack` stores
    the prompt once; a group that is too large is split. With `whole_trajectories` the rows of a trajectory
    are never split, even if they are too large together."""
    units: dict[object, list[list[int]]] = {}
    for together in trajectories_of(rows) if whole_trajectories else [[i] for i in range(len(rows))]:
        prompt = _prompt(rows[together[0]])
        units.setdefault((rows[together[0]].group, prompt) if prompt else together[0], []).append(together)
    pieces: list[tuple[list[int], int]] = []
    for members in units.values():
        common = _prompt_length(rows[members[0][0]])
        lengths = [sum(len(rows[i]) for i in together) - common for together in members]
        pieces.extend(
            ([i for place in piece for i in members[place]], common + sum(lengths[place] for place in piece))
            for piece in micro_batches(
                lengths, max(max_tokens - common, 1), max_rows, [len(together) for together in members]
            )
        )
    sizes, counts = [size for _, size in pieces], [len(members) for members, _ in pieces]
    batches = micro_batches(sizes, max_tokens, max_rows, counts)
    return [[index for piece in batch for index in pieces[piece][0]] for batch in batches]


def _prompt_length(row: Row) -> int:
    """Positions before the first one that the policy wrote; 0 if they cannot be shared, as with
    observations."""
    is_text = row.inputs.keys() - {"experts"} == {"input_ids"} and not row.observations
    return int(row.mask.argmax()) if is_text else 0


def _prompt(row: Row) -> bytes:
    """What rows that share a prompt have in common."""
    length = _prompt_length(row)
    if not length:
        return b""
    images = "".join(f"{start} {image.key} " for start, _, image in row.images if start < length)
    return b"".join([*(row.inputs[name][:length].tobytes() for name in sorted(row.inputs)), images.encode()])


def _shared(rows: Sequence[Row]) -> tuple[tuple[int, int], ...]:
    """PackedBatch.shared of rows: each prompt is stored with the first row that has it."""
    first: dict[bytes, int] = {}
    out: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        prompt = _prompt(row)
        source = first.setdefault(prompt, index) if prompt else index
        out.append((0, 0) if source == index else (source, _prompt_length(row)))
    return tuple(out)


def pack(
    rows: Sequence[Row],
    device: torch.device,
    *,
    weights: Sequence[float] | None = None,
    with_fields: bool = True,
) -> PackedBatch:
    """The rows concatenated, as tensors on `device`; inputs, observations, mask and fields keep their dtypes.

    `weights` [B] are repeated over each row's positions, in float32. All rows have the same inputs,
    observations and fields.
    """
    lengths = tuple(len(row) for row in rows)
    shared = _shared(rows)
    skips = [num for _, num in shared]
    stored = [length - skip for length, skip in zip(lengths, skips, strict=True)]
    names = rows[0].fields.keys() if with_fields else ()
    spread = None if weights is None else np.repeat(np.asarray(weights, np.float32), stored)

    def join(arrays: Sequence[NDArray]) -> Tensor:
        parts = [array[skip:] for array, skip in zip(arrays, skips, strict=True)]
        return torch.from_numpy(np.concatenate(parts))

    def send(arrays: Sequence[NDArray]) -> Tensor:
        return to_device(join(arrays), device)

    numbers = {trajectory: n for n, trajectory in enumerate(dict.fromkeys(row.trajectory for row in rows))}
    before = np.cumsum([0, *(row.num_decisions for row in rows[:-1])], dtype=np.int32)
    decisions = [np.where(row.mask, row.decision + num, -1) for row, num in zip(rows, before, strict=True)]

    observations = {
        name: np.concatenate([row.observations[name] for row in rows]) for name in rows[0].observations
    }
    first = (
        np.cumsum([0, *(len(next(iter(row.observations.values()))) for row in rows)]) if observations else ()
    )

    on_host = {"mask": join([row.mask for row in rows])}
    if observations:
        on_host["observed"] = join([row.observed + n for row, n in zip(rows, first, strict=False)])
    return PackedBatch(
        inputs={name: send([row.inputs[name] for row in rows]) for name in rows[0].inputs},
        mask=to_device(on_host["mask"], device),
        lengths=lengths,
        fields={name: send([row.fields[name] for row in rows]) for name in names},
        weights=None if spread is None else to_device(spread, device),
        decision=send(decisions),
        action_size=rows[0].action_size,
        observations={name: to_device(values, device) for name, values in observations.items()},
        observed=to_device(on_host["observed"], device) if observations else None,
        shared=shared if any(skips) else (),
        trajectories=tuple(numbers[row.trajectory] for row in rows),
        images=tuple(row.images for row in rows) if any(row.images for row in rows) else (),
        on_host=on_host,
    )


def unpack_choices(choices: Tensor, batch: PackedBatch) -> list[NDArray[Any]]:
    """Integers [T, ...] -> one array [length, ...] for each row, whole: with those of shared positions."""
    parts = [part.numpy() for part in choices.cpu().split(list(batch.stored))]
    shared = batch.shared or [(0, 0)] * len(parts)
    return [np.concatenate((parts[row][:num], part)) for (row, num), part in zip(shared, parts, strict=True)]


def unpack(flat: Tensor, batch: PackedBatch) -> list[NDArray[np.float32]]:
    """[T, ...] -> one array [length, ...] for each row; 0 at positions shared with an earlier row."""
    parts = [part.numpy() for part in flat.detach().float().cpu().split(list(batch.stored))]
    if not batch.shared:
        return parts
    return [
        np.pad(part, ((num, 0), *[(0, 0)] * (part.ndim - 1)))
        for part, (_, num) in zip(parts, batch.shared, strict=True)
    ]
