"""Training: batches, optimizer, schedule, precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from braid.sections import Section, Unused
from braid.training.backends import BACKENDS, Backend
from braid.training.backends.single.kind import Single

from .backends import GradScalerConfig, OffloadConfig
from .kinds import KindOf

if TYPE_CHECKING:
    from braid.plan.plan import Plan

    from .schema import RunConfig

    BackendKind = Backend
else:
    BackendKind = KindOf(Backend, BACKENDS, "single").field()

Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class ScheduleConfig(Section):
    """Learning rate schedule over optimizer steps: linear warmup, then decay to `min_ratio * lr`."""

    unused_while = (
        ("decay", "constant", "min_ratio decay_steps"),
        ("decay", "inverse_sqrt", "decay_steps"),
    )

    decay: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """Shape after the warmup. inverse_sqrt: sqrt(W / step), with W warmup steps, at least 1 (without warmup
    sqrt(1 / (step + 1)), with steps from 0). wsd: constant, then linear over the last tenth."""
    decay_steps: PositiveInt | None = None
    """Step at which linear, cosine and wsd decay end; the last step of the run when null."""
    warmup_steps: NonNegativeInt = 0
    """Number of linear warmup steps."""
    warmup_fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Warmup as a fraction of all steps; the longer of warmup_steps and this applies."""
    start_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Learning rate at the start of the warmup, as a fraction of lr."""
    min_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Final learning rate, as a fraction of lr."""


class OptimizerConfig(Section):
    """AdamW, or plain SGD."""

    unused_while = (("kind", "sgd", "betas eps"),)

    kind: Literal["adamw", "sgd"] = "adamw"
    """Optimizer. sgd has no moments, so betas and eps have no effect."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    value_lr: PositiveFloat | None = None
    """Peak learning rate of the value head, in the critic or in the policy's model; lr when null."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Term added to the square root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to biases and norm weights."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate schedule."""

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if not (self.schedule.warmup_steps or self.schedule.warmup_fraction):
            yield "@ has no warm-up", "@.schedule.start_ratio"


class TrainConfig(Section):
    """Batches, optimizer, precision and backend of training."""

    backend: BackendKind = Single()
    """Training backend: a kind, its settings, or both; or the path of your own. Settings without a kind are
    those of single, the default."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning rate schedule."""
    steps_per_pass: PositiveInt = 1
    """Optimizer steps per pass over the round's rows (the number of mini-batches, cut by whole prompts)."""
    passes_per_round: PositiveInt = 1
    """Passes over the round's rows (PPO epochs)."""
    shuffle: bool = True
    """Shuffle the prompts over mini-batches (by the run's seed) instead of keeping rollout order."""
    micro_batch_tokens: PositiveInt = 8192
    """Maximum packed tokens per forward and backward pass; a longer row is processed alone."""
    micro_batch_rows: PositiveInt | None = None
    """Maximum rows per forward and backward pass, in addition to micro_batch_tokens; null for no limit."""
    infer_batch_tokens: PositiveInt | None = None
    """Maximum packed tokens per forward pass without gradients; micro_batch_tokens when null."""
    infer_batch_rows: PositiveInt | None = None
    """Maximum rows per forward pass without gradients; null for no limit."""
    balance_ranks: bool = True
    """Distribute rows so that ranks get about the same number of tokens; false keeps their order."""
    sequence_parallel: PositiveInt = 1
    """Sequence-parallel size (Ulysses), for fsdp, fsdp2 and deepspeed."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum global gradient norm (clipping); null for none."""
    autocast: Literal["auto", "none", "bf16", "fp16"] = "auto"
    """Dtype of matrix multiplications with fp32 weights. auto: bf16 on CUDA, none on CPU."""
    grad_scaler: GradScalerConfig | None = None
    """Dynamic loss scaling for fp16; none when null."""
    offload: OffloadConfig = OffloadConfig()
    """State moved to host memory while other roles use the device."""
    compile: bool = False
    """Apply torch.compile to the log-prob and entropy computation."""
    liger_kernels: bool = False
    """Use Liger kernels in the model (extra `liger`, GPU)."""
    count_flops: bool = False
    """Report the models' floating-point operations per second (metrics flops/*), computed from row lengths:
    training counts 3x the forward pass, plus the layers once more with gradient_checkpointing."""
    record_memory: bool = False
    """Store a memory snapshot after each round in `memory/` in the run's folder."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, about a third more time."""
    logprob_chunk_bytes: PositiveInt = 64 * 2**20
    """Size limit of the [tokens, vocabulary] logits materialised at a time, in bytes."""
    router_replay: Literal["none", "old", "rollout"] = "none"
    """Experts of a mixture of experts that the policy's update chooses, with weights from the current router.
    none: the router's own. rollout: those that the engine chose for each token when it sampled
    (arXiv 2510.11370; R3), also for log-probs before the update; the first ones of tokens that it computes
    again for a later turn (rollout.engine.prefix_caching avoids that). old: those of the policy before the
    update (arXiv 2507.18071, 5.3; R2), for which algorithm.old_logprobs is recompute."""
    router_aux_coef: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss of the policy's routers (arXiv 2101.03961, as in transformers),
    over all tokens of a step. Steps of several micro-batches or ranks take another forward pass for it, which
    counts the choices."""
    max_skipped_steps: PositiveInt = 5
    """Consecutive non-finite steps after which the run ends."""

    only_for_training: ClassVar[str] = (
        "train.{optimizer.*,steps_per_pass,passes_per_round,shuffle,max_grad_norm,micro_batch_rows} "
        "train.{micro_batch_tokens,infer_batch_rows,infer_batch_tokens,grad_scaler.*,gradient_checkpointing} "
        "train.{router_replay,router_aux_coef}"
    )

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        yield from self.backend.unused_in(config, plan, self)
        if plan.layout.mode == "in_process":
            yield "everything runs in one process", "@.balance_ranks"
        if config.run.device == "cpu":
            yield "with run.device=cpu everything is in host memory", "@.offload.{weights,optimizer}"
        if "fp16" not in (config.model.dtype, self.autocast):
            yield "fp16 is not used", "@.grad_scaler"
        if plan.verb in ("sft", "prefer"):
            yield "nothing is sampled", "@.router_replay"
            if not config.has_rollouts:
                why = f"{plan.verb} has its own optimizer and sizes"
                yield why, "@.optimizer.* @.steps_per_pass @.passes_per_round @.shuffle"
