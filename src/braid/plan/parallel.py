"""Parallel sizes of roles: which process counts are possible, and the resulting process groups.

Each rule is a function of the config and a number of processes, so that the search for a working layout uses
the same rules as the check of a given one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from braid.config.cluster import Role
from braid.config.roles import TrainingRole, train_config
from braid.config.rollout import ServedEngine
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig

from .sizes import ModelSize

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


def served_engine(config: RunConfig) -> ServedEngine | None:
    """The settings of an engine that runs in its own processes; None for one in the run's."""
    engine = config.rollout.engine
    return engine if isinstance(engine, ServedEngine) else None


def copy_devices(train: TrainConfig) -> int:
    """Devices that process the same rows: those of one model replica under tensor, pipeline, context and
    sequence parallelism."""
    return train.backend.copy_devices(train)


def divides(one: int, other: int) -> bool:
    """Whether one of two counts is a multiple of the other."""
    return max(one, other) % min(one, other) == 0


def device_unit(config: RunConfig, role: Role) -> int:
    """The number of devices of a role must be a multiple of this."""
    return math.lcm(*(size for _, size, _ in _divisors(config, role)))


def device_limit(config: RunConfig, role: Role) -> int | None:
    """Exact number of devices that a role must have; None for any multiple of its unit."""
    if role in TRAINING_ROLES:
        return None if train_config(config, role).backend.is_sharded else 1
    engine = served_engine(config) if role == "rollout" else None
    return None if engine is None or not engine.replicas else engine.replicas * engine.num_devices() or None


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
        kind = train_config(config, role).backend.kind
        message = f"{has}, but {kind} uses one; set it to fsdp2, or place the {role} on one device"
        yield Refusal(f"{section_of(config, role)}.backend", message, {})
    else:
        key, each = "rollout.engine.replicas", config.rollout.engine.num_devices()
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
        train = train_config(config, role)
        for name, size, what in train.backend.divisors(train):
            yield _key(config, role, name), size, what
    elif (engine := served_engine(config)) is not None and role == "rollout":
        each = max(1, engine.num_devices())
        tensor, pipeline = engine.tensor_parallel, engine.pipeline_parallel
        what = f"an engine needs {each} devices (tensor {tensor} x pipeline parallel {pipeline})"
        yield "rollout.engine.tensor_parallel", each, what


def model_refusals(config: RunConfig, role: TrainingRole, model: ModelSize) -> Iterator[Refusal]:
    """Rules that a role breaks because its model's heads, layers or experts are not divisible by the parallel
    sizes. Each suggests the largest smaller size that works."""
    train = train_config(config, role)
    for name, size, what, fits in train.backend.splits(train, model):
        if not fits(size):
            key, lower = _key(config, role, name), next(n for n in range(size - 1, 0, -1) if fits(n))
            message = f"cannot split {what} into {size} parts; {lower} would work"
            yield Refusal(key, message, {key: lower})
