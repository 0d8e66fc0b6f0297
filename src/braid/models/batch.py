"""A packed batch: rows laid end to end in flat tensors, with the places where one ends and the next begins."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """B rows of together T positions. Never padded.

    `inputs` and `fields` are the rows' arrays concatenated along T; `mask` [T] is True where the policy wrote.
    `lengths` [B] are on the host. `row` [T] numbers each position's row within this batch, `positions` [T] its
    place within the row. `weights` [T] is each position's share of the step's loss (see algorithms.aggregate).
    """

    inputs: dict[str, Tensor]
    mask: Tensor
    lengths: tuple[int, ...]
    fields: dict[str, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None

    @property
    def num_positions(self) -> int:
        return sum(self.lengths)

    @property
    def device(self) -> torch.device:
        return self.mask.device

    @property
    def row(self) -> Tensor:
        lengths = torch.tensor(self.lengths, device=self.device)
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.device), lengths)

    @property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(n, device=self.device) for n in self.lengths])
