"""SkyRL's models (`trainer.policy`, `critic`, `ref`) and backends: optimizers, FSDP, DeepSpeed, Megatron,
adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .compat import (
    Apply,
    Became,
    Idle,
    Implied,
    NoEffect,
    Rule,
    Source,
    Unsupported,
    implied,
    no_effect,
    only,
    unsupported,
    when,
)
from .skyrl_facts import (
    NATIVE_TRAIN,
    NO_REWARD_WORKERS,
    Role,
    everywhere,
    is_colocated,
    is_distributed,
    not_backend,
    off_only,
    without_critic,
    without_reference,
)
from .values import (
    ANY,
    BOOL,
    COUNT,
    NATURAL,
    NON_NEGATIVE,
    POSITIVE,
    SHARE,
    TEXT,
    choice,
    either,
    integer,
    list_of,
    nullable,
)

_DTYPES = choice("bf16", "fp32", "fp16")


# --- models and backends -----------------------------------------------------------------------------------------


def _strategy(value: str, source: Source) -> Became:
    if source.backend is not None:
        return no_effect(f"overridden by --backend {source.backend}")
    return everywhere("backend")(value, source)


def _clip(value: float, _: Source) -> float | None:
    return value or None


def _schedule(native: str) -> Any:
    names = {
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
        "inverse_sqrt": "inverse_sqrt",
    }

    def convert(value: str, _: Source) -> Became:
        if value == "constant":
            return Became(
                {
                    f"{native}.optimizer.schedule.decay": "constant",
                    f"{native}.optimizer.schedule.warmup_steps": 0,
                }
            )
        if value not in names:
            return unsupported("use constant_with_warmup, linear, cosine or inverse_sqrt")
        return Became({f"{native}.optimizer.schedule.decay": names[value]})

    return convert


_SCHEDULES = choice("constant_with_warmup", "constant", "linear", "cosine", "inverse_sqrt", "cosine_with_restarts",
                    "polynomial", "reduce_lr_on_plateau", "cosine_with_min_lr", "warmup_stable_decay")  # fmt: skip


def _offload(native: str) -> Any:
    def convert(value: bool, source: Source) -> Became:
        if is_distributed(source) and not is_colocated(source):
            return no_effect("without colocate_all no other role uses the optimizer's devices")
        return Became({f"{native}.offload.optimizer": value})

    return convert


def _optimizer(role: Role, lr: float) -> tuple[Rule, ...]:
    """The rules of `trainer.ROLE.optimizer_config`."""
    at, native = f"trainer.{role}.optimizer_config", NATIVE_TRAIN[role]
    idle = (without_critic,) if role == "critic" else ()
    return (
        Apply(f"{at}.lr", f"{native}.optimizer.lr", POSITIVE, when(*idle), default=lr),
        Apply(f"{at}.adam_betas", f"{native}.optimizer.betas", list_of(SHARE, length=2), when(*idle),
            default=[0.9, 0.999]),
        Apply(f"{at}.weight_decay", f"{native}.optimizer.weight_decay", NON_NEGATIVE, when(*idle), default=0.01,
            note="decoupled (AdamW), though SkyRL calls it L2; biases and norm weights are excluded"),
        Apply(f"{at}.max_grad_norm", f"{native}.max_grad_norm", NON_NEGATIVE, when(*idle, then=_clip), default=1.0,
            note="0: no clipping"),
        Apply(f"{at}.offload_after_step", f"{native}.offload.optimizer", BOOL, when(*idle, then=_offload(native)),
            default=True, note="where training and generation share devices"),
        Apply(f"{at}.num_warmup_steps", f"{native}.optimizer.schedule.warmup_steps", NATURAL, when(*idle),
            note="optimizer steps; trainer.num_warmup_steps sets it for both models"),
        Apply(f"{at}.scheduler", f"{native}.optimizer.schedule.decay", _SCHEDULES,
            when(*idle, then=_schedule(native)), default="constant_with_warmup"),
    )  # fmt: skip


_IDLE: Mapping[Role, tuple[Idle, ...]] = {
    "policy": (),
    "critic": (without_critic,),
    "ref": (without_reference,),
}


def _fsdp(role: Role, *, cpu_offload: bool) -> tuple[Rule, ...]:
    """The rules of `trainer.ROLE.fsdp_config`."""
    at, native = f"trainer.{role}.fsdp_config", f"{NATIVE_TRAIN[role]}.fsdp"
    both, second = (not_backend("fsdp", "fsdp2"), *_IDLE[role]), (not_backend("fsdp2"), *_IDLE[role])
    return (
        Apply(f"{at}.cpu_offload", f"{native}.cpu_offload", BOOL, when(*both), default=cpu_offload,
            note="parameters and optimizer live on the CPU; unlike offload_after_step, which moves them after each "
            "step"),
        Apply(f"{at}.reshard_after_forward", f"{native}.reshard_after_forward",
            either(BOOL, integer(1, samples=(1, 2))), when(*second), default=True),
        Apply(f"{at}.fsdp_size", f"{native}.size", either(COUNT, choice(-1)),
            when(*both, then=lambda v, _: None if v < 0 else v), default=-1, note="-1 for all ranks"),
        Apply(f"{at}.mixed_precision.param_dtype", f"{native}.param_dtype", _DTYPES, when(*both), default="bf16"),
        Apply(f"{at}.mixed_precision.reduce_dtype", f"{native}.reduce_dtype", _DTYPES, when(*both), default="fp32"),
        Apply(f"{at}.mixed_precision.buffer_dtype", f"{native}.buffer_dtype", _DTYPES, when(*both), default="fp32"),
        NoEffect(f"{at}.wrap_policy.*", ANY, "each layer is always wrapped as a unit"),
    )  # fmt: skip


_DEEPSPEED_USUAL: Mapping[str, Any] = {
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "prescale_gradient": False,
    "data_types": {"grad_accum_dtype": "fp32"},
}
"""DeepSpeed keys that change results -> the only value that braid supports."""
_DEEPSPEED_SPEED = frozenset([
    "sub_group_size", "reduce_bucket_size", "round_robin_gradients", "disable_trace_cache", "wall_clock_breakdown",
])  # fmt: skip


def _deepspeed_own(value: Any, source: Source) -> Became:
    key = source.at.rpartition(".")[2]
    if key in _DEEPSPEED_SPEED or key.startswith("stage3_"):
        return no_effect("it affects only DeepSpeed's memory and speed; braid sets its own value")
    if key == "torch_autocast":
        return no_effect("the dtype of matrix products is set by trainer.bf16")
    if value == "auto" or (key in _DEEPSPEED_USUAL and value == _DEEPSPEED_USUAL[key]):
        return implied("braid always configures DeepSpeed this way")
    return unsupported("only the stage, zero_hpz_partition_size and CPU offload of DeepSpeed are supported")


def _on_cpu(value: str, _: Source) -> bool:
    return value == "cpu"


def _deepspeed(role: Role) -> tuple[Rule, ...]:
    """The rules of `trainer.ROLE.deepspeed_config`, which refers to one of the top-level groups."""
    at, native = f"trainer.{role}.deepspeed_config", f"{NATIVE_TRAIN[role]}.deepspeed"
    idle, zero = (not_backend("deepspeed"), *_IDLE[role]), f"{at}.zero_optimization"
    return (
        Apply(f"{zero}.stage", f"{native}.stage", choice(3), when(*idle), default=3),
        Apply(f"{zero}.zero_hpz_partition_size", f"{native}.hpz_partition_size", COUNT, when(*idle), default=1),
        Apply(f"{zero}.offload_param.device", f"{native}.cpu_offload", choice("none", "cpu"),
            when(*idle, then=_on_cpu)),
        Apply(f"{zero}.offload_optimizer.device", f"{native}.cpu_offload", choice("none", "cpu"),
            when(*idle, then=_on_cpu)),
        *(NoEffect(f"{zero}.offload_{what}.*", ANY, "it affects only the speed of copies between CPU and GPU") for what in
            ("param", "optimizer")),
        Apply(f"{zero}.*", "", ANY, when(*idle, then=_deepspeed_own)),
        NoEffect(f"{at}.gradient_clipping", ANY, "overridden by optimizer_config.max_grad_norm, as in SkyRL"),
        Apply(f"{at}.*", "", ANY, when(*idle, then=_deepspeed_own)),
    )  # fmt: skip


def _groups() -> tuple[Rule, ...]:
    """The rules of `deepspeed_config.train` and `.eval`, which `${...}` interpolates into the model
    settings."""
    why = "a template, used where ${deepspeed_config.train} or ${deepspeed_config.eval} refers to it"
    paths = [
        f"deepspeed_config.{group}{part}"
        for group in ("train", "eval")
        for part in ("", ".zero_optimization")
    ]
    offloads = [f"{path}.offload_{what}.*" for path in paths[1::2] for what in ("param", "optimizer")]
    known = [f"{path}.{key}" for path in paths[1::2] for key in ("stage", "zero_hpz_partition_size")]
    return tuple(NoEffect(path, ANY, why) for path in (*known, *(f"{path}.*" for path in paths), *offloads))


_DISPATCH = choice("alltoall", "allgather", "flex")
_RECOMPUTE = nullable(choice("full", "selective"))


def _tensor_parallel(native: str) -> Any:
    return lambda v, _: Became({f"{native}.tensor_parallel": v, f"{native}.sequence_parallel": v > 1})


_MEGATRON_USUAL: Mapping[str, Any] = {
    "torch_profiler_config.enable": False,
    "lora_config.lora_type": "lora",
    "optimizer_config_kwargs.overlap_cpu_optimizer_d2h_h2d": False,
    "optimizer_config_kwargs.use_precision_aware_optimizer": False,
    "optimizer_config_kwargs.optimizer_cpu_offload": False,
    "optimizer_config_kwargs.optimizer_offload_fraction": 0.0,
    "transformer_config_kwargs.recompute_modules": ["core_attn"],
}
"""Pass-through keys of `megatron_config` -> the value that has no effect."""
_MEGATRON_PARTS = ("optimizer_config_kwargs", "model_config_kwargs", "torch_profiler_config", "hf_export_config",
                   "lora_config", "transformer_config_kwargs", "ddp_config")  # fmt: skip


def _passed_on(value: Any, source: Source) -> Became:
    key = source.at.partition("megatron_config.")[2]
    if value in (None, {}, []) or (key in _MEGATRON_USUAL and value == _MEGATRON_USUAL[key]):
        return no_effect("the default value, which turns the feature off")
    return unsupported("use the options of train.megatron in docs/config.md")


def _megatron(role: Role) -> tuple[Rule, ...]:
    """The rules of `trainer.ROLE.megatron_config` (later releases)."""
    at, native = f"trainer.{role}.megatron_config", f"{NATIVE_TRAIN[role]}.megatron"
    idle = (not_backend("megatron"), *_IDLE[role])
    kwargs, ddp = f"{at}.transformer_config_kwargs", f"{at}.ddp_config"
    return (
        Apply(f"{at}.tensor_model_parallel_size", f"{native}.tensor_parallel", COUNT,
            when(*idle, then=_tensor_parallel(native)), default=1),
        Apply(f"{at}.pipeline_model_parallel_size", f"{native}.pipeline_parallel", COUNT, when(*idle), default=1),
        Apply(f"{at}.context_parallel_size", f"{native}.context_parallel", COUNT, when(*idle), default=1),
        Apply(f"{at}.expert_model_parallel_size", f"{native}.expert_parallel", COUNT, when(*idle), default=1),
        Apply(f"{at}.expert_tensor_parallel_size", f"{native}.expert_tensor_parallel", nullable(COUNT),
            when(*idle)),
        Apply(f"{at}.moe_token_dispatcher_type", f"{native}.moe_token_dispatcher", _DISPATCH, when(*idle),
            default="alltoall"),
        Apply(f"{at}.moe_grouped_gemm", f"{native}.moe_grouped_gemm", BOOL, when(*idle), default=True),
        Apply(f"{ddp}.overlap_grad_reduce", f"{native}.overlap_grad_reduce", BOOL, when(*idle), default=False),
        Apply(f"{ddp}.overlap_param_gather", f"{native}.overlap_param_gather", BOOL, when(*idle), default=False),
        NoEffect(f"{ddp}.grad_reduce_in_fp32", BOOL, "gradients are always reduced in fp32"),
        NoEffect(f"{ddp}.average_in_collective", BOOL,
            "denominators are global, so it does not change results"),
        Apply(f"{kwargs}.recompute_granularity", f"{native}.recompute_granularity", _RECOMPUTE,
            when(*idle, then=lambda v, _: v or "off"), default="full"),
        Apply(f"{kwargs}.recompute_method", f"{native}.recompute_method", nullable(choice("block", "uniform")),
            when(*idle), default="uniform"),
        Apply(f"{kwargs}.recompute_num_layers", f"{native}.recompute_num_layers", nullable(COUNT), when(*idle),
            default=1),
        Apply(f"{kwargs}.gradient_accumulation_fusion", f"{native}.transformer.gradient_accumulation_fusion", BOOL,
            when(*idle), default=False),
        NoEffect(f"{at}.empty_cuda_cache", BOOL, "the backend frees memory itself"),
        NoEffect(f"{at}.torch_profiler_config.ranks", ANY, "for the profiler only"),
        NoEffect(f"{at}.torch_profiler_config.save_path", ANY, "for the profiler only"),
        *(Apply(f"{at}.{part}*", "", ANY, when(*idle, then=_passed_on)) for part in
            ("", *(f"{part}." for part in _MEGATRON_PARTS))),
    )  # fmt: skip


def _has_adapters(source: Source) -> str:
    return "" if source.get("trainer.policy.model.lora.rank") > 0 else "lora.rank=0 trains all weights"


def _targets(value: Any, _: Source) -> list[str]:
    return [value] if isinstance(value, str) else value


def _older_targets(value: Any, source: Source) -> Any:
    return (
        no_effect("null: set by policy.model.lora.target_modules")
        if value is None
        else _targets(value, source)
    )


_LORA = "trainer.policy.model.lora"
MODELS: tuple[Rule, ...] = (
    Apply("trainer.strategy", "train.backend", choice("fsdp", "fsdp2", "deepspeed", "megatron"), _strategy,
        default="fsdp2", note="fsdp is FSDP1, as in the first release; in releases from 2026 it is FSDP2"),
    Implied("trainer.sequence_parallel_backend", choice("ulysses"), "sequence parallelism is always Ulysses"),
    Apply("trainer.policy.model.path", "model.path", TEXT, default="Qwen/Qwen2.5-1.5B-Instruct",
        note="trained weights are fp32, as in SkyRL"),
    Apply("trainer.critic.model.path", "critic.path", nullable(TEXT), when(without_critic),
        note="the value head is initialized randomly; needed by gae"),
    Apply("trainer.ref.model.path", "reference.path", nullable(TEXT), when(without_reference),
        note="null: the initial policy"),
    *_optimizer("policy", 1e-6),
    *_optimizer("critic", 5e-6),
    *_fsdp("policy", cpu_offload=False),
    *_fsdp("critic", cpu_offload=False),
    *_fsdp("ref", cpu_offload=True),
    *_deepspeed("policy"),
    *_deepspeed("critic"),
    *_deepspeed("ref"),
    *_groups(),
    *_megatron("policy"),
    *_megatron("ref"),
    *(
        Apply(f"trainer.{role}.sequence_parallel_size", f"{NATIVE_TRAIN[role]}.sequence_parallel", COUNT,
            when(not_backend("fsdp", "fsdp2", "deepspeed"), *_IDLE[role]), default=1,
            note="Ulysses; data-parallel ranks = GPUs / sequence_parallel_size")
        for role in NATIVE_TRAIN
    ),
    Apply("trainer.policy.use_torch_compile", "train.compile", BOOL, default=False, note="log-probs and entropy"),
    Apply("trainer.policy.record_memory", "train.record_memory", BOOL, default=False,
        note="stored in memory/ of the run folder"),
    Apply("trainer.policy.use_liger_kernel", "train.liger_kernels", BOOL, default=False),
    NoEffect("trainer.ref.use_liger_kernel", BOOL, "the policy's setting applies"),
    Apply(f"{_LORA}.rank", "model.lora.rank", NATURAL, when(_has_adapters), default=0, note="0 trains all weights"),
    Apply(f"{_LORA}.alpha", "model.lora.alpha", POSITIVE, when(_has_adapters), default=16),
    Apply(f"{_LORA}.dropout", "", SHARE,
        off_only("adapters have no dropout", "set it to 0: log-probs must be the same in rollout and training")),
    Apply(f"{_LORA}.target_modules", "model.lora.targets", either(TEXT, list_of(TEXT)),
        when(_has_adapters, then=_targets), default="all-linear"),
    Apply("trainer.target_modules", "model.lora.targets", nullable(either(TEXT, list_of(TEXT))),
        when(_has_adapters, then=_older_targets), note="older name of policy.model.lora.target_modules"),
    Apply("trainer.exclude_modules", "", nullable(TEXT),
        off_only("no modules are excluded", "list the wanted layers in target_modules")),
    Apply(f"{_LORA}.exclude_modules", "", nullable(TEXT),
        off_only("no modules are excluded", "list the wanted layers in target_modules")),
    Apply(f"{_LORA}.init_method", "", TEXT, only("kaiming", "use kaiming", "adapters are always initialized as in peft"),
        default="kaiming"),
    NoEffect(f"{_LORA}.lora_sync_path", TEXT, "engines always receive merged weights"),
    NoEffect(f"{_LORA}.max_loras", COUNT, "only one adapter is trained"),
    NoEffect(f"{_LORA}.max_cpu_loras", nullable(COUNT), "only one adapter is trained"),
    *(
        Apply(f"trainer.{role}.model.lora.rank", "", NATURAL,
            off_only("no adapters", "only the policy has adapters"))
        for role in ("critic", "ref")
    ),
    *(NoEffect(f"trainer.{role}.model.lora.*", ANY, "only the policy has adapters") for role in ("critic", "ref")),
    Unsupported("trainer.policy.model.fake_int4_qat.*", "remove it; quantization-aware training is not supported"),
    *(Unsupported(f"trainer.{key}", "set it in config.json of the model folder") for key in
        ("rope_scaling", "rope_theta")),
    *(
        Unsupported(f"trainer.{role}.model_config_kwargs", "set it in config.json of the model folder")
        for role in NATIVE_TRAIN
    ),
    Unsupported("trainer.policy.torch_profiler_config.enable", "use record_memory, or an external profiler",
        default=False),
    NoEffect("trainer.policy.torch_profiler_config.*", ANY, "for the profiler only"),
    NoEffect("trainer.policy.inference_only_init", BOOL, "only trained models have an optimizer"),
    *(NoEffect(f"trainer.{role}.language_model_only", BOOL, "only text models are supported") for role in ("policy", "ref")),
    Apply("trainer.reward.model.path", "", nullable(TEXT),
        off_only("no reward model", "use braid.reward.parts=[{kind: model, path: ...}]; SkyRL did not implement it"),
        default=None),
    NoEffect("trainer.reward.*", ANY, NO_REWARD_WORKERS),
    *(
        NoEffect(f"trainer.reward.{part}.*", ANY, NO_REWARD_WORKERS)
        for part in ("fsdp_config", "deepspeed_config", "deepspeed_config.zero_optimization")
    ),
)  # fmt: skip
