"""RLinf's `actor` keys: backend, precision, optimizer, schedule, Megatron, FSDP."""

from __future__ import annotations

from typing import Any

from braid.plan.placement import MAX_DEVICES

from . import rlinf_facts as facts
from .compat import (
    Apply,
    Became,
    Convert,
    Idle,
    Implied,
    NoEffect,
    Rule,
    Source,
    Unsupported,
    implied,
    mapped,
    no_effect,
    null_as,
    unless_null,
    unsupported,
    when,
)
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
from .rlinf_rollout import MODEL_TYPE, PRECISION, model_type
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
    either,
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
DTYPE = choice("fp32", "bf16", "fp16")
DEVICES = Takes(
    "a device number, a list of them, or null",
    nullable(Takes("", lambda v: NATURAL.accepts(v) or list_of(NATURAL).accepts(v), ())).accepts,
    (1, [0, 2], None),
)
FREE = nullable(TEXT)


def _backend(value: str, source: Source) -> Any:
    if source.backend is not None:
        return no_effect(f"overridden by --backend {source.backend}")
    return facts.file_backend(source) if value == "fsdp" else value


def _strategy(_: str, source: Source) -> Any:
    why = fsdp_file(source) or (f"overridden by --backend {source.backend}" if source.backend else "")
    return no_effect(why) if why else facts.file_backend(source)


def _precision(value: Any, source: Source) -> Became:
    """Map the precision to the compute dtype. Trained weights are kept in fp32; the frozen base of an adapter
    is kept in the given precision."""
    if value is None:
        return no_effect("null: fp32")
    kind = facts.precision(source)
    is_frozen = source.get("actor.model.is_lora") is True
    native: dict[str, Any] = {
        "model.dtype": kind if is_frozen else "fp32",
        "train.autocast": _autocast(source),
    }
    if facts.file_backend(source) == "megatron" and kind == "fp16":
        native["train.grad_scaler.growth_interval"] = source.get("actor.optim.loss_scale_window")
    if facts.engine(source) != "native" and source.get("rollout.model.precision") is None:
        native[f"rollout.{facts.engine(source)}.dtype"] = kind
    return Became(native, note="dtype of the frozen weights below the adapter" if is_frozen else "")


def _autocast(source: Source) -> str:
    """Native dtype of matrix products over fp32 weights."""
    if facts.file_backend(source) != "megatron" and source.get("actor.fsdp_config.amp_autocast.enabled"):
        return {"fp32": "none"}.get(
            amp := source.get("actor.fsdp_config.amp_autocast.precision") or "bf16", amp
        )
    kind = facts.precision(source)
    return "none" if kind == "fp32" else kind


def _scale_window(value: int, source: Source) -> Any:
    why = megatron_file(source) or (
        "" if facts.precision(source) == "fp16" else "for fp16 only; actor.model.precision is not fp16"
    )
    if why:
        return no_effect(why)
    native = {"train.grad_scaler.growth_interval": value}
    return Became(native | ({} if megatron(source) else {"train.megatron.dynamic_loss_scale_window": value}))


def _loss_scale(value: float | None, source: Source) -> Any:
    why = megatron_file(source) or (
        "" if facts.precision(source) == "fp16" else "for fp16 only; actor.model.precision is not fp16"
    )
    return no_effect(why or "null: default") if why or value is None else float(value)


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
    """Convert a learning rate to a fraction of actor.optim.lr."""

    def convert(value: float, source: Source) -> Became:
        lr = source.get("actor.optim.lr")
        if lr is None or value > lr:
            raise ValueError(
                f"{value:g} is above the peak learning rate actor.optim.lr={lr if lr is None else f'{lr:g}'}; lower it"
            )
        return Became({f"train.optimizer.schedule.{name}": value / lr})

    return convert


def _floor(value: float, source: Source) -> Any:
    is_said = source.has("actor.lr_sched.min_lr")
    return no_effect("overridden by actor.lr_sched.min_lr") if is_said else _ratio("min_ratio")(value, source)


def _warmup(value: float | None, source: Source) -> Any:
    is_said = (source.get("actor.lr_sched.lr_warmup_iters") or 0) > 0
    return no_effect("overridden by actor.lr_sched.lr_warmup_iters") if is_said else value or 0.0


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
        raise ValueError(
            f"{count} is more than the maximum of {MAX_DEVICES} devices; lower it, or set it to 0 to convert in host memory"
        )
    devices = list(range(count or 0)) if index is None else [index] if isinstance(index, int) else index
    return Became({"train.megatron.checkpoint.devices": devices})


def _all_devices(value: int, _: Source) -> int | None:
    return value if value > 0 else None


def _hybrid_size(value: int, source: Source) -> Any:
    if source.get("actor.fsdp_config.sharding_strategy") != "hybrid_shard":
        return no_effect("for sharding_strategy=hybrid_shard only")
    return _all_devices(value, source)


def _decay_ramp(value: float | None, source: Source) -> Became:
    if value in (None, source.get("actor.optim.weight_decay")):
        return implied("weight decay is always actor.optim.weight_decay")
    return unsupported("set it to the value of actor.optim.weight_decay")


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
        {
            "model.lora.rank": source.get("actor.model.lora_rank"),
            "model.lora.path": source.get("actor.model.lora_path"),
        },
        note="alpha = rank, no dropout, all linear layers",
    )


def _shares_weights(source: Source) -> str:
    is_one = source.backend == "single" and facts.engine(source) == "native"
    return "in a single process the engine samples with the trainer's own weights" if is_one else ""


def _frees_gradients(source: Source) -> str:
    return "in a single process gradients are freed after every step" if source.backend == "single" else ""


def _offload(value: bool, source: Source) -> Became:
    native = {"train.offload.optimizer": value}
    return Became(native if _shares_weights(source) else {"train.offload.weights": value} | native)


def _mcore(value: bool, source: Source) -> Became:
    if not value:
        return unsupported("set it to true: only Megatron-core is supported")
    why = megatron(source)
    return no_effect(why) if why else implied("only Megatron-core is supported")


def _steps_of_round(value: int, source: Source) -> Became:
    """Compute the optimizer steps per round: action chunks divided by the batch size."""
    chunks = facts.num_envs(source) * facts.rollout_epochs(source) * facts.chunks_per_episode(source)
    return Became({"train.steps_per_pass": max(1, chunks // value)})


def _megatron(key: str, name: str, takes: Takes, then: Convert | None = None, note: str = "") -> Rule:
    """Map `actor.KEY` to train.megatron.NAME; if `name` is empty, the conversion returns the path."""
    native = name and f"train.megatron.{name}"
    return Apply(f"actor.{key}", native, takes, when(megatron, then=then), note=note)


def _layer(key: str, name: str, takes: Takes, note: str = "") -> Rule:
    """Map `actor.model.KEY` to train.megatron.transformer.NAME."""
    return _megatron(f"model.{key}", f"transformer.{name}", takes, note=note)


def _fsdp(key: str, name: str, takes: Takes, idle: Idle, then: Convert | None = None, note: str = "") -> Rule:
    """Map `actor.fsdp_config.KEY` to train.fsdp.NAME, for the FSDP versions that `idle` allows."""
    return Apply(f"actor.fsdp_config.{key}", f"train.fsdp.{name}", takes, when(idle, then=then), note=note)


def _schedule(key: str, name: str, takes: Takes, convert: Convert | None = None, note: str = "") -> Rule:
    """Map `actor.KEY` to train.optimizer.schedule.NAME; if `name` is empty, the conversion returns the
    path."""
    native = name and f"train.optimizer.schedule.{name}"
    return Apply(f"actor.{key}", native, takes, convert, note=note)


# fmt: off
RULES: tuple[Rule, ...] = (
    # top level
    Apply("actor.group_name", "cluster.group_names.policy", TEXT, when(cluster)),
    Apply("actor.training_backend", "train.backend", choice("megatron", "fsdp"), _backend, default="megatron",
          note="fsdp: actor.fsdp_config.strategy says which"),
    Apply("actor.mcore_gpt", "", BOOL, _mcore),
    _megatron("spec_name", "transformer.layer_spec", TEXT),
    Apply("actor.offload_optimizer", "train.offload.optimizer", BOOL),
    Apply("actor.offload_weight", "train.offload.weights", BOOL, when(_shares_weights), note="between phases; no ZeRO"),
    Apply("actor.offload_grad", "train.offload.gradients", BOOL, when(_frees_gradients)),
    Apply("actor.enable_offload", "", BOOL, _offload, note="train.offload.weights and train.offload.optimizer"),
    Apply("actor.enable_dp_load_balance", "train.balance_ranks", BOOL, when(cluster), default=False),
    Apply("actor.calculate_flops", "train.count_flops", BOOL, note="training counts as three forward passes"),
    Apply("actor.seed", "run.seed", NATURAL),
    Apply("actor.micro_batch_size", "train.micro_batch_tokens", COUNT, when(robots_only),
          note="answers of the policy in one pass on a device; text has algorithm.training_batch_size_per_gpu"),
    Apply("actor.global_batch_size", "", COUNT, when(robots_only, then=_steps_of_round),
          note="train.steps_per_pass = total_num_envs * rollout_epoch * (max_episode_steps // num_action_chunks) // this"),
    Implied("actor.combine_reference_model", BOOL, "the reference is always a copy of the policy's initial weights"),
    Unsupported("actor.sync_precision", "weights are sent in the engine's dtype"),
    Apply("actor.sync_bucket_capacity", "rollout.publish.bucket_bytes", COUNT, note="bytes"),
    # model
    Apply("actor.model.precision", "", nullable(PRECISION), _precision,
          note="dtype of matrix products. Weights are kept in fp32, as in Megatron's optimizer: in 16 bits small updates would be "
          "lost to rounding. fp16 uses loss scaling"),
    Apply("actor.model.model_path", "model.path", PATH),
    Apply("actor.model.model_type", "", MODEL_TYPE, model_type),
    _megatron("model.megatron_checkpoint", "checkpoint.load_path", nullable(PATH)),
    _megatron("model.tensor_model_parallel_size", "tensor_parallel", COUNT),
    _megatron("model.pipeline_model_parallel_size", "pipeline_parallel", COUNT),
    _megatron("model.context_parallel_size", "context_parallel", COUNT),
    _megatron("model.expert_model_parallel_size", "expert_parallel", COUNT),
    _megatron("model.expert_tensor_parallel_size", "expert_tensor_parallel", COUNT),
    _megatron("model.virtual_pipeline_model_parallel_size", "virtual_pipeline", nullable(COUNT)),
    _megatron("model.sequence_parallel", "sequence_parallel", BOOL, _split_sequence,
              note="needs tensor parallelism; off without it"),
    Apply("actor.model.recompute_granularity", "train.megatron.recompute_granularity", nullable(choice("full", "selective")),
          _granularity, note="in one process full is train.gradient_checkpointing"),
    _megatron("model.recompute_method", "recompute_method", nullable(choice("block", "uniform"))),
    _megatron("model.recompute_num_layers", "recompute_num_layers", nullable(COUNT)),
    _megatron("model.moe_token_dispatcher_type", "moe_token_dispatcher", choice("allgather", "alltoall", "flex")),
    _megatron("model.moe_grouped_gemm", "moe_grouped_gemm", either(BOOL, choice(None, "te")), lambda v, _: bool(v)),
    Unsupported("actor.model.moe_aux_loss_coeff", "set it to 0: there is no auxiliary loss for experts", default=0.0),
    *(NoEffect(f"actor.model.{key}", ANY, "set by the model's config.json") for key in
      ("moe_router_load_balancing_type", "moe_router_topk", "moe_router_pre_softmax", "init_method_std")),
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
    NoEffect("actor.model.encoder_seq_length", COUNT, "decoders have no encoder; lengths are set in `runner` and `data`"),
    # adapters and loading
    Apply("actor.model.is_lora", "", BOOL, _is_lora, note="model.lora"),
    Apply("actor.model.lora_rank", "", COUNT, _lora("rank"), default=32),
    Apply("actor.model.lora_path", "", nullable(PATH), _lora("path")),
    Apply("actor.model.attn_implementation", "model.attention", choice("flash_attention_2", "sdpa", "eager")),
    Apply("actor.model.low_cpu_mem_usage", "model.low_memory_load", BOOL),
    Apply("actor.model.trust_remote_code", "", BOOL, _trust, note="model.trust_remote_code, if set here or for the tokenizer"),
    # optimizer
    Apply("actor.optim.optimizer", "train.optimizer.kind", choice("adam", "sgd"),
          mapped({"adam": "adamw", "sgd": "sgd"}), note="adam has decoupled weight decay (AdamW)"),
    Implied("actor.optim.bf16", nullable(BOOL), "set by actor.model.precision, which must not contradict it"),
    Implied("actor.optim.fp16", nullable(BOOL), "set by actor.model.precision, which must not contradict it"),
    Apply("actor.optim.lr", "train.optimizer.lr", POSITIVE),
    Apply("actor.optim.value_lr", "train.optimizer.value_lr", POSITIVE, note="of a value head in the policy"),
    Apply("actor.optim.adam_beta1", "train.optimizer.betas", number(0.0, 1.0, samples=(0.8, 0.85)), _betas, default=0.9),
    Apply("actor.optim.adam_beta2", "train.optimizer.betas", number(0.0, 1.0, samples=(0.9, 0.99)), _betas, default=0.999),
    Apply("actor.optim.adam_eps", "train.optimizer.eps", POSITIVE, default=1e-8),
    Apply("actor.optim.min_lr", "", NON_NEGATIVE, when(constant, then=_floor), note="actor.lr_sched.min_lr takes precedence"),
    Apply("actor.optim.weight_decay", "train.optimizer.weight_decay", NON_NEGATIVE, default=0.01),
    Apply("actor.optim.clip_grad", "train.max_grad_norm", NON_NEGATIVE, lambda value, _: value or None, default=1.0,
          note="global norm; 0: none"),
    Apply("actor.optim.loss_scale_window", "", COUNT, _scale_window, default=1000,
          note="fp16: finite steps after which the loss scale doubles"),
    Apply("actor.optim.loss_scale", "train.grad_scaler.init_scale", nullable(POSITIVE), _loss_scale,
          note="fp16: the initial scale, doubled and halved from there; RLinf's is constant. Gradients do not depend on it"),
    _megatron("optim.use_distributed_optimizer", "distributed_optimizer", BOOL),
    _megatron("optim.overlap_grad_reduce", "overlap_grad_reduce", BOOL),
    _megatron("optim.overlap_param_gather", "overlap_param_gather", BOOL),
    _megatron("optim.overlap_param_gather_with_optimizer_step", "overlap_param_gather_with_step", BOOL),
    NoEffect("actor.optim.optimizer_enable_pin", BOOL, "not read by RLinf; offloaded state is always pinned"),
    _schedule("optim.lr_scheduler", "decay", choice("constant", "cosine"), when(fsdp_file)),
    _schedule("optim.lr_warmup_steps", "warmup_steps", NATURAL, when(fsdp_file)),
    _schedule("optim.lr_warmup_steps_ratio", "warmup_fraction", SHARE, when(fsdp_file)),
    _schedule("optim.total_training_steps", "decay_steps", COUNT, when(fsdp_file, constant)),
    # schedule
    _schedule("lr_sched.lr_warmup_fraction", "warmup_fraction", nullable(number(0.0, 1.0, samples=(0.1, 0.2))), _warmup,
              note="of all optimizer steps; lr_warmup_iters above 0 takes precedence"),
    _schedule("lr_sched.lr_warmup_init", "", NON_NEGATIVE, _ratio("start_ratio"), note="as a share of actor.optim.lr"),
    _schedule("lr_sched.lr_warmup_iters", "warmup_steps", NATURAL, note="optimizer steps"),
    NoEffect("actor.lr_sched.max_lr", POSITIVE, "the peak learning rate is actor.optim.lr"),
    _schedule("lr_sched.min_lr", "", NON_NEGATIVE, when(constant, then=_ratio("min_ratio")),
              note="as a share of actor.optim.lr; takes precedence over actor.optim.min_lr"),
    _schedule("lr_sched.lr_decay_style", "decay", choice(*_DECAYS), mapped(_DECAYS)),
    _schedule("lr_sched.lr_decay_iters", "decay_steps", COUNT, when(constant), note="optimizer steps"),
    _schedule("lr_sched.start_weight_decay", "", nullable(NON_NEGATIVE), _decay_ramp),
    _schedule("lr_sched.end_weight_decay", "", nullable(NON_NEGATIVE), _decay_ramp),
    # tokenizer
    Apply("actor.tokenizer.tokenizer_model", "model.tokenizer", PATH),
    NoEffect("actor.tokenizer.use_fast", BOOL, "not read by RLinf; the model folder determines the tokenizer"),
    Apply("actor.tokenizer.trust_remote_code", "", BOOL, _trust, note="model.trust_remote_code, if set here or for the model"),
    NoEffect("actor.tokenizer.padding_side", choice("left", "right"), "packed rows need no padding"),
    NoEffect("actor.tokenizer.tokenizer_type", choice("HuggingFaceTokenizer"), "only Hugging Face tokenizers are supported"),
    Apply("actor.tokenizer.extra_vocab_size", "model.vla.extra_vocab_size", NATURAL, when(robots_only)),
    # Megatron
    _megatron("megatron.ddp_bucket_size", "ddp_bucket_size", nullable(COUNT), note="in parameters"),
    _megatron("megatron.distributed_backend", "distributed_backend", choice("nccl", "gloo")),
    _megatron("megatron.distributed_timeout_minutes", "timeout_minutes", POSITIVE),
    _megatron("megatron.ckpt_format", "checkpoint.format", choice("torch", "torch_dist", "zarr")),
    _megatron("megatron.use_dist_ckpt", "checkpoint.distributed", BOOL),
    _megatron("megatron.tp_comm_bootstrap_backend", "tp_comm_bootstrap", choice("nccl", "mpi", "gloo")),
    _megatron("megatron.tp_comm_overlap_cfg", "tp_comm_overlap_file", nullable(PATH)),
    _megatron("megatron.use_hf_ckpt", "checkpoint.from_hf", BOOL),
    _megatron("megatron.ckpt.model", "checkpoint.preset", TEXT),
    _megatron("megatron.ckpt.model_type", "checkpoint.model_type", FREE),
    _megatron("megatron.ckpt.hf_model_path", "checkpoint.hf_path", PATH),
    _megatron("megatron.ckpt.save_path", "checkpoint.cache_dir", PATH),
    _megatron("megatron.ckpt.use_gpu_num", "", NATURAL, _conversion_devices, note="0: in host memory"),
    _megatron("megatron.ckpt.use_gpu_index", "", DEVICES, _conversion_devices, note="takes precedence over use_gpu_num"),
    _megatron("megatron.ckpt.process_num", "checkpoint.num_processes", COUNT),
    _megatron("megatron.ckpt.tensor_model_parallel_size", "checkpoint.tensor_parallel", COUNT),
    _megatron("megatron.ckpt.pipeline_model_parallel_size", "checkpoint.pipeline_parallel", COUNT),
    *(NoEffect(f"actor.megatron.ckpt.{key}", ANY, "for RLinf's checkpoint conversion only; braid reads the Hugging Face folder directly") for key in
      ("expert_model_parallel_size", "expert_tensor_parallel_size", "grouped_gemm", "te_ln_linear_qkv",
       "te_ln_linear_mlp_fc1", "te_ln_add_extra_state")),
    NoEffect("actor.megatron.mbridge", BOOL, "the Hugging Face folder is read directly, without conversion"),
    Unsupported("actor.megatron.use_profiler", "use an external profiler", default=False),
    NoEffect("actor.megatron.profiler.*", ANY, "for actor.megatron.use_profiler only"),
    # FSDP
    Apply(
        "actor.fsdp_config.strategy", "train.backend",
        Takes("one of fsdp, fsdp2 (case-insensitive)", lambda v: isinstance(v, str) and v.lower() in ("fsdp", "fsdp2"),
              ("fsdp", "fsdp2", "FSDP2"), ("fsdp", "fsdp2")),
        _strategy,
    ),
    _fsdp("sharding_strategy", "sharding", choice(*_SHARDINGS), fsdp, mapped(_SHARDINGS)),
    _fsdp("cpu_offload", "cpu_offload", BOOL, fsdp2),
    _fsdp("offload_pin_memory", "pin_memory", BOOL, fsdp2, note="with cpu_offload"),
    _fsdp("reshard_after_forward", "reshard_after_forward", BOOL, fsdp2),
    _fsdp("enable_gradient_accumulation", "sync_last_micro_batch_only", BOOL, fsdp),
    _fsdp("forward_prefetch", "forward_prefetch", BOOL, fsdp1),
    _fsdp("limit_all_gathers", "limit_all_gathers", BOOL, fsdp1),
    _fsdp("backward_prefetch", "backward_prefetch", nullable(choice("pre", "post")), fsdp1, null_as("off")),
    _fsdp("use_orig_params", "use_orig_params", BOOL, fsdp1),
    Apply("actor.fsdp_config.use_liger_kernel", "train.liger_kernels", BOOL, when(fsdp)),
    _fsdp("fsdp_size", "size", integer(-1, samples=(2, 4, -1)), fsdp2, _all_devices, note="-1: all devices"),
    Apply("actor.fsdp_config.gradient_checkpointing", "train.gradient_checkpointing", BOOL, when(fsdp_file)),
    *(_fsdp(f"mixed_precision.{key}_dtype", f"{key}_dtype", nullable(DTYPE), idle, unless_null(why="null: fp32"))
      for key, idle in (("param", fsdp), ("reduce", fsdp), ("buffer", fsdp1))),
    _fsdp("hybrid_shard_size", "size", integer(-1, samples=(2, 4, -1)), fsdp, _hybrid_size),
    NoEffect("actor.fsdp_config.gradient_checkpointing_use_reentrant", BOOL, "it does not change gradients"),
    Apply("actor.fsdp_config.amp_autocast.enabled", "", BOOL, when(fsdp_file, then=_amp),
          note="true: train.autocast is amp_autocast.precision; false: actor.model.precision"),
    Apply("actor.fsdp_config.amp_autocast.precision", "", DTYPE, when(fsdp_file, then=_amp_precision)),
    Apply("actor.fsdp_config.grad_scaler.enabled", "", BOOL, when(fsdp_file, then=_grad_scaler)),
    Apply("actor.fsdp_config.grad_scaler.init_scale", "train.grad_scaler.init_scale", POSITIVE,
          when(fsdp_file, then=_of_scaler)),
    Apply("actor.fsdp_config.grad_scaler.growth_interval", "train.grad_scaler.growth_interval", COUNT,
          when(fsdp_file, then=_of_scaler)),
    NoEffect("actor.fsdp_config.amp_grad_scaler.enabled", BOOL, "RLinf reads grad_scaler.enabled instead"),
    NoEffect("actor.fsdp_config.wrap_policy.*", ANY, "each layer is always wrapped as a unit"),
)
# fmt: on
