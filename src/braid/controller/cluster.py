"""The workers of a run on a cluster: which processes there are, and which roles sit in them.

    policy ranks     policy, and each of critic, reference and inference whose placement and backend are the policy's
    NAME ranks       any other of these roles
    rollout          engines with drivers and scorer
    rows             the rows of a round

Processes start side by side, since most of their start is reading libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from braid.config.schema import RunConfig
from braid.models.roles import TrainingRole, train_config
from braid.plan.placement import Devices, parse_placement
from braid.runtime.ray import RayGroup, connect, disconnect
from braid.runtime.workers import Factory, WorkerGroup
from braid.training.group import GroupBackend
from braid.training.worker import Ranks, RoleGroup

ROWS = "rows"
"""The group of one that has the rows of a round."""


@dataclass(slots=True)
class Cluster:
    """A connection to a Ray cluster, and the groups that were started on it. With `is_own` the cluster is this run's."""

    config: RunConfig
    is_own: bool
    groups: dict[str, WorkerGroup] = field(default_factory=dict)

    @classmethod
    def start(cls, config: RunConfig, roles: list[TrainingRole], factories: Mapping[str, Factory]) -> Cluster:
        """Connect, or start a cluster on this machine that is large enough; then start the processes of the training
        `roles`, and those that the `factories` make by name."""
        homes = {role: _home(config, role) for role in roles}
        makes: dict[str, Factory] = {home: partial(Ranks, config=config) for home in homes.values()}
        makes |= factories
        sizes = {name: _num_workers(config, name) for name in makes}
        cluster = cls(config, connect(config.cluster, num_processes=sum(sizes.values())))

        def start(name: str) -> WorkerGroup:
            shown = {str(role): text for role, text in config.cluster.group_names.items()}.get(name, name)
            return RayGroup(shown, makes[name], sizes[name], config.cluster)

        try:
            with ThreadPoolExecutor(len(makes)) as pool:
                for name, group in zip(makes, pool.map(start, makes), strict=True):
                    cluster.groups[name] = group
        except BaseException:
            cluster.leave()
            raise
        return cluster

    def backend(
        self,
        role: TrainingRole,
        *,
        total_steps: int,
        config: RunConfig | None = None,
        name: str | None = None,
    ) -> GroupBackend:
        """A role's model on the ranks where it sits. `config` is the run's, and `name` the role's, unless given."""
        config = config or self.config
        group = RoleGroup(self.groups[_home(config, role)], name or role)
        group.group.call("add", group.name, role, config, total_steps)
        return GroupBackend(group, balances=train_config(config, role).balance_ranks)

    def leave(self) -> None:
        """End all processes, the connection, and a cluster that was started for it."""
        for group in self.groups.values():
            group.close()
        if self.is_own:
            disconnect()


def _home(config: RunConfig, role: TrainingRole) -> str:
    """The group in whose processes a role sits. Megatron has one layout of ranks in a process, so that its roles sit apart."""
    own, policy = (train_config(config, of) for of in (role, "policy"))
    is_alike = own.backend == policy.backend != "megatron"
    return "policy" if is_alike and _devices(config, role) == _devices(config, "policy") else role


def _devices(config: RunConfig, role: str) -> Devices | None:
    """Those of the role's line, or of the policy's where it has none; None for all there are."""
    cluster = config.cluster
    placed = parse_placement(cluster.placement, cluster.devices_per_node)
    return placed.get(role, placed.get("policy"))


def _num_workers(config: RunConfig, role: str) -> int:
    if role == ROWS:
        return 1
    if role in ("policy", "critic", "reference", "inference") and _is_single(config, role):
        return 1
    devices = _devices(config, role)
    return (config.cluster.devices_per_node or 1) if devices is None else len(devices.processes)


def _is_single(config: RunConfig, role: TrainingRole) -> bool:
    return train_config(config, role).backend == "single"
