"""Floating-point operations of a model, by formula from its sizes and the lengths of rows.

A product of [m, k] and [k, n] is 2 m k n operations; element-wise work, norms and softmax are not counted. Attention counts
the pairs of positions that see each other: len (len + 1) / 2 for a causal layer, fewer with a window; kernels that compute
full squares do up to twice that. Logits are counted where the policy wrote. Every row counts whole: a prompt that a group
shares, and that is computed once, counts with each of its rows, so that the figure does not depend on how rows are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:  # it takes two seconds, and processes without a model have no need of it
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Flops:
    """`forward`: of one forward pass. `training`: of the forward and backward passes of an optimizer step.

    A backward pass is two forward passes (gradients of inputs and of weights), so that training is 3 x forward; frozen
    weights have no gradient of their own, and recomputed layers (gradient checkpointing) count once more.
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
    """Of a transformer whose `head` [D -> V] is applied at `num_outputs` positions. Experts are not counted."""
    layers = flops_of_linear(backbone, sum(lengths))
    scores = attention_flops(backbone.config.get_text_config(decoder=True), lengths)
    once_more = layers.forward + scores if recomputes else 0
    return layers + Flops(scores, 3 * scores + once_more) + flops_of_linear(head, num_outputs)


def flops_of_linear(module: nn.Module, num_positions: int) -> Flops:
    """Of all linear layers in `module`, each applied at `num_positions` positions."""
    weights = [
        w for m in module.modules() if not isinstance(m, nn.Embedding) and (w := _matrix(m)) is not None
    ]
    forward = 2 * num_positions * sum(w.numel() for w in weights)
    return Flops(
        forward, 2 * forward + 2 * num_positions * sum(w.numel() for w in weights if w.requires_grad)
    )


def attention_flops(config: PreTrainedConfig, lengths: Sequence[int]) -> int:
    """Products of queries with keys and of weights with values, in all layers."""
    heads: int = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    pairs = sum(_visible_pairs(length, window) for window in windows for length in lengths)
    return 4 * heads * width * pairs


def _visible_pairs(length: int, window: int | None) -> int:
    near = min(length, window or length)
    return near * (near + 1) // 2 + (length - near) * near


def _matrix(module: nn.Module) -> Tensor | None:
    weight = module._parameters.get("weight")
    return weight if weight is not None and weight.ndim == 2 else None
