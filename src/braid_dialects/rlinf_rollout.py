"""RLinf's `rollout` and `inference` keys: engines, and where log-probs come from."""

from __future__ import annotations

from typing import Any

from . import rlinf_facts as facts
from .compat import (
    Apply,
    Became,
    Convert,
    Implied,
    NoEffect,
    Rule,
    Source,
    Unsupported,
    no_effect,
    opposite,
    unless_null,
    unsupported,
    when,
)
from .rlinf_facts import cluster, megatron, robots_only, served, sglang, vllm
from .values import ANY, BOOL, COUNT, NATURAL, PATH, POSITIVE, TEXT, Takes, choice, nullable, number

ARCHITECTURES = {"qwen2.5": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3_moe", "deepseek_v3": "deepseek_v3"}
"""model_type of text models -> architecture in transformers."""
VLA_KINDS = ("openvla", "openvla_oft")
OTHER_MODELS = (
    "qwen2.5_vl", "qwen3_vl", "openpi", "gr00t", "dexbotic_pi", "mlp_policy", "cnn_policy", "flow_policy",
)  # fmt: skip
PRECISION = Takes(
    f"one of {', '.join(facts.DTYPES)}",
    lambda v: not isinstance(v, bool) and str(v) in facts.DTYPES,
    ("fp16", "bf16", "fp32"),
    ("fp16", "bf16", "fp32"),
)
MODEL_TYPE = choice(*ARCHITECTURES, *VLA_KINDS, *OTHER_MODELS)


def model_type(value: str, source: Source) -> Became:
    """Convert model_type to the policy's architecture, or the kind of a robot policy."""
    if facts.is_robots(source) and value in VLA_KINDS:
        return Became({"model.vla.kind": value})
    if not facts.is_robots(source) and value in ARCHITECTURES:
        return Became({"model.architecture": ARCHITECTURES[value]})
    fitting = VLA_KINDS if facts.is_robots(source) else tuple(ARCHITECTURES)
    return unsupported(
        f"use one of {', '.join(fitting)} with runner.task_type={source.get('runner.task_type')}"
    )


def _engine(name: str, then: Convert | None = None) -> Convert:
    """Set `name` in the section of the engine in use."""

    def convert(value: Any, source: Source) -> Became:
        made = value if then is None else then(value, source)
        return Became({f"rollout.{facts.engine(source)}.{name}": made})

    return convert


def _engine_dtype(value: Any, source: Source) -> Became:
    if facts.engine(source) == "native":
        return no_effect("the native engine samples with the trainer's weights in their precision")
    if value is None:
        return no_effect("null: same as actor.model.precision")
    return Became({f"rollout.{facts.engine(source)}.dtype": facts.DTYPES[str(value)]})


def _is_policy_elsewhere(source: Source) -> str:
    is_robots = facts.is_robots(source) and source.has("actor.model.model_path")
    return "the robot policy is set by actor.model.model_path" if is_robots else ""


def _weights_dir(value: str | None, source: Source) -> Any:
    is_on = source.get("rollout.validate_weight") is True
    return value if is_on else no_effect("rollout.validate_weight is false")


def _recompute(value: bool, source: Source) -> Any:
    """Convert recompute_logprobs. Without the key, text tasks and decoupled PPO recompute log-probs and
    robots use those recorded during rollout."""
    is_decoupled = source.get("algorithm.loss_type") == "decoupled_actor_critic"
    if "rollout.recompute_logprobs" not in source.values:
        value = is_decoupled or not facts.is_robots(source)
    if is_decoupled and not value:
        return "interpolated"
    return "recompute" if value else "behavior"


def _graph_batch(value: int, source: Source) -> int:
    return min(value, source.get("rollout.max_running_requests") or value)


def _compiled(value: int, source: Source) -> Any:
    is_on = source.get("rollout.use_torch_compile") is True
    return value if is_on else no_effect("rollout.use_torch_compile is false")


def _chosen_engine(_: str, source: Source) -> Any:
    return facts.engine(source)


def _huggingface(value: str, source: Source) -> Became:
    native = "vllm" if value == "vllm" else "native"
    return Became({"rollout.engine": source.engine or native})


_DERIVED = "determined by cluster.component_placement: roles on the same devices take turns"
_AS_TRAINED = "log-probs before the update are always computed with the actor's model and precision"
_SHARED = "an engine always shares the trainer's weights, or sleeps while other roles use its devices"

# fmt: off
RULES: tuple[Rule, ...] = (
    # inference: log-probs before the update
    Apply("inference.group_name", "cluster.group_names.inference", TEXT, when(cluster)),
    Apply("inference.load_from_actor", "inference.load_from_policy", BOOL, when(cluster)),
    Apply("inference.model.tensor_model_parallel_size", "inference.tensor_parallel", COUNT, when(megatron)),
    Apply("inference.model.pipeline_model_parallel_size", "inference.pipeline_parallel", COUNT, when(megatron)),
    Apply("inference.model.sequence_parallel", "inference.sequence_parallel", BOOL, when(megatron)),
    NoEffect("inference.model_type", ANY, _AS_TRAINED),
    NoEffect("inference.model_arch", ANY, _AS_TRAINED),
    *(NoEffect(f"inference.{part}.*", ANY, _AS_TRAINED) for part in (
        "model", "tokenizer", "fsdp_config", "fsdp_config.mixed_precision", "fsdp_config.amp_autocast",
        "fsdp_config.grad_scaler", "fsdp_config.amp_grad_scaler")),
    # the model and the engine
    Apply("rollout.group_name", "cluster.group_names.rollout", TEXT, when(cluster)),
    Apply("rollout.model.model_path", "model.path", PATH, when(_is_policy_elsewhere), note="the trained policy too"),
    Apply("rollout.model.model_type", "", MODEL_TYPE, when(_is_policy_elsewhere, then=model_type),
          note="the folder must have this architecture"),
    Apply("rollout.model.precision", "", nullable(PRECISION), _engine_dtype, note="dtype of the engine's weights"),
    Apply("rollout.rollout_backend", "rollout.engine", choice("sglang", "vllm"), _chosen_engine, default="sglang",
          note="older files lack this key: SGLang, or the native engine for robots"),
    Apply("rollout.backend", "", choice("huggingface", "vllm"), _huggingface, note="huggingface: the native engine"),
    Implied("rollout.mode", choice("collocate", "disaggregated"), _DERIVED),
    Apply("rollout.gpu_memory_utilization", "", number(0.0, 1.0, above=True), when(served, then=_engine("memory_fraction")),
          default=0.65, note="SGLang's mem_fraction_static, vLLM's gpu_memory_utilization"),
    Apply("rollout.tensor_parallel_size", "", COUNT, when(served, then=_engine("tensor_parallel")), default=1),
    Apply("rollout.pipeline_parallel_size", "", COUNT, when(served, then=_engine("pipeline_parallel")), default=1,
          note="RLinf counts devices with it, but starts engines without it"),
    Apply("rollout.max_running_requests", "", COUNT, _engine("max_running"), note="sequences decoded concurrently"),
    Apply("rollout.enforce_eager", "", BOOL, _engine("cuda_graphs", opposite)),
    Apply("rollout.enable_cuda_graph", "", BOOL, _engine("cuda_graphs"), note="newer opposite of enforce_eager"),
    Apply("rollout.cuda_graph_max_bs", "", COUNT, when(served, then=_engine("cuda_graph_max_batch", _graph_batch)),
          note="at most max_running_requests"),
    Apply("rollout.detokenize", "", BOOL, when(served, then=_engine("detokenize")),
          note="rewards always use text decoded by braid"),
    Apply("rollout.padding", "model.pad_token_id", nullable(NATURAL), note="null: the tokenizer's. Not read by RLinf"),
    Apply("rollout.eos", "model.eos_token_id", nullable(NATURAL), note="null: the tokenizer's"),
    # SGLang and vLLM
    Apply("rollout.attention_backend", "rollout.sglang.attention", TEXT, when(sglang)),
    Apply("rollout.sglang_decode_log_interval", "rollout.sglang.decode_log_interval", COUNT, when(sglang)),
    Apply("rollout.use_torch_compile", "rollout.sglang.torch_compile", BOOL, when(sglang)),
    Apply("rollout.torch_compile_max_bs", "rollout.sglang.torch_compile_max_batch", COUNT, when(sglang, then=_compiled)),
    Apply("rollout.distributed_executor_backend", "rollout.vllm.executor", choice("mp", "ray"), when(vllm),
          note="not read by RLinf"),
    Apply("rollout.disable_log_stats", "rollout.vllm.log_stats", BOOL, when(vllm, then=opposite)),
    Apply("rollout.vllm.attention_backend", "rollout.vllm.attention", TEXT, when(vllm)),
    Apply("rollout.vllm.enable_chunked_prefill", "rollout.vllm.chunked_prefill", BOOL, when(vllm)),
    Apply("rollout.vllm.enable_prefix_caching", "rollout.vllm.prefix_caching", BOOL, when(vllm)),
    Apply("rollout.vllm.max_num_batched_tokens", "rollout.vllm.prefill_tokens", nullable(COUNT),
          when(vllm, then=unless_null())),
    NoEffect("rollout.vllm.enable_flash_infer_sampler", BOOL, "a sampling kernel, which does not change the distribution"),
    Unsupported("rollout.vllm.torch_profiler_dir", "use an external profiler"),
    # log-probs, checks, output
    Apply(
        "rollout.recompute_logprobs", "algorithm.old_logprobs", BOOL, _recompute, default=True,
        note="true: the trainer's own before the update; false: the engine's, or in decoupled_actor_critic interpolated",
    ),
    Implied("rollout.return_logprobs", BOOL, "the engine's log-probs are always kept"),
    Apply("rollout.validate_weight", "rollout.check_weights", BOOL,
          note="the engine's weights are checked after each weight sync"),
    Apply("rollout.validate_save_dir", "rollout.check_weights_dir", nullable(PATH), _weights_dir),
    Apply("rollout.print_outputs", "rollout.print_outputs", BOOL),
    # robots
    Implied("rollout.enable_offload", BOOL, _SHARED),
    Apply("rollout.pipeline_stage_num", "env.pipeline_stages", COUNT, when(robots_only)),
    Apply("rollout.sampling_params.temperature_train", "rollout.sampling.temperature", POSITIVE, when(robots_only)),
    Apply("rollout.sampling_params.max_new_tokens", "rollout.sampling.max_new_tokens", COUNT, when(robots_only)),
    Unsupported("rollout.sampling_params.temperature_eval", "use actor.model.do_sample for evaluation"),
    Unsupported("rollout.enable_torch_compile", "use braid.train.compile=true"),
    NoEffect("rollout.collect_transitions", BOOL, "trajectories are always complete"),
    NoEffect("rollout.collect_prev_infos", BOOL, "trajectories are always complete"),
)
# fmt: on
