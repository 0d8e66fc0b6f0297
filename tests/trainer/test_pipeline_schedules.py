"""The control plane of the pipelined loop: thousands of simulated runs, and a few by hand."""

from __future__ import annotations

import numpy as np
import pytest
from tests.trainer import pipeline_schedules

from braid.config.rollout import FilterConfig
from braid.data.sampler import PromptSampler
from braid.trainer.pipeline import Draw, Drop, Finish, Pipeline, PipelineSettings, Submit, Sync, Train
from braid.trainer.selection import Selection, reason_to_drop
from braid.types import Group, Prompt, Trajectory


def test_no_schedule_deadlocks_loses_or_repeats_a_group_or_exceeds_the_lag() -> None:
    counts = pipeline_schedules.check(range(2_000))
    events = ("crash", "stop", "cancelled", "resampled", "over_lag", "kept_over_lag", "on_policy")
    assert all(counts[event] > 10 for event in events), f"the schedules are too tame: {counts}"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))
def test_nor_does_any_of_100_000(part: int) -> None:
    pipeline_schedules.check(range(part * 25_000, (part + 1) * 25_000))


def test_a_failing_schedule_names_its_seed_and_replays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Pipeline, "_free_places", lambda self: 0)
    with pytest.raises(AssertionError, match=r"schedule 7 fails: .*replay\(7\)"):
        pipeline_schedules.check(range(7, 9))
    monkeypatch.undo()
    pipeline_schedules.replay(7)
    first = capsys.readouterr().out
    pipeline_schedules.replay(7)
    assert first == capsys.readouterr().out != ""


def one_step_off(*, num_drawn: int = 0, **changes: object) -> Pipeline:
    """A pipeline of four rounds of two prompts, which trains on one round while the next is sampled."""
    values: dict[str, object] = {
        "max_lag": 1,
        "groups_in_flight": 3,
        "on_new_weights": "finish",
        "over_lag": "drop",
        "prompts_per_round": 2,
        "num_rounds": 4,
    }
    sampler = PromptSampler(9, seed=0, shuffle=False)
    sampler.take(num_drawn)
    return Pipeline(PipelineSettings(**(values | changes)), sampler.take)  # type: ignore[arg-type]


def test_training_on_one_round_overlaps_with_sampling_the_next() -> None:
    pipeline = one_step_off()
    a, b, c, d = Draw(1, 0, 0), Draw(1, 1, 1), Draw(2, 0, 2), Draw(2, 1, 3)
    assert pipeline.decide() == Submit([a, b, c])  # as many as may be in flight
    assert pipeline.decide() is None
    pipeline.finished(c, 0)
    assert pipeline.decide() == Submit([d])
    pipeline.finished(a, 0)
    assert pipeline.decide() == Train([a, c], {})  # the oldest that are finished
    assert pipeline.decide() is None  # the lag of another group could be 2
    pipeline.updated()
    assert pipeline.decide() == Sync(1, "finish")
    assert pipeline.decide() is None  # the engines still have version 0
    pipeline.synced()
    assert pipeline.decide() == Submit([Draw(3, 0, 4)])


@pytest.mark.parametrize(
    ("over_lag", "decisions"),
    [
        ("drop", [Drop({Draw(1, 0, 0): "over_lag"}), Submit([Draw(5, 0, 8)])]),
        ("resample", [Submit([Draw(1, 0, 0)])]),
        ("keep", []),
    ],
)
def test_a_group_that_two_rounds_overtook_follows_over_lag(over_lag: str, decisions: list[object]) -> None:
    pipeline = one_step_off(over_lag=over_lag, groups_in_flight=9)
    slow, b, c, d, e, f, g, h = (Draw(1 + i // 2, i % 2, i) for i in range(8))
    assert pipeline.decide() == Submit([slow, b, c, d])
    for version, finished, submitted in ((0, [b, c], [e, f]), (1, [d, e], [g, h])):
        for draw in finished:
            pipeline.finished(draw, version)
        assert pipeline.decide() == Train(finished, {})
        pipeline.updated()
        assert pipeline.decide() == Sync(version + 1, "finish")
        pipeline.synced()
        assert pipeline.decide() == Submit(submitted)
    pipeline.finished(slow, 0)
    assert [pipeline.decide() for _ in decisions] == decisions
    pipeline.finished(f, 1)
    assert pipeline.decide() == (Train([slow, f], {}) if over_lag == "keep" else None)


def test_a_resumed_run_samples_what_was_not_trained_on_again_under_its_keys() -> None:
    pipeline = one_step_off()
    assert pipeline.decide() == Submit([Draw(1, 0, 0), Draw(1, 1, 1), Draw(2, 0, 2)])
    pipeline.finished(Draw(1, 1, 1), 0)
    pipeline.finished(Draw(2, 0, 2), 0)
    assert pipeline.decide() == Submit([Draw(2, 1, 3)])
    assert pipeline.decide() == Train([Draw(1, 1, 1), Draw(2, 0, 2)], {})
    before_update = pipeline.state()
    pipeline.updated()
    for state, draws in (
        (before_update, [Draw(1, 0, 0), Draw(1, 1, 1), Draw(2, 0, 2)]),  # the fourth once there is a slot
        (pipeline.state(), [Draw(1, 0, 0), Draw(2, 1, 3), Draw(3, 0, 4)]),
    ):
        resumed = one_step_off(num_drawn=4)
        resumed.load(state)
        assert resumed.decide() == Submit(draws)


@pytest.mark.parametrize("then", ["mask", "resample"])
@pytest.mark.parametrize("groups_in_flight", [1, 3, 8])
def test_without_lag_rounds_are_those_of_the_on_policy_loops_selection(
    then: str, groups_in_flight: int
) -> None:
    config = FilterConfig.model_validate({"min_std": 0, "then": then, "max_batches": 3})
    size, num_rounds = 4, 12

    def group_of(draw: Draw) -> Group:
        rng = np.random.default_rng((draw.round, draw.number))
        prompt = Prompt(str(draw.prompt), "s", (), ())
        members = [Trajectory(prompt, i, reward=float(rng.random() < 0.2)) for i in range(3)]
        for member in members:
            if rng.random() < 0.4:
                member.invalidate("engine: failed")
        return Group(prompt, members, key=(draw.round, draw.number))

    expected = []
    sampler = PromptSampler(10, seed=3, shuffle=True)
    for round_ in range(1, num_rounds + 1):
        selection = Selection(config, size)
        while not selection.is_done:
            first = selection.num_batches * size
            draws = [Draw(round_, first + i, prompt) for i, prompt in enumerate(sampler.take(size))]
            selection.add([group_of(draw) for draw in draws])
        kept = [(round_, group.key[-1], int(group.prompt.uid)) for group in selection.kept]
        expected.append((kept, selection.reasons))
    assert {reason for _, reasons in expected for reason in reasons} >= {"min_std", "invalid"}

    settings = PipelineSettings(
        max_lag=0,
        groups_in_flight=groups_in_flight,
        on_new_weights="finish",
        over_lag="drop",
        prompts_per_round=size,
        num_rounds=num_rounds,
        then=config.then,
        max_batches=config.max_batches,
    )
    pipeline = Pipeline(settings, PromptSampler(10, seed=3, shuffle=True).take)
    rounds = []
    while (decision := pipeline.decide()) != Finish(True):
        match decision:
            case Submit(draws):
                for draw in reversed(draws):
                    pipeline.finished(draw, pipeline.version, reason_to_drop(group_of(draw), config))
            case Train(kept, dropped):
                reasons = [*dropped.values()]
                rounds.append((kept, {reason: reasons.count(reason) for reason in reasons}))
                pipeline.updated()
            case _:
                pipeline.synced()
    assert rounds == expected
