"""Suggests values that make a refused layout possible, closest to the requested layout first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    config: RunConfig,
    known: Mapping[str, Any],
    *,
    roles: Sequence[Role],
    num_nodes: int,
    devices_per_node: int,
    is_fixed: bool,
) -> Iterator[dict[str, Any]]:
    """Candidate values by key; the last candidate always works.

    In this order: `known` alone; the placement reduced to possible counts; all roles on the same devices;
    unless the number of devices `is_fixed`, these with as many devices as needed; finally one device for
    everything.
    """
    yield dict(known)
    if config.cluster.runtime == "in_process":
        known = {**known, "cluster.runtime": "auto"}
    config = with_values(config, known)
    asked = _asked(config)
    seated: list[Role] = [role for role in roles if role != "inference" or asked.get(role)]
    sizes = [(num_nodes, devices_per_node)]
    needed = max(device_unit(config, role) for role in seated)
    if not is_fixed and needed > devices_per_node:
        sizes.append((1, max(needed, num_nodes * devices_per_node)))
    for nodes, per_node in sizes:
        everything = tuple(range(nodes * per_node))
        for wanted in (asked, {}):
            seats: dict[Role, tuple[int, ...]] = {
                role: _cut(
                    config, role, wanted.get(role, wanted.get("policy", everything)), everything, per_node
                )
                for role in seated
            }
            if all(seats.values()):
                yield {**known, **_cluster(config, nodes, per_node), "cluster.placement": _lines(seats)}
    on_first: dict[Role, tuple[int, ...]] = {role: (0,) for role in seated if role != "inference"}
    yield {**known, **_whole(config, seated), **_cluster(config, 1, 1), "cluster.placement": _lines(on_first)}


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


def _cut(
    config: RunConfig, role: Role, asked: Sequence[int], there: Sequence[int], per_node: int
) -> tuple[int, ...]:
    """The requested devices that exist, cut to a number that is possible for the role; empty if too few. The
    devices of an engine are on one machine."""
    devices = sorted(set(asked) & set(there))
    if role != "rollout":
        return tuple(
            devices[:1] if device_limit(config, role) == 1 else devices[: _multiple(devices, config, role)]
        )
    limit = device_limit(config, role)
    nodes = [[d for d in devices if d // per_node == node] for node in {d // per_node: None for d in devices}]
    kept = [d for node in nodes for d in node[: _multiple(node, config, role)]]
    return tuple(kept if limit is None else kept[:limit] if len(kept) >= limit else ())


def _multiple(devices: Sequence[int], config: RunConfig, role: Role) -> int:
    unit = device_unit(config, role)
    return len(devices) // unit * unit


def _lines(seats: Mapping[Role, Sequence[int]]) -> dict[str, str]:
    """`cluster.placement` with one line per set of devices."""
    roles: dict[str, list[str]] = {}
    for role, devices in seats.items():
        roles.setdefault(format_numbers(devices), []).append(role)
    return {",".join(names): text for text, names in roles.items()}


def _cluster(config: RunConfig, num_nodes: int, devices_per_node: int) -> dict[str, int]:
    """Cluster keys that have to change for this size."""
    said = config.cluster
    changed = {} if said.num_nodes == num_nodes else {"cluster.num_nodes": num_nodes}
    if said.devices_per_node not in (None, devices_per_node):
        changed["cluster.devices_per_node"] = devices_per_node
    return changed


def _whole(config: RunConfig, roles: Sequence[Role]) -> dict[str, Any]:
    """Keys that have to change so that every device holds a whole model."""
    wanted = {
        f"{section_of(config, role)}.{key}": value
        for role in roles
        if role in TRAINING_ROLES
        for key, value in _WHOLE_MODEL.items()
    } | {
        f"rollout.{name}.{key}": value for name in ("vllm", "sglang") for key, value in _WHOLE_ENGINE.items()
    }
    return {key: value for key, value in wanted.items() if _value(config, key) != value}


def _value(config: RunConfig, path: str) -> Any:
    section: Any = config
    for name in path.split("."):
        section = getattr(section, name)
    return section
