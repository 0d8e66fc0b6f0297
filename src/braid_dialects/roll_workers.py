"""ROLL's worker keys: models, optimizers, devices and strategies of actor_train, critic, reference and
actor_infer."""

from __future__ import annotations

from typing import Any

from braid.plan.placement import format_numbers

from . import roll_facts as facts
from .conditions import BY_ENGINE, needs, of_backend, of_engine, overridden, unless
from .conversions import computed, null_as, opposite, unless_null
from .devices import DEVICES, parse_devices
from .roll_facts import ENGINES, TRAIN, file_backend, role_of
from .roll_pipeline import ONE_PROCESS, with_batches
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source, implied, no_effect, unsupported
from .values import choice, nullable

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}
OTHER_SCHEDULES = ("cosine_with_restarts", "polynomial", "reduce_lr_on_plateau", "cosine_with_min_lr")
TORCH_DTYPES = {name: name for name in ("fp32", "bf16", "fp16")} | {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"
}  # fmt: skip
LOSSES = {
    "vanilla": "policy_gradient",
    "ppo": "ppo_clip",
    "tis": "cispo",
    "topr": "topr",
    "cispo": "cispo",
    "kimi15": "kimi",
}


def used(value: Any, source: Source) -> Any:
    """No effect for keys of a critic or reference that is not used, or has no settings of its own."""
    role = role_of(source)
    if role == "reference" and facts.kl_place(source) is None:
        return no_effect("there is no KL term, so no reference")
    if role == "critic" and not facts.has_own_critic(source):
        return no_effect(f"adv_estimator={source['adv_estimator']} uses no critic")
    return value


def _device_mapping(value: Any, source: Source) -> Any:
    role, numbers = role_of(source), format_numbers(parse_devices(value))
    made: dict[str, Any] = facts.batches(source) if role in ("actor_train", "critic") else {}
    if not facts.is_one_process(source):
        made |= dict.fromkeys(source.native, numbers)
        if role == "actor_infer" and facts.engine(source) != "native":
            made[f"rollout.{facts.engine(source)}.replicas"] = facts.replicas(source)
    return Became(made) if made else ONE_PROCESS(value, source)


def _compute_dtype(value: str | None, source: Source) -> Became:
    scaler = {f"{TRAIN[role_of(source)]}.grad_scaler.init_scale": 65536.0} if value == "fp16" else {}
    return Became(dict.fromkeys(source.native, _AUTOCAST[value]) | scaler)


def _variant(_: str, source: Source) -> Became:
    variant, (low, high) = facts.variant(source), facts.clip_range(source)
    fixed = {"clip_low": low, "clip_high": high} if variant in ("tis", "cispo") else {}
    parts = {"policy_loss": LOSSES[variant], **fixed}
    return Became({f"algorithm.{name}": part for name, part in parts.items()})


def _worker_class(value: str, source: Source) -> Became:
    match value.rpartition(".")[2]:
        case "ActorWorker":
            return implied("PPO's loss")
        case "ActorPGWorker":
            return _variant(value, source)
    return unsupported("use ActorWorker or ActorPGWorker; other workers are not supported")


def _sized(value: int | None, source: Source) -> Became:
    """A size in the batch arithmetic. Where the command line chooses another backend, it sets only the number
    of optimizer steps."""
    is_used = source.backend in (None, file_backend(source, role_of(source)))
    return with_batches(value or 1, source) if is_used else Became(facts.batches(source))


def _micro_rows(value: int, source: Source) -> Became:
    by_tokens = source["..use_dynamic_batching_in_train"]
    return Became(facts.batches(source)) if by_tokens else with_batches(value, source)


def _tokens(_: Any, source: Source) -> Any:
    """A limit of micro-batches in tokens."""
    what = source.at.rpartition("_")[2]
    if not source[f".use_dynamic_batching_in_{what}"]:
        return implied("micro-batches have a fixed number of rows")
    return source[f".max_tokens_per_microbatch_in_{what}"] or 8192


def _strategy(_: str, source: Source) -> Became:
    if source.backend is not None:
        return no_effect("overridden by --backend; batch sizes are computed as for the file's strategy")
    made: dict[str, Any] = {} if role_of(source) == "reference" else facts.batches(source)
    return Became(made | dict.fromkeys(source.native, file_backend(source, role_of(source))))


def _sequence_parallel(value: bool, source: Source) -> Any:
    if (source[".tensor_model_parallel_size"] or 1) == 1:
        return no_effect("for tensor_model_parallel_size above 1 only")
    return value or (source[".expert_model_parallel_size"] or 1) > 1


def _recompute(value: str | None, source: Source) -> Became:
    (native,) = source.native
    made: dict[str, Any] = {native: value or "off"}
    if value == "full" and source[".recompute_method"] is None and source[".recompute_num_layers"] is None:
        megatron = native.rpartition(".")[0]
        made |= {f"{megatron}.recompute_method": "uniform", f"{megatron}.recompute_num_layers": 1}
    return Became(made)


def _engine_sizes(value: int, source: Source) -> Became:
    sizes = {"tensor_parallel": facts.engine_tensor_parallel(source), "replicas": facts.replicas(source)}
    own = {f"rollout.{facts.engine(source)}.{name}": size for name, size in sizes.items()}
    return Became(dict.fromkeys(source.native, value) | own)


_AUTOCAST = {"fp32": "none", "bf16": "bf16", "fp16": "fp16", None: "auto"}
_IS_LORA = unless(lambda s: not s[".lora_target"], "there are no adapters without lora_target")
_BETAS = computed(lambda s: [s[".adam_beta1"], s[".adam_beta2"]])
_IS_TOPR = unless(lambda s: facts.variant(s) != "topr", "pg_variant is not topr")
_BY_ROWS = unless(
    lambda s: s[".use_dynamic_batching_in_infer"], "overridden by use_dynamic_batching_in_infer"
)
_OF_MEGATRON = unless(lambda s: file_backend(s, role_of(s)) != "megatron", "the file's strategy is fsdp2")
_OF_FSDP2 = unless(lambda s: file_backend(s, role_of(s)) != "fsdp2", "the file's strategy is megatron")
_MEGATRON, _FSDP2, _SERVED = of_backend("megatron"), of_backend("fsdp2"), of_engine("vllm", "sglang")
_CONFIG = "strategy_args.strategy_config"
_DP = "dp = devices / (TP * PP * CP)"

# One rule per line.
# fmt: off
_OF_EVERY_ROLE = section("{actor_train,critic,reference,actor_infer}")(
    to("name", "cluster.group_names.{seat}", "text", used, ONE_PROCESS),
    to("device_mapping", "cluster.placement.{seat}", nullable(DEVICES), used,
       unless_null("processes without a device", implied), _device_mapping,
       note="roles on the same devices take turns"),
    to("system_envs", "cluster.env", "{text}",
       lambda v, _: Became({f"cluster.env.{name}": text for name, text in v.items()}),
       note="applies to every worker"),
    ignored("max_concurrency", "workers process one call at a time, engines many"),
    ignored("offload_nccl", "always disabled, as in ROLL"),
    ignored("use_remove_padding", "not read by ROLL; rows are always packed"),
    ignored("model_args.{model_type,num_labels,device_map}", "determined by the role and the placement"),
    ignored("model_args.flash_attn", "not read by ROLL; use attn_implementation"),
    ignored("model_args.autocast_adapter_dtype", "adapters always have the dtype of the weights"),
    missing("model_args.moe_aux_loss_coef", "remove it; there is no auxiliary router loss"),
    missing("model_args.model_config_kwargs", "set it in config.json of the model folder"),
    missing("model_args.freeze_module_prefix", "use adapters (lora_target)"),
    missing("model_args.additional_target", "list the layers in lora_target"))

_TRAINED = section("{actor_train,critic}")(
    to("strategy_args.strategy_name", "{train}.backend", "megatron_train|fsdp2_train", used, _strategy,
       default="fsdp2_train"),
    to("infer_batch_size", "{train}.infer_batch_rows", "count", used, _BY_ROWS, default=16),
    to("model_args.dtype", "{train}.autocast", "fp32|bf16|fp16?", used, _compute_dtype, default="bf16"),
    to("model_args.disable_gradient_checkpointing", "{train}.gradient_checkpointing", "bool", used,
       unless(lambda s: s.place("backend") == "megatron", "Megatron uses recompute_granularity instead"),
       opposite, default=False),
    ignored("model_args.gradient_checkpointing_use_reentrant", "always non-reentrant"),
    to("model_args.ulysses_size", "{train}.sequence_parallel", "count?", used, _OF_FSDP2, _sized,
       default=1, note="sequence-parallel size (Ulysses); dp = devices / ulysses_size"),
    section("training_args", "{train}.optimizer", used)(
        to("learning_rate", ".lr", "positive", default=5e-5),
        to("weight_decay", ".weight_decay", "non-negative", default=0.0),
        to("adam_beta1", ".betas", "number >= 0 and <= 0.999", _BETAS, default=0.9),
        to("adam_beta2", ".betas", "number >= 0 and <= 0.9999", _BETAS, default=0.999),
        to("adam_epsilon", ".eps", "positive", default=1e-8),
        to("lr_scheduler_type", ".schedule.decay", choice(*SCHEDULES, *OTHER_SCHEDULES),
           lambda v, _: SCHEDULES.get(v) or unsupported(f"use one of {', '.join(SCHEDULES)}"),
           default="linear"),
        to("warmup_steps", ".schedule.warmup_steps", "natural", default=0),
        to("warmup_ratio", ".schedule.warmup_fraction", "number >= 0 and <= 0.9",
           unless(lambda s: s[".warmup_steps"], "overridden by warmup_steps"), default=0.0),
        to("per_device_train_batch_size", "{train}.micro_batch_rows", "count", _micro_rows, default=8,
           note="rows per micro-batch; global batch = this * gradient_accumulation_steps * dp"),
        to("gradient_accumulation_steps", "{train}.steps_per_pass", "count", with_batches, default=1,
           note="micro-batches per optimizer step; steps_per_pass = S / global batch"),
        ignored("max_steps num_train_epochs output_dir seed bf16 fp16 logging_steps save_steps eval_steps",
                "set by keys of the pipeline, as in ROLL"),
        ignored("tf32 data_seed dataloader_num_workers", "not read by ROLL in reinforcement learning")),
    to("use_dynamic_batching_in_train", "{train}.micro_batch_tokens", "bool", used, _tokens),
    to("max_tokens_per_microbatch_in_train", "{train}.micro_batch_tokens", "natural?", used,
       needs(".use_dynamic_batching_in_train"), _tokens),
    ignored("sequence_length_round_in_train", "rows are packed without padding"),
    to("sequence_packing_args.max_packed_sequence_length_train", "{train}.micro_batch_tokens", "count?", used,
       needs("..use_sequence_packing"), unless_null("no separate limit", implied)),
    always("apply_loss_scale", "denominators count the whole optimizer step", "bool"),
    always("logits_in_fp32", "log-probs are computed in fp32", "bool"),
    missing("mtp_training_mode", "set it to disabled; multi-token prediction is not supported",
            default="disabled"),
    to("world_size", "{train}.steps_per_pass", "count?", used,
       unless(lambda s: facts.devices(s, role_of(s)), "overridden by device_mapping"),
       unless_null("one rank", implied), with_batches),
    section(_CONFIG, "{train}.megatron", used, _OF_MEGATRON, _sized)(
        to("tensor_model_parallel_size", ".tensor_parallel", "count?", note=_DP),
        to("pipeline_model_parallel_size", ".pipeline_parallel", "count?", note=_DP),
        to("context_parallel_size", ".context_parallel", "count?", note=_DP)))

_WITH_LOGPROBS = section("{actor_train,critic,reference}")(
    always("num_gpus_per_worker", "training workers always have one device, as in ROLL", "count"),
    to("backend_timeout", "{train}.megatron.timeout_minutes", "count", used, _MEGATRON, default=30),
    always("router_replay.mode", "no router replay", choice("disable")),
    to("use_dynamic_batching_in_infer", "{train}.infer_batch_tokens", "bool", used, _tokens),
    to("max_tokens_per_microbatch_in_infer", "{train}.infer_batch_tokens", "natural?", used,
       needs(".use_dynamic_batching_in_infer"), _tokens),
    to("sequence_packing_args.max_packed_sequence_length_forward", "{train}.infer_batch_tokens", "count?",
       used, needs("..use_sequence_packing"), unless_null("no separate limit", implied)),
    ignored("use_sequence_packing sequence_length_round_in_infer sequence_packing_args.algorithm "
            "sequence_packing_args.min_num_micro_batches_{train,forward}", "rows are packed and balanced"),
    section(_CONFIG, "{train}.megatron", used, of_backend("megatron"))(
        to("expert_model_parallel_size", ".expert_parallel", "count?", null_as(1)),
        to("expert_tensor_parallel_size", ".expert_tensor_parallel", "count?"),
        to("virtual_pipeline_model_parallel_size", ".virtual_pipeline", "count?"),
        to("sequence_parallel", ".*", "bool", _sequence_parallel, note="always on with TP > 1 and EP > 1"),
        to("recompute_granularity", ".*", "full|selective?", _recompute,
           note="only full set: recompute each layer separately (uniform, 1)"),
        to("recompute_method", ".*", "uniform|block|recompute?",
           lambda v, _: "block" if v == "recompute" else v),
        to("{recompute_num_layers,ddp_bucket_size}", ".*", "count?"),
        to("moe_token_dispatcher_type", ".moe_token_dispatcher", "allgather|alltoall", default="allgather"),
        to("moe_grouped_gemm", ".*", "bool?", null_as(False)),
        to("{moe_layer_recompute,overlap_grad_reduce}", ".*", "bool"),
        ignored("moe_shared_expert_overlap", "no supported model has shared experts"),
        to("overlap_param_gather", ".*", "bool", note="not supported by ROLL"),
        to("use_distributed_optimizer", ".distributed_optimizer", "bool", default=False),
        to("{apply_rope_fusion,bias_activation_fusion}", ".transformer.*", "bool"),
        ignored("sequence_packing variable_seq_lengths", "rows are packed without padding"),
        ignored("accumulate_allreduce_grads_in_fp32 moe_router_dtype", "always fp32"),
        ignored("delay_grad_reduce", "gradients are always reduced after the last micro-batch"),
        ignored("check_for_nan_in_loss_and_grad", "every step is checked, and skipped if not finite"),
        ignored("calculate_per_token_loss cross_entropy_loss_fusion", "the loss is set by loss_agg_mode"),
        ignored("use_flash_attn", "not read by ROLL; use attn_implementation"),
        ignored("overlap_p2p_comm", "use braid.train.megatron.transformer"),
        ignored("save_hf_model save_merged_model", "use training_args.save_hf_model"),
        ignored("ckpt_format async_save_ckpt ckpt_d2h_non_blocking", "checkpoints have one format"),
        ignored("compile_warmup", "use braid.train.compile"),
        ignored("bf16", "overridden by model_args.dtype, as in ROLL"),
        ignored("use_batched_model_update", "weights are sent in buckets of model_update_buffer_size_mb"),
        missing("account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
                "pipeline_model_parallel_layout recompute_modules moe_aux_loss_coeff "
                "moe_router_load_balancing_type moe_expert_capacity_factor moe_pad_expert_input_to_capacity "
                "moe_token_drop_policy moe_enable_routing_replay mtp_num_layers transformer_impl "
                "cuda_graph_impl cuda_graph_scope fp8 fp8_recipe fp8_param additional_configs "
                "distrib_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient "
                "ddp_average_in_collective optimizer optimizer_cpu_offload optimizer_offload_fraction",
                "remove it, or use the keys of braid.train.megatron", default=False)),
    section(_CONFIG, "{train}.fsdp", used, of_backend("fsdp2"))(
        to("fsdp_size", ".size", "int",
           lambda v, s: v if 1 < v < facts.world(s, role_of(s)) else None, note="up to 1: all devices"),
        to("param_dtype", ".*", TORCH_DTYPES, note="trained weights stay fp32, unlike in ROLL"),
        to("reduce_dtype", ".*", TORCH_DTYPES),
        to("reshard_after_forward", ".*", "bool?", null_as(True)),
        to("offload_policy", ".cpu_offload .pin_memory", "bool"),
        to("reduce_scatter_during_grad_accumulation", ".sync_last_micro_batch_only", "bool", opposite,
           default=True),
        ignored("wrap_policy save_only_model", "layers are wrapped as units, and checkpoints whole"),
        missing("ep_size efsdp_size", "remove it; experts are sharded like other weights", default=1),
        missing("moe_use_grouped_mm apply_expert_patch", "remove it", default=False),
        missing("apply_tiled_mlp tiled_num_shards", "use a lower braid.train.micro_batch_tokens")))

_ACTOR_TRAIN = section("actor_train")(
    to("model_args.model_name_or_path", "model.path", "path", note="takes precedence over pretrain"),
    to("model_args.attn_implementation", "model.attention",
       {"sdpa": "sdpa", "fa2": "flash_attention_2", "auto": "auto", None: "auto"}),
    to("model_args.lora_target", "model.lora.targets", "text?",
       lambda v, _: implied("all weights are trained") if v is None else [of.strip() for of in v.split(",")]),
    to("model_args.lora_rank", "model.lora.rank", "count?", _IS_LORA, default=8),
    to("model_args.lora_alpha", "model.lora.alpha", "positive?", _IS_LORA,
       lambda v, s: v or 2 * s[".lora_rank"], default=None),
    missing("model_args.lora_dropout", "set it to 0: log-probs must be the same in rollout and training",
            default=0.0),
    to("model_args.adapter_name_or_path", "model.lora.path", "path?", _IS_LORA),
    to("training_args.save_hf_model", "checkpoint.export_every_rounds", "bool",
       lambda v, s: s["save_steps"] if v else 0),
    to("worker_cls", "algorithm.policy_loss", "text", _worker_class),
    to("pg_variant", "algorithm.policy_loss", choice(*LOSSES),
       unless(lambda s: facts.variant(s) != s["actor_train.pg_variant"],
              "needs worker_cls: roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker, as in ROLL"),
       _variant,
       note="vanilla, tis, cispo: -A log p with ratio 1, clip(ratio, 0, 1), clip(ratio, 0.9, 1.1); topr: "
       "clip(ratio, 0, 1) where A < 0; kimi15: + 0.05 (log p - old log p)^2"),
    to("{topr_positive_weight,topr_negative_weight}", "algorithm.*", "non-negative", _IS_TOPR, default=1.0),
    missing("model_update_frequency", "set it to 1; weights are synced every round", default=1))

_CRITIC = section("critic")(
    to("model_args.model_name_or_path", "critic.path", "path", used, note="instead of reward_pretrain"),
    ignored("training_args.save_hf_model", "only the policy is exported"))

_REFERENCE = section("reference")(
    to("strategy_args.strategy_name", "reference.train.backend", "megatron_infer|fsdp2_infer|hf_infer", used,
       _strategy, default="fsdp2_infer"),
    to("infer_batch_size", "reference.train.infer_batch_rows", "count", used, default=16),
    to("model_args.model_name_or_path", "reference.path", "path", used),
    to("model_args.dtype", "reference.train.autocast", _AUTOCAST, used, default="bf16"),
    to("model_args.ulysses_size", "reference.train.sequence_parallel", "count?", used, _FSDP2, null_as(1)),
    section(_CONFIG, "reference.train.megatron", used, _MEGATRON, null_as(1))(
        to("tensor_model_parallel_size", ".tensor_parallel", "count?"),
        to("pipeline_model_parallel_size", ".pipeline_parallel", "count?"),
        to("context_parallel_size", ".context_parallel", "count?")),
    ignored("sequence_packing_args.max_packed_sequence_length_train", "the reference model is not trained"))

_ACTOR_INFER = section("actor_infer")(
    to("num_gpus_per_worker", "", "count", _SERVED,
       unless(lambda s: facts.engine_size(s, "tensor"), "overridden by the engine's own key, as in ROLL"),
       _engine_sizes, default=1),
    to("strategy_args.strategy_name", "rollout.engine", ENGINES, BY_ENGINE, default="vllm"),
    to("model_args.dtype", "rollout.{engine}.dtype", "fp32|bf16|fp16?", null_as("auto")),
    always("model_args.model_name_or_path", "the engine always uses the policy's weights", "path"),
    ignored("model_args.attn_implementation", "chosen by the engine"),
    ignored("model_args.{lora_target,lora_rank,lora_alpha,lora_dropout,adapter_name_or_path}",
            "the engine always uses the policy's adapters"),
    ignored("infer_batch_size", "the engine schedules requests itself, as in ROLL"),
    ignored("backend_timeout", "use rpc_timeout"),
    section(_CONFIG)(
        to("load_format", "rollout.{engine}.load_weights", "dummy|auto|safetensors|pt", _SERVED,
           lambda v, _: v != "dummy", default="dummy", note="dummy: random weights until the first sync")),
    section(_CONFIG, "rollout.vllm", of_engine("vllm"))(
        to("gpu_memory_utilization", ".memory_fraction", "fraction"),
        to("block_size", ".block_size", "count?"),
        to("max_model_len", ".max_model_tokens", "count?"),
        to("tensor_parallel_size", ".tensor_parallel", "count", _engine_sizes),
        to("pipeline_parallel_size", ".pipeline_parallel", "count", _engine_sizes),
        to("enforce_eager", ".cuda_graphs", "bool", opposite),
        to("enable_prefix_caching", ".prefix_caching", "bool"),
        to("enable_chunked_prefill", ".chunked_prefill", "bool"),
        to("max_num_batched_tokens", ".prefill_tokens", "count"),
        to("disable_log_stats", ".log_stats", "bool", opposite),
        to("distributed_executor_backend", ".executor", "mp|ray|uni"),
        to("max_num_seqs", ".max_running", "count", overridden("max_running_requests")),
        ignored("disable_custom_all_reduce swap_space optimization_level cuda_graph_sizes "
                "cudagraph_capture_sizes", "vLLM's default is used; see enforce_eager"),
        ignored("{sleep_level,enable_memory_saver}", "a sleeping engine always releases weights and cache"),
        ignored("logprobs_mode", "log-probs are always those of the sampling distribution"),
        ignored("disable_mm_preprocessor_cache", "prompts are text only"),
        ignored("seed grpc_mode", "the engine is part of the run, with the run's seed"),
        missing("data_parallel_size quantization online_quantization online_quantization_config.* "
                "speculative_config dp_size ep_size enable_expert_parallel", "remove it, or start servers "
                "and list them in braid.rollout.vllm.servers")),
    section(_CONFIG, "rollout.sglang", of_engine("sglang"))(
        to("mem_fraction_static", ".memory_fraction", "fraction"),
        to("tp_size", ".tensor_parallel", "count", _engine_sizes),
        to("pp_size", ".pipeline_parallel", "count", _engine_sizes),
        to("context_length", ".max_model_tokens", "count?"),
        to("attention_backend", ".attention", "text?"),
        to("disable_cuda_graph", ".cuda_graphs", "bool", opposite),
        to("cuda_graph_max_bs", ".cuda_graph_max_batch", "count?"),
        to("disable_radix_cache", ".prefix_caching", "bool", opposite),
        to("chunked_prefill_size", ".prefill_tokens", "count"),
        to("enable_torch_compile", ".torch_compile", "bool"),
        to("torch_compile_max_bs", ".torch_compile_max_batch", "count"),
        to("decode_log_interval", ".decode_log_interval", "count"),
        to("max_running_requests", ".max_running", "count", overridden("max_running_requests"))))

WORKERS = rows(
    _ACTOR_TRAIN, _CRITIC, _REFERENCE, _ACTOR_INFER, _OF_EVERY_ROLE, _TRAINED, _WITH_LOGPROBS,
    always("{critic,reference}.model_args.attn_implementation", "same as the policy's", "sdpa|fa2|auto?"),
    ignored("{critic,reference,actor_infer}.data_args.*", "read only under actor_train and validation"),
    ignored("{critic,reference,actor_infer}.worker_cls", "determined by the role and its strategy"),
    ignored("{reference,actor_infer}.world_size", "determined by device_mapping"),
    ignored("{reference,actor_infer}.model_args.disable_gradient_checkpointing", "no backward pass"),
)
# fmt: on
