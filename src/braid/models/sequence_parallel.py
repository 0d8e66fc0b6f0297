"""Sequence parallelism (Ulysses, Jacobs et al. 2023, arXiv 2309.14509).

    rank 0   positions [0, n)    all heads   ── all-to-all ──   all positions   heads [0, H/N)
    rank 1   positions [n, 2n)   all heads   ── all-to-all ──   all positions   heads [H/N, 2 H/N)

Outside attention a decoder treats each position independently, so each of the N ranks of a group runs its
slice of the packed positions. Around attention the ranks exchange heads for positions. A layer that carries a
state along a sequence (models.stateful) runs all positions on every rank, which then keeps its slice.
Outputs are joined on all ranks of the group, so losses over whole rows are computed as on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from braid.errors import ModelError

from .attention import AttentionContext, LayerCall
from .indexed import IndexerCall
from .stateful import StatefulCall, each

if TYPE_CHECKING:
    from .attention import IndexedContext, StatefulContext


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share sequences. All of them run the same batches in the same order."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def piece(self, num_positions: int) -> slice:
        """This rank's slice of ceil(T / N) positions; those of the last ranks may extend past T."""
        width = -(-num_positions // self.size)
        return slice(self.rank * width, (self.rank + 1) * width)

    def cut(self, line: Tensor, padding: int = 0) -> Tensor:
        """[T, ...] -> [ceil(T / N), ...]: this rank's slice, padded past T."""
        piece = self.piece(len(line))
        part = line[piece]
        num = piece.stop - piece.start - len(part)
        return F.pad(part, (*(0, 0) * (line.ndim - 1), 0, num), value=padding)

    def gather(self, part: Tensor, num_positions: int) -> Tensor:
        """The slices [ceil(T / N), ...] of all ranks -> [T, ...]. Without gradient."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts)[:num_positions]

    def join(self, line: Tensor) -> Tensor:
        """Sum over ranks: [T], nonzero only at this rank's positions -> [T] of all ranks.

        The gradient passes through unchanged: each rank backpropagates the whole loss to its own slice, and
        the weight gradients summed over ranks are those of the loss.
        """
        line = line.clone()
        dist.all_reduce(line.detach(), group=self.group)  # in place, unseen by autograd
        return line

    def attention(self, context: AttentionContext, num_positions: int) -> AttentionContext:
        """Wrap `context`, which covers all T positions, for a model that runs this rank's slice."""
        return _ExchangingAttention(self, context, num_positions)


@dataclass(frozen=True, slots=True)
class _ExchangingAttention:
    """See AttentionContext. Takes and returns the positions of this rank's slice."""

    ranks: SequenceGroup
    context: AttentionContext
    num_positions: int

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        size, heads, kv_heads = self.ranks.size, query.shape[1], key.shape[1]
        if heads % size or (kv_heads % size and size % kv_heads):
            raise ModelError(
                f"train.sequence_parallel={size} does not divide the {heads} attention heads and {kv_heads} "
                f"key/value heads of layer {call.layer}; set it to a divisor of both"
            )
        if size > kv_heads:  # every rank needs at least one
            key, value = (x.repeat_interleave(size // kv_heads, dim=1) for x in (key, value))
        if call.sinks is not None:
            call = replace(call, sinks=call.sinks.chunk(size)[self.ranks.rank])
        group, total = self.ranks.group, self.num_positions
        # [n, H, d], this rank's positions -> [T, H / N, d], this rank's heads, and back
        parts = [
            _Exchange.apply(x.unflatten(1, (size, -1)).transpose(0, 1), group).flatten(0, 1)[:total]
            for x in (query, key, value)
        ]
        out = self.context.attend(call, *parts)
        padded = F.pad(out, (0, 0, 0, 0, 0, len(query) * size - total))
        return _Exchange.apply(padded.unflatten(0, (size, -1)), group).transpose(0, 1).flatten(1, 2)

    def mix(self, call: StatefulCall, x: Tensor) -> Any:
        # every rank sends its slice to all, and so the gradient of a slice is the sum of all ranks'
        gathered = _Exchange.apply(x.expand(self.ranks.size, *x.shape), self.ranks.group)
        context = cast("StatefulContext", self.context)
        out = context.mix(call, gathered.flatten(0, 1)[: self.num_positions])
        return each(self.ranks.cut, out)

    def choose(self, call: IndexerCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        context = cast("IndexedContext", self.context)
        return context.choose(call, *(self.ranks.gather(x, self.num_positions) for x in inputs))


class _Exchange(torch.autograd.Function):
    """All-to-all along the first axis [N, ...]: entry i is sent to rank i and replaced by the one received
    from it. This is its own inverse, and so the gradient takes it too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        got = torch.empty_like(sent := x.contiguous())
        dist.all_to_all_single(got, sent, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Exchange.forward(ctx, grad, ctx.group), None
