"""Properties of an RLinf file as a whole: task, backend, engine, devices, batches; and conditions on them."""

from __future__ import annotations

import math

from braid.plan.machine import count_gpus
from braid.plan.placement import Devices, parse_placement

from .conditions import of_backend, of_engine, unless
from .table import Convert, Source

ROLES = {"actor": "policy"} | {name: name for name in ("rollout", "inference", "critic", "reward", "env")}
"""RLinf component -> role."""
DTYPES = {
    "fp16": "fp16", "16": "fp16", "16-mixed": "fp16", "bf16": "bf16", "bf16-mixed": "bf16",
    "fp32": "fp32", "32": "fp32", "32-true": "fp32",
}  # fmt: skip
"""Spelling of a precision -> native type."""


def dtype(value: object, _: Source) -> str:
    """Native type of a precision."""
    return DTYPES[str(value)]


def is_robots(source: Source) -> bool:
    """Whether the task is embodied: a robot policy in a simulator."""
    task = source["runner.task_type"]
    return source.has("env.train") or source.has("env.eval") if task is None else task.startswith("embodied")


def file_backend(source: Source) -> str:
    """Training backend that the file asks for: megatron, fsdp or fsdp2."""
    if source["actor.training_backend"] == "megatron":
        return "megatron"
    return (source["actor.fsdp_config.strategy"] or "fsdp").lower()


def backend(source: Source) -> str:
    """Training backend; the command line takes precedence."""
    return source.backend or file_backend(source)


def engine(source: Source) -> str:
    """Rollout engine; the command line takes precedence. Text tasks default to SGLang, as in RLinf's
    documented pipeline."""
    newer, named = (source.values.get(f"rollout.{name}") for name in ("rollout_backend", "backend"))
    if (chosen := source.engine or newer) is not None:
        return chosen
    if named is None:
        return "native" if is_robots(source) or source["runner.task_type"] == "sft" else "sglang"
    return "vllm" if named == "vllm" else "native"


VISION_MODELS = {"qwen2.5_vl": "qwen2_5_vl", "qwen3_vl": "qwen3_vl"}
"""model_type of models that read images -> architecture in transformers."""


def reads_images(source: Source) -> bool:
    """Whether prompts may have images: RLinf's kind of data decides, in supervised fine-tuning the columns and
    the model."""
    if source["runner.task_type"] == "sft":
        return bool(source["data.image_keys"]) or source["actor.model.model_type"] in VISION_MODELS
    return not is_robots(source) and source["data.type"] in ("vlm", "vision_language")


def precision(source: Source) -> str:
    """Native dtype of the policy's matrix products."""
    return DTYPES.get(str(source["actor.model.precision"]), "fp32")


def advantage(source: Source) -> str:
    """Value of adv_type; the old name ppo means gae."""
    kind = source["algorithm.adv_type"]
    return "gae" if kind == "ppo" else kind


def has_critic(source: Source) -> bool:
    """Whether values are learned: by a critic, or, for robots, by a value head of the policy."""
    loss = source["algorithm.loss_type"]
    is_joint = loss in ("actor_critic", "decoupled_actor_critic") or (is_robots(source) and loss == "ppo")
    return advantage(source) == "gae" and (is_joint or source["critic.use_critic_model"] is True)


def num_devices(source: Source) -> int | None:
    """Number of devices in the file's cluster; None if it is not given."""
    per_node = source["cluster.num_gpus_per_node"]
    return None if per_node is None else (source["cluster.num_nodes"] or 1) * per_node


def devices_of(source: Source, component: str) -> Devices | None:
    """Devices of a component; None for `all` of an unknown number, and for an invalid placement. A component
    without a placement shares the actor's devices."""
    lines = source["cluster.component_placement"] or {"actor": "all"}
    try:
        placed = parse_placement({line: str(text) for line, text in lines.items()}, num_devices(source))
    except ValueError:
        return None
    return placed.get(component, placed.get("actor"))


def size_of(source: Source, component: str) -> int:
    """Number of devices of a component; 1 if unknown."""
    return 1 if (devices := devices_of(source, component)) is None else len(devices.numbers)


def dp_size(source: Source) -> int:
    """Data-parallel size of the actor in the file, regardless of the backend in use."""
    kinds = ("tensor_model", "pipeline_model", "context") if file_backend(source) == "megatron" else ()
    shared = math.prod(source[f"actor.model.{kind}_parallel_size"] or 1 for kind in kinds)
    return max(1, size_of(source, "actor") // shared)


def replicas(source: Source) -> int:
    """Number of rollout engines; 1 if unknown."""
    per_engine = math.prod(source[f"rollout.{kind}_parallel_size"] or 1 for kind in ("tensor", "pipeline"))
    return max(1, size_of(source, "rollout") // per_engine)


def rollout_workers(source: Source) -> int:
    """Number of rollout workers; those of `all` are the GPUs here."""
    if source.backend == "single":
        return 1
    if (devices := devices_of(source, "rollout")) is not None:
        return len(devices.processes)
    return max(1, count_gpus() * (source["cluster.num_nodes"] or 1))


def chunks_per_rollout(source: Source) -> int:
    """Action chunks of a simulator in a run: env steps divided by the chunk length."""
    steps = source["env.train.max_steps_per_rollout_epoch"] or source["env.train.max_episode_steps"] or 1
    return max(1, steps // (source["actor.model.num_action_chunks"] or 1))


def positions(source: Source) -> int:
    """Positions of a decision in a row: its log-probs."""
    if source["actor.model.model_type"] == "openpi":
        return 1
    chunk, level = source["actor.model.num_action_chunks"] or 1, source["algorithm.logprob_type"]
    of_tokens = chunk * (source["actor.model.action_dim"] or 1)
    return {"action_level": chunk, "chunk_level": 1}.get(level, of_tokens)


def rollout_epochs(source: Source) -> int:
    """How often all simulators are run per round; the key moved from `algorithm` to `env.train`."""
    return source["env.train.rollout_epoch"] or source["algorithm.rollout_epoch"] or 1


def episodes(source: Source) -> int:
    """Episodes per round: simulators times episodes of each. Without a number of simulators (RLinf requires
    it): as many as fill one optimizer batch, in whole groups."""
    epochs, num_envs = rollout_epochs(source), source["env.train.total_num_envs"]
    if num_envs is None:
        group = source["algorithm.group_size"] or 1
        needed = (source["actor.global_batch_size"] or 1) // (chunks_per_rollout(source) * epochs)
        num_envs = max(1, needed // group) * group
    return num_envs * epochs


def steps_per_pass(source: Source) -> int:
    """Optimizer steps in a pass over a round's decisions."""
    return max(1, episodes(source) * chunks_per_rollout(source) // (source["actor.global_batch_size"] or 1))


def steps_per_round(source: Source) -> int:
    """Optimizer steps of a round of robots."""
    return steps_per_pass(source) * (source["algorithm.update_epoch"] or 1)


def eval_temperature(source: Source) -> float | None:
    """Temperature of evaluations; None if the file has none of their own."""
    names = (f"{section}.sampling_params.temperature_eval" for section in ("rollout", "algorithm"))
    return next((value for name in names if (value := source[name]) is not None), None)


def simulator(source: Source) -> str | None:
    """Kind of the simulator; a native key takes precedence."""
    return source.braid_values.get("env.kind", source["env.train.env_type"])


def of_simulator(*kinds: str) -> Convert:
    """No effect unless the simulator is one of `kinds`."""
    return unless(
        lambda s: simulator(s) not in kinds,
        lambda s: f"for {' and '.join(kinds)} only; the simulator is {simulator(s)}",
    )


STATES_PER_TASK = 50
"""Initial states of a task of LIBERO."""
SUITES = {
    **dict.fromkeys(("libero_spatial", "libero_object", "libero_goal", "libero_10"), 10 * STATES_PER_TASK),
    "libero_90": 90 * STATES_PER_TASK,
    "libero_130": 130 * STATES_PER_TASK,
    "metaworld_50": 500,
    "metaworld_45_ind": 450,
    "metaworld_45_ood": 100,
}
"""Suites of tasks -> RLinf's number of reset states."""


def num_reset_states(source: Source) -> int | None:
    """RLinf's number of reset states; None if the simulator has no suites."""
    suite = source["env.train.task_suite_name"]
    return SUITES[suite] if simulator(source) in ("libero", "metaworld") and suite in SUITES else None


SMALL_POLICIES = ("mlp_policy", "cnn_policy")
OPENVLA = ("openvla", "openvla_oft")
VLA = unless(
    lambda s: s["actor.model.model_type"] in SMALL_POLICIES, "for vision-language-action policies only"
)


def is_in_scene(source: Source) -> bool:
    """Whether ManiSkill simulates all environments in one scene on the GPU."""
    on_gpu = "cpu" not in (source["env.train.init_params.sim_backend"] or "auto")
    return simulator(source) == "maniskill" and source.braid_values.get("env.on_gpu", on_gpu)


def shares_reset_states(source: Source) -> bool:
    """Whether the episodes of a group begin in the same state."""
    alone = source["env.train.group_size"] == 1 and (source["algorithm.group_size"] or 1) > 1
    return source["env.train.use_fixed_reset_state_ids"] is not False and not alone


def prompts(source: Source) -> int:
    """Groups per round: episodes, divided by the group size."""
    return max(1, episodes(source) // (source["algorithm.group_size"] or 1))


def _has_constant_rate(source: Source) -> bool:
    decay = source["actor.lr_sched.lr_decay_style"] or source["actor.optim.lr_scheduler"]
    return decay in (None, "constant", "torch_constant")


TEXT_ONLY = unless(is_robots, "for language models only; runner.task_type is embodied")
ROBOTS_ONLY = unless(lambda s: not is_robots(s), "for robots only; runner.task_type is a text task")
HAS_IMAGES = unless(lambda s: not reads_images(s), "for data.type=vlm only")
MEGATRON, FSDP = of_backend("megatron"), of_backend("fsdp", "fsdp2")
FSDP1, FSDP2 = of_backend("fsdp"), of_backend("fsdp2")
SGLANG, VLLM, SERVED = of_engine("sglang"), of_engine("vllm"), of_engine("sglang", "vllm")
FSDP_FILE = unless(
    lambda s: file_backend(s) == "megatron", "for FSDP only; actor.training_backend is megatron"
)
"""For keys that apply to any backend in use, provided that the file asks for FSDP."""
MEGATRON_FILE = unless(
    lambda s: file_backend(s) != "megatron", "for Megatron only; actor.training_backend is fsdp"
)
FP16 = unless(lambda s: precision(s) != "fp16", "for fp16 only; actor.model.precision is not fp16")
WORKERS = unless(lambda s: s.backend == "single", "a single process has no workers (--backend single)")
DECAYS = unless(_has_constant_rate, "the learning rate is constant")
BY_ROWS = unless(
    lambda s: s["runner.enable_dynamic_batch_size"],
    "with runner.enable_dynamic_batch_size, micro-batches are formed by tokens",
)
VALUES = unless(lambda s: not has_critic(s), "without a critic, gamma = lambda = 1")
