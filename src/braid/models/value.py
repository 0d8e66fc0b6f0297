"""The critic of a language model: a separate backbone with a value head. Also a reward model in training."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from .base import Output, TrainableModel
from .batch import PackedBatch
from .causal_lm import CausalLM, set_gradient_checkpointing, spread, states_before
from .flops import Flops, flops_of
from .kernels import AttentionKind
from .lora import plain_copy
from .value_head import ValueHead, with_head
from .vision import Vision


class ValueModel(TrainableModel):
    """The value of the state before each token that the policy wrote. Initial values are 0.

    `backbone` maps token ids to hidden states. Weights are named as in a transformers token classifier with
    one label, with `head_name` as the name of its head: with `score`, AutoModelForTokenClassification loads
    them.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        *,
        head_name: str = "value_head",
        normalizes: bool = False,
        has_bias: bool = True,
        attention: AttentionKind = "auto",
        vision: Vision | None = None,
    ) -> None:
        """Takes ownership of the `backbone` of a CausalLM; use `copy_of` if it is used elsewhere.
        `normalizes` and `has_bias` as in ValueHead, `vision` as in CausalLM."""
        self.attention: AttentionKind = attention
        self.vision = vision
        self.backbone = backbone.eval()
        embedding = backbone.get_input_embeddings()
        if isinstance(embedding, nn.Embedding):
            embedding.sparse = False  # a CausalLM sets it for tied heads
        width: int = backbone.config.get_text_config(decoder=True).hidden_size
        options = {"device": backbone.device, "dtype": backbone.dtype}
        head = ValueHead(width, normalizes=normalizes, has_bias=has_bias, **options)
        self.value_head: ValueHead = head  # pyright: ignore[reportIncompatibleVariableOverride]
        self.module = with_head(backbone, backbone.base_model_prefix, head, head_name)
        self._recomputes = False

    @classmethod
    def copy_of(
        cls, policy: CausalLM, *, head_name: str = "value_head", normalizes: bool = False
    ) -> ValueModel:
        """Build a critic whose backbone is a copy of the policy's."""
        backbone = plain_copy(policy.backbone)
        shared = {"attention": policy.attention, "vision": policy.vision}
        return cls(backbone, head_name=head_name, normalizes=normalizes, **shared)

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        """`values` and `value_deviation` [T] in float32 (see TrainableModel)."""
        states, written = states_before(self.backbone, batch, self.attention, self.vision)
        return self.value_head.outputs(spread(self.value_head(states), written, batch), outputs)

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:
        return flops_of(self.backbone, self.value_head, lengths, num_outputs, recomputes=self._recomputes)

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Enable or disable recomputation of each layer in the backward pass."""
        set_gradient_checkpointing(self.backbone, enabled)
        self._recomputes = enabled
