"""Builds a run in one process: models, engine, environments and rows are all in the driver."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from braid.checkpoint.export import export_model
from braid.checkpoint.store import CheckpointStore
from braid.cluster.workers import InProcessGroup
from braid.config.load import Loaded
from braid.config.roles import TrainingRole, train_config
from braid.config.rollout import GymnasiumEnv
from braid.config.schema import RunConfig
from braid.models.adapter_reference import AdapterReference
from braid.models.base import TrainableModel, copy_weights
from braid.models.causal_lm import CausalLM
from braid.models.mlp import MlpPolicy, MlpValue
from braid.models.roles import make_critic, make_policy, make_reference
from braid.models.value import ValueModel
from braid.plan import Plan
from braid.report.reporter import Reporter
from braid.rollout.engines.native import NativeEngine
from braid.rollout.engines.remote import RemoteEngine
from braid.rollout.engines.router import Router
from braid.training.backends.single import SingleBackend
from braid.training.group import GroupBackend
from braid.weights.fingerprint import check_synced

from .collectors import NUM_RESET_STATES, native_engine, reset_states, simulator_collector, text_collector
from .data_plane import DataPlane, make_rollout_buffer
from .engines import LocalWeightLink, as_one, start_engines
from .inputs import TextInputs, prompt_sampler
from .parts import Parts
from .roles import Roles, device_of
from .rollouts import Rollouts
from .supervised import Supervised, sampler_of, supervised_of, warm_up_config
from .weight_sync import send_options


def build_in_process(
    loaded: Loaded, plan: Plan, inputs: TextInputs, reporter: Reporter, store: CheckpointStore
) -> Parts:
    """Build the parts of a text run in this process."""
    config, device = loaded.config, device_of(loaded.config)
    lm, engine = _policy_and_engine(config, plan, inputs, reporter)
    keeps_weights = isinstance(engine, NativeEngine) and engine.shares_weights

    def new_supervised() -> GroupBackend:
        warm = warm_up_config(config)
        return _local_backend(
            "policy", lm, warm, device, total_steps=plan.sft_steps, keeps_weights=keeps_weights
        )

    supervised = supervised_of(config, plan, inputs.examples.examples, new_supervised)
    critic = make_critic(config, device, lm) if plan.needs_critic else None
    reference = make_reference(config, device, lm) if plan.needs_reference else None
    roles = _local_roles(
        config, plan, lm, critic, reference, device, supervised=supervised, keeps_weights=keeps_weights
    )
    link = None if isinstance(engine, NativeEngine) else LocalWeightLink(lm, engine)
    collector = text_collector(
        config, plan, loaded.base_dir, inputs, engine, link=link, in_background=plan.is_pipelined
    )
    return Parts(
        config=config,
        plan=plan,
        reporter=reporter,
        store=store,
        sampler=sampler_of(plan, supervised, config, inputs),
        eval_prompts=inputs.eval.by_source(),
        rollouts=Rollouts(
            InProcessGroup("rollout", lambda _: collector, has_threads=plan.is_pipelined),
            inputs.prompts,
            in_turns=plan.engines_in_turns,
        ),
        data=_local_buffer(plan),
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


def _policy_and_engine(
    config: RunConfig, plan: Plan, inputs: TextInputs, reporter: Reporter
) -> tuple[CausalLM, NativeEngine | RemoteEngine | Router]:
    """The policy, with the native engine on it, or with the engine that the config names, in a child process
    or server. That one comes first, as in on_workers."""
    device = device_of(config)
    if config.rollout.engine == "native":
        lm = make_policy(config, device)
        return lm, native_engine(config, inputs, lm, owns_weights=plan.is_pipelined)
    folder = reporter.run_dir.path
    sending = send_options(config, plan.layout, str(folder / "weights"), device)
    engine = as_one(start_engines(config, plan, inputs.tokenizer, sending, folder / "logs"))
    try:
        if plan.engines_in_turns:
            engine.sleep()
        return make_policy(config, device), engine
    except BaseException:
        engine.close()
        raise


def build_simulator(loaded: Loaded, plan: Plan, reporter: Reporter, store: CheckpointStore) -> Parts:
    """Build the parts of a run with a simulator and an MLP policy in this process."""
    from braid.envs.simulators.gymnasium import GymnasiumSimulator

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
    here = partial(_local_backend, config=config, device=device)
    return Parts(
        config=config,
        plan=plan,
        reporter=reporter,
        store=store,
        sampler=prompt_sampler(config, NUM_RESET_STATES),
        eval_prompts={env.id: prompts["eval"]},
        rollouts=Rollouts(
            InProcessGroup("rollout", lambda _: collector, has_threads=plan.is_pipelined), prompts
        ),
        data=_local_buffer(plan),
        policy=here("policy", policy, total_steps=plan.num_steps, keeps_weights=True),
        critic=None if critic is None else here("critic", critic, total_steps=plan.num_critic_steps),
        reference=None,
        supervised=None,
        follow_policy=lambda: None,
        update_reference=lambda: None,
    )


def _local_backend(
    role: TrainingRole,
    model: TrainableModel,
    config: RunConfig,
    device: torch.device,
    *,
    total_steps: int,
    keeps_weights: bool = False,
) -> GroupBackend:
    """Backend of a role's model in this process; arguments as in SingleBackend."""
    train = train_config(config, role)
    backend = SingleBackend(model, train, total_steps=total_steps, device=device, keeps_weights=keeps_weights)
    return GroupBackend(InProcessGroup(role, lambda _: backend))


def _local_roles(
    config: RunConfig,
    plan: Plan,
    lm: CausalLM,
    critic: ValueModel | None,
    reference: CausalLM | AdapterReference | None,
    device: torch.device,
    *,
    supervised: Supervised | None,
    keeps_weights: bool,
) -> Roles:
    """Backends of all roles in this process. With `keeps_weights` the engine shares the policy's tensors."""
    here = partial(_local_backend, config=config, device=device)
    policy = (
        supervised.backend
        if plan.verb == "sft" and supervised
        else here("policy", lm, total_steps=plan.num_steps, keeps_weights=keeps_weights)
    )

    of_reference = None if reference is None else here("reference", reference, total_steps=0)
    if of_reference is not None:
        policy.group.call("use_reference", lambda batch: of_reference.group.call("logits", batch)[0])

    def follow_policy() -> None:
        # The warm-up has trained the same tensors, but the policy's optimizer keeps separate master weights.
        if supervised is not None:
            policy.load_weights(dict(lm.named_weights()))
        if reference is not None and config.reference.path is None:
            copy_weights(dict(lm.named_weights()), reference.named_weights())
        if critic is not None and config.critic.path is None:
            copy_weights(dict(lm.merged_weights()), critic.named_weights())

    def update_reference() -> None:
        if reference is None:
            return
        is_alike = isinstance(reference, AdapterReference) or not lm.has_adapters
        weights = lm.named_weights() if is_alike else lm.merged_weights()
        copy_weights(dict(weights), reference.named_weights())

    return Roles(
        policy,
        None if critic is None else here("critic", critic, total_steps=plan.num_critic_steps),
        of_reference,
        follow_policy,
        update_reference,
    )


def _weight_check(
    config: RunConfig, lm: CausalLM, engine: NativeEngine, reporter: Reporter
) -> Callable[[int], None]:
    given = config.rollout.check_weights_dir
    folder = reporter.run_dir.path / "check_weights" if given is None else Path(given)

    def check(version: int) -> None:
        check_synced(lm.model.named_parameters(), engine.named_parameters(), version=version, folder=folder)

    return check


def _local_buffer(plan: Plan) -> DataPlane:
    return DataPlane(InProcessGroup("rows", partial(make_rollout_buffer, plan)))
