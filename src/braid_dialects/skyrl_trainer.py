"""SkyRL's `trainer`, without its algorithm: placement, sizes, checkpoints, loggers, models, backends.

SkyRL's batch sizes count prompts, its micro batch sizes count samples. Both systems divide a batch into
mini-batches of whole prompts, but group different prompts together (see docs/dialects.md).
"""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from typing import Any

from .conditions import of_backend, unless
from .conversions import (
    already,
    as_is,
    at_least_0,
    folder_name,
    listed,
    mapped,
    off,
    only,
    or_null,
    positive,
    sets,
    unless_null,
    wandb_mode,
)
from .rows import always, ignored, missing, rows, section, to
from .skyrl_facts import (
    NO_CRITIC,
    NO_EVALUATION,
    NO_REFERENCE,
    ONE_PROCESS,
    cluster,
    is_colocated,
    is_one_process,
    longest_row,
    trained,
    used,
)
from .table import Became, Source, implied, no_effect, unsupported
from .values import choice, either, integer, list_of, nullable, takes, text

_NEVER = integer(samples=(-1, 5, 3))
"""A cadence; -1 and 0 mean never."""
_STEP_FOLDER = re.compile(r"(global_)?step_\d+")


def _expanded(value: str, _: Source) -> str:
    return os.path.expanduser(value)


# Placement and sizes


def _placed(_: int, source: Source) -> Became:
    settings = cluster(source)
    return Became({path: settings[path] for path in source.native})


def _colocate_all(value: bool, source: Source) -> Became:
    names = (f"{path}.offload.{what}" for path in trained(source) for what in ("weights", "gradients"))
    return Became({"cluster.placement": cluster(source)["cluster.placement"], **dict.fromkeys(names, value)})


def _steps(value: int, source: Source) -> int:
    return max(source["trainer.train_batch_size"] // value, 1)


def _rows_and_tokens(value: int, source: Source) -> Became:
    """Samples per forward pass; the token limit is set so that it never binds."""
    tokens = value * longest_row(source)
    return Became({path: tokens if path.endswith("tokens") else value for path in source.native})


_BY_SAMPLES = unless(
    lambda s: s["trainer.max_tokens_per_microbatch"] > 0, "overridden by max_tokens_per_microbatch"
)


# Checkpoints and loggers


def _eval_interval(value: int, _: Source) -> Became:
    never = {} if value > 0 else {"eval.before": False}
    return Became({"eval.every_rounds": max(value, 0), "eval.at_end": value > 0, **never})


def _resume(_: Any, source: Source) -> str:
    mode, path = source["trainer.resume_mode"], source["trainer.resume_path"]
    return (path or "none") if mode == "from_path" else "latest" if mode == "latest" else "none"


def _resume_path(value: str | None, source: Source) -> Any:
    if source["trainer.resume_mode"] != "from_path":
        return no_effect("resume_mode is not from_path")
    if value is not None and not _STEP_FOLDER.fullmatch(PurePath(value).name):
        raise ValueError(f"{value} is not a checkpoint: the folder's name must be step_N (or global_step_N)")
    return value or "none"


def _max_ckpts(value: int, _: Source) -> int | None:
    if value == 0:
        raise ValueError(
            "0 would keep no checkpoint; set it to -1 to keep all, or to the number of checkpoints to keep"
        )
    return None if value < 0 else value


def tracker(source: Source) -> list[str]:
    """Native path of the tracker, if the logger is one."""
    logger = source["trainer.logger"]
    return [f"report.{logger}"] if logger in ("wandb", "swanlab") else []


def _logger(value: str, source: Source) -> Became:
    if value in ("mlflow", "vemlp_wandb"):
        return unsupported("use tensorboard, wandb or swanlab, or read metrics.jsonl")
    mode, why = wandb_mode() if value == "wandb" else ("cloud", "")
    tracked = {f"{path}.mode": mode for path in tracker(source)}
    return Became({"report.tensorboard": value == "tensorboard", **tracked}, note=why)


# Models and backends


def _schedule(value: str, source: Source) -> Any:
    names = {
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
        "inverse_sqrt": "inverse_sqrt",
    }
    if value == "constant":
        (decay,) = source.native
        return Became({decay: "constant", f"{decay.rpartition('.')[0]}.warmup_steps": 0})
    return names.get(value) or unsupported("use constant_with_warmup, linear, cosine or inverse_sqrt")


_DEEPSPEED_USUAL: dict[str, Any] = {
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "prescale_gradient": False,
    "data_types": {"grad_accum_dtype": "fp32"},
}
"""DeepSpeed keys that change results -> the only value that braid supports."""
_DEEPSPEED_SPEED = re.compile(
    "sub_group_size|reduce_bucket_size|round_robin_gradients|disable_trace_cache|wall_clock_breakdown|"
    "stage3_.*"
)


def _deepspeed_own(value: Any, source: Source) -> Became:
    key = source.at.rpartition(".")[2]
    if _DEEPSPEED_SPEED.fullmatch(key):
        return no_effect("it affects only DeepSpeed's memory and speed; braid sets its own value")
    if key == "torch_autocast":
        return no_effect("the dtype of matrix products is set by trainer.bf16")
    if value == "auto" or (key in _DEEPSPEED_USUAL and value == _DEEPSPEED_USUAL[key]):
        return implied("braid always configures DeepSpeed this way")
    return unsupported("only the stage, zero_hpz_partition_size and CPU offload of DeepSpeed are supported")


_MEGATRON_USUAL: dict[str, Any] = {
    "torch_profiler_config.enable": False,
    "lora_config.lora_type": "lora",
    "optimizer_config_kwargs.overlap_cpu_optimizer_d2h_h2d": False,
    "optimizer_config_kwargs.use_precision_aware_optimizer": False,
    "optimizer_config_kwargs.optimizer_cpu_offload": False,
    "optimizer_config_kwargs.optimizer_offload_fraction": 0.0,
    "transformer_config_kwargs.recompute_modules": ["core_attn"],
}
"""Pass-through keys of `megatron_config` -> the value that has no effect."""


def _megatron_own(value: Any, source: Source) -> Became:
    key = source.at.partition("megatron_config.")[2]
    if value in (None, {}, []) or (key in _MEGATRON_USUAL and value == _MEGATRON_USUAL[key]):
        return no_effect("the default value, which turns the feature off")
    return unsupported("use the options of train.megatron in docs/config.md")


_LORA = unless(lambda s: s["trainer.policy.model.lora.rank"] <= 0, "lora.rank=0 trains all weights")
_TARGETS = takes("text or [text]")
_SCHEDULES = (
    "constant_with_warmup|constant|linear|cosine|inverse_sqrt|cosine_with_restarts|polynomial|"
    "reduce_lr_on_plateau|cosine_with_min_lr|warmup_stable_decay"
)
_TRACKED = unless(lambda s: not s.place("tracker"), lambda s: f"{s['trainer.logger']} has no projects")
_SHARED_DEVICES = unless(
    lambda s: not is_one_process(s) and not is_colocated(s),
    "without colocate_all no other role uses the optimizer's devices",
)
_NO_REWARD_WORKERS = (
    "reward models are reward parts (braid.reward.parts), not workers; SkyRL did not implement them"
)
_TEMPLATE = "a template, used where ${deepspeed_config.train} or ${deepspeed_config.eval} refers to it"
_IS_SYNC = unless(lambda s: not s["trainer.fully_async.enabled"], "trainer.fully_async.enabled is false")
_CHUNKS = "log-probs and entropy are computed in chunks of train.logprob_chunk_bytes"
_ONE_CHUNK = "logits are always computed for one chunk of tokens at a time"
_MODEL_FOLDER = "set it in config.json of the model folder"


# One rule per line.
# fmt: off
PLACEMENT = section("trainer.placement")(
    to("colocate_all", "", "bool", ONE_PROCESS, _colocate_all, default=True,
       note="all roles take turns on the same devices; weights and gradients are offloaded meanwhile"),
    to("colocate_policy_ref", "cluster.placement", "bool", ONE_PROCESS, NO_REFERENCE,
       unless(is_colocated, "colocate_all places all roles on the same devices"), _placed, default=True,
       note="if colocate_all is false"),
    to("policy_num_nodes", "cluster.num_nodes cluster.placement", "count", ONE_PROCESS, _placed, default=1),
    to("policy_num_gpus_per_node", "cluster.devices_per_node cluster.placement", "count", ONE_PROCESS,
       _placed, default=4, note="the first release's default; later ones have 1"),
    to("critic_num_nodes", "cluster.placement", "count", ONE_PROCESS, NO_CRITIC, _placed, default=1),
    to("critic_num_gpus_per_node", "cluster.placement", "count", ONE_PROCESS, NO_CRITIC, _placed, default=4),
    to("ref_num_nodes", "cluster.placement", "count", ONE_PROCESS, NO_REFERENCE, _placed, default=1),
    to("ref_num_gpus_per_node", "cluster.placement", "count", ONE_PROCESS, NO_REFERENCE, _placed, default=4),
    ignored("colocate_critic_reward", _NO_REWARD_WORKERS, "bool"),
    ignored("{reward_num_nodes,reward_num_gpus_per_node}", _NO_REWARD_WORKERS, "count"))

GENERAL = section("trainer")(
    to("epochs", "run.max_epochs", "count", default=1,
       note="SkyRL drops the prompts that do not fill a round"),
    to("max_training_steps", "run.max_rounds", "count?",
       note="a step is a round; the smaller of this and epochs"),
    to("update_epochs_per_batch", "{trained}.passes_per_round", "count", default=1),
    to("train_batch_size", "rollout.prompts_per_round", "count", default=1024, note="in prompts"),
    to("policy_mini_batch_size", "train.steps_per_pass", "count", _steps, default=256,
       note="optimizer steps = train_batch_size / policy_mini_batch_size, in prompts over all ranks"),
    to("critic_mini_batch_size", "critic.train.steps_per_pass", "count", NO_CRITIC, _steps, default=256,
       note="optimizer steps = train_batch_size / critic_mini_batch_size"),
    to("micro_train_batch_size_per_gpu", "{trained}.micro_batch_rows {trained}.micro_batch_tokens", "count",
       _BY_SAMPLES, _rows_and_tokens, default=1,
       note="memory only: denominators count the whole optimizer step"),
    to("micro_forward_batch_size_per_gpu", "{models}.infer_batch_rows {models}.infer_batch_tokens", "count",
       _BY_SAMPLES, _rows_and_tokens, default=1, note="memory only"),
    to("max_tokens_per_microbatch", "{trained}.micro_batch_tokens {models}.infer_batch_tokens", "count or -1",
       lambda v, _: v if v > 0 else no_effect("micro-batches are counted in samples"), default=-1),
    always("recompute_old_logprobs_per_minibatch", "log-probs do not depend on batching, so the time of "
           "recomputation does not change results", "bool"),
    to("update_ref_every_epoch", "reference.update_every_epochs", "bool", NO_REFERENCE, lambda v, _: int(v),
       default=False),
    to("num_warmup_steps", "{trained}.optimizer.schedule.warmup_steps", "natural",
       note="optimizer steps, for policy and critic; early SkyRL ignored it with FSDP"),
    to("use_sample_packing", "", "bool", already("rows are always packed, which does not change results"),
       default=True),
    to("max_prompt_length", {"data.max_prompt_tokens": as_is, "data.overlong": "truncate_left"}, "count",
       default=512,
       note="truncates on the left, as documented; SkyRL's code drops them (braid.data.overlong=drop)"),
    to("gradient_checkpointing", "{trained}.gradient_checkpointing", "bool", default=True),
    ignored("gradient_checkpointing_use_reentrant", "always non-reentrant; it does not change gradients",
            "bool"),
    to("seed", "run.seed", "natural", default=42,
       note="random numbers depend on (seed, prompt, sample, position)"),
    to("bf16", "{models}.autocast", "bool", mapped({True: "auto", False: "none"}), default=True,
       note="matrix products in bf16 with fp32 weights on CUDA; fp32 on CPUs"),
    to("flash_attn", "model.attention", "bool", mapped({True: "auto", False: "sdpa"}), default=True,
       note="true: the fastest available kernel for packed rows"),
    ignored("disable_fast_tokenizer", "transformers' fast tokenizers are always used", "bool"),
    ignored("use_orm_score", "not read by SkyRL", "bool"),
    ignored("use_expandable_segments", "set PYTORCH_CUDA_ALLOC_CONF in braid.cluster.env", "bool"),
    ignored("{logprobs_chunk_size,vocab_entropy_chunk_size,vocab_entropy_chunk_memory_mb}", _CHUNKS, "int"),
    ignored("fused_lm_head_logprob", _ONE_CHUNK, "bool"),
    ignored("fused_lm_head_logprob_backend", _ONE_CHUNK, "text"),
    to("mtp.enabled", "", "bool", off("set it to false; draft heads are not supported", "no draft heads"),
       default=False),
    ignored("mtp.*", "there are no draft heads"),
    to("fully_async.enabled", "pipeline.on_new_weights pipeline.over_lag", "bool",
       lambda value, source: sets("interrupt", "keep")(value, source) if value else implied("it is off"), default=False,
       note="sampling goes on during training, and running requests continue with new weights"),
    to("fully_async.max_staleness_steps", "pipeline.max_lag", "natural", _IS_SYNC, default=4),
    to("fully_async.num_parallel_generation_workers", "pipeline.groups_in_flight", "count", _IS_SYNC, default=768),
    to("fully_async.clear_kv_cache_on_weight_sync", "rollout.native.recompute_cache", "bool", _IS_SYNC,
       default=False),
    missing("fully_async.sample_full_batch", "set it to false: prompts are drawn as places become free", False),
    missing("fully_async.simulate_training", "set it to false: there is no simulated training", False),
    ignored("fully_async.simulate_{training_step,weight_sync}_seconds", "there is no simulated training"))

REPORT = section("trainer")(
    to("eval_batch_size", "eval.batch_prompts", "count", NO_EVALUATION, default=1024,
       note="prompts; the last batch may be smaller"),
    to("eval_before_train", "eval.before", "bool", NO_EVALUATION, default=True),
    to("eval_interval", "eval.every_rounds", _NEVER, _eval_interval, default=5,
       note="and at the end; -1: never"),
    to("resume_mode", "run.resume", choice(None, "none", "latest", "from_path"), _resume, default="latest",
       note="latest: a new run without a checkpoint; a resumed run ends where it would have (SkyRL runs "
       "further epochs)"),
    to("resume_path", "run.resume", nullable(text("a/global_step_10", "b/step_20")), _resume_path,
       note="a checkpoint of braid; of SkyRL's, only HF exports can be read"),
    to("ckpt_path", "checkpoint.dir", "path", _expanded,
       note="has folders step_N; by default in the run folder"),
    to("max_ckpts_to_keep", "checkpoint.keep", integer(samples=(-1, 2, 5)), _max_ckpts, default=-1,
       note="-1 keeps all"),
    to("ckpt_interval", {"checkpoint.every_rounds": at_least_0, "checkpoint.at_end": positive}, _NEVER,
       default=10, note="and at the end; -1: never"),
    to("hf_save_interval", "checkpoint.export_every_rounds", _NEVER, at_least_0, default=-1),
    to("export_path", "checkpoint.export_dir", "path",
       unless(lambda s: s["trainer.hf_save_interval"] <= 0, "hf_save_interval disables exports"), _expanded,
       note="Hugging Face folders; dumps are in the run folder (batches/, samples/)"),
    ignored("log_path", "logs are written to the terminal", "text"),
    to("logger", "report", "wandb|console|tensorboard|swanlab|mlflow|vemlp_wandb", _logger, default="wandb",
       note="the console and metrics.jsonl are always written"),
    to("project_name", "{tracker}.project", "text", _TRACKED, default="skyrl"),
    to("run_name", {"run.name": folder_name, "{tracker}.name": as_is}, "text", default="test_run",
       note="also names the run folder"),
    ignored("tags", "trackers always receive the whole config"),
    to("dump_data_batch", "report.batches_every_rounds", "bool", lambda v, _: int(v), default=False,
       note="in batches/ of the run folder, as safetensors instead of pickles"),
    to("dump_eval_results", "report.eval_samples", "bool", NO_EVALUATION, default=True,
       note="samples/eval_N.jsonl"),
    ignored("print_example_interval", "use braid.rollout.print_outputs to log samples", "int"),
    ignored("num_logger_eval_samples", "all evaluated samples are stored", "int"),
    ignored("num_logger_train_samples", "use braid.report.samples_every_rounds", "int"),
    ignored("enable_ray_gpu_monitor", "braid has no GPU monitor", "bool"),
    to("s3_export.enabled", "", "bool", off("copy the export folder manually", "nothing is uploaded")),
    ignored("s3_export.*", "nothing is uploaded"))

_OPTIMIZER = section("trainer.{policy,critic}.optimizer_config", "{train}", used)(
    to("adam_betas", ".optimizer.betas", list_of(takes("share"), length=2), default=[0.9, 0.999]),
    to("weight_decay", ".optimizer.weight_decay", "non-negative", default=0.01,
       note="decoupled (AdamW), not L2; biases and norm weights are excluded"),
    to("max_grad_norm", ".max_grad_norm", "non-negative", or_null, default=1.0, note="0: no clipping"),
    to("offload_after_step", ".offload.optimizer", "bool", _SHARED_DEVICES, default=True,
       note="where training and generation share devices"),
    to("num_warmup_steps", ".optimizer.schedule.warmup_steps", "natural",
       note="optimizer steps; trainer.num_warmup_steps: both models"),
    to("scheduler", ".optimizer.schedule.decay", _SCHEDULES, _schedule, default="constant_with_warmup"))

_FSDP = section("trainer.{policy,critic,ref}.fsdp_config", "{train}.fsdp", of_backend("fsdp", "fsdp2"), used)(
    to("fsdp_size", ".size", "count or -1", lambda v, _: None if v < 0 else v, default=-1, note="-1: all"),
    to("mixed_precision.param_dtype", ".*", "bf16|fp32|fp16", default="bf16"),
    to("mixed_precision.{reduce_dtype,buffer_dtype}", ".*", "bf16|fp32|fp16", default="fp32"),
    ignored("wrap_policy.*", "each layer is always wrapped as a unit"))

_CPU_OFFLOAD = "parameters and optimizer live on the CPU, where offload_after_step moves them after each step"
_DEEPSPEED_CONFIG = "trainer.{policy,critic,ref}.deepspeed_config"
_DEEPSPEED = section(_DEEPSPEED_CONFIG, "{train}.deepspeed", of_backend("deepspeed"), used)(
    to("zero_optimization.stage", ".stage", choice(3), default=3),
    to("zero_optimization.zero_hpz_partition_size", ".hpz_partition_size", "count", default=1),
    to("zero_optimization.{offload_param,offload_optimizer}.device", ".cpu_offload", "none|cpu",
       lambda v, _: v == "cpu"),
    ignored("zero_optimization.{offload_param,offload_optimizer}.*",
            "it affects only the speed of copies between CPU and GPU"),
    ignored("gradient_clipping", "overridden by optimizer_config.max_grad_norm, as in SkyRL"),
    to("zero_optimization.* *", "", "any", _deepspeed_own))

_TEMPLATES = section("deepspeed_config.{train,eval}")(
    ignored("* zero_optimization.* zero_optimization.{stage,zero_hpz_partition_size} "
            "zero_optimization.{offload_param,offload_optimizer}.*", _TEMPLATE))

_MEGATRON = section("trainer.{policy,ref}.megatron_config", "{train}.megatron", of_backend("megatron"), used)(
    to("tensor_model_parallel_size", {".tensor_parallel": as_is, ".sequence_parallel": lambda v, _: v > 1},
       "count", default=1),
    to("pipeline_model_parallel_size", ".pipeline_parallel", "count", default=1),
    to("context_parallel_size", ".context_parallel", "count", default=1),
    to("expert_model_parallel_size", ".expert_parallel", "count", default=1),
    to("expert_tensor_parallel_size", ".expert_tensor_parallel", "count?"),
    to("moe_token_dispatcher_type", ".moe_token_dispatcher", "alltoall|allgather|flex", default="alltoall"),
    to("moe_grouped_gemm", ".*", "bool", default=True),
    to("ddp_config.{overlap_grad_reduce,overlap_param_gather}", ".*", "bool", default=False),
    ignored("ddp_config.grad_reduce_in_fp32", "gradients are always reduced in fp32", "bool"),
    ignored("ddp_config.average_in_collective", "denominators are global, so it does not change results",
            "bool"),
    section("transformer_config_kwargs")(
        to("recompute_granularity", ".*", "full|selective?", lambda v, _: v or "off", default="full"),
        to("recompute_method", ".*", "block|uniform?", default="uniform"),
        to("recompute_num_layers", ".*", "count?", default=1),
        to("gradient_accumulation_fusion", ".transformer.*", "bool", default=False)),
    ignored("empty_cuda_cache", "the backend frees memory itself", "bool"),
    ignored("torch_profiler_config.{ranks,save_path}", "for the profiler only"),
    to("* {optimizer_config_kwargs,model_config_kwargs,torch_profiler_config}.* "
       "{hf_export_config,lora_config}.* {transformer_config_kwargs,ddp_config}.*", "", "any", _megatron_own))

MODELS = rows(
    to("trainer.strategy", "{models}.backend", "fsdp|fsdp2|deepspeed|megatron",
       unless(lambda s: s.backend, lambda s: f"overridden by --backend {s.backend}"), default="fsdp2",
       note="fsdp is FSDP1, as in the first release; in releases from 2026 it is FSDP2"),
    always("trainer.sequence_parallel_backend", "sequence parallelism is always Ulysses", choice("ulysses")),
    to("trainer.policy.model.path", "model.path", "text", default="Qwen/Qwen2.5-1.5B-Instruct",
       note="trained weights are fp32, as in SkyRL"),
    to("trainer.critic.model.path", "critic.path", "text?", used, note="with a random value head; for gae"),
    to("trainer.ref.model.path", "reference.path", "text?", used, note="null: the initial policy"),
    to("trainer.policy.optimizer_config.lr", "train.optimizer.lr", "positive", default=1e-6),
    to("trainer.critic.optimizer_config.lr", "critic.train.optimizer.lr", "positive", used, default=5e-6),
    _OPTIMIZER,
    section("trainer.{policy,critic}.fsdp_config", "{train}.fsdp")(
        to("cpu_offload", ".*", "bool", of_backend("fsdp", "fsdp2"), used, default=False, note=_CPU_OFFLOAD)),
    to("trainer.ref.fsdp_config.cpu_offload", "reference.train.fsdp.cpu_offload", "bool",
       of_backend("fsdp", "fsdp2"), used, default=True, note=_CPU_OFFLOAD),
    to("trainer.{policy,critic,ref}.fsdp_config.reshard_after_forward", "{train}.fsdp.*",
       either(takes("bool"), integer(1, samples=(1, 2))), of_backend("fsdp2"), used, default=True),
    _FSDP,
    _DEEPSPEED,
    _TEMPLATES,
    _MEGATRON,
    to("trainer.{policy,critic,ref}.sequence_parallel_size", "{train}.sequence_parallel", "count",
       of_backend("fsdp", "fsdp2", "deepspeed"), used, default=1,
       note="Ulysses; data-parallel ranks = GPUs / sequence_parallel_size"),
    to("trainer.policy.use_torch_compile", "train.compile", "bool", default=False, note="log-probs, entropy"),
    to("trainer.policy.record_memory", "train.record_memory", "bool", default=False,
       note="in memory/ of the run folder"),
    to("trainer.policy.use_liger_kernel", "train.liger_kernels", "bool", default=False),
    ignored("trainer.ref.use_liger_kernel", "the policy's setting applies", "bool"),
    section("trainer.policy.model.lora", "model.lora")(
        to("rank", ".rank", "natural", _LORA, default=0, note="0 trains all weights"),
        to("alpha", ".alpha", "positive", _LORA, default=16),
        to("dropout", "", "share",
           off("set it to 0: log-probs must be the same in rollout and training",
               "adapters have no dropout")),
        to("target_modules", ".targets", _TARGETS, _LORA, listed, default="all-linear"),
        to("exclude_modules", "", "text?",
           off("list the wanted layers in target_modules", "no modules are excluded")),
        to("init_method", "", "text",
           only("kaiming", "use kaiming", "adapters are always initialized as in peft"), default="kaiming"),
        ignored("lora_sync_path", "engines always receive merged weights", "text"),
        ignored("max_loras", "only one adapter is trained", "count"),
        ignored("max_cpu_loras", "only one adapter is trained", "count?")),
    to("trainer.target_modules", "model.lora.targets", nullable(_TARGETS), _LORA,
       unless_null("set by policy.model.lora.target_modules"), listed,
       note="older name of policy.model.lora.target_modules"),
    to("trainer.exclude_modules", "", "text?",
       off("list the wanted layers in target_modules", "no modules are excluded")),
    to("trainer.{critic,ref}.model.lora.rank", "", "natural",
       off("only the policy has adapters", "no adapters")),
    ignored("trainer.{critic,ref}.model.lora.*", "only the policy has adapters"),
    missing("trainer.policy.model.fake_int4_qat.*",
            "remove it; quantization-aware training is not supported"),
    missing("trainer.{rope_scaling,rope_theta} trainer.{policy,critic,ref}.model_config_kwargs",
            _MODEL_FOLDER),
    missing("trainer.policy.torch_profiler_config.enable", "use record_memory, or an external profiler",
            default=False),
    ignored("trainer.policy.torch_profiler_config.*", "for the profiler only"),
    ignored("trainer.policy.inference_only_init", "only trained models have an optimizer", "bool"),
    ignored("trainer.{policy,ref}.language_model_only", "only text models are supported", "bool"),
    to("trainer.reward.model.path", "", "text?",
       off("use braid.reward.parts=[{kind: model, path: ...}]; SkyRL did not implement it",
           "no reward model"), default=None),
    ignored("trainer.reward.* "
            "trainer.reward.{fsdp_config,deepspeed_config,deepspeed_config.zero_optimization}.*",
            _NO_REWARD_WORKERS),
)
TRAINER = rows(
    always("defaults", "the keys of the presets are listed here, with file and line", "any"),
    always("hydra.searchpath", "folders searched for the presets of `defaults`", "any"),
    PLACEMENT,
    GENERAL,
    REPORT,
    MODELS,
)
# fmt: on
