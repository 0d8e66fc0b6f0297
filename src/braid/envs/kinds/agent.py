"""Text environments of several turns: adapters, or classes of the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from braid.sections import Section, Unused
from braid.types import Prompt

from .text import Close, SteppedEnv

if TYPE_CHECKING:
    from braid.config.schema import RunConfig
    from braid.envs.agents.base import AgentEnv
    from braid.plan.plan import Plan


class MixedEnvConfig(Section):
    """One kind of environment in a mixture."""

    name: str
    """Name of an adapter, or a class of your own, as env.name."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    share: NonNegativeFloat = 1.0
    """Share of the training tasks, relative to those of the others, for environments that make their own
    tasks."""
    eval_share: NonNegativeFloat | None = None
    """Share of the evaluation's episodes; null for `share`."""
    max_turns: PositiveInt | None = None
    """Maximum turns of the policy, after which the trajectory is truncated; null for env.max_turns, which is
    an upper bound."""


class OpponentsConfig(Section):
    """Agents that are played by earlier weights of the policy: those that an environment names in
    `opponents`."""

    every_rounds: NonNegativeInt = 0
    """Give opponents the policy's weights in rounds that are a multiple of this; 0: they keep its first
    weights."""


class AgentEnvConfig(SteppedEnv):
    """A text environment, or a mixture of several: adapters by name, or classes of your own."""

    kind: Literal["agent"]
    """A text environment of several turns."""
    name: str | None = None
    """Name of an adapter (gymnasium, skyrl_gym, gem, reasoning_gym, textarena, textarena_self_play,
    textworld, openenv, guess, templated, team), or package.module.Class or file.py:Class of your own; null
    for a mixture."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    mix: dict[str, MixedEnvConfig] = Field(default_factory=dict)
    """Kinds of environments, by names of your own, which are the sources of their tasks. With data, a
    prompt's source or column mix_key names its kind."""
    mix_key: str | None = None
    """Column of the data that names the kind of a prompt's environment in mix; null for the prompt's
    source."""
    opponents: OpponentsConfig | None = None
    """Weights of the opponents in an environment of several agents; null if there are none. Needs a second
    copy of the policy's weights in every rollout worker, and the native engine."""
    run_in: Literal["auto", "inline", "thread", "process"] = "auto"
    """Where the environment's methods run: on the event loop (async methods), in threads, or in processes.
    auto: as the environment demands; async methods inline, others in threads."""
    processes: PositiveInt = 2
    """Processes per rollout worker where run_in is process; each runs one episode at a time."""
    tasks: PositiveInt = 4096
    """Number of tasks, each a seed, for environments that need no data (data.train is empty)."""
    eval_episodes: PositiveInt = 100
    """Episodes per evaluation where data.eval is empty, each with its own seed."""

    @model_validator(mode="after")
    def _one_or_several(self) -> AgentEnvConfig:
        if (self.name is None) == (not self.mix):
            raise ValueError("set either `name`, or several environments in `mix`")
        for name in ("share", "eval_share"):
            shares = [
                kind.share if (share := getattr(kind, name)) is None else share for kind in self.mix.values()
            ]
            if self.mix and not any(shares):
                raise ValueError(f"every {name} in `mix` is 0; raise one of them")
        return self

    gives_rewards: ClassVar[bool] = True
    makes_tasks: ClassVar[bool] = True

    @property
    def uses_tools(self) -> bool:
        return self.name == "team"

    @property
    def num_own_tasks(self) -> int:
        return self.tasks

    @property
    def mixture(self) -> Mapping[str, MixedEnvConfig]:
        return self.mix

    def kind_of_task(self, task: Prompt) -> str:
        return task.source if self.mix_key is None else str(task.fields.get(self.mix_key, task.source))

    @property
    def opponents_every_rounds(self) -> int | None:
        return None if self.opponents is None else self.opponents.every_rounds

    def own_tasks(self, use: Literal["train", "eval"]) -> dict[str, int]:
        count, shares = self.tasks, {kind: mixed.share for kind, mixed in self.mix.items()}
        if use == "eval":
            count = self.eval_episodes
            shares = {
                kind: share if (other := self.mix[kind].eval_share) is None else other
                for kind, share in shares.items()
            }
        if self.name is not None:
            shares = {re.split(r"[.:]", self.name)[-1]: 1.0}
        ends = np.cumsum([0.0, *shares.values()])
        counts = np.diff(np.rint(count * ends / ends[-1]).astype(int)).tolist()
        return dict(zip(shares, counts, strict=True))

    def environments(self, base_dir: Path) -> tuple[Callable[[], AgentEnv], Close]:
        from braid.envs.agents.build import AgentEnvs, MixedEnvs

        def hosted(name: str, kwargs: dict[str, Any]) -> AgentEnvs:
            return AgentEnvs(name, kwargs, base_dir, self.run_in, self.processes)

        if self.name is not None:
            envs = hosted(self.name, self.kwargs)
        else:
            kinds = {
                kind: (hosted(mixed.name, mixed.kwargs), mixed.max_turns) for kind, mixed in self.mix.items()
            }
            envs = MixedEnvs(kinds, self.kind_of_task)
        return envs, envs.close

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if self.mix:
            yield "env.mix names the environments", "env.kwargs"
        if config.makes_tasks:
            yield "there is no data", "env.mix_key data.{max_prompt_tokens,overlong}"
        else:
            shares = [f"env.mix.{kind}.{{share,eval_share}}" for kind in self.mix]
            yield "the data gives the tasks", " ".join(("env.{tasks,eval_episodes}", *shares))
        yield from super().unused(config, plan)
