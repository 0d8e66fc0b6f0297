"""Environments under the rules of episodes (base.EpisodeRules)."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium

from .base import EpisodeRules


class RuledEnv(gymnasium.Wrapper):
    """An environment under EpisodeRules, except for time limit and actions."""

    def __init__(self, env: gymnasium.Env, rules: EpisodeRules) -> None:
        super().__init__(env)
        self._rules = rules
        self._before = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._before = 0.0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, is_terminated, is_truncated, info = super().step(action)
        reward, self._before = self._rules.reward(float(reward), self._before)
        is_terminated = is_terminated and not self._rules.ignore_terminations
        return observation, reward, is_terminated, is_truncated, info
