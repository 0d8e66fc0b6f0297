"""ROLL's worker keys: models, optimizers, devices and strategies of actor_train, critic, reference and
actor_infer."""

from __future__ import annotations

from typing import Any

from braid.plan.placement import format_numbers

from . import roll_facts as facts
from .conditions import BY_BACKEND, BY_ENGINE, needs, of_backend, of_engine, overridden, refused, unless
from .conversions import computed, null_as, opposite, policy_loss, unless_null
from .devices import DEVICES, parse_devices
from .roll_facts import CONFIG, ENGINES, ONE_PROCESS, TRAIN, file_backend, role_of, used
from .roll_pipeline import with_batches
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source, implied, no_effect, unsupported
from .values import choice, nullable

_DECAYS = {name: name for name in ("linear", "cosine", "constant", "inverse_sqrt")} | {
    "constant_with_warmup": "constant", "warmup_stable_decay": "wsd"
}  # fmt: skip
_SCHEDULES = _DECAYS | dict.fromkeys(
    ("cosine_with_restarts", "polynomial", "reduce_lr_on_plateau", "cosine_with_min_lr"),
    unsupported(f"use one of {', '.join(_DECAYS)}"),
)
_WARMS_UP = unless(
    lambda s: s[".lr_scheduler_type"] == "constant" and s.place("backend") != "megatron",
    "transformers' schedule constant has no warm-up; constant_with_warmup has",
)
_TORCH_DTYPES = {name: name for name in ("fp32", "bf16", "fp16")} | {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"
}  # fmt: skip
_VARIANTS = {
    "vanilla": policy_loss("policy_gradient"),
    "ppo": policy_loss("ppo_clip"),
    "tis": policy_loss("cispo", clip_low=1.0, clip_high=0.0),
    "topr": policy_loss("topr"),
    "cispo": policy_loss("cispo", clip_low=0.1, clip_high=0.1),
    "kimi15": policy_loss("kimi"),
}


def _scaled(_: str, source: Source) -> Became:
    """fp16, with a loss scale in training."""
    is_trained = role_of(source) in facts.trained_roles(source)
    scaler = {f"{TRAIN[role_of(source)]}.grad_scaler.init_scale": 65536.0} if is_trained else {}
    return Became(dict.fromkeys(source.native, "fp16") | scaler)


def _frozen(_: Any, source: Source) -> Any:
    """What is trained of the vision tower. A file of text has a language model alone."""
    if facts.reads_images(source):
        return facts.trained_tower(source)
    if all(name.startswith("vision") or "visual" in name for name in facts.frozen_modules(source)):
        return no_effect("the model reads only text, with the language model alone")
    return unsupported("use adapters: lora_target")


def _worker_class(value: str, source: Source) -> Became:
    name = value.rpartition(".")[2]
    if name == "ActorPGWorker":
        return _VARIANTS[facts.variant(source)]
    other = unsupported("use ActorWorker or ActorPGWorker; other workers are not supported")
    return implied("PPO's loss") if name == "ActorWorker" else other


def _divided(num: int, source: Source) -> None:
    """Refuse a number of devices that is not a multiple of those per engine or model replica."""
    if num % (size := facts.replica_size(source, role_of(source))):
        what = "engine (num_gpus_per_worker, or tensor times pipeline parallelism)"
        what = what if role_of(source) == "actor_infer" else "model replica (TP * PP * CP, or ulysses_size)"
        raise ValueError(f"{num} devices are not a multiple of the {size} devices per {what}; use a multiple")


def _device_mapping(value: Any, source: Source) -> Any:
    role, devices = role_of(source), parse_devices(value)
    _divided(len(devices), source)
    made: dict[str, Any] = facts.batches(source) if role in facts.trained_roles(source) else {}
    if not facts.is_one_process(source):
        made |= dict.fromkeys(source.native, format_numbers(devices))
        if role == "actor_infer" and facts.engine(source) != "native":
            made["rollout.engine.replicas"] = facts.engine_sizes(source)["replicas"]
    return Became(made) if made else ONE_PROCESS(value, source)


_MAX_TRIED, _MAX_FITTING = 100_000, 20
"""Values of gradient_accumulation_steps that are tried, and that an error lists."""


def _fits(value: int, source: Source) -> int:
    """Refuse gradient_accumulation_steps if a round is not a number of mini-batches of whole prompts."""
    role, group = role_of(source), source["num_return_sequences_in_group"]
    whole, step = facts.samples(source), facts.global_batch(source, role)
    if facts.is_agentic(source):
        return value
    if whole % step == 0 and step % group == 0:
        return value
    what = f"the {whole} samples of a round are not a multiple of"
    if whole % step == 0:
        what = f"mini-batches consist of whole prompts with their {group} samples, which do not divide"
    unit, dp = step // value, facts.data_parallel(source, role)
    tried = range(1, min(whole // unit, _MAX_TRIED) + 1)
    fit = [n for n in tried if whole % (n * unit) == 0 and n * unit % group == 0]
    shown = ", ".join([*map(str, fit[:_MAX_FITTING]), *(["..."] if len(fit) > _MAX_FITTING else [])])
    fix = f"values that fit: {shown}" if fit else (
        f"no value fits, because {unit} rows (per_device_train_batch_size * dp) do not divide {whole}; "
        "change rollout_batch_size"
    )  # fmt: skip
    raise ValueError(
        f"{what} the global batch: per_device_train_batch_size={unit // dp} * "
        f"gradient_accumulation_steps={value} * dp={dp} = {step}; {fix}"
    )


def _sized(value: Any, source: Source) -> Became:
    """A size in the batch arithmetic. Where the command line chooses another backend, it sets only the number
    of optimizer steps."""
    role = role_of(source)
    if not source[f"{role}.device_mapping"]:
        _divided(facts.world(source, role), source)
    made: dict[str, Any] = facts.batches(source) if role in facts.trained_roles(source) else {}
    if source.backend in (None, file_backend(source, role)):
        made |= dict.fromkeys(source.native, value or 1)
    return Became(made) if made else BY_BACKEND(value, source)


def _tokens(_: Any, source: Source) -> Any:
    """A limit of micro-batches in tokens."""
    what = source.at.rpartition("_")[2]
    if not source[f".use_dynamic_batching_in_{what}"]:
        return implied("micro-batches have a fixed number of rows")
    return source[f".max_tokens_per_microbatch_in_{what}"] or 8192


def _strategy(_: str, source: Source) -> Became:
    if source.backend is not None:
        return no_effect("overridden by --backend; batch sizes are computed as for the file's strategy")
    return _sized(file_backend(source, role_of(source)), source)


def _recompute(value: str | None, source: Source) -> Became:
    (native,) = source.native
    made: dict[str, Any] = {native: value or "off"}
    if value == "full" and source[".recompute_method"] is None and source[".recompute_num_layers"] is None:
        megatron = native.rpartition(".")[0]
        made |= {f"{megatron}.recompute_method": "uniform", f"{megatron}.recompute_num_layers": 1}
    return Became(made)


def _engine_sizes(value: int, source: Source) -> Became:
    sizes = facts.engine_sizes(source)
    both = {f"rollout.engine.{name}": sizes[name] for name in ("tensor_parallel", "replicas")}
    return Became(dict.fromkeys(source.native, value) | both)


_AUTOCAST = {"fp32": "none", "bf16": "bf16", "fp16": _scaled, None: "auto"}
_BETAS = computed(lambda s: [s[".adam_beta1"], s[".adam_beta2"]])
_IS_LORA, _SERVED = needs(".lora_target"), of_engine("vllm", "sglang")

# One rule per line.
# fmt: off
_OF_MEGATRON = unless(lambda s: file_backend(s, role_of(s)) != "megatron", "the file's strategy is fsdp2")
_OF_FSDP2 = unless(lambda s: file_backend(s, role_of(s)) != "fsdp2", "the file's strategy is megatron")
_OF_EVERY_ROLE = section("{actor_train,critic,reference,actor_infer}")(
    to("name", "cluster.group_names.{placed}", "text", used, ONE_PROCESS),
    to("device_mapping", "cluster.placement.{placed}", nullable(DEVICES), used,
       unless_null("processes without a device", implied), _device_mapping,
       note="roles on the same devices take turns"),
    to("system_envs", "cluster.env", "{text}",
       lambda v, _: Became({f"cluster.env.{name}": text for name, text in v.items()}),
       note="applies to every worker"),
    ignored("max_concurrency offload_nccl use_remove_padding "
            "model_args.{model_type,num_labels,device_map,autocast_adapter_dtype,flash_attn}",
            "determined by the role, its placement and model_args; rows are always packed"),
    missing("model_args.model_config_kwargs", "set it in config.json of the model folder"),
    missing("model_args.additional_target", "use adapters: lora_target"))

_TRAINED = section("{actor_train,critic}")(
    to("strategy_args.strategy_name", "{train}.backend.kind", "megatron_train|fsdp2_train", used, _strategy,
       default="fsdp2_train"),
    to("model_args.disable_gradient_checkpointing", "{train}.gradient_checkpointing", "bool", used,
       unless(lambda s: s.place("backend") == "megatron", "Megatron uses recompute_granularity instead"),
       opposite, default=False),
    ignored("model_args.gradient_checkpointing_use_reentrant", "always non-reentrant"),
    section("training_args", "{train}.optimizer", used)(
        to("learning_rate", ".lr", "positive", default=5e-5),
        to("weight_decay", ".weight_decay", "non-negative", default=0.0),
        to("adam_beta1", ".betas", "number >= 0 and <= 0.999", _BETAS, default=0.9),
        to("adam_beta2", ".betas", "number >= 0 and <= 0.9999", _BETAS, default=0.999),
        to("adam_epsilon", ".eps", "positive", default=1e-8),
        to("lr_scheduler_type", ".schedule.decay", _SCHEDULES, default="linear"),
        to("warmup_steps", ".schedule.warmup_steps", "natural", _WARMS_UP, default=0),
        to("warmup_ratio", ".schedule.warmup_fraction", "number >= 0 and <= 0.9", _WARMS_UP,
           unless(lambda s: s[".warmup_steps"], "overridden by warmup_steps"), default=0.0),
        to("per_device_train_batch_size", "{train}.micro_batch_rows", "count",
           lambda v, s: Became(facts.batches(s)) if s["..use_dynamic_batching_in_train"] else
           with_batches(v, s), default=8,
           note="rows per micro-batch; global batch = this * gradient_accumulation_steps * dp"),
        to("gradient_accumulation_steps", "{train}.steps_per_pass", "count", _fits, with_batches, default=1,
           note="micro-batches per optimizer step; steps_per_pass = S / global batch"),
        ignored("max_steps num_train_epochs output_dir seed bf16 fp16 logging_steps save_steps eval_steps",
                "set by keys of the pipeline, as in ROLL"),
        ignored("tf32 data_seed dataloader_num_workers", "not read by ROLL in reinforcement learning")),
    to("use_dynamic_batching_in_train", "{train}.micro_batch_tokens", "bool", used, _tokens),
    to("max_tokens_per_microbatch_in_train", "{train}.micro_batch_tokens", "natural?", used,
       needs(".use_dynamic_batching_in_train"), _tokens),
    to("sequence_packing_args.max_packed_sequence_length_train", "{train}.micro_batch_tokens", "count?", used,
       needs("..use_sequence_packing"), unless_null("no separate limit", implied)),
    always("apply_loss_scale", "denominators count the whole optimizer step", "bool"),
    always("logits_in_fp32", "log-probs are computed in fp32", "bool"),
    missing("mtp_training_mode", "set it to disabled; multi-token prediction is not supported",
            default="disabled"),
    to("world_size", "{train}.steps_per_pass", "count?", used,
       unless(lambda s: facts.devices(s, role_of(s)), "overridden by device_mapping"),
       unless_null("one rank", implied), with_batches))

_WITH_LOGPROBS = section("{actor_train,critic,reference}")(
    always("num_gpus_per_worker", "training workers always have one device, as in ROLL", "count"),
    to("infer_batch_size", "{train}.infer_batch_rows", "count", used,
       unless(lambda s: s[".use_dynamic_batching_in_infer"], "overridden by use_dynamic_batching_in_infer"),
       default=16),
    to("model_args.dtype", "{train}.autocast", _AUTOCAST, used, default="bf16"),
    to("model_args.ulysses_size", "{train}.sequence_parallel", "count?", used, _OF_FSDP2, _sized,
       default=1, note="sequence-parallel size (Ulysses); dp = devices / ulysses_size"),
    section(CONFIG, "{train}.backend", used, _OF_MEGATRON, _sized)(
        to("{tensor_model,pipeline_model,context}_parallel_size", ".{tensor,pipeline,context}_parallel",
           "count?", note="dp = devices / (TP * PP * CP)")),
    to("backend_timeout", "{train}.backend.timeout_minutes", "count", used, of_backend("megatron"),
       default=30),
    to("use_dynamic_batching_in_infer", "{train}.infer_batch_tokens", "bool", used, _tokens),
    to("max_tokens_per_microbatch_in_infer", "{train}.infer_batch_tokens", "natural?", used,
       needs(".use_dynamic_batching_in_infer"), _tokens),
    to("sequence_packing_args.max_packed_sequence_length_forward", "{train}.infer_batch_tokens", "count?",
       used, needs("..use_sequence_packing"), unless_null("no separate limit", implied)),
    ignored("use_sequence_packing sequence_length_round_in_{train,infer} sequence_packing_args.{algorithm,"
            "min_num_micro_batches_train,min_num_micro_batches_forward}", "rows are packed and balanced"),
    section(CONFIG, "{train}.backend", used, of_backend("megatron"))(
        to("expert_model_parallel_size", ".expert_parallel", "count?", null_as(1)),
        to("expert_tensor_parallel_size", ".expert_tensor_parallel", "count?"),
        to("virtual_pipeline_model_parallel_size", ".virtual_pipeline", "count?",
           refused(lambda v, s: (v or 1) > 1 and
                   (s[accumulated := f"{role_of(s)}.training_args.gradient_accumulation_steps"] or 1) %
                   (stages := s[".pipeline_model_parallel_size"] or 1) and
                   f"needs {accumulated} to be a multiple of pipeline_model_parallel_size={stages}; "
                   "change one of them")),
        to("sequence_parallel", ".*", "bool",
           unless(lambda s: (s[".tensor_model_parallel_size"] or 1) == 1,
                  "for tensor_model_parallel_size above 1 only"),
           lambda v, s: v or (s[".expert_model_parallel_size"] or 1) > 1,
           note="always on with TP > 1 and EP > 1"),
        to("recompute_granularity", ".*", "full|selective?", _recompute,
           note="only full set: recompute each layer separately (uniform, 1)"),
        to("recompute_method", ".*", "uniform|block|recompute?",
           lambda v, _: "block" if v == "recompute" else v),
        to("{recompute_num_layers,ddp_bucket_size}", ".*", "count?"),
        to("moe_token_dispatcher_type", ".moe_token_dispatcher", "allgather|alltoall", default="allgather"),
        to("moe_grouped_gemm", ".*", "bool?", null_as(False)),
        to("{moe_layer_recompute,overlap_grad_reduce}", ".*", "bool"),
        to("overlap_param_gather", ".*", "bool", note="not supported by ROLL"),
        to("use_distributed_optimizer", ".distributed_optimizer", "bool", default=False),
        to("{apply_rope_fusion,bias_activation_fusion}", ".transformer.*", "bool"),
        to("moe_shared_expert_overlap", "", "bool",
           refused(lambda v, s: v and (kind := s[".moe_token_dispatcher_type"]) != "alltoall" and
                   f"needs moe_token_dispatcher_type=alltoall, not {kind}"),
           lambda *_: no_effect("no supported model has shared experts")),
        ignored("accumulate_allreduce_grads_in_fp32 delay_grad_reduce moe_router_dtype",
                "gradients are summed in fp32 after the last micro-batch, and routers compute in fp32"),
        ignored("calculate_per_token_loss cross_entropy_loss_fusion check_for_nan_in_loss_and_grad",
                "the loss is set by loss_agg_mode, and steps that are not finite are skipped"),
        ignored("save_hf_model save_merged_model ckpt_format async_save_ckpt ckpt_d2h_non_blocking",
                "checkpoints have one format; for exports use training_args.save_hf_model"),
        ignored("sequence_packing variable_seq_lengths bf16 use_flash_attn",
                "rows are packed without padding; for the others use model_args, as in ROLL"),
        ignored("overlap_p2p_comm compile_warmup use_batched_model_update",
                "use braid.train.backend.transformer, braid.train.compile and model_update_buffer_size_mb"),
        missing("account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
                "pipeline_model_parallel_layout recompute_modules moe_aux_loss_coeff "
                "moe_router_load_balancing_type moe_expert_capacity_factor moe_pad_expert_input_to_capacity "
                "moe_token_drop_policy moe_enable_routing_replay mtp_num_layers transformer_impl "
                "cuda_graph_impl cuda_graph_scope fp8 fp8_recipe fp8_param additional_configs "
                "distrib_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient "
                "ddp_average_in_collective optimizer optimizer_cpu_offload optimizer_offload_fraction",
                "remove it, or use the keys of braid.train.backend", default=False)),
    section(CONFIG, "{train}.backend", used, of_backend("fsdp2"))(
        to("fsdp_size", ".size", "int",
           refused(lambda v, s: 1 < v < (least := s["...model_args.ulysses_size"] or 1) and
                   f"{v} is below ulysses_size={least}; raise it to at least {least}"),
           lambda v, s: v if 1 < v < facts.world(s, role_of(s)) else None, note="up to 1: all devices"),
        to("param_dtype", ".*", _TORCH_DTYPES, note="trained weights stay fp32, unlike in ROLL"),
        to("reduce_dtype", ".*", _TORCH_DTYPES),
        to("reshard_after_forward", ".*", "bool?", null_as(True)),
        to("offload_policy", ".cpu_offload .pin_memory", "bool"),
        to("reduce_scatter_during_grad_accumulation", ".sync_last_micro_batch_only", "bool", opposite,
           default=True),
        ignored("wrap_policy save_only_model", "layers are wrapped as units, and checkpoints whole"),
        missing("ep_size efsdp_size", "remove it; experts are sharded like other weights", default=1),
        missing("moe_use_grouped_mm apply_expert_patch apply_tiled_mlp tiled_num_shards",
                "remove it, or use a lower braid.train.micro_batch_tokens", default=False)))

_ACTOR_TRAIN = section("actor_train")(
    to("model_args.model_name_or_path", "model.path", "path", note="takes precedence over pretrain"),
    to("model_args.attn_implementation", "model.attention",
       {"sdpa": "sdpa", "fa2": "flash_attention_2", "auto": "auto", None: "auto"}),
    to("model_args.freeze_module_prefix", "model.vision.train", "text or [text]?", _frozen, default=None,
       note=
           "vision_model: none of the tower; vision_model.blocks,vision_model.patch_embed: projector; "
           "null: all"),
    to("model_args.lora_target", "model.lora.targets", "text?",
       lambda v, _: implied("all weights are trained") if v is None else [name.strip() for name in v.split(",")]),
    to("model_args.lora_rank", "model.lora.rank", "count?", _IS_LORA, null_as(8), default=8),
    to("model_args.lora_alpha", "model.lora.alpha", "positive?", _IS_LORA,
       lambda v, s: v or 2 * (s[".lora_rank"] or 8), default=None),
    to("model_args.moe_aux_loss_coef", "train.router_aux_coef", "non-negative?", null_as(0.0),
       note="over all tokens of a step, whatever its micro-batches"),
    to("router_replay.mode", "train.router_replay", {"disable": "none", "R2": "old", "R3": "rollout"},
       default="disable"),
    missing("model_args.lora_dropout", "set it to 0: log-probs must be the same in rollout and training",
            default=0.0),
    to("model_args.adapter_name_or_path", "model.lora.path", "path?", _IS_LORA),
    to("training_args.save_hf_model", "checkpoint.export_every_rounds", "bool",
       lambda v, s: s["save_steps"] if v else 0),
    to("worker_cls", "algorithm.policy_loss.kind", "text", _worker_class),
    to("pg_variant", "algorithm.policy_loss.kind", _VARIANTS,
       unless(lambda s: facts.variant(s) != s["actor_train.pg_variant"],
              "needs worker_cls: roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker, as in ROLL"),
       note="vanilla, tis, cispo: -A log p with ratio 1, clip(ratio, 0, 1), clip(ratio, 0.9, 1.1); topr: "
       "clip(ratio, 0, 1) where A < 0; kimi15: + 0.05 (log p - old log p)^2"),
    to("topr_{positive,negative}_weight", "algorithm.policy_loss.{positive,negative}_weight", "non-negative",
       unless(lambda s: facts.variant(s) != "topr", "pg_variant is not topr"), default=1.0),
    missing("model_update_frequency", "set it to 1; weights are synced every round", default=1))

_REFERENCE = section("reference")(
    to("strategy_args.strategy_name", "reference.train.backend.kind", "megatron_infer|fsdp2_infer|hf_infer", used,
       _strategy, default="fsdp2_infer"),
    ignored("sequence_packing_args.max_packed_sequence_length_train", "the reference model is not trained"))

_ACTOR_INFER = section("actor_infer")(
    to("num_gpus_per_worker", "", "count", _SERVED,
       unless(lambda s: s[f".{CONFIG}.tensor_parallel_size"] or s[f".{CONFIG}.tp_size"],
              "overridden by the engine's own key, as in ROLL"), _engine_sizes, default=1),
    to("strategy_args.strategy_name", "rollout.engine.kind", ENGINES, BY_ENGINE, default="vllm"),
    to("model_args.dtype", "rollout.engine.dtype", "fp32|bf16|fp16?", null_as("auto")),
    always("model_args.model_name_or_path", "the engine always uses the policy's weights", "path"),
    ignored("model_args.{lora_target,lora_rank,lora_alpha,lora_dropout,adapter_name_or_path}",
            "the engine always uses the policy's adapters"),
    ignored("model_args.attn_implementation infer_batch_size backend_timeout",
            "the engine chooses its kernels and schedules requests itself; see rpc_timeout"),
    to(f"{CONFIG}.load_format", "rollout.engine.load_weights", "dummy|auto|safetensors|pt", _SERVED,
       lambda v, _: v != "dummy", default="dummy", note="dummy: random weights until the first sync"),
    section(CONFIG, "rollout.engine", of_engine("vllm"))(
        to("gpu_memory_utilization", ".memory_fraction", "fraction"),
        to("{block_size,max_model_len}", ".{block_size,max_model_tokens}", "count?"),
        to("{tensor,pipeline}_parallel_size", ".{tensor,pipeline}_parallel", "count", _engine_sizes),
        to("{enforce_eager,disable_log_stats}", ".{cuda_graphs,log_stats}", "bool", opposite),
        to("enable_{prefix_caching,chunked_prefill}", ".{prefix_caching,chunked_prefill}", "bool"),
        to("max_num_batched_tokens", ".prefill_tokens", "count"),
        to("distributed_executor_backend", ".executor", "mp|ray|uni"),
        to("max_num_seqs", ".max_running", "count", overridden("max_running_requests")),
        ignored("limit_mm_per_prompt limit_mm_per_prompt.*", "the length of a prompt limits its images"),
        ignored("disable_custom_all_reduce swap_space optimization_level cuda_graph_sizes "
                "cudagraph_capture_sizes", "vLLM's default is used; see enforce_eager"),
        ignored("sleep_level enable_memory_saver logprobs_mode disable_mm_preprocessor_cache seed grpc_mode",
                "engines release weights and cache when they sleep, return the log-probs of the sampling "
                "distribution, and use the run's seed"),
        missing("data_parallel_size quantization online_quantization online_quantization_config.* "
                "speculative_config dp_size ep_size enable_expert_parallel", "remove it, or start servers "
                "and list them in braid.rollout.engine.servers")),
    section(CONFIG, "rollout.engine", of_engine("sglang"))(
        to("mem_fraction_static", ".memory_fraction", "fraction?",
           refused(lambda v, _: v is None and "required for sglang: the fraction of memory for weights "
                   "and cache, such as 0.6"), default=None),
        to("{tp,pp}_size", ".{tensor,pipeline}_parallel", "count", _engine_sizes),
        to("{context_length,cuda_graph_max_bs}", ".{max_model_tokens,cuda_graph_max_batch}", "count?"),
        to("attention_backend", ".attention", "text?"),
        to("disable_{cuda_graph,radix_cache}", ".{cuda_graphs,prefix_caching}", "bool", opposite),
        to("{chunked_prefill_size,torch_compile_max_bs,decode_log_interval}",
           ".{prefill_tokens,torch_compile_max_batch,decode_log_interval}", "count"),
        to("enable_torch_compile", ".torch_compile", "bool"),
        to("max_running_requests", ".max_running", "count", overridden("max_running_requests"))))

WORKERS = rows(
    _ACTOR_TRAIN, _REFERENCE, _ACTOR_INFER, _OF_EVERY_ROLE, _TRAINED, _WITH_LOGPROBS,
    to("{critic,reference}.model_args.model_name_or_path", "{critic,reference}.path", "path", used,
       note="of the critic, instead of reward_pretrain"),
    ignored("{reference,actor_infer}.model_args.freeze_module_prefix", "it is not trained"),
    missing("critic.model_args.freeze_module_prefix", "set it under actor_train"),
    ignored("critic.training_args.save_hf_model", "only the policy is exported"),
    always("{critic,reference}.router_replay.mode", "only the policy's choices are replayed", choice("disable")),
    missing("{critic,reference,actor_infer}.model_args.moe_aux_loss_coef",
            "set it under actor_train: only the policy's routers have a load-balancing loss"),
    always("{critic,reference}.model_args.attn_implementation", "same as the policy's", "sdpa|fa2|auto?"),
    ignored("{critic,reference,actor_infer}.data_args.*", "read only under actor_train and validation"),
    ignored("{critic,reference,actor_infer}.worker_cls", "determined by the role and its strategy"),
    ignored("{reference,actor_infer}.world_size", "determined by device_mapping"),
    ignored("{reference,actor_infer}.model_args.disable_gradient_checkpointing", "no backward pass"),
)
# fmt: on
