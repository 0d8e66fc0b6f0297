"""Whatever an environment returns or raises, wherever it runs, makes its trajectory invalid, and says
where."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.driven import drive
from tests.envs.odd import ODD, OPENINGS, RAISED
from tests.rollout_drivers.test_agent_driver import ScriptedEngine, _driver, _prompt

from braid.envs.agents.build import AgentEnvs
from braid.envs.agents.hosts import RunIn
from braid.types import Status, Trajectory

CASES = [
    *(("start", what) for what in [*OPENINGS, *RAISED]),
    *(("step", what) for what in [*ODD, *RAISED]),
]


def _played(run_in: RunIn, name: str, cases: list[tuple[str, str]]) -> list[Trajectory]:
    """One trajectory for each case."""
    out: list[Trajectory] = []
    for at, what in cases:
        envs = AgentEnvs(f"tests.envs.odd.{name}", {"at": at, "what": what}, Path(), run_in, 1)
        driver = _driver(ScriptedEngine(lambda _: ("a", "stop")), envs, retries=0)
        try:
            (group,) = drive(driver, [_prompt("1+1=")], 1)
        finally:
            asyncio.run(envs.close())
        out += group.trajectories
    return out


@pytest.mark.parametrize("name", ["OddEnv", "OddAsyncEnv"])
@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_odd_values_and_exceptions_make_trajectories_invalid(run_in: RunIn, name: str) -> None:
    for (at, what), trajectory in zip(CASES, _played(run_in, name, CASES), strict=True):
        assert trajectory.status is Status.INVALID, (at, what)
        assert trajectory.reason.startswith("environment: "), (at, what, trajectory.reason)
        if what in RAISED and not (
            name == "OddAsyncEnv" and "Stop" in what
        ):  # a coroutine turns these into RuntimeErrors
            assert "odd.py:" in trajectory.reason, (at, what, trajectory.reason)


@pytest.mark.slow
@pytest.mark.parametrize("run_in", ["process"])
def test_the_same_in_processes(run_in: RunIn) -> None:
    """A sample: each failure costs a process."""
    cases = [case for number, case in enumerate(CASES) if case[1] in RAISED or number % 6 == 0]
    for (at, what), trajectory in zip(cases, _played(run_in, "OddEnv", cases), strict=True):
        assert trajectory.status is Status.INVALID, (at, what)
        assert trajectory.reason.startswith("environment: "), (at, what, trajectory.reason)


def test_an_odd_end_changes_no_trajectory() -> None:
    (trajectory,) = _played("inline", "OddEnv", [("close", "StopIteration")])
    assert trajectory.status is Status.FINISHED
