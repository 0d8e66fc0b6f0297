"""Sequences that several ranks share among them (Ulysses, Jacobs et al. 2023, arXiv 2309.14509).

    rank 0   positions [0, n)    all heads   ── all-to-all ──   all positions   heads [0, H/N)
    rank 1   positions [n, 2n)   all heads   ── all-to-all ──   all positions   heads [H/N, 2 H/N)

All that a decoder does beside attention it does to each position alone: each of the N ranks of a group does it to its piece
of the packed positions. Around attention they exchange heads for positions. What comes out for a position is handed to all
ranks of the group, so that losses over whole rows are as they are on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from braid.errors import ModelError

from .attention import AttentionContext, LayerCall


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share sequences with this one. They are given the same batches, and pass them in the same order."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def piece(self, num_positions: int) -> slice:
        """This rank's positions, ceil(T / N) of them; the last ranks' may end behind T."""
        width = -(-num_positions // self.size)
        return slice(self.rank * width, (self.rank + 1) * width)

    def cut(self, line: Tensor) -> Tensor:
        """[T] -> this rank's piece, with zeros for what is behind T."""
        piece = self.piece(len(line))
        part = line[piece]
        return F.pad(part, (0, piece.stop - piece.start - len(part)))

    def join(self, line: Tensor) -> Tensor:
        """[T], zero but at the positions of this rank, -> [T] of all ranks.

        Its gradient is that at this rank's positions: each rank goes back from the whole loss to its own piece, and the
        gradients of weights, summed over the ranks, are those of the loss.
        """
        return _Join.apply(line, self.group)

    def attention(self, context: AttentionContext, num_positions: int) -> AttentionContext:
        """`context`, of all T positions, for a model that runs this rank's piece of them."""
        return _ExchangingAttention(self, context, num_positions)


@dataclass(frozen=True, slots=True)
class _ExchangingAttention:
    """See AttentionContext, with the positions of this rank's piece."""

    ranks: SequenceGroup
    context: AttentionContext
    num_positions: int

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        size, heads, kv_heads = self.ranks.size, query.shape[1], key.shape[1]
        if heads % size or (kv_heads % size and size % kv_heads):
            raise ModelError(
                f"train.sequence_parallel={size} shares attention heads out among {size} ranks, and layer {call.layer} has "
                f"{heads} with {kv_heads} of keys and values; give a number that divides both"
            )
        if size > kv_heads:  # each rank needs one of its own
            key, value = (x.repeat_interleave(size // kv_heads, dim=1) for x in (key, value))
        if call.sinks is not None:
            call = replace(call, sinks=call.sinks.chunk(size)[self.ranks.rank])
        group, total = self.ranks.group, self.num_positions
        parts = [_ToHeads.apply(x, group)[:total] for x in (query, key, value)]
        out = self.context.attend(call, *parts)
        padded = F.pad(out, (0, 0, 0, 0, 0, len(query) * size - total))
        return _ToPositions.apply(padded, group)


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, H, d] of this rank's positions -> [N n, H / N, d] of its heads."""
    return _exchanged(x.unflatten(1, (group.size(), -1)).transpose(0, 1), group).flatten(0, 1)


def _to_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N n, H / N, d] of this rank's heads -> [n, H, d] of its positions."""
    return _exchanged(x.unflatten(0, (group.size(), -1)), group).transpose(0, 1).flatten(1, 2)


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, ...]: the i-th part goes to rank i, and what comes from rank i is the i-th."""
    sent = x.contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return got


class _ToHeads(torch.autograd.Function):
    """An exchange moves numbers, so that the gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _to_positions(grad, ctx.group), None


class _ToPositions(torch.autograd.Function):
    """See _ToHeads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_positions(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _to_heads(grad, ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004
        line = line.clone()
        dist.all_reduce(line, group=group)
        return line

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        return grad, None
