"""The inputs of a text run, read before anything is built: tokenizer and data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from braid.config.env import (
    AgentEnvConfig,
    EnvConfig,
    GymnasiumEnv,
    LiberoEnv,
    ManiskillEnv,
    MetaworldEnv,
    RobosuiteEnv,
    SimulatorEnv,
)
from braid.config.load import Loaded
from braid.config.schema import RunConfig
from braid.data.prompts import NOTHING, Prompts, PromptSet, load_prompts
from braid.data.sampler import MixedSampler, PromptSampler
from braid.data.worked import ExampleSet, load_examples
from braid.envs.agents.build import kind_of
from braid.envs.simulators.base import EpisodeRules, reset_prompts
from braid.errors import ConfigError, Problem
from braid.models.tokenizer import end_token_ids, load_tokenizer, whole_text
from braid.plan import Verb, policy_size
from braid.plan.rewards import mix_problems, source_problems, weight_problems
from braid.plan.unused import has_own_tasks
from braid.rollout.collector import Use
from braid.types import Prompt

from .conversations import chat_format

NUM_RESET_STATES = 2**12
"""Number of reset states in an epoch of a simulator."""
_ADAPTERS = "braid.envs.simulators.adapters"


@dataclass(frozen=True, slots=True)
class TextInputs:
    """The tokenizer and all data."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptSet
    eval: PromptSet
    examples: ExampleSet
    end_token_ids: tuple[int, ...]
    """Ids of all tokens that end an answer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids to text, with special tokens."""
        return whole_text(self.tokenizer, ids)

    @property
    def prompts(self) -> dict[Use, Sequence[Prompt]]:
        """Prompts by use, in the order of their indices."""
        places = np.concatenate([NOTHING, *self.eval.prompts.places_by_source().values()])
        return {"train": self.train.prompts, "eval": self.eval.prompts.chosen(places)}


def read_inputs(loaded: Loaded, verb: Verb) -> TextInputs | None:
    """Read the tokenizer and data of a text run; None for simulators. Raises ModelError and DataError."""
    config, base_dir = loaded.config, loaded.base_dir
    if isinstance(config.env, SimulatorEnv):
        return None
    tokenizer, data = load_tokenizer(config.model), config.data
    ends = end_token_ids(config.model, tokenizer)
    train = data.train if verb == "train" else ()
    examples = config.sft.data if config.sft is not None and verb != "eval" else ()
    size = policy_size(config)
    max_positions = None if size is None else size.max_positions
    prompts = {
        "train": load_prompts(train, data, tokenizer, base_dir=base_dir, role="train"),
        "eval": load_prompts(data.eval, data, tokenizer, base_dir=base_dir, role="eval"),
    }
    if has_own_tasks(config):
        prompts = _own_tasks(config.env)
    return TextInputs(
        tokenizer,
        prompts["train"],
        prompts["eval"],
        load_examples(
            examples,
            data,
            tokenizer,
            conversation=chat_format(config, tokenizer, ends).examples,
            base_dir=base_dir,
            max_positions=max_positions,
            end_token_ids=ends,
        ),
        ends,
    )


def _own_tasks(env: EnvConfig) -> dict[str, PromptSet]:
    """Prompts of a text environment that makes its tasks from seeds."""
    assert isinstance(env, AgentEnvConfig), "other environments need data"
    shares = {
        kind: (of.share, of.share if of.eval_share is None else of.eval_share) for kind, of in env.mix.items()
    }
    if env.name is not None:
        shares = {re.split(r"[.:]", env.name)[-1]: (1.0, 1.0)}
    prompts = {}
    for i, (use, count) in enumerate((("train", env.tasks), ("eval", env.eval_episodes))):
        ends = np.cumsum([0.0, *(of[i] for of in shares.values())])
        counts = np.diff(np.rint(count * ends / ends[-1]).astype(int)).tolist()
        of_kinds = (reset_prompts(kind, num) for kind, num in zip(shares, counts, strict=True))
        prompts[use] = PromptSet(Prompts(list(of_kinds)), {})
    return prompts


@dataclass(frozen=True, slots=True)
class Environment:
    """What makes the environments of a simulator: their name, the registered id, class or function, its
    arguments, and whether it makes a VectorEnv."""

    name: str
    id: str
    kwargs: dict[str, Any]
    is_vectorized: bool = False


def environment_of(env: SimulatorEnv) -> Environment:
    own = env.model_dump(exclude={"kind", *SimulatorEnv.model_fields})
    own["max_episode_steps"] = env.max_episode_steps
    if isinstance(env, MetaworldEnv):
        own["render_mode"] = "rgb_array" if env.video.are_saved else None
        return Environment(env.task, f"{_ADAPTERS}.metaworld.MetaWorld", own)
    if isinstance(env, ManiskillEnv):
        return _maniskill(env)
    if isinstance(env, RobosuiteEnv):
        return Environment(env.task, f"{_ADAPTERS}.robosuite.Robosuite", own)
    if isinstance(env, LiberoEnv):
        return Environment(env.suite, f"{_ADAPTERS}.libero.Libero", own)
    assert isinstance(env, GymnasiumEnv), "there are no others"
    return Environment(env.id, env.id, env.kwargs, env.vectorized)


def _maniskill(env: ManiskillEnv) -> Environment:
    size = {"height": env.camera_height, "width": env.camera_width}
    modes = {name: getattr(env, name) for name in ("obs_mode", "control_mode", "reward_mode")}
    own = {name: mode for name, mode in modes.items() if mode is not None}
    own |= {"task": env.task, "max_episode_steps": env.max_episode_steps, "gripper": env.gripper}
    own |= {**env.kwargs, "sensor_configs": size | env.kwargs.get("sensor_configs", {})}
    if env.video.are_saved:
        own = {"render_mode": "rgb_array", **own}
    if env.on_gpu:
        own["ignore_terminations"] = env.ignore_terminations
    form = "ManiSkillBatch" if env.on_gpu else "ManiSkill"
    return Environment(env.task, f"{_ADAPTERS}.maniskill.{form}", own, env.on_gpu)


def reset_states(env: SimulatorEnv) -> dict[Use, list[Prompt]]:
    """Prompts of a simulator: its reset states."""
    name = environment_of(env).name
    return {
        "train": reset_prompts(name, NUM_RESET_STATES, _seeds(env.reset_seeds)),
        "eval": reset_prompts(name, env.eval_episodes, _seeds(env.eval_reset_seeds)),
    }


def _seeds(given: int | Sequence[int] | None) -> Sequence[int] | None:
    return range(given) if isinstance(given, int) else given


def rules_of(env: SimulatorEnv) -> EpisodeRules:
    """The rules of a simulator's episodes."""
    is_in_scene = isinstance(env, ManiskillEnv) and env.on_gpu
    return EpisodeRules(
        env.max_episode_steps,
        env.ignore_terminations and not is_in_scene,
        env.relative_reward,
        env.reward_scale,
        isinstance(env, GymnasiumEnv) and env.rescale_actions,
        env.step_penalty,
    )


def check_sources(loaded: Loaded, inputs: TextInputs) -> None:
    """Raise ConfigError if reward parts or data.mix name sources that the data does not have. Needs all data
    to have been read."""
    trained, evaluated = (set(of.prompts.sources) for of in (inputs.train, inputs.eval))
    data = loaded.config.data
    by_row = any(source.source_key is not None for source in (*data.train, *data.eval))
    found = [
        *source_problems(loaded.config.reward.parts, trained, evaluated, data.mix, by_row=by_row),
        *mix_problems(data.mix, trained),
        *weight_problems(loaded.config, trained | evaluated),
    ]
    env = loaded.config.env
    if isinstance(env, AgentEnvConfig) and env.mix:
        prompts = (inputs.train.prompts + inputs.eval.prompts).untokenized(messages=False)
        kinds = {kind_of(prompt, env.mix_key) for prompt in prompts}
        if unknown := sorted(kinds - set(env.mix)):
            why = f"the data has prompts for the environment {unknown[0]!r}, which is not in env.mix"
            found.append(("env.mix", f"{why} ({', '.join(env.mix)})"))
    if found:
        raise ConfigError([loaded.placed(Problem(key, message)) for key, message in found])


def prompt_sampler(config: RunConfig, num_prompts: int, prompts: Prompts | None = None) -> PromptSampler:
    """The sampling order of `num_prompts` prompts, by the shares of data.mix if set."""
    seed = config.run.seed if config.data.seed is None else config.data.seed
    mix = [(of.sources, of.share) for of in config.data.mix]
    if isinstance(config.env, AgentEnvConfig) and has_own_tasks(config):
        mix = [((kind,), of.share) for kind, of in config.env.mix.items()]
    if not mix or not prompts:
        return PromptSampler(num_prompts, seed=seed, shuffle=config.data.shuffle)
    named = {name for sources, _ in mix for name in sources}
    groups = [(np.flatnonzero(prompts.are_covered(sources, named)), share) for sources, share in mix]
    return MixedSampler(groups, seed=seed, shuffle=config.data.shuffle)
