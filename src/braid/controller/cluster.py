"""The workers of a run on a cluster: which processes there are, and which roles sit in them.

    policy ranks     policy, and each of critic, reference and inference whose seats and backend are the policy's
    NAME ranks       any other of these roles
    rollout          engines with drivers and scorer
    rows             the rows of a round

Where each sits is the plan's layout. Processes start side by side, since most of their start is reading libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from braid.config.roles import TrainingRole, train_config
from braid.config.schema import RunConfig
from braid.plan.layout import Layout, RoleLayout, Worker
from braid.runtime.ray import RayGroup, connect, disconnect
from braid.runtime.workers import Factory, WorkerGroup
from braid.training.group import GroupBackend
from braid.training.worker import Ranks, RoleGroup

ROWS = "rows"
"""The group of one that has the rows of a round. It is on the first machine, and on no device."""


@dataclass(slots=True)
class Cluster:
    """A connection to a Ray cluster, and the groups that were started on it. With `is_own` the cluster is this run's."""

    config: RunConfig
    layout: Layout
    is_own: bool
    groups: dict[str, WorkerGroup] = field(default_factory=dict)

    @classmethod
    def start(cls, config: RunConfig, layout: Layout, factories: Mapping[str, Factory]) -> Cluster:
        """Connect, or start a cluster on this machine that is large enough; then start the processes of the training roles,
        and those that the `factories` make by name."""
        homes = {_home(layout, of): of for of in layout.roles if of.role != "rollout"}
        makes: dict[str, Factory] = {home: partial(Ranks, config=config) for home in homes}
        makes |= factories
        seats = {name: _seats(layout, name) for name in makes}
        cluster = cls(config, layout, connect(config.cluster, num_processes=sum(map(len, seats.values()))))
        shown = {str(role): text for role, text in config.cluster.group_names.items()}

        def start(name: str) -> WorkerGroup:
            return RayGroup(shown.get(name, name), makes[name], len(seats[name]), config.cluster)

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
        seated = self.layout.role(role)
        assert seated is not None, f"{role} has no workers in this run"
        group = RoleGroup(self.groups[_home(self.layout, seated)], name or role)
        group.group.call("add", group.name, role, config, total_steps)
        return GroupBackend(group, balances=train_config(config, role).balance_ranks)

    def leave(self) -> None:
        """End all processes, the connection, and a cluster that was started for it."""
        for group in self.groups.values():
            group.close()
        if self.is_own:
            disconnect()


def _home(layout: Layout, seated: RoleLayout) -> str:
    """The group in whose processes a role sits. Megatron has one layout of ranks in a process, so that its roles sit apart."""
    policy = layout.role("policy")
    assert policy is not None, "every run has a policy"
    is_alike = seated.kind == policy.kind != "megatron" and seated.workers == policy.workers
    return "policy" if is_alike else seated.role


def _seats(layout: Layout, name: str) -> tuple[Worker, ...]:
    seated = layout.role(name)
    return (Worker(0, 0, ()),) if seated is None else seated.workers
