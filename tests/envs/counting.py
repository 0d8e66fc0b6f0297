"""Environments that count, as VectorEnvs in each auto-reset mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

HOT = -0.75


class Counting(gymnasium.Env[Any, Any]):
    """Observes the seed of its reset (-1: none) and the number of steps since; ends after `length` steps,
    truncated with an even seed. The reward is the action, which fails if it is HOT."""

    observation_space = spaces.Box(-1, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, length: int) -> None:
        self._length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._seed, self._count = -1 if seed is None else seed, 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        if action[0] == HOT:
            raise RuntimeError("the motor is hot")
        self._count += 1
        is_over, is_cut = self._count >= self._length, self._seed % 2 == 0
        info = {"is_success": is_over}
        return self._seen(), float(action[0]), is_over and not is_cut, is_over and is_cut, info

    def _seen(self) -> Any:
        return np.array([self._seed, self._count], np.float32)


def _vector(mode: AutoresetMode, *, num_envs: int, length: int = 3) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Counting, length)] * num_envs, autoreset_mode=mode)


disabled = partial(_vector, AutoresetMode.DISABLED)
same_step = partial(_vector, AutoresetMode.SAME_STEP)
next_step = partial(_vector, AutoresetMode.NEXT_STEP)
