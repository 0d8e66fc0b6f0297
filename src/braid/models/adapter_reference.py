"""The reference of a policy with adapters: the shared frozen base with copies of the initial adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .base import Output, TrainableModel
from .batch import PackedBatch
from .causal_lm import CausalLM
from .flops import Flops


class AdapterReference(TrainableModel):
    """Holds copies of the policy's current adapters and swaps them in for its forward passes. With copies of
    newly created adapters (B = 0) it equals the base model."""

    def __init__(self, policy: CausalLM) -> None:
        self._policy = policy
        copies = (nn.Parameter(t.detach().clone(), requires_grad=False) for _, t in policy.named_weights())
        self._copies = self.module = nn.ParameterList(copies)

    @torch.no_grad()
    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Any]:
        """See TrainableModel. Runs without gradients, and chooses experts itself."""
        batch = replace(batch, inputs={"input_ids": batch.inputs["input_ids"]})
        self._swap()
        try:
            return self._policy.forward(batch, outputs)
        finally:
            self._swap()

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:
        return self._policy.flops(lengths, num_outputs)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        names = (name for name, _ in self._policy.named_weights())
        return zip(names, self._copies, strict=True)

    def _swap(self) -> None:
        for (_, current), copy in zip(self._policy.named_weights(), self._copies, strict=True):
            current.data, copy.data = copy.data, current.data
