"""Training: batches, optimizer, schedule, precision."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from .backends import DeepSpeedConfig, FsdpConfig, GradScalerConfig, MegatronConfig, OffloadConfig
from .base import Section

Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class ScheduleConfig(Section):
    """Learning rate over optimizer steps: linear warmup, then decay to `min_ratio * lr`."""

    decay: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """Shape after the warmup. inverse_sqrt: sqrt(W / step), W the warmup's steps, at least 1 (then sqrt(1 / (step + 1)) with
    steps from 0). wsd: constant, then linear over the last tenth."""
    decay_steps: PositiveInt | None = None
    """Step at which linear, cosine and wsd reach their end; the last of the run when null."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps from 0 to the full rate."""
    warmup_fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    """The same as a share of all steps; the larger of the two counts."""
    start_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Rate that the warmup rises from, as a share of lr."""
    min_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Rate at the end, as a share of lr."""


class OptimizerConfig(Section):
    """AdamW, or plain gradient descent."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """sgd: no moments; betas and eps have no effect."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    value_lr: PositiveFloat | None = None
    """Peak learning rate of the value head, in the critic or the policy's model; lr when null."""
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

    backend: Literal["single", "fsdp", "fsdp2", "deepspeed", "megatron"] = "single"
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
    micro_batch_rows: PositiveInt | None = None
    """Rows in one forward and backward, within micro_batch_tokens; null for no such limit."""
    infer_batch_tokens: PositiveInt | None = None
    """Packed tokens in one forward pass without gradients; micro_batch_tokens when null."""
    infer_batch_rows: PositiveInt | None = None
    """Rows in one forward pass without gradients; null for no such limit."""
    balance_ranks: bool = True
    """Share rows out so that ranks get about as many tokens; false: in order."""
    sequence_parallel: PositiveInt = 1
    """Devices that share each sequence (Ulysses), for fsdp, fsdp2 and deepspeed."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global norm; null for no clipping."""
    autocast: Literal["auto", "none", "bf16", "fp16"] = "auto"
    """Type of matrix products over fp32 weights: auto takes bf16 on CUDA and none on CPU."""
    grad_scaler: GradScalerConfig | None = None
    """Loss scaling, for fp16; none when null."""
    offload: OffloadConfig = OffloadConfig()
    """What moves to host memory while other roles have the device."""
    compile: bool = False
    """torch.compile of the log-prob and entropy computation."""
    liger_kernels: bool = False
    """Liger kernels in the model (extra `liger`, GPU)."""
    count_flops: bool = False
    """Report the models' floating-point operations per second (metrics flops/*), by formula from the lengths of rows:
    training is 3 x forward, and the layers once more with gradient_checkpointing."""
    record_memory: bool = False
    """Store a snapshot of memory use after each round in the run's folder `memory/`."""
    fsdp: FsdpConfig = FsdpConfig()
    """Options of fsdp and fsdp2."""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    """Options of deepspeed."""
    megatron: MegatronConfig = MegatronConfig()
    """Options of megatron."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""
    logprob_chunk_bytes: PositiveInt = 64 * 2**20
    """Largest [tokens, vocabulary] tensor that exists at a time."""
    max_skipped_steps: PositiveInt = 5
    """Non-finite steps in a row after which the run ends."""
