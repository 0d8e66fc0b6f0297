"""A batched simulator whose observations, rewards and ends are tensors, as of a scene on a GPU."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode


class OnDevice(torch.Tensor):
    """A tensor that is no array, as on a GPU. `cpu` gives a plain one, and is counted in `moved`."""

    moved = 0

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an observation was read as an array")

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an observation was made an array")

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        OnDevice.moved += 1
        return self.as_subclass(torch.Tensor).cpu()


class Drifting(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Observes the seed of its reset and the sum of its actions, also as an image; ends after three steps."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012  # Gymnasium's

    def __init__(self, *, num_envs: int, device: str = "cpu", is_guarded: bool = False) -> None:
        """With `is_guarded` observations are OnDevice."""
        self.num_envs, self._is_guarded = num_envs, is_guarded
        self.single_observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
                "state": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            }
        )
        self.single_action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._state = torch.zeros(num_envs, 2, device=device)
        self._steps = torch.zeros(num_envs, device=device)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        for slot in np.flatnonzero(options["reset_mask"]):
            self._state[slot, 0], self._state[slot, 1], self._steps[slot] = seed[slot] % 100, 0, 0
        return self._seen(), {}

    def step(self, actions: Any) -> Any:
        self._state[:, 1] += torch.as_tensor(actions[:, 0], device=self._state.device)
        self._steps += 1
        is_over = self._steps >= 3
        return self._seen(), self._state[:, 1], is_over, torch.zeros_like(is_over), {"success": is_over}

    def _seen(self) -> Any:
        image = (self._state.sum(1) * 10 % 256).byte().view(-1, 1, 1, 1).repeat(1, 8, 8, 3)
        observations = {"image": image, "state": self._state.clone()}
        return (
            {name: tensor.as_subclass(OnDevice) for name, tensor in observations.items()}
            if self._is_guarded
            else observations
        )
