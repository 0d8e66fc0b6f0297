"""What the driver receives of a round, and its cost."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.rows import rows_of
from tests.several import Several

from braid.algorithms.advantages.gigpo import Gigpo
from braid.algorithms.policy_losses.clip_cov import ClipCov
from braid.algorithms.recipes import RECIPES, Recipe
from braid.algorithms.rewards import RunningMoments
from braid.cluster.loops import in_thread
from braid.cluster.workers import Call, InProcessGroup, Place, Started
from braid.models.base import Output
from braid.report.metrics import Metrics
from braid.rollout.collector import Collector, GroupMetadata, Stream, TrajectoryMetadata
from braid.rollout.rows import group_rows
from braid.trainer.buffer import Buffer
from braid.training.group import ModelGroup
from braid.training.losses import value_loss_of
from braid.training.rollout_buffer import RolloutBuffer
from braid.types import Group, Prompt, Row, Segment, ShapedReward, Status, Trajectory, Turn


def _prompt(i: int) -> Prompt:
    return Prompt(uid=f"letters:{i}", source="letters", token_ids=(1, 2, 3), messages=())


class _Writer:
    """A driver whose policy repeats the number of its prompt `length` times."""

    def __init__(self, length: int) -> None:
        self._length = length

    async def group(self, prompt: Prompt, group_size: int, key: tuple[int, ...]) -> Group:
        return self._group(prompt, group_size, key[-1])

    def _group(self, prompt: Prompt, group_size: int, number: int) -> Group:
        trajectories = [Trajectory(prompt, sample) for sample in range(group_size)]
        for trajectory in trajectories:
            output = [number] * self._length
            turn = Turn(list(prompt.token_ids), output, [-1.0] * self._length, "stop", 0)
            trajectory.segments = [Segment([turn])]
            trajectory.text = "x" * self._length
        trajectories[-1].invalidate("engine: gone")
        return Group(prompt, trajectories)


class _Engine:
    """Never used."""

    def close(self) -> None: ...


class _Scorer:
    """Gives each trajectory its place in the group."""

    async def score(self, trajectories: Any) -> Metrics:
        for trajectory in trajectories:
            if trajectory.is_valid:
                trajectory.reward = float(trajectory.sample)
        return Metrics()

    def close(self) -> None: ...


@contextmanager
def _collected(length: int) -> Iterator[tuple[Collector, list[GroupMetadata]]]:
    prompts = [_prompt(i) for i in range(4)]
    engine: Any = _Engine()
    scorer: Any = _Scorer()
    collector = Collector(
        {
            "train": Stream(prompts, _Writer(length), shape=lambda t: ShapedReward(10.0 * (t.reward or 0.0))),
            "eval": Stream((), _Writer(length)),
        },
        engine,
        scorer,
    )
    collector.submit("train", [2, 0, 3], 3, [(0, 1, 7), (0, 1, 8), (0, 1, 9)])
    metadata: list[GroupMetadata] = []
    while len(metadata) < 3:
        metadata += collector.finished("train")[0]
    yield collector, sorted(metadata, key=lambda group: group.key)
    collector.close()


def test_data_sent_to_the_driver_does_not_grow_with_response_length() -> None:
    with _collected(10) as (_, little), _collected(100) as (_, much):
        assert len(pickle.dumps(much)) == len(pickle.dumps(little))


def test_metadata_of_a_group_has_everything_except_tokens() -> None:
    with _collected(5) as (collector, metadata):
        group, (whole,) = metadata[1].group(_prompt(0)), collector.whole("train", [(0, 1, 8)])
    assert group.key == (0, 1, 8)
    assert [t.status for t in group.trajectories] == [t.status for t in whole.trajectories]
    assert [t.reward for t in group.valid] == [0.0, 1.0]
    assert [t.training_reward for t in group.valid] == [0.0, 10.0]
    assert [t.lengths for t in group.trajectories] == [t.lengths for t in whole.trajectories]
    assert group.trajectories[2].status is Status.INVALID
    assert (group.trajectories[0].turns, group.trajectories[0].text) == ([], "")
    assert TrajectoryMetadata.of(group.trajectories[0]) == metadata[1].trajectories[0]


def test_rows_do_not_depend_on_the_worker() -> None:
    with _collected(5) as (collector, _):
        at_once = rows_of(
            collector.whole("train", [(0, 1, n) for n in (9, 7, 9)])
        )  # a copy takes the place of a dropped group
        pieces = [collector.rows([((0, 1, 7), 1, 3)]), collector.rows([((0, 1, 9), 0, 0), ((0, 1, 9), 2, 6)])]
    buffer = RolloutBuffer(RECIPES["grpo"], None)
    metadata = buffer.open(pieces)
    rows = buffer.take([row.index for row in metadata], False)
    assert [(r.group, r.trajectory) for r in rows] == [(r.group, r.trajectory) for r in at_once]
    for one, other in zip(rows, at_once, strict=True):
        np.testing.assert_array_equal(one.inputs["input_ids"], other.inputs["input_ids"])
        np.testing.assert_array_equal(one.fields["rewards"], other.fields["rewards"])
    assert [(len(f), f.num_tokens, f.group) for f in metadata] == [
        (len(r), r.num_tokens, r.group) for r in rows
    ]


def test_segments_of_a_trajectory_stay_in_order_whichever_worker_made_them() -> None:
    def group(first: int) -> Group:
        turns = [Turn([first + k], [9], [-1.0], "stop", 0) for k in range(3)]
        segments = [Segment([turn]) for turn in turns]
        return Group(_prompt(first), [Trajectory(_prompt(first), 0, segments=segments, reward=1.0)])

    buffer = RolloutBuffer(RECIPES["grpo"], None)
    metadata = buffer.open([group_rows(group(20), 1, 1), group_rows(group(10), 0, 0)])
    rows = buffer.take([row.index for row in metadata], False)
    assert [row.trajectory for row in metadata] == [0, 0, 0, 1, 1, 1]
    assert [int(row.inputs["input_ids"][0]) for row in rows] == [10, 11, 12, 20, 21, 22]


def test_inferred_values_reach_their_rows() -> None:
    rows = [Row({"input_ids": np.zeros(n, np.int64)}, np.ones(n, np.bool_), 0, n) for n in (1, 2, 3)]
    buffer = RolloutBuffer(RECIPES["grpo"], None)
    buffer.open([rows])
    shares = [[2, 0], [], [1]]
    results = [
        [{"logprobs": np.full(n, n, np.float32), "experts": np.full((n, 1, 1), n, np.int8)} for n in lengths]
        for lengths in ([3, 1], [], [2])
    ]
    places = [(index, s, i) for s, share in enumerate(shares) for i, index in enumerate(share)]
    fields: dict[Output, str] = {"logprobs": "old_logprobs", "experts": "experts"}
    buffer.merge(fields, places, results)  # pyright: ignore[reportArgumentType]
    for row in buffer.take([0, 1, 2], False):
        assert row.inputs["experts"].ravel().tolist() == [len(row)] * len(row), "an input of the model"
        assert row.fields["old_logprobs"].tolist() == [len(row)] * len(row)
    assert all(not row.fields for row in buffer.take([0, 1, 2], True))


def test_the_policy_versions_of_tokens_become_a_field() -> None:
    versions = np.array([0, 4, 5, 0], np.int32)
    mask = versions > 0
    buffer = RolloutBuffer(RECIPES["grpo"], None)
    buffer.open([[Row({}, mask, 0, 0, policy_versions=versions), Row({}, mask, 0, 1)]])
    buffer.write_policy_versions()
    fields = [row.fields["policy_versions"] for row in buffer.take([0, 1], False)]
    assert [f.tolist() for f in fields] == [[0, 4, 5, 0], [0, 0, 0, 0]]
    assert fields[0].dtype == np.float32


def test_computing_advantages_on_workers_returns_the_running_moments() -> None:
    group = Group(_prompt(0), [Trajectory(_prompt(0), i, reward=float(i)) for i in range(2)])
    for trajectory in group.trajectories:
        trajectory.segments = [Segment([Turn([1], [2, 3], [-1.0, -1.0], "stop", 0)])]
    buffer = RolloutBuffer(RECIPES["grpo"], None)
    buffer.open([group_rows(group, 0, 0)])
    moments = RunningMoments()
    _, after, _ = buffer.compute_advantages(0.0, moments)
    assert after is moments
    assert [row.fields["advantages"][-1] > 0 for row in buffer.take([0, 1], False)] == [False, True]


class Threads(InProcessGroup[Any]):
    """Calls run in threads, so that starting one does not raise."""

    def _start(self, call: Call) -> Started[Any]:
        started = super()._start
        return Started(in_thread(lambda: started(call).wait()))


def test_an_error_in_a_call_without_a_result_reaches_the_caller() -> None:
    buffer = Buffer(Threads("rows", lambda _: RolloutBuffer(RECIPES["grpo"], None)))
    with pytest.raises(IndexError):
        buffer.whole.write_step_fields([(0, 5)], (0,))


class _Model:
    """Outputs and losses that depend on the row alone."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.trained: dict[int, float] = {}

    def data_place(self) -> tuple[int, int]:
        return self._place.rank, self._place.size

    def infer(self, rows: list[Row], outputs: frozenset[Output], _: Row) -> list[dict[str, Any]]:
        assert not any(row.fields for row in rows)
        value = [np.sin(row.inputs["input_ids"] + row.trajectory).astype(np.float32) for row in rows]
        return [dict.fromkeys(outputs, array * row.mask) for array, row in zip(value, rows, strict=True)]

    def train(self, rows: list[Row], weights: list[float], *_: Any) -> float:
        self.trained |= {row.trajectory: weight for row, weight in zip(rows, weights, strict=True)}
        return sum(weights)


def _round_of(num_shards: int, recipe: Recipe) -> tuple[list[Row], dict[str, float], dict[int, float]]:
    """Rows, metrics and trained weights of a round whose rows are in so many processes."""
    buffer = Buffer(
        Several("rows", [lambda _, n=n: RolloutBuffer(recipe, None, n) for n in range(num_shards)])
    )
    ranks: Any = Several("policy", [lambda _, n=n: _Model(Place(n, 2)) for n in range(2)])
    model = ModelGroup.of(ranks)
    with _collected(5) as (collector, groups):
        kept = [(group.key, place, 3 * place) for place, group in enumerate(groups)]
        rows = buffer.open([collector.rows([one]) for one in reversed(kept)])
    assert [row.trajectory for row in rows] == [0, 1, 3, 4, 6, 7]
    for call in buffer.start_infer(model, rows, {"logprobs": "old_logprobs"}):
        call.wait()
    buffer.every.mark_successes(1.0)
    metrics, *_ = buffer.whole.compute_advantages(0.0, RunningMoments())
    buffer.whole.write_step_fields([(row.shard, row.index) for row in rows[1:]], (3,))
    weights = [0.1 * row.trajectory for row in rows]
    ranks.scatter(_Model.train, buffer.for_ranks(model, rows, weights, value_loss_of(recipe)))
    trained = {key: value for rank in ranks._groups for key, value in rank._worker.trained.items()}
    return buffer.copies(rows), metrics, trained


@pytest.mark.parametrize(
    "changes",
    [
        {"policy_loss": ClipCov(), "supervised_coef": 0.1, "whiten_advantages": True},
        {"advantage": Gigpo()},
    ],
)
def test_a_round_in_several_processes_is_that_of_one_to_the_bit(changes: dict[str, Any]) -> None:
    recipe = replace(RECIPES["grpo"], **changes)
    (whole, metrics, trained), several = _round_of(1, recipe), [_round_of(n, recipe) for n in (2, 3, 4)]
    assert trained == pytest.approx({t: 0.1 * t for t in (0, 1, 3, 4, 6, 7)})
    for rows, of_metrics, of_trained in several:
        assert (of_metrics, of_trained) == (metrics, trained)
        for mine, other in zip(rows, whole, strict=True):
            assert mine.fields.keys() == other.fields.keys()
            assert mine.inputs["input_ids"].tolist() == other.inputs["input_ids"].tolist()
            for name, values in other.fields.items():
                np.testing.assert_array_equal(mine.fields[name], values)
