"""PushT (gym-pusht) through Gymnasium."""

from __future__ import annotations

from contextlib import closing

import gymnasium
import numpy as np
import pytest
from tests.needs import needs

from braid.envs.simulators.base import EpisodeRules
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.types import ActionSpace, Spaces

pytestmark = [
    needs("gym_pusht"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
PUSHT = "gym_pusht:gym_pusht/PushT-v0"


def test_actions_from_minus_one_to_one_cover_its_pixels_and_success_is_read() -> None:
    rules = EpisodeRules(max_episode_steps=4, rescale_actions=True)
    bare = gymnasium.make(PUSHT, obs_type="state")
    with closing(GymnasiumSimulator(PUSHT, 1, {"obs_type": "state"}, rules=rules)) as simulator:
        assert simulator.spaces == Spaces(5, ActionSpace("continuous", 2), {})
        expected, _ = bare.reset(seed=3)
        np.testing.assert_array_equal(
            simulator.reset({0: 3}).observations["state"][0], expected.astype(np.float32)
        )
        tick = simulator.step({0: np.array([[-1, 1], [0, 0.5], [2, 0], [0, 0]], np.float32)})
        for action in ([0, 512], [256, 384], [512, 256], [256, 256]):
            expected, *_ = bare.step(np.array(action, np.float32))
        np.testing.assert_allclose(tick.observations["state"][0], expected, rtol=1e-5)
        assert tick.success[0].tolist() == [0.0] * 4
        assert tick.is_truncated[0]


def test_images_are_observations() -> None:
    with closing(GymnasiumSimulator(PUSHT, 1, {"obs_type": "pixels_agent_pos"})) as simulator:
        assert simulator.spaces == Spaces(2, ActionSpace("continuous", 2), {"pixels": (96, 96, 3)})
        assert simulator.reset({0: 1}).observations["pixels"][0].std() > 0
