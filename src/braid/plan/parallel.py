"""Parallel sizes of roles: which process counts are possible, and the resulting process groups.

Each rule is a function of the config and a number of processes, so that the search for a working layout uses
the same rules as the check of a given one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from braid.config.cluster import Role
from braid.config.roles import TrainingRole, train_config
from braid.config.rollout import SglangConfig, VllmConfig
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig

from .sizes import ModelSize

Groups = dict[str, tuple[tuple[int, ...], ...]]
"""Parallel dimension -> the ranks of each of its groups."""
TRAINING_ROLES: tuple[TrainingRole, ...] = get_args(TrainingRole)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A broken rule: the key that should be changed, what is wrong, and values of keys that fix it (empty if
    a different placement may fix it)."""

    key: str
    message: str
    fix: Mapping[str, Any]


def section_of(config: RunConfig, role: TrainingRole) -> str:
    """Key of the section that holds a role's training settings."""
    has_own = {"critic": config.critic.train, "reference": config.reference.train}.get(role) is not None
    return f"{role}.train" if has_own else "train"


def served_engine(config: RunConfig) -> VllmConfig | SglangConfig | None:
    """Options of an engine that runs in its own processes; None for the native engine."""
    match config.rollout.engine:
        case "vllm":
            return config.rollout.vllm
        case "sglang":
            return config.rollout.sglang
        case "native":
            return None


def engine_devices(config: RunConfig) -> int:
    """Devices of one rollout engine; 0 with external servers."""
    engine = served_engine(config)
    if engine is None:
        return 1
    return 0 if engine.servers else engine.tensor_parallel * engine.pipeline_parallel


def copy_devices(train: TrainConfig) -> int:
    """Devices that process the same rows: those of one model replica under tensor, pipeline, context and
    sequence parallelism."""
    sizes = train.megatron
    match train.backend:
        case "single":
            return 1
        case "megatron":
            return sizes.tensor_parallel * sizes.pipeline_parallel * sizes.context_parallel
        case _:
            return train.sequence_parallel


def device_unit(config: RunConfig, role: Role) -> int:
    """The number of devices of a role must be a multiple of this."""
    if role == "rollout":
        return max(1, engine_devices(config))
    if role not in TRAINING_ROLES:
        return 1
    return math.lcm(*(size for _, size, _ in _divisors(train_config(config, role))))


def device_limit(config: RunConfig, role: Role) -> int | None:
    """Exact number of devices that a role must have; None for any multiple of its unit."""
    if role == "rollout":
        engine = served_engine(config)
        return (
            None if engine is None or engine.replicas is None else engine.replicas * device_unit(config, role)
        )
    return 1 if role in TRAINING_ROLES and train_config(config, role).backend == "single" else None


def count_refusals(config: RunConfig, role: Role, count: int) -> Iterator[Refusal]:
    """Rules that a role breaks with `count` devices: a training role has one process per device, rollout
    splits them into engines."""
    if role == "rollout":
        yield from _of_engines(config, count)
    elif role in TRAINING_ROLES:
        train = train_config(config, role)
        if train.backend == "single" and count > 1:
            yield Refusal(
                f"{section_of(config, role)}.backend",
                f"the {role} has {count} devices, but single uses one; set it to fsdp2, or place the {role} on one device",
                {},
            )
        for key, size, what in _divisors(train):
            if count % size:
                message = f"{what}, but the {role} has {count} {_devices(count)}; use a multiple of {size}"
                yield Refusal(_key(config, role, key), message, {})


def _key(config: RunConfig, role: TrainingRole, name: str) -> str:
    """Key of an option of a role's backend."""
    leaf = name.rpartition(".")[2]
    if role == "inference" and getattr(config.inference, leaf, None) is not None:
        return f"inference.{leaf}"
    return f"{section_of(config, role)}.{name}"


def _divisors(train: TrainConfig) -> Iterator[tuple[str, int, str]]:
    """(key, divisor of a role's number of devices, its description)."""
    match train.backend:
        case "single":
            return
        case "megatron":
            sizes = train.megatron
            tensor, pipeline, context = sizes.tensor_parallel, sizes.pipeline_parallel, sizes.context_parallel
            copy = tensor * pipeline * context
            yield (
                "megatron.tensor_parallel",
                copy,
                f"a model replica needs {copy} devices (tensor {tensor} x pipeline {pipeline} x context parallel {context})",
            )
            expert, of_expert = sizes.expert_parallel, sizes.expert_tensor_parallel or tensor
            size = expert * of_expert * pipeline
            if expert > 1 or of_expert != tensor:
                yield (
                    "megatron.expert_parallel",
                    size,
                    f"a replica of the experts needs {size} devices (expert {expert} x expert tensor {of_expert} x pipeline "
                    f"parallel {pipeline})",
                )
        case "deepspeed":
            yield _sequences(train)
            hpz = train.deepspeed.hpz_partition_size
            yield "deepspeed.hpz_partition_size", hpz, f"a secondary partition needs {hpz} devices"
        case "fsdp" | "fsdp2":
            yield _sequences(train)
            part, reshard = train.fsdp.size, train.fsdp.reshard_after_forward
            if part is not None:
                yield "fsdp.size", part, f"a shard group needs {part} devices"
            elif type(reshard) is int:
                text = f"weights are resharded over {reshard} devices"
                yield "fsdp.reshard_after_forward", reshard, text


def _sequences(train: TrainConfig) -> tuple[str, int, str]:
    size = train.sequence_parallel
    return "sequence_parallel", size, f"a sequence-parallel group needs {size} devices"


def _of_engines(config: RunConfig, count: int) -> Iterator[Refusal]:
    engine, each, name = served_engine(config), engine_devices(config), config.rollout.engine
    if engine is None or not each:
        return
    if count % each:
        yield Refusal(
            f"rollout.{name}.tensor_parallel",
            f"tensor {engine.tensor_parallel} x pipeline parallel {engine.pipeline_parallel} = {each} devices per engine, "
            f"but rollout has {count}; use a multiple of {each}, or lower it",
            {},
        )
    elif engine.replicas is not None and engine.replicas * each != count:
        yield Refusal(
            f"rollout.{name}.replicas",
            f"{engine.replicas} engines need {engine.replicas * each} {_devices(engine.replicas * each)}, but rollout has "
            f"{count}; set it to {count // each}, or remove it",
            {f"rollout.{name}.replicas": None},
        )


def model_refusals(config: RunConfig, role: TrainingRole, model: ModelSize) -> Iterator[Refusal]:
    """Rules that a role breaks because its model's heads, layers or experts are not divisible by the parallel
    sizes."""
    train, sizes = train_config(config, role), train_config(config, role).megatron
    heads, kv_heads = model.num_heads, model.num_kv_heads
    layers, experts = model.num_layers, model.num_experts

    def has_heads(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    of_heads = f"{heads} attention heads and {kv_heads} key/value heads"
    if train.backend in ("fsdp", "fsdp2", "deepspeed"):
        yield from _shared(
            _key(config, role, "sequence_parallel"), train.sequence_parallel, of_heads, has_heads
        )
    if train.backend != "megatron":
        return
    tensor = _key(config, role, "megatron.tensor_parallel")
    yield from _shared(tensor, sizes.tensor_parallel, of_heads, has_heads)
    pipeline, pieces = sizes.pipeline_parallel, sizes.virtual_pipeline or 1
    stages = _key(config, role, "megatron.pipeline_parallel")
    yield from _shared(stages, pipeline, f"{layers} layers", lambda n: layers % n == 0)
    if layers % pipeline == 0:
        stage = layers // pipeline
        virtual = _key(config, role, "megatron.virtual_pipeline")
        yield from _shared(virtual, pieces, f"the {stage} layers of a stage", lambda n: stage % n == 0)
    yield from _shared(
        _key(config, role, "megatron.expert_parallel"),
        sizes.expert_parallel,
        f"{experts} experts",
        lambda n: n == 1 or (experts > 0 and experts % n == 0),
    )


def _shared(key: str, size: int, what: str, fits: Callable[[int], bool]) -> Iterator[Refusal]:
    """A refusal if `what` cannot be divided into `size` parts, with the largest smaller size that works."""
    if not fits(size):
        lower = next(n for n in range(size - 1, 0, -1) if fits(n))
        yield Refusal(key, f"cannot split {what} into {size} parts; {lower} would work", {key: lower})


def parallel_groups(train: TrainConfig, count: int) -> Groups:
    """Process groups among `count` ranks, for each parallel dimension of more than one rank. Ranks of a
    `data` group get different rows.

    Ranks are numbered as in the backends: ranks of a model replica are adjacent, in Megatron in the order
    tensor, context, data, pipeline, and for experts expert tensor, expert, data.
    """
    match train.backend:
        case "single":
            return {}
        case "megatron":
            sizes = train.megatron
            tensor, pipeline, context = (
                sizes.tensor_parallel,
                sizes.pipeline_parallel,
                sizes.context_parallel,
            )
            data = count // (tensor * pipeline * context)
            of_tensor = sizes.expert_tensor_parallel or tensor
            of_data = count // (of_tensor * sizes.expert_parallel * pipeline)
            dense = {"tensor": tensor, "context": context, "data": data, "pipeline": pipeline}
            experts = {"expert tensor": of_tensor, "expert": sizes.expert_parallel, "expert data": of_data}
            return _grid(dense) | (_grid(experts, pipeline) if sizes.expert_parallel > 1 else {})
        case _:
            by_rows = _grid({"sequence": train.sequence_parallel, "data": count // train.sequence_parallel})
            part = (
                train.deepspeed.hpz_partition_size
                if train.backend == "deepspeed"
                else train.fsdp.size or count
            )
            is_hybrid = 1 < part < count
            return by_rows | (_grid({"shard": part, "replica": count // part}) if is_hybrid else {})


def _grid(sizes: Mapping[str, int], repeats: int = 1) -> Groups:
    """Groups of each dimension of `repeats` grids with these `sizes`; ranks of the first dimension are
    adjacent."""
    total, stride, out = math.prod(sizes.values()) * repeats, 1, Groups()
    for name, size in sizes.items():
        if size > 1:
            firsts = [rank for rank in range(total) if rank // stride % size == 0]
            out[name] = tuple(tuple(range(first, first + size * stride, stride)) for first in firsts)
        stride *= size
    return out


def _devices(count: int) -> str:
    return "device" if count == 1 else "devices"
