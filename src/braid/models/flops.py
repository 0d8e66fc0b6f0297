"""Floating-point operations of a model, computed from its sizes and the lengths of rows.

A product of [m, k] and [k, n] counts 2 m k n operations; elementwise work, norms and softmax are not counted.
Attention counts the visible pairs of positions, logits the positions that the policy wrote. Every row counts
in full, also the prompt that a group shares, so that the figure does not depend on batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:  # the import takes two seconds, and processes without a model do not need it
    from transformers import PreTrainedConfig, PreTrainedModel


RECURRENT, POSITIONWISE = ("linear_attention", "mamba", "conv"), ("mlp", "moe")
"""transformers' types of layers that do not compare pairs of positions: those that carry a state, and those
that treat each position by itself."""


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of a forward pass (`forward`), and of the forward and backward passes of an optimizer step
    (`training`).

    A backward pass costs two forward passes (gradients of inputs and of weights), so training is 3 x forward.
    Frozen weights have no weight gradient, and recomputed layers (gradient checkpointing) count once more.
    """

    forward: int = 0
    training: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.training + other.training)


def flops_of(
    backbone: PreTrainedModel,
    head: nn.Module,
    lengths: Sequence[int],
    num_outputs: int,
    *,
    recomputes: bool = False,
) -> Flops:
    """FLOPs of a transformer whose `head` [D -> V] is applied at `num_outputs` positions. Experts are not
    counted."""
    layers = flops_of_linear(backbone, sum(lengths))
    scores = attention_flops(backbone.config.get_text_config(decoder=True), lengths)
    once_more = layers.forward + scores if recomputes else 0
    return layers + Flops(scores, 3 * scores + once_more) + flops_of_linear(head, num_outputs)


def flops_of_linear(module: nn.Module, num_positions: int) -> Flops:
    """FLOPs of all linear layers in `module`, each applied at `num_positions` positions."""
    layers = (m for m in module.modules() if not isinstance(m, nn.Embedding))
    weights = [w for m in layers if (w := m._parameters.get("weight")) is not None and w.ndim == 2]
    forward = 2 * num_positions * sum(w.numel() for w in weights)
    trained = 2 * num_positions * sum(w.numel() for w in weights if w.requires_grad)
    return Flops(forward, 2 * forward + trained)


def attention_flops(config: PreTrainedConfig, lengths: Sequence[int]) -> int:
    """Forward FLOPs of attention in all layers: query-key products, and products of attention weights with
    values. Those of layers with a state, which grow with the length as those of linear layers do and are a
    few percent of them, are not counted."""
    heads: int | None = getattr(config, "num_attention_heads", None)
    if not heads:  # state-space layers only
        return 0
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    windows = [
        window if "sliding" in kind else None for kind in kinds if kind not in RECURRENT + POSITIONWISE
    ]
    pairs = sum(_visible_pairs(length, window) for window in windows for length in lengths)
    return 4 * heads * width * pairs


def _visible_pairs(length: int, window: int | None) -> int:
    near = min(length, window or length)
    return near * (near + 1) // 2 + (length - near) * near
