"""AdamW and its learning rate over time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from braid.config.train import OptimizerConfig, ScheduleConfig


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) over the trainable parameters, in one pass over memory.

    Matrices decay; vectors (biases, norms, standard deviations) do not.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def lr_factor(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    """Share of the peak rate at optimizer step `step`, from 0, of `total_steps`.

    The W warmup steps have (step + 1) / (W + 1), so that none has a rate of 0 and step W is the first at the peak. The
    decay starts there and would be at `min_ratio` in step `total_steps`, the one after the last.
    """
    warmup = max(schedule.warmup_steps, round(schedule.warmup_fraction * total_steps))
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule.decay == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    falling = 1.0 - progress if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * falling


def optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Moments and step count of each parameter that has been updated, by the parameter's name. Live tensors."""
    return {name: dict(optimizer.state[p]) for name, p in module.named_parameters() if p in optimizer.state}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, module: nn.Module, state: dict[str, dict[str, Tensor]]
) -> None:
    """Take over copies of what `optimizer_state` gave. Rates, betas and decay stay those of `optimizer`'s config."""
    names = {p: name for name, p in module.named_parameters()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    saved: dict[str, Any] = optimizer.state_dict()
    saved["state"] = {
        index: {key: tensor.clone() for key, tensor in state[name].items()}
        for index, name in enumerate(order)
        if name in state
    }
    optimizer.load_state_dict(saved)
