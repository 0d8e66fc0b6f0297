"""From a loaded config to the parts of a run: the one place that knows which class serves which setting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from braid.checkpoint.export import export_model
from braid.checkpoint.store import CheckpointStore
from braid.config.load import Loaded
from braid.config.rollout import GymnasiumEnv, SamplingConfig, SingleTurnEnv, ToolEnv
from braid.config.schema import RunConfig
from braid.data.prompts import PromptSet, load_prompts
from braid.data.sampler import PromptSampler
from braid.data.worked import Example, load_examples
from braid.envs.simulators.base import reset_prompts
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.envs.text.build import text_env_maker
from braid.errors import ConfigError, Problem
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_tokenizer
from braid.models.mlp import MlpPolicy, MlpValue
from braid.models.roles import make_critic, make_policy, make_reference, train_config
from braid.plan import Plan, Verb
from braid.plan.rewards import source_problems
from braid.report.reporter import Reporter
from braid.rewards.scorer import build_scorer
from braid.rollout.drivers.base import Driver
from braid.rollout.drivers.batches import Batches
from braid.rollout.drivers.simulators import SimulatorDriver
from braid.rollout.drivers.text import TextDriver
from braid.rollout.engine import Sampling
from braid.rollout.engines.native import NativeEngine
from braid.runtime.memory_record import MemoryRecorder
from braid.training.backend import TrainingBackend
from braid.training.backends.single import SingleBackend
from braid.types import Row
from braid.weights.fingerprint import check_published

from .costs import held_bytes
from .parts import Parts
from .roles import critic_backend, device_of, follow, policy_group, update_reference
from .services import reward_services
from .supervised import Supervised

NUM_RESET_STATES = 2**12
"""Reset states that count as one epoch of a simulator."""


def sampling_of(config: SamplingConfig, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """The engine's form of the sampling settings, with the tokenizer's end token."""
    values = config.model_dump()
    eos = tokenizer.eos_token_id
    values["stop_token_ids"] = tuple(
        dict.fromkeys([*([eos] if eos is not None else []), *config.stop_token_ids])
    )
    return Sampling(**values)


def _check_sources(loaded: Loaded, inputs: TextInputs) -> None:
    """Raise ConfigError when the sources that reward parts name are not those of the data, now that all of it is read."""
    known = {prompt.source for prompt in (*inputs.train.prompts, *inputs.eval.prompts)}
    if found := list(source_problems(loaded.config.reward.parts, known)):
        raise ConfigError([loaded.placed(Problem(key, message)) for key, message in found])


def _greedy(sampling: SamplingConfig) -> SamplingConfig:
    """The same limits, and the likeliest token each time."""
    return sampling.model_copy(update={"greedy": True})


@dataclass(frozen=True, slots=True)
class TextInputs:
    """What a run with text reads before anything is built: the tokenizer and all data."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptSet
    eval: PromptSet
    examples: list[Example]

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids to text, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def read_inputs(loaded: Loaded, verb: Verb) -> TextInputs | None:
    """Tokenizer and data of a run with text; None for simulators. Raises ModelError and DataError."""
    config, base_dir = loaded.config, loaded.base_dir
    if isinstance(config.env, GymnasiumEnv):
        return None
    tokenizer, data = load_tokenizer(config.model), config.data
    train = data.train if verb == "train" else ()
    examples = config.sft.data if config.sft is not None and verb != "eval" else ()
    return TextInputs(
        tokenizer,
        load_prompts(train, data, tokenizer, base_dir=base_dir, role="train"),
        load_prompts(data.eval, data, tokenizer, base_dir=base_dir, role="eval"),
        load_examples(examples, data, tokenizer, base_dir=base_dir),
    )


def build(
    loaded: Loaded, plan: Plan, inputs: TextInputs | None, reporter: Reporter, store: CheckpointStore
) -> Parts:
    """All parts of a run, in the state that a fresh start has."""
    if inputs is None:
        parts = _build_simulator(loaded, plan, reporter, store)
    else:
        parts = _build_text(loaded, plan, inputs, reporter, store)
    if loaded.config.train.record_memory:
        parts.memory = MemoryRecorder(
            reporter.run_dir.memory, device_of(loaded.config), partial(held_bytes, parts)
        )
    return parts


def _build_text(
    loaded: Loaded, plan: Plan, inputs: TextInputs, reporter: Reporter, store: CheckpointStore
) -> Parts:
    config, device = loaded.config, device_of(loaded.config)
    assert isinstance(config.env, SingleTurnEnv | ToolEnv), "simulators are built elsewhere"
    tokenizer = inputs.tokenizer
    if plan.verb == "train":
        _check_sources(loaded, inputs)
    lm = make_policy(config, device)
    engine = NativeEngine(
        lm,
        decode=inputs.decode,
        max_length=getattr(lm.config, "max_position_embeddings", None),
        **config.rollout.native.model_dump(),
    )

    def driver(sampling: SamplingConfig, context: int | None, batch: int | None) -> Driver:
        assert context is not None, "text has a bound on its context"
        driver = TextDriver(
            engine,
            text_env_maker(config.env),  # pyright: ignore[reportArgumentType]  # narrowed above
            tokenizer,
            sampling_of(sampling, tokenizer),
            seed=config.run.seed,
            retries=config.rollout.retries,
            max_context_tokens=context,
        )
        return driver if batch is None else Batches(driver, batch)

    critic = make_critic(config, device, lm) if plan.needs_critic else None
    reference = make_reference(config, device, lm) if plan.needs_reference else None
    keeps_weights = engine.shares_weights
    supervised = _supervised_of(config, plan, inputs.examples, lm, device, keeps_weights)
    policy: TrainingBackend
    if plan.verb == "sft" and supervised:
        policy = supervised.backend
    elif config.train.backend == "single":
        policy = SingleBackend(
            lm, config.train, total_steps=plan.num_steps, device=device, keeps_weights=keeps_weights
        )
    else:
        policy = policy_group(config, plan, lm)
    return Parts(
        config=config,
        plan=plan,
        reporter=reporter,
        store=store,
        sampler=supervised.sampler
        if plan.verb == "sft" and supervised
        else _sampler(config, max(1, len(inputs.train.prompts))),
        train_prompts=inputs.train.prompts,
        eval_prompts=inputs.eval.by_source(),
        driver=driver(config.rollout.sampling, plan.max_trajectory_tokens, config.rollout.request_batch),
        eval_driver=driver(
            config.eval.sampling or config.rollout.sampling,
            plan.eval_max_trajectory_tokens,
            config.eval.batch_prompts,
        ),
        greedy_driver=driver(
            _greedy(config.rollout.sampling), plan.max_trajectory_tokens, config.rollout.request_batch
        )
        if plan.needs_greedy
        else None,
        scorer=build_scorer(
            config.reward,
            base_dir=loaded.base_dir,
            seed=config.run.seed,
            services=reward_services(config, engine, tokenizer, device),
        ),
        policy=policy,
        critic=None if critic is None else critic_backend(config, plan, critic, device),
        reference=None
        if reference is None
        else SingleBackend(reference, train_config(config, "reference"), total_steps=0, device=device),
        supervised=supervised,
        follow_policy=partial(follow, config, lm, critic, reference, policy),
        update_reference=partial(update_reference, lm, reference),
        export=partial(export_model, lm, tokenizer),
        check_weights=_weight_check(config, lm, engine, reporter) if config.rollout.check_weights else None,
        loop=asyncio.Runner(),
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

    def driver(sampling: SamplingConfig, batch: int | None) -> Driver:
        driver = SimulatorDriver(
            simulator, policy, seed=config.run.seed, retries=config.rollout.retries, greedy=sampling.greedy
        )
        return driver if batch is None else Batches(driver, batch)

    return Parts(
        config=config,
        plan=plan,
        reporter=reporter,
        store=store,
        sampler=_sampler(config, NUM_RESET_STATES),
        train_prompts=reset_prompts(env.id, NUM_RESET_STATES),
        eval_prompts={env.id: reset_prompts(env.id, env.eval_episodes)},
        driver=driver(config.rollout.sampling, config.rollout.request_batch),
        eval_driver=driver(config.eval.sampling or config.rollout.sampling, config.eval.batch_prompts),
        greedy_driver=driver(_greedy(config.rollout.sampling), config.rollout.request_batch)
        if plan.needs_greedy
        else None,
        scorer=build_scorer(config.reward, base_dir=loaded.base_dir),
        policy=SingleBackend(
            policy, config.train, total_steps=plan.num_steps, device=device, keeps_weights=True
        ),
        critic=None if critic is None else critic_backend(config, plan, critic, device),
        reference=None,
        supervised=None,
        follow_policy=lambda: None,
        update_reference=lambda: None,
        loop=asyncio.Runner(),
    )


def _sampler(config: RunConfig, num_prompts: int) -> PromptSampler:
    seed = config.run.seed if config.data.seed is None else config.data.seed
    return PromptSampler(num_prompts, seed=seed, shuffle=config.data.shuffle)


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


def _supervised_of(
    config: RunConfig,
    plan: Plan,
    examples: Sequence[Example],
    lm: CausalLM,
    device: torch.device,
    keeps_weights: bool,
) -> Supervised | None:
    sft = config.sft
    if sft is None or plan.verb == "eval":
        return None
    train = config.train.model_copy(update={"optimizer": sft.optimizer})
    return Supervised(
        rows=[_row_of(example, i) for i, example in enumerate(examples)],
        sampler=PromptSampler(len(examples), seed=config.run.seed, shuffle=True),
        backend=SingleBackend(
            lm, train, total_steps=plan.sft_steps, device=device, keeps_weights=keeps_weights
        ),
        num_steps=plan.sft_steps,
        rows_per_step=sft.rows_per_step,
    )


def _row_of(example: Example, number: int) -> Row:
    ids = np.array(example.prompt_ids + example.response_ids, np.int64)
    mask = np.array((False,) * len(example.prompt_ids) + example.response_mask)
    return Row({"input_ids": ids}, mask, group=number, trajectory=number)
