"""Throughput with slow environments, by a simulated clock: sleeping takes no time, and everything else none
of the clock's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from tests.driven import groups_of
from tests.rollout_drivers.test_agent_driver import ScriptedEngine, _driver, _prompt

from braid.envs.agents.base import Opening, Step
from braid.envs.agents.hosts import HostedEnvs
from braid.types import Action, Group, Prompt, Status

NUM_TURNS, DEADLINE_S = 3, 5.0


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer when nothing else is left to do."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # pyright: ignore[reportAttributeAccessIssue]
            self.now_s = max(self.now_s, self._scheduled[0].when())  # pyright: ignore[reportAttributeAccessIssue]
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue]


class Slow:
    """Each step takes a log-normal time, mean 50 ms and 99th percentile 480 ms. Episode `hangs` never returns
    from its second step."""

    def __init__(self, latencies: dict[int, float], ends: dict[int, float], hangs: int | None) -> None:
        self.latencies, self.ends, self.number, self.num_steps = latencies, ends, len(latencies), 0
        self.hangs = hangs
        latencies[self.number] = 0.0

    async def start(self, task: Prompt, seed: int) -> Opening:
        return Opening()

    async def step(self, action: Action) -> Step:
        self.num_steps += 1
        if self.number == self.hangs and self.num_steps == 2:
            await asyncio.Event().wait()
        latency = random.lognormvariate(-4.0, 1.4)
        self.latencies[self.number] += latency
        await asyncio.sleep(latency)
        return Step([{"role": "user", "content": "b"}], is_done=self.num_steps == NUM_TURNS)

    async def close(self) -> None:
        self.ends[self.number] = asyncio.get_running_loop().time()


def _play(hangs: int | None = None) -> tuple[list[Group], dict[int, float], dict[int, float]]:
    """256 episodes: the groups, the latency of each in all, and when it ended."""
    latencies, ends = dict[int, float](), dict[int, float]()
    make: Callable[[], Slow] = lambda: Slow(latencies, ends, hangs)  # noqa: E731
    driver = _driver(
        ScriptedEngine(lambda _: ("a", "stop")), HostedEnvs(make, "inline", 1), step_s=DEADLINE_S
    )
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        groups = runner.run(groups_of(driver, [_prompt(str(i)) for i in range(32)], 8))
    return groups, latencies, ends


def test_256_episodes_take_as_long_as_the_slowest_of_them() -> None:
    groups, latencies, ends = _play()
    assert len(ends) == sum(len(g.trajectories) for g in groups) == 256
    assert ends == pytest.approx(latencies), "no episode waits for another"
    assert max(ends.values()) == pytest.approx(max(latencies.values()))


def test_an_episode_that_hangs_costs_its_deadline_once_and_delays_nobody() -> None:
    hung = 100
    groups, latencies, ends = _play(hung)
    attempts = [t.attempts for g in groups for t in g.trajectories]
    assert all(t.status is Status.FINISHED for g in groups for t in g.trajectories)
    assert (attempts.count(1), attempts.count(2)) == (255, 1)
    again = max(ends)
    late = {hung: latencies[hung] + DEADLINE_S, again: latencies[hung] + DEADLINE_S + latencies[again]}
    assert ends == pytest.approx(latencies | late)
