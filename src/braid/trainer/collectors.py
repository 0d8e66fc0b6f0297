"""Builds collectors from a config: engine, drivers and scorer in one process, the driver's or a rollout
worker's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from braid.cluster.workers import Place
from braid.config.rollout import GymnasiumEnv, SamplingConfig, SingleTurnEnv, ToolEnv
from braid.config.schema import RunConfig
from braid.envs.simulators.base import reset_prompts
from braid.envs.text.build import text_env_maker
from braid.models.causal_lm import CausalLM
from braid.models.mlp import MlpPolicy
from braid.models.roles import make_policy
from braid.plan import Plan, longest_row
from braid.rewards.scorer import build_scorer
from braid.rewards.shaping import has_shaping, shape_reward
from braid.rollout.collector import Collector, Use, WeightLink
from braid.rollout.drivers.base import Driver
from braid.rollout.drivers.simulators import SimulatorDriver
from braid.rollout.drivers.text import TextDriver
from braid.rollout.engine import RolloutEngine, Sampling
from braid.rollout.engines.native import NativeEngine
from braid.rollout.engines.native.selfcheck import check_decoding
from braid.rollout.engines.simulators import SimulatorEngine
from braid.training.backends.single import autocast_dtype
from braid.types import Prompt, ShapedReward, Trajectory
from braid.weights.receiver import Receiver, open_receiver
from braid.weights.wire import Ticket

from .engines import EngineLink, as_one, start_engines
from .inputs import TextInputs
from .roles import device_of
from .weight_sync import send_options

if TYPE_CHECKING:
    from braid.envs.simulators.gymnasium import GymnasiumSimulator
from .services import reward_services

NUM_RESET_STATES = 2**12
"""Number of reset states in an epoch of a simulator."""
_NAMES = {None: "auto", torch.bfloat16: "bf16", torch.float16: "fp16"}


def make_collector(
    place: Place, *, config: RunConfig, plan: Plan, base_dir: Path, inputs: TextInputs, run_dir: Path
) -> Collector:
    """Create the collector of a rollout worker: with the native engine on a copy of the policy's weights,
    with an engine in a child process, or with all servers if the config names any. Weight syncs update the
    engine's weights."""
    torch.set_num_threads(config.run.num_threads or 1)
    device, timeout_s = device_of(config), config.cluster.call_timeout_s
    if config.rollout.engine == "native":
        lm = make_policy(config, device)
        lm.module.requires_grad_(False)
        engine: RolloutEngine = native_engine(config, inputs, lm)
        link: WeightLink = NativeLink(f"rollout {place.rank}", lm, timeout_s, device)
    else:
        sending = send_options(config, plan.layout, str(run_dir / "weights"), device)
        engines = start_engines(config, plan, inputs.tokenizer, sending, run_dir / "logs", first=place.rank)
        engine, link = as_one(engines), EngineLink(engines)
    return text_collector(config, plan, base_dir, inputs, engine, link=link, in_background=True)


class NativeLink:
    """See WeightLink. Weights are received directly into the tensors that the native engine samples with, or
    copies."""

    def __init__(self, name: str, lm: CausalLM, timeout_s: float, device: torch.device) -> None:
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
    config: RunConfig, inputs: TextInputs, lm: CausalLM, *, owns_weights: bool = False
) -> NativeEngine:
    """The native engine, sampling with `lm` in the arithmetic of training, unless rollout.native.dtype names
    another; with `owns_weights` with a copy of its weights. Raises ModelError if it decodes this architecture
    incorrectly."""
    check_decoding(lm, longest_row(config))
    options, autocast = config.rollout.native.model_dump(), None
    if options["dtype"] == "auto":
        autocast, fsdp = autocast_dtype(config.train, lm.device), config.train.fsdp
        if config.train.backend in ("fsdp", "fsdp2"):  # computes with gathered weights in this dtype
            options["dtype"] = fsdp.param_dtype or _NAMES[autocast]
    return NativeEngine(
        lm,
        decode=inputs.decode,
        max_length=getattr(lm.config, "max_position_embeddings", None),
        autocast=autocast,
        owns_weights=owns_weights,
        **options,
    )


def text_collector(
    config: RunConfig,
    plan: Plan,
    base_dir: Path,
    inputs: TextInputs,
    engine: RolloutEngine,
    *,
    link: WeightLink | None = None,
    in_background: bool = False,
) -> Collector:
    """A collector of text episodes sampled with `engine`; `link` and `in_background` as in Collector."""
    env, tokenizer, rollout = config.env, inputs.tokenizer, config.rollout
    assert isinstance(env, SingleTurnEnv | ToolEnv), "env is a simulator, not a text environment"

    def driver(sampling: SamplingConfig, context: int | None) -> Driver:
        assert context is not None, "text episodes have a context limit"
        return TextDriver(
            engine,
            text_env_maker(env),
            tokenizer,
            sampling_of(sampling, inputs.end_token_ids),
            seed=config.run.seed,
            retries=rollout.retries,
            max_context_tokens=context,
            env_timeout_s=rollout.env_timeout_s,
        )

    longest = plan.max_trajectory_tokens
    eval_sampling = config.eval.sampling or rollout.sampling
    return Collector(
        inputs.prompts,
        {
            "train": driver(rollout.sampling, longest),
            "eval": driver(eval_sampling, plan.eval_max_trajectory_tokens),
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
        in_background=in_background,
    )


def simulator_collector(
    config: RunConfig, plan: Plan, base_dir: Path, simulator: GymnasiumSimulator, policy: MlpPolicy
) -> Collector:
    """A collector of a simulator's episodes, sampled with the trained policy's own tensors."""
    env, rollout = config.env, config.rollout
    assert isinstance(env, GymnasiumEnv), "only Gymnasium simulators are implemented"

    engine = SimulatorEngine(simulator, policy, retries=rollout.retries, owns_weights=plan.is_pipelined)

    def driver(sampling: SamplingConfig) -> Driver:
        return SimulatorDriver(engine, seed=config.run.seed, greedy=sampling.greedy)

    return Collector(
        reset_states(env),
        {
            "train": driver(rollout.sampling),
            "eval": driver(config.eval.sampling or rollout.sampling),
        },
        driver(_greedy(rollout.sampling)) if plan.needs_greedy else None,
        engine,
        build_scorer(config.reward, base_dir=base_dir),
        shape=_shape_of(config),
        limits=_limits(config),
        in_background=plan.is_pipelined,
    )


def _limits(config: RunConfig) -> dict[Use, int | None]:
    return {"train": config.rollout.request_batch, "eval": config.eval.batch_prompts}


def reset_states(env: GymnasiumEnv) -> dict[Use, list[Prompt]]:
    """Prompts of a simulator: its reset states."""
    return {
        "train": reset_prompts(env.id, NUM_RESET_STATES),
        "eval": reset_prompts(env.id, env.eval_episodes),
    }


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
