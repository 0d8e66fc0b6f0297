"""An environment with the methods of skyrl-gym's, as users of SkyRL write them: right answers in as many
turns as allowed."""

from __future__ import annotations

from typing import Any


class Sums:
    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        self._answer, self._left = extras["reward_spec"]["ground_truth"], extras["max_turns"]

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        self._left -= 1
        self._is_right = action.strip() == self._answer
        is_done = self._is_right or self._left == 0
        observations = [] if is_done else [{"role": "user", "content": "no\n"}]
        return {
            "observations": observations,
            "reward": float(self._is_right),
            "done": is_done,
            "metadata": {},
        }

    def get_metrics(self) -> dict[str, float]:
        return {"right": float(self._is_right)}

    def close(self) -> None:
        """Nothing to free."""
