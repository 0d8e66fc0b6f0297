"""Layers of Llama-like models in float32 on CPUs: products with packed weights, and between them compiled
kernels that read and write activations once.

Queries, keys and values are one product, as are gate and up projection. The engine has a packed copy of the
weights, with adapters merged, made anew when they have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from braid.models.attention import AttentionContext, LayerCall
from braid.models.causal_lm import CausalLM
from braid.rollout.engines.native.cache import Block
from braid.rollout.engines.native.kind import MOST_PACKED
from braid.rollout.engines.native.known_layers import epsilon_of, has_known_layers, products_of

from .calls import Calls, Recording
from .decoding import CompiledAttention, Preparation, add_and_norm, gate, prepared
from .products import PackedProduct


class _Norm(NamedTuple):
    weight: Tensor
    eps: Tensor


class _Layer(NamedTuple):
    before: _Norm
    between: _Norm
    qkv: PackedProduct
    out: PackedProduct
    gate_up: PackedProduct
    down: PackedProduct
    call: LayerCall
    preparation: Preparation
    num_heads: tuple[int, int, int]
    """Of queries, keys and values."""


class FusedLayers:
    """The layers of a model that `can_fuse`."""

    def __init__(self, lm: CausalLM) -> None:
        self._lm, self._backbone = lm, cast("Any", lm.backbone)
        self._layers: list[_Layer] = []
        self._last: Any = None
        self._head: Any = None
        self._addresses, self._versions = list[int](), list[int]()
        self._steps: dict[tuple[int, ...], _Step] = {}
        self._memory: dict[str, Tensor] = {}

    def update(self, *, is_new: bool) -> None:
        """Copy the weights if they have changed: `is_new`, or seen by their addresses and version
        counters."""
        parameters = list(self._lm.model.parameters())
        addresses = [p.data_ptr() for p in parameters]
        versions = [0 if p.is_inference() else p._version for p in parameters]
        if addresses != self._addresses:
            self._layers = [_layer(index, layer) for index, layer in enumerate(self._backbone.layers)]
            self._last, self._head = _norm(self._backbone.norm), PackedProduct(self._lm.head)
            self.forget()
        elif is_new or versions != self._versions:
            for layer in self._layers:
                for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
                    product.load()
            self._head.load()
        self._addresses, self._versions = addresses, versions

    def logits(self, input_ids: Tensor, positions: Tensor, context: AttentionContext, rows: Tensor) -> Tensor:
        """Logits [R, V] after the chosen `rows` [R] of the tokens [T] at `positions` [T]. The other rows end
        with the last layer's keys and values."""
        x, calls = F.embedding(input_ids, self._backbone.embed_tokens.weight), Calls()
        return self._logits(self._states(x, self._rotary(x, positions), context, calls, rows))

    def step(self, inputs: Tensor, blocks: Sequence[Block]) -> Tensor:
        """Logits after a decode step: `inputs` [3, B] are tokens, their positions, and the row of each
        result. Steps of as many rows in the same buckets are recorded once."""
        tokens, positions, rows = inputs
        key = len(tokens), torch.get_num_threads(), *(id(block.bucket) for block in blocks)
        step = self._steps.get(key)
        if step is None:
            recording = Recording(self._memory)
            attention = CompiledAttention(positions, blocks)
            x = recording.empty("x", len(tokens), self._backbone.embed_tokens.weight.shape[1])
            rotary = self._rotary(x, positions)
            states = self._states(x, rotary, attention, recording)
            step = self._steps[key] = _Step(x, rotary, attention, recording, states)
        step.attention.move(positions, blocks)
        torch.index_select(self._backbone.embed_tokens.weight, 0, tokens, out=step.x)
        step.rotary.copy_(self._rotary(step.x, positions))
        step.recording.replay()
        return self._logits(step.states.index_select(0, rows))

    def forget(self) -> None:
        """Drop the recorded steps, with their memory. To be called when the cache's layout has changed."""
        self._steps.clear()
        self._memory.clear()

    def _rotary(self, x: Tensor, positions: Tensor) -> Tensor:
        """Cosines and sines [T, 2 d]."""
        cosines, sines = self._backbone.rotary_emb(x, positions[None])
        return torch.cat((cosines[0], sines[0]), dim=-1)

    def _states(
        self, x: Tensor, rotary: Tensor, context: AttentionContext, calls: Calls, rows: Tensor | None = None
    ) -> Tensor:
        """Final states [T, D], or [R, D] of `rows` [R]. Changes x."""
        delta = None
        for layer in self._layers:
            heads = layer.qkv(_normed(x, delta, layer.before, calls), calls, "qkv")
            qkv = heads.view(len(x), sum(layer.num_heads), -1).split(layer.num_heads, dim=1)
            preparation = layer.preparation._replace(rotary=rotary)
            if isinstance(context, CompiledAttention):
                mixed = context.attend_prepared(layer.call, *qkv, preparation, calls)
            else:
                mixed = context.attend(layer.call, *prepared(*qkv, preparation))
            if rows is not None and layer is self._layers[-1]:
                x, mixed = x.index_select(0, rows), mixed.index_select(0, rows)
            out = layer.out(mixed.view(len(x), -1), calls, "out")
            states = layer.gate_up(_normed(x, out, layer.between, calls), calls, "gate_up")
            delta = layer.down(_gated(states, calls), calls, "down")
        return _normed(x, delta, self._last, calls)

    def _logits(self, states: Tensor) -> Tensor:
        return self._lm.head.scaled(self._head(states, Calls(), "logits"))


class _Step(NamedTuple):
    """A recorded step: its inputs and result, and the attention whose positions change."""

    x: Tensor
    rotary: Tensor
    attention: CompiledAttention
    recording: Recording
    states: Tensor


def can_fuse(lm: CausalLM) -> bool:
    """Whether the model consists of layers that FusedLayers knows, without anything added to them."""
    parameters = list(lm.model.parameters())
    return (
        lm.device.type == "cpu"
        and has_known_layers(lm)
        and all(p.dtype == torch.float32 for p in parameters)
        and sum(p.numel() for p in parameters) <= MOST_PACKED
    )


def _layer(index: int, layer: Any) -> _Layer:
    query, key, value, out, gate, up, down = products_of(layer)
    attention = layer.self_attn
    call = LayerCall(index, attention.scaling, getattr(attention, "sliding_window", None), None)
    preparation = Preparation()
    if hasattr(attention, "q_norm"):
        norms = _norm(attention.q_norm), _norm(attention.k_norm)
        preparation = Preparation(norms[0].weight, norms[1].weight, eps=float(norms[0].eps))
    return _Layer(
        _norm(layer.input_layernorm),
        _norm(layer.post_attention_layernorm),
        PackedProduct(query, key, value),
        PackedProduct(out),
        PackedProduct(gate, up),
        PackedProduct(down),
        call,
        preparation,
        tuple(module.out_features // attention.head_dim for module in (query, key, value)),
    )


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight.detach(), torch.tensor(epsilon_of(module)))


def _normed(x: Tensor, delta: Tensor | None, norm: _Norm, calls: Calls) -> Tensor:
    """Norm of x + delta, which becomes x."""
    out = calls.empty("normed", *x.shape)
    stride = 0 if delta is None else delta.stride(0)
    calls.run(add_and_norm, *x.shape, x, delta, norm.weight, norm.eps, out, stride)
    return out


def _gated(x: Tensor, calls: Calls) -> Tensor:
    out = calls.empty("gated", len(x), x.shape[1] // 2)
    calls.run(gate, *out.shape, x, out, x.stride(0))
    return out
