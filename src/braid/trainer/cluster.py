"""Where the workers of a run are: all in the driver's process, or in processes of a Ray cluster:

    policy ranks     policy, and those of critic, reference and inference with its placement and backend
    NAME ranks       any other of these roles
    env              simulators, if they are placed apart from rollout
    reward           judges with models of their own, likewise
    rollout          engines with drivers and scorer
    rows             the rollout buffer

Each group of ranks is one of training.worker.Rank, beside which the models are added. Their placement is the
plan's layout. Importing libraries takes most of the startup time: `launched` lets all workers import in
parallel with each other and with the driver, so this file imports no large library itself.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from braid.cluster.environment import THREADS, environment
from braid.cluster.interrupts import interrupts_held
from braid.cluster.workers import Factory, InProcessGroup, Place, T, WorkerGroup
from braid.config.cluster import Role
from braid.config.load import Loaded
from braid.config.paths import with_absolute_paths
from braid.config.roles import TrainingRole, train_config
from braid.config.schema import RunConfig
from braid.errors import ConfigError, Problem
from braid.plan import Plan
from braid.plan.layout import Layout, RoleLayout, Worker
from braid.plan.threads import num_sharing

from .runnable import run_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from braid.cluster.ray import Machines, RayGroup
    from braid.training.group import ModelGroup
    from braid.training.worker import Rank
    from braid.types import Spaces

ROWS = "rows"
"""Name of the group that holds the rollout buffer, on the rollout workers' machines and without devices."""


_READS = {
    "env": "braid.envs.simulators.processes",
    "rollout": "braid.trainer.collectors",
    "reward": "braid.trainer.judges",
    ROWS: "braid.training.rollout_buffer",
}
"""Module that a group's workers import at startup; those of Rank and its models in all other groups."""
_RANKS_READ = ("braid.training.worker", "braid.models.selfcheck", "braid.models.roles")


@contextmanager
def launched(loaded: Loaded, plan: Plan) -> Iterator[RayCluster | None]:
    """Start the processes of a run on workers and stop them at the end of the block at the latest. Yields
    None for a run in one process. Raises ConfigError, before anything starts, if this machine cannot run
    it."""
    loaded = with_absolute_paths(loaded)
    config = loaded.config
    if plan.layout.mode == "in_process":
        yield None
        return
    with environment(config.cluster.variables):
        if problems := run_problems(config, plan):
            raise ConfigError([loaded.placed(problem) for problem in problems])
        cluster = RayCluster.open(config, plan.layout, is_pipelined=plan.is_pipelined)
        try:
            yield cluster
        finally:
            cluster.leave()


class Cluster(ABC):
    """The workers of a run."""

    config: RunConfig

    @abstractmethod
    def make(self, factories: Mapping[str, Factory[Any]], logs: Path) -> dict[str, WorkerGroup[Any]]:
        """Create the workers of `factories`, by name of the group, with log files in `logs`. Returns all
        groups."""

    def model(
        self,
        role: TrainingRole,
        *,
        total_steps: int,
        config: RunConfig | None = None,
        name: str | None = None,
        spaces: Spaces | None = None,
        is_reward_model: bool = False,
    ) -> ModelGroup:
        """Create a role's model on its ranks. `config` defaults to the run's, `name` to the role's; `spaces`
        and `is_reward_model` as in make_backend."""
        from braid.training.group import ModelGroup
        from braid.training.worker import make_backend

        config = config or self.config
        factory = partial(
            make_backend,
            role=role,
            config=config,
            total_steps=total_steps,
            spaces=spaces,
            is_reward_model=is_reward_model,
        )
        ranks = self._add(role, name or role, factory)
        return ModelGroup.of(ranks, balances=train_config(config, role).balance_ranks)

    @abstractmethod
    def _add(self, role: TrainingRole, name: str, factory: Factory[T]) -> WorkerGroup[T]:
        """Create workers where the models of `role` are."""

    @abstractmethod
    def export(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""

    @abstractmethod
    def leave(self) -> None:
        """Stop all workers and their processes. Idempotent."""


class OneProcess(Cluster):
    """All workers in this process, where they share weights."""

    def __init__(self, config: RunConfig, *, has_threads: bool) -> None:
        """`has_threads` as in InProcessGroup."""
        self.config, self._has_threads = config, has_threads
        self._workers: dict[str, Any] = {}
        self._groups: dict[str, WorkerGroup[Any]] = {}

    def make(self, factories: Mapping[str, Factory[Any]], logs: Path) -> dict[str, WorkerGroup[Any]]:  # noqa: ARG002
        """Create the workers of `factories` in this process, without log files. Returns all groups."""
        for name, factory in factories.items():
            self._groups[name] = self._group(name, factory)
        return self._groups

    def _group(self, name: str, factory: Factory[T]) -> InProcessGroup[T]:
        return InProcessGroup(name, factory, workers=self._workers, has_threads=self._has_threads)

    def _add(self, role: TrainingRole, name: str, factory: Factory[T]) -> WorkerGroup[T]:  # noqa: ARG002
        return self._group(name, factory)

    def export(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        from braid.models.export import export_model

        export_model(self._workers["policy"].model, tokenizer, folder)

    def leave(self) -> None:
        """Close all groups, the last one first, and release their models."""
        for group in reversed(self._groups.values()):
            group.close()
        self._workers.clear()


class RayCluster(Cluster):
    """A connection to a Ray cluster, with the machines and the worker groups of the run."""

    def __init__(self, config: RunConfig, layout: Layout, *, is_own: bool) -> None:
        """`is_own` if the run opened the connection and has to close it."""
        self.config, self.layout, self.is_own, self.is_open = config, layout, is_own, True
        self.groups: dict[str, RayGroup[Any]] = {}
        self.machines: Machines | None = None

    @classmethod
    def open(
        cls, config: RunConfig, layout: Layout, *, is_pipelined: bool, is_restart: bool = False
    ) -> RayCluster:
        """Connect to a cluster, or start a large enough one on this machine; then start the processes of the
        layout at their placement. `make` waits for them. A restart waits for machines that the cluster has
        lost. Raises ConfigError if the cluster lacks the resources that the layout needs."""
        from braid.cluster.ray import Machines, RayGroup, connect, num_cluster_gpus

        finds_none = config.run.device == "auto" and not layout.has_gpus
        config = _on_one_device(config, layout)
        homes = [role.role if role.role in _READS else _home(layout, role) for role in layout.roles]
        names = list(dict.fromkeys([*homes, ROWS]))
        workers = {name: _workers(config, layout, name) for name in names}
        is_own = connect(config.cluster, num_processes=sum(map(len, workers.values())))
        cluster = cls(config, layout, is_own=is_own)
        shown = {str(role): text for role, text in config.cluster.group_names.items()}
        try:
            if finds_none and (num_gpus := num_cluster_gpus()):
                raise ConfigError(
                    [
                        Problem(
                            "run.device",
                            f"auto finds no GPU on this machine, and the Ray cluster has {num_gpus}; set "
                            "run.device=cuda, and cluster.devices_per_node, to use them, or run.device=cpu",
                        )
                    ]
                )
            machines = Machines(
                config.cluster, _num_gpus(config, layout), layout.devices_per_node, is_restart=is_restart
            )
            cluster.machines = machines
            for name, members in workers.items():
                reads = [_READS[name]] if name in _READS else _RANKS_READ
                cluster.groups[name] = RayGroup(
                    shown.get(name, name),
                    members,
                    config.cluster,
                    machines=machines,
                    reads=reads,
                    env=environment_of(config, name),
                    sharing=[_num_sharing(config, layout, name, worker, is_pipelined) for worker in members],
                )
        except BaseException:
            cluster.leave()
            raise
        return cluster

    def make(self, factories: Mapping[str, Factory[Any]], logs: Path) -> dict[str, WorkerGroup[Any]]:
        """See Cluster. The first call also creates the Ranks of the other groups."""
        ranks = {name: partial(_rank, config=self.config) for name in self.groups if name not in _READS}
        made = {name: self.groups[name] for name in (*ranks, *factories) if not self.groups[name].is_made}
        with ThreadPoolExecutor(len(made)) as pool:
            making = [
                pool.submit(group.make, factories.get(name) or ranks[name], logs)
                for name, group in made.items()
            ]
            try:
                for group in making:
                    group.result()
            except BaseException:
                self._close_groups()  # unblocks the other threads
                raise
        return dict(self.groups)

    def _add(self, role: TrainingRole, name: str, factory: Factory[T]) -> WorkerGroup[T]:
        placed = self.layout.role(role)
        assert placed is not None, f"{role} has no workers in this run"
        return self.groups[_home(self.layout, placed)].add(name, factory)

    def export(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """See Cluster. The first rank writes it."""
        from braid.training.worker import Rank

        self.groups["policy"].call(Rank.export, tokenizer, folder.absolute())

    def leave(self) -> None:
        """See Cluster. Disconnects, and stops the cluster if it was started for this run."""
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


def _rank(place: Place, *, config: RunConfig) -> Rank:
    """A Rank; its module is imported only in the process that runs it."""
    from braid.training.worker import Rank

    return Rank(place, config=config)


def environment_of(config: RunConfig, name: str) -> dict[str, str | None]:
    """Environment variables of a group's processes, unless set in cluster.env."""
    if name == ROWS:
        return {**THREADS}
    asked = config.run.num_threads
    threads = os.environ.get("OMP_NUM_THREADS") if asked == "auto" else str(asked)
    env = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": None,
    }  # None: its share of the cores. Child processes inherit it
    if name in ("rollout", "env", "reward"):
        return env
    train = train_config(config, cast("TrainingRole", name))
    env |= {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    return env | train.backend.environment()


def _num_sharing(config: RunConfig, layout: Layout, name: str, worker: Worker, is_pipelined: bool) -> int:
    """Number of processes with which a worker of a group shares its machine's cores."""
    role = cast("Role", "rollout" if name == ROWS else name)
    return num_sharing(config, layout, role, worker.node, is_pipelined=is_pipelined)


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


def _home(layout: Layout, placed: RoleLayout) -> str:
    """Name of the group whose processes run a role."""
    policy = layout.role("policy")
    assert policy is not None, "the layout has no policy"
    return "policy" if placed.shares_processes(policy) else placed.role


def _workers(config: RunConfig, layout: Layout, name: str) -> tuple[Worker, ...]:
    if name != ROWS:
        placed = layout.role(name)
        assert placed is not None, f"{name} has no workers in this run"
        return placed.workers
    nodes = [worker.node for worker in _workers(config, layout, "rollout")]
    return tuple(Worker(i, nodes[i % len(nodes)], ()) for i in range(config.cluster.buffer_processes))
