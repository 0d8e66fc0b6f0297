"""Rows to packed micro-batches, and per-position outputs back to rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from braid.models.batch import PackedBatch
from braid.types import Row


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of rows cut into as few batches of at most `max_tokens` positions as this order allows, nearly equal in size.

    Rows go from the longest to the shortest, so that rows of like length come together and attention pads little; a row
    longer than `max_tokens` goes alone. The cut depends on the lengths alone.
    """
    assert max_tokens > 0, "a batch holds something"
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    fewest = len(_cut(order, lengths, max_tokens))
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_cut(order, lengths, middle)) > fewest:
            low = middle + 1
        else:
            high = middle
    return _cut(order, lengths, high)


def _cut(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill one batch after the other, in order."""
    out: list[list[int]] = []
    room = 0
    for index in order:
        if not out or lengths[index] > room:
            out.append([])
            room = max_tokens
        out[-1].append(index)
        room -= lengths[index]
    return out


def pack(
    rows: Sequence[Row],
    device: torch.device,
    *,
    weights: Sequence[float] | None = None,
    with_fields: bool = True,
) -> PackedBatch:
    """The rows end to end as tensors on `device`; inputs, mask and fields keep their types.

    `weights` [B] are spread over each row's positions, in float32. All rows have the same inputs and fields.
    """
    lengths = tuple(len(row) for row in rows)
    names = rows[0].fields.keys() if with_fields else ()
    spread = None if weights is None else np.repeat(np.asarray(weights, np.float32), lengths)
    return PackedBatch(
        inputs={name: _join([row.inputs[name] for row in rows], device) for name in rows[0].inputs},
        mask=_join([row.mask for row in rows], device),
        lengths=lengths,
        fields={name: _join([row.fields[name] for row in rows], device) for name in names},
        weights=None if spread is None else torch.from_numpy(spread).to(device),
    )


def unpack(flat: Tensor, lengths: Sequence[int]) -> list[NDArray[np.float32]]:
    """[T] -> one array [length] for each row."""
    return [part.numpy() for part in flat.detach().float().cpu().split(list(lengths))]


def _join(arrays: Sequence[NDArray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device)
