"""The optimizer, its float32 master weights, and the learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from braid.config.train import OptimizerConfig, ScheduleConfig

if TYPE_CHECKING:
    from braid.models.base import TrainableModel
    from braid.models.causal_lm import CausalLM
    from braid.models.value import ValueModel

HALF = frozenset({torch.bfloat16, torch.float16})
"""Types in which small weight updates are lost to rounding: bf16 has 8 bits of precision, fp16 has 11."""


def master_weights(module: nn.Module) -> dict[Tensor, Tensor]:
    """Create a float32 copy of each trainable half-precision parameter; returns parameter -> copy.

    The optimizer updates the copies, so that updates below half precision accumulate; after each step the
    parameters are set to the rounded copies. Also makes gradients of these parameters accumulate in float32.
    """
    masters: dict[Tensor, Tensor] = {}
    for p in module.parameters():
        if p.requires_grad and p.dtype in HALF:
            masters[p] = p.detach().float()
            p.grad_dtype = torch.float32
    return masters


def peak_rates(model: TrainableModel, config: OptimizerConfig) -> dict[Tensor, float]:
    """Peak learning rates of the parameters that have one other than `lr`: those of the value head and of the
    vision tower."""
    rates: dict[Tensor, float] = {}
    if model.value_head is not None and config.value_lr is not None:
        rates |= dict.fromkeys(model.value_head.parameters(), config.value_lr)
    if model.vision is not None and model.vision.lr is not None:
        from braid.models.vision import tower_parameters

        backbone = cast("CausalLM | ValueModel", model).backbone
        rates |= dict.fromkeys(tower_parameters(backbone).values(), model.vision.lr)
    return rates


def build_optimizer(
    module: nn.Module,
    config: OptimizerConfig,
    rates: Mapping[Tensor, float] | None = None,
    masters: Mapping[Tensor, Tensor] | None = None,
    matrices: Collection[Tensor] | None = None,
) -> torch.optim.Optimizer:
    """Build an optimizer, fused where torch can, over the trainable parameters, or over their master weights
    in `masters`. Weight decay applies to matrices, not to vectors (biases, norms, standard deviations);
    `matrices` are given where parameters are flat shards.

    adamw: Loshchilov & Hutter 2019, arXiv 1711.05101. sgd: w <- w - rate * (g + weight_decay * w), without
    momentum. `rates` has peak rates of parameters whose rate is not `lr`; each group's "scale" is its peak
    rate relative to `lr`.
    """
    rates = rates or {}
    trainable = [p for p in module.parameters() if p.requires_grad]
    decayed = {id(p) for p in ([p for p in trainable if p.ndim >= 2] if matrices is None else matrices)}
    groups: list[dict[str, Any]] = [
        {
            "params": [
                (masters or {}).get(p, p)
                for p in trainable
                if (id(p) in decayed) is decays and rates.get(p, config.lr) == rate
            ],
            "weight_decay": config.weight_decay if decays else 0.0,
            "scale": rate / config.lr,
        }
        for rate in dict.fromkeys([config.lr, *rates.values()])
        for decays in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if config.kind == "sgd":
        has_shards = any(isinstance(p, DTensor) for p in trainable)  # for which torch has no fused SGD
        return torch.optim.SGD(groups, lr=config.lr, fused=not has_shards)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of each group to `rate` times the group's scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


def lr_factor(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    """Learning rate at optimizer step `step` (from 0) of `total_steps`, relative to the peak rate.

    The W warmup steps rise from `start_ratio` in W + 1 equal increments, the first of which applies in step
    0; step W is the first at the peak. The decay starts there and reaches `min_ratio` at step `decay_steps`,
    or else at step `total_steps`, one after the last.
    """
    warmup = max(schedule.warmup_steps, round(schedule.warmup_fraction * total_steps))
    if step < warmup:
        return schedule.start_ratio + (1.0 - schedule.start_ratio) * (step + 1) / (warmup + 1)
    if schedule.decay == "inverse_sqrt":
        return max(schedule.min_ratio, math.sqrt(max(1, warmup) / (step - warmup + max(1, warmup))))
    end = schedule.decay_steps or total_steps
    start = max(warmup, end - max(1, round(_WSD_TAIL * end))) if schedule.decay == "wsd" else warmup
    progress = min(1.0, max(0, step - start) / max(1, end - start))
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * _FALLING[schedule.decay](progress)


_WSD_TAIL = 0.1
"""Fraction of the steps in which wsd decays (warmup, stable, decay: arXiv 2404.06395)."""
_FALLING: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "wsd": lambda progress: 1.0 - progress,
}
"""Decay factor between the peak (1) and min_ratio (0) as a function of the decay's progress in [0, 1]."""
