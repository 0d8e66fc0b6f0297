"""The critic of a language model: a backbone of its own and a linear head that reads a value off each hidden state."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import PackedAttention
from .base import Output
from .batch import PackedBatch
from .causal_lm import (
    CausalLM,
    hidden_states,
    set_gradient_checkpointing,
    spread,
    unique_weights,
    written_positions,
)


class ValueModel:
    """The value of the state before each token that the policy wrote. All values start at 0.

    Its weights have the names that transformers gives a token classifier with one label (`score` is the head), so that
    AutoModelForTokenClassification loads them.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        """Takes over the `backbone` of a CausalLM; see `copy_of` for one that is used elsewhere."""
        self._backbone = backbone.eval()
        embedding = backbone.get_input_embeddings()
        if isinstance(embedding, nn.Embedding):
            embedding.sparse = (
                False  # a CausalLM's may be: there it adds to the dense gradient of the tied head
            )
        width: int = backbone.config.get_text_config(decoder=True).hidden_size
        self._score = nn.Linear(width, 1, device=backbone.device, dtype=backbone.dtype)
        nn.init.zeros_(self._score.weight)
        nn.init.zeros_(self._score.bias)
        self._module = nn.ModuleDict({backbone.base_model_prefix: backbone, "score": self._score})

    @classmethod
    def copy_of(cls, policy: CausalLM) -> ValueModel:
        """A critic whose backbone starts with the policy's weights, in tensors of its own."""
        return cls(deepcopy(policy.backbone))

    @property
    def module(self) -> nn.Module:
        return self._module

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        """`values` [T] in float32 (see TrainableModel)."""
        if unknown := outputs - {"values"}:
            raise AssertionError(f"a value model has no {sorted(unknown)}")
        written, before = written_positions(batch)
        context = PackedAttention(batch.lengths, batch.device, batch.shared)
        states = hidden_states(self._backbone, batch.inputs["input_ids"], batch.positions, context)
        values = self._score(states.index_select(0, before)).squeeze(1).float()
        return {"values": spread(values, written, batch)}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return unique_weights(self._module)

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute each layer in the backward pass, or no longer."""
        set_gradient_checkpointing(self._backbone, enabled)
