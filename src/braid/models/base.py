"""What training asks of a model: per-position outputs for a packed batch. What rollout asks is up to its kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from .batch import PackedBatch
from .flops import Flops
from .value_head import ValueHead

Output = Literal["logprobs", "entropy", "values", "value_deviation"]


class TrainableModel(Protocol):
    """A policy or critic of any kind, as the training backends see it.

    `forward` returns a [T] tensor for each output asked for, aligned as types.Row says: index t speaks of the token or
    action at t given what came before. Entries where `batch.mask` is False are 0 and carry no gradient,
    except that a simulator's "values" also covers the final observation. "value_deviation" is the unit that the value head
    predicts in (ValueHead.deviation), the same at every position.
    """

    @property
    def module(self) -> nn.Module:
        """The module whose parameters are trained."""
        ...

    @property
    def value_head(self) -> ValueHead | None:
        """What gives "values", if anything does."""
        ...

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]: ...

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:
        """Of rows of `lengths` [B], of whose positions the policy wrote `num_outputs` together."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under the names a checkpoint folder has."""
        ...

    def leave_gradients_to_autograd(self) -> None:
        """Write none of them past it, for wrappers that watch parameters; takes more memory."""
        ...


@torch.no_grad()
def copy_weights(source: Mapping[str, Tensor], target: Iterable[tuple[str, Tensor]]) -> None:
    """Write into each tensor of `target` the one of its name in `source`; those without one stay as they are."""
    for name, tensor in target:
        if name in source:
            tensor.copy_(source[name])
