"""Discounted sums over the positions of rows that are concatenated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rows_of_positions(lengths: Sequence[int], mask: Tensor) -> Tensor:
    """The row index of each position [T]."""
    return torch.repeat_interleave(torch.tensor(lengths, dtype=torch.long, device=mask.device))


def is_last_of_row(row: Tensor) -> Tensor:
    """Whether a position is the last of its row, among the given positions."""
    is_last = torch.ones_like(row, dtype=torch.bool)
    is_last[:-1] = row[1:] != row[:-1]
    return is_last


def discounted_suffix_sums(x: Tensor, decay: Tensor, longest: int) -> Tensor:
    """y_t = x_t + decay_t * y_{t+1}, for runs of at most `longest` positions, each ended by a decay of 0.

    After the pass with shift s, x_t holds the sum over 2s positions and decay_t the product of 2s decays
    (Hillis & Steele 1986, parallel prefix).
    """
    x, decay = x.clone(), decay.clone()
    shift = 1
    while shift < longest:
        x[:-shift] = x[:-shift] + decay[:-shift] * x[shift:]
        decay[:-shift] = decay[:-shift] * decay[shift:]
        shift *= 2
    return x
