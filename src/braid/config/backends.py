"""Sections of training settings that several backends have."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from braid.sections import Section

DType = Literal["fp32", "bf16", "fp16"]


class OffloadConfig(Section):
    """State moved to host memory while other roles use the device."""

    weights: bool = False
    """Offload weights."""
    gradients: bool = False
    """Free gradient buffers (they are not copied)."""
    optimizer: bool = False
    """Offload optimizer state after each step."""


class GradScalerConfig(Section):
    """Dynamic loss scaling for fp16."""

    init_scale: PositiveFloat = 65536.0
    """Initial loss scale."""
    growth_interval: PositiveInt = 2000
    """Consecutive finite steps after which the scale doubles. An overflow halves the scale and skips the
    step, which does not count towards max_skipped_steps."""


class LoraConfig(Section):
    """Low-rank adapters (peft), trained instead of the full weights."""

    rank: PositiveInt = 32
    """Adapter rank."""
    alpha: PositiveFloat | None = None
    """Adapter scale times rank (the LoRA alpha); rank when null."""
    targets: tuple[str, ...] = ("all-linear",)
    """Layers that get an adapter (q_proj, ...); all-linear: every linear layer except the output head, and
    the weights of routed experts (gate_up_proj, down_proj), one adapter per expert; routers stay frozen. Only
    for OpenVLA may the head (lm_head) be among them."""
    path: str | None = None
    """peft adapter folder to start from; its rank, alpha and targets take precedence."""
