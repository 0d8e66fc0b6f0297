"""The optimizer, its float32 master weights, and its learning rate over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from braid.config.train import OptimizerConfig, ScheduleConfig

HALF = frozenset({torch.bfloat16, torch.float16})
"""Types in which small updates of a weight are lost: bf16 has 8 bits of precision, fp16 has 11."""


def master_weights(module: nn.Module) -> dict[Tensor, Tensor]:
    """A float32 copy of each trainable half-precision parameter, by the parameter. The optimizer updates the copies, so
    that updates below half precision add up; the parameters are set to them, rounded, after each step. From now on the
    gradients of these parameters are accumulated in float32."""
    masters: dict[Tensor, Tensor] = {}
    for p in module.parameters():
        if p.requires_grad and p.dtype in HALF:
            masters[p] = p.detach().float()
            p.grad_dtype = torch.float32
    return masters


def build_optimizer(
    module: nn.Module,
    config: OptimizerConfig,
    value_head: nn.Module | None = None,
    masters: Mapping[Tensor, Tensor] | None = None,
) -> torch.optim.Optimizer:
    """A fused optimizer over the trainable parameters, or over those in `masters` that stand for them. Matrices decay;
    vectors (biases, norms, standard deviations) do not.

    adamw: Loshchilov & Hutter 2019, arXiv 1711.05101. sgd: w <- w - rate * (g + weight_decay * w), without momentum.
    Each group's "scale" is its peak rate as a share of `lr`: `value_lr / lr` for the parameters of `value_head`, else 1.
    """
    of_head: set[int] = set()
    if value_head is not None and config.value_lr is not None:
        of_head = {id(p) for p in value_head.parameters()}
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {
            "params": [
                (masters or {}).get(p, p)
                for p in trainable
                if (p.ndim >= 2) is decays and (id(p) in of_head) is is_head
            ],
            "weight_decay": config.weight_decay if decays else 0.0,
            "scale": config.value_lr / config.lr if is_head and config.value_lr else 1.0,
        }
        for is_head in (False, True)
        for decays in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if config.kind == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, fused=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give each group its share of `rate`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


def lr_factor(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    """Share of the peak rate at optimizer step `step`, from 0, of `total_steps`.

    The W warmup steps rise from `start_ratio` in W + 1 equal parts, the first of which is taken in step 0 already; step W is
    the first at the peak. A decay starts there and would be at `min_ratio` in step `decay_steps`, or in step `total_steps`,
    the one after the last.
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
"""Share of all steps in which wsd falls (warmup, stable, decay: arXiv 2404.06395)."""
_FALLING: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "wsd": lambda progress: 1.0 - progress,
}
"""Height above min_ratio by the share of the decay that has passed."""


def optimizer_state(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Moments and step count of each tensor of `trained` that has been updated, by its name. Live tensors."""
    return {name: dict(optimizer.state[p]) for name, p in trained.items() if p in optimizer.state}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, Tensor], state: dict[str, dict[str, Tensor]]
) -> None:
    """Load copies of what `optimizer_state` returned. Rates, betas and decay stay those of `optimizer`'s config."""
    names = {p: name for name, p in trained.items()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    saved: dict[str, Any] = optimizer.state_dict()
    saved["state"] = {
        index: {key: tensor.clone() for key, tensor in state[name].items()}
        for index, name in enumerate(order)
        if name in state
    }
    optimizer.load_state_dict(saved)
