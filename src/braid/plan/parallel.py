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
    has_own = role in ("critic", "reference") and getattr(config, role).train is not None
    return f"{role}.train" if has_own else "train"


def served_engine(config: RunConfig) -> VllmConfig | SglangConfig | None:
    """Options of an engine that runs in its own processes; None for the native engine."""
    name = config.rollout.engine
    return None if name == "native" else getattr(config.rollout, name)


def engine_devices(config: RunConfig) -> int:
    """Devices of one rollout engine; 0 with external servers."""
    engine = served_engine(config)
    if engine is None:
        return 1
    return 0 if engine.servers else engine.tensor_parallel * engine.pipeline_parallel


def copy_devices(train: TrainConfig) -> int:
    """Devices that process the same rows: those of one model replica under tensor, pipeline, context and
    sequence parallelism."""
    if train.backend == "megatron":
        sizes = train.megatron
        return sizes.tensor_parallel * sizes.pipeline_parallel * sizes.context_parallel
    return 1 if train.backend == "single" else train.sequence_parallel


def divides(one: int, other: int) -> bool:
    """Whether one of two counts is a multiple of the other."""
    return max(one, other) % min(one, other) == 0


def device_unit(config: RunConfig, role: Role) -> int:
    """The number of devices of a role must be a multiple of this."""
    return math.lcm(*(size for _, size, _ in _divisors(config, role)))


def device_limit(config: RunConfig, role: Role) -> int | None:
    """Exact number of devices that a role must have; None for any multiple of its unit."""
    if role in TRAINING_ROLES:
        return 1 if train_config(config, role).backend == "single" else None
    engine = served_engine(config) if role == "rollout" else None
    return None if engine is None or not engine.replicas else engine.replicas * engine_devices(config) or None


def count_refusals(config: RunConfig, role: Role, count: int) -> Iterator[Refusal]:
    """Rules that a role breaks with `count` devices: a training role has one process per device, rollout
    splits them into engines."""
    has = f"the {role} has {count} {'device' if count == 1 else 'devices'}"
    broken = [(key, size, what) for key, size, what in _divisors(config, role) if count % size]
    for key, size, what in broken:
        yield Refusal(key, f"{what}, but {has}; use a multiple of {size}", {})
    limit = device_limit(config, role)
    if broken or limit in (None, count):
        return
    if role in TRAINING_ROLES:
        message = f"{has}, but single uses one; set it to fsdp2, or place the {role} on one device"
        yield Refusal(f"{section_of(config, role)}.backend", message, {})
    else:
        key, each = f"rollout.{config.rollout.engine}.replicas", engine_devices(config)
        needs = f"{limit // each} engines of {each} need {limit} devices, but {has}"
        yield Refusal(key, f"{needs}; set it to {count // each}, or remove it", {key: None})


def _key(config: RunConfig, role: TrainingRole, name: str) -> str:
    """Key of an option of a role's backend."""
    leaf = name.rpartition(".")[2]
    if role == "inference" and getattr(config.inference, leaf, None) is not None:
        return f"inference.{leaf}"
    return f"{section_of(config, role)}.{name}"


def _divisors(config: RunConfig, role: Role) -> Iterator[tuple[str, int, str]]:
    """(key, divisor of a role's number of devices, its description)."""
    if role in TRAINING_ROLES:
        for name, size, what in _training_divisors(train_config(config, role)):
            yield _key(config, role, name), size, what
    elif (engine := served_engine(config)) is not None and role == "rollout":
        each = max(1, engine_devices(config))
        tensor, pipeline = engine.tensor_parallel, engine.pipeline_parallel
        what = f"an engine needs {each} devices (tensor {tensor} x pipeline parallel {pipeline})"
        yield f"rollout.{config.rollout.engine}.tensor_parallel", each, what


def _training_divisors(train: TrainConfig) -> Iterator[tuple[str, int, str]]:
    if train.backend == "megatron":
        sizes = train.megatron
        tensor, pipeline, context = sizes.tensor_parallel, sizes.pipeline_parallel, sizes.context_parallel
        copy = copy_devices(train)
        parts = f"tensor {tensor} x pipeline {pipeline} x context parallel {context}"
        yield "megatron.tensor_parallel", copy, f"a model replica needs {copy} devices ({parts})"
        expert, of_expert = sizes.expert_parallel, sizes.expert_tensor_parallel or tensor
        if expert > 1 or of_expert != tensor:
            size = expert * of_expert * pipeline
            parts = f"expert {expert} x expert tensor {of_expert} x pipeline parallel {pipeline}"
            yield "megatron.expert_parallel", size, f"a replica of the experts needs {size} devices ({parts})"
    elif train.backend != "single":
        size = train.sequence_parallel
        yield "sequence_parallel", size, f"a sequence-parallel group needs {size} devices"
        part, reshard = train.fsdp.size, train.fsdp.reshard_after_forward
        if train.backend == "deepspeed":
            hpz = train.deepspeed.hpz_partition_size
            yield "deepspeed.hpz_partition_size", hpz, f"a secondary partition needs {hpz} devices"
        elif part is not None:
            yield "fsdp.size", part, f"a shard group needs {part} devices"
        elif type(reshard) is int:
            yield "fsdp.reshard_after_forward", reshard, f"weights are resharded over {reshard} devices"


def model_refusals(config: RunConfig, role: TrainingRole, model: ModelSize) -> Iterator[Refusal]:
    """Rules that a role breaks because its model's heads, layers or experts are not divisible by the parallel
    sizes. Each suggests the largest smaller size that works."""
    train = train_config(config, role)
    sizes, heads, kv_heads = train.megatron, model.num_heads, model.num_kv_heads
    layers, experts, pipeline = model.num_layers, model.num_experts, sizes.pipeline_parallel
    stage = layers // pipeline if layers % pipeline == 0 else 0  # 0: the stages themselves are refused
    of_heads = f"{heads} attention heads and {kv_heads} key/value heads"

    def has_heads(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    def has_experts(n: int) -> bool:
        return n == 1 or (experts > 0 and experts % n == 0)

    rules: list[tuple[str, int, str, Callable[[int], bool]]] = []
    if train.backend == "megatron":
        rules = [
            ("megatron.tensor_parallel", sizes.tensor_parallel, of_heads, has_heads),
            ("megatron.pipeline_parallel", pipeline, f"{layers} layers", lambda n: layers % n == 0),
            (
                "megatron.virtual_pipeline",
                sizes.virtual_pipeline or 1,
                f"the {stage} layers of a stage",
                lambda n: stage % n == 0,
            ),
            ("megatron.expert_parallel", sizes.expert_parallel, f"{experts} experts", has_experts),
        ]
    elif train.backend != "single":
        rules = [("sequence_parallel", train.sequence_parallel, of_heads, has_heads)]
    for name, size, what, fits in rules:
        if not fits(size):
            key, lower = _key(config, role, name), next(n for n in range(size - 1, 0, -1) if fits(n))
            message = f"cannot split {what} into {size} parts; {lower} would work"
            yield Refusal(key, message, {key: lower})


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
            tensor, pipeline, context = sizes.tensor_parallel, sizes.pipeline_parallel, sizes.context_parallel
            of_tensor = sizes.expert_tensor_parallel or tensor
            data = count // copy_devices(train)
            of_data = count // (of_tensor * sizes.expert_parallel * pipeline)
            dense = {"tensor": tensor, "context": context, "data": data, "pipeline": pipeline}
            experts = {"expert tensor": of_tensor, "expert": sizes.expert_parallel, "expert data": of_data}
            return _grid(dense) | (_grid(experts, pipeline) if sizes.expert_parallel > 1 else {})
        case _:
            by_rows = _grid({"sequence": train.sequence_parallel, "data": count // train.sequence_parallel})
            is_zero = train.backend == "deepspeed"
            part = train.deepspeed.hpz_partition_size if is_zero else train.fsdp.size or count
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
