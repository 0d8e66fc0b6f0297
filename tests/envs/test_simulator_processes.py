from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.driven import drive
from tests.envs.unruly import CRASH, EXIT, GO_ON, HANG, INTERRUPT, RAISE, SPAWN
from tests.leftovers import LIMIT_S, await_end

from braid.config.model import MlpSpec
from braid.envs.simulators import processes
from braid.envs.simulators.base import Tick, reset_prompts
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.envs.simulators.processes import SimulatorProcesses
from braid.errors import ConfigError
from braid.models.mlp import MlpPolicy
from braid.rollout.drivers.simulators import SimulatorDriver
from braid.rollout.engines.simulators import SimulatorEngine
from braid.types import Status, Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]

UNRULY = "tests.envs.unruly:Unruly-v0"
LATE_S = 3.0
"""The deadline where an environment hangs; others have to answer within it."""


@pytest.fixture
def unruly() -> Iterator[SimulatorProcesses]:
    """Four environments that have begun, in two processes."""
    with closing(SimulatorProcesses(UNRULY, 4, num_processes=2, timeout_s=LIMIT_S)) as simulator:
        simulator.reset(dict.fromkeys(range(4), 0))
        yield simulator


def _step(simulator: SimulatorProcesses, **actions: int) -> Tick:
    return simulator.step({int(name[1:]): np.array([action]) for name, action in actions.items()})


def _late_step(simulator: SimulatorProcesses, **actions: int) -> Tick:
    simulator.timeout_s = LATE_S
    tick = _step(simulator, **actions)
    simulator.timeout_s = LIMIT_S
    return tick


def test_processes_divide_the_threads_of_the_one_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with closing(SimulatorProcesses(UNRULY, 4, num_processes=2, timeout_s=LIMIT_S)):
        started = [
            p.environ()
            for p in psutil.Process().children()
            if "braid.envs.simulators.processes" in p.cmdline()
        ]
    assert [environment["OMP_NUM_THREADS"] for environment in started] == ["3", "3"]


@pytest.mark.parametrize("num_processes", [1, 3, 9])
def test_results_do_not_depend_on_the_number_of_processes(num_processes: int) -> None:
    def ticks(simulator: Any) -> Iterator[Tick]:
        random = np.random.default_rng(0)
        with closing(simulator):
            yield simulator.reset({slot: 7 + slot for slot in range(5)})
            for number in range(30):
                slots = np.flatnonzero(random.random(5) < 0.7).tolist()
                yield simulator.step({slot: random.normal(size=(1, 1)).astype(np.float32) for slot in slots})
                if slots:
                    yield simulator.reset({slots[0]: number})

    kwargs = {"max_episode_steps": 9}
    apart = SimulatorProcesses("Pendulum-v1", 5, kwargs, num_processes=num_processes, timeout_s=LIMIT_S)
    here = GymnasiumSimulator("Pendulum-v1", 5, kwargs)
    assert apart.spaces == here.spaces
    for one, other in zip(ticks(apart), ticks(here), strict=True):
        np.testing.assert_array_equal(one.observations["state"], other.observations["state"])
        for name in ("rewards", "num_executed", "is_terminated", "is_truncated", "success"):
            assert getattr(one, name).dtype == getattr(other, name).dtype
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert one.failures == other.failures == {}


TABLETOP = "examples.tabletop.Tabletop"


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:braid-arrays")


def test_images_in_shared_memory_are_those_of_the_environment_also_after_a_process_was_killed() -> None:
    apart = SimulatorProcesses(TABLETOP, 3, {"max_episode_steps": 9}, num_processes=2, timeout_s=LIMIT_S)
    here = GymnasiumSimulator(TABLETOP, 3, {"max_episode_steps": 9})
    assert _mappings() == 2, "one for each process"
    seeds = {0: 5, 1: 6, 2: 7}

    def agree(one: Tick, other: Tick, slots: Collection[int] = (0, 1, 2)) -> None:
        for slot in slots:
            for name, values in other.observations.items():
                np.testing.assert_array_equal(one.observations[name][slot], values[slot])

    with closing(apart), closing(here):
        first = apart.reset(seeds)
        expected = here.reset(seeds)
        agree(first, expected)
        push = {slot: np.full((2, here.spaces.actions.size), 0.5, np.float32) for slot in seeds}
        agree(apart.step(push), here.step(push))
        agree(first, expected)  # later images do not overwrite earlier ones
        *_, child = psutil.Process().children()
        child.kill()
        tick = apart.step(push)
        agree(tick, here.step(push), slots=[0])
        assert set(tick.failures) == {1, 2}
        agree(apart.reset({1: 8, 2: 9}), here.reset({1: 8, 2: 9}), slots=[1, 2])
        agree(apart.step(push), here.step(push))
    assert _mappings() == 0


def test_calls_of_different_slots_overlap_in_a_process() -> None:
    """Two parts of the slots, each in lock step, in both processes; against one part at a time."""
    actions = {slot: np.full((1, 1), slot / 5, np.float32) for slot in range(5)}
    parts = [{0: 0, 2: 2, 4: 4}, {1: 1, 3: 3}]
    kwargs = {"max_episode_steps": 9}
    apart = SimulatorProcesses("Pendulum-v1", 5, kwargs, num_processes=2, timeout_s=LIMIT_S)
    here = GymnasiumSimulator("Pendulum-v1", 5, kwargs)
    with closing(apart), closing(here):
        here.reset({slot: slot for slot in range(5)})
        finish = [apart.begin_reset(part) for part in parts]
        for _ in range(4):
            ticks = []
            for number, part in enumerate(parts):
                ticks.append(finish[number]())
                finish[number] = apart.begin_step({slot: actions[slot] for slot in part})
            expected = here.step(actions)
        for number, part in enumerate(parts):
            state = finish[number]().observations["state"]
            np.testing.assert_array_equal(state[list(part)], expected.observations["state"][list(part)])


def test_a_process_that_dies_fails_the_calls_that_overlap_and_can_start_again(
    unruly: SimulatorProcesses,
) -> None:
    dying = unruly.begin_step({0: np.array([EXIT])})
    waiting = unruly.begin_step({1: np.array([GO_ON]), 2: np.array([GO_ON])})
    why = f"{UNRULY}: the process exited with code 3 during step"
    assert dying().failures == {0: why}
    restarted = unruly.begin_reset({0: 0})
    tick = waiting()
    assert tick.failures == {1: why}
    assert tick.observations["state"][2, 0] == 1
    assert not restarted().failures
    assert _step(unruly, _0=GO_ON, _1=GO_ON).failures == {1: why}, "it has not been reset"


def test_a_call_that_is_never_finished_has_no_effect_on_later_ones(unruly: SimulatorProcesses) -> None:
    unruly.begin_step({0: np.array([GO_ON]), 2: np.array([GO_ON])})
    assert not unruly.reset(dict.fromkeys(range(4), 0)).failures
    assert _step(unruly, _0=GO_ON, _2=GO_ON).observations["state"][[0, 2], 0].tolist() == [1, 1]


def test_a_hanging_environment_fails_its_process_s_episodes_and_no_others(
    unruly: SimulatorProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    sleeper = psutil.Process(int(_step(unruly, _0=SPAWN).rewards[0, 0]))
    tick = _late_step(unruly, _0=HANG, _2=GO_ON, _3=GO_ON)
    why = f"{UNRULY}: step took longer than {LATE_S:g} s (rollout.env_timeout_s)"
    assert tick.failures == {0: why}
    assert why in caplog.text
    assert tick.observations["state"][2:, 0].tolist() == [1, 1]
    await_end([sleeper])

    assert _step(unruly, _1=GO_ON, _2=GO_ON).failures == {1: why}, "its episode ended with the process"
    assert not unruly.reset({0: 0}).failures
    tick = _step(unruly, _0=GO_ON, _1=GO_ON, _2=GO_ON)
    assert tick.failures == {1: why}, "it has not been reset"
    assert tick.observations["state"][[0, 2], 0].tolist() == [1, 3]
    assert not unruly.reset({1: 0}).failures


@pytest.mark.parametrize(
    ("act", "how"), [(EXIT, "exited with code 3"), (CRASH, "was killed by SIGSEGV (Segmentation fault)")]
)
def test_a_process_that_dies_is_noticed_although_it_leaves_processes(
    unruly: SimulatorProcesses, act: int, how: str
) -> None:
    sleeper = psutil.Process(int(_step(unruly, _3=SPAWN).rewards[3, 0]))
    tick = _step(unruly, _0=GO_ON, _2=act, _3=GO_ON)
    assert tick.failures == dict.fromkeys((2, 3), f"{UNRULY}: the process {how} during step")
    await_end([sleeper])
    assert not unruly.reset({2: 0, 3: 0}).failures
    assert _step(unruly, _0=GO_ON, _2=GO_ON).observations["state"][[0, 2], 0].tolist() == [2, 1]


def test_an_exception_costs_one_slot_and_the_process_has_no_torch(unruly: SimulatorProcesses) -> None:
    tick = _step(unruly, _0=GO_ON, _1=RAISE, _3=RAISE)
    assert list(tick.failures) == [1, 3]
    assert all("RuntimeError: torch is loaded: False (unruly.py:" in why for why in tick.failures.values())
    assert tick.observations["state"][0, 0] == 1


def test_a_call_after_an_interrupted_one_has_its_own_answer(unruly: SimulatorProcesses) -> None:
    with pytest.raises(KeyboardInterrupt):
        _step(unruly, _0=INTERRUPT, _2=GO_ON)
    assert not unruly.reset(dict.fromkeys(range(4), 0)).failures
    assert _step(unruly, _0=GO_ON, _2=GO_ON).observations["state"][[0, 2], 0].tolist() == [1, 1]


@pytest.mark.parametrize("method", ["send", "recv_into"])
def test_a_process_whose_message_is_interrupted_starts_again(
    unruly: SimulatorProcesses, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The rest of a message that was cut off would be read as the next one."""
    channel = unruly._processes[1]._child.channel  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]
    monkeypatch.setattr(channel, "_socket", _Interrupted(channel._socket, method))  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(KeyboardInterrupt):
        _step(unruly, _0=GO_ON, _2=GO_ON)
    why = f"{UNRULY}: a call to the process was interrupted"
    tick = _step(unruly, _1=GO_ON, _2=GO_ON, _3=GO_ON)
    assert (tick.failures, tick.observations["state"][1, 0]) == ({2: why, 3: why}, 1)
    assert not unruly.reset(dict.fromkeys(range(4), 0)).failures
    assert _step(unruly, _0=GO_ON, _2=GO_ON).observations["state"][[0, 2], 0].tolist() == [1, 1]


class _Interrupted:
    """A socket whose `method` is interrupted after three bytes."""

    def __init__(self, real: socket.socket, method: str) -> None:
        self._real, self._method = real, method

    def __getattr__(self, name: str) -> Any:
        return self._cut if name == self._method else getattr(self._real, name)

    def _cut(self, content: memoryview) -> None:
        getattr(self._real, self._method)(content[:3])
        raise KeyboardInterrupt


def test_environments_are_closed_once_and_one_that_hangs_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = tmp_path / "closed"
    simulator = SimulatorProcesses(UNRULY, 3, {"closed": str(closed)}, num_processes=2, timeout_s=LIMIT_S)
    simulator.reset({0: 0, 1: 0, 2: 0})
    _step(simulator, _0=RAISE)
    assert closed.read_text() == "closed\n", "that of the failed slot"
    simulator.close()
    simulator.close()
    assert closed.read_text() == "closed\n" * 4
    assert not caplog.records

    monkeypatch.setattr(processes, "_CLOSE_S", 0.1)
    simulator = SimulatorProcesses(UNRULY, 1, {"act": HANG}, timeout_s=LIMIT_S)
    simulator.close()
    assert caplog.messages == [f"{UNRULY}: close took longer than 0.1 s"]


class _Impatient(SimulatorProcesses):
    """The first call has a short deadline."""

    def reset(self, seeds: Mapping[int, int], filmed: Collection[int] = ()) -> Tick:
        tick = super().reset(seeds, filmed)
        self.timeout_s = LIMIT_S
        return tick


def _play(tmp_path: Path, act: int, *, retries: int) -> list[Trajectory]:
    """Six episodes in four slots of two processes. The first reset of all does `act`."""
    first = tmp_path / "first"
    first.touch()
    kwargs = {"act": act, "first": str(first)}
    simulator = _Impatient(UNRULY, 4, kwargs, num_processes=2, timeout_s=LIMIT_S)
    simulator.timeout_s = LATE_S
    policy = MlpPolicy(MlpSpec(), simulator.spaces, seed=0)
    policy.module.get_parameter("head.bias").data[GO_ON] = 1e4  # no other action is ever sampled
    with closing(SimulatorEngine(simulator, policy, retries=retries)) as engine:
        groups = drive(SimulatorDriver(engine, seed=0), reset_prompts("unruly", 6))
    assert not first.exists()
    return [t for g in groups for t in g.trajectories]


@pytest.mark.slow
@pytest.mark.parametrize("act", [EXIT, HANG])
def test_episodes_of_a_failed_process_are_retried(tmp_path: Path, act: int) -> None:
    trajectories = _play(tmp_path, act, retries=1)
    assert [t.reward for t in trajectories] == [6.0] * 6
    assert sorted(t.attempts for t in trajectories) == [1, 1, 1, 1, 2, 2]


def test_without_retries_they_are_invalid_and_others_are_not(tmp_path: Path) -> None:
    trajectories = _play(tmp_path, EXIT, retries=0)
    reasons = [t.reason for t in trajectories if t.status is Status.INVALID]
    assert reasons == [f"environment: {UNRULY}: the process exited with code 3 during reset"] * 2
    assert [t.status for t in trajectories].count(Status.FINISHED) == 4


@pytest.mark.parametrize(
    ("env_id", "kwargs"), [("CartPole-v7", {}), ("CartPole-v1", {"gravty": 1}), ("Nothing", {})]
)
def test_an_environment_that_cannot_be_created_is_the_same_config_problem(
    env_id: str, kwargs: Mapping[str, Any]
) -> None:
    with pytest.raises(ConfigError) as here:
        GymnasiumSimulator(env_id, 1, kwargs)
    with pytest.raises(ConfigError) as apart:
        SimulatorProcesses(env_id, 2, kwargs, num_processes=2, timeout_s=LIMIT_S)
    assert apart.value.problems == here.value.problems


def test_other_failures_of_a_start_name_the_environment() -> None:
    with pytest.raises(ConfigError, match=r"env\.id: nowhere:Env-v0 needs a module that is not installed"):
        SimulatorProcesses("nowhere:Env-v0", 1, timeout_s=LIMIT_S)
    with pytest.raises(ConfigError, match=r"env\.processes: CartPole-v1 cannot be sent to another process"):
        SimulatorProcesses("CartPole-v1", 1, {"lock": threading.Lock()}, timeout_s=LIMIT_S)


SCRIPT = """
import json, psutil, gymnasium, numpy as np
from braid.envs.simulators.processes import SimulatorProcesses
from tests.envs.unruly import GO_ON, HANG, SPAWN, Unruly

class Mine(Unruly):
    pass

gymnasium.register("Mine-v0", Mine)
simulator = SimulatorProcesses("Mine-v0", 2, num_processes=2, timeout_s=1000)
simulator.reset({0: 0, 1: 0})
simulator.step({0: np.array([SPAWN])})
print(json.dumps([child.pid for child in psutil.Process().children(recursive=True)]), flush=True)
simulator.step({0: np.array([GO_ON]), 1: np.array([HANG])})
"""


def test_a_script_s_own_environments_run_and_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {"PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(pid) for pid in json.loads(parent.stdout.readline())]
        parent.kill()
    assert len(children) == 3
    await_end(children)
