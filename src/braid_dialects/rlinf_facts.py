"""Properties of an RLinf file as a whole, for conversions and checks: task, backend, engine, devices,
batches.

The functions from `text_only` on are conditions for conversions.when: each returns the reason why its group
of keys has no effect in the file, empty if they have one.
"""

from __future__ import annotations

from collections.abc import Sequence

from braid.plan.placement import Devices, parse_placement

from .compat import Source

ROLES = {
    "actor": "policy",
    "rollout": "rollout",
    "inference": "inference",
    "critic": "critic",
    "reward": "reward",
    "env": "env",
}
"""RLinf component -> role."""
DTYPES = {
    "fp16": "fp16", "16": "fp16", "16-mixed": "fp16",
    "bf16": "bf16", "bf16-mixed": "bf16",
    "fp32": "fp32", "32": "fp32", "32-true": "fp32",
}  # fmt: skip
"""Spelling of a precision -> native type."""


def is_robots(source: Source) -> bool:
    """Whether the task is embodied: a robot policy in a simulator."""
    task = source.get("runner.task_type")
    return source.has("env.train") if task is None else task.startswith("embodied")


def file_backend(source: Source) -> str:
    """Training backend that the file asks for: megatron, fsdp or fsdp2."""
    if source.get("actor.training_backend") == "megatron":
        return "megatron"
    return (source.get("actor.fsdp_config.strategy") or "fsdp").lower()


def backend(source: Source) -> str:
    """Training backend under its native name; the command line takes precedence."""
    return source.backend or file_backend(source)


def engine(source: Source) -> str:
    """Rollout engine: native, vllm or sglang; the command line takes precedence. Text tasks default to
    SGLang, as in RLinf's documented pipeline."""
    if source.engine is not None:
        return source.engine
    if (newer := source.values.get("rollout.rollout_backend")) is not None:
        return newer
    named = source.values.get("rollout.backend")
    if named is not None:
        return "vllm" if named == "vllm" else "native"
    return "native" if is_robots(source) else "sglang"


def precision(source: Source) -> str:
    """Native dtype of the policy's matrix products."""
    return DTYPES.get(str(source.get("actor.model.precision")), "fp32")


def has_critic(source: Source) -> bool:
    """Whether values are learned: by a critic, or, for robots, by a value head of the policy."""
    loss = source.get("algorithm.loss_type")
    is_joint = loss in ("actor_critic", "decoupled_actor_critic") or (is_robots(source) and loss == "ppo")
    return advantage(source) == "gae" and (is_joint or source.get("critic.use_critic_model") is True)


def advantage(source: Source) -> str:
    """Value of adv_type; the old name ppo means gae."""
    kind = source.get("algorithm.adv_type")
    return "gae" if kind == "ppo" else kind


def num_devices(source: Source) -> int | None:
    """Number of devices in the file's cluster; None if it is not given."""
    per_node, nodes = source.get("cluster.num_gpus_per_node"), source.get("cluster.num_nodes")
    return None if per_node is None else (nodes or 1) * per_node


def devices_of(source: Source, component: str) -> Devices | None:
    """Devices of a component; None for `all` of an unknown number, and for an invalid placement. A component
    without a placement shares the actor's devices."""
    lines = source.get("cluster.component_placement") or {"actor": "all"}
    try:
        placed = parse_placement({line: str(text) for line, text in lines.items()}, num_devices(source))
    except ValueError:
        return None
    return placed.get(component, placed.get("actor"))


def dp_size(source: Source) -> int:
    """Data-parallel size of the actor: its devices divided by the model-parallel size; 1 if their number is
    unknown.

    Computed from the file, regardless of the backend in use: batch sizes follow the original's arithmetic.
    """
    devices = devices_of(source, "actor")
    if devices is None:
        return 1
    return max(
        1, len(devices.numbers) // (model_parallel(source) if file_backend(source) == "megatron" else 1)
    )


def model_parallel(source: Source) -> int:
    """Number of devices of one Megatron replica of the actor."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    product = 1
    for name in sizes:
        product *= source.get(f"actor.model.{name}") or 1
    return product


def engine_parallel(source: Source) -> int:
    """Number of devices of one rollout engine replica."""
    sizes = ("rollout.tensor_parallel_size", "rollout.pipeline_parallel_size")
    return (source.get(sizes[0]) or 1) * (source.get(sizes[1]) or 1)


def rollout_devices(source: Source) -> int:
    """Number of rollout devices; 1 if unknown."""
    devices = devices_of(source, "rollout")
    return 1 if devices is None else len(devices.numbers)


def global_batch(source: Source) -> int | None:
    """Rows per optimizer step: `rollout_batch_size * group_size // n_minibatches`; for robots,
    actor.global_batch_size."""
    if is_robots(source):
        return source.get("actor.global_batch_size")
    prompts, group = source.get("data.rollout_batch_size"), source.get("algorithm.group_size")
    minibatches = source.get("algorithm.n_minibatches")
    return None if prompts is None or group is None else prompts * group // minibatches


def micro_batch(source: Source) -> int | None:
    """Rows per forward and backward pass on one device."""
    key = "actor.micro_batch_size" if is_robots(source) else "algorithm.training_batch_size_per_gpu"
    return source.get(key)


def chunks_per_episode(source: Source) -> int:
    """Action chunks per episode: env steps divided by the chunk length."""
    steps, chunk = (
        source.get("env.train.max_episode_steps") or 1,
        source.get("actor.model.num_action_chunks") or 1,
    )
    return max(1, steps // chunk)


def num_envs(source: Source) -> int:
    """Number of training simulators. null: as many as fill one optimizer batch, in whole groups (RLinf
    requires the number)."""
    given = source.get("env.train.total_num_envs")
    if given is not None:
        return given
    group = source.get("algorithm.group_size") or 1
    needed = (source.get("actor.global_batch_size") or 1) // (
        chunks_per_episode(source) * rollout_epochs(source)
    )
    return max(1, needed // group) * group


def rollout_epochs(source: Source) -> int:
    """Number of episodes per simulator and round."""
    return source.get("algorithm.rollout_epoch") or 1


def text_only(source: Source) -> str:
    """Condition of keys for language models."""
    return "for language models only; runner.task_type is embodied" if is_robots(source) else ""


def robots_only(source: Source) -> str:
    """Condition of keys for robots."""
    return "" if is_robots(source) else "for robots only; runner.task_type is a text task"


def megatron(source: Source) -> str:
    """Condition of Megatron keys."""
    return _of_backend(source, ("megatron",), "for Megatron only")


def fsdp(source: Source) -> str:
    """Condition of keys for both FSDP versions."""
    return _of_backend(source, ("fsdp", "fsdp2"), "for FSDP only")


def fsdp1(source: Source) -> str:
    """Condition of keys for FSDP 1."""
    return _of_backend(source, ("fsdp",), "for FSDP 1 only")


def fsdp2(source: Source) -> str:
    """Condition of keys for FSDP 2."""
    return _of_backend(source, ("fsdp2",), "for FSDP 2 only")


def fsdp_file(source: Source) -> str:
    """Condition of FSDP keys that apply to any backend in use, provided that the file asks for FSDP."""
    return "for FSDP only; actor.training_backend is megatron" if file_backend(source) == "megatron" else ""


def megatron_file(source: Source) -> str:
    """Condition of Megatron keys that apply to any backend in use, provided that the file asks for
    Megatron."""
    return "" if file_backend(source) == "megatron" else "for Megatron only; actor.training_backend is fsdp"


def cluster(source: Source) -> str:
    """Condition of keys for worker groups and devices."""
    return "a single process has no workers (--backend single)" if source.backend == "single" else ""


def constant(source: Source) -> str:
    """Condition of keys for learning rate decay."""
    style = (
        source.get("actor.lr_sched.lr_decay_style") or source.get("actor.optim.lr_scheduler") or "constant"
    )
    return "the learning rate is constant" if style == "constant" else ""


def sglang(source: Source) -> str:
    """Condition of SGLang keys."""
    return _of_engine(source, ("sglang",), "for SGLang only")


def vllm(source: Source) -> str:
    """Condition of vLLM keys."""
    return _of_engine(source, ("vllm",), "for vLLM only")


def served(source: Source) -> str:
    """Condition of keys that SGLang and vLLM have and the native engine lacks."""
    return _of_engine(source, ("sglang", "vllm"), "for SGLang and vLLM only")


def fixed_batches(source: Source) -> str:
    """Condition of keys for micro-batches with a fixed number of rows."""
    is_dynamic = source.get("runner.enable_dynamic_batch_size") is True
    return "with runner.enable_dynamic_batch_size, micro-batches are formed by tokens" if is_dynamic else ""


def _of_backend(source: Source, names: Sequence[str], whose: str) -> str:
    now = backend(source)
    return "" if now in names else f"{whose}; the backend is {now}"


def _of_engine(source: Source, names: Sequence[str], whose: str) -> str:
    now = engine(source)
    return "" if now in names else f"{whose}; the engine is {now}"
