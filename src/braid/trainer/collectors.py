"""Builds collectors from a config: engine, drivers and scorer in one process, the driver's or a rollout
worker's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from braid.cluster.workers import Factory, Place
from braid.config.env import AgentEnvConfig, ChatEnv, ProgramEnv, SimulatorEnv, Timeouts, ToolsEnv
from braid.config.rollout import SamplingConfig
from braid.config.schema import RunConfig
from braid.envs.simulators.base import Simulator
from braid.errors import ModelError
from braid.models.base import TrainableModel
from braid.models.causal_lm import CausalLM
from braid.models.cpu_kernels import cpu_kernels
from braid.models.roles import make_policy, make_robot_model
from braid.plan import Plan, longest_row
from braid.plan.sizes import can_compile, engine_dtype, may_compile, training_dtype
from braid.rewards.scorer import build_scorer
from braid.rewards.shaping import has_shaping, shape_reward
from braid.rollout.collector import Collector, Use, WeightLink
from braid.rollout.drivers.agents import AgentDriver, Limits
from braid.rollout.drivers.base import Driver
from braid.rollout.drivers.programs import ProgramDriver
from braid.rollout.drivers.simulators import SimulatorDriver
from braid.rollout.engine import RolloutEngine, Sampling
from braid.rollout.engines.native import NativeEngine
from braid.rollout.engines.native.selfcheck import check_decoding
from braid.rollout.engines.simulators import ActingPolicy, SimulatorEngine
from braid.rollout.sessions.server import SessionServer
from braid.training.backends.single import SingleBackend, autocast_dtype
from braid.training.worker import device_of
from braid.types import ShapedReward, Trajectory
from braid.weights.fingerprint import check_synced
from braid.weights.receiver import Receiver, open_receiver
from braid.weights.wire import Ticket

from .conversations import chat_format, env_maker, external_key, program_of
from .engines import EngineLink, LocalWeightLink, as_one, start_engines
from .inputs import TextInputs, reset_states
from .services import reward_services
from .weight_sync import send_options

_log = logging.getLogger(__name__)
_NAMES = {None: "auto", torch.bfloat16: "bf16", torch.float16: "fp16"}


def make_collector(
    place: Place,
    *,
    config: RunConfig,
    plan: Plan,
    base_dir: Path,
    inputs: TextInputs | None,
    run_dir: Path,
    new_simulator: Factory[Simulator] | None,
) -> Collector:
    """Create the collector of a rollout worker. In the driver's process a native engine reads the policy's
    own tensors, which are then not offloaded, or copies them in a pipelined run; in a separate process it has
    a copy of the model. Other engines have child processes, or are servers. Weight syncs update the weights
    of all but the first."""
    device, is_local = device_of(config), plan.layout.mode == "in_process"
    policy: Any = place.workers.get("policy")
    check, link = None, None
    if inputs is None:
        if is_local:
            policy.keep_weights()
            return simulator_collector(config, plan, base_dir, place.workers["env"], policy.model)
        assert new_simulator is not None, "other environments have text inputs"
        simulator = new_simulator(place)
        model: Any = make_robot_model("policy", config, simulator.spaces, device)
        link = NativeLink(f"rollout {place.rank}", model, config.cluster.call_timeout_s, device)
        return simulator_collector(config, plan, base_dir, simulator, model, link)
    lm: Any = policy.model if is_local and "policy" in place.workers else None
    if config.rollout.engine != "native":
        sending = send_options(config, plan.layout, str(run_dir / "weights"), device)
        engines = start_engines(config, plan, inputs.tokenizer, sending, run_dir / "logs", first=place.rank)
        engine: RolloutEngine = as_one(engines)
        link = LocalWeightLink(place.workers, engine) if is_local else EngineLink(engines)
    elif is_local:
        bytes_to_come = None
        if plan.is_pipelined:  # others' first update comes after the cache has been allocated
            bytes_to_come = partial(_bytes_to_come, place.workers)
        engine = native_engine(
            config, inputs, lm, owns_weights=plan.is_pipelined, bytes_to_come=bytes_to_come
        )
        if engine.shares_weights:
            policy.keep_weights()
        if config.rollout.check_weights:
            folder = Path(config.rollout.check_weights_dir or run_dir / "check_weights")
            check = partial(_check_weights, policy.model, engine, folder)
    else:
        lm = make_policy(config, device)
        lm.module.requires_grad_(False)
        engine = native_engine(config, inputs, lm)
        link = NativeLink(f"rollout {place.rank}", lm, config.cluster.call_timeout_s, device)
    opponent = None
    if isinstance(config.env, AgentEnvConfig) and config.env.opponents is not None:
        opponent = native_engine(config, inputs, lm, owns_weights=True)
    in_background = plan.is_pipelined or not is_local
    return text_collector(
        config,
        plan,
        base_dir,
        inputs,
        engine,
        link=link,
        check=check,
        in_background=in_background,
        opponent=opponent,
    )


def _bytes_to_come(workers: Mapping[str, Any]) -> int:
    """Device memory that the models of this process take in their next updates."""
    return sum(worker.bytes_to_come() for worker in workers.values() if isinstance(worker, SingleBackend))


def _check_weights(lm: CausalLM, engine: NativeEngine, folder: Path, version: int) -> None:
    check_synced(lm.model.named_parameters(), engine.named_parameters(), version=version, folder=folder)


class NativeLink:
    """See WeightLink. Weights are received directly into the tensors that the native engine samples with, or
    copies."""

    def __init__(self, name: str, lm: TrainableModel, timeout_s: float, device: torch.device) -> None:
        """`timeout_s` is the time limit per version."""
        self.names = (name,)
        self._lm, self._timeout_s, self._device = lm, timeout_s, device
        self._receiver: Receiver | None = None

    def take(self, version: int, ticket: Mapping[str, Any] | None) -> None:
        """See WeightLink."""
        assert ticket is not None, "the sender is in another process"
        if self._receiver is None:
            (name,) = self.names
            self._receiver = open_receiver(
                Ticket(**ticket), engine=name, timeout_s=self._timeout_s, device=self._device
            )
        self._receiver.receive_into(version, dict(self._lm.named_weights()))

    def close(self) -> None:
        """See WeightLink."""
        if self._receiver is not None:
            self._receiver.close()


def native_engine(
    config: RunConfig,
    inputs: TextInputs,
    lm: CausalLM,
    *,
    owns_weights: bool = False,
    bytes_to_come: Callable[[], int] | None = None,
) -> NativeEngine:
    """The native engine, sampling with `lm` in the dtype of `engine_dtype`; with `owns_weights` with a copy
    of its weights. `bytes_to_come` as in NativeEngine. Raises ModelError if it decodes this architecture
    incorrectly."""
    options, autocast = config.rollout.native.model_dump(), None
    options["prefix_caching"] &= isinstance(config.env, ChatEnv) and config.env.max_turns > 1
    size, has_gpus = sum(parameter.numel() for parameter in lm.model.parameters()), lm.device.type != "cpu"
    options["compile"] = _compiles(config, size, has_gpus=has_gpus)
    dtype = engine_dtype(config, size, has_gpus=has_gpus)
    if dtype != (trains_in := training_dtype(config, has_gpus=has_gpus)):
        _log.info(
            "the engine samples in %s, training computes in %s (rollout.native.dtype)", dtype, trains_in
        )
        options["dtype"] = dtype
    elif options["dtype"] == "auto":
        autocast, fsdp = autocast_dtype(config.train, lm.device), config.train.fsdp
        if config.train.backend in ("fsdp", "fsdp2"):  # computes with gathered weights in this dtype
            options["dtype"] = fsdp.param_dtype or _NAMES[autocast]
    check_decoding(lm, longest_row(config), is_compiled=options["compile"])
    return NativeEngine(
        lm,
        decode=inputs.decode,
        max_length=getattr(lm.config, "max_position_embeddings", None),
        autocast=autocast,
        owns_weights=owns_weights,
        bytes_to_come=bytes_to_come,
        **options,
    )


def _compiles(config: RunConfig, size: int, *, has_gpus: bool) -> bool:
    """Whether decode steps are compiled: the same for every process and every resume of a run."""
    if has_gpus:  # by Triton, where the decoder knows the model's layers
        return config.rollout.native.compile != "never"
    if not can_compile(config, size, has_gpus=has_gpus):
        return False
    is_long = may_compile(config, size, has_gpus=has_gpus)
    why_not = cpu_kernels().why_not if is_long else "rounds are too short for that (rollout.native.compile)"
    if why_not and config.rollout.native.compile == "always":
        raise ModelError(f"rollout.native.compile=always, but {why_not}; or set rollout.native.compile=auto")
    _log.info("decode steps are %s", f"not compiled: {why_not}" if why_not else "compiled by Numba")
    return not why_not


def text_collector(  # noqa: PLR0913
    config: RunConfig,
    plan: Plan,
    base_dir: Path,
    inputs: TextInputs,
    engine: RolloutEngine,
    *,
    link: WeightLink | None = None,
    check: Callable[[int], None] | None = None,
    in_background: bool = False,
    opponent: NativeEngine | None = None,
) -> Collector:
    """A collector of text episodes sampled with `engine`; the others as in Collector."""
    env, rollout = config.env, config.rollout
    chat, close_envs = chat_format(config, inputs.tokenizer, inputs.end_token_ids), None
    common: dict[str, Any] = {"seed": config.run.seed, "retries": rollout.retries}
    if isinstance(env, ProgramEnv):
        key = external_key(env)
        server = SessionServer(env.host, env.port, max_episodes=env.concurrency, external_key=key)
        program = program_of(env, base_dir) if key is None else server.offer
        common |= {"max_turns": env.max_turns, "timeout_s": env.episode_timeout_s}
        common["needs_reward"] = not config.reward.parts

        def of_context(sampling: Sampling, context: int) -> Driver:
            return ProgramDriver(
                server, program, engine, chat, sampling, max_context_tokens=context, **common
            )

    else:
        new_env, close_envs = env_maker(config, base_dir)

        def of_context(sampling: Sampling, context: int) -> Driver:
            limits = Limits(context, None, Timeouts())
            if isinstance(env, ToolsEnv | AgentEnvConfig):
                cut, at_end = env.cut_turns == "continue", env.rewards_at == "end"
                limits = Limits(context, env.max_turns, env.timeouts, cut, at_end)
            return AgentDriver(engine, new_env, chat, sampling, limits, opponent=opponent, **common)

    def driver(sampling: SamplingConfig, context: int | None) -> Driver:
        assert context is not None, "text episodes have a context limit"
        return of_context(sampling_of(sampling, inputs.end_token_ids), context)

    longest = plan.max_trajectory_tokens
    return Collector(
        inputs.prompts,
        {
            "train": driver(rollout.sampling, longest),
            "eval": driver(config.eval_sampling, plan.eval_max_trajectory_tokens),
        },
        driver(_greedy(rollout.sampling), longest) if plan.needs_greedy else None,
        engine,
        build_scorer(
            config.reward,
            base_dir=base_dir,
            seed=config.run.seed,
            services=reward_services(config, engine, inputs, device_of(config)),
        ),
        shape=_shape_of(config),
        limits=_limits(config),
        link=link,
        check=check,
        close_envs=close_envs,
        in_background=in_background,
        opponent=opponent,
        opponent_every=env.opponents.every_rounds if isinstance(env, AgentEnvConfig) and env.opponents else 0,
    )


def simulator_collector(
    config: RunConfig,
    plan: Plan,
    base_dir: Path,
    simulator: Simulator,
    policy: ActingPolicy,
    link: WeightLink | None = None,
) -> Collector:
    """A collector of a simulator's episodes, sampled with the trained policy's own tensors, or with those
    that `link` writes to."""
    env, rollout = config.env, config.rollout
    assert isinstance(env, SimulatorEnv), "only Gymnasium simulators are implemented"

    engine = SimulatorEngine(
        simulator,
        policy,
        retries=rollout.retries,
        owns_weights=plan.is_pipelined and link is None,
        num_stages=env.pipeline_stages,
        offloads=env.offload and env.processes > 0,
    )

    def driver(sampling: SamplingConfig, num_filmed: int = 0, **of_use: Any) -> Driver:
        temperature = None if sampling.greedy else sampling.temperature
        return SimulatorDriver(
            engine, seed=config.run.seed, temperature=temperature, num_filmed=num_filmed, **of_use
        )

    video = env.video
    steps, chunk = env.max_steps_per_rollout, config.model.num_action_chunks
    max_decisions = None if steps is None else steps // chunk
    return Collector(
        reset_states(env),
        {
            "train": driver(
                rollout.sampling,
                video.num_episodes if video.train_every_rounds else 0,
                film_every=video.train_every_rounds or 1,
                max_decisions=max_decisions,
                auto_reset=env.auto_reset,
                shares_reset=env.fixed_reset_states,
            ),
            "eval": driver(config.eval_sampling, video.num_episodes if video.save else 0),
        },
        driver(_greedy(rollout.sampling)) if plan.needs_greedy else None,
        engine,
        build_scorer(config.reward, base_dir=base_dir),
        shape=_shape_of(config),
        limits=_limits(config),
        link=link,
        in_background=plan.is_pipelined or link is not None,
        spaces=simulator.spaces,
    )


def _limits(config: RunConfig) -> dict[Use, int | None]:
    return {"train": config.rollout.request_batch, "eval": config.eval.batch_prompts}


def sampling_of(config: SamplingConfig, end_token_ids: Sequence[int]) -> Sampling:
    """Convert the sampling settings to the engine's, with the model's end tokens added."""
    values = config.model_dump()
    values["stop_token_ids"] = tuple(dict.fromkeys([*end_token_ids, *config.stop_token_ids]))
    return Sampling(**values)


def _greedy(sampling: SamplingConfig) -> SamplingConfig:
    """The same settings with greedy decoding."""
    return sampling.model_copy(update={"greedy": True})


def _shape_of(config: RunConfig) -> Callable[[Trajectory], ShapedReward] | None:
    if not has_shaping(config.reward):
        return None
    limit = config.rollout.sampling.max_new_tokens
    return partial(shape_reward, config=config.reward, max_new_tokens=limit)
