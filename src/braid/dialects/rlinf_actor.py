"""RLinf's `actor` keys: backend, precision, optimizer, schedule, Megatron, FSDP."""

from __future__ import annotations

from typing import Any

from braid.plan.placement import MAX_DEVICES

from . import rlinf_facts as facts
from .conversions import mapped, null_as, when
from .rlinf_facts import (
    cluster,
    constant,
    fsdp,
    fsdp1,
    fsdp2,
    fsdp_file,
    megatron,
    megatron_file,
    robots_only,
)
from .rlinf_rollout import MODEL_TYPE, model_type
from .table import (
    Apply,
    Became,
    Convert,
    Implied,
    NoEffect,
    Rule,
    Source,
    Unsupported,
    no_effect,
    unsupported,
)
from .values import (
    ANY,
    BOOL,
    COUNT,
    NATURAL,
    NON_NEGATIVE,
    PATH,
    POSITIVE,
    SHARE,
    TEXT,
    Takes,
    choice,
    integer,
    list_of,
    nullable,
    number,
)

_DECAYS = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
_SHARDINGS = {"full_shard": "full", "shard_grad_op": "grad_op", "hybrid_shard": "hybrid", "no_shard": "none"}
PRECISION = Takes(
    f"one of {', '.join(facts.DTYPES)}",
    lambda v: not isinstance(v, bool) and str(v) in facts.DTYPES,
    ("fp16", "bf16", "fp32"),
    ("fp16", "bf16", "fp32"),
)
DTYPE = choice("fp32", "bf16", "fp16")
DEVICES = Takes(
    "a device number, a list of them, or null",
    nullable(Takes("", lambda v: NATURAL.accepts(v) or list_of(NATURAL).accepts(v), ())).accepts,
    (1, [0, 2], None),
)
FREE = nullable(TEXT)


def _backend(value: str, source: Source) -> Any:
    if source.backend is not None:
        return no_effect(f"--backend {source.backend} comes first")
    return facts.file_backend(source) if value == "fsdp" else value


def _strategy(_: str, source: Source) -> Any:
    why = fsdp_file(source) or (f"--backend {source.backend} comes first" if source.backend else "")
    return no_effect(why) if why else facts.file_backend(source)


def _precision(_: Any, source: Source) -> Became:
    """16 bits are for computation; what the optimizer changes is held in fp32. An adapter's frozen base need not be."""
    kind = facts.precision(source)
    is_frozen = source.get("actor.model.is_lora") is True
    native: dict[str, Any] = {
        "model.dtype": kind if is_frozen else "fp32",
        "train.autocast": _autocast(source),
    }
    if facts.file_backend(source) == "megatron" and kind == "fp16":
        native["train.grad_scaler.growth_interval"] = source.get("actor.optim.loss_scale_window")
    if facts.engine(source) != "native":
        native[f"rollout.{facts.engine(source)}.dtype"] = kind
    return Became(native, note="what adapters leave frozen is held in this type" if is_frozen else "")


def _autocast(source: Source) -> str:
    """Native type of matrix products over fp32 weights."""
    if facts.file_backend(source) != "megatron" and source.get("actor.fsdp_config.amp_autocast.enabled"):
        return {"fp32": "none"}.get(
            amp := source.get("actor.fsdp_config.amp_autocast.precision") or "bf16", amp
        )
    kind = facts.precision(source)
    return "none" if kind == "fp32" else kind


def _scale_window(value: int, source: Source) -> Any:
    why = megatron_file(source) or (
        "" if facts.precision(source) == "fp16" else "of fp16; actor.model.precision is not"
    )
    if why:
        return no_effect(why)
    native = {"train.grad_scaler.growth_interval": value}
    return Became(native | ({} if megatron(source) else {"train.megatron.dynamic_loss_scale_window": value}))


def _amp(_: Any, source: Source) -> Became:
    return Became({"train.autocast": _autocast(source)})


def _amp_precision(value: Any, source: Source) -> Any:
    is_on = source.get("actor.fsdp_config.amp_autocast.enabled") is True
    return _amp(value, source) if is_on else no_effect("actor.fsdp_config.amp_autocast.enabled is false")


def _grad_scaler(value: bool, source: Source) -> Became:
    if not value:
        return Became({"train.grad_scaler": None})
    scale = source.get("actor.fsdp_config.grad_scaler.init_scale")
    return Became({"train.grad_scaler.init_scale": 65536.0 if scale is None else scale})


def _of_scaler(value: Any, source: Source) -> Any:
    is_on = source.get("actor.fsdp_config.grad_scaler.enabled") is True
    return value if is_on else no_effect("actor.fsdp_config.grad_scaler.enabled is false")


def _betas(_: float, source: Source) -> Became:
    betas = [source.get(f"actor.optim.adam_{name}") for name in ("beta1", "beta2")]
    return Became({"train.optimizer.betas": betas})


def _ratio(name: str) -> Convert:
    """A learning rate as a share of actor.optim.lr."""

    def convert(value: float, source: Source) -> Became:
        lr = source.get("actor.optim.lr")
        if lr is None or value > lr:
            raise ValueError(
                f"{value:g} is above the peak actor.optim.lr={lr if lr is None else f'{lr:g}'}; lower it"
            )
        return Became({f"train.optimizer.schedule.{name}": value / lr})

    return convert


def _floor(value: float, source: Source) -> Any:
    is_said = source.has("actor.lr_sched.min_lr")
    return no_effect("actor.lr_sched.min_lr says it") if is_said else _ratio("min_ratio")(value, source)


def _warmup(value: float | None, source: Source) -> Any:
    is_said = (source.get("actor.lr_sched.lr_warmup_iters") or 0) > 0
    return no_effect("actor.lr_sched.lr_warmup_iters is above 0") if is_said else value or 0.0


def _split_sequence(value: bool, source: Source) -> Became:
    tp = source.get("actor.model.tensor_model_parallel_size") or 1
    note = "off: tensor_model_parallel_size is 1" if value and tp == 1 else ""
    return Became({"train.megatron.sequence_parallel": value and tp > 1}, note=note)


def _granularity(value: str | None, source: Source) -> Any:
    if facts.backend(source) == "single" and not megatron_file(source):
        return Became({"train.gradient_checkpointing": value == "full"})
    why = megatron(source)
    return no_effect(why) if why else value or "off"


def _conversion_devices(_: Any, source: Source) -> Became:
    index, count = (source.get(f"actor.megatron.ckpt.use_gpu_{name}") for name in ("index", "num"))
    if index is None and (count or 0) > MAX_DEVICES:
        raise ValueError(f"{count} devices are more than there can be; 0 converts in host memory")
    devices = list(range(count or 0)) if index is None else [index] if isinstance(index, int) else index
    return Became({"train.megatron.checkpoint.devices": devices})


def _trust(_: bool, source: Source) -> Became:
    keys = ("actor.model.trust_remote_code", "actor.tokenizer.trust_remote_code")
    return Became({"model.trust_remote_code": any(source.get(key) is True for key in keys)})


def _lora(name: str) -> Convert:
    def convert(value: Any, source: Source) -> Any:
        is_on = source.get("actor.model.is_lora") is True
        return Became({f"model.lora.{name}": value}) if is_on else no_effect("actor.model.is_lora is false")

    return convert


def _is_lora(value: bool, source: Source) -> Became:
    if not value:
        return Became({"model.lora": None})
    return Became(
        {"model.lora.rank": source.get("actor.model.lora_rank")},
        note="alpha = rank, no dropout, all linear layers",
    )


def _shares_weights(source: Source) -> str:
    is_one = source.backend == "single" and facts.engine(source) == "native"
    return "in one process the engine samples with these very weights" if is_one else ""


def _frees_gradients(source: Source) -> str:
    return "in one process gradients are freed after every step" if source.backend == "single" else ""


def _offload(value: bool, source: Source) -> Became:
    native = {"train.offload.optimizer": value}
    return Became(native if _shares_weights(source) else {"train.offload.weights": value} | native)


def _mcore(value: bool, source: Source) -> Became:
    if not value:
        return unsupported("true: Megatron-core is the Megatron that is left")
    return (
        no_effect(why)
        if (why := megatron(source))
        else Became({}, "implied", "Megatron-core is the only Megatron")
    )


def _steps_of_round(value: int, source: Source) -> Became:
    """Optimizer steps of a round: its chunks over the batch."""
    chunks = facts.num_envs(source) * facts.rollout_epochs(source) * facts.chunks_per_episode(source)
    return Became({"train.steps_per_pass": max(1, chunks // value)})


_TRANSFORMER = "train.megatron.transformer"
_CONVERTER = "train.megatron.checkpoint"


def _layer(key: str, name: str, takes: Takes, note: str = "") -> Apply:
    """A key of Megatron's transformer."""
    return Apply(f"actor.model.{key}", f"{_TRANSFORMER}.{name}", takes, when(megatron), note=note)


# fmt: off
RULES: tuple[Rule, ...] = (
    # top level
    Apply("actor.group_name", "cluster.group_names.policy", TEXT, when(cluster)),
    Apply("actor.training_backend", "train.backend", choice("megatron", "fsdp"), _backend, default="megatron",
          note="fsdp: actor.fsdp_config.strategy says which"),
    Apply("actor.mcore_gpt", "", BOOL, _mcore),
    Apply("actor.spec_name", f"{_TRANSFORMER}.layer_spec", TEXT, when(megatron)),
    Apply("actor.offload_optimizer", "train.offload.optimizer", BOOL),
    Apply("actor.offload_weight", "train.offload.weights", BOOL, when(_shares_weights), note="between phases; no ZeRO"),
    Apply("actor.offload_grad", "train.offload.gradients", BOOL, when(_frees_gradients)),
    Apply("actor.enable_offload", "", BOOL, _offload, note="train.offload.weights and train.offload.optimizer"),
    Apply("actor.enable_dp_load_balance", "train.balance_ranks", BOOL, when(cluster), default=False),
    Apply("actor.calculate_flops", "train.count_flops", BOOL, note="training counts as three forward passes"),
    Apply("actor.seed", "run.seed", NATURAL),
    NoEffect("actor.channel.name", TEXT, "records go from role to role without named queues"),
    NoEffect("actor.channel.queue_name", TEXT, "records go from role to role without named queues"),
    NoEffect("actor.channel.queue_size", NATURAL, "records go from role to role without named queues"),
    Apply("actor.micro_batch_size", "train.micro_batch_tokens", COUNT, when(robots_only),
          note="answers of the policy in one pass on a device; text tasks set it from algorithm.training_batch_size_per_gpu"),
    Apply("actor.global_batch_size", "", COUNT, when(robots_only, then=_steps_of_round),
          note="train.steps_per_pass = total_num_envs * rollout_epoch * (max_episode_steps // num_action_chunks) // this"),
    Implied("actor.combine_reference_model", BOOL, "the reference is a copy of the policy's first weights, made when KL needs it"),
    Unsupported("actor.sync_precision", "weights travel in the engine's type"),
    Apply("actor.sync_bucket_capacity", "rollout.publish.bucket_bytes", COUNT, note="bytes"),
    # model
    Apply("actor.model.precision", "", PRECISION, _precision,
          note="the type of matrix products. Weights are held in fp32, as Megatron's optimizer holds them: in 16 bits small "
          "updates round to nothing. fp16 scales the loss"),
    Apply("actor.model.model_path", "model.path", PATH),
    Apply("actor.model.model_type", "", MODEL_TYPE, model_type),
    Apply("actor.model.megatron_checkpoint", f"{_CONVERTER}.load_path", nullable(PATH), when(megatron)),
    Apply("actor.model.tensor_model_parallel_size", "train.megatron.tensor_parallel", COUNT, when(megatron)),
    Apply("actor.model.pipeline_model_parallel_size", "train.megatron.pipeline_parallel", COUNT, when(megatron)),
    Apply("actor.model.context_parallel_size", "train.megatron.context_parallel", COUNT, when(megatron)),
    Apply("actor.model.expert_model_parallel_size", "train.megatron.expert_parallel", COUNT, when(megatron)),
    Apply("actor.model.expert_tensor_parallel_size", "train.megatron.expert_tensor_parallel", COUNT, when(megatron)),
    Apply("actor.model.virtual_pipeline_model_parallel_size", "train.megatron.virtual_pipeline", nullable(COUNT), when(megatron)),
    Apply("actor.model.sequence_parallel", "train.megatron.sequence_parallel", BOOL, when(megatron, then=_split_sequence),
          note="needs tensor parallelism, and is off without"),
    Apply("actor.model.recompute_granularity", "train.megatron.recompute_granularity", nullable(choice("full", "selective")),
          _granularity, note="in one process full is train.gradient_checkpointing"),
    Apply("actor.model.recompute_method", "train.megatron.recompute_method", nullable(choice("block", "uniform")), when(megatron)),
    Apply("actor.model.recompute_num_layers", "train.megatron.recompute_num_layers", nullable(COUNT), when(megatron)),
    Apply("actor.model.moe_token_dispatcher_type", "train.megatron.moe_token_dispatcher", choice("allgather", "alltoall", "flex"),
          when(megatron)),
    Apply("actor.model.moe_grouped_gemm", "train.megatron.moe_grouped_gemm", BOOL, when(megatron)),
    _layer("activation", "activation", choice(
        "swiglu", "gelu", "geglu", "reglu", "squared-relu", "fast-geglu", "fast-swiglu", "fast-reglu", "approx-gelu")),
    _layer("normalization", "normalization", choice("rmsnorm", "layernorm", "layernorm1p")),
    _layer("position_embedding_type", "position_embedding", choice("rope", "learned_absolute", "none")),
    _layer("add_bias_linear", "add_bias_linear", BOOL),
    _layer("apply_rope_fusion", "apply_rope_fusion", BOOL),
    _layer("bias_dropout_fusion", "bias_dropout_fusion", BOOL),
    _layer("bias_activation_fusion", "bias_activation_fusion", BOOL),
    _layer("persist_layer_norm", "persist_layer_norm", BOOL, "a kernel that stays on the device; no higher precision"),
    _layer("gradient_accumulation_fusion", "gradient_accumulation_fusion", BOOL),
    _layer("attention_softmax_in_fp32", "attention_softmax_fp32", BOOL),
    _layer("batch_p2p_comm", "batch_p2p_comm", BOOL),
    _layer("variable_seq_lengths", "variable_seq_lengths", BOOL, "true: packed rows; other backends always pack"),
    _layer("use_cpu_initialization", "cpu_initialization", BOOL),
    _layer("seq_length", "seq_length", COUNT),
    NoEffect("actor.model.encoder_seq_length", COUNT, "decoders have no encoder; lengths are those of `runner` and `data`"),
    # adapters and loading
    Apply("actor.model.is_lora", "", BOOL, _is_lora, note="model.lora"),
    Apply("actor.model.lora_rank", "", COUNT, _lora("rank"), default=32),
    Apply("actor.model.lora_path", "", nullable(PATH), _lora("path")),
    Apply("actor.model.attn_implementation", "model.attention", choice("flash_attention_2", "sdpa", "eager")),
    Apply("actor.model.low_cpu_mem_usage", "model.low_memory_load", BOOL),
    Apply("actor.model.trust_remote_code", "", BOOL, _trust, note="here or for the tokenizer: model.trust_remote_code"),
    # optimizer
    Apply("actor.optim.optimizer", "train.optimizer.kind", choice("adam", "sgd"), mapped({"adam": "adamw", "sgd": "sgd"}),
          note="adam decays weights apart from the gradient (AdamW)"),
    Implied("actor.optim.bf16", nullable(BOOL), "actor.model.precision says it, and must not say other"),
    Implied("actor.optim.fp16", nullable(BOOL), "actor.model.precision says it, and must not say other"),
    Apply("actor.optim.lr", "train.optimizer.lr", POSITIVE),
    Apply("actor.optim.value_lr", "train.optimizer.value_lr", POSITIVE, note="of a value head in the policy"),
    Apply("actor.optim.adam_beta1", "train.optimizer.betas", number(0.0, 1.0, samples=(0.8, 0.85)), _betas, default=0.9),
    Apply("actor.optim.adam_beta2", "train.optimizer.betas", number(0.0, 1.0, samples=(0.9, 0.99)), _betas, default=0.999),
    Apply("actor.optim.adam_eps", "train.optimizer.eps", POSITIVE, default=1e-8),
    Apply("actor.optim.min_lr", "", NON_NEGATIVE, when(constant, then=_floor), note="actor.lr_sched.min_lr comes first"),
    Apply("actor.optim.weight_decay", "train.optimizer.weight_decay", NON_NEGATIVE, default=0.01),
    Apply("actor.optim.clip_grad", "train.max_grad_norm", NON_NEGATIVE, lambda value, _: value or None, default=1.0,
          note="global norm; 0: none"),
    Apply("actor.optim.loss_scale_window", "", COUNT, _scale_window, default=1000,
          note="fp16: finite steps after which the loss scale doubles"),
    Unsupported("actor.optim.loss_scale", "the loss scale is dynamic: actor.optim.loss_scale_window"),
    Apply("actor.optim.use_distributed_optimizer", "train.megatron.distributed_optimizer", BOOL, when(megatron)),
    Apply("actor.optim.overlap_grad_reduce", "train.megatron.overlap_grad_reduce", BOOL, when(megatron)),
    Apply("actor.optim.overlap_param_gather", "train.megatron.overlap_param_gather", BOOL, when(megatron)),
    Apply("actor.optim.overlap_param_gather_with_optimizer_step", "train.megatron.overlap_param_gather_with_step", BOOL,
          when(megatron)),
    NoEffect("actor.optim.optimizer_enable_pin", BOOL, "what is moved to the host is pinned where that is faster; unread by RLinf"),
    Apply("actor.optim.lr_scheduler", "train.optimizer.schedule.decay", choice("constant", "cosine"), when(fsdp_file)),
    Apply("actor.optim.lr_warmup_steps", "train.optimizer.schedule.warmup_steps", NATURAL, when(fsdp_file)),
    Apply("actor.optim.lr_warmup_steps_ratio", "train.optimizer.schedule.warmup_fraction", SHARE, when(fsdp_file)),
    Apply("actor.optim.total_training_steps", "train.optimizer.schedule.decay_steps", COUNT, when(fsdp_file, constant)),
    # schedule
    Apply("actor.lr_sched.lr_warmup_fraction", "train.optimizer.schedule.warmup_fraction",
          nullable(number(0.0, 1.0, samples=(0.1, 0.2))), _warmup, note="of all optimizer steps; lr_warmup_iters above 0 comes first"),
    Apply("actor.lr_sched.lr_warmup_init", "", NON_NEGATIVE, _ratio("start_ratio"), note="as a share of actor.optim.lr"),
    Apply("actor.lr_sched.lr_warmup_iters", "train.optimizer.schedule.warmup_steps", NATURAL, note="optimizer steps"),
    NoEffect("actor.lr_sched.max_lr", POSITIVE, "the peak is actor.optim.lr"),
    Apply("actor.lr_sched.min_lr", "", NON_NEGATIVE, when(constant, then=_ratio("min_ratio")), note="as a share of actor.optim.lr; before actor.optim.min_lr"),
    Apply("actor.lr_sched.lr_decay_style", "train.optimizer.schedule.decay", choice(*_DECAYS), mapped(_DECAYS)),
    Apply("actor.lr_sched.lr_decay_iters", "train.optimizer.schedule.decay_steps", COUNT, when(constant),
          note="optimizer steps"),
    # tokenizer
    Apply("actor.tokenizer.tokenizer_model", "model.tokenizer", PATH),
    NoEffect("actor.tokenizer.use_fast", BOOL, "the tokenizer is the folder's; unread by RLinf"),
    Apply("actor.tokenizer.trust_remote_code", "", BOOL, _trust, note="here or for the model: model.trust_remote_code"),
    NoEffect("actor.tokenizer.padding_side", choice("left", "right"), "packed rows need no padding"),
    NoEffect("actor.tokenizer.tokenizer_type", choice("HuggingFaceTokenizer"), "tokenizers are Hugging Face's"),
    Apply("actor.tokenizer.extra_vocab_size", "model.vla.extra_vocab_size", NATURAL, when(robots_only)),
    # Megatron
    Apply("actor.megatron.ddp_bucket_size", "train.megatron.ddp_bucket_size", nullable(COUNT), when(megatron), note="in parameters"),
    Apply("actor.megatron.distributed_backend", "train.megatron.distributed_backend", choice("nccl", "gloo"), when(megatron)),
    Apply("actor.megatron.distributed_timeout_minutes", "train.megatron.timeout_minutes", POSITIVE, when(megatron)),
    Apply("actor.megatron.ckpt_format", f"{_CONVERTER}.format", choice("torch", "torch_dist", "zarr"), when(megatron)),
    Apply("actor.megatron.use_dist_ckpt", f"{_CONVERTER}.distributed", BOOL, when(megatron)),
    Apply("actor.megatron.tp_comm_bootstrap_backend", "train.megatron.tp_comm_bootstrap", choice("nccl", "mpi", "gloo"), when(megatron)),
    Apply("actor.megatron.tp_comm_overlap_cfg", "train.megatron.tp_comm_overlap_file", nullable(PATH), when(megatron)),
    Apply("actor.megatron.use_hf_ckpt", f"{_CONVERTER}.from_hf", BOOL, when(megatron)),
    Apply("actor.megatron.ckpt.model", f"{_CONVERTER}.preset", TEXT, when(megatron)),
    Apply("actor.megatron.ckpt.model_type", f"{_CONVERTER}.model_type", FREE, when(megatron)),
    Apply("actor.megatron.ckpt.hf_model_path", f"{_CONVERTER}.hf_path", PATH, when(megatron)),
    Apply("actor.megatron.ckpt.save_path", f"{_CONVERTER}.cache_dir", PATH, when(megatron)),
    Apply("actor.megatron.ckpt.use_gpu_num", "", NATURAL, when(megatron, then=_conversion_devices), note="0: in host memory"),
    Apply("actor.megatron.ckpt.use_gpu_index", "", DEVICES, when(megatron, then=_conversion_devices), note="before use_gpu_num"),
    Apply("actor.megatron.ckpt.process_num", f"{_CONVERTER}.num_processes", COUNT, when(megatron)),
    Apply("actor.megatron.ckpt.tensor_model_parallel_size", f"{_CONVERTER}.tensor_parallel", COUNT, when(megatron)),
    Apply("actor.megatron.ckpt.pipeline_model_parallel_size", f"{_CONVERTER}.pipeline_parallel", COUNT, when(megatron)),
    # FSDP
    Apply(
        "actor.fsdp_config.strategy", "train.backend",
        Takes("one of fsdp, fsdp2, in any case", lambda v: isinstance(v, str) and v.lower() in ("fsdp", "fsdp2"),
              ("fsdp", "fsdp2", "FSDP2"), ("fsdp", "fsdp2")),
        _strategy,
    ),
    Apply("actor.fsdp_config.sharding_strategy", "train.fsdp.sharding", choice(*_SHARDINGS), when(fsdp, then=mapped(_SHARDINGS))),
    Apply("actor.fsdp_config.cpu_offload", "train.fsdp.cpu_offload", BOOL, when(fsdp2)),
    Apply("actor.fsdp_config.offload_pin_memory", "train.fsdp.pin_memory", BOOL, when(fsdp2), note="with cpu_offload"),
    Apply("actor.fsdp_config.reshard_after_forward", "train.fsdp.reshard_after_forward", BOOL, when(fsdp2)),
    Apply("actor.fsdp_config.enable_gradient_accumulation", "train.fsdp.sync_last_micro_batch_only", BOOL, when(fsdp)),
    Apply("actor.fsdp_config.forward_prefetch", "train.fsdp.forward_prefetch", BOOL, when(fsdp1)),
    Apply("actor.fsdp_config.limit_all_gathers", "train.fsdp.limit_all_gathers", BOOL, when(fsdp1)),
    Apply("actor.fsdp_config.backward_prefetch", "train.fsdp.backward_prefetch", nullable(choice("pre", "post")),
          when(fsdp1, then=null_as("off"))),
    Apply("actor.fsdp_config.use_orig_params", "train.fsdp.use_orig_params", BOOL, when(fsdp1)),
    Apply("actor.fsdp_config.use_liger_kernel", "train.liger_kernels", BOOL, when(fsdp)),
    Apply("actor.fsdp_config.fsdp_size", "train.fsdp.size", integer(-1, samples=(2, 4, -1)),
          when(fsdp2, then=lambda value, _: value if value > 0 else None), note="-1: all devices"),
    Apply("actor.fsdp_config.gradient_checkpointing", "train.gradient_checkpointing", BOOL, when(fsdp_file)),
    Apply("actor.fsdp_config.mixed_precision.param_dtype", "train.fsdp.param_dtype", DTYPE, when(fsdp)),
    Apply("actor.fsdp_config.mixed_precision.reduce_dtype", "train.fsdp.reduce_dtype", DTYPE, when(fsdp)),
    Apply("actor.fsdp_config.mixed_precision.buffer_dtype", "train.fsdp.buffer_dtype", DTYPE, when(fsdp1)),
    Apply("actor.fsdp_config.amp_autocast.enabled", "", BOOL, when(fsdp_file, then=_amp),
          note="true: train.autocast is amp_autocast.precision; false: actor.model.precision"),
    Apply("actor.fsdp_config.amp_autocast.precision", "", DTYPE, when(fsdp_file, then=_amp_precision)),
    Apply("actor.fsdp_config.grad_scaler.enabled", "", BOOL, when(fsdp_file, then=_grad_scaler)),
    Apply("actor.fsdp_config.grad_scaler.init_scale", "train.grad_scaler.init_scale", POSITIVE, when(fsdp_file, then=_of_scaler)),
    Apply("actor.fsdp_config.grad_scaler.growth_interval", "train.grad_scaler.growth_interval", COUNT,
          when(fsdp_file, then=_of_scaler)),
    NoEffect("actor.fsdp_config.wrap_policy.*", ANY, "each layer of the model is a unit"),
)
# fmt: on
