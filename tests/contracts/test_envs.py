"""The contract of environments."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.leftovers import LIMIT_S

from braid.envs.agents.base import AgentEnv, Step
from braid.envs.agents.single_turn import SingleTurn
from braid.envs.agents.toolboxes import ToolEnvs
from braid.envs.kinds import ToolsEnv
from braid.envs.simulators.base import Simulator
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.envs.simulators.processes import SimulatorProcesses
from braid.envs.simulators.remote import RemoteSimulator, SimulatorHost
from braid.types import Action, Prompt, ToolCall


class Apart:
    """A worker in this process, which everything reaches as a copy."""

    def __init__(self, num_envs: int) -> None:
        self._host = SimulatorHost(GymnasiumSimulator("Pendulum-v1", num_envs))

    def start(self, method: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        answer = method(self._host, *pickle.loads(pickle.dumps(args)))
        return lambda: pickle.loads(pickle.dumps(answer))


AGENT_ENVS: dict[str, Callable[[], AgentEnv]] = {
    "single_turn": SingleTurn,
    "tools": ToolEnvs(ToolsEnv(kind="tools"), Path()),
}
SIMULATORS: dict[str, Callable[[int], Simulator]] = {
    "CartPole-v1": lambda n: GymnasiumSimulator("CartPole-v1", n),
    "Pendulum-v1": lambda n: GymnasiumSimulator("Pendulum-v1", n),
    "FrozenLake-v1": lambda n: GymnasiumSimulator("FrozenLake-v1", n),
    "in processes": lambda n: SimulatorProcesses("Pendulum-v1", n, num_processes=2, timeout_s=LIMIT_S),
    "in workers": lambda n: RemoteSimulator([Apart(size) for size in (n - n // 2, n // 2) if size]),
}
PROMPT = Prompt("test:0", "test", (1,), ({"role": "user", "content": "2*3="},))


@pytest.fixture(params=AGENT_ENVS)
def new_env(request: pytest.FixtureRequest) -> Callable[[], AgentEnv]:
    return AGENT_ENVS[request.param]


CALL = Action("", tool_calls=(ToolCall("calculator", {"expression": "1+1"}, "a"),))


async def _talk(env: AgentEnv, actions: Sequence[Action]) -> list[Step]:
    await env.start(PROMPT, 0)
    steps: list[Step] = []
    for action in actions:
        steps.append(await env.step(action))
        if steps[-1].is_done:
            break
    await env.close()
    return steps


@pytest.mark.parametrize("text", ["", "6", "<calculator>", "é\x00<<calc>>"])
def test_an_answer_without_calls_ends_an_episode(new_env: Callable[[], AgentEnv], text: str) -> None:
    (step,) = asyncio.run(_talk(new_env(), [Action(text)] * 3))
    assert step.is_done


def test_episodes_are_independent(new_env: Callable[[], AgentEnv]) -> None:
    actions = [CALL, CALL, Action("done")]

    async def beside() -> list[list[Step]]:
        return await asyncio.gather(*(_talk(new_env(), actions) for _ in range(5)))

    alone = asyncio.run(_talk(new_env(), actions))
    assert asyncio.run(beside()) == [alone] * 5


def test_an_environment_can_be_closed_at_any_time(new_env: Callable[[], AgentEnv]) -> None:
    async def close() -> None:
        await new_env().close()
        env = new_env()
        await env.start(PROMPT, 0)
        await env.close()

    asyncio.run(close())


@pytest.fixture(params=SIMULATORS)
def new_simulator(request: pytest.FixtureRequest) -> Callable[[int], Simulator]:
    return SIMULATORS[request.param]


def _action(simulator: Simulator, number: int) -> NDArray:
    space = simulator.spaces.actions
    if space.kind == "discrete":
        return np.array([number % space.size])
    return np.full((1, space.size), np.sin(number), np.float32)


def _play(
    simulator: Simulator, slot: int, seed: int, steps: int = 20
) -> list[tuple[bytes, float, bool, bool]]:
    """One episode's first ticks, as seen from its slot."""
    tick = simulator.reset({slot: seed})
    ticks = [(tick.observations["state"][slot].tobytes(), 0.0, False, False)]
    for number in range(steps):
        tick = simulator.step({slot: _action(simulator, number)})
        assert not tick.failures
        is_over = bool(tick.is_terminated[slot]), bool(tick.is_truncated[slot])
        ticks.append((tick.observations["state"][slot].tobytes(), float(tick.rewards[slot, 0]), *is_over))
        if any(is_over):
            break
    return ticks


def test_ticks_have_the_declared_shapes(new_simulator: Callable[[int], Simulator]) -> None:
    simulator = new_simulator(3)
    assert simulator.num_envs == 3
    simulator.reset({0: 1, 1: 2, 2: 3})
    tick = simulator.step({slot: _action(simulator, slot) for slot in range(3)})
    assert tick.observations["state"].shape == (3, simulator.spaces.state_size)
    assert tick.observations["state"].dtype == np.float32
    assert tick.rewards.shape == tick.success.shape == (3, 1)
    for array in (tick.num_executed, tick.is_terminated, tick.is_truncated):
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
    assert [t.observations["state"][0].tobytes() for t in ticks] == [o for o, *_ in expected[1:]]
    assert len(tick.observations["state"]) == 2
    for each in (simulator, alone):
        each.close()
