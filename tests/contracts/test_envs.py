"""The contract of environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from braid.config.rollout import SingleTurnEnv, ToolEnv
from braid.envs.simulators.base import Simulator
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.envs.text.base import Reply, TextEnv
from braid.envs.text.build import text_env_maker
from braid.types import Prompt

TEXT_ENVS: dict[str, Callable[[], TextEnv]] = {
    "single_turn": text_env_maker(SingleTurnEnv()),
    "tools": text_env_maker(ToolEnv(kind="tools", max_turns=3)),
}
SIMULATORS: dict[str, Callable[[int], Simulator]] = {
    "CartPole-v1": lambda n: GymnasiumSimulator("CartPole-v1", n),
    "Pendulum-v1": lambda n: GymnasiumSimulator("Pendulum-v1", n),
    "FrozenLake-v1": lambda n: GymnasiumSimulator("FrozenLake-v1", n),
}
PROMPT = Prompt("test:0", "test", (1,), ({"role": "user", "content": "2*3="},))


@pytest.fixture(params=TEXT_ENVS)
def new_env(request: pytest.FixtureRequest) -> Callable[[], TextEnv]:
    return TEXT_ENVS[request.param]


async def _talk(env: TextEnv, says: str, limit: int) -> list[Reply]:
    await env.start(PROMPT)
    replies = [await env.reply(says)]
    while not (replies[-1].is_done or replies[-1].is_truncated) and len(replies) < limit:
        replies.append(await env.reply(says))
    return replies


@pytest.mark.parametrize("says", ["", "6", "<calc>2*3</calc>", "<calc></calc>", "é\x00<<calc>>"])
def test_a_conversation_ends(new_env: Callable[[], TextEnv], says: str) -> None:
    replies = asyncio.run(_talk(new_env(), says, limit=10))
    assert replies[-1].is_done != replies[-1].is_truncated


def test_conversations_are_independent(new_env: Callable[[], TextEnv]) -> None:
    async def beside() -> list[list[Reply]]:
        return await asyncio.gather(*(_talk(new_env(), "<calc>1+1</calc>", 10) for _ in range(5)))

    alone = asyncio.run(_talk(new_env(), "<calc>1+1</calc>", 10))
    assert asyncio.run(beside()) == [alone] * 5


def test_stop_strings_are_known_before_the_start(new_env: Callable[[], TextEnv]) -> None:
    assert all(new_env().stop_strings)


@pytest.fixture(params=SIMULATORS)
def new_simulator(request: pytest.FixtureRequest) -> Callable[[int], Simulator]:
    return SIMULATORS[request.param]


def _action(simulator: Simulator, number: int) -> NDArray:
    space = simulator.action_space
    if space.kind == "discrete":
        return np.array(number % space.size)
    return np.full(space.size, np.sin(number), np.float32)


def _play(
    simulator: Simulator, slot: int, seed: int, steps: int = 20
) -> list[tuple[bytes, float, bool, bool]]:
    """One episode's first ticks, as seen from its slot."""
    tick = simulator.reset({slot: seed})
    seen = [(tick.observations[slot].tobytes(), 0.0, False, False)]
    for number in range(steps):
        tick = simulator.step({slot: _action(simulator, number)})
        assert not tick.failures
        is_over = bool(tick.is_terminated[slot]), bool(tick.is_truncated[slot])
        seen.append((tick.observations[slot].tobytes(), float(tick.rewards[slot]), *is_over))
        if any(is_over):
            break
    return seen


def test_ticks_have_the_declared_shapes(new_simulator: Callable[[int], Simulator]) -> None:
    simulator = new_simulator(3)
    assert simulator.num_envs == 3
    simulator.reset({0: 1, 1: 2, 2: 3})
    tick = simulator.step({slot: _action(simulator, slot) for slot in range(3)})
    assert tick.observations.shape == (3, simulator.observation_size)
    assert tick.observations.dtype == np.float32
    for array in (tick.rewards, tick.is_terminated, tick.is_truncated):
        assert array.shape == (3,)
    simulator.close()


def test_a_seed_and_actions_decide_an_episode_in_any_slot(new_simulator: Callable[[int], Simulator]) -> None:
    simulator = new_simulator(2)
    first = _play(simulator, 0, seed=5)
    assert _play(simulator, 1, seed=5) == first
    assert _play(simulator, 0, seed=5) == first, "nothing of the episode before is left"
    simulator.close()


def test_slots_that_are_not_named_do_not_move(new_simulator: Callable[[int], Simulator]) -> None:
    simulator, alone = new_simulator(2), new_simulator(1)
    simulator.reset({0: 7, 1: 8})
    expected = _play(alone, 0, seed=7)
    tick = simulator.step({1: _action(simulator, 0)})
    ticks = [simulator.step({0: _action(simulator, n)}) for n in range(len(expected) - 1)]
    assert [t.observations[0].tobytes() for t in ticks] == [o for o, *_ in expected[1:]]
    assert tick.observations.shape[0] == 2
    for each in (simulator, alone):
        each.close()
