"""Suggests values that make a refused layout possible, closest to the requested layout first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from braid.config.cluster import Role
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig
from braid.sections import Section

from .parallel import TRAINING_ROLES, device_limit, device_unit, divides, section_of
from .placement import format_numbers, parse_placement

_SectionT = TypeVar("_SectionT", bound=Section)


def candidate_fixes(
    config: RunConfig, known: Mapping[str, Any], *, roles: Sequence[Role], num_devices: int
) -> Iterator[dict[str, Any]]:
    """Candidate values by key. In this order: `known` alone; the placement cut to possible counts; all roles
    on the same devices; one device and no parallelism, which always works."""
    yield dict(known)
    if config.cluster.runtime == "in_process":
        known = {**known, "cluster.runtime": "auto"}
    config = with_values(config, known)
    try:
        placed = parse_placement(config.cluster.placement)
    except ValueError:
        placed = {}
    asked = {role: devices.numbers for role, devices in placed.items() if devices is not None}
    placeable: list[Role] = [role for role in roles if role not in ("inference", "env") or role in asked]
    everything = range(num_devices)
    for wanted in (asked, {}):
        cut = {
            role: _cut(config, role, wanted.get(role, wanted.get("policy", everything)), num_devices)
            for role in placeable
        }
        if "env" in cut:
            count, workers = len(cut["env"]), len(cut["rollout"])
            cut["env"] = cut["env"][: next(n for n in range(count, 0, -1) if divides(n, workers))]
        yield {**known, "cluster.placement": _lines(cut)}
    engine = config.rollout.engine
    changed = dict(_defaults("rollout.engine", engine, engine.parallel_sizes))
    for role in TRAINING_ROLES:
        at = section_of(config, role)
        train: TrainConfig = attrgetter(at)(config)
        changed |= _defaults(at, train, ("sequence_parallel",))
        changed |= _defaults(f"{at}.backend", train.backend, train.backend.parallel_sizes)
    alone = _lines({role: [0] for role in placeable if role not in ("inference", "env")})
    yield {**known, **changed, "cluster.placement": alone}


def _defaults(at: str, section: Section, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """(key, default) of those `names` that have another value in `section`, at key `at`."""
    for name in names:
        default = type(section).model_fields[name].default
        if getattr(section, name) != default:
            yield f"{at}.{name}", default


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


def _cut(config: RunConfig, role: Role, asked: Iterable[int], num_devices: int) -> list[int]:
    """As many of the devices as the role can use, at least one."""
    devices = [device for device in asked if device < num_devices] or [0]
    unit = device_unit(config, role)
    count = device_limit(config, role) or max(1, len(devices) // unit * unit)
    return devices[:count]


def _lines(devices_of: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """`cluster.placement` with one line per set of devices."""
    roles: dict[str, list[str]] = {}
    for role, devices in devices_of.items():
        roles.setdefault(format_numbers(devices), []).append(role)
    return {",".join(names): text for text, names in roles.items()}
