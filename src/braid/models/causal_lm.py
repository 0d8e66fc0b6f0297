"""A Hugging Face causal language model as training and the native engine use it: rows packed end to end, attention plugged in.

Owns the way from token ids to hidden states, logits and log-probs. Building and checking models is `loading`'s; what attends
to what is up to the attention context of each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from braid.errors import ModelError

from . import attention
from .attention import AttentionContext
from .base import Output
from .batch import PackedBatch
from .flops import Flops, flops_of
from .kernels import AttentionKind, packed_attention
from .logprobs import DEFAULT_CHUNK_BYTES, Head, token_logprobs
from .lora import has_adapters, merged_weights, named_adapters

_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_FACTORS = ("logit_scale", "lm_head_multiplier")
"""Where configs of transformers keep a number that logits are divided or multiplied by."""


class CausalLM:
    """The policy or the reference. Always in eval mode: dropout would make log-probs random.

    `model` is the Hugging Face module, whose weights the native engine shares; `config` its text config. Log-probs and
    entropies are those of softmax(logits / temperature).
    """

    value_head = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        attention: AttentionKind = "auto",
        compiles: bool = False,
    ) -> None:
        """Takes `model` over and switches its attention. `chunk_bytes` bounds each [tokens, vocabulary] tensor; `compiles`
        has torch.compile make the way from logits to log-probs."""
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelError(
                f"{type(model).__name__} has no linear output head but {type(head).__name__}; "
                "braid needs a causal language model whose logits are a linear function of its hidden states"
            )
        self.model = model.eval()
        self.config: PreTrainedConfig = model.config.get_text_config(decoder=True)
        self.temperature = temperature
        self.chunk_bytes = chunk_bytes
        self.attention: AttentionKind = attention
        self.compiles = compiles
        self._recomputes = False
        self._writes_gradients = True
        self._head = head
        self._logit_scale = _logit_scale(self.config)
        self._softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        use_packed_attention(model)
        _use_sparse_embedding_gradient(model, head)

    @property
    def module(self) -> nn.Module:
        return self.model

    @property
    def backbone(self) -> PreTrainedModel:
        """The model below its head: token ids to hidden states."""
        base = self.model.base_model
        # The language part of a larger architecture (Llama 4) has no such property of its own.
        return cast("PreTrainedModel", getattr(base, "model", base) if base is self.model else base)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._head.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    @property
    def head(self) -> Head:
        """What makes logits of hidden states; its tensors are the model's own."""
        weight = self._head.weight
        has_hooks = bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)
        accumulates = self._writes_gradients and not has_hooks
        return Head(weight, self._head.bias, self._logit_scale, self._softcap, accumulates=accumulates)

    def leave_gradients_to_autograd(self) -> None:
        """See TrainableModel."""
        self._writes_gradients = False
        embedding = self.model.get_input_embeddings()
        if isinstance(embedding, nn.Embedding):
            embedding.sparse = False

    def hidden(self, input_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Last hidden states [T, D], after the final norm, of token ids [T] at positions [T] of their sequences."""
        return hidden_states(self.backbone, input_ids, positions, context)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V] in float32, not yet divided by any temperature; without gradient."""
        return self.head.logits(hidden)

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        """`logprobs` [T] and `entropy` [T] in float32 (see TrainableModel)."""
        if unknown := outputs - {"logprobs", "entropy"}:
            raise AssertionError(f"a policy has no {sorted(unknown)}")
        states, written = states_before(self.backbone, batch, self.attention)
        logprobs, entropy = token_logprobs(
            states,
            self.head,
            batch.inputs["input_ids"].index_select(0, written),
            temperature=self.temperature,
            with_entropy="entropy" in outputs,
            chunk_bytes=self.chunk_bytes,
            compiles=self.compiles,
        )
        computed: dict[Output, Tensor | None] = {"logprobs": logprobs, "entropy": entropy}
        # sorted, since ranks that share sequences have to join them in one order
        return {name: spread(computed[name], written, batch) for name in sorted(outputs)}

    @property
    def has_adapters(self) -> bool:
        """Whether low-rank adapters are trained in place of the weights (models.lora)."""
        return has_adapters(self.model)

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:
        """See TrainableModel."""
        return flops_of(self.backbone, self._head, lengths, num_outputs, recomputes=self._recomputes)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainableModel. Of a model with adapters: the adapters, under the names of an adapter folder."""
        return named_adapters(self.model) if self.has_adapters else unique_weights(self.model)

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its name in a model folder, adapters merged in; tied ones once."""
        return merged_weights(self.model)

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute each layer in the backward pass, or no longer."""
        set_gradient_checkpointing(self.model, enabled)
        self._recomputes = enabled

    def frozen_copy(self) -> CausalLM:
        """The model as it is now, in tensors of its own that are never trained."""
        copy = CausalLM(
            deepcopy(self.model),
            temperature=self.temperature,
            chunk_bytes=self.chunk_bytes,
            attention=self.attention,
            compiles=self.compiles,
        )
        copy.model.requires_grad_(False)
        return copy


def hidden_states(
    backbone: PreTrainedModel, input_ids: Tensor, positions: Tensor, context: AttentionContext
) -> Tensor:
    """[T], [T] -> [T, D]: the backbone over one flat line of tokens, all attention left to `context`."""
    with attention.attending(context):
        out = backbone(input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
    return out.last_hidden_state[0]


def states_before(
    backbone: PreTrainedModel, batch: PackedBatch, attention: AttentionKind
) -> tuple[Tensor, Tensor]:
    """Hidden states [N, D] that predict what the policy wrote, and where it wrote that [N]. On ranks that share sequences
    these are the states that this one has."""
    written, before = written_positions(batch)
    ids, positions = batch.inputs["input_ids"], batch.positions
    context: AttentionContext = packed_attention(attention, batch)
    if (ranks := batch.sequence) is not None:
        piece = ranks.piece(batch.num_positions)
        is_here = (before >= piece.start) & (before < piece.stop)
        written, before = written[is_here], before[is_here] - piece.start
        context = ranks.attention(context, batch.num_positions)
        ids, positions = ranks.cut(ids), ranks.cut(positions)
    states = hidden_states(backbone, ids, positions, context)
    return states.index_select(0, before), written


def written_positions(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Where the mask is True, and the positions just before, whose hidden states predict them."""
    written = batch.mask.nonzero().squeeze(1)
    before = batch.previous.index_select(0, written)
    assert not (before < 0).any(), "a row's first token has nothing that predicts it"
    return written, before


def spread(values: Tensor | None, written: Tensor, batch: PackedBatch) -> Tensor:
    """[N] at the `written` positions -> [T], 0 elsewhere; of all ranks that share sequences."""
    assert values is not None, "computed only when asked for"
    line = values.new_zeros(batch.num_positions).index_copy(0, written, values)
    return line if batch.sequence is None else batch.sequence.join(line)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch every attention layer to the context of the forward pass. Raises ModelError when layers are of a kind that does
    not compute with it. `chunked_attention` is computed as full attention, which models.selfcheck lets pass for rows within
    one chunk."""
    config = model.config.get_text_config(decoder=True)
    known = ("full_attention", "sliding_attention", "chunked_attention")
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(known))
    if kinds:
        is_linear = "linear_attention" in kinds
        raise ModelError(
            f"{type(model).__name__} has layers of type {', '.join(kinds)}; "
            f"braid trains models whose layers are all {' or '.join(known[:2])}, since "
            + (
                "a linear layer's state would run from one packed row into the next"
                if is_linear
                else "it packs rows"
            )
            + "; choose another model (docs/models.md)"
        )
    attention.register()
    model.set_attn_implementation(attention.IMPLEMENTATION)


def unique_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers by name, tied ones once."""
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def set_gradient_checkpointing(model: PreTrainedModel, enabled: bool) -> None:
    """Wrap or unwrap the forward of each decoder layer. transformers' own switch works in train mode only, where dropout
    is on as well."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if enabled and not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers that can be recomputed; set train.gradient_checkpointing=false"
        )
    for layer in layers:
        layer.__dict__.pop("forward", None)
        if enabled:
            layer.forward = partial(_recomputed, layer)


def _recomputed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(layer).forward, layer)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    context = attention.current_context()

    def in_context(
        *args: Any, **kwargs: Any
    ) -> Any:  # the backward pass computes it again, maybe in another thread
        with attention.attending(context):
            return forward(*args, **kwargs)

    return checkpoint(in_context, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _use_sparse_embedding_gradient(model: PreTrainedModel, head: nn.Linear) -> None:
    """The gradient of a tied weight is the head's, which is in `.grad` first (Head.accumulates), and the embedding's, which
    autograd adds to it: without a second [V, D] tensor when it is sparse."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.sparse = embedding.weight is head.weight


def _logit_scale(config: PreTrainedConfig) -> float:
    scale = 1.0
    for name in _DIVISORS:
        scale /= getattr(config, name, None) or 1.0
    for name in _FACTORS:
        scale *= getattr(config, name, None) or 1.0
    return scale
