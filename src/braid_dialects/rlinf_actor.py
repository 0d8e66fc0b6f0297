"""RLinf's `actor` keys: backend, precision, optimizer, schedule, Megatron, FSDP."""

from __future__ import annotations

import math
from typing import Any

from . import rlinf_facts as facts
from .conditions import BY_BACKEND, needs, overridden, refused, unless
from .conversions import already, computed, null_as, or_null, unless_null
from .rlinf_facts import (
    DECAYS,
    FP16,
    FSDP,
    FSDP1,
    FSDP2,
    FSDP_FILE,
    MEGATRON,
    MEGATRON_FILE,
    ROBOTS_ONLY,
    VALUES,
    WORKERS,
)
from .rlinf_rollout import FOLDER, MODEL_TYPE, PRECISION, model_type
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source
from .values import choice, nullable

_SHARDINGS = {"full_shard": "full", "shard_grad_op": "grad_op", "hybrid_shard": "hybrid", "no_shard": "none"}


def _precision(source: Source) -> Became:
    """The compute dtype. Trained weights are kept in fp32, the frozen base of an adapter in this
    precision."""
    kind, is_frozen = facts.precision(source), source["actor.model.is_lora"]
    native = {"model.dtype": kind if is_frozen else "fp32", "train.autocast": _autocast(source)}
    if facts.engine(source) != "native" and source["rollout.model.precision"] is None:
        native["rollout.engine.dtype"] = kind
    return Became(native, note="dtype of the frozen weights below the adapter" if is_frozen else "")


def _autocast(source: Source) -> str:
    """Native dtype of matrix products over fp32 weights."""
    amp, kind = "actor.fsdp_config.amp_autocast", facts.precision(source)
    if facts.file_backend(source) != "megatron" and source[f"{amp}.enabled"]:
        kind = source[f"{amp}.precision"] or "bf16"
    return "none" if kind == "fp32" else kind


def _grad_scaler(value: bool, source: Source) -> Became:
    scale = source[".init_scale"]
    scaler = {"train.grad_scaler.init_scale": 65536.0 if scale is None else scale}
    return Became(scaler if value else {"train.grad_scaler": None})


def _ratio(value: float, source: Source) -> float:
    """Convert a learning rate to a fraction of actor.optim.lr."""
    lr = source["actor.optim.lr"]
    if lr is None or value > lr:
        shown = lr if lr is None else f"{lr:g}"
        raise ValueError(f"{value:g} is above the peak learning rate actor.optim.lr={shown}; lower it")
    return value / lr


def _granularity(value: str | None, source: Source) -> Any:
    if facts.backend(source) == "single" and facts.file_backend(source) == "megatron":
        return Became({"train.gradient_checkpointing": value == "full"})
    return MEGATRON(value or "off", source)


def _is_shared(source: Source) -> bool:
    return source.backend == "single" and facts.engine(source) == "native"


def _offload(value: bool, source: Source) -> Became:
    names = ["optimizer"] if _is_shared(source) else ["weights", "optimizer"]
    return Became({f"train.offload.{name}": value for name in names})


def _schedule(value: str, source: Source) -> Became:
    """lr_scheduler; PyTorch's cosine ends at a learning rate of 1e-6."""
    (decay,) = source.native
    ends = {decay.replace("decay", "min_ratio"): _ratio(1e-6, source)} if value == "torch_cosine" else {}
    return Became({decay: value.removeprefix("torch_"), **ends})


def _in_steps(value: int, source: Source) -> int:
    """Optimizer steps; RLinf's schedule of a robot policy goes on once a round."""
    return value * facts.steps_per_round(source) if facts.is_robots(source) else value


_PLAIN_SCHEDULE = unless(
    lambda s: str(s["actor.optim.lr_scheduler"]).startswith("torch_"),
    "torch_constant and torch_cosine have neither a warm-up nor another minimum than 1e-6",
)
_WARMUP = unless(
    lambda s: (s["actor.lr_sched.lr_warmup_iters"] or 0) > 0, "overridden by actor.lr_sched.lr_warmup_iters"
)
_BETAS = computed(lambda s: [s["actor.optim.adam_beta1"], s["actor.optim.adam_beta2"]])
_TRUST = computed(
    lambda s: any(s[f"actor.{part}.trust_remote_code"] is True for part in ("model", "tokenizer"))
)
_IS_LORA = needs("actor.model.is_lora")
_HYBRID = unless(
    lambda s: s["actor.fsdp_config.sharding_strategy"] != "hybrid_shard",
    "for sharding_strategy=hybrid_shard only",
)
_LAYER = "remove it: the models supported with megatron (llama, qwen2, qwen3, qwen3_moe, mixtral) have "

# One rule per line.
# fmt: off
_ACTOR = section("actor", "train")(
    to("group_name", "cluster.group_names.policy", "text", WORKERS),
    to("training_backend", ".backend.kind", "megatron|fsdp", BY_BACKEND, lambda _, s: facts.file_backend(s),
       default="megatron"),
    missing("mcore_gpt", "set it to true: only Megatron-core is supported", default=True),
    missing("spec_name", _LAYER + "decoder_gpt", MEGATRON, default="decoder_gpt"),
    to("offload_optimizer", ".offload.optimizer", "bool"),
    to("offload_weight", ".offload.weights", "bool",
       unless(_is_shared, "in a single process the engine samples with the trainer's own weights")),
    to("offload_grad", ".offload.gradients", "bool",
       unless(lambda s: s.backend == "single", "in a single process gradients are freed after every step")),
    to("enable_offload", "", "bool", _offload, note="train.offload.weights and train.offload.optimizer"),
    to("enable_dp_load_balance", ".balance_ranks", "bool", WORKERS, default=False),
    to("calculate_flops", ".count_flops", "bool", note="training counts as three forward passes"),
    to("seed", "run.seed", "natural"),
    to("micro_batch_size", ".micro_batch_tokens", "count", ROBOTS_ONLY, lambda v, s: v * facts.positions(s),
       note=
           "decisions per device, times the log-probs of each (algorithm.logprob_type); an episode is "
           "never divided"),
    to("global_batch_size", ".steps_per_pass", "count", ROBOTS_ONLY, computed(facts.steps_per_pass),
       note=
           "steps = total_num_envs * rollout_epoch * (max_steps_per_rollout_epoch // num_action_chunks) // "
           "this"),
    always("combine_reference_model", "the reference is a copy of the policy's initial weights", "bool"),
    missing("sync_precision", "weights are sent in the engine's dtype"),
    to("sync_bucket_capacity", "rollout.weight_sync.bucket_bytes", "count", note="bytes"))

_MODEL = section("actor.model", "model")(
    to("precision", "", nullable(PRECISION), unless_null("fp32"), computed(_precision),
       note="of matrix products; weights stay fp32. fp16 uses loss scaling"),
    to("model_path", ".path", FOLDER,
       unless(lambda s: s["actor.model.model_type"] in facts.SMALL_POLICIES, "the policy is built from sizes"),
       refused(lambda v, _: v == "" and "set it to the policy's folder")),
    to("model_type", "", MODEL_TYPE, model_type),
    missing("moe_aux_loss_coeff", "set it to 0; other backends have a load-balancing loss "
            "(braid.train.router_aux_coef)", default=0.0),
    ignored("{moe_router_load_balancing_type,moe_router_topk,moe_router_pre_softmax,init_method_std}",
            "set by the model's config.json"),
    ignored("{encoder_seq_length,seq_length,variable_seq_lengths}", "rows are packed without padding"),
    ignored("{persist_layer_norm,attention_softmax_in_fp32}", "norms and softmaxes are always in float32"),
    ignored("use_cpu_initialization", "weights are read from the model folder"),
    to("is_lora", ".lora", "bool",
       lambda v, s: {name: s[f".lora_{name}"] for name in ("rank", "path")} if v else None,
       note="alpha = rank, no dropout, all linear layers"),
    to("lora_rank", ".lora.rank", "count", _IS_LORA, default=32),
    to("lora_path", ".lora.path", "path?", _IS_LORA),
    to("attn_implementation", ".attention", "flash_attention_2|sdpa|eager"),
    to("low_cpu_mem_usage", ".low_memory_load", "bool"),
    to("trust_remote_code", ".trust_remote_code", "bool", _TRUST, note="here or for the tokenizer"))

_LAYERS = section("actor.model", "train.backend", MEGATRON)(
    to("tensor_model_parallel_size", ".tensor_parallel", "count"),
    to("pipeline_model_parallel_size", ".pipeline_parallel", "count"),
    to("context_parallel_size", ".context_parallel", "count"),
    to("expert_model_parallel_size", ".expert_parallel", "count"),
    to("expert_tensor_parallel_size", ".expert_tensor_parallel", "count"),
    to("virtual_pipeline_model_parallel_size", ".virtual_pipeline", "count?"),
    to("sequence_parallel", ".*", "bool", lambda v, s: v and (s[".tensor_model_parallel_size"] or 1) > 1,
       note="needs tensor parallelism; off without it"),
    to("recompute_method", ".*", "block|uniform?"),
    to("recompute_num_layers", ".*", "count?"),
    to("moe_token_dispatcher_type", ".moe_token_dispatcher", "allgather|alltoall|flex"),
    to("moe_grouped_gemm", ".*", choice(True, False, None, "te"), lambda v, _: bool(v)),
    to("apply_rope_fusion bias_dropout_fusion bias_activation_fusion gradient_accumulation_fusion "
       "batch_p2p_comm", ".transformer.*", "bool"),
    missing("megatron_checkpoint",
            "convert it to a Hugging Face folder, and set actor.model.model_path to that"),
    missing("activation", _LAYER + "swiglu", default="swiglu"),
    missing("normalization", _LAYER + "rmsnorm", default="rmsnorm"),
    missing("position_embedding_type", _LAYER + "rope", default="rope"),
    missing("add_bias_linear", _LAYER + "none", default=False))

_OPTIMIZER = section("actor.optim", "train.optimizer")(
    to("optimizer", ".kind", {"adam": "adamw", "sgd": "sgd"}, note="adam has decoupled weight decay (AdamW)"),
    to("critic_warmup_steps", "critic.warmup_rounds", "natural", ROBOTS_ONLY, VALUES,
       lambda v, s: math.ceil(v / facts.steps_per_round(s)), note="optimizer steps, rounded up to whole rounds"),
    always("{bf16,fp16}", "set by actor.model.precision, which must not contradict it", "bool?"),
    to("lr", ".lr", "positive"),
    to("value_lr", ".value_lr", "positive", note="of a value head in the policy"),
    to("adam_beta1", ".betas", "share", _BETAS, default=0.9),
    to("adam_beta2", ".betas", "share", _BETAS, default=0.999),
    to("adam_eps", ".eps", "positive", default=1e-8),
    to("min_lr", ".schedule.min_ratio", "non-negative", DECAYS, overridden("actor.lr_sched.min_lr"),
       _PLAIN_SCHEDULE, _ratio),
    to("weight_decay", ".weight_decay", "non-negative", default=0.01),
    to("clip_grad", "train.max_grad_norm", "non-negative", or_null, default=1.0, note="global norm; 0: none"),
    to("loss_scale_window", "train.grad_scaler.growth_interval {scaler}.dynamic_loss_scale_window", "count",
       MEGATRON_FILE, FP16, default=1000, note="fp16: finite steps after which the loss scale doubles"),
    to("loss_scale", "train.grad_scaler.init_scale", "positive?", MEGATRON_FILE, FP16, unless_null("default"),
       lambda v, _: float(v), note="fp16: the initial scale; constant in RLinf"),
    to("use_distributed_optimizer", "train.backend.distributed_optimizer", "bool", MEGATRON),
    to("{overlap_grad_reduce,overlap_param_gather}", "train.backend.*", "bool", MEGATRON),
    missing("overlap_param_gather_with_optimizer_step", "set it to false; see overlap_param_gather",
            MEGATRON, default=False),
    ignored("optimizer_enable_pin", "not read by RLinf; offloaded state is always pinned"),
    to("lr_scheduler", ".schedule.decay", "constant|cosine|torch_constant|torch_cosine", FSDP_FILE, _schedule),
    to("lr_warmup_steps", ".schedule.warmup_steps", "cadence", FSDP_FILE, _PLAIN_SCHEDULE,
       unless(lambda s: s[s.at] == -1, "-1: see lr_warmup_steps_ratio"), _in_steps,
       note="of robots rounds, times their steps"),
    to("lr_warmup_steps_ratio", ".schedule.warmup_fraction", "share", FSDP_FILE, _PLAIN_SCHEDULE),
    to("total_training_steps", ".schedule.decay_steps", "count", FSDP_FILE, DECAYS, _in_steps,
       note="of robots rounds, times their steps"),
    missing("num_cycles", "set it to 0.5: half a cosine, from the peak to the minimum", DECAYS, default=0.5))

_SCHEDULE = section("actor.lr_sched", "train.optimizer.schedule")(
    to("lr_warmup_fraction", ".warmup_fraction", "share?", _WARMUP,
       lambda v, _: v or 0.0),
    to("lr_warmup_init", ".start_ratio", "non-negative", _ratio, note="as a share of actor.optim.lr"),
    to("lr_warmup_iters", ".warmup_steps", "natural", note="optimizer steps"),
    ignored("max_lr", "the peak learning rate is actor.optim.lr"),
    to("min_lr", ".min_ratio", "non-negative", DECAYS, _ratio),
    to("lr_decay_style", ".decay",
       {name: name for name in ("constant", "linear", "cosine")} | {"inverse-square-root": "inverse_sqrt",
                                                                    "WSD": "wsd"}),
    to("lr_decay_iters", ".decay_steps", "count", DECAYS, note="optimizer steps"),
    missing("{start_weight_decay,end_weight_decay}", "set it to the value of actor.optim.weight_decay",
            unless(lambda s: s[s.at] == s["actor.optim.weight_decay"], "it is actor.optim.weight_decay")))

_TOKENIZER = section("actor.tokenizer", "model")(
    to("tokenizer_model", ".tokenizer", "path"),
    to("trust_remote_code", ".trust_remote_code", "bool", _TRUST, note="here or for the model"),
    ignored("use_fast padding_side tokenizer_type", "the model folder determines the tokenizer"),
    to("extra_vocab_size", ".vla.extra_vocab_size", "natural", ROBOTS_ONLY, facts.VLA))

_MEGATRON = section("actor.megatron", "train.backend", MEGATRON)(
    to("ddp_bucket_size", ".ddp_bucket_size", "count?", note="in parameters"),
    to("distributed_timeout_minutes", ".timeout_minutes", "positive"),
    ignored("distributed_backend tp_comm_bootstrap_backend", "collectives use NCCL on GPUs, gloo on CPUs"),
    missing("tp_comm_overlap_cfg", "remove it: it needs Transformer Engine's layers"),
    missing("use_hf_ckpt", "convert the Megatron checkpoint to a Hugging Face folder, and set "
            "actor.model.model_path to it", default=True),
    ignored("ckpt_format use_dist_ckpt", "all backends share one checkpoint format"),
    ignored("ckpt.{model,model_type,hf_model_path,save_path,use_gpu_num,use_gpu_index,process_num} "
            "ckpt.{tensor_model_parallel_size,pipeline_model_parallel_size,expert_model_parallel_size} "
            "ckpt.{expert_tensor_parallel_size,grouped_gemm,te_ln_linear_qkv,te_ln_linear_mlp_fc1} "
            "ckpt.te_ln_add_extra_state mbridge", "the Hugging Face folder is read without conversion"),
    missing("use_profiler", "use an external profiler", default=False),
    ignored("profiler.*", "for actor.megatron.use_profiler only"))

_FSDP = section("actor.fsdp_config", "train.backend")(
    to("strategy", "train.backend.kind", "fsdp|fsdp2|FSDP|FSDP2", FSDP_FILE, BY_BACKEND, lambda _, s: facts.file_backend(s)),
    to("sharding_strategy", ".sharding", _SHARDINGS, FSDP),
    to("cpu_offload", ".cpu_offload", "bool", FSDP2),
    to("offload_pin_memory", ".pin_memory", "bool", FSDP2, note="with cpu_offload"),
    to("reshard_after_forward", ".*", "bool", FSDP2),
    to("enable_gradient_accumulation", ".sync_last_micro_batch_only", "bool", FSDP),
    to("{forward_prefetch,limit_all_gathers}", ".*", "bool", FSDP1),
    to("use_orig_params", "", "bool", FSDP, already("optimizer groups and adapters need them")),
    to("backward_prefetch", ".*", "pre|post?", FSDP1, null_as("off")),
    to("use_liger_kernel", "train.liger_kernels", "bool", FSDP),
    to("fsdp_size", ".size", "cadence", FSDP2, lambda v, _: v if v > 0 else None, note="-1: all devices"),
    to("hybrid_shard_size", ".size", "cadence", FSDP, _HYBRID, lambda v, _: v if v > 0 else None),
    to("gradient_checkpointing", "train.gradient_checkpointing", "bool", FSDP_FILE),
    to("mixed_precision.{param_dtype,reduce_dtype}", ".*", nullable(PRECISION), FSDP, unless_null("fp32"), facts.dtype),
    to("mixed_precision.buffer_dtype", ".*", nullable(PRECISION), FSDP1, unless_null("fp32"), facts.dtype),
    ignored("gradient_checkpointing_use_reentrant", "it does not change gradients"),
    to("amp_autocast.enabled", "train.autocast", "bool", FSDP_FILE, computed(_autocast),
       note="true: train.autocast is amp_autocast.precision; false: actor.model.precision"),
    to("amp_autocast.precision", "train.autocast", "fp32|bf16|fp16", FSDP_FILE,
       needs("actor.fsdp_config.amp_autocast.enabled"), computed(_autocast)),
    to("grad_scaler.enabled", "", "bool", FSDP_FILE, _grad_scaler),
    to("grad_scaler.init_scale", "train.grad_scaler.init_scale", "positive", FSDP_FILE,
       needs("actor.fsdp_config.grad_scaler.enabled")),
    to("grad_scaler.growth_interval", "train.grad_scaler.growth_interval", "count", FSDP_FILE,
       needs("actor.fsdp_config.grad_scaler.enabled")),
    ignored("amp_grad_scaler.enabled", "RLinf reads grad_scaler.enabled instead"),
    ignored("wrap_policy.* {transformer_layer_cls_to_wrap,special_param_names_to_wrap}",
            "each layer is always wrapped as a unit"))

RULES = rows(
    _ACTOR,
    _MODEL,
    to("actor.model.recompute_granularity", "train.backend.recompute_granularity", "full|selective?",
       _granularity, note="in one process full is train.gradient_checkpointing"),
    _LAYERS, _OPTIMIZER, _SCHEDULE, _TOKENIZER, _MEGATRON, _FSDP,
)
# fmt: on
