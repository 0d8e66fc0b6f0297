"""Training: batches, optimizer, schedule, precision."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from .base import Section

Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class ScheduleConfig(Section):
    """Learning rate over optimizer steps: linear warmup, then decay to `min_ratio * lr`."""

    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warmup, reaching its end at the last step of the run."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps from 0 to the full rate."""
    warmup_fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    """The same as a share of all steps; the larger of the two counts."""
    min_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Rate at the end, as a share of lr."""


class OptimizerConfig(Section):
    """AdamW."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to biases and norm weights."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over time."""


class TrainConfig(Section):
    """How rows become optimizer steps."""

    backend: Literal["single"] = "single"
    """Training backend."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    steps_per_pass: PositiveInt = 1
    """Optimizer steps that one pass over the round's rows is cut into (mini-batches, by whole prompts)."""
    passes_per_round: PositiveInt = 1
    """Passes over the round's rows (PPO epochs)."""
    shuffle: bool = True
    """Draw the prompts of each mini-batch at random (by the run's seed) instead of in rollout order."""
    micro_batch_tokens: PositiveInt = 8192
    """Packed tokens in one forward and backward; a longer row goes alone."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global norm; null for no clipping."""
    autocast: Literal["auto", "none", "bf16"] = "auto"
    """Type of matrix products over fp32 weights: auto takes bf16 on CUDA and none on CPU."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""
    logprob_chunk_bytes: PositiveInt = 64 * 2**20
    """Largest [tokens, vocabulary] tensor that exists at a time."""
    max_skipped_steps: PositiveInt = 5
    """Non-finite steps in a row after which the run ends."""
