"""Builds a run from its plan, in one process or on workers alike: `cluster` decides where things are.

env        the simulators, in one process or if they are placed apart from rollout; otherwise rollout workers
           have them
policy     the role's model; likewise critic, reference and inference
rollout    engine, environments and scorer
rows       the rollout buffer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from braid.checkpoint.store import CheckpointStore
from braid.cluster.interrupts import StopSignals
from braid.cluster.memory_record import MemoryRecorder
from braid.cluster.workers import Factory, Place, WorkerGroup
from braid.config.load import Loaded, to_yaml
from braid.config.roles import TrainingRole
from braid.config.schema import RunConfig
from braid.data.pairs import NO_PAIRS
from braid.data.worked import NO_EXAMPLES
from braid.plan import Plan
from braid.report.reporter import Reporter
from braid.rollout.collector import Collector
from braid.training.rollout_buffer import RolloutBuffer
from braid.training.worker import device_of
from braid.types import Prompt, Spaces

from .buffer import Buffer
from .checkpoints import Checkpoints, Stateful
from .checks import Checks
from .cluster import ROWS, Cluster, OneProcess, RayCluster
from .evaluation import Evaluation
from .evaluation_run import EvaluationRun, Trained
from .imitation import Imitation
from .inputs import TextInputs
from .keys import REPLAY_KEY
from .learner import Learner
from .models import Models
from .off_policy import OffPolicy, ReplayState
from .on_policy import OnPolicy
from .pipeline import Pipeline, PipelineSettings
from .pipelined import Pipelined
from .preferences import Preferences, Preferring
from .progress import Progress
from .reports import Reports
from .rollouts import Rollouts
from .run import Run
from .sampling import Sampling
from .supervised import config_of, sampler_of, supervised_of
from .watch import LearningWatch
from .weight_sync import send_options

if TYPE_CHECKING:
    from braid.envs.kinds import SimulatorEnv
    from braid.envs.simulators.base import Simulator
    from braid.envs.simulators.remote import Peer, SimulatorHost
    from braid.rollout.engines.hosted import EngineHost
    from braid.training.group import ModelGroup
    from braid.training.soft_actor_critic import SoftActorCritic


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What a run is built from: its config, the plan that follows from it, the data of a text run, and for
    `braid eval` the checkpoint to evaluate."""

    loaded: Loaded
    plan: Plan
    inputs: TextInputs | None
    trained: Trained | None = None


def open_cluster(spec: RunSpec, launched: RayCluster | None, *, is_restart: bool) -> Cluster:
    """The processes of a run: those of `launched` if it is open and has no workers yet."""
    config, plan = spec.loaded.config, spec.plan
    if plan.layout.mode == "in_process":
        return OneProcess(config, has_threads=plan.is_pipelined)
    if launched and launched.is_open:
        return launched
    return RayCluster.open(config, plan.layout, is_pipelined=plan.is_pipelined, is_restart=is_restart)


def build(
    spec: RunSpec, reporter: Reporter, store: CheckpointStore, stop: StopSignals, cluster: Cluster
) -> Run:
    """Build a run in its initial state on the processes of `cluster`, which the caller closes."""
    config, plan = cluster.config, spec.plan
    workers = _Workers(spec, cluster, reporter.run_dir.path)
    models, preferences = workers.models, workers.preferences
    sampler = sampler_of(plan, workers.supervised, config, spec.inputs)
    if preferences is not None:
        sampler = preferences.sampler
    memory = None
    if config.train.record_memory:
        device = device_of(spec.loaded.config)  # the driver's
        memory = MemoryRecorder(reporter.run_dir.memory, device, models.held_bytes)
    reports = Reports(reporter, LearningWatch(config, plan), memory)
    checks = Checks(config, plan, reporter)
    sampling = Sampling(config, sampler, models, reports, stop, checks)
    learner = Learner(config, plan, models, workers.buffer, reports, checks)
    take = partial(checks.draw, sampler)
    pipeline = Pipeline(settings_of(config, plan), take) if plan.is_pipelined else None
    others: dict[str, Stateful] = {
        "sampler": sampler,
        "reward_moments": learner.reward_moments,
        "checks": checks,
    }
    if pipeline is not None:
        others["pipeline"] = pipeline
    if preferences is not None:
        others |= {"preferences": preferences}
    if preferences is not None and plan.trains_reward_model:
        models.export = partial(preferences.export_reward_model, config)
    about = {"run_id": reporter.run_dir.run_id, "config": to_yaml(spec.loaded)}
    sac = workers.sac
    large: dict[str, Stateful] = {} if sac is None else {"sac": ReplayState(sac)}
    checkpoints = Checkpoints(store, models, others, about, large)
    progress = Progress(config.checkpoint, checkpoints, reports, stop, plan.last_round, config.eval.patience)
    shared = (models, sampling, Evaluation(config, workers.eval_prompts, sampling), progress)
    if plan.verb == "eval":
        return EvaluationRun(*shared, spec.trained)
    if preferences is not None:
        return Preferring(*shared, preferences)
    if plan.verb == "sft":
        assert workers.supervised is not None, "`sft` is set"
        return Imitation(*shared, workers.supervised)
    if sac is not None:
        return OffPolicy(*shared, sac)
    return OnPolicy(*shared, learner) if pipeline is None else Pipelined(*shared, learner, pipeline)


class _Workers:
    """The workers of a run, with what the driver needs of them.

    An engine that reads the policy's own tensors is built after it. Others come before all models: they size
    their caches by the memory that they find free, and then sleep if models use their devices too.
    """

    def __init__(self, spec: RunSpec, cluster: Cluster, run_dir: Path) -> None:
        self._spec, self._cluster, self._logs = spec, cluster, run_dir / "logs"
        self._spaces: Spaces | None = None
        config, plan, inputs = cluster.config, spec.plan, spec.inputs
        is_local = isinstance(cluster, OneProcess)
        reads_policy = is_local and not config.rollout.engine.is_served
        section = {"prefer": config.prefer, "sft": config.sft}.get(plan.verb)
        self._training_config = config if section is None else config_of(config, section)
        self.supervised = supervised_of(config, plan, inputs, self._new_supervised)
        new_simulator = self._make_simulators(reads_policy=reads_policy) if inputs is None else None
        policy = self._new_policy() if reads_policy else None
        groups = self._make_rollout(new_simulator, run_dir)
        self.buffer = Buffer(groups[ROWS])
        rollouts = self._rollouts(groups, run_dir)
        rollouts.sleep()
        if inputs is None and not is_local:
            self._spaces = rollouts.workers.first(Collector).spaces()
        if inputs is None and self.supervised is not None:
            from .demonstrations import check_images

            check_images(config, self.supervised.rows, rollouts.workers.first(Collector).spaces())
        by_role = {
            "policy": policy or self._new_policy(),
            "critic": self._new_model("critic", plan.num_critic_steps),
            **self._new_references(),
            "inference": self._new_model("inference", 0),
        }
        self.models = Models(
            config,
            {role: model for role, model in by_role.items() if model is not None},
            rollouts,
            warm_up=self.supervised if plan.verb in ("train", "prefer") else None,
            export=None if inputs is None else partial(cluster.export, inputs.tokenizer),
        )
        if self.supervised is not None and plan.verb == "sft":
            self.supervised.teacher = self.models.reference

    @property
    def preferences(self) -> Preferences | None:
        """The pairs of `braid prefer` with the models that learn from them."""
        config, inputs = self._cluster.config.prefer, self._spec.inputs
        if self._spec.plan.verb != "prefer":
            return None
        assert config is not None, "the plan checks that it is there"
        assert inputs is not None, "the plan refuses simulators"
        return Preferences.of(config, self._cluster.config.run.seed, inputs, self.models)

    @property
    def sac(self) -> WorkerGroup[SoftActorCritic] | None:
        """What learns by soft actor-critic, beside the policy; None without it."""
        if self._spec.plan.verb != "train" or self._cluster.config.sac is None:
            return None
        from braid.training.soft_actor_critic import make_sac

        config = self._cluster.config
        key = (config.run.seed, REPLAY_KEY)
        return self._cluster.make({"sac": partial(make_sac, config=config, key=key)}, self._logs)["sac"]

    @property
    def eval_prompts(self) -> Mapping[str, Sequence[Prompt]]:
        """The prompts of the evaluation by source."""
        if self._spec.inputs is not None:
            return self._spec.inputs.eval.by_source()
        prompts = self._reset_states()["eval"]
        return {prompts[0].source: prompts}

    def _reset_states(self) -> Mapping[Any, Sequence[Prompt]]:
        return self._cluster.config.simulator.reset_states()

    def _make_simulators(self, *, reads_policy: bool) -> Factory[Simulator]:
        """Create the simulators that are not the rollout workers' own; returns what creates a rollout
        worker's."""
        config, cluster = self._cluster.config, self._cluster
        new_simulator = partial(_simulator, config, self._spec.loaded.base_dir)
        if reads_policy:  # which has the shapes of the simulator's observations and actions
            cluster.make({"env": new_simulator}, self._logs)
        elif self._spec.plan.layout.role("env"):
            assert isinstance(cluster, RayCluster), "workers are on Ray"
            num_rollout = cluster.groups["rollout"].size
            host = partial(_simulator_host, config.simulator, new_simulator, num_rollout)
            cluster.make({"env": host}, self._logs)
            return partial(_remote_simulator, cluster.groups["env"].peers())
        return new_simulator

    def _make_rollout(
        self, new_simulator: Factory[Simulator] | None, run_dir: Path
    ) -> dict[str, WorkerGroup[Any]]:
        """Create the rollout workers and the rollout buffer. Returns all groups by name."""
        spec, plan = self._spec, self._spec.plan
        # The functions of the examples may not exist in workers, and only the driver reads pairs.
        inputs = (
            None
            if spec.inputs is None
            else replace(
                spec.inputs,
                examples=NO_EXAMPLES,
                held_out_examples=NO_EXAMPLES,
                pairs=NO_PAIRS,
                held_out=NO_PAIRS,
            )
        )
        collector = partial(
            _collector,
            new_simulator=new_simulator,
            config=self._cluster.config,
            plan=plan,
            base_dir=spec.loaded.base_dir,
            inputs=inputs,
            run_dir=run_dir,
        )
        factories: dict[str, Factory[Any]] = {"rollout": collector, ROWS: partial(_rollout_buffer, plan)}
        if plan.layout.role("reward") is not None:
            assert isinstance(self._cluster, RayCluster), "workers are on Ray"
            hosts = self._cluster.groups["reward"].peers()
            factories["rollout"] = partial(collector, judge_hosts=hosts)
            factories["reward"] = partial(
                _judge_host, config=self._cluster.config, plan=plan, run_dir=run_dir
            )
        return self._cluster.make(factories, self._logs)

    def _rollouts(self, groups: Mapping[str, WorkerGroup[Any]], run_dir: Path) -> Rollouts:
        config, plan = self._cluster.config, self._spec.plan
        prompts = self._reset_states() if self._spec.inputs is None else self._spec.inputs.prompts
        rollouts = Rollouts(groups["rollout"], prompts, plan.engines_in_turns)
        if "reward" in groups:
            rollouts.judges, rollouts.judges_in_turns = groups["reward"], plan.judges_in_turns
        if not isinstance(self._cluster, OneProcess) and not plan.trains_reward_model:
            device = torch.device(config.run.device)  # resolved by the cluster: the driver may have no GPU
            rollouts.policy, rollouts.merged = groups["policy"], config.rollout.engine.is_served
            rollouts.sending = send_options(config, plan.layout, str(run_dir / "weights"), device)
        return rollouts

    def _new_policy(self) -> ModelGroup:
        plan = self._spec.plan
        if plan.verb == "sft" and self.supervised is not None:
            return self.supervised.model
        if self._cluster.config.sac is not None:
            return self._new_trained("policy", 0)  # its optimizer is SAC's
        num_steps = plan.num_schedule_steps
        if plan.verb == "prefer":
            assert plan.prefer_steps is not None, "the pairs have been read"
            num_steps = plan.prefer_steps
        return self._new_trained("policy", num_steps)

    def _new_supervised(self) -> ModelGroup:
        plan = self._spec.plan
        assert plan.sft_steps is not None, "the examples have been read"
        return self._cluster.model(
            "policy",
            total_steps=plan.sft_steps,
            config=config_of(self._training_config, self._cluster.config.sft),
            name="policy" if plan.verb == "sft" else "warm_up",
            spaces=self._spaces,
        )

    def _new_model(self, role: TrainingRole, total_steps: int) -> ModelGroup | None:
        if self._spec.plan.layout.role(role) is None:
            return None
        return self._new_trained(role, total_steps)

    def _new_references(self) -> dict[str, ModelGroup | None]:
        """The reference, or each teacher; a teacher is `reference_` with its index."""
        reference = self._training_config.reference
        if not reference.teachers:
            return {"reference": self._new_model("reference", 0)}
        if self._spec.plan.layout.role("reference") is None:
            return {}
        return {
            (name := f"reference_{i}"): self._cluster.model(
                "reference",
                total_steps=0,
                config=self._training_config.model_copy(update={"reference": reference.of_teacher(teacher)}),
                name=name,
            )
            for i, teacher in enumerate(reference.teachers)
        }

    def _new_trained(self, role: TrainingRole, total_steps: int) -> ModelGroup:
        return self._cluster.model(
            role,
            total_steps=total_steps,
            config=self._training_config,
            spaces=self._spaces,
            is_reward_model=self._spec.plan.trains_reward_model,
        )


def _simulator(config: RunConfig, base_dir: Path, _: Place, num_envs: int | None = None) -> Simulator:
    return config.simulator.make(base_dir, config.rollout.env_timeout_s, num_envs)


def _simulator_host(
    env: SimulatorEnv,
    new_simulator: Callable[..., Simulator],
    num_rollout: int,
    place: Place,
) -> SimulatorHost:
    """This worker's part of the environments of one of `num_rollout` rollout workers."""
    from braid.envs.simulators.remote import SimulatorHost

    parts = place.size // num_rollout
    first, last = (env.num_envs * (place.rank % parts + i) // parts for i in (0, 1))
    return SimulatorHost(new_simulator(place, num_envs=last - first))


def _remote_simulator(peers: Sequence[Peer], place: Place) -> Simulator:
    from braid.envs.simulators.remote import RemoteSimulator

    each = len(peers) // place.size
    return RemoteSimulator(peers[place.rank * each : (place.rank + 1) * each])


def _collector(place: Place, **settings: Any) -> Collector:
    """The collector of one rollout worker."""
    from .collectors import make_collector  # models, engines and rewards: of no use to a driver with workers

    return make_collector(place, **settings)


def _judge_host(place: Place, **settings: Any) -> EngineHost:
    """A worker of the role `reward`."""
    from .judges import make_host

    return make_host(place, **settings)


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
