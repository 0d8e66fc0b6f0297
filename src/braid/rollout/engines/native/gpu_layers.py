"""Decode steps of Llama-like models on GPUs: the model's own linear layers, and between them kernels of
models.gpu that read and write activations once. Nothing is copied, so new weights are seen at once.

Where the engine has its own copy of the weights, those of queries, keys and values are neighbours in memory,
and so are those of gate and up projection: each of the two is one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from braid.models.causal_lm import CausalLM
from braid.models.gpu import has_kernels
from braid.models.gpu.kernels import add_and_norm, attend_cache, gate, prepare

from .cache import Block
from .known_layers import epsilon_of, has_known_layers, products_of


def can_fuse_on_gpu(lm: CausalLM) -> bool:
    """Whether GpuLayers knows the model's layers, none has an adapter, and heads have a size that its kernels
    can read."""
    return (
        has_kernels(lm.device)
        and has_known_layers(lm)
        and not lm.has_adapters
        and all(
            layer.self_attn.head_dim <= 256 and layer.self_attn.head_dim % 2 == 0 for layer in _layers(lm)
        )
    )


def _layers(lm: CausalLM) -> Any:
    backbone: Any = lm.backbone
    return backbone.layers


class GpuLayers:
    """The layers of a model that `can_fuse_on_gpu`."""

    def __init__(self, lm: CausalLM) -> None:
        self._lm = lm
        self._backbone: Any = lm.backbone
        self._joined: list[tuple[_Joined | None, _Joined | None]] = []

    def join(self) -> None:
        """Make neighbours of the weights of products that read the same input, where no trainer refers to
        them. To be called again after weights have moved."""
        self._joined.clear()
        for layer in self._backbone.layers:
            of_attention, of_mlp = products_of(layer)[:3], products_of(layer)[4:6]
            self._joined.append((_join(of_attention), _join(of_mlp)))

    def step(self, batch: Tensor, blocks: Sequence[Block]) -> Tensor:
        """Logits [N, V] of a decode step: `batch` [3, B] are tokens, their positions, and the row of each
        result. The blocks cover the batch."""
        tokens, positions, rows = batch
        x, delta = F.embedding(tokens, self._backbone.embed_tokens.weight), None
        cosines, sines = self._backbone.rotary_emb(x, positions[None])
        rotary = torch.cat((cosines[0], sines[0]), dim=-1)
        for index, layer in enumerate(self._backbone.layers):
            attention, mlp = layer.self_attn, layer.mlp
            states = _normed(x, delta, layer.input_layernorm, attention.q_proj)
            mixed = self._attend(index, attention, states, rotary, positions, blocks)
            delta = attention.o_proj(mixed.flatten(1))
            states = _normed(x, delta, layer.post_attention_layernorm, mlp.gate_proj)
            delta = mlp.down_proj(
                gate(*_products(states, self._joined[index][1], mlp.gate_proj, mlp.up_proj))
            )
        norm = self._backbone.norm
        states = add_and_norm(x, delta, norm.weight, eps=epsilon_of(norm), dtype=x.dtype)
        return self._lm.logits(states.index_select(0, rows))

    def _attend(
        self,
        index: int,
        attention: Any,
        states: Tensor,
        rotary: Tensor,
        positions: Tensor,
        blocks: Sequence[Block],
    ) -> Tensor:
        """[B, D] -> [B, Hq, d]."""
        modules = attention.q_proj, attention.k_proj, attention.v_proj
        qkv = _products(states, self._joined[index][0], *modules)
        norms = None
        if hasattr(attention, "q_norm"):
            norms = attention.q_norm.weight, attention.k_norm.weight, epsilon_of(attention.q_norm)
        outs: list[Tensor] = []
        for block in blocks:
            keys, values = block.bucket.layers[index]
            at, row = block.places, block.rows.start
            new, where = (x[at] for x in qkv), {"positions": positions[at], "row": row}
            query = prepare(*new, norms=norms, rotary=rotary[at], keys=keys, values=values, **where)
            how = {"scaling": attention.scaling, "window": getattr(attention, "sliding_window", None)}
            outs.append(attend_cache(query, keys, values, longest=block.width, **where, **how))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class _Joined(NamedTuple):
    """Weight [sum of sizes, D] and bias of several products."""

    weight: Tensor
    bias: Tensor | None
    sizes: list[int]


def _join(modules: Sequence[Any]) -> _Joined | None:
    sizes = [module.out_features for module in modules]
    joined: dict[str, Tensor | None] = {"bias": None}
    for name in ("weight", "bias"):
        parts = [getattr(module, name) for module in modules]
        if all(part is None for part in parts):
            continue
        if any(part is None or part.requires_grad for part in parts):
            return None
        whole = joined[name] = torch.cat([part.data for part in parts])
        for part, of_whole in zip(parts, whole.split(sizes), strict=True):
            part.data = of_whole
    weight = joined["weight"]
    assert weight is not None, "linear layers have weights"
    return _Joined(weight, joined["bias"], sizes)


def _products(states: Tensor, joined: _Joined | None, *modules: Any) -> Sequence[Tensor]:
    if joined is None:
        return [module(states) for module in modules]
    return F.linear(states, joined.weight, joined.bias).split(joined.sizes, dim=1)


def _normed(x: Tensor, delta: Tensor | None, norm: Any, product: Any) -> Tensor:
    """x += delta, and its norm in the type of the product that reads it."""
    return add_and_norm(x, delta, norm.weight, eps=epsilon_of(norm), dtype=product.weight.dtype)
