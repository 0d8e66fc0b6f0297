"""The placement table: rank, machine and devices of every worker of every role.

Training roles have one rank per device; rollout has one engine per device, or one per `tensor_parallel` *
`pipeline_parallel` devices. A role that is not in `cluster.placement` is placed with the policy, and a policy
that is not, on all devices (with backend `single` on device 0). `inference` has workers only on devices
without the policy; reward models and environments run on the rollout devices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from braid.config.cluster import Role
from braid.config.roles import TrainingRole, train_config
from braid.config.schema import RunConfig
from braid.errors import suggest

from .parallel import (
    TRAINING_ROLES,
    Groups,
    Refusal,
    count_refusals,
    device_limit,
    engine_devices,
    model_refusals,
    parallel_groups,
    served_engine,
)
from .placement import parse_placement
from .repair import candidate_fixes, with_values
from .sizes import ModelSize

Mode = Literal["in_process", "collocated", "disaggregated", "hybrid"]
"""in_process: everything in the driver process. collocated: all roles on the same devices, in turns.
disaggregated: no device has two roles. hybrid: some devices have several."""
SEATED: tuple[Role, ...] = (*TRAINING_ROLES, "rollout")
"""Roles that have workers."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of a role. Devices are numbered across machines; empty if an external server has them."""

    rank: int
    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoleLayout:
    """Workers of a role, by rank. `kind` is its training backend or engine, `groups` its parallel groups (as
    in parallel_groups), `offload` the state that leaves its devices while other roles use them."""

    role: Role
    kind: str
    workers: tuple[Worker, ...]
    groups: Groups
    offload: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """Its devices without duplicates, in ascending order."""
        return tuple(sorted({device for worker in self.workers for device in worker.devices}))

    def shares_processes(self, other: RoleLayout) -> bool:
        """Whether two training roles run in the same processes. Megatron allows one parallel layout per
        process, so its roles never do."""
        return self.kind == other.kind != "megatron" and self.workers == other.workers


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
        return next((of for of in self.roles if of.role == name), None)

    @property
    def engines_sharing_devices(self) -> tuple[int, ...]:
        """Rollout ranks on devices that a training role uses too."""
        trained = {device for of in self.roles if of.role != "rollout" for device in of.devices}
        rollout = self.role("rollout")
        workers = () if rollout is None else rollout.workers
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
    layout = _seat(config, needs)
    if not layout.refusals:
        return layout
    known = {key: value for refusal in layout.refusals for key, value in refusal.fix.items()}
    num_devices = layout.num_nodes * layout.devices_per_node
    fixes = candidate_fixes(config, known, roles=needs.roles, num_devices=num_devices)
    fix = next(fix for fix in fixes if not _seat(with_values(config, fix), needs).refusals)
    text = " ".join(f"{key}={json.dumps(value)}" for key, value in fix.items())
    told = tuple(Refusal(of.key, f"{of.message}. This works: {text}", fix) for of in layout.refusals)
    return replace(layout, refusals=told)


def _seat(config: RunConfig, needs: Needs) -> Layout:
    """The layout with unmodified refusals. A placement that cannot be parsed gives no roles."""
    cluster = config.cluster
    num_nodes, per_node = cluster.num_nodes, cluster.devices_per_node or needs.num_gpus or 1
    try:
        named = [devices.numbers[-1] for devices in parse_placement(cluster.placement).values() if devices]
        if cluster.devices_per_node is None and not needs.num_gpus:
            per_node = math.ceil((max(named, default=0) + 1) / num_nodes)
        total = num_nodes * per_node
        placed = {
            role: devices.processes
            for role, devices in parse_placement(cluster.placement, total).items()
            if devices is not None
        }
    except ValueError as error:
        return Layout(
            "in_process", num_nodes, per_node, (), refusals=(Refusal("cluster.placement", str(error), {}),)
        )
    if not needs.has_workers:
        alone = Worker(0, 0, (0,))
        roles = tuple(
            _role_layout(config, role, [alone])
            for role in SEATED
            if role in needs.roles and role != "inference"
        )
        return Layout("in_process", 1, 1, roles, refusals=tuple(_unknown(placed)))
    seats = _seats(config, needs, placed, total)
    refusals = (
        *_unknown(placed),
        *_process_refusals(config, needs, seats, per_node),
        *(
            refusal
            for role, model in needs.models.items()
            if role in seats
            for refusal in model_refusals(config, role, model)
        ),
    )
    roles = tuple(
        _role_layout(
            config,
            role,
            [
                Worker(rank, devices[0] // per_node if devices else 0, devices)
                for rank, devices in enumerate(_workers_of(config, role, seats[role]))
            ],
        )
        for role in seats
        if not refusals
    )
    layout = Layout(_mode(config, roles), num_nodes, per_node, roles, needs.num_gpus > 0, refusals)
    if layout.mode != "in_process" and cluster.runtime == "in_process":
        refusal = Refusal(
            "cluster.runtime",
            f"in_process runs one worker per role on device 0, but {_what_needs_more(roles)}",
            {"cluster.runtime": "auto"},
        )
        layout = replace(layout, refusals=(*refusals, refusal))
    return layout


Processes = Sequence[tuple[int, ...]]
"""Devices of each process."""


def _seats(
    config: RunConfig, needs: Needs, placed: Mapping[str, Processes], total: int
) -> dict[Role, Processes]:
    """Devices assigned to each role, before checking that the assignment is possible."""
    everything = [(device,) for device in range(total if config.train.backend != "single" else 1)]
    policy = placed.get("policy", everything)
    out: dict[Role, Processes] = {}
    for role in SEATED:
        if role not in needs.roles:
            continue
        seats = placed.get(role, policy)
        if role == "inference" and {d for of in seats for d in of} <= {d for of in policy for d in of}:
            continue
        if role == "rollout":
            seats = _of_rollout(config, seats, is_named="rollout" in placed)
        elif role in TRAINING_ROLES and role not in placed and device_limit(config, role) == 1:
            seats = seats[:1]
        out[role] = seats
    return out


def _of_rollout(config: RunConfig, seats: Processes, *, is_named: bool) -> Processes:
    """Devices of rollout: none for external servers; of the policy's devices, as many as the requested
    engines need."""
    each, engine = engine_devices(config), served_engine(config)
    if not each:
        return [()]
    if not is_named and engine is not None and engine.replicas is not None:
        return seats[: engine.replicas * each]
    return seats


def _workers_of(config: RunConfig, role: Role, processes: Processes) -> Processes:
    """Devices of each worker: a process, or an engine that spans several single-device processes."""
    each = engine_devices(config) if role == "rollout" else 1
    if each <= 1 or len(processes[0]) > 1:
        return processes
    singles = [device for process in processes for device in process]
    return [tuple(singles[i : i + each]) for i in range(0, len(singles), each)]


def _process_refusals(
    config: RunConfig, needs: Needs, seats: Mapping[Role, Processes], per_node: int
) -> Iterator[Refusal]:
    """Rules broken by the devices assigned to roles."""
    for role, processes in seats.items():
        each = engine_devices(config) if role == "rollout" else 1
        wide = next((of for of in processes if len(of) not in (min(each, 1), each)), None)
        if wide is not None:
            uses = f"an engine uses {each}" if role == "rollout" else "a rank uses one"
            yield Refusal(
                "cluster.placement", f"a process of the {role} has {len(wide)} devices, but {uses}", {}
            )
            continue
        refusals = list(count_refusals(config, role, sum(len(of) for of in processes)))
        yield from refusals
        if refusals:
            continue
        workers = _workers_of(config, role, processes)
        for rank, devices in enumerate(workers):
            nodes = {device // per_node for device in devices}
            if len(nodes) > 1:
                yield Refusal(
                    "cluster.placement",
                    f"engine {rank} has devices {_listed(devices)}, on machines {_listed(sorted(nodes))} of {per_node} devices "
                    "each, but a process runs on one machine",
                    {},
                )
            elif len(set(devices)) < len(devices):
                yield Refusal(
                    "cluster.placement",
                    f"engine {rank} has a device twice ({_listed(devices)}); each of its processes needs its own",
                    {},
                )
        devices = [device for of in workers for device in of]
        shared = next((device for device in devices if devices.count(device) > 1), None)
        if needs.num_gpus and role != "rollout" and shared is not None:
            yield Refusal(
                "cluster.placement",
                f"two ranks of the {role} are on device {shared}, but NCCL allows only one rank per GPU",
                {},
            )


def _unknown(placed: Mapping[str, Processes]) -> Iterator[Refusal]:
    known: tuple[str, ...] = get_args(Role)
    for role in sorted(placed.keys() - set(known)):
        message = f"unknown role {role!r}{suggest(role, known)}; the roles are {', '.join(known)}"
        yield Refusal("cluster.placement", message, {})


def _role_layout(config: RunConfig, role: Role, workers: Sequence[Worker]) -> RoleLayout:
    if role == "rollout":
        return RoleLayout(role, config.rollout.engine, tuple(workers), {})
    assert role in TRAINING_ROLES, f"{role} has no separate workers"
    train = train_config(config, role)
    offload = tuple(name for name, is_moved in train.offload if is_moved)
    return RoleLayout(role, train.backend, tuple(workers), parallel_groups(train, len(workers)), offload)


def _mode(config: RunConfig, roles: Sequence[RoleLayout]) -> Mode:
    if config.cluster.runtime != "ray" and _what_needs_more(roles) is None:
        return "in_process"
    sets = [set(role.devices) for role in roles if role.devices]
    if all(devices == sets[0] for devices in sets):
        return "collocated"
    return "disaggregated" if sum(map(len, sets)) == len(set.union(*sets)) else "hybrid"


def _what_needs_more(roles: Sequence[RoleLayout]) -> str | None:
    """The first reason why a single process is not sufficient."""
    for of in roles:
        if of.role in TRAINING_ROLES and of.kind != "single":
            return f"the {of.role}'s backend {of.kind} runs in separate processes"
        if len(of.workers) > 1:
            return f"{of.role} has {len(of.workers)} workers"
        if of.devices not in ((), (0,)):
            return f"{of.role} is on {_listed(of.devices)}"
    return None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
