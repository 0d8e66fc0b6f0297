"""The placement table: rank, machine and devices of every worker of every role.

Training roles have one rank per device; rollout has one engine per device, or one per `tensor_parallel` *
`pipeline_parallel` devices. A role that is not in `cluster.placement` is placed with the policy, and a policy
that is not, on all devices (with backend `single` on device 0). `inference` has workers only on devices
without the policy. Simulators have workers if `env` is placed on other devices than rollout, and so have
judges with models of their own by the placement of `reward`; otherwise they and reward models run on the
rollout devices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from braid.config.cluster import Role
from braid.config.roles import TrainingRole, train_config
from braid.config.schema import RunConfig
from braid.errors import suggest
from braid.types import Groups

from .parallel import (
    TRAINING_ROLES,
    Refusal,
    count_refusals,
    device_limit,
    divides,
    model_refusals,
)
from .placement import parse_placement
from .repair import candidate_fixes, with_values
from .sizes import ModelSize

Mode = Literal["in_process", "collocated", "disaggregated", "hybrid"]
"""in_process: everything in the driver process. collocated: all roles on the same devices, in turns.
disaggregated: no device has two roles. hybrid: some devices have several."""
WITH_WORKERS: tuple[Role, ...] = (*TRAINING_ROLES, "rollout", "env", "reward")
"""Roles that may have workers."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of a role. Devices are numbered across machines; empty if an external server has them."""

    rank: int
    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoleLayout:
    """Workers of a role, by rank. `kind` is its training backend or engine, `groups` its parallel groups (as
    in Backend.groups), `offload` the state that leaves its devices while other roles use them."""

    role: Role
    kind: str
    workers: tuple[Worker, ...]
    groups: Groups
    offload: tuple[str, ...] = ()
    is_sharded: bool = False
    """Whether its backend runs in separate processes."""
    joins_others: bool = True
    """Whether its backend trains several roles in the same processes."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Its devices without duplicates, in ascending order."""
        return tuple(sorted({device for worker in self.workers for device in worker.devices}))

    def shares_processes(self, other: RoleLayout) -> bool:
        """Whether two training roles run in the same processes."""
        return self.joins_others and self.kind == other.kind and self.workers == other.workers


@dataclass(frozen=True, slots=True)
class Layout:
    """All workers of a run. `has_gpus`: the run uses GPUs of this machine. `refusals` are the rules that the
    layout breaks; a run starts only if there are none."""

    mode: Mode
    num_nodes: int
    devices_per_node: int
    roles: tuple[RoleLayout, ...]
    has_gpus: bool = False
    refusals: tuple[Refusal, ...] = ()

    def role(self, name: str) -> RoleLayout | None:
        """Workers of a role; None if it has no separate workers."""
        return next((role for role in self.roles if role.role == name), None)

    def sharing_devices(self, name: str) -> tuple[int, ...]:
        """Ranks of a role that samples on devices that a training role uses too."""
        trained = {device for role in self.roles if role.role in TRAINING_ROLES for device in role.devices}
        sampling = self.role(name)
        workers = () if sampling is None else sampling.workers
        return tuple(worker.rank for worker in workers if trained.intersection(worker.devices))


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a layout: roles, with the model sizes where they are known. `has_workers` is false for
    commands and environments that run in one process. `num_gpus` is the number of GPUs of this machine, 0 for
    a CPU run."""

    roles: tuple[Role, ...]
    models: Mapping[TrainingRole, ModelSize]
    has_workers: bool
    num_gpus: int


def lay_out(config: RunConfig, needs: Needs) -> Layout:
    """Compute the layout of a run. Each of its refusals suggests values that remove it."""
    layout = _lay_out(config, needs)
    if not layout.refusals:
        return layout
    known = {key: value for refusal in layout.refusals for key, value in refusal.fix.items()}
    num_devices = layout.num_nodes * layout.devices_per_node
    fixes = candidate_fixes(config, known, roles=needs.roles, num_devices=num_devices)
    fix = next(fix for fix in fixes if not _lay_out(with_values(config, fix), needs).refusals)
    text = " ".join(f"{key}={json.dumps(value)}" for key, value in fix.items())
    refusals = tuple(
        Refusal(refusal.key, f"{refusal.message}. This works: {text}", fix) for refusal in layout.refusals
    )
    return replace(layout, refusals=refusals)


def _lay_out(config: RunConfig, needs: Needs) -> Layout:
    """The layout with unmodified refusals. With any, only a run in one process has roles."""
    cluster = config.cluster
    num_nodes, per_node = cluster.num_nodes, cluster.devices_per_node or needs.num_gpus
    try:
        if not per_node:
            named = [
                devices.numbers[-1] for devices in parse_placement(cluster.placement).values() if devices
            ]
            per_node = math.ceil((max(named, default=0) + 1) / num_nodes)
        placed = parse_placement(cluster.placement, num_nodes * per_node)
    except ValueError as error:
        refusal = Refusal("cluster.placement", str(error), {})
        return Layout("in_process", num_nodes, per_node or 1, (), refusals=(refusal,))
    refusals = list(_unknown(placed))
    if not needs.has_workers:
        apart = ("inference", "env", "reward")
        alone: list[Role] = [role for role in WITH_WORKERS if role in needs.roles and role not in apart]
        roles = tuple(_role_layout(config, role, [(0,)], 1) for role in alone)
        return Layout("in_process", 1, 1, roles, refusals=tuple(refusals))
    processes = {role: devices.processes for role, devices in placed.items() if devices is not None}
    ranks = _devices_by_rank(config, needs, processes, num_nodes * per_node)
    if "env" in ranks:
        ranks["env"], problems = _per_rollout_worker(ranks["env"], len(ranks["rollout"]))
        refusals += problems
    for role, devices in ranks.items():
        refusals += _device_refusals(config, role, devices, per_node, has_gpus=needs.num_gpus > 0)
    for role, model in needs.models.items():
        refusals += model_refusals(config, role, model) if role in ranks else ()
    roles = tuple(_role_layout(config, role, devices, per_node) for role, devices in ranks.items())
    if refusals:
        roles = ()
    mode = _mode(config, roles)
    if mode != "in_process" and cluster.runtime == "in_process":
        message = f"in_process runs one worker per role on device 0, but {_what_needs_more(roles)}"
        refusals.append(Refusal("cluster.runtime", message, {"cluster.runtime": "auto"}))
    return Layout(mode, num_nodes, per_node, roles, needs.num_gpus > 0, tuple(refusals))


Ranks = Sequence[tuple[int, ...]]
"""Devices of each rank of a role."""


def _devices_by_rank(
    config: RunConfig, needs: Needs, placed: Mapping[str, Ranks], total: int
) -> dict[Role, Ranks]:
    """Devices of each role's ranks, before checking that they are possible."""
    everything = [(device,) for device in range(total if config.train.backend.is_sharded else 1)]
    policy = placed.get("policy", everything)
    out: dict[Role, Ranks] = {}
    for role in WITH_WORKERS:
        ranks = placed.get(role, policy)
        is_apart = not _all(ranks) <= _all(policy)
        if role not in needs.roles or (role == "inference" and not is_apart):
            continue
        if role not in placed:
            ranks = ranks[: device_limit(config, role)]
        out[role] = _of_engines(ranks, _engine_devices(config, role)) if role in _SAMPLING else ranks
    if "env" not in placed or _all(out.get("env", ())) == _all(out["rollout"]):
        out.pop("env", None)
    if "reward" not in placed or _all(out.get("reward", ())) <= _all(out["rollout"]):
        out.pop("reward", None)
    return out


def _all(ranks: Ranks) -> set[int]:
    return {device for devices in ranks for device in devices}


def _per_rollout_worker(ranks: Ranks, num_rollout: int) -> tuple[Ranks, list[Refusal]]:
    """The devices of the simulators' workers, each of which belongs to one rollout worker: one or more per
    rollout worker, in order; several may share a process's device."""
    count = len(ranks)
    if not divides(count, num_rollout):
        why = f"env has {count} processes and rollout {num_rollout} workers; make one a multiple of the other"
        return ranks, [Refusal("cluster.placement", why, {})]
    return (
        ranks if count >= num_rollout else [ranks[i * count // num_rollout] for i in range(num_rollout)]
    ), []


_SAMPLING: tuple[Role, ...] = ("rollout", "reward")
"""Roles whose workers have engines."""


def _engine_devices(config: RunConfig, role: Role) -> int:
    """Devices of each worker of a role."""
    if role == "reward":
        return max((part.engine.num_devices() for _, part in config.reward.judges()), default=1)
    return config.rollout.engine.num_devices() if role == "rollout" else 1


def _of_engines(ranks: Ranks, each: int) -> Ranks:
    """Devices of each engine with `each` devices: those of a process, or of several processes with one device
    each."""
    if not each:
        return [()]  # external servers
    singles = [device for devices in ranks for device in devices]
    if each == 1 or len(singles) > len(ranks):
        return ranks
    return [tuple(singles[i : i + each]) for i in range(0, len(singles), each)]


def _device_refusals(
    config: RunConfig, role: Role, ranks: Ranks, per_node: int, *, has_gpus: bool
) -> Iterator[Refusal]:
    """Rules broken by the devices of a role's ranks."""
    devices = [device for rank_devices in ranks for device in rank_devices]
    if counts := list(count_refusals(config, role, len(devices))):
        yield from counts
        return
    each = _engine_devices(config, role)
    for rank, rank_devices in enumerate(ranks):
        nodes = sorted({device // per_node for device in rank_devices})
        problem = ""
        if len(rank_devices) != each:
            uses = f"an engine uses {each}" if role in _SAMPLING else "a rank uses one"
            problem = f"has {len(rank_devices)} devices, but {uses}"
        elif len(nodes) > 1:
            where = f"on machines {_listed(nodes)} of {per_node} devices each"
            problem = f"has devices {_listed(rank_devices)}, {where}, but a process runs on one machine"
        elif len(set(rank_devices)) < len(rank_devices):
            problem = f"has a device twice ({_listed(rank_devices)}); each of its processes needs its own"
        if problem:
            yield Refusal("cluster.placement", f"rank {rank} of {role} {problem}", {})
    shared = next((device for device in devices if devices.count(device) > 1), None)
    if has_gpus and role in TRAINING_ROLES and shared is not None:
        message = f"two ranks of the {role} are on device {shared}, but NCCL allows only one rank per GPU"
        yield Refusal("cluster.placement", message, {})


def _unknown(placed: Iterable[str]) -> Iterator[Refusal]:
    known: tuple[str, ...] = get_args(Role)
    for role in sorted(set(placed) - set(known)):
        message = f"unknown role {role!r}{suggest(role, known)}; the roles are {', '.join(known)}"
        yield Refusal("cluster.placement", message, {})


def _role_layout(config: RunConfig, role: Role, ranks: Ranks, per_node: int) -> RoleLayout:
    workers = tuple(
        Worker(rank, devices[0] // per_node if devices else 0, devices) for rank, devices in enumerate(ranks)
    )
    if role not in TRAINING_ROLES:
        judges = dict.fromkeys(part.engine.kind for _, part in config.reward.judges())
        kinds = {"rollout": config.rollout.engine.kind, "env": config.env.kind, "reward": ", ".join(judges)}
        return RoleLayout(role, kinds[role], workers, {})
    train = train_config(config, role)
    offload = tuple(name for name, is_moved in train.offload if is_moved)
    backend = train.backend
    return RoleLayout(
        role,
        backend.kind,
        workers,
        backend.groups(train, len(workers)),
        offload,
        is_sharded=backend.is_sharded,
        joins_others=backend.joins_others,
    )


def _mode(config: RunConfig, roles: Sequence[RoleLayout]) -> Mode:
    if config.cluster.runtime != "ray" and _what_needs_more(roles) is None:
        return "in_process"
    sets = [set(role.devices) for role in roles if role.devices]
    if all(devices == sets[0] for devices in sets):
        return "collocated"
    return "disaggregated" if sum(map(len, sets)) == len(set.union(*sets)) else "hybrid"


def _what_needs_more(roles: Sequence[RoleLayout]) -> str | None:
    """The first reason why a single process is not sufficient."""
    for role in roles:
        if role.is_sharded:
            return f"the {role.role}'s backend {role.kind} runs in separate processes"
        if len(role.workers) > 1:
            return f"{role.role} has {len(role.workers)} workers"
        if role.devices not in ((), (0,)):
            return f"{role.role} is on {_listed(role.devices)}"
    return None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
