"""From a loaded config to the parts of a run: the one place that knows which class serves which setting.

A run in one process has everything here, and its engine samples with the very tensors that are trained. A run on workers
has only the loop here: each training role, the rollout workers and the round's rows are in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from braid.checkpoint.export import export_model
from braid.checkpoint.store import CheckpointStore
from braid.config.load import Loaded
from braid.config.rollout import GymnasiumEnv
from braid.config.schema import RunConfig
from braid.data.sampler import PromptSampler
from braid.data.worked import Example
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.models.causal_lm import CausalLM
from braid.models.mlp import MlpPolicy, MlpValue
from braid.models.roles import make_critic, make_policy, make_reference
from braid.plan import Plan
from braid.report.reporter import Reporter
from braid.rollout.engines.native import NativeEngine
from braid.rollout.engines.published import RemoteEngine
from braid.rollout.engines.router import Router
from braid.runtime.memory_record import MemoryRecorder
from braid.runtime.workers import InProcessGroup
from braid.training.experience import Experience
from braid.training.group import GroupBackend
from braid.types import Row
from braid.weights.fingerprint import check_published

from .collectors import (
    NUM_RESET_STATES,
    make_collector,
    native_engine,
    reset_states,
    simulator_collector,
    text_collector,
)
from .costs import held_bytes
from .data_plane import DataPlane
from .engines import PublicationHere, as_one, engines_here
from .inputs import TextInputs, check_sources, read_inputs
from .parts import Parts
from .publication import Publication, send_options
from .roles import backend_here, device_of, export_policy, roles_here, roles_on_workers
from .rollouts import Rollouts
from .supervised import Supervised

if TYPE_CHECKING:
    from .cluster import Cluster

__all__ = ["build", "read_inputs"]


def build(
    loaded: Loaded,
    plan: Plan,
    inputs: TextInputs | None,
    reporter: Reporter,
    store: CheckpointStore,
    cluster: Cluster | None = None,
) -> Parts:
    """All parts of a run, in the state that a fresh start has. A `cluster` that is open, and has no workers yet, is used."""
    if inputs is None:
        parts = _build_simulator(loaded, plan, reporter, store)
    else:
        if plan.verb == "train":
            check_sources(loaded, inputs)
        if plan.layout.mode == "in_process":
            parts = _build_here(loaded, plan, inputs, reporter, store)
        else:
            parts = _build_on_workers(loaded, plan, inputs, reporter, store, cluster)
    if loaded.config.train.record_memory:
        parts.memory = MemoryRecorder(
            reporter.run_dir.memory, device_of(loaded.config), partial(held_bytes, parts)
        )
    return parts


def _build_here(
    loaded: Loaded, plan: Plan, inputs: TextInputs, reporter: Reporter, store: CheckpointStore
) -> Parts:
    """Everything with text, in this process."""
    config, device = loaded.config, device_of(loaded.config)
    lm = make_policy(config, device)
    engine = _engine_here(config, plan, inputs, lm, reporter)
    keeps_weights = isinstance(engine, NativeEngine) and engine.shares_weights

    def new_supervised() -> GroupBackend:
        warm = _warm_up_config(config)
        return backend_here(
            "policy", lm, warm, device, total_steps=plan.sft_steps, keeps_weights=keeps_weights
        )

    supervised = _supervised_of(config, plan, inputs.examples, new_supervised)
    critic = make_critic(config, device, lm) if plan.needs_critic else None
    reference = make_reference(config, device, lm) if plan.needs_reference else None
    roles = roles_here(
        config, plan, lm, critic, reference, device, supervised=supervised, keeps_weights=keeps_weights
    )
    collector = text_collector(config, plan, loaded.base_dir, inputs, engine)
    return Parts(
        config=config,
        plan=plan,
        reporter=reporter,
        store=store,
        sampler=_sampler_of(plan, supervised, config, inputs),
        eval_prompts=inputs.eval.by_source(),
        rollouts=Rollouts(
            InProcessGroup("rollout", lambda _: collector),
            inputs.prompts,
            None if isinstance(engine, NativeEngine) else PublicationHere(lm, engine, collector),
            plan.layout.engines_in_turns,
        ),
        data=_data_here(plan),
        policy=roles.policy,
        critic=roles.critic,
        reference=roles.reference,
        supervised=supervised,
        follow_policy=roles.follow_policy,
        update_reference=roles.update_reference,
        export=partial(export_model, lm, inputs.tokenizer),
        check_weights=_weight_check(config, lm, engine, reporter)
        if config.rollout.check_weights and isinstance(engine, NativeEngine)
        else None,
    )


def _engine_here(
    config: RunConfig, plan: Plan, inputs: TextInputs, lm: CausalLM, reporter: Reporter
) -> NativeEngine | RemoteEngine | Router:
    """The native engine on the trainer's own model, or the one that the config names, beside this process."""
    if config.rollout.engine == "native":
        return native_engine(config, inputs, lm)
    folder = reporter.run_dir.path
    is_cuda = device_of(config).type == "cuda"
    sending = send_options(config, plan.layout, str(folder / "publications"), is_cuda=is_cuda)
    return as_one(engines_here(config, plan, inputs.tokenizer, sending, folder / "logs"))


def _build_on_workers(
    loaded: Loaded,
    plan: Plan,
    inputs: TextInputs,
    reporter: Reporter,
    store: CheckpointStore,
    cluster: Cluster | None,
) -> Parts:
    """Training with text on workers: each role's ranks, the rollout workers and the rows in processes of their own. What has
    started is ended when the rest cannot be built."""
    from .cluster import ROWS, Cluster

    if cluster is None or not cluster.is_open:
        cluster = Cluster.open(loaded.config, plan.layout)
    config, run_dir = cluster.config, reporter.run_dir.path
    make = partial(
        make_collector, config=config, plan=plan, base_dir=loaded.base_dir, inputs=inputs, run_dir=run_dir
    )
    factories = {"rollout": make, ROWS: partial(_experience, plan)}
    try:
        cluster.make(factories, run_dir / "logs")
        return _parts_on(cluster, config, plan, inputs, reporter, store)
    except BaseException:
        cluster.leave()
        raise


def _parts_on(
    cluster: Cluster,
    config: RunConfig,
    plan: Plan,
    inputs: TextInputs,
    reporter: Reporter,
    store: CheckpointStore,
) -> Parts:
    """The parts of a run whose processes are up."""
    from .cluster import ROWS

    run_dir = reporter.run_dir.path

    def new_supervised() -> GroupBackend:
        warm, name = _warm_up_config(config), "policy" if plan.verb == "sft" else "warm_up"
        return cluster.backend("policy", total_steps=plan.sft_steps, config=warm, name=name)

    supervised = _supervised_of(config, plan, inputs.examples, new_supervised)
    roles = roles_on_workers(config, plan, cluster.backend, supervised)
    ranks, engines = cluster.groups["policy"], cluster.groups["rollout"]
    folder = str(run_dir / "publications")
    options = send_options(config, plan.layout, folder, is_cuda=config.run.device == "cuda")
    publication = Publication(ranks, engines, options, merged=config.rollout.engine != "native")
    return Parts(
        config=config,
        plan=plan,
        reporter=reporter,
        store=store,
        sampler=_sampler_of(plan, supervised, config, inputs),
        eval_prompts=inputs.eval.by_source(),
        rollouts=Rollouts(engines, inputs.prompts, publication, plan.layout.engines_in_turns),
        data=DataPlane(cluster.groups[ROWS]),
        policy=roles.policy,
        critic=roles.critic,
        reference=roles.reference,
        supervised=supervised,
        follow_policy=roles.follow_policy,
        update_reference=roles.update_reference,
        inference=roles.inference,
        leave=cluster.leave,
        export=partial(export_policy, config, inputs.tokenizer, roles.policy),
    )


def _build_simulator(loaded: Loaded, plan: Plan, reporter: Reporter, store: CheckpointStore) -> Parts:
    config, device = loaded.config, device_of(loaded.config)
    env, spec = config.env, config.model.mlp
    assert isinstance(env, GymnasiumEnv)
    assert spec is not None, "the plan checks that it is there"
    simulator = GymnasiumSimulator(env.id, env.num_envs, env.kwargs)
    policy = MlpPolicy(spec, simulator.observation_size, simulator.action_space, seed=config.run.seed)
    policy.module.to(device)
    critic = None
    if plan.needs_critic:
        critic = MlpValue(
            spec,
            simulator.observation_size,
            seed=config.run.seed + 1,
            head_name=config.critic.head_name,
            normalizes=config.critic.normalize_values,
        )
        critic.module.to(device)
    collector = simulator_collector(config, plan, loaded.base_dir, simulator, policy)
    prompts = reset_states(env)
    here = partial(backend_here, config=config, device=device)
    return Parts(
        config=config,
        plan=plan,
        reporter=reporter,
        store=store,
        sampler=_sampler(config, NUM_RESET_STATES),
        eval_prompts={env.id: prompts["eval"]},
        rollouts=Rollouts(InProcessGroup("rollout", lambda _: collector), prompts),
        data=_data_here(plan),
        policy=here("policy", policy, total_steps=plan.num_steps, keeps_weights=True),
        critic=None if critic is None else here("critic", critic, total_steps=plan.num_critic_steps),
        reference=None,
        supervised=None,
        follow_policy=lambda: None,
        update_reference=lambda: None,
    )


def _experience(plan: Plan, _: object) -> Experience:
    return Experience(plan.recipe, plan.aggregation_constant)


def _data_here(plan: Plan) -> DataPlane:
    return DataPlane(InProcessGroup("rows", partial(_experience, plan)))


def _sampler(config: RunConfig, num_prompts: int) -> PromptSampler:
    seed = config.run.seed if config.data.seed is None else config.data.seed
    return PromptSampler(num_prompts, seed=seed, shuffle=config.data.shuffle)


def _sampler_of(
    plan: Plan, supervised: Supervised | None, config: RunConfig, inputs: TextInputs
) -> PromptSampler:
    """What the verb takes its rows from: examples, or prompts."""
    if plan.verb == "sft" and supervised:
        return supervised.sampler
    return _sampler(config, max(1, len(inputs.train.prompts)))


def _weight_check(
    config: RunConfig, lm: CausalLM, engine: NativeEngine, reporter: Reporter
) -> Callable[[int], None]:
    given = config.rollout.check_weights_dir
    folder = reporter.run_dir.path / "check_weights" if given is None else Path(given)

    def check(version: int) -> None:
        check_published(
            lm.model.named_parameters(), engine.named_parameters(), version=version, folder=folder
        )

    return check


def _warm_up_config(config: RunConfig) -> RunConfig:
    """The run's config with the optimizer of supervised learning."""
    assert config.sft is not None, "there is something to learn from"
    train = config.train.model_copy(update={"optimizer": config.sft.optimizer})
    return config.model_copy(update={"train": train})


def _supervised_of(
    config: RunConfig, plan: Plan, examples: Sequence[Example], new_backend: Callable[[], GroupBackend]
) -> Supervised | None:
    sft = config.sft
    if sft is None or plan.verb == "eval":
        return None
    return Supervised(
        rows=[_row_of(example, i) for i, example in enumerate(examples)],
        sampler=PromptSampler(len(examples), seed=config.run.seed, shuffle=True),
        new_backend=new_backend,
        num_steps=plan.sft_steps,
        rows_per_step=sft.rows_per_step,
    )


def _row_of(example: Example, number: int) -> Row:
    ids = np.array(example.prompt_ids + example.response_ids, np.int64)
    mask = np.array((False,) * len(example.prompt_ids) + example.response_mask)
    return Row({"input_ids": ids}, mask, group=number, trajectory=number)
