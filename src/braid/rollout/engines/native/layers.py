"""Layers of Llama-like models in float32 on CPUs: products with packed weights, and between them compiled kernels that
read and write activations once.

Queries, keys and values are one product, as are gate and up projection. oneDNN's products are faster with weights in its own
order, so the engine has a copy of the weights, made anew when they have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from braid.models.attention import AttentionContext, LayerCall
from braid.models.causal_lm import CausalLM
from braid.models.fused import RMSNorm

from .compiled import CompiledAttention, Preparation, add_and_norm, gate, in_parallel, prepared
from .products import packed_product

_LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
_MOST_PARAMETERS = 2**29
"""Larger models gain little from it, for a large copy of the weights."""


class _Norm(NamedTuple):
    weight: Tensor
    eps: Tensor


class _Layer(NamedTuple):
    before: _Norm
    between: _Norm
    qkv: Callable[[Tensor], Tensor]
    out: Callable[[Tensor], Tensor]
    gate_up: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]
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
        self._state: list[tuple[int, int]] = []

    def update(self, *, is_new: bool) -> None:
        """Copy the weights if they have changed: `is_new`, or seen by their addresses and version counters."""
        state = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in self._lm.model.parameters()]
        if is_new or state != self._state:
            self._layers = [_layer(index, layer) for index, layer in enumerate(self._backbone.layers)]
            self._last = _norm(self._backbone.norm)
            self._head = packed_product([self._lm.head.weight], [self._lm.head.bias])
            self._state = state

    def logits(self, input_ids: Tensor, positions: Tensor, context: AttentionContext, rows: Tensor) -> Tensor:
        """Logits [R, V] after the chosen `rows` [R] of the tokens [T] at `positions` [T]. The other rows end with the last layer's
        keys and values."""
        x = F.embedding(input_ids, self._backbone.embed_tokens.weight)
        cosines, sines = self._backbone.rotary_emb(x, positions[None])
        rotary, delta = torch.cat((cosines[0], sines[0]), dim=-1), None
        for layer in self._layers:
            heads = layer.qkv(_normed(x, delta, layer.before)).view(len(x), sum(layer.num_heads), -1)
            qkv = heads.split(layer.num_heads, dim=1)
            preparation = layer.preparation._replace(rotary=rotary)
            if isinstance(context, CompiledAttention):
                mixed = context.attend_prepared(layer.call, *qkv, preparation)
            else:
                mixed = context.attend(layer.call, *prepared(*qkv, preparation))
            if layer is self._layers[-1]:
                x, mixed = x.index_select(0, rows), mixed.index_select(0, rows)
            states = _normed(x, layer.out(mixed.view(len(x), -1)), layer.between)
            delta = layer.down(_gated(layer.gate_up(states)))
        return self._lm.head.scaled(self._head(_normed(x, delta, self._last)))


def can_fuse(lm: CausalLM) -> bool:
    """Whether the model consists of layers that FusedLayers knows, without anything added to them."""
    backbone: Any = lm.backbone
    layers, parameters = getattr(backbone, "layers", ()), list(lm.model.parameters())
    return (
        lm.device.type == "cpu"
        and type(lm).hidden is CausalLM.hidden
        and bool(layers)
        and all(type(layer).__name__ in _LAYERS for layer in layers)
        and backbone.config.hidden_act == "silu"
        and 2 * backbone.rotary_emb.inv_freq.numel() == layers[0].self_attn.head_dim
        and all(isinstance(module, nn.Linear) for layer in layers for module in _products(layer))
        and all(p.dtype == torch.float32 and type(p) in (Tensor, nn.Parameter) for p in parameters)
        and sum(p.numel() for p in parameters) <= _MOST_PARAMETERS
        and not any(m._forward_hooks or m._forward_pre_hooks for m in backbone.modules())
    )


def _products(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    of_attention = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*of_attention, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _layer(index: int, layer: Any) -> _Layer:
    query, key, value, out, gate, up, down = _products(layer)
    attention = layer.self_attn
    call = LayerCall(index, attention.scaling, getattr(attention, "sliding_window", None), None)
    preparation = Preparation()
    if hasattr(attention, "q_norm"):
        norms = _norm(attention.q_norm), _norm(attention.k_norm)
        preparation = Preparation(norms[0].weight, norms[1].weight, eps=float(norms[0].eps))
    return _Layer(
        _norm(layer.input_layernorm),
        _norm(layer.post_attention_layernorm),
        _product(query, key, value),
        _product(out),
        _product(gate, up),
        _product(down),
        call,
        preparation,
        tuple(module.out_features // attention.head_dim for module in (query, key, value)),
    )


def _norm(module: Any) -> _Norm:
    """An RMSNorm of transformers or of models.fused."""
    eps = module.eps if isinstance(module, RMSNorm) else module.variance_epsilon
    return _Norm(module.weight.detach(), torch.tensor(eps))


def _product(*modules: Any) -> Callable[[Tensor], Tensor]:
    """The linear layers of one input as one product."""
    return packed_product([module.weight for module in modules], [module.bias for module in modules])


def _normed(x: Tensor, delta: Tensor | None, norm: _Norm) -> Tensor:
    """Norm of x + delta, which becomes x."""
    out = torch.empty_like(x)
    addresses = (0 if of is None else of.data_ptr() for of in (x, delta, norm.weight, out, norm.eps))
    in_parallel(add_and_norm, *addresses, *x.shape)
    return out


def _gated(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    in_parallel(gate, x.data_ptr(), out.data_ptr(), *out.shape)
    return out
