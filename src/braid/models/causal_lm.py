"""A Hugging Face causal language model over packed rows, used by training and the native engine: from token
ids to hidden states, logits and log-probs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from braid.errors import ModelError
from braid.types import UNKNOWN_EXPERT, TiledDivergence

from . import attention, stateful
from .attention import AttentionContext
from .base import Output, TrainableModel
from .batch import PackedBatch
from .experts import use_grouped_experts
from .flops import POSITIONWISE, RECURRENT, Flops, flops_of
from .indexed import LAYER_TYPE, use_indexers
from .kernels import AttentionKind, packed_attention
from .logprobs import DEFAULT_CHUNK_BYTES, DIVERGENCES, Head, TiledLogits, token_logprobs, top_k
from .lora import has_adapters, merged_weights, named_adapters
from .routing import ROUTING, Routing, find_routers, routed
from .transfer import to_device
from .vision import Sight, Span, Vision

_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_FACTORS = ("logit_scale", "lm_head_multiplier")
"""Config keys of transformers for constants that logits are divided or multiplied by."""


class CausalLM(TrainableModel):
    """Policy or reference model. Always in eval mode because dropout would make log-probs random.

    `model` is the Hugging Face module, whose weights the native engine shares; `config` is its text config.
    `has_states`: some layers carry a state along a sequence (models.stateful).
    Log-probs and entropies are those of softmax(logits / temperature). `reference` computes the logits from
    which divergences are measured, jensen_shannon with the weight `mixture`; None if there is no reference
    in this process. `top_k` is the number of likeliest tokens that a reference computes. `routers` are those
    of a mixture of experts; with `replays_experts` it chooses the experts of the batch's input "experts".
    """

    reference: Callable[[PackedBatch], TiledLogits] | None = None
    replays_experts = False
    mixture = 0.5
    top_k = 1
    _excluded: Tensor | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        attention: AttentionKind = "auto",
        compiles: bool = False,
    ) -> None:
        """Takes ownership of `model` and replaces its attention. `chunk_bytes` bounds the size of each
        [tokens, vocabulary] tensor; `compiles` applies torch.compile to the computation of log-probs from
        logits."""
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelError(
                f"the output head of {type(model).__name__} is {type(head).__name__}, not linear; braid "
                "needs a causal language model whose logits are a linear function of its hidden states"
            )
        self.module = self.model = model.eval()
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
        self.has_states = use_packed_attention(model)
        use_grouped_experts(model)
        self.routers = find_routers(model)
        _use_sparse_embedding_gradient(model, head)

    @property
    def backbone(self) -> PreTrainedModel:
        """The model below its head: token ids to hidden states."""
        base = self.model.base_model
        # For the language part of a larger architecture (Llama 4) `base_model` is the model itself.
        return cast("PreTrainedModel", getattr(base, "model", base) if base is self.model else base)

    @property
    def vocab_size(self) -> int:
        return self._head.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    @property
    def head(self) -> Head:
        """It shares the model's tensors."""
        weight = self._head.weight
        has_hooks = bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)
        accumulates = self._writes_gradients and not has_hooks
        bias = self._head.bias
        if self.vision is not None:  # a placeholder that the policy wrote would stand for no image
            excluded = self._excluded
            if excluded is None or (excluded.device, excluded.dtype) != (weight.device, weight.dtype):
                with torch.inference_mode(False):  # training uses what an engine has made
                    excluded = weight.new_zeros(len(weight))
                    excluded[list(self.vision.reserved)] = float("-inf")
                self._excluded = excluded
            bias = excluded if bias is None else bias + excluded
        return Head(weight, bias, self._logit_scale, self._softcap, accumulates=accumulates)

    def leave_gradients_to_autograd(self) -> None:
        self._writes_gradients = False
        embedding = self.model.get_input_embeddings()
        if isinstance(embedding, nn.Embedding):
            embedding.sparse = False

    def hidden(
        self, input_ids: Tensor, positions: Tensor, context: AttentionContext, sight: Sight | None = None
    ) -> Tensor:
        """Last hidden states [T, D], after the final norm, of token ids [T] at positions [T] in their
        sequences, with the images of `sight`."""
        return hidden_states(self.backbone, input_ids, positions, context, sight)

    def sight(self, spans: Sequence[Span]) -> Sight | None:
        """What a pass over these parts of sequences reads besides their tokens; see Vision.sight."""
        return None if self.vision is None else self.vision.sight(self.backbone, spans, self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V] in float32, before the temperature is applied; not differentiable."""
        return self.head.logits(hidden)

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Any]:
        """`logprobs`, `entropy` and one of `DIVERGENCES` [T] in float32, or `logits` alone (see
        TrainableModel), and what routers chose."""
        divergence = cast("TiledDivergence | None", next(iter(outputs & DIVERGENCES), None))
        reference = None if divergence is None else self._logits_of_reference(batch)
        with routed(routing := self._routing(batch, outputs)):
            states, written = states_before(self.backbone, batch, self.attention, self.vision)
        if "logits" in outputs:
            return {"logits": TiledLogits(states, self._lasting_head(), self.temperature)}
        chosen = {} if routing is None else self._chosen(routing, batch, outputs)
        if {"top_tokens", "top_logprobs"} & outputs:
            if self.top_k > self.vocab_size:
                raise ModelError(
                    f"the {self.top_k} likeliest tokens are compared (algorithm.kl_top_k, or "
                    f"sft.distillation.top_k), but the reference's vocabulary has {self.vocab_size} tokens; "
                    "lower it, or set it to null"
                )
            top = top_k(
                states, self.head, self.top_k, temperature=self.temperature, chunk_bytes=self.chunk_bytes
            )
            both = dict(zip(("top_tokens", "top_logprobs"), top, strict=True))
            chosen |= {name: spread(values, written, batch) for name, values in both.items()}
        outputs -= chosen.keys()
        if not outputs:
            return chosen
        targets = batch.inputs["input_ids"].index_select(0, written)
        if "logprobs_of_top" in outputs:
            targets = torch.cat((targets[:, None], self._known(batch.fields["top_tokens"][written])), 1)
        logprobs, entropy, distance = token_logprobs(
            states,
            self.head,
            targets,
            temperature=self.temperature,
            with_entropy="entropy" in outputs,
            reference=reference,
            divergence=divergence or "kl",
            mixture=self.mixture,
            chunk_bytes=self.chunk_bytes,
            compiles=self.compiles,
        )
        computed: dict[Output, Tensor | None] = {"logprobs": logprobs, "entropy": entropy}
        if "logprobs_of_top" in outputs:
            computed |= {"logprobs": logprobs[:, 0], "logprobs_of_top": logprobs[:, 1:]}
        if divergence is not None:
            computed[divergence] = distance
        # sorted: sequence-parallel ranks must join the outputs in the same order
        return chosen | {name: spread(computed[name], written, batch) for name in sorted(outputs)}

    def _routing(self, batch: PackedBatch, outputs: frozenset[Output]) -> Routing | None:
        """What this pass is to replay and record; None if nothing."""
        replayed = batch.inputs.get("experts") if self.replays_experts else None
        if replayed is None and not outputs & {"experts", "routed"}:
            return None
        assert self.routers is not None, "experts are replayed by and asked of mixtures of experts only"
        if replayed is not None and batch.sequence is not None:
            replayed = batch.sequence.cut(replayed, UNKNOWN_EXPERT)
        return Routing(replayed, keeps_logits="routed" in outputs)

    def _chosen(self, routing: Routing, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Any]:
        """The outputs that routers give; "routed" of this rank's slice of the positions."""
        assert self.routers is not None, "only their passes are recorded"
        chosen: dict[str, Any] = {}
        if "experts" in outputs:
            choices = routing.stacked(self.routers.num_experts)
            if (ranks := batch.sequence) is not None:  # not all libraries send 16 bits
                choices = ranks.gather(choices.int(), batch.num_positions).to(choices.dtype)
            chosen["experts"] = choices
        if "routed" in outputs:
            counts = batch.num_rows_at
            counts = counts if batch.sequence is None else batch.sequence.cut(counts)
            chosen["routed"] = routing.statistics(counts, self.routers.num_experts)
        return chosen

    def _logits_of_reference(self, batch: PackedBatch) -> TiledLogits:
        assert self.reference is not None, "the plan puts a reference into the policy's process"
        logits = self.reference(batch)
        if logits.vocab_size != self.vocab_size:
            raise ModelError(
                "algorithm.kl_estimator or sft.distillation: it compares probabilities of the same tokens, "
                f"but the policy's vocabulary has {self.vocab_size} tokens and the reference's "
                f"{logits.vocab_size}; set reference.path to a model with the policy's vocabulary, or "
                "algorithm.kl_estimator to k1, k2 or k3"
            )
        return logits

    def _known(self, tokens: Tensor) -> Tensor:
        """The tokens as indices. Raises ModelError if one is beyond the vocabulary."""
        if len(tokens) and (largest := int(tokens.max())) >= self.vocab_size:
            raise ModelError(
                f"kl_top_k or sft.distillation.top_k: token {largest} is one of the reference's likeliest, "
                f"but the policy's vocabulary has {self.vocab_size} tokens; set reference.path to a model "
                "with the policy's tokenizer"
            )
        return tokens.long()

    def _lasting_head(self) -> Head:
        """The head for use after the forward pass: a copy if a wrapper frees gathered weights after it."""
        head = self.head
        if self._writes_gradients:
            return head
        bias = None if head.bias is None else head.bias.detach().clone()
        return replace(head, weight=head.weight.detach().clone(), bias=bias)

    def prepare_routers(self, key: str) -> None:
        """Allow to replay choices of experts, and to read the routers' logits, as the config's `key` asks.
        Raises ModelError for a model without experts, or whose routers are of an unknown kind."""
        if self.routers is None:
            raise ModelError(
                f"{key}: {type(self.model).__name__} has no experts of transformers' interface for them, so "
                "it does nothing; set it to its default, or choose a mixture of experts"
            )
        self.routers.prepare(key)
        self.num_experts = self.routers.num_experts

    def check_balance(self) -> None:
        """Raise ModelError if there is no load-balancing loss of the model's routers."""
        if self.routers is None or not self.routers.has_logits:
            raise ModelError(
                f"train.router_aux_coef: {type(self.model).__name__} has no load-balancing loss in "
                "transformers, or its routers do not choose by a softmax, of which it is; set it to 0"
            )

    @property
    def has_adapters(self) -> bool:
        """Whether low-rank adapters are trained instead of the weights (models.lora)."""
        return has_adapters(self.model)

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:
        return flops_of(self.backbone, self._head, lengths, num_outputs, recomputes=self._recomputes)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainableModel. With adapters: only the adapters, under the names used in an adapter folder."""
        return named_adapters(self.model) if self.has_adapters else super().named_weights()

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under their names in a model folder, with adapters merged in; tied ones once."""
        return merged_weights(self.model)

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Enable or disable recomputation of each layer in the backward pass."""
        set_gradient_checkpointing(self.model, enabled)
        self._recomputes = enabled

    def frozen_copy(self) -> CausalLM:
        """Copy of the current model in separate, frozen tensors."""
        copy = deepcopy(self)
        copy.replays_experts = False
        copy.module.requires_grad_(False)
        return copy


_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_MISSING = {
    "compressed_sparse_attention": "it attends to compressed entries of overlapping windows",
    "heavily_compressed_attention": "it attends to compressed entries of overlapping windows",
}
"""Types of layers that are refused, and why."""
_USES_CONTEXT, _PADDING = "uses_attention_context", "padding_without_gradient"


def hidden_states(
    backbone: PreTrainedModel,
    input_ids: Tensor,
    positions: Tensor,
    context: AttentionContext,
    sight: Sight | None = None,
) -> Tensor:
    """[T], [T] -> [T, D]: run the backbone over a flat sequence of tokens with the attention of `context`
    and the images of `sight`. Raises ModelError if transformers would use another one, in which all tokens
    are one sequence."""
    chosen = backbone.config._attn_implementation
    if chosen != attention.IMPLEMENTATION and getattr(backbone, _USES_CONTEXT, False):
        raise ModelError(
            f"the config of {type(backbone).__name__} has been set to the attention {chosen!r}, with which "
            "the sequences of a batch would attend to each other; don't share it with another model: pass "
            "that one a copy.deepcopy of the config"
        )
    places, images = positions.unsqueeze(0), dict[str, Any]()
    if sight is not None:
        places = places if sight.coordinates is None else sight.coordinates.unsqueeze(1)
        images = {} if sight.features is None else {"mm_encoder_outputs": {"image": sight.features}}
        if sight.blocks is not None:
            cast("Any", context).see(sight.blocks)
    with attention.attending(context):
        out = backbone(input_ids=input_ids.unsqueeze(0), position_ids=places, use_cache=False, **images)
    return out.last_hidden_state[0]


def states_before(
    backbone: PreTrainedModel, batch: PackedBatch, attention: AttentionKind, vision: Vision | None = None
) -> tuple[Tensor, Tensor]:
    """Hidden states [N, D] that predict the policy's tokens, and the positions [N] of these tokens. With
    sequence parallelism, only those of this rank's slice."""
    written, before = written_positions(batch)
    ids, positions = batch.inputs["input_ids"], batch.positions
    context: AttentionContext = packed_attention(attention, batch)
    if (ranks := batch.sequence) is not None:
        piece = ranks.piece(batch.num_positions)
        is_here = (before >= piece.start) & (before < piece.stop)
        written, before = written[is_here], before[is_here] - piece.start
        context = ranks.attention(context, batch.num_positions)
        ids, positions = ranks.cut(ids), ranks.cut(positions)
    sight, zero = None, None
    if batch.images:
        assert vision is not None, "the plan refuses images for models that read only text"
        begin = [num for _, num in batch.shared] or [0] * len(batch.lengths)
        sight = vision.sight(backbone, list(map(Span, begin, batch.lengths, batch.images)), batch.device)
    if batch.runs_tower and (sight is None or sight.features is None):
        # before the language model, as on other ranks: passes gather layers in one order
        assert vision is not None, "only a model with a tower is asked to run it"
        zero = vision.unseen(backbone, batch.device)
    states = hidden_states(backbone, ids, positions, context, sight)
    states = states.index_select(0, to_device(before, batch.device))
    return states if zero is None else states + zero.to(states.dtype), to_device(written, batch.device)


def written_positions(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Positions of the policy's tokens, and the preceding ones, whose hidden states predict them; in host
    memory."""
    written = batch.host("mask").nonzero().squeeze(1)
    before = batch.previous.index_select(0, written)
    assert not (before < 0).any(), "the first token of a row has no predecessor"
    return written, before


def spread(values: Tensor | None, written: Tensor, batch: PackedBatch) -> Tensor:
    """Scatter `values` [N, ...] to the `written` positions of a zero tensor [T, ...]; joined over
    sequence-parallel ranks."""
    assert values is not None, "the output was not requested"
    line = values.new_zeros((batch.num_positions, *values.shape[1:])).index_copy(0, written, values)
    return line if batch.sequence is None else batch.sequence.join(line)


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Make every layer that mixes positions use the context of the forward pass; returns whether some of them
    carry a state (models.stateful). Raises ModelError if the model has layers of an unsupported type.
    `chunked_attention` is computed as full attention, which models.selfcheck accepts for rows within one
    chunk."""
    kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    name = type(model).__name__
    if missing := [f"{kind} ({why})" for kind, why in _MISSING.items() if kind in kinds]:
        raise ModelError(
            f"{name} has layers of type {', '.join(missing)}, which braid does not support; choose another "
            "model (docs/models.md)"
        )
    if unknown := sorted(kinds - {*_ATTENTION, LAYER_TYPE, *POSITIONWISE, *stateful.LAYER_TYPES}):
        raise ModelError(
            f"{name} has layers of type {', '.join(unknown)}, which braid does not know: it packs rows, and "
            "a layer that mixes positions by itself would let one packed row leak into the next; choose "
            "another model (docs/models.md)"
        )
    stateful.use_step_limits(model)
    has_states = stateful.intercept(model, attention.CONTEXT.get) > 0
    if not has_states and (recurrent := sorted(kinds.intersection(RECURRENT))):
        raise ModelError(
            f"{name} has layers of type {', '.join(recurrent)} whose code takes no cache for their state, as "
            "transformers' other layers of this type do, so braid cannot reset it between packed rows; "
            "choose another model (docs/models.md)"
        )
    if not use_indexers(model, attention.CONTEXT.get) and LAYER_TYPE in kinds:
        raise ModelError(
            f"{name} has layers of type {LAYER_TYPE} with an indexer of another form than DeepSeek-V3.2's, "
            "which braid does not compute for packed rows; choose another model (docs/models.md)"
        )
    attention.register()
    # A model that can't only warns; models.selfcheck refuses it.
    attention.use(model, attention.IMPLEMENTATION)
    setattr(model.base_model, _USES_CONTEXT, model.config._attn_implementation == attention.IMPLEMENTATION)
    return has_states


def set_gradient_checkpointing(model: PreTrainedModel, enabled: bool) -> None:
    """Wrap or unwrap the forward of each decoder layer. transformers' own gradient checkpointing works only
    in train mode, which also enables dropout."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if enabled and not layers:
        raise ModelError(
            f"{type(model).__name__} does not support gradient checkpointing; set "
            "train.gradient_checkpointing=false"
        )
    for layer in layers:
        layer.__dict__.pop("forward", None)
        if enabled:
            layer.forward = partial(_recomputed, layer)


def _recomputed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(layer).forward, layer)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # recomputed in the backward pass, possibly in another thread
    in_context = routed(ROUTING.get())(attention.attending(attention.CONTEXT.get())(forward))
    return checkpoint(in_context, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _use_sparse_embedding_gradient(model: PreTrainedModel, head: nn.Linear) -> None:
    """Make the gradient of a tied embedding sparse. The head writes its gradient to `.grad` first
    (Head.accumulates), and autograd adds the embedding's; a sparse one needs no second [V, D] tensor."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.sparse = embedding.weight is head.weight
        if embedding.sparse and embedding.padding_idx is not None:
            # PyTorch drops the padding from a sparse gradient by a mask, which a GPU's host has to wait for
            embedding.register_forward_hook(partial(_without_gradient_of, embedding.padding_idx))
            setattr(embedding, _PADDING, embedding.padding_idx)
            embedding.padding_idx = None


def padding_without_gradient(model: PreTrainedModel) -> int | None:
    """The token whose embedding receives no gradient, if there is one."""
    embedding = model.get_input_embeddings()
    return getattr(embedding, _PADDING, getattr(embedding, "padding_idx", None))


def _without_gradient_of(padding: int, _: nn.Module, arguments: tuple[Tensor], embedded: Tensor) -> Tensor:
    """A forward hook of an embedding: embeddings [..., D] of token ids [...]."""
    if not torch.is_grad_enabled():
        return embedded
    return torch.where((arguments[0] == padding).unsqueeze(-1), embedded.detach(), embedded)


def changes_only_gradients(hook: object) -> bool:
    """Whether a module with this hook computes what it would without."""
    return isinstance(hook, partial) and hook.func is _without_gradient_of


def _logit_scale(config: PreTrainedConfig) -> float:
    scale = 1.0
    for name in _DIVISORS:
        scale /= getattr(config, name, None) or 1.0
    for name in _FACTORS:
        scale *= getattr(config, name, None) or 1.0
    return scale
