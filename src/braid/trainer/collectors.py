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
from braid.config.rollout import SamplingConfig
from braid.config.schema import RunConfig
from braid.envs.simulators.base import Simulator
from braid.envs.simulators.remote import Peer
from braid.errors import ModelError
from braid.models.causal_lm import CausalLM
from braid.models.cpu_kernels import cpu_kernels
from braid.models.roles import make_policy, make_robot_model
from braid.plan import Plan, longest_row
from braid.plan.sizes import training_dtype
from braid.rewards.scorer import Scorer, build_scorer
from braid.rewards.shaping import has_shaping, shape_reward
from braid.rollout.collector import Collector, Opponent, Stream, Use, WeightReceiver
from braid.rollout.drivers.base import Driver
from braid.rollout.drivers.simulators import SimulatorDriver
from braid.rollout.engine import NoEngine, RolloutEngine, Sampling
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.native.kind import Native
from braid.rollout.engines.native.selfcheck import check_decoding
from braid.rollout.engines.native.stopping import Decode
from braid.rollout.engines.simulators import ActingPolicy, SimulatorEngine
from braid.training.backends.single.backend import SingleBackend, autocast_dtype
from braid.training.worker import device_of
from braid.types import Prompt
from braid.weights.fingerprint import check_synced
from braid.weights.receiver import ModelReceiver

from .conversations import chat_format
from .engines import PolicyReceiver, as_one, start_engines
from .inputs import TextInputs
from .judges import hosted_engines, load_engines
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
    judge_hosts: Sequence[Peer] = (),
) -> Collector:
    """Create the collector of a rollout worker. In the driver's process a native engine reads the policy's
    own tensors, which are then not offloaded, or copies them in a pipelined run; in a separate process it has
    a copy of the model. Other engines have child processes, or are servers. Weight syncs update the weights
    of all but the first. Judges with models of their own are on `judge_hosts`, if there are any."""
    if plan.trains_reward_model:
        return Collector({}, NoEngine(), Scorer([], concurrency=1))
    device, is_local = device_of(config), plan.layout.mode == "in_process"
    policy: Any = place.workers.get("policy")
    check, receiver = None, None
    if inputs is None:
        if is_local:
            policy.keep_weights()
            return simulator_collector(config, plan, base_dir, place.workers["env"], policy.model)
        assert new_simulator is not None, "other environments have text inputs"
        simulator = new_simulator(place)
        model: Any = make_robot_model("policy", config, simulator.spaces, device)
        receiver = ModelReceiver(f"rollout {place.rank}", model, config.cluster.call_timeout_s, device)
        return simulator_collector(config, plan, base_dir, simulator, model, receiver)
    lm: Any = policy.model if is_local and "policy" in place.workers else None
    if config.rollout.engine.is_served:
        sending = send_options(config, plan.layout, str(run_dir / "weights"), device)
        engines = start_engines(config, plan, inputs, sending, run_dir / "logs", first=place.rank)
        remote = as_one(engines)
        engine: RolloutEngine = remote
        receiver = PolicyReceiver(place.workers, remote) if is_local else remote
    elif is_local:
        bytes_to_come = None
        if plan.is_pipelined:  # others' first update comes after the cache has been allocated
            bytes_to_come = partial(_bytes_to_come, place.workers)
        engine = native_engine(
            config, inputs.decode, lm, owns_weights=plan.is_pipelined, bytes_to_come=bytes_to_come
        )
        if engine.shares_weights:
            policy.keep_weights()
        if config.rollout.check_weights:
            folder = Path(config.rollout.check_weights_dir or run_dir / "check_weights")
            check = partial(_check_weights, policy.model, engine, folder)
    else:
        lm = make_policy(config, device)
        lm.module.requires_grad_(False)
        engine = native_engine(config, inputs.decode, lm)
        receiver = ModelReceiver(f"rollout {place.rank}", lm, config.cluster.call_timeout_s, device)
    opponent = None
    if (every := config.env.opponents_every_rounds) is not None:
        opponent = Opponent(native_engine(config, inputs.decode, lm, owns_weights=True), every)
    if judge_hosts:
        judges = hosted_engines(config, judge_hosts)
    else:
        sleeps = place.rank in plan.engines_in_turns
        judges = load_engines(config, plan, sleeps=sleeps, logs=run_dir / "logs" / f"judges-{place.rank}")
    in_background = plan.is_pipelined or not is_local
    return text_collector(
        config,
        plan,
        base_dir,
        inputs,
        engine,
        receiver=receiver,
        check=check,
        in_background=in_background,
        opponent=opponent,
        judges=judges,
    )


def _bytes_to_come(workers: Mapping[str, Any]) -> int:
    """Device memory that the models of this process take in their next updates."""
    return sum(worker.bytes_to_come() for worker in workers.values() if isinstance(worker, SingleBackend))


def _check_weights(lm: CausalLM, engine: NativeEngine, folder: Path, version: int) -> None:
    check_synced(lm.model.named_parameters(), engine.named_parameters(), version=version, folder=folder)


def native_engine(
    config: RunConfig,
    decode: Decode,
    lm: CausalLM,
    *,
    owns_weights: bool = False,
    bytes_to_come: Callable[[], int] | None = None,
    num_parameters: int | None = None,
) -> NativeEngine:
    """An engine in this process, sampling with `lm` in the dtype of `Engine.dtype_in`; with `owns_weights`
    with a copy of its weights. `bytes_to_come` as in InProcess; `num_parameters` decides on kernels, by
    default the number that `lm` has. Raises ModelError if it decodes this architecture incorrectly."""
    kind, autocast = config.rollout.engine, None
    assert isinstance(kind, Native), "others have processes of their own"
    has_gpus = lm.device.type != "cpu"
    size = num_parameters or sum(parameter.numel() for parameter in lm.model.parameters())
    is_compiled = _compiles(kind, config, size, has_gpus=has_gpus)
    sampling_dtype, dtype = kind.dtype_in(config, size, has_gpus=has_gpus), kind.dtype
    if sampling_dtype != (trains_in := training_dtype(config, has_gpus=has_gpus)):
        _log.info(
            "the engine samples in %s, training computes in %s (rollout.engine.dtype)",
            sampling_dtype,
            trains_in,
        )
        dtype = sampling_dtype
    elif dtype == "auto":
        autocast = autocast_dtype(config.train, lm.device)
        if config.train.backend.gathers_weights:  # computes with gathered weights in this dtype
            dtype = config.train.backend.parameter_dtype() or _NAMES[autocast]
    check_decoding(lm, longest_row(config), is_compiled=is_compiled)
    decided = {
        "dtype": dtype,
        "compile": "always" if is_compiled else "never",
        "prefix_caching": kind.prefix_caching and kind.has_conversations(config),
    }
    return kind.model_copy(update=decided).build(
        lm,
        InProcess(
            decode,
            autocast,
            owns_weights=owns_weights,
            records_experts=config.train.router_replay == "rollout",
            bytes_to_come=bytes_to_come,
        ),
    )


def _compiles(kind: Native, config: RunConfig, size: int, *, has_gpus: bool) -> bool:
    """Whether decode steps are compiled: the same for every process and every resume of a run."""
    if has_gpus:  # by Triton, where the decoder knows the model's layers
        return kind.compile != "never"
    if not kind.can_compile(config, size, has_gpus=has_gpus):
        return False
    is_long = kind.may_compile(config, size, has_gpus=has_gpus)
    why_not = cpu_kernels().why_not if is_long else "rounds are too short for that (rollout.engine.compile)"
    if why_not and kind.compile == "always":
        raise ModelError(f"rollout.engine.compile=always, but {why_not}; or set rollout.engine.compile=auto")
    _log.info("decode steps are %s", f"not compiled: {why_not}" if why_not else "compiled by Numba")
    return not why_not


def text_collector(  # noqa: PLR0913
    config: RunConfig,
    plan: Plan,
    base_dir: Path,
    inputs: TextInputs,
    engine: RolloutEngine,
    *,
    receiver: WeightReceiver | None = None,
    check: Callable[[int], None] | None = None,
    in_background: bool = False,
    opponent: Opponent | None = None,
    judges: Mapping[int, RolloutEngine] | None = None,
) -> Collector:
    """A collector of text episodes sampled with `engine`; the others as in Collector. `judges` are engines of
    judges with models of their own, by the number of the reward part."""
    judges = judges or {}
    env, rollout = config.text_env, config.rollout
    chat = chat_format(config, inputs.tokenizer, inputs.end_token_ids, inputs.vision)
    new_driver, close_envs = env.drivers(base_dir, needs_reward=not config.reward.parts)

    def driver(sampling: SamplingConfig, context: int | None) -> Driver:
        assert context is not None, "text episodes have a context limit"
        return new_driver(
            engine,
            chat,
            sampling_of(sampling, inputs.end_token_ids),
            context,
            seed=config.run.seed,
            retries=rollout.retries,
            opponent=None if opponent is None else opponent.engine,
        )

    longest = plan.max_trajectory_tokens
    return Collector(
        _streams(
            config,
            inputs.prompts,
            train=driver(rollout.sampling, longest),
            evaluation=driver(config.eval_sampling, plan.eval_max_trajectory_tokens),
            greedy=driver(_greedy(rollout.sampling), longest) if plan.needs_greedy else None,
        ),
        engine,
        build_scorer(
            config.reward,
            base_dir=base_dir,
            seed=config.run.seed,
            services=reward_services(config, engine, inputs, device_of(config), judges),
        ),
        receiver=receiver,
        check=check,
        close_envs=close_envs,
        in_background=in_background,
        opponent=opponent,
        judges=list({id(judge): judge for judge in judges.values()}.values()),
        bos_id=bos_id if isinstance(bos_id := inputs.tokenizer.bos_token_id, int) else None,
    )


def simulator_collector(
    config: RunConfig,
    plan: Plan,
    base_dir: Path,
    simulator: Simulator,
    policy: ActingPolicy,
    receiver: WeightReceiver | None = None,
) -> Collector:
    """A collector of a simulator's episodes, sampled with the trained policy's own tensors, or with those
    that `receiver` writes to."""
    env, rollout = config.simulator, config.rollout
    engine = SimulatorEngine(
        simulator,
        policy,
        retries=rollout.retries,
        owns_weights=plan.is_pipelined and receiver is None,
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
        _streams(
            config,
            env.reset_states(),
            train=driver(
                rollout.sampling,
                video.num_episodes if video.train_every_rounds else 0,
                film_every=video.train_every_rounds or 1,
                max_decisions=max_decisions,
                auto_reset=env.auto_reset,
                shares_reset=env.fixed_reset_states,
            ),
            evaluation=driver(config.eval_sampling, video.num_episodes if video.save else 0),
            greedy=driver(_greedy(rollout.sampling)) if plan.needs_greedy else None,
        ),
        engine,
        build_scorer(config.reward, base_dir=base_dir),
        receiver=receiver,
        in_background=plan.is_pipelined or receiver is not None,
        spaces=simulator.spaces,
    )


def _streams(
    config: RunConfig,
    prompts: Mapping[Use, Sequence[Prompt]],
    *,
    train: Driver,
    evaluation: Driver,
    greedy: Driver | None,
) -> dict[Use, Stream]:
    shape = None
    if has_shaping(config.reward):
        limit = config.rollout.sampling.max_new_tokens
        shape = partial(shape_reward, config=config.reward, max_new_tokens=limit)
    return {
        "train": Stream(prompts["train"], train, config.rollout.request_batch, greedy, shape),
        "eval": Stream(prompts["eval"], evaluation, config.eval.batch_prompts),
    }


def sampling_of(config: SamplingConfig, end_token_ids: Sequence[int]) -> Sampling:
    """Convert the sampling settings to the engine's, with the model's end tokens added."""
    values = config.model_dump()
    values["stop_token_ids"] = tuple(dict.fromkeys([*end_token_ids, *config.stop_token_ids]))
    return Sampling(**values)


def _greedy(sampling: SamplingConfig) -> SamplingConfig:
    """The same settings with greedy decoding."""
    return sampling.model_copy(update={"greedy": True})
