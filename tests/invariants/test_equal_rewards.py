"""Equal rewards stay equal, however they were split over turns and parts: no number depends on the last bit
of a sum."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from tests.formulas import advantage_of, changed
from tests.rows import rows_of

from braid.algorithms.recipes import RECIPES
from braid.config.rollout import FilterConfig
from braid.trainer.evaluation import summarize_eval
from braid.trainer.selection import reason_to_drop
from braid.training.advantages import are_trained, compute_advantages
from braid.types import (
    Group,
    Prompt,
    RewardStatistics,
    Segment,
    ShapedReward,
    Trajectory,
    Turn,
    exact_sum,
    is_at_least,
)

PROMPT = Prompt("test:0", "test", (1, 2), ())


def played(*rewards: float, sample: int = 0) -> Trajectory:
    """A trajectory with a turn of one token for each reward."""
    turns = [Turn([1], [2], [-0.5], "stop", 0, reward) for reward in rewards]
    return Trajectory(PROMPT, sample, segments=[Segment(turns)], reward=exact_sum(rewards))


def degenerate_groups(num: int) -> list[Group]:
    """Groups of eight whose rewards have one sum: that many tenths, split at random over six turns."""
    rng = random.Random(0)
    groups = []
    for tenths in (rng.randint(0, 40) for _ in range(num)):
        cuts = [sorted(rng.choices(range(tenths + 1), k=5)) for _ in range(8)]
        splits = [[b - a for a, b in itertools.pairwise([0, *points, tenths])] for points in cuts]
        groups.append(
            Group(PROMPT, [played(*(n / 10 for n in split), sample=i) for i, split in enumerate(splits)])
        )
    return groups


def test_the_filter_drops_every_group_of_equal_rewards() -> None:
    assert {reason_to_drop(group, FilterConfig(min_std=0.0)) for group in degenerate_groups(300)} == {
        "min_std"
    }


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "raft", "maxrl"])
@pytest.mark.parametrize("reward_mean", ["none", "group"])
def test_a_group_of_equal_rewards_has_no_advantages(advantage: str, reward_mean: RewardStatistics) -> None:
    rows = rows_of(degenerate_groups(100))
    compute_advantages(
        rows, replace(RECIPES["grpo"], advantage=advantage_of(advantage), reward_mean=reward_mean)
    )
    assert not any(row.fields["advantages"].any() for row in rows)


def test_turns_of_equal_rewards_have_no_advantages() -> None:
    """A turn's reward may itself be a sum, such as 0.1 + 0.2."""
    group = Group(PROMPT, [played(0.1 + 0.2, 0.3), played(0.3, 0.1 + 0.2)])
    rows = rows_of([group])
    compute_advantages(
        rows, replace(RECIPES["grpo"], advantage=changed(RECIPES["grpo"].advantage, level="turn"))
    )
    assert not any(row.fields["advantages"].any() for row in rows)


@pytest.mark.parametrize("parts", [(0.7, 0.2, 0.1), (0.1,) * 10, (1 / 3,) * 3, (0.58, 0.42)])
def test_parts_that_sum_to_one_are_a_success(parts: tuple[float, ...]) -> None:
    results = summarize_eval([Group(PROMPT, [played(*parts)])], (1,), success=1.0)
    assert results["pass@1"] == 1.0


def test_a_reward_short_of_one_is_no_success() -> None:
    results = summarize_eval([Group(PROMPT, [played(1.0 - 1e-6)])], (1,), success=1.0)
    assert results["pass@1"] == 0.0


def test_bounds_of_filters_hold_up_to_rounding() -> None:
    group = Group(PROMPT, [played(0.1 + 0.2), played(0.1 + 0.2), played(0.3)])
    assert reason_to_drop(group, FilterConfig(min_mean=0.3)) == "min_mean"
    assert reason_to_drop(group, FilterConfig(max_mean=0.1 + 0.2)) == "max_mean"


def test_a_long_answer_whose_rewards_cancel_is_a_failure() -> None:
    recipe = replace(RECIPES["grpo"], mask_long_failures=1)
    assert are_trained(rows_of([Group(PROMPT, [played(0.1, 0.2, -0.3)])]), recipe) == [False]


def test_a_row_has_the_rewards_of_its_trajectory_exactly() -> None:
    trajectory = played(0.1, 0.7, 0.2)
    trajectory.shaped = ShapedReward(total=0.3, factor=0.1)
    (row,) = rows_of([Group(PROMPT, [trajectory])])
    assert exact_sum(row.fields["rewards"].tolist()) == 0.3


def test_a_gain_of_three_tenths_reaches_three_tenths() -> None:
    assert 0.7 - 0.4 < 0.3
    assert is_at_least(0.7 - 0.4, 0.3)
    assert not is_at_least(0.299999, 0.3)
