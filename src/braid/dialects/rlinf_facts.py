"""What an RLinf file says as a whole: task, backend, engine, devices, batches. Conversions and checks ask here.

Functions of the second part are the reasons why a key changes nothing in a file; see conversions.when.
"""

from __future__ import annotations

from collections.abc import Sequence

from braid.plan.placement import Devices, parse_placement

from .table import Source

ROLES = {
    "actor": "policy",
    "rollout": "rollout",
    "inference": "inference",
    "critic": "critic",
    "reward": "reward",
    "env": "env",
}
"""Component of RLinf -> role."""
DTYPES = {
    "fp16": "fp16", "16": "fp16", "16-mixed": "fp16",
    "bf16": "bf16", "bf16-mixed": "bf16",
    "fp32": "fp32", "32": "fp32", "32-true": "fp32",
}  # fmt: skip
"""Spelling of a precision -> native type."""


def is_robots(source: Source) -> bool:
    """The task is embodied: a robot policy in a simulator."""
    task = source.get("runner.task_type")
    return source.has("env.train") if task is None else task.startswith("embodied")


def file_backend(source: Source) -> str:
    """megatron, fsdp or fsdp2: what the file itself asks for."""
    if source.get("actor.training_backend") == "megatron":
        return "megatron"
    return (source.get("actor.fsdp_config.strategy") or "fsdp").lower()


def backend(source: Source) -> str:
    """The training backend, native name; the command line comes first."""
    return source.backend or file_backend(source)


def engine(source: Source) -> str:
    """native, vllm or sglang; the command line comes first. The pipeline that the page describes samples with SGLang."""
    if source.engine is not None:
        return source.engine
    if (newer := source.values.get("rollout.rollout_backend")) is not None:
        return newer
    named = source.values.get("rollout.backend")
    if named is not None:
        return "vllm" if named == "vllm" else "native"
    return "native" if is_robots(source) else "sglang"


def precision(source: Source) -> str:
    """Native type of the policy's matrix products."""
    return DTYPES.get(str(source.get("actor.model.precision")), "fp32")


def has_critic(source: Source) -> bool:
    """Values are learned: by a critic, or, for robots, by a head of the policy."""
    loss = source.get("algorithm.loss_type")
    is_joint = loss in ("actor_critic", "decoupled_actor_critic") or (is_robots(source) and loss == "ppo")
    return advantage(source) == "gae" and (is_joint or source.get("critic.use_critic_model") is True)


def advantage(source: Source) -> str:
    """adv_type; the older ppo is gae."""
    kind = source.get("algorithm.adv_type")
    return "gae" if kind == "ppo" else kind


def num_devices(source: Source) -> int | None:
    """Devices of the file's cluster, None when it does not say."""
    per_node, nodes = source.get("cluster.num_gpus_per_node"), source.get("cluster.num_nodes")
    return None if per_node is None else (nodes or 1) * per_node


def devices_of(source: Source, component: str) -> Devices | None:
    """The devices that the file gives a component; None for `all` of an unknown number, and for no readable placement.
    A component that is not named is where the actor is."""
    lines = source.get("cluster.component_placement") or {"actor": "all"}
    try:
        placed = parse_placement({line: str(text) for line, text in lines.items()}, num_devices(source))
    except ValueError:
        return None
    return placed.get(component, placed.get("actor"))


def dp_size(source: Source) -> int:
    """Data-parallel ranks of the actor: its devices over the model-parallel ones. 1 while their number is not known.

    That of the file, whatever runs it: the batch arithmetic is the original's.
    """
    devices = devices_of(source, "actor")
    if devices is None:
        return 1
    return max(
        1, len(devices.numbers) // (model_parallel(source) if file_backend(source) == "megatron" else 1)
    )


def model_parallel(source: Source) -> int:
    """Devices of one Megatron copy of the actor."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    product = 1
    for name in sizes:
        product *= source.get(f"actor.model.{name}") or 1
    return product


def engine_parallel(source: Source) -> int:
    """Devices of one copy of the rollout engine."""
    sizes = ("rollout.tensor_parallel_size", "rollout.pipeline_parallel_size")
    return (source.get(sizes[0]) or 1) * (source.get(sizes[1]) or 1)


def rollout_devices(source: Source) -> int:
    """Devices that sample; 1 while their number is not known."""
    devices = devices_of(source, "rollout")
    return 1 if devices is None else len(devices.numbers)


def global_batch(source: Source) -> int | None:
    """Rows of one optimizer step: `rollout_batch_size * group_size // n_minibatches`; robots name it themselves."""
    if is_robots(source):
        return source.get("actor.global_batch_size")
    prompts, group = source.get("data.rollout_batch_size"), source.get("algorithm.group_size")
    minibatches = source.get("algorithm.n_minibatches")
    return None if prompts is None or group is None else prompts * group // minibatches


def micro_batch(source: Source) -> int | None:
    """Rows of one forward and backward pass on a device."""
    key = "actor.micro_batch_size" if is_robots(source) else "algorithm.training_batch_size_per_gpu"
    return source.get(key)


def chunks_per_episode(source: Source) -> int:
    """Answers of a robot policy in one episode: env steps over actions per answer."""
    steps, chunk = (
        source.get("env.train.max_episode_steps") or 1,
        source.get("actor.model.num_action_chunks") or 1,
    )
    return max(1, steps // chunk)


def num_envs(source: Source) -> int:
    """Simulators of training. null: as many as make one optimizer batch, in whole groups (RLinf wants the number)."""
    given = source.get("env.train.total_num_envs")
    if given is not None:
        return given
    group = source.get("algorithm.group_size") or 1
    needed = (source.get("actor.global_batch_size") or 1) // (
        chunks_per_episode(source) * rollout_epochs(source)
    )
    return max(1, needed // group) * group


def rollout_epochs(source: Source) -> int:
    """Times that the simulators are run through in a round."""
    return source.get("algorithm.rollout_epoch") or 1


def text_only(source: Source) -> str:
    """Keys of language models."""
    return "runner.task_type is embodied, and this is of language models" if is_robots(source) else ""


def robots_only(source: Source) -> str:
    """Keys of robots."""
    return "" if is_robots(source) else "of robots; runner.task_type is one of text"


def megatron(source: Source) -> str:
    """Keys of Megatron."""
    return _of_backend(source, ("megatron",), "Megatron's")


def fsdp(source: Source) -> str:
    """Keys of both FSDPs."""
    return _of_backend(source, ("fsdp", "fsdp2"), "FSDP's")


def fsdp1(source: Source) -> str:
    """Keys of the first FSDP."""
    return _of_backend(source, ("fsdp",), "of FSDP 1")


def fsdp2(source: Source) -> str:
    """Keys of the second FSDP."""
    return _of_backend(source, ("fsdp2",), "of FSDP 2")


def fsdp_file(source: Source) -> str:
    """Keys of FSDP's section that hold for other backends too, when the file is one for FSDP."""
    return "FSDP's; actor.training_backend is megatron" if file_backend(source) == "megatron" else ""


def megatron_file(source: Source) -> str:
    """Megatron's keys that hold for other backends too, when the file is one for Megatron."""
    return "" if file_backend(source) == "megatron" else "Megatron's; actor.training_backend is fsdp"


def cluster(source: Source) -> str:
    """Keys of worker groups and devices."""
    return "everything runs in one process (--backend single)" if source.backend == "single" else ""


def constant(source: Source) -> str:
    """Keys of a learning rate that decays."""
    style = (
        source.get("actor.lr_sched.lr_decay_style") or source.get("actor.optim.lr_scheduler") or "constant"
    )
    return "the learning rate does not decay" if style == "constant" else ""


def sglang(source: Source) -> str:
    """Keys of SGLang."""
    return _of_engine(source, ("sglang",), "SGLang's")


def vllm(source: Source) -> str:
    """Keys of vLLM."""
    return _of_engine(source, ("vllm",), "vLLM's")


def served(source: Source) -> str:
    """Keys that both large engines have, and the native one has not."""
    return _of_engine(source, ("sglang", "vllm"), "of SGLang and vLLM")


def fixed_batches(source: Source) -> str:
    """Keys of micro-batches with a number of rows."""
    is_dynamic = source.get("runner.enable_dynamic_batch_size") is True
    return "runner.enable_dynamic_batch_size: micro-batches are cut by tokens" if is_dynamic else ""


def _of_backend(source: Source, names: Sequence[str], whose: str) -> str:
    now = backend(source)
    return "" if now in names else f"{whose}; the backend is {now}"


def _of_engine(source: Source, names: Sequence[str], whose: str) -> str:
    now = engine(source)
    return "" if now in names else f"{whose}; the engine is {now}"
