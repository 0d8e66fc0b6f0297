"""SkyRL's `trainer`, without its algorithm: placement, sizes, checkpoints, loggers, models, backends.

SkyRL's batch sizes count prompts, its micro batch sizes count samples. Both systems divide a batch into
mini-batches of whole prompts, but group different prompts together (see docs/dialects.md).
"""

from __future__ import annotations

import math
import os
import re
from pathlib import PurePath
from typing import Any

from . import skyrl_facts as facts
from .conditions import BY_BACKEND, needs, of_backend, refused, unless
from .conversions import (
    already,
    as_int,
    as_is,
    at_least_0,
    folder_name,
    listed,
    null_as,
    or_null,
    positive,
    presets,
    sets,
    unless_null,
    wandb_mode,
)  # fmt: skip
from .rows import always, ignored, missing, rows, section, to
from .skyrl_facts import HAS_IMAGES, NO_EVALUATION, NO_REFERENCE, ONE_PROCESS, used
from .table import Became, Source, implied, no_effect, unsupported
from .values import choice, list_of


def _expanded(value: str, _: Source) -> str:
    return os.path.expanduser(value)


def _placed(_: Any, source: Source) -> Became:
    role = facts.role_of(source)
    if source.name.endswith("gpus_per_node"):
        size, shared = facts.world(source, role), facts.model_parallel(source, role)
        policy, flag = facts.world(source, "policy"), facts.shares(source, role)
        if size % shared:
            why = f"the {role}'s {size} GPUs are not a multiple of the {shared} GPUs per model replica"
            raise ValueError(f"{why}; change one of them")
        if flag and size != policy:
            why = f"with {flag} the {role} uses the policy's {policy} GPUs, not {size}; make them equal"
            raise ValueError(f"{why}, or set trainer.placement.{flag}=false")
    settings = facts.cluster(source)
    return Became({path: settings[path] for path in source.native})


def _colocate_all(value: bool, source: Source) -> Became:
    parts = (f"{path}.offload.{part}" for path in facts.trained(source) for part in ("weights", "gradients"))
    return Became({**_placed(value, source).native, **dict.fromkeys(parts, value)})


def _fitting(value: int, total: int) -> str:
    """The divisors of `total` closest to `value`, in words."""
    below = next(n for n in range(min(value, total, 10**6), 0, -1) if total % n == 0)
    above = next((n for n in range(value + 1, min(total, 10**6) + 1) if total % n == 0), None)
    return f"{below}" if above is None else f"{below} or {above}"


def _samples_per_rank(source: Source, role: str) -> tuple[int, str]:
    """Samples of a mini-batch on one rank, and how they are computed."""
    mini, num = source[f"trainer.{role}_mini_batch_size"], source["generator.n_samples_per_prompt"]
    dp = facts.ranks(source, role)
    how = f"{role}_mini_batch_size * n_samples_per_prompt // ranks = {mini}*{num}//{dp}"
    return mini * num // dp, f"{how} = {mini * num // dp}"


def _steps(mini: int, source: Source) -> int:
    """Optimizer steps: a batch divides into mini-batches of prompts, and no rank is without one."""
    role, batch = facts.role_of(source), source["trainer.train_batch_size"]
    per_rank, how = _samples_per_rank(source, role)
    if batch < mini:
        raise ValueError(f"{mini} is above trainer.train_batch_size={batch}; lower it")
    if batch % mini:
        fit = _fitting(mini, batch)
        raise ValueError(f"trainer.train_batch_size={batch} is not divisible by {mini}; set it to {fit}")
    num, dp = source["generator.n_samples_per_prompt"], facts.ranks(source, role)
    if per_rank == 0:
        why = f"the mini-batch of one rank is empty: {how}"
        raise ValueError(f"{why}; raise it to at least {math.ceil(dp / num)}")
    if (whole := batch * num // dp) % per_rank:
        why = f"the samples per rank of a batch, {batch}*{num}//{dp} = {whole}, are not divisible"
        raise ValueError(f"{why} by those of a mini-batch: {how}")
    return batch // mini


def _micro_batch(micro: int, source: Source) -> int:
    for role in [role for role in facts.roles(source) if role != "ref"]:
        per_rank, how = _samples_per_rank(source, role)
        if per_rank % micro:
            why = f"the mini-batch of one rank of the {role} is not divisible by {micro}: {how}"
            raise ValueError(f"{why}; set it to {_fitting(micro, per_rank)}")
    return micro


def _rows_and_tokens(value: int, source: Source) -> Became:
    """Samples per forward pass; the token limit is set so that it never binds."""
    prompt = source["generator.max_input_length"] or source["trainer.max_prompt_length"]
    tokens = value * (prompt + source["generator.sampling_params.max_generate_length"])
    return Became({path: tokens if path.endswith("tokens") else value for path in source.native})


def _resume_path(value: str | None, _: Source) -> Any:
    if value is None:
        raise ValueError("resume_mode=from_path needs the folder of a checkpoint; set it, or use latest")
    if not re.fullmatch(r"(global_)?step_\d+", PurePath(value).name):
        raise ValueError(f"{value} is not a checkpoint: the folder's name must be step_N (or global_step_N)")
    return value


def _wandb(_: str, __: Source) -> Became:
    mode, why = wandb_mode()
    return Became({"report.tensorboard": False, "report.wandb.mode": mode}, note=why)


_LOGGERS = {
    "wandb": _wandb,
    "console": False,
    "tensorboard": True,
    "swanlab": Became({"report.tensorboard": False, "report.swanlab.mode": "cloud"}),
    **dict.fromkeys(
        ("mlflow", "vemlp_wandb"), unsupported("use tensorboard, wandb or swanlab, or read metrics.jsonl")
    ),
}
_SCHEDULES = {
    "constant_with_warmup": "constant",
    "constant": lambda _, source: Became({
        path.replace("decay", name): value
        for path in source.native
        for name, value in (("decay", "constant"), ("warmup_steps", 0))
    }),
    **{name: name for name in ("linear", "cosine", "inverse_sqrt")},
    **dict.fromkeys(
        ("cosine_with_restarts", "polynomial", "reduce_lr_on_plateau", "cosine_with_min_lr",
         "warmup_stable_decay"),
        unsupported("use constant_with_warmup, linear, cosine or inverse_sqrt"),
    ),
}  # fmt: skip
_OTHER_DEEPSPEED = "only the stage, zero_hpz_partition_size and CPU offload of DeepSpeed are supported"
_OTHER_MEGATRON = "use the options of train.backend in docs/config.md"
_CPU_OFFLOAD = "parameters and optimizer live on the CPU, where offload_after_step moves them after each step"

# One rule per line.
# fmt: off
_LORA, _IS_ASYNC = needs("trainer.policy.model.lora.rank"), needs(".enabled")
_FSDP_ONLY, _MEGATRON_ONLY = of_backend("fsdp", "fsdp2"), of_backend("megatron")
_BY_SAMPLES = unless(lambda s: s[".max_tokens_per_microbatch"] > 0, "overridden by max_tokens_per_microbatch")
_SHARED_DEVICES = unless(lambda s: not facts.is_one_process(s) and not facts.is_colocated(s),
                         "without colocate_all no other role uses the optimizer's devices")
_COLOCATED = unless(facts.is_colocated, "colocate_all places all roles on the same devices")
PLACEMENT = section("trainer.placement", "cluster", ONE_PROCESS)(
    to("colocate_all", ".placement", "bool", _colocate_all, default=True),
    to("colocate_policy_ref", ".placement", "bool", NO_REFERENCE, _COLOCATED, _placed, default=True),
    to("policy_num_nodes", ".num_nodes .placement", "count", _placed, default=1),
    to("policy_num_gpus_per_node", ".devices_per_node .placement", "count", _placed, default=4,
       note="default: 4, from SkyRL 0.4 on 1"),
    to("{critic,ref}_num_nodes", ".placement", "count", used, _placed, default=1),
    to("{critic,ref}_num_gpus_per_node", ".placement", "count", used, _placed, default=4),
    ignored("{colocate_critic_reward,reward_num_nodes,reward_num_gpus_per_node}",
            "reward models are reward parts (braid.reward.parts); SkyRL did not implement them"))

GENERAL = section("trainer")(
    to("epochs", "run.max_epochs", "count", default=1, note="SkyRL drops prompts that do not fill a round"),
    to("max_training_steps", "run.max_rounds", "count?"),
    to("update_epochs_per_batch", "{trained}.passes_per_round", "count", default=1),
    to("train_batch_size", "rollout.prompts_per_round", "count",
       refused(lambda v, s: (num := v * s["generator.n_samples_per_prompt"]) <
               (least := math.lcm(*(facts.ranks(s, role) for role in facts.roles(s)))) and
               f"a batch has {num} samples, fewer than the {least} needed by the models' data-parallel "
               "ranks; raise it"), default=1024, note="in prompts"),
    to("{policy,critic}_mini_batch_size", "{train}.steps_per_pass", "count", used, _steps, default=256,
       note="optimizer steps = train_batch_size / mini_batch_size, in prompts over all ranks"),
    to("micro_train_batch_size_per_gpu", "{trained}.micro_batch_rows {trained}.micro_batch_tokens", "count",
       _BY_SAMPLES, _micro_batch, _rows_and_tokens, default=1, note="memory only"),
    to("micro_forward_batch_size_per_gpu", "{models}.infer_batch_rows {models}.infer_batch_tokens", "count",
       _BY_SAMPLES, _rows_and_tokens, default=1, note="memory only"),
    to("max_tokens_per_microbatch", "{trained}.micro_batch_tokens {models}.infer_batch_tokens", "count or -1",
       lambda v, _: v if v > 0 else no_effect("micro-batches are counted in samples"), default=-1),
    to("update_ref_every_epoch", "reference.update_every_epochs", "bool", NO_REFERENCE, as_int,
       default=False),
    to("num_warmup_steps", "{trained}.optimizer.schedule.warmup_steps", "natural"),
    to("use_sample_packing", "", "bool", already("rows are always packed"), default=True),
    to("max_prompt_length", {"data.max_prompt_tokens": as_is,
                              "data.overlong": lambda _, s: "drop" if facts.reads_images(s) else
                              "truncate_left"}, "count", default=512,
       note=
           "truncates on the left; SkyRL's code drops (braid.data.overlong=drop), as braid does where there "
           "may be images"),
    to("gradient_checkpointing", "{trained}.gradient_checkpointing", "bool", default=True),
    to("seed", "run.seed", "natural", default=42),
    to("bf16", "{models}.autocast", {True: "auto", False: "none"}, default=True),
    to("flash_attn", "model.attention", {True: "auto", False: "sdpa"}, default=True),
    always("recompute_old_logprobs_per_minibatch", "log-probs do not depend on batching", "bool"),
    always("sequence_parallel_backend", "sequence parallelism is always Ulysses", choice("ulysses")),
    ignored("gradient_checkpointing_use_reentrant disable_fast_tokenizer use_orm_score",
            "checkpointing is non-reentrant, tokenizers are fast ones, SkyRL does not read the other"),
    ignored("use_expandable_segments", "set PYTORCH_CUDA_ALLOC_CONF in braid.cluster.env"),
    ignored("{logprobs_chunk_size,vocab_entropy_chunk_size,vocab_entropy_chunk_memory_mb} "
            "{fused_lm_head_logprob,fused_lm_head_logprob_backend}",
            "log-probs and entropy are computed in chunks of train.logprob_chunk_bytes"),
    missing("mtp.enabled", "set it to false; draft heads are not supported", default=False),
    ignored("mtp.*", "there are no draft heads"),
    to("fully_async.enabled", "pipeline.on_new_weights pipeline.over_lag", "bool",
       lambda v, s: sets("interrupt", "keep")(v, s) if v else implied("it is off"), default=False,
       note="sampling goes on during training, and running requests continue with new weights"),
    to("fully_async.max_staleness_steps", "pipeline.max_lag", "natural", _IS_ASYNC, default=4),
    to("fully_async.num_parallel_generation_workers", "pipeline.groups_in_flight", "count", _IS_ASYNC,
       default=768),
    to("fully_async.clear_kv_cache_on_weight_sync", "rollout.engine.recompute_cache", "bool", _IS_ASYNC,
       default=False),
    missing("fully_async.{sample_full_batch,simulate_training}",
            "set it to false: prompts are drawn as places become free, and trained on", default=False),
    ignored("fully_async.simulate_{training_step,weight_sync}_seconds", "there is no simulated training"))

REPORT = section("trainer")(
    to("eval_batch_size", "eval.batch_prompts", "count", NO_EVALUATION, default=1024),
    to("eval_before_train", "eval.before", "bool", NO_EVALUATION, default=True),
    to("eval_interval", {"eval.every_rounds": at_least_0, "eval.at_end": positive}, "int", default=5),
    to("resume_mode", "run.resume", choice(None, "none", "latest", "from_path"),
       lambda v, s: s[".resume_path"] or "none" if v == "from_path" else v or "none", default="latest",
       note="a resumed run ends where it would have; SkyRL runs further epochs"),
    to("resume_path", "run.resume", "text?", needs(".resume_mode", "from_path"), _resume_path, default=None,
       note="a checkpoint of braid; of SkyRL's, only HF exports can be read"),
    to("ckpt_path", "checkpoint.dir", "path", _expanded),
    to("max_ckpts_to_keep", "checkpoint.keep", "int",
       refused(lambda v, _: v == 0 and "0 would keep no checkpoint; set it to -1 to keep all, or to the "
               "number of checkpoints to keep"), lambda v, _: v if v > 0 else None, default=-1),
    to("ckpt_interval", {"checkpoint.every_rounds": at_least_0, "checkpoint.at_end": positive}, "int",
       default=10),
    to("hf_save_interval", "checkpoint.export_every_rounds", "int", at_least_0, default=-1),
    to("export_path", "checkpoint.export_dir", "path",
       unless(lambda s: s["trainer.hf_save_interval"] <= 0, "hf_save_interval disables exports"), _expanded),
    to("logger", "report.tensorboard", _LOGGERS, default="wandb"),
    to("project_name", "report.{tracker}.project", "text", needs(".logger", "wandb", "swanlab"),
       default="skyrl"),
    to("run_name", {"run.name": folder_name, "{trackers}.name": as_is}, "text", default="test_run"),
    to("dump_data_batch", "report.batches_every_rounds", "bool", as_int, default=False),
    to("dump_eval_results", "report.eval_samples", "bool", NO_EVALUATION, default=True),
    ignored("log_path tags enable_ray_gpu_monitor",
            "logs go to the terminal, trackers receive the whole config, GPUs are not monitored"),
    ignored("print_example_interval num_logger_eval_samples num_logger_train_samples",
            "use braid.rollout.print_outputs and braid.report.samples_every_rounds"),
    missing("s3_export.enabled", "copy the export folder manually", default=False),
    ignored("s3_export.*", "nothing is uploaded"))

_OPTIMIZER = section("trainer.{policy,critic}.optimizer_config", "{train}", used)(
    to("adam_betas", ".optimizer.betas", list_of("share", length=2), default=[0.9, 0.999]),
    to("weight_decay", ".optimizer.weight_decay", "non-negative", default=0.01,
       note="decoupled (AdamW), not L2; biases and norm weights are excluded"),
    to("max_grad_norm", ".max_grad_norm", "non-negative", or_null, default=1.0, note="0: no clipping"),
    to("offload_after_step", ".offload.optimizer", "bool",
       refused(lambda v, s: not v and facts.backend(s) == "deepspeed" and "DeepSpeed always offloads the "
               "optimizer after a step; set it to true, or use another trainer.strategy"),
       _SHARED_DEVICES, default=True),
    to("num_warmup_steps", ".optimizer.schedule.warmup_steps", "natural", note="optimizer steps"),
    to("scheduler", ".optimizer.schedule.decay", _SCHEDULES, default="constant_with_warmup"))

_FSDP = section("trainer.{policy,critic,ref}.fsdp_config", "{train}.backend", _FSDP_ONLY, used)(
    to("fsdp_size", ".size", "count or -1", lambda v, _: None if v < 0 else v, default=-1, note="-1: all"),
    to("mixed_precision.param_dtype", ".*", "bf16|fp32|fp16", default="bf16"),
    to("mixed_precision.{reduce_dtype,buffer_dtype}", ".*", "bf16|fp32|fp16", default="fp32"),
    ignored("wrap_policy.*", "each layer is always wrapped as a unit"))

_DEEPSPEED_KEYS = "zero_optimization.{offload_param,offload_optimizer}"
_DEEPSPEED = section("trainer.{policy,critic,ref}.deepspeed_config", "{train}.backend",
                     of_backend("deepspeed"), used)(
    to("zero_optimization.stage", ".stage", choice(3), default=3),
    to("zero_optimization.zero_hpz_partition_size", ".hpz_partition_size", "count", default=1),
    to(f"{_DEEPSPEED_KEYS}.device", ".cpu_offload", {"none": False, "cpu": True}),
    ignored(f"{_DEEPSPEED_KEYS}.*", "it affects only the speed of copies between CPU and GPU"),
    ignored("gradient_clipping torch_autocast",
            "overridden by optimizer_config.max_grad_norm, as in SkyRL, and by trainer.bf16"),
    ignored("zero_optimization.{sub_group_size,reduce_bucket_size,round_robin_gradients,"
            "stage3_max_live_parameters,stage3_max_reuse_distance,stage3_prefetch_bucket_size,"
            "stage3_param_persistence_threshold} disable_trace_cache wall_clock_breakdown",
            "it affects only DeepSpeed's memory and speed; braid sets its own value"),
    missing("prescale_gradient zero_optimization.{zero_quantized_weights,zero_quantized_gradients}",
            _OTHER_DEEPSPEED, default=False),
    missing("data_types", _OTHER_DEEPSPEED, default={"grad_accum_dtype": "fp32"}),
    missing("zero_optimization.* *", _OTHER_DEEPSPEED, default="auto"))

_TEMPLATES = section("deepspeed_config.{train,eval}")(
    ignored(f"* zero_optimization.* zero_optimization.{{stage,zero_hpz_partition_size}} {_DEEPSPEED_KEYS}.*",
            "a template, used where ${deepspeed_config.train} or ${deepspeed_config.eval} refers to it"))

_ROUTERS = to(
    "trainer.policy.megatron_config.moe_enable_routing_replay", "train.router_replay",
    {True: "rollout", False: "none"}, _MEGATRON_ONLY, default=False, note="the engine's experts are chosen in the update (R3)")

_MEGATRON = section("trainer.{policy,ref}.megatron_config", "{train}.backend", _MEGATRON_ONLY, used)(
    to("tensor_model_parallel_size", {".tensor_parallel": as_is, ".sequence_parallel": lambda v, _: v > 1},
       "count", default=1),
    to("{pipeline_model,context,expert_model}_parallel_size", ".{pipeline,context,expert}_parallel", "count",
       default=1),
    to("expert_tensor_parallel_size", ".expert_tensor_parallel", "count?"),
    to("moe_token_dispatcher_type", ".moe_token_dispatcher", "alltoall|allgather|flex", default="alltoall"),
    to("moe_grouped_gemm", ".*", "bool", default=True),
    to("ddp_config.{overlap_grad_reduce,overlap_param_gather}", ".*", "bool", default=False),
    to("transformer_config_kwargs.recompute_granularity", ".*", "full|selective?", null_as("off"),
       default="full"),
    to("transformer_config_kwargs.recompute_method", ".*", "block|uniform?", default="uniform"),
    to("transformer_config_kwargs.recompute_num_layers", ".*", "count?", default=1),
    to("transformer_config_kwargs.gradient_accumulation_fusion", ".transformer.*", "bool", default=False),
    ignored("ddp_config.{grad_reduce_in_fp32,average_in_collective}", "sums are in fp32, with global counts"),
    ignored("empty_cuda_cache", "the backend frees memory itself"),
    ignored("torch_profiler_config.{ranks,save_path}", "for the profiler only"),
    missing("lora_config.lora_type", _OTHER_MEGATRON, default="lora"),
    missing("transformer_config_kwargs.recompute_modules", _OTHER_MEGATRON, default=["core_attn"]),
    missing("* {optimizer_config_kwargs,model_config_kwargs,torch_profiler_config}.* "
            "{hf_export_config,lora_config}.* {transformer_config_kwargs,ddp_config}.*", _OTHER_MEGATRON,
            default=False))

_FREEZING = section("trainer.policy.megatron_config.transformer_config_kwargs", "", unless(
    lambda s: s["trainer.strategy"] != "megatron", "for trainer.strategy=megatron only"))(
    to("freeze_vision_{model,projection}", "model.vision.train", "bool", HAS_IMAGES,
       lambda _, s: facts.trained_tower(s), default=False, note="of the vision tower, and of the layers that project its features"),
    missing("freeze_language_model", "set it to false", default=False))

_LORA_KEYS = section("policy.model.lora", "model.lora")(
    to("rank", ".rank", "natural", _LORA, default=0, note="0 trains all weights"),
    to("alpha", ".alpha", "positive", _LORA, default=16),
    to("target_modules", ".targets", "text or [text]", _LORA, listed, default="all-linear"),
    missing("dropout", "set it to 0: log-probs must be the same in rollout and training", default=0.0),
    missing("exclude_modules", "list the wanted layers in target_modules"),
    missing("init_method", "use kaiming", default="kaiming"),
    ignored("{lora_sync_path,max_loras,max_cpu_loras}", "engines receive the merged weights of one adapter"))

MODELS = section("trainer")(
    to("strategy", "{models}.backend.kind", "fsdp|fsdp2|deepspeed|megatron",
       refused(lambda _, s: facts.backend(s) == "megatron" and facts.uses_critic(s) and
               "megatron does not support critics; use fsdp2, or another advantage_estimator"),
       BY_BACKEND, lambda _, s: facts.backend(s), default="fsdp2",
       note="fsdp is FSDP1 up to SkyRL 0.4, FSDP2 from 0.5 on"),
    to("policy.model.path", "model.path", "text", default="Qwen/Qwen2.5-1.5B-Instruct",
       note="trained weights are fp32, as in SkyRL"),
    to("critic.model.path", "critic.path", "text?", used,
       refused(lambda v, _: v is None and
               "advantage_estimator=gae needs a critic; set its path, for example to the policy's"),
       default=None, note="with a random value head; for gae"),
    to("ref.model.path", "reference.path", "text?", used, note="null: the initial policy"),
    to("policy.optimizer_config.lr", "train.optimizer.lr", "positive", default=1e-6),
    to("critic.optimizer_config.lr", "critic.train.optimizer.lr", "positive", used, default=5e-6),
    to("{policy,critic}.fsdp_config.cpu_offload", "{train}.backend.*", "bool", _FSDP_ONLY, used,
       refused(lambda v, s: v and facts.backend(s) == "fsdp" and "FSDP1 cannot offload a trained model; set "
               "it to false, or use trainer.strategy=fsdp2"), default=False,
       note=_CPU_OFFLOAD),
    to("ref.fsdp_config.cpu_offload", "{train}.backend.*", "bool", _FSDP_ONLY, used, default=True,
       note=_CPU_OFFLOAD),
    to("{policy,critic,ref}.fsdp_config.reshard_after_forward", "{train}.backend.*",
       "bool or count", of_backend("fsdp2"), used, default=True),
    to("{policy,critic,ref}.sequence_parallel_size", "{train}.sequence_parallel", "count",
       of_backend("fsdp", "fsdp2", "deepspeed"), used,
       refused(lambda v, s: v > 1 and not s["trainer.use_sample_packing"] and
               "sequence parallelism needs trainer.use_sample_packing=true"), default=1,
       note="data-parallel ranks = GPUs / sequence_parallel_size"),
    to("policy.{use_torch_compile,record_memory,use_liger_kernel}",
       "train.{compile,record_memory,liger_kernels}", "bool", default=False),
    _LORA_KEYS,
    to("target_modules", "model.lora.targets", "text or [text]?", _LORA,
       unless_null("set by policy.model.lora.target_modules"), listed),
    missing("exclude_modules", "list the wanted layers in target_modules"),
    missing("{critic,ref}.model.lora.rank", "only the policy has adapters", default=0),
    missing("policy.model.fake_int4_qat.*", "remove it; quantization-aware training is not supported"),
    missing("{rope_scaling,rope_theta} {policy,critic,ref}.model_config_kwargs",
            "set it in config.json of the model folder"),
    missing("policy.torch_profiler_config.enable", "use record_memory, or an external profiler",
            default=False),
    ignored("policy.torch_profiler_config.* policy.inference_only_init ref.use_liger_kernel "
            "{critic,ref}.model.lora.*", "for the profiler or adapters, where the policy's setting applies"),
    missing("{policy,ref}.language_model_only", "set it to false, or vision_language_generator",
            unless(lambda s: not facts.reads_images(s),
                   "the model reads only text, with the language model alone"), default=False),
    missing("reward.model.path", "use braid.reward.parts=[{kind: model, path: ...}]"),
    ignored("reward.* reward.{fsdp_config,deepspeed_config,deepspeed_config.zero_optimization}.*",
            "reward models are reward parts (braid.reward.parts); SkyRL did not implement them"))
TRAINER = rows(
    to("defaults", "", "any", presets),
    always("hydra.searchpath", "folders searched for the presets of `defaults`", "any"),
    PLACEMENT, GENERAL, REPORT, MODELS, _OPTIMIZER, _FSDP, _DEEPSPEED, _TEMPLATES, _ROUTERS, _MEGATRON, _FREEZING,
    ignored("trainer.ref.megatron_config.transformer_config_kwargs."
            "freeze_{vision_model,vision_projection,language_model}", "it is not trained"),
)
# fmt: on
