"""Builds the parts of a run from its plan, in one process or on workers alike: `cluster` decides where things are.

env        the simulators, in one process or if they are placed apart from rollout; otherwise rollout workers have them
policy     the role's model; likewise critic, reference and inference
rollout    engine, environments and scorer
rows       the rollout buffer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from braid.checkpoint.store import CheckpointStore
from braid.cluster.memory_record import MemoryRecorder
from braid.cluster.workers import Place
from braid.config.env import SimulatorEnv
from braid.config.load import Loaded, to_yaml
from braid.config.roles import TrainingRole
from braid.config.schema import RunConfig
from braid.data.worked import NO_EXAMPLES
from braid.functions import GIVEN
from braid.plan import Plan
from braid.report.reporter import Reporter
from braid.rollout.collector import Collector
from braid.training.rollout_buffer import RolloutBuffer
from braid.training.worker import device_of

from .buffer import Buffer
from .cluster import ROWS, Cluster, OneProcess, RayCluster
from .costs import held_bytes
from .inputs import TextInputs, environment_of, reset_states, rules_of
from .parts import Parts
from .pipeline import Pipeline, PipelineSettings
from .rollouts import Rollouts
from .supervised import sampler_of, supervised_of, warm_up_config
from .weight_sync import WeightSync, send_options

if TYPE_CHECKING:
    from braid.envs.simulators.base import Simulator
    from braid.envs.simulators.remote import Peer, SimulatorHost
    from braid.training.group import ModelGroup


def build(
    loaded: Loaded,
    plan: Plan,
    inputs: TextInputs | None,
    reporter: Reporter,
    store: CheckpointStore,
    cluster: RayCluster | None = None,
    *,
    is_restart: bool = False,
) -> Parts:
    """Build all parts of a run, in their initial state; `inputs` of a text run. `cluster` is used if it is open and
    has no workers yet. If building fails, all processes are stopped."""
    where: Cluster
    if plan.layout.mode == "in_process":
        where = OneProcess(loaded.config, has_threads=plan.is_pipelined)
    else:
        where = (
            cluster
            if cluster and cluster.is_open
            else RayCluster.open(
                loaded.config, plan.layout, is_pipelined=plan.is_pipelined, is_restart=is_restart
            )
        )
    try:
        parts = _build(loaded, plan, inputs, reporter, store, where)
    except BaseException:
        where.leave()
        raise
    if plan.is_pipelined:
        parts.pipeline = Pipeline(settings_of(loaded.config, plan), parts.sampler.take)
    if loaded.config.train.record_memory:
        parts.memory = MemoryRecorder(
            reporter.run_dir.memory, device_of(loaded.config), partial(held_bytes, parts)
        )
    return parts


def _build(
    loaded: Loaded,
    plan: Plan,
    inputs: TextInputs | None,
    reporter: Reporter,
    store: CheckpointStore,
    cluster: Cluster,
) -> Parts:
    """An engine that reads the policy's own tensors is built after it. Others come before all models: they size
    their caches by the memory that they find free, and then sleep if models use their devices too."""
    config, run_dir, is_local = cluster.config, reporter.run_dir.path, isinstance(cluster, OneProcess)
    reads_policy = is_local and config.rollout.engine == "native"

    def new_supervised() -> ModelGroup:
        name = "policy" if plan.verb == "sft" else "warm_up"
        settings = warm_up_config(config)
        return cluster.model("policy", total_steps=plan.sft_steps, config=settings, name=name, spaces=spaces)

    def model(role: TrainingRole, total_steps: int) -> ModelGroup | None:
        return cluster.model(role, total_steps=total_steps, spaces=spaces) if plan.layout.role(role) else None

    def new_policy() -> ModelGroup:
        if plan.verb == "sft" and supervised is not None:
            return supervised.model
        return cluster.model("policy", total_steps=plan.num_schedule_steps, spaces=spaces)

    supervised = supervised_of(config, plan, inputs, new_supervised)
    new_simulator, spaces = None, None
    sampler = sampler_of(plan, supervised, config, inputs)
    if inputs is None:
        assert isinstance(config.env, SimulatorEnv), "other environments have text inputs"
        prompts = reset_states(config.env)
        eval_prompts = {prompts["eval"][0].source: prompts["eval"]}
        new_simulator = partial(_simulator, config, loaded.base_dir)
        if reads_policy:  # which has the shapes of the simulator's observations and actions
            cluster.make({"env": new_simulator}, run_dir / "logs")
        elif plan.layout.role("env"):
            assert isinstance(cluster, RayCluster), "workers are on Ray"
            num_rollout = cluster.groups["rollout"].size
            cluster.make(
                {"env": partial(_simulator_host, dict(GIVEN), config.env, new_simulator, num_rollout)},
                run_dir / "logs",
            )
            new_simulator = partial(_remote_simulator, cluster.groups["env"].peers())
    else:
        prompts, eval_prompts = inputs.prompts, inputs.eval.by_source()
    policy = new_policy() if reads_policy else None
    given = {
        "new_simulator": new_simulator,
        "config": config,
        "plan": plan,
        "base_dir": loaded.base_dir,
        "inputs": inputs
        and replace(inputs, examples=NO_EXAMPLES),  # their functions may not exist in workers
        "run_dir": run_dir,
    }
    groups = cluster.make(
        {
            "rollout": partial(_collector, dict(GIVEN), **given),
            ROWS: partial(_rollout_buffer, plan),
        },
        run_dir / "logs",
    )
    weight_sync = None
    if not is_local:
        device = torch.device(config.run.device)  # resolved by the cluster: the driver may have no GPU
        options = send_options(config, plan.layout, str(run_dir / "weights"), device)
        merged = config.rollout.engine != "native"
        weight_sync = WeightSync(groups["policy"], groups["rollout"], options, merged=merged)
    rollouts = Rollouts(groups["rollout"], prompts, weight_sync, plan.engines_in_turns)
    rollouts.sleep()
    if inputs is None and not is_local:
        spaces = rollouts.spaces()
    if inputs is None and supervised is not None:
        from .demonstrations import check_images

        check_images(config, supervised.rows, rollouts.spaces())
    return Parts(
        config=config,
        plan=plan,
        reporter=reporter,
        store=store,
        cluster=cluster,
        sampler=sampler,
        eval_prompts=eval_prompts,
        rollouts=rollouts,
        buffer=Buffer(groups[ROWS]),
        policy=policy or new_policy(),
        critic=model("critic", plan.num_critic_steps),
        reference=model("reference", 0),
        inference=model("inference", 0),
        supervised=supervised,
        tokenizer=None if inputs is None else inputs.tokenizer,
        about={"run_id": reporter.run_dir.run_id, "config": to_yaml(loaded)},
    )


def _simulator(config: RunConfig, base_dir: Path, _: Place, num_envs: int | None = None) -> Simulator:
    """`num_envs` defaults to that of the config."""
    from braid.envs.simulators.processes import SimulatorProcesses
    from braid.envs.simulators.vector import make_simulator

    env = config.env
    assert isinstance(env, SimulatorEnv), "other environments have text inputs"
    of = environment_of(env)
    make: Callable[..., Simulator] = make_simulator
    if env.processes:
        timeout_s = config.rollout.env_timeout_s
        make = partial(SimulatorProcesses, num_processes=env.processes, timeout_s=timeout_s)
    return make(
        of.id,
        num_envs or env.num_envs,
        of.kwargs,
        base_dir=base_dir,
        rules=rules_of(env),
        is_vectorized=of.is_vectorized,
    )


def _simulator_host(
    functions: Mapping[str, Callable[..., Any]],
    env: SimulatorEnv,
    new_simulator: Callable[..., Simulator],
    num_rollout: int,
    place: Place,
) -> SimulatorHost:
    """This worker's part of the environments of one of `num_rollout` rollout workers; `functions` are those of GIVEN."""
    from braid.envs.simulators.remote import SimulatorHost

    GIVEN.update(functions)
    parts = place.size // num_rollout
    first, last = (env.num_envs * (place.rank % parts + i) // parts for i in (0, 1))
    return SimulatorHost(new_simulator(place, num_envs=last - first))


def _remote_simulator(peers: Sequence[Peer], place: Place) -> Simulator:
    from braid.envs.simulators.remote import RemoteSimulator

    each = len(peers) // place.size
    return RemoteSimulator(peers[place.rank * each : (place.rank + 1) * each])


def _collector(functions: Mapping[str, Callable[..., Any]], place: Place, **given: Any) -> Collector:
    """See collectors.make_collector; `functions` are those of GIVEN."""
    from .collectors import make_collector  # models, engines and rewards: of no use to a driver with workers

    GIVEN.update(functions)
    return make_collector(place, **given)


def _rollout_buffer(plan: Plan, place: Place) -> RolloutBuffer:
    return RolloutBuffer(plan.recipe, plan.aggregation_constant, place.rank)


def settings_of(config: RunConfig, plan: Plan) -> PipelineSettings:
    """The settings of a run's pipeline."""
    pipeline, size = config.pipeline, config.rollout.prompts_per_round
    assert pipeline is not None, "the run is not pipelined"
    return PipelineSettings(
        max_lag=pipeline.max_lag,
        groups_in_flight=pipeline.groups_in_flight or (pipeline.max_lag + 1) * size,
        on_new_weights=pipeline.on_new_weights,
        over_lag=pipeline.over_lag,
        prompts_per_round=size,
        num_rounds=plan.num_rounds,
        then=config.rollout.filter.then,
        max_batches=config.rollout.filter.max_batches,
    )
