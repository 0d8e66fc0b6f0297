"""Rules of episodes that hold for environments of any origin: their time limit, their end, and their rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, SupportsFloat

import gymnasium


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """See config.rollout.SimulatorEnv. `max_episode_steps` is None for the environment's own limit."""

    max_episode_steps: int | None = None
    ignore_terminations: bool = False
    relative_reward: bool = False
    reward_scale: float = 1.0


AS_IT_IS = EpisodeRules()


class RuledEnv(gymnasium.Wrapper):
    """An environment under EpisodeRules, except for the time limit: the reward of env step t is scale * r_t, or
    scale * (r_t - r_{t-1}) if relative, with r_0 = 0."""

    def __init__(self, env: gymnasium.Env, rules: EpisodeRules) -> None:
        super().__init__(env)
        self._rules = rules
        self._before = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._before = 0.0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, is_terminated, is_truncated, info = super().step(action)
        of = self._rules
        scaled = of.reward_scale * float(reward)
        reward = scaled - self._before if of.relative_reward else scaled
        self._before = scaled
        return observation, reward, is_terminated and not of.ignore_terminations, is_truncated, info
