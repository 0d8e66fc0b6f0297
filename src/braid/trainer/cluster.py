"""The workers of a run on a cluster: which processes there are, and which roles they run.

    policy ranks     policy, and those of critic, reference and inference with its placement and backend
    NAME ranks       any other of these roles
    rollout          engines with drivers and scorer
    rows             the rollout buffer

Their placement is the plan's layout. Importing libraries takes most of the startup time: `launched` lets all
workers import in parallel with each other and with the driver, so this file imports no large library itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from braid.cluster.environment import THREADS, environment
from braid.cluster.interrupts import interrupts_held
from braid.cluster.workers import Factory, Place
from braid.config.load import Loaded
from braid.config.paths import with_absolute_paths
from braid.config.roles import TrainingRole, train_config
from braid.config.schema import RunConfig
from braid.errors import ConfigError, Problem
from braid.plan import Verb, resolve
from braid.plan.available import missing_packages
from braid.plan.layout import Layout, RoleLayout, Worker

if TYPE_CHECKING:
    from braid.cluster.ray import Machines, RayGroup
    from braid.training.group import GroupBackend
    from braid.training.worker import Ranks

ROWS = "rows"
"""Name of the group of one worker that holds the rollout buffer. It is on the first machine and uses no
device."""


_READS = {"rollout": "braid.trainer.collectors", ROWS: "braid.training.rollout_buffer"}
"""Module that a group's workers import at startup; that of Ranks in all other groups."""


@contextmanager
def launched(loaded: Loaded, verb: Verb) -> Iterator[Cluster | None]:
    """Start the processes of a run on workers and stop them at the end of the block at the latest. Yields
    None for a run in one process. Raises ConfigError if a package that they need is missing."""
    loaded = with_absolute_paths(loaded)
    config = loaded.config
    plan = resolve(config, verb=verb, origin_of=loaded.origin)
    if plan.layout.mode == "in_process":
        yield None
        return
    if missing := [Problem(key, why, loaded.origin(key)) for key, why in missing_packages(config, plan)]:
        raise ConfigError(missing)
    with environment(config.cluster.variables):
        cluster = Cluster.open(config, plan.layout)
        try:
            yield cluster
        finally:
            cluster.leave()


@dataclass(slots=True)
class Cluster:
    """A connection to a Ray cluster, with the machines and the worker groups of the run. `is_own` if the run
    opened the connection and has to close it."""

    config: RunConfig
    layout: Layout
    is_own: bool
    groups: dict[str, RayGroup] = field(default_factory=dict)
    machines: Machines | None = None
    is_open: bool = True

    @classmethod
    def open(cls, config: RunConfig, layout: Layout) -> Cluster:
        """Connect to a cluster, or start a large enough one on this machine; then start the processes of the
        layout at their placement. `make` waits for them. Raises ConfigError if the cluster lacks the
        resources that the layout needs."""
        from braid.cluster.ray import Machines, RayGroup, connect, num_cluster_gpus

        finds_none = config.run.device == "auto" and not layout.has_gpus
        config = _on_one_device(config, layout)
        homes = [_home(layout, of) for of in layout.roles if of.role != "rollout"]
        names = list(dict.fromkeys([*homes, "rollout", ROWS]))
        placements = {name: _workers_of(layout, name) for name in names}
        cluster = cls(
            config, layout, connect(config.cluster, num_processes=sum(map(len, placements.values())))
        )
        shown = {str(role): text for role, text in config.cluster.group_names.items()}
        try:
            if finds_none and (num_gpus := num_cluster_gpus()):
                raise ConfigError(
                    [
                        Problem(
                            "run.device",
                            f"auto finds no GPU on this machine, and the Ray cluster has {num_gpus}; set run.device=cuda, and "
                            "cluster.devices_per_node, to use them, or run.device=cpu",
                        )
                    ]
                )
            machines = Machines(config.cluster, _num_gpus(config, layout), layout.devices_per_node)
            cluster.machines = machines
            for name, of in placements.items():
                reads = [_READS.get(name, "braid.training.worker")]
                cluster.groups[name] = RayGroup(
                    shown.get(name, name),
                    of,
                    config.cluster,
                    machines=machines,
                    reads=reads,
                    env=environment_of(config, name),
                )
        except BaseException:
            cluster.leave()
            raise
        return cluster

    def make(self, factories: Mapping[str, Factory], logs: Path) -> None:
        """Create the workers: from `factories`, keyed by group name, and Ranks in all other groups. Their log
        files are in `logs`."""
        ranks = partial(_ranks, config=self.config)
        with ThreadPoolExecutor(len(self.groups)) as pool:
            making = [
                pool.submit(group.make, factories.get(name, ranks), logs)
                for name, group in self.groups.items()
            ]
            try:
                for group in making:
                    group.result()
            except BaseException:
                self._close_groups()  # unblocks the other threads
                raise

    def backend(
        self,
        role: TrainingRole,
        *,
        total_steps: int,
        config: RunConfig | None = None,
        name: str | None = None,
    ) -> GroupBackend:
        """Create a role's model on its ranks. `config` defaults to the run's, `name` to the role's."""
        from braid.training.group import GroupBackend
        from braid.training.role_group import RoleGroup

        config = config or self.config
        role_layout = self.layout.role(role)
        assert role_layout is not None, f"{role} has no workers in this run"
        group = RoleGroup(self.groups[_home(self.layout, role_layout)], name or role)
        group.group.call("add", group.name, role, config, total_steps)
        return GroupBackend(group, balances=train_config(config, role).balance_ranks)

    def leave(self) -> None:
        """Stop all processes, disconnect, and stop the cluster if it was started for this run. Idempotent."""
        from braid.cluster.ray import disconnect

        with interrupts_held():  # takes a second or two, and stops everything that a second Ctrl-C would
            self._close_groups()
            if self.is_own and self.is_open:
                disconnect()
            self.is_open = False

    def _close_groups(self) -> None:
        for group in self.groups.values():
            group.close()
        if self.machines is not None:
            self.machines.close()


def _ranks(place: Place, *, config: RunConfig) -> Ranks:
    """See training.worker.Ranks."""
    from braid.training.worker import Ranks

    return Ranks(place, config=config)


def environment_of(config: RunConfig, name: str) -> dict[str, str | None]:
    """Environment variables of a group's processes, unless set in cluster.env."""
    if name == "rollout":  # engines in child processes inherit them, and choose their number of threads
        return {"OMP_NUM_THREADS": None, "MKL_NUM_THREADS": None}
    if name == ROWS:
        return {**THREADS}
    train = train_config(config, cast("TrainingRole", name))
    env = {**THREADS, "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if train.backend == "megatron" and train.megatron.tensor_parallel > 1:
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # orders collectives before the products that overlap them
    return env


def _on_one_device(config: RunConfig, layout: Layout) -> RunConfig:
    """The config with the device type of all workers resolved, from the layout rather than from any machine's
    devices."""
    is_cuda = config.run.device == "cuda" or (config.run.device == "auto" and layout.has_gpus)
    run = config.run.model_copy(update={"device": "cuda" if is_cuda else "cpu"})
    return config.model_copy(update={"run": run})


def _num_gpus(config: RunConfig, layout: Layout) -> list[int]:
    """Number of GPUs that the run reserves on each machine: all up to the last one that a worker uses."""
    used = (
        {device for role in layout.roles for device in role.devices} if config.run.device == "cuda" else set()
    )
    counts = {d // layout.devices_per_node: d % layout.devices_per_node + 1 for d in sorted(used)}
    return [counts.get(node, 0) for node in range(layout.num_nodes)]


def _home(layout: Layout, role_layout: RoleLayout) -> str:
    """Name of the group whose processes run a role."""
    policy = layout.role("policy")
    assert policy is not None, "the layout has no policy"
    return "policy" if role_layout.shares_processes(policy) else role_layout.role


def _workers_of(layout: Layout, name: str) -> tuple[Worker, ...]:
    role_layout = layout.role(name)
    return (Worker(0, 0, ()),) if role_layout is None else role_layout.workers
