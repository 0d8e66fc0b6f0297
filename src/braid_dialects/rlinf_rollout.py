"""RLinf's `rollout`, `inference` and `env` keys: engines, where log-probs come from, simulators, robot
policies."""

from __future__ import annotations

from . import rlinf_facts as facts
from .conditions import needs, unless
from .conversions import already, computed, opposite, unless_null
from .rlinf_facts import ROBOTS_ONLY, SERVED, SGLANG, VLLM, WORKERS, is_robots
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source, no_effect, unsupported
from .values import Takes, choice, list_of, nullable

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
)
MODEL_TYPE = choice(*ARCHITECTURES, *VLA_KINDS, *OTHER_MODELS)


def model_type(value: str, source: Source) -> Became:
    """Convert model_type to the policy's architecture, or the kind of a robot policy."""
    fitting = VLA_KINDS if is_robots(source) else tuple(ARCHITECTURES)
    if value not in fitting:
        task = source["runner.task_type"]
        return unsupported(f"use one of {', '.join(fitting)} with runner.task_type={task}")
    kind = {"model.vla.kind": value} if is_robots(source) else {"model.architecture": ARCHITECTURES[value]}
    return Became(kind)


def _recompute(value: bool, source: Source) -> str:
    """Convert recompute_logprobs. Without the key, text tasks and decoupled PPO recompute log-probs and
    robots use those recorded during rollout."""
    is_decoupled = source["algorithm.loss_type"] == "decoupled_actor_critic"
    if "rollout.recompute_logprobs" not in source.values:
        value = is_decoupled or not is_robots(source)
    return "recompute" if value else "interpolated" if is_decoupled else "behavior"


def _as_trained(value: str, source: Source) -> str:
    """The value of training. Raises ValueError if evaluation has another."""
    key = f"env.train.{source.at.split('.', 2)[2]}"
    if (trained := source.values.get(key, value)) != value:
        raise ValueError(
            f"evaluation must use the simulator and task of training, {key}={trained}; make them agree"
        )
    return value


def _num_envs(value: int | None, source: Source) -> Became:
    """Simulators, and the prompts (reset states) of a round."""
    num_envs = facts.episodes(source) // facts.rollout_epochs(source) if value is None else value
    return Became({"env.num_envs": num_envs, "rollout.prompts_per_round": facts.prompts(source)})


def _eval_episodes(value: int | None, source: Source) -> Became:
    """Episodes of an evaluation: simulators times their runs, times the episodes of a run with auto_reset."""
    if value is None:
        return no_effect("the number of evaluation episodes is env.eval_episodes")
    steps, longest = (source[f"env.eval.max_{name}"] for name in ("steps_per_rollout_epoch", "episode_steps"))
    each = max(1, steps // longest) if source["env.eval.auto_reset"] and steps and longest else 1
    return Became({"env.eval_episodes": value * (source["env.eval.rollout_epoch"] or 1) * each})


_SIMULATORS = "maniskill|libero|robotwin|isaaclab|metaworld|behavior|calvin|robocasa|realworld|habitat"
_SUITES = choice(*(f"libero_{name}" for name in ("spatial", "object", "goal", "10", "90", "130")))
_OF_ACTOR = unless(
    lambda s: is_robots(s) and s.has("actor.model.model_path"),
    "the robot policy is set by actor.model.model_path",
)
_NOT_NATIVE = unless(
    lambda s: facts.engine(s) == "native",
    "the native engine samples with the trainer's weights in their precision",
)

# One rule per line.
# fmt: off
_INFERENCE = section("inference", "inference")(
    to("group_name", "cluster.group_names.inference", "text", WORKERS),
    to("load_from_actor", "", "bool", WORKERS, already("they receive the actor's weights every round")),
    to("model.tensor_model_parallel_size", ".tensor_parallel", "count", facts.MEGATRON),
    to("model.pipeline_model_parallel_size", ".pipeline_parallel", "count", facts.MEGATRON),
    to("model.sequence_parallel", ".sequence_parallel", "bool", facts.MEGATRON),
    ignored("model_type model_arch {model,tokenizer,fsdp_config}.* "
            "fsdp_config.{mixed_precision,amp_autocast,grad_scaler,amp_grad_scaler}.*",
            "log-probs before the update are always computed with the actor's model and precision"))

_ROLLOUT = section("rollout", "rollout.{engine}")(
    # the model and the engine
    to("group_name", "cluster.group_names.rollout", "text", WORKERS),
    to("model.model_path", "model.path", "path", _OF_ACTOR, note="the trained policy too"),
    to("model.model_type", "", MODEL_TYPE, _OF_ACTOR, model_type, note="the folder's architecture"),
    to("model.precision", ".dtype", nullable(PRECISION), _NOT_NATIVE,
       unless_null("same as actor.model.precision"), lambda v, _: facts.DTYPES[str(v)]),
    to("rollout_backend", "rollout.engine", "sglang|vllm", lambda _, s: facts.engine(s), default="sglang"),
    to("backend", "rollout.engine", "huggingface|vllm",
       lambda v, s: s.engine or ("vllm" if v == "vllm" else "native"), note="huggingface: the native engine"),
    always("mode", "determined by cluster.component_placement", "collocate|disaggregated"),
    to("gpu_memory_utilization", ".memory_fraction", "fraction", SERVED, default=0.65),
    to("tensor_parallel_size", ".tensor_parallel", "count", SERVED, default=1),
    to("pipeline_parallel_size", ".pipeline_parallel", "count", SERVED, default=1),
    to("max_running_requests", ".max_running", "count", note="sequences decoded concurrently"),
    to("enforce_eager", ".cuda_graphs", "bool", opposite),
    to("enable_cuda_graph", ".cuda_graphs", "bool", note="newer opposite of enforce_eager"),
    to("cuda_graph_max_bs", ".cuda_graph_max_batch", "count", SERVED,
       lambda v, s: min(v, s["rollout.max_running_requests"] or v)),
    to("detokenize", ".detokenize", "bool", SERVED, note="rewards always use text decoded by braid"),
    to("padding", "model.pad_token_id", "natural?", note="null: the tokenizer's. Not read by RLinf"),
    to("eos", "model.eos_token_id", "natural?", note="null: the tokenizer's"),
    # SGLang and vLLM
    to("attention_backend", ".attention", "text", SGLANG),
    to("sglang_decode_log_interval", ".decode_log_interval", "count", SGLANG),
    to("use_torch_compile", ".torch_compile", "bool", SGLANG),
    to("torch_compile_max_bs", ".torch_compile_max_batch", "count", SGLANG,
       needs("rollout.use_torch_compile")),
    to("distributed_executor_backend", ".executor", "mp|ray", VLLM, note="not read by RLinf"),
    to("disable_log_stats", ".log_stats", "bool", VLLM, opposite),
    to("vllm.attention_backend", ".attention", "text", VLLM),
    to("vllm.enable_chunked_prefill", ".chunked_prefill", "bool", VLLM),
    to("vllm.enable_prefix_caching", ".prefix_caching", "bool", VLLM),
    to("vllm.max_num_batched_tokens", ".prefill_tokens", "count?", VLLM, unless_null()),
    ignored("vllm.enable_flash_infer_sampler", "a sampling kernel, which does not change the distribution"),
    missing("vllm.torch_profiler_dir", "use an external profiler"),
    # log-probs, checks, output
    to("recompute_logprobs", "algorithm.old_logprobs", "bool", _recompute, default=True,
       note="true: the trainer's; false: the engine's, or in decoupled_actor_critic interpolated"),
    always("return_logprobs", "the engine's log-probs are always kept", "bool"),
    to("validate_weight", "rollout.check_weights", "bool", note="checks weights after each sync"),
    to("validate_save_dir", "rollout.check_weights_dir", "path?", needs("rollout.validate_weight")),
    to("print_outputs", "rollout.print_outputs", "bool"),
    # robots
    always("enable_offload", "an engine shares the trainer's weights, or sleeps in between", "bool"),
    to("pipeline_stage_num", "env.pipeline_stages", "count", ROBOTS_ONLY),
    to("sampling_params.temperature_train", "rollout.sampling.temperature", "positive", ROBOTS_ONLY),
    to("sampling_params.max_new_tokens", "rollout.sampling.max_new_tokens", "count", ROBOTS_ONLY),
    missing("sampling_params.temperature_eval", "use actor.model.do_sample for evaluation"),
    missing("enable_torch_compile", "use braid.train.compile=true"),
    ignored("{collect_transitions,collect_prev_infos}", "trajectories are always complete"))

_ENV = section("env.{train,eval}", "{env}", ROBOTS_ONLY)(
    to("env_type", "env.kind", _SIMULATORS,
       lambda v, _: v if v in ("maniskill", "libero") else unsupported("use maniskill or libero"), _as_trained),
    to("task_name init_params.id", "env.task", "text", needs("env.train.env_type", "maniskill"), _as_trained),
    to("task_suite_name", "env.suite", _SUITES, needs("env.train.env_type", "libero"), _as_trained),
    to("auto_reset", ".auto_reset", "bool", note="at the end of an action chunk"),
    to("ignore_terminations", ".ignore_terminations", "bool"),
    to("use_fixed_reset_state_ids", ".fixed_reset_states", "bool", note="a group shares its reset state"),
    to("max_episode_steps", ".max_episode_steps", "count", note="in env steps, not action chunks"),
    to("use_rel_reward", ".relative_reward", "bool"),
    to("reward_coef", ".reward_scale", "positive"),
    to("seed", ".seed", "natural"),
    to("group_size", ".group_size", "count"),
    to("video_cfg.save_video", ".video.save", "bool"),
    to("video_cfg.info_on_video", ".video.overlay", "bool"),
    to("video_cfg.video_base_dir", ".video.dir", "path"),
    to("init_params.camera_heights", ".camera_height", "count"),
    to("init_params.camera_widths", ".camera_width", "count"))

_VLA = section("actor.model", "model.vla", ROBOTS_ONLY)(
    to("action_dim", ".action_dim", "count"),
    to("num_action_chunks", ".num_action_chunks", "count", note="actions of one answer"),
    to("use_proprio", ".use_proprio", "bool"),
    to("unnorm_key", ".unnorm_key", "text?"),
    to("value_type", ".value_level", {"chunk_level": "chunk", "action_level": "action"}),
    to("val_micro_batch_size", ".eval_batch_rows", "count", note="not read by RLinf"),
    to("center_crop", ".center_crop", "bool"),
    to("do_sample", ".greedy", "bool", opposite, note="in evaluation; training always samples"),
    to("add_qkv_bias", ".qkv_bias", "bool", note="checked against the folder"),
    to("vocab_size", ".vocab_size", "count", note="action tokens are counted backwards from it"),
    to("hidden_size", ".hidden_size", "count", note="input of the value head"),
    to("policy_setup", ".policy_setup", "text"),
    to("image_size", ".image_size", list_of("count", length=2), note="height and width"),
    to("num_images_in_input", ".num_images", "count"),
    always("add_value_head", "there is a value head whenever values are learned", "bool"),
    to("implement_version", ".form", {"rlinf": "rlinf", "official": "official"}),
    missing("use_film", "use a policy without FiLM"))

RULES = rows(
    _INFERENCE,
    _ROLLOUT,
    to("env.group_name", "cluster.group_names.env", "text", WORKERS),
    ignored("{env,rollout,actor}.channel.{name,queue_name,queue_size}", "there are no named queues"),
    to("env.enable_offload", "env.offload", "bool", ROBOTS_ONLY),
    to("env.train.total_num_envs", "", "count?", ROBOTS_ONLY, _num_envs,
       note="rollout.prompts_per_round = this * rollout_epoch // group_size; null: one optimizer batch"),
    to("env.train.rollout_epoch", "rollout.prompts_per_round", "count", ROBOTS_ONLY, computed(facts.prompts)),
    to("env.train.max_steps_per_rollout_epoch", "env.max_steps_per_rollout", "count", ROBOTS_ONLY,
       note="env steps of each simulator in a round"),
    to("env.eval.total_num_envs", "env.eval_episodes", "count?", ROBOTS_ONLY, _eval_episodes,
       note="times rollout_epoch, and with auto_reset the episodes of max_steps_per_rollout_epoch"),
    always("env.eval.{rollout_epoch,max_steps_per_rollout_epoch}", "env.eval_episodes has them", "count"),
    _ENV,
    _VLA,
)
# fmt: on
