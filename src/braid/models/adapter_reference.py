"""The reference of a policy with adapters: the shared frozen base with copies of the initial adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .base import Output
from .batch import PackedBatch
from .causal_lm import CausalLM
from .flops import Flops


class AdapterReference:
    """Holds copies of the policy's adapters and swaps them in for its forward passes.

    The base weights are not copied. With copies of newly created adapters (B = 0) the reference equals the
    base model.
    """

    value_head = None

    def __init__(self, policy: CausalLM) -> None:
        """Copies the policy's current adapters."""
        self._policy = policy
        self._copies = {
            name: nn.Parameter(tensor.detach().clone(), requires_grad=False)
            for name, tensor in policy.named_weights()
        }
        self._module = nn.ParameterList(self._copies.values())

    @property
    def module(self) -> nn.Module:
        """Module that holds the copies."""
        return self._module

    @torch.no_grad()
    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        """See TrainableModel. Runs without gradients."""
        with self._in_place():
            return self._policy.forward(batch, outputs)

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:
        """See TrainableModel."""
        return self._policy.flops(lengths, num_outputs)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._copies.items()

    def leave_gradients_to_autograd(self) -> None:
        """See TrainableModel. No effect: the reference has no gradients."""

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        current = dict(self._policy.named_weights())
        kept = {name: tensor.data for name, tensor in current.items()}
        try:
            for name, tensor in current.items():
                tensor.data = self._copies[name].data
            yield
        finally:
            for name, tensor in current.items():
                tensor.data = kept[name]
