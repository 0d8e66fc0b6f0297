"""Which models consist of layers that braid_kernels (CPUs) and gpu_layers.py compute themselves: those of
Llama, Qwen2 and Qwen3."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from braid.models.causal_lm import CausalLM, changes_only_gradients
from braid.models.fused import RMSNorm

_LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


def has_known_layers(lm: CausalLM) -> bool:
    """Whether nothing but adapters is added to or changed in these layers."""
    backbone: Any = lm.backbone
    layers = getattr(backbone, "layers", ())
    return (
        type(lm).hidden is CausalLM.hidden
        and bool(layers)
        and all(type(layer).__name__ in _LAYERS for layer in layers)
        and backbone.config.hidden_act == "silu"
        and 2 * backbone.rotary_emb.inv_freq.numel() == layers[0].self_attn.head_dim
        and all(
            isinstance(getattr(module, "base_layer", module), nn.Linear)
            for layer in layers
            for module in products_of(layer)
        )
        and all(type(p) in (Tensor, nn.Parameter) for p in lm.model.parameters())
        and all(
            changes_only_gradients(hook)
            for module in backbone.modules()
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )
    )


def products_of(layer: Any) -> list[nn.Module]:
    """Of queries, keys, values, attention's output; gate, up and down."""
    attention, mlp = layer.self_attn, layer.mlp
    of_attention = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*of_attention, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def epsilon_of(norm: Any) -> float:
    """Of an RMSNorm of transformers or of models.fused."""
    return norm.eps if isinstance(norm, RMSNorm) else norm.variance_epsilon
