"""RLinf's `rollout`, `inference` and `env` keys: engines, where log-probs come from, simulators, robot
policies."""

from __future__ import annotations

import math
from functools import partial

from . import rlinf_facts as facts
from .conditions import needs, overridden, unless
from .conversions import already, computed, opposite, unless_null
from .rlinf_facts import ROBOTS_ONLY, SERVED, SGLANG, VLLM, WORKERS, is_robots, of_simulator
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Convert, Source, implied, no_effect, unsupported
from .values import Takes, choice, nullable

ARCHITECTURES = {"qwen2.5": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3_moe", "deepseek_v3": "deepseek_v3"}
"""model_type of text models -> architecture in transformers."""
ROBOT_MODELS = {name: {"model.vla.kind": name} for name in facts.OPENVLA} | {
    "openpi": {"model.vla.kind": "pi0"},
    "mlp_policy": {"model.mlp.hidden_sizes": [256, 256, 256], "model.mlp.initial_std": 0.6065},
    "cnn_policy": {"model.mlp.channels": [32, 64, 64, 64], "model.mlp.hidden_sizes": [256]},
}
"""model_type of a robot policy -> native keys."""
OTHER_MODELS = (
    "qwen3_vl_moe", "gr00t", "dexbotic_pi", "dexbotic_dm0", "flow_policy", "starvla", "lingbotvla", "abot_m0",
    "evo1", "molmoact2", "dreamzero", "openpi_rlinf", "cma",
)  # fmt: skip
PRECISION = Takes(
    f"one of {', '.join(facts.DTYPES)}",
    lambda v: not isinstance(v, bool) and str(v) in facts.DTYPES,
    ("fp16", "bf16", "fp32"),
)
FOLDER = Takes("a string, or null", lambda v: v is None or isinstance(v, str))
"""Path of a model; empty or null where there is none."""
MODEL_TYPE = choice(*ARCHITECTURES, *facts.VISION_MODELS, *ROBOT_MODELS, *OTHER_MODELS)


def model_type(value: str, source: Source) -> Became:
    """Convert model_type to the policy's architecture, or the kind of a robot policy."""
    kinds = facts.VISION_MODELS if facts.reads_images(source) else ARCHITECTURES
    fitting = tuple(ROBOT_MODELS if is_robots(source) else kinds)
    if value not in fitting:
        task = source["runner.task_type"]
        data = " and data.type=vlm" if facts.reads_images(source) else ""
        return unsupported(f"use one of {', '.join(fitting)} with runner.task_type={task}{data}")
    return Became(ROBOT_MODELS[value] if is_robots(source) else {"model.architecture": kinds[value]})


def _recompute(value: bool, source: Source) -> str:
    """Convert recompute_logprobs. Without the key, text tasks and decoupled PPO recompute log-probs and
    robots use those recorded during rollout."""
    is_decoupled = source["algorithm.loss_type"] == "decoupled_actor_critic"
    if "rollout.recompute_logprobs" not in source.values:
        value = is_decoupled or not is_robots(source)
    return "recompute" if value else "interpolated" if is_decoupled else "behavior"


def _as_trained(value: str, source: Source) -> str:
    """The task of training. Raises ValueError if evaluation has another."""
    key = f"env.train.{source.at.split('.', 2)[2]}"
    if (trained := source.values.get(key, value)) != value:
        raise ValueError(
            f"evaluation must use the simulator and task of training, {key}={trained}; make them agree"
        )
    return value


def _num_envs(value: int | None, source: Source) -> Became:
    """Simulators of each rollout worker, and the prompts (reset states) of a round."""
    num_envs = facts.episodes(source) // facts.rollout_epochs(source) if value is None else value
    each = math.ceil(num_envs / facts.rollout_workers(source))
    return Became({"env.num_envs": each, "rollout.prompts_per_round": facts.prompts(source)})


def _eval_episodes(value: int | None, source: Source) -> Became:
    """Episodes of an evaluation: simulators times their runs, times the episodes of a run with auto_reset."""
    if value is None:
        return no_effect("the number of evaluation episodes is env.eval_episodes")
    steps, longest = (source[f"env.eval.max_{name}"] for name in ("steps_per_rollout_epoch", "episode_steps"))
    longest = longest or source["env.train.max_episode_steps"]
    each = max(1, steps // longest) if source["env.eval.auto_reset"] and steps and longest else 1
    return Became({"env.eval_episodes": value * (source["env.eval.rollout_epoch"] or 1) * each})


def _ordered(_: bool, source: Source) -> object:
    """use_ordered_reset_state_ids, is_eval: the first reset states of the tasks, which take turns, each
    once."""
    is_in_order, num_envs = source["env.eval.use_ordered_reset_state_ids"], source["env.eval.total_num_envs"]
    suites = facts.simulator(source) in ("libero", "metaworld")
    if not (is_in_order or (suites and source["env.eval.is_eval"])):
        return implied("the reset states of evaluations are random, and the same in every evaluation")
    if num_envs is None:
        if source.name == "is_eval":
            return no_effect("the number of evaluation episodes is env.eval_episodes")
        return unsupported("set env.eval.total_num_envs, the number of reset states")
    count = _eval_episodes(num_envs, source).native["env.eval_episodes"]
    total = facts.num_reset_states(source)
    if total is None or facts.simulator(source) != "libero" or count >= total:
        return Became({"env.eval_reset_seeds": count})
    num_tasks = total // facts.STATES_PER_TASK
    seeds = [i % num_tasks * facts.STATES_PER_TASK + i // num_tasks for i in range(count)]
    return Became({"env.eval_reset_seeds": seeds})


def _in_order(value: bool, source: Source) -> object:
    """use_ordered_reset_state_ids of training: each reset state once before any again."""
    if not value:
        return no_effect("reset states are random")
    if not facts.shares_reset_states(source):
        return no_effect("each episode begins in a random state of its own")
    if (total := facts.num_reset_states(source)) is None:
        return unsupported(
            "set braid.env.reset_seeds to the number of reset states and braid.data.shuffle to false"
        )
    return Became({"env.reset_seeds": total})


def _one_state(value: int | None, source: Source) -> Became:
    """specific_reset_id: one reset state for all episodes."""
    if value is None:
        return no_effect("reset states are drawn from all")
    if source.at.startswith("env.train."):
        return Became({"env.reset_seeds": [value]})
    num_envs = source["env.eval.total_num_envs"]
    count = 1 if num_envs is None else _eval_episodes(num_envs, source).native["env.eval_episodes"]
    return Became({"env.eval_reset_seeds": [value] * count})


def _trained(value: object, source: Source, differs: str = "") -> object:
    """Training's value of a setting that evaluation shares with it. Another value is unsupported, unless a
    sentence says what `differs` from RLinf."""
    if source.at.startswith("env.train."):
        return value
    key = f"env.train.{source.at.split('.', 2)[2]}"
    trained = source[key]
    if trained is None:
        trained = source.values.get(f"algorithm.{source.name}")
    if trained == value or not (trained or value):
        return implied(f"evaluation has the settings of training, {key}")
    if differs:
        return no_effect(f"evaluation has the settings of training, {key}={trained}: {differs}")
    return unsupported(f"evaluation has the settings of training, {key}={trained}; make them agree")


def _kind(value: str, source: Source) -> object:
    if "env.kind" in source.braid_values:
        return no_effect("overridden by braid.env.kind")
    return (
        value
        if value in _KINDS
        else unsupported(f"there is no simulator {value}; use one of {', '.join(_KINDS)}")
    )


def _suite(value: str, source: Source) -> object:
    kind = facts.simulator(source)
    if kind not in ("libero", "metaworld"):
        return no_effect("for libero and metaworld only")
    if kind == "metaworld" and source[".task_name"] is not None:
        return no_effect("overridden by task_name")
    known = tuple(suite for suite in facts.SUITES if suite.startswith(kind))
    if value not in known:
        return unsupported(f"use one of {', '.join(known)}")
    return value if kind == "libero" else Became({"env.task": _SETS[value]})


def _camera(side: str) -> Convert:
    """Height or width of images; MetaWorld's are square."""

    def convert(value: int, source: Source) -> Became:
        kind = facts.simulator(source)
        if kind == "gymnasium":
            return no_effect("the environment determines the size of images")
        return Became({"env.image_size" if kind == "metaworld" else f"env.camera_{side}": value})

    return convert


def _group_size(value: int, source: Source) -> object:
    group = source["algorithm.group_size"]
    return value if value in (1, group) else unsupported(f"set it to algorithm.group_size={group}, or to 1")


_KINDS = ("maniskill", "libero", "metaworld")
_SIMULATORS = (
    "maniskill|libero|robotwin|isaaclab|metaworld|behavior|calvin|robocasa|realworld|habitat|maniskill_rlt|libero_pro|"
    "libero_plus|robocasa365|frankasim|opensora_wm|wan_wm|genesis|embodichain|roboverse|d4rl|polaris"
)
_SETS = {"metaworld_50": "MT50", "metaworld_45_ind": "ML45-train", "metaworld_45_ood": "ML45-test"}
_BACKENDS = {"gpu": True, "cuda": True, "physx_cuda": True, "auto": True, "cpu": False, "physx_cpu": False}
_TRAINED: Convert = _trained
_ENDS: Convert = partial(
    _trained,
    differs="env/success_once is the same where only a success ends an episode; env/success_at_end, the return "
    "and the number of env steps are those of that end",
)
_REWARDS: Convert = partial(_trained, differs="returns are measured alike, and successes do not depend on it")
_LOOKS: Convert = partial(_trained, differs="the policy sees what it is trained on")
_MANISKILL = of_simulator("maniskill")
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

_ROLLOUT = section("rollout", "rollout.engine")(
    # the model and the engine
    to("group_name", "cluster.group_names.rollout", "text", WORKERS),
    to("model.model_path", "model.path", FOLDER, _OF_ACTOR,
       unless(lambda s: not s[s.at], "there is none"), note="the trained policy too"),
    to("model.model_type", "", MODEL_TYPE, _OF_ACTOR, model_type, note="the folder's architecture"),
    to("model.precision", ".dtype", nullable(PRECISION), _NOT_NATIVE,
       unless_null("same as actor.model.precision"), facts.dtype),
    to("rollout_backend", "rollout.engine.kind", "sglang|vllm", lambda _, s: facts.engine(s), default="sglang"),
    to("backend", "rollout.engine.kind", "huggingface|vllm",
       lambda v, s: s.engine or ("vllm" if v == "vllm" else "native"), note="huggingface: the native engine"),
    always("mode", "determined by cluster.component_placement", "collocate|colocate|disaggregated"),
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
    ignored("seed", "sampling follows from braid.run.seed, which is actor.seed"),
    to("validate_save_dir", "rollout.check_weights_dir", "path?", needs("rollout.validate_weight")),
    to("print_outputs", "rollout.print_outputs", "bool"),
    # robots
    always("enable_offload", "an engine shares the trainer's weights, or sleeps in between", "bool"),
    to("pipeline_stage_num", "env.pipeline_stages", "count", ROBOTS_ONLY,
       unless(facts.is_in_scene, "the environments of a scene on the GPU step together")),
    ignored("{enable_torch_compile,torch_compile_mode}",
            "it does not change results; robot policies act without compilation"),
    ignored("{collect_transitions,collect_prev_infos}", "trajectories are always complete"))

_ENV = section("env.{train,eval}", "env", ROBOTS_ONLY)(
    to("env_type", ".kind", _SIMULATORS, _kind, _as_trained),
    to("task_name init_params.id", ".task", "text", of_simulator("maniskill", "metaworld"), _as_trained),
    to("task_suite_name", ".suite", choice(*facts.SUITES), _as_trained, _suite),
    to("ignore_terminations", ".ignore_terminations", "bool", _ENDS),
    to("max_episode_steps init_params.max_episode_steps", ".max_episode_steps", "count", _TRAINED,
       note="in env steps, not action chunks"),
    to("specific_reset_id", "", "natural?", _one_state),
    to("use_rel_reward", ".relative_reward", "bool", _REWARDS),
    to("reward_coef", ".reward_scale", "positive", _REWARDS),
    to("use_step_penalty", ".step_penalty", "bool", of_simulator("libero"), _REWARDS, lambda v, _: float(v),
       note="1 less for each env step"),
    to("reward_mode", ".reward_mode", {"raw": None, "only_success": "success", "default": "put_on"}, _MANISKILL,
       _REWARDS, default="default", note="without it: 0.1 for a grasp, 0.1 for a long one, 1 for success"),
    to("init_params.obs_mode", ".obs_mode", "text?", _MANISKILL, _TRAINED),
    to("init_params.control_mode", ".control_mode", "text?", _MANISKILL, overridden("actor.model.policy_setup"),
       _TRAINED),
    to("init_params.sim_backend", ".on_gpu", _BACKENDS, _MANISKILL, _TRAINED, default="auto"),
    to("init_params.sim_config.{sim_freq,control_freq}", ".kwargs.sim_config.*", "count", _MANISKILL, _TRAINED),
    to("init_params.sensor_configs.shader_pack", ".kwargs.sensor_configs.*", "text", _MANISKILL, _LOOKS),
    to("init_params.{obj_set,use_multiple_plates}", ".kwargs.*", "any", _MANISKILL, _TRAINED),
    to("init_params.{camera_heights,sensor_configs.height}", "", "count", _TRAINED, _camera("height")),
    to("init_params.{camera_widths,sensor_configs.width}", "", "count", _TRAINED, _camera("width")),
    always("init_params.num_envs", "set by total_num_envs", "count?"),
    ignored("init_params.{render_mode,render_backend}", "videos and images are rendered where they are asked for"),
    ignored("init_params.{camera_pos,task_description}", "for simulators that braid does not have, such as Genesis"),
    ignored("policy_setup", "see actor.model.policy_setup"),
    ignored("seed", "reset states follow from braid.run.seed, which is actor.seed"),
    missing("wrap_obs_mode", "use simple: states are one vector", default="simple"),
    to("reset_gripper_open", ".open_gripper", "bool", of_simulator("libero"), _TRAINED),
    ignored("video_cfg.fps", "see braid.env.video.frames_per_s"))

_TRAIN_ENV = section("env.train", "env", ROBOTS_ONLY)(
    to("auto_reset", ".auto_reset", "bool", note="at the end of an action chunk"),
    to("use_fixed_reset_state_ids", ".fixed_reset_states", "bool", computed(facts.shares_reset_states),
       note="a group shares its reset state"),
    always("is_eval", "training and evaluation are told apart by env.train and env.eval", "bool"),
    to("use_ordered_reset_state_ids", "", "bool", _in_order, note="each reset state once before any again"),
    to("group_size", ".fixed_reset_states", "count", _group_size, computed(facts.shares_reset_states),
       note="environments with the same reset state: algorithm.group_size, or 1 for none"),
    to("video_cfg.save_video", ".video.train_every_rounds", "bool", lambda v, _: 1 if v else None,
       note="of each round's first episodes"),
    ignored("video_cfg.{info_on_video,video_base_dir}", "as for evaluations: env.eval.video_cfg"))

_EVAL_ENV = section("env.eval", "env", ROBOTS_ONLY)(
    always("auto_reset", "env.eval_episodes has the number of episodes", "bool"),
    always("{use_fixed_reset_state_ids,group_size}", "every evaluation has the same reset states, each once", "any"),
    to("use_ordered_reset_state_ids is_eval", "", "bool", _ordered, note="each reset state once, the tasks in turns"),
    to("video_cfg.save_video", ".video.save", "bool"),
    to("video_cfg.info_on_video", ".video.overlay", "bool"),
    to("video_cfg.video_base_dir", ".video.dir", "path"))

RULES = rows(
    _INFERENCE,
    _ROLLOUT,
    to("env.group_name", "cluster.group_names.env", "text", WORKERS),
    ignored("{env,rollout,actor}.channel.{name,queue_name,queue_size}", "there are no named queues"),
    to("env.train.enable_offload", "env.offload", "bool", ROBOTS_ONLY,
       note="of training and evaluation alike, which share simulators"),
    to("env.eval.enable_offload", "env.offload", "bool", ROBOTS_ONLY, overridden("env.train.enable_offload")),
    to("env.enable_offload", "env.offload", "bool", ROBOTS_ONLY, overridden("env.train.enable_offload"),
       overridden("env.eval.enable_offload")),
    ignored("env.{train,eval}.enable_init_offload", "for BEHAVIOR only"),
    ignored("env.obs_compression.*", "observations of simulators travel by shared memory"),
    to("env.train.total_num_envs", "", "count?", ROBOTS_ONLY, _num_envs,
       note=
           "env.num_envs is per rollout worker; rollout.prompts_per_round = this * rollout_epoch // "
           "group_size; null: one optimizer batch"),
    to("env.train.rollout_epoch", "rollout.prompts_per_round", "count", ROBOTS_ONLY, computed(facts.prompts)),
    to("env.train.max_steps_per_rollout_epoch", "env.max_steps_per_rollout", "count", ROBOTS_ONLY,
       note="env steps of each simulator in a round"),
    to("env.eval.total_num_envs", "env.eval_episodes", "count?", ROBOTS_ONLY, _eval_episodes,
       note="times rollout_epoch, and with auto_reset the episodes of max_steps_per_rollout_epoch"),
    always("env.eval.{rollout_epoch,max_steps_per_rollout_epoch}", "env.eval_episodes has them", "count"),
    _ENV,
    _TRAIN_ENV,
    _EVAL_ENV,
)
# fmt: on
