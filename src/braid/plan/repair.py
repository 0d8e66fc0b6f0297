"""Suggests values that make a refused layout possible, closest to the requested layout first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from braid.config.base import Section
from braid.config.cluster import Role
from braid.config.schema import RunConfig

from .parallel import TRAINING_ROLES, device_limit, device_unit, section_of
from .placement import format_numbers, parse_placement

_SectionT = TypeVar("_SectionT", bound=Section)
_WHOLE_MODEL: dict[str, Any] = {
    "sequence_parallel": 1,
    "fsdp.size": None,
    "fsdp.reshard_after_forward": True,
    "deepspeed.hpz_partition_size": 1,
    "megatron.tensor_parallel": 1,
    "megatron.pipeline_parallel": 1,
    "megatron.virtual_pipeline": None,
    "megatron.context_parallel": 1,
    "megatron.expert_parallel": 1,
    "megatron.expert_tensor_parallel": None,
}
_WHOLE_ENGINE: dict[str, Any] = {"tensor_parallel": 1, "pipeline_parallel": 1, "replicas": None}


def candidate_fixes(
    config: RunConfig, known: Mapping[str, Any], *, roles: Sequence[Role], num_devices: int
) -> Iterator[dict[str, Any]]:
    """Candidate values by key. In this order: `known` alone; the placement cut to possible counts; all roles
    on the same devices; one device and no parallelism, which always works."""
    yield dict(known)
    if config.cluster.runtime == "in_process":
        known = {**known, "cluster.runtime": "auto"}
    config = with_values(config, known)
    asked = _asked(config)
    seated: list[Role] = [role for role in roles if role != "inference" or role in asked]
    everything = range(num_devices)
    for wanted in (asked, {}):
        cut = {
            role: _cut(config, role, wanted.get(role, wanted.get("policy", everything)), num_devices)
            for role in seated
        }
        yield {**known, "cluster.placement": _lines(cut)}
    whole = {f"rollout.{name}.{key}": v for name in ("vllm", "sglang") for key, v in _WHOLE_ENGINE.items()}
    for role in TRAINING_ROLES:
        whole |= {f"{section_of(config, role)}.{key}": value for key, value in _WHOLE_MODEL.items()}
    changed = {key: value for key, value in whole.items() if attrgetter(key)(config) != value}
    alone = _lines({role: [0] for role in seated if role != "inference"})
    yield {**known, **changed, "cluster.placement": alone}


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Copy the config with other values at some dotted paths."""
    for path, value in values.items():
        config = _replaced(config, path.split("."), value)
    return config


def _replaced(section: _SectionT, names: Sequence[str], value: Any) -> _SectionT:
    first, *rest = names
    if rest:
        value = _replaced(getattr(section, first), rest, value)
    return section.model_copy(update={first: value})


def _asked(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Devices of each role in the placement; empty if it cannot be parsed."""
    try:
        placed = parse_placement(config.cluster.placement)
    except ValueError:
        return {}
    return {role: devices.numbers for role, devices in placed.items() if devices is not None}


def _cut(config: RunConfig, role: Role, asked: Iterable[int], num_devices: int) -> list[int]:
    """As many of the devices as the role can use, at least one."""
    devices = [device for device in asked if device < num_devices] or [0]
    unit = device_unit(config, role)
    count = device_limit(config, role) or max(1, len(devices) // unit * unit)
    return devices[:count]


def _lines(seats: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """`cluster.placement` with one line per set of devices."""
    roles: dict[str, list[str]] = {}
    for role, devices in seats.items():
        roles.setdefault(format_numbers(devices), []).append(role)
    return {",".join(names): text for text, names in roles.items()}
