"""RLinf's `rollout`, `inference` and `env` keys: engines, where log-probs come from, simulators, robot
policies."""

from __future__ import annotations

from . import rlinf_facts as facts
from .conditions import needs, unless
from .conversions import already, computed, opposite, unless_null
from .rlinf_facts import ROBOTS_ONLY, SERVED, SGLANG, VLLM, WORKERS, is_robots
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Convert, Source, implied, no_effect, unsupported
from .values import Takes, choice, nullable

ARCHITECTURES = {"qwen2.5": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3_moe", "deepseek_v3": "deepseek_v3"}
"""model_type of text models -> architecture in transformers."""
OPENVLA = ("openvla", "openvla_oft")
_ROBOT_MODELS = {name: {"model.vla.kind": name} for name in OPENVLA} | {
    "openpi": {"model.vla.kind": "pi0"},
    "mlp_policy": {"model.mlp.hidden_sizes": [256, 256, 256], "model.mlp.initial_std": 0.6065},
    "cnn_policy": {"model.mlp.channels": [32, 64, 64, 64], "model.mlp.hidden_sizes": [256]},
}
"""model_type of a robot policy -> native keys."""
OTHER_MODELS = (
    "qwen2.5_vl", "qwen3_vl", "gr00t", "dexbotic_pi", "dexbotic_dm0", "flow_policy", "starvla", "lingbotvla", "abot_m0",
    "evo1", "molmoact2", "dreamzero", "openpi_rlinf", "cma",
)  # fmt: skip
PRECISION = Takes(
    f"one of {', '.join(facts.DTYPES)}",
    lambda v: not isinstance(v, bool) and str(v) in facts.DTYPES,
    ("fp16", "bf16", "fp32"),
)
MODEL_TYPE = choice(*ARCHITECTURES, *_ROBOT_MODELS, *OTHER_MODELS)


def model_type(value: str, source: Source) -> Became:
    """Convert model_type to the policy's architecture, or the kind of a robot policy."""
    fitting = tuple(_ROBOT_MODELS if is_robots(source) else ARCHITECTURES)
    if value not in fitting:
        task = source["runner.task_type"]
        return unsupported(f"use one of {', '.join(fitting)} with runner.task_type={task}")
    return Became(_ROBOT_MODELS[value] if is_robots(source) else {"model.architecture": ARCHITECTURES[value]})


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


def _ordered(value: bool, source: Source) -> object:
    """use_ordered_reset_state_ids of evaluations: their first reset states, in order and each once."""
    if not value:
        return implied("the reset states of evaluations are random, and the same in every evaluation")
    if (num_envs := source["env.eval.total_num_envs"]) is None:
        return unsupported("set env.eval.total_num_envs, the number of reset states")
    return Became({"env.eval_reset_seeds": _eval_episodes(num_envs, source).native["env.eval_episodes"]})


def _one_state(value: int | None, source: Source) -> Became:
    """specific_reset_id: one reset state for all episodes."""
    if value is None:
        return no_effect("reset states are drawn from all")
    if source.at.startswith("env.train."):
        return Became({"env.reset_seeds": [value]})
    num_envs = source["env.eval.total_num_envs"]
    count = 1 if num_envs is None else _eval_episodes(num_envs, source).native["env.eval_episodes"]
    return Became({"env.eval_reset_seeds": [value] * count})


def _trained(value: object, source: Source) -> object:
    """Training's value of a setting that evaluation shares with it."""
    if source.at.startswith("env.train."):
        return value
    key = f"env.train.{source.at.split('.', 2)[2]}"
    trained = source[key]
    if trained == value or not (trained or value):
        return implied(f"evaluation has the settings of training, {key}")
    return unsupported(f"evaluation has the settings of training, {key}={trained}; make them agree")


def _kind(value: str, source: Source) -> object:
    if "env.kind" in source.own:
        return no_effect("overridden by braid.env.kind")
    return value if value in _KINDS else unsupported(f"use one of {', '.join(_KINDS)}")


def _suite(value: str, source: Source) -> object:
    if facts.simulator(source) == "metaworld":
        return unsupported("one task is trained at a time; use task_name, for example reach-v3")
    if facts.simulator(source) != "libero":
        return no_effect("for libero only")
    return value if value in _LIBERO_SUITES else unsupported(f"use one of {', '.join(_LIBERO_SUITES)}")


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
_LIBERO_SUITES = tuple(f"libero_{name}" for name in ("spatial", "object", "goal", "10", "90", "130"))
_SUITES = choice(*_LIBERO_SUITES, *(f"metaworld_{name}" for name in ("50", "45_ind", "45_ood")))
_BACKENDS = {"gpu": True, "cuda": True, "physx_cuda": True, "auto": True, "cpu": False, "physx_cpu": False}
_TRAINED: Convert = _trained
_MANISKILL = facts.of_simulator("maniskill")
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
    to("pipeline_stage_num", "env.pipeline_stages", "count", ROBOTS_ONLY,
       unless(facts.is_in_scene, "the environments of a scene on the GPU step together")),
    to("sampling_params.temperature_train", "rollout.sampling.temperature", "positive", ROBOTS_ONLY),
    to("sampling_params.max_new_tokens", "rollout.sampling.max_new_tokens", "count", ROBOTS_ONLY),
    missing("sampling_params.temperature_eval", "use actor.model.do_sample for evaluation"),
    missing("enable_torch_compile", "use braid.train.compile=true"),
    ignored("{collect_transitions,collect_prev_infos}", "trajectories are always complete"))

_ENV = section("env.{train,eval}", "env", ROBOTS_ONLY)(
    to("env_type", ".kind", _SIMULATORS, _kind, _as_trained),
    to("task_name init_params.id", ".task", "text", facts.of_simulator("maniskill", "metaworld"), _as_trained),
    to("task_suite_name", ".suite", _SUITES, _suite, _as_trained),
    to("ignore_terminations", ".ignore_terminations", "bool", _TRAINED),
    to("max_episode_steps init_params.max_episode_steps", ".max_episode_steps", "count", _TRAINED,
       note="in env steps, not action chunks"),
    to("specific_reset_id", "", "natural?", _one_state),
    to("use_rel_reward", ".relative_reward", "bool", _TRAINED),
    to("reward_coef", ".reward_scale", "positive", _TRAINED),
    to("reward_mode", ".reward_mode", {"raw": None, "only_success": "success", "default": "put_on"}, _MANISKILL,
       _TRAINED, default="default", note="without it: 0.1 for a grasp, 0.1 for a long one, 1 for success"),
    to("init_params.{obs_mode,control_mode}", "env.*", "text?", _MANISKILL, _TRAINED),
    to("init_params.sim_backend", ".on_gpu", _BACKENDS, _MANISKILL, _TRAINED, default="auto"),
    to("init_params.sim_config.{sim_freq,control_freq}", ".kwargs.sim_config.*", "count", _MANISKILL, _TRAINED),
    to("init_params.sensor_configs.shader_pack", ".kwargs.sensor_configs.*", "text", _MANISKILL, _TRAINED),
    to("init_params.{obj_set,use_multiple_plates}", ".kwargs.*", "any", _MANISKILL, _TRAINED),
    to("init_params.{camera_heights,sensor_configs.height}", "", "count", _TRAINED, _camera("height")),
    to("init_params.{camera_widths,sensor_configs.width}", "", "count", _TRAINED, _camera("width")),
    always("init_params.num_envs", "set by total_num_envs", "count?"),
    ignored("init_params.{render_mode,render_backend}", "videos and images are rendered where they are asked for"),
    always("is_eval", "training and evaluation are told apart by env.train and env.eval", "bool"),
    ignored("seed", "reset states follow from braid.run.seed, which is actor.seed"),
    missing("wrap_obs_mode", "use simple: states are one vector", default="simple"),
    missing("reset_gripper_open", "set it to true: LIBERO's episodes begin with an open gripper",
            facts.of_simulator("libero"), default=True),
    missing("use_step_penalty", "rewards are the simulator's", default=False),
    ignored("video_cfg.fps", "see braid.env.video.frames_per_s"))

_TRAIN_ENV = section("env.train", "env", ROBOTS_ONLY)(
    to("auto_reset", ".auto_reset", "bool", note="at the end of an action chunk"),
    to("use_fixed_reset_state_ids", ".fixed_reset_states", "bool", computed(facts.shares_reset_states),
       note="a group shares its reset state"),
    missing("use_ordered_reset_state_ids",
            "set braid.env.reset_seeds to the number of reset states and braid.data.shuffle to false", default=False),
    to("group_size", ".fixed_reset_states", "count", _group_size, computed(facts.shares_reset_states),
       note="environments with the same reset state: algorithm.group_size, or 1 for none"),
    to("video_cfg.save_video", ".video.train_every_rounds", "bool", lambda v, _: 1 if v else None,
       note="of each round's first episodes"),
    ignored("video_cfg.{info_on_video,video_base_dir}", "as for evaluations: env.eval.video_cfg"))

_EVAL_ENV = section("env.eval", "env", ROBOTS_ONLY)(
    always("auto_reset", "env.eval_episodes has the number of episodes", "bool"),
    always("{use_fixed_reset_state_ids,group_size}", "every evaluation has the same reset states, each once", "any"),
    to("use_ordered_reset_state_ids", "", "bool", _ordered),
    to("video_cfg.save_video", ".video.save", "bool"),
    to("video_cfg.info_on_video", ".video.overlay", "bool"),
    to("video_cfg.video_base_dir", ".video.dir", "path"))

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
    _TRAIN_ENV,
    _EVAL_ENV,
)
# fmt: on
