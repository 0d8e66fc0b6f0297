"""Group filters, and whole rounds with filters: reward shaping, greedy baselines, adaptive KL, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.checkpoint.store import CheckpointStore
from braid.config.rollout import FilterConfig
from braid.errors import TrainingError
from braid.report.batches import read_batch
from braid.report.names import describe
from braid.report.samples import read_samples
from braid.trainer import commands
from braid.trainer.selection import Selection, reason_to_drop
from braid.types import Group, Prompt, ShapedReward, Trajectory

from .conftest import LoadTiny

pytestmark = pytest.mark.slow


def group(*rewards: float | None, uid: str = "", greedy: float | str | None = "none") -> Group:
    """None is an invalid trajectory."""
    prompt = Prompt(uid, "test", (1,), ())

    def trajectory(sample: int, reward: float | None) -> Trajectory:
        made = Trajectory(prompt, sample, reward=reward)
        if reward is None:
            made.invalidate("environment: broken")
        return made

    made = Group(prompt, [trajectory(i, reward) for i, reward in enumerate(rewards)])
    if not isinstance(greedy, str):
        made.greedy = trajectory(0, greedy)
    return made


@pytest.mark.parametrize(
    ("rewards", "config", "reason"),
    [
        ((1.0, 0.0), {}, None),
        ((None, None), {}, "invalid"),
        ((1.0, None), {}, None),
        ((0.1, 0.1, 0.1), {"min_std": 0.0}, "min_std"),
        ((0.1, 0.1, 0.2), {"min_std": 0.0}, None),
        ((1.0, None), {"min_std": 0.0}, None),  # a single answer has no deviation to judge
        ((1.0, 0.0), {"min_std": 0.8}, "min_std"),  # the unbiased one is 0.707
        ((1.0, 0.0), {"min_std": 0.7}, None),
        ((1.0, 0.0), {"min_mean": 0.5}, "min_mean"),  # at the bound
        ((1.0, 0.0), {"min_mean": 0.4, "max_mean": 0.6}, None),
        ((1.0, 0.0), {"max_mean": 0.5}, "max_mean"),
        ((1.0, None), {"max_mean": 0.9}, "max_mean"),  # of the valid ones
        ((1.0, 1.0), {"min_std": 0.0, "max_mean": 0.9}, "min_std"),  # the first that fits
    ],
)
def test_a_group_is_judged_by_its_valid_rewards(
    rewards: tuple[float | None, ...], config: dict[str, float], reason: str | None
) -> None:
    assert reason_to_drop(group(*rewards), FilterConfig(**config)) == reason  # pyright: ignore[reportArgumentType]


def test_a_group_is_judged_by_the_rewards_that_training_sees() -> None:
    shaped = group(1.0, 1.0)
    shaped.trajectories[0].shaped = ShapedReward(0.5)
    assert reason_to_drop(shaped, FilterConfig(min_std=0.0)) is None


def test_a_group_without_its_baseline_is_dropped() -> None:
    assert reason_to_drop(group(1.0, 0.0, greedy=None), FilterConfig()) == "baseline"
    assert reason_to_drop(group(1.0, 0.0, greedy=0.0), FilterConfig()) is None


def selected(then: str, *batches: list[Group], size: int = 4, **more: Any) -> Selection:
    selection = Selection(FilterConfig(min_std=0.0, then=then, **more), size)  # pyright: ignore[reportArgumentType]
    for batch in batches:
        assert not selection.is_done
        selection.add(batch)
    assert selection.is_done
    return selection


def uids(groups: list[Group]) -> str:
    return "".join(g.prompt.uid for g in groups)


def batch(good: str, bad: str = "") -> list[Group]:
    """In the order of the alphabet."""
    made = [group(0.0, 1.0, uid=u) for u in good] + [group(1.0, 1.0, uid=u) for u in bad]
    return sorted(made, key=lambda g: g.prompt.uid)


def test_mask_draws_one_batch_and_keeps_what_is_good() -> None:
    selection = selected("mask", batch("bd", "ac"))
    selection.fill((0,))
    assert uids(selection.kept) == "bd"
    assert uids(selection.dropped) == "ac"
    assert selection.reasons == {"min_std": 2}


def test_resampling_fills_the_round_in_order_and_drops_surplus_groups() -> None:
    selection = selected("resample", batch("b", "acd"), batch("eg", "fh"), batch("ijk", "l"))
    assert uids(selection.kept) == "begi"
    assert uids(selection.dropped) == "acdfhjkl"
    assert selection.reasons == {"min_std": 6, "surplus": 2}
    assert selection.num_batches == 3


def test_resampling_ends_after_the_last_batch() -> None:
    selection = selected("resample", batch("a"), batch("b"), max_batches=2)
    assert uids(selection.kept) == "ab"


def test_replacing_copies_every_kept_group_once_before_any_again() -> None:
    selection = selected("replace", batch("ab", "cdefgh"), size=8, min_kept_fraction=0.25)
    selection.fill((0,))
    assert selection.num_replaced == 6
    assert sorted(uids(selection.kept)) == list("aaaabbbb")
    assert uids(selection.kept).startswith("ab")


def test_copies_follow_from_the_seed() -> None:
    def chosen(seed: int) -> str:
        selection = selected("replace", batch("abcde", "fgh"), size=8)
        selection.fill((seed, 4, 1))
        return uids(selection.kept)

    assert chosen(0) == chosen(0)
    assert len({chosen(seed) for seed in range(8)}) > 1
    assert all(len(set(chosen(seed)[5:])) == 3 for seed in range(8))


def test_too_few_kept_groups_are_not_copied() -> None:
    selection = selected("replace", batch("ab", "cdefgh"), size=8, min_kept_fraction=0.3)
    selection.fill((0,))
    assert uids(selection.kept) == "ab"
    assert selection.num_replaced == 0


def test_a_full_round_has_nothing_to_replace() -> None:
    selection = selected("replace", batch("abcd"))
    selection.fill((0,))
    assert uids(selection.kept) == "abcd"


# --- whole runs ---

BY_PROMPT = """
def by_prompt(prompt, text):
    "Answers to a and b are all alike; those to c and d may differ."
    return 1.0 if prompt in "ab" else float(text[:1] in "abcd")

def same(text):
    return 1.0

def by_letter(text):
    return float(text[:1] in "abcd")
"""


def scored_by(name: str) -> str:
    return f"reward.parts=[{{kind: function, path: 'rewards.py:{name}'}}]"


def lines(run: Path) -> list[dict]:
    """Of the rounds, less what depends on the clock. A shorter run evaluates at an end of its own."""
    kept = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if describe(k).is_reproducible and not k.startswith("eval/")}
        for line in kept
        if line["round"]
    ]


def weights(run: Path) -> dict[str, torch.Tensor]:
    *_, state = CheckpointStore(run / "checkpoints").locate()
    return state["policy"]["weights"]


def test_dropped_groups_are_stored_and_not_trained_on(load_tiny: LoadTiny) -> None:
    loaded = load_tiny(
        scored_by("by_prompt"), "rollout.filter.min_std=0", "report.samples_every_rounds=1",
        "report.batches_every_rounds=1", rewards=BY_PROMPT,
    )  # fmt: skip
    run = commands.train(loaded).run_dir
    for line in lines(run):
        assert line["rollout/dropped_groups/min_std"] >= 2
        assert line["rollout/trajectories"] == 32
        name = f"round_{line['round']:06d}"
        samples = list(read_samples(run / "samples" / f"{name}.jsonl"))
        assert len(samples) == 32
        trained = {s.trajectory.prompt.uid for s in samples if s.training}
        assert len(trained) == 4 - line["rollout/dropped_groups/min_std"]
        assert {origin.uid for _, origin in read_batch(run / "batches" / name)} == trained


def test_resampling_fills_the_round_and_counts_everything(load_tiny: LoadTiny) -> None:
    loaded = load_tiny(
        scored_by("by_prompt"), "rollout.filter={min_std: 0, then: resample}",
        "report.batches_every_rounds=1", rewards=BY_PROMPT,
    )  # fmt: skip
    run = commands.train(loaded).run_dir
    drawn = 0.0
    for line in lines(run):
        assert line["rollout/batches"] >= 2  # at most half of the prompts are any good
        assert line["rollout/trajectories"] == 32 * line["rollout/batches"]
        assert 32 * line["rollout/batches"] <= line["rollout/tokens"] <= 64 * line["rollout/batches"]
        drawn += line["rollout/batches"]
        assert line["rollout/epoch"] == drawn  # four prompts, four in a batch
        rows = read_batch(run / "batches" / f"round_{line['round']:06d}")
        assert {row.group for row, _ in rows} == {0, 1, 2, 3}
        assert len(rows) == 32


def test_replacing_trains_on_copies(load_tiny: LoadTiny) -> None:
    loaded = load_tiny(
        scored_by("by_prompt"), "rollout.filter={min_std: 0, then: replace}",
        "report.batches_every_rounds=1", rewards=BY_PROMPT,
    )  # fmt: skip
    run = commands.train(loaded).run_dir
    for line in lines(run):
        assert line["rollout/replaced_groups"] == line["rollout/dropped_groups/min_std"] > 0
        rows = [row for row, _ in read_batch(run / "batches" / f"round_{line['round']:06d}")]
        assert {row.group for row in rows} == {0, 1, 2, 3}
        assert len({row.trajectory for row in rows}) == 32


def test_an_empty_round_trains_nothing_and_is_reported(
    load_tiny: LoadTiny, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_tiny(
        scored_by("same"), "rollout.filter.min_std=0", "report.batches_every_rounds=1",
        "report.samples_every_rounds=1", "checkpoint.every_rounds=1", rewards=BY_PROMPT,
    )  # fmt: skip
    run = commands.train(loaded).run_dir
    assert [line["rollout/empty_rounds"] for line in lines(run)] == [1, 1, 1]
    assert [line["step"] for line in lines(run)] == [0, 0, 0]
    messages = [
        record.getMessage() for record in caplog.records if "has nothing to train on" in record.getMessage()
    ]
    assert messages[0] == (
        "round 1 has nothing to train on: of 4 groups 4 have a reward standard deviation <= "
        "rollout.filter.min_std=0.0"
    )
    assert len(messages) == 3


def test_many_consecutive_empty_rounds_end_the_run_with_the_reason(load_tiny: LoadTiny) -> None:
    common = (scored_by("same"), "rollout.filter.max_mean=0.9", "checkpoint.every_rounds=1")
    commands.train(load_tiny(*common, "run.max_rounds=4", rewards=BY_PROMPT))
    message = (
        r"10 consecutive rounds, up to round 10, .* 4 have a mean reward >= rollout\.filter\.max_mean=0\.9"
    )
    with pytest.raises(TrainingError, match=message):  # those before the resume count
        commands.train(load_tiny(*common, "run.max_rounds=20", "run.resume=latest", rewards=BY_PROMPT))


def test_truncated_answers_are_masked_in_the_loss(load_tiny: LoadTiny) -> None:
    run = commands.train(load_tiny("algorithm.mask_truncated=true", "report.batches_every_rounds=1")).run_dir
    for line in lines(run):
        assert line["rollout/masked_trajectories"] == line["status/truncated"] > 0
        rows = read_batch(run / "batches" / f"round_{line['round']:06d}")
        assert len(rows) == line["status/finished"]
        assert all(origin.status == "finished" for _, origin in rows)


def test_evaluation_and_the_mean_reward_keep_the_score_that_training_shapes(load_tiny: LoadTiny) -> None:
    shaping = ("reward.scale=10", "reward.shift=-1", "reward.clip=5")
    loaded = load_tiny(scored_by("by_letter"), *shaping, "report.batches_every_rounds=1", rewards=BY_PROMPT)
    run = commands.train(loaded).run_dir
    for line in lines(run):
        assert 0 < line["reward/mean"] < 1
        # 0 becomes -1, and 1 becomes 5
        assert line["reward/shaped_mean"] == pytest.approx(6 * line["reward/mean"] - 1)
        rows = read_batch(run / "batches" / f"round_{line['round']:06d}")
        assert {float(row.fields["rewards"].sum()) for row, _ in rows} == {-1.0, 5.0}
    evals = json.loads((run / "summary.json").read_text())["eval"]["last"]["all"]
    assert 0 <= evals["mean@1"] <= 1


@pytest.mark.parametrize(
    "recipe", ["rloo", "raft", "maxrl", "gigpo", "reinforce", "reinforce_pp", "lite_ppo"]
)
def test_a_recipe_of_the_catalogue_trains(load_tiny: LoadTiny, recipe: str) -> None:
    run = commands.train(load_tiny(f"algorithm.recipe={recipe}", "algorithm.kl_coef=0.01")).run_dir
    for line in lines(run):
        assert line["policy/skipped_steps"] == 0
        assert line["policy/grad_norm"] > 0


def test_greedy_answers_are_the_baseline_and_are_counted_but_not_trained_on(load_tiny: LoadTiny) -> None:
    loaded = load_tiny(
        "algorithm.recipe=remax", scored_by("by_letter"), "reward.scale=2", "rollout.group_size=2",
        "report.batches_every_rounds=1", rewards=BY_PROMPT,
    )  # fmt: skip
    run = commands.train(loaded).run_dir
    for line in lines(run):
        rows = read_batch(run / "batches" / f"round_{line['round']:06d}")
        assert len(rows) == line["rollout/trajectories"] == 8
        assert line["rollout/tokens"] >= sum(row.num_tokens for row, _ in rows) + 4
        baselines = {row.group: row.baseline for row, _ in rows}
        assert sum(b for b in baselines.values() if b) / 4 == 2 * line["reward/greedy_mean"]
        for row, origin in rows:
            assert origin.reward is not None
            assert row.baseline is not None
            assert row.fields["advantages"][row.mask][0] == 2 * origin.reward - row.baseline


def test_successes_are_imitated(load_tiny: LoadTiny) -> None:
    settings = ("algorithm.supervised_coef=0.1", "eval.success_reward=0.5", "reward.shift=-5")
    loaded = load_tiny(scored_by("by_letter"), *settings, "report.batches_every_rounds=1", rewards=BY_PROMPT)
    run = commands.train(loaded).run_dir
    for line in lines(run):
        assert line["policy/supervised_loss"] > 0
        for row, origin in read_batch(run / "batches" / f"round_{line['round']:06d}"):
            assert origin.reward is not None
            assert (row.fields["is_success"] == (origin.reward >= 0.5)).all()


@pytest.mark.parametrize("place", ["loss", "reward", "advantage"])
def test_the_kl_coefficient_adapts_from_round_to_round(load_tiny: LoadTiny, place: str) -> None:
    settings = ("algorithm.kl_coef=0.1", f"algorithm.kl_in={place}", "algorithm.kl_horizon=64")
    run = commands.train(load_tiny(*settings, "algorithm.kl_target=10")).run_dir
    # KL is far below the target: 32 trajectories of 64, so down by a tenth each round
    coefs = [line["algorithm/kl_coef"] for line in lines(run)]
    assert coefs == pytest.approx([0.1, 0.09, 0.081])


def test_a_resumed_run_keeps_statistics_coefficients_and_random_numbers(
    load_tiny: LoadTiny,
) -> None:
    common = (
        scored_by("by_prompt"), "algorithm.recipe=reinforce", "algorithm.reward_mean=running",
        "algorithm.reward_std=running", "algorithm.kl_coef=0.1", "algorithm.kl_target=0.01", "algorithm.kl_horizon=100",
        "rollout.filter={min_std: 0, then: resample}", "checkpoint.every_rounds=1",
    )  # fmt: skip
    whole = commands.train(load_tiny("run.name=whole", *common, rewards=BY_PROMPT)).run_dir
    commands.train(load_tiny("run.name=parts", "run.max_rounds=2", *common, rewards=BY_PROMPT))
    parts = commands.train(
        load_tiny("run.name=parts", "run.resume=latest", *common, rewards=BY_PROMPT)
    ).run_dir
    assert lines(parts) == lines(whole)
    ours, theirs = weights(parts), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
