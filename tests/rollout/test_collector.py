"""The stream of groups: submitted, sampled, scored and taken, in any order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
from tests.several import Several

from braid.report.metrics import Metrics
from braid.rollout.collector import Collector, Stream, Use
from braid.trainer.rollouts import Rollouts
from braid.types import Group, Prompt, Segment, Trajectory, Turn

PROMPTS = [Prompt(f"p:{i}", "p", (1,) * i, ()) for i in range(8)]


class Gates:
    """A driver whose groups wait for their gates. `events` has what happened, in order."""

    def __init__(self, *opened: int) -> None:
        self.opened = set(opened)
        self.events: list[tuple[str, int]] = []
        self._changed = asyncio.Event()

    def open(self, *numbers: int) -> None:
        self.opened |= set(numbers)
        self._changed.set()

    async def group(self, prompt: Prompt, group_size: int, key: tuple[int, ...]) -> Group:
        number = key[-1]
        self.events.append(("begun", number))
        try:
            while number not in self.opened:
                await self._changed.wait()
                self._changed.clear()
                await asyncio.sleep(0)
            if number == 13:
                raise ZeroDivisionError("a bug")
        finally:
            await asyncio.sleep(0)
            self.events.append(("ended", number))
        turn = Turn(list(prompt.token_ids), [number], [-1.0], "stop", 0)
        trajectories = [Trajectory(prompt, i, segments=[Segment([turn])]) for i in range(group_size)]
        return Group(prompt, trajectories)


class Scorer:
    def __init__(self, events: list[tuple[str, int]]) -> None:
        self._events = events

    async def score(self, trajectories: Sequence[Trajectory]) -> Metrics:
        self._events.append(("scored", trajectories[0].turns[0].output_ids[0]))
        for trajectory in trajectories:
            trajectory.reward = 1.0
        return Metrics()

    def close(self) -> None:
        self._events.append(("closed", 0))


class Engine:
    """An engine that does nothing but to remember its versions."""

    cache_bytes = 0

    def __init__(self) -> None:
        self.versions: list[tuple[int, str]] = []

    async def set_weights(self, version: int, when: str, load: Callable[[], object] | None) -> None:
        self.versions.append((version, when))

    def close(self) -> None: ...


def make(
    driver: Gates, *, greedy: Gates | None = None, limit: int | None = None, in_background: bool = False
) -> Collector:
    engine: Any = Engine()
    scorer: Any = Scorer(driver.events)
    streams: dict[Use, Stream] = {
        "train": Stream(PROMPTS, driver, limit, greedy),
        "eval": Stream(PROMPTS, Gates(*range(100))),
    }
    return Collector(streams, engine, scorer, in_background=in_background)


@pytest.fixture
def gates() -> Gates:
    return Gates()


@pytest.fixture
def collector(gates: Gates) -> Iterator[Collector]:
    with closing(make(gates)) as collector:
        yield collector


def keys(*numbers: int, round_: int = 1) -> list[tuple[int, ...]]:
    return [(0, round_, number) for number in numbers]


def numbers(collector: Collector, use: Any = "train") -> list[int]:
    return [metadata.key[-1] for metadata in collector.finished(use)[0]]


def test_a_group_is_scored_and_returned_while_others_still_run(collector: Collector, gates: Gates) -> None:
    collector.submit("train", [0, 1], 2, keys(4, 5))
    collector.submit("train", [2], 2, keys(6))
    gates.open(5)
    assert numbers(collector) == [5]
    assert gates.events == [("begun", 4), ("begun", 5), ("begun", 6), ("ended", 5), ("scored", 5)]
    assert len(collector.rows([(keys(5)[0], 0, 0)])) == 2
    gates.open(4, 6)
    assert sorted([*numbers(collector), *numbers(collector)]) == [4, 6]
    assert numbers(collector) == [], "none runs"


def test_the_uses_do_not_disturb_each_other(collector: Collector, gates: Gates) -> None:
    collector.submit("train", [0], 1, keys(0))
    collector.submit("eval", [3], 1, [(2, 1, 0)])
    assert numbers(collector, "eval") == [0]
    collector.forget("eval", [(2, 1, 0)])
    gates.open(0)
    assert numbers(collector) == [0]
    assert [group.prompt for group in collector.whole("train", keys(0))] == [PROMPTS[0]]


def test_cancelled_groups_have_ended_and_are_not_returned(collector: Collector, gates: Gates) -> None:
    collector.submit("train", [0, 1, 2], 2, keys(0, 1, 2))
    gates.open(0)
    assert numbers(collector) == [0]
    collector.cancel("train", keys(0, 1, 7))
    assert ("ended", 1) in gates.events
    collector.submit("train", [1], 2, keys(1))
    gates.open(1, 2)
    assert sorted([*numbers(collector), *numbers(collector)]) == [1, 2]


def test_closing_ends_what_runs(gates: Gates) -> None:
    collector = make(gates)
    collector.submit("train", [0, 1], 2, keys(0, 1))
    collector.set_weights(1)  # the loop has run
    collector.close()
    assert gates.events[-3:] == [("ended", 0), ("ended", 1), ("closed", 0)]


def test_no_more_prompts_than_the_limit_are_sampled_at_a_time(gates: Gates) -> None:
    with closing(make(gates, limit=2)) as collector:
        collector.submit("train", [0, 1, 2], 2, keys(0, 1, 2))
        gates.open(1)
        assert numbers(collector) == [1]
        assert ("begun", 2) in gates.events
        assert gates.events.index(("ended", 1)) < gates.events.index(("begun", 2))


def test_an_exception_reaches_the_caller_of_finished(collector: Collector, gates: Gates) -> None:
    collector.submit("train", [0, 1], 2, keys(13, 1))
    gates.open(13)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        numbers(collector)


def test_the_greedy_answer_belongs_to_its_group(gates: Gates) -> None:
    gates.open(0)
    with closing(make(gates, greedy=Gates(0))) as collector:
        collector.submit("train", [0], 2, keys(0))
        (metadata,), _ = collector.finished("train")
        assert metadata.greedy is not None
        assert metadata.greedy.reward == 1.0


def test_weights_are_set_once_however_many_drivers_share_the_engine(gates: Gates) -> None:
    with closing(make(gates, greedy=Gates())) as collector:
        collector.set_weights(3, "interrupt")
        assert collector._engine.versions == [(3, "interrupt")]  # type: ignore[attr-defined]


def test_in_the_background_sampling_goes_on_and_calls_run_beside_one_that_waits(gates: Gates) -> None:
    scored = threading.Event()

    class Watched(Scorer):
        async def score(self, trajectories: Sequence[Trajectory]) -> Metrics:
            scored.set()
            return await super().score(trajectories)

    gates.open(1, 2)
    with closing(make(gates, in_background=True)) as collector:
        collector._scorer = Watched(gates.events)  # type: ignore[assignment]
        collector.submit("train", [0, 1], 2, keys(0, 1))
        assert scored.wait(60), "nobody has asked for it"
        assert numbers(collector) == [1]
        finished: list[int] = []
        waiting = threading.Thread(target=lambda: finished.extend(numbers(collector)))
        waiting.start()
        collector.set_weights(1)
        collector.submit("train", [2], 2, keys(2))
        waiting.join(60)
        assert finished == [2]


def _on_workers(gates: Sequence[Gates]) -> Rollouts:
    """Rollouts on two workers in this process."""
    workers = Several(
        "rollout", [lambda _, worker_gates=worker_gates: make(worker_gates) for worker_gates in gates]
    )
    return Rollouts(workers, {"train": PROMPTS, "eval": PROMPTS})


def test_groups_go_to_the_least_loaded_worker_and_its_load_ends_with_them() -> None:
    gates = [Gates(*range(100)), Gates(*range(100))]
    with closing(_on_workers(gates)) as rollouts:
        rollouts.submit("train", [5, 1, 2, 0], 2, keys(0, 1, 2, 3))  # loads of 6, 2, 3 and 1
        done = {g.key[-1]: g for _ in range(2) for g in rollouts.finished("train")[0]}
        assert [done[n].prompt for n in range(4)] == [PROMPTS[i] for i in (5, 1, 2, 0)]
        begun = [
            [number for what, number in worker_gates.events if what == "begun"] for worker_gates in gates
        ]
        assert begun == [[0], [1, 2, 3]]
        rollouts.submit("train", [3, 7], 2, keys(8, 9, round_=2))
        groups, cost = rollouts.gather("train", keys(8, 9, round_=2))
        assert [group.key[-1] for group in groups] == [8, 9]
        assert cost.value("time/score_s") > 0
        assert [worker_gates.events[-3][1] for worker_gates in gates] == [8, 9], (
            "none of them had a load left"
        )
        whole = rollouts.whole("train", [groups[1], done[2]])
        assert [g.trajectories[0].turns[0].output_ids for g in whole] == [[9], [2]]
        rollouts.forget("train")
        rollouts.submit("train", [1], 2, keys(0, round_=3))


def test_what_is_in_flight_can_be_submitted_again() -> None:
    gates = Gates(1)
    with closing(_on_workers([gates, Gates()])) as rollouts:
        rollouts.submit("train", [5, 0, 1], 2, keys(0, 1, 2))
        rollouts.cancel("train", keys(2))
        assert rollouts.running("train") == keys(0, 1)
        rollouts.cancel("train", keys(0, 1))
        assert rollouts.running("train") == []
        assert rollouts.finished("train")[0] == []
        rollouts.submit("train", [5], 2, keys(1))
        assert [group.key[-1] for group in rollouts.finished("train")[0]] == [1]
