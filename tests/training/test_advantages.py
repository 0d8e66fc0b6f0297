"""From rewards to advantages over whole rounds: order of operations, turns, statistics, and dependencies of a
row."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from tests.formulas import advantage_of, changed

from braid.algorithms.advantages import ADVANTAGES
from braid.algorithms.recipes import RECIPES, Recipe
from braid.algorithms.rewards import RunningMoments
from braid.training.advantages import are_trained, compute_advantages
from braid.types import RewardStatistics, Row

GRPO = RECIPES["grpo"]
CLOSE = {"atol": 2e-6, "rtol": 0}  # expectations are given to six digits; 1e-6 stands beside deviations


_NUMBERS = itertools.count()


def text(*turns: tuple[str, float], group: int = 0, prompt: int = 0, tokens: int = 2, **more: object) -> Row:
    """A trajectory in one row of turns (what the environment said before it, its reward), each of `tokens`
    tokens that the policy wrote."""
    ids: list[int] = []
    decision: list[int] = []
    rewards: list[float] = []
    for number, (said, reward) in enumerate(turns):
        context = [prompt] if number == 0 else [ord(c) for c in said]
        ids += [*context, *[7] * tokens]
        decision += [-1] * len(context) + [number] * tokens
        rewards += [0.0] * (len(context) + tokens - 1) + [reward]
    fields, index = {"rewards": np.array(rewards, np.float32)}, np.array(decision, np.int32)
    inputs = {"input_ids": np.array(ids)}
    return Row(inputs, index >= 0, group, next(_NUMBERS), fields=fields, decision=index, **more)  # pyright: ignore[reportArgumentType]


def answers(*rewards: float, group: int = 0) -> list[Row]:
    """Single answers of one group."""
    return [text(("", reward), group=group) for reward in rewards]


def per_row(rows: list[Row]) -> list[float]:
    """The advantage of each row, which all of its positions share."""
    for row in rows:
        advantages = row.fields["advantages"]
        assert len(set(advantages[row.mask].tolist())) == 1
        assert not advantages[~row.mask].any()
    return [float(row.fields["advantages"][row.mask][0]) for row in rows]


def per_turn(row: Row) -> list[float]:
    """The advantage at the end of each turn of two tokens, which both have."""
    advantages = row.fields["advantages"][row.mask].reshape(-1, 2)
    assert (advantages[:, 0] == advantages[:, 1]).all()
    return advantages[:, 0].tolist()


def close(got: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("grpo", [1.0 / 3, -2.0 / 3, 1.0 / 3, 0.0, 0.0]),
        ("rloo", [0.5, -1.0, 0.5, 0.0, 0.0]),
        ("raft", [1.0, 0.0, 0.0, 0.0, 0.0]),
        ("maxrl", [0.5, -1.0, 0.5, 0.0, 0.0]),
        ("remax", [0.5, -0.5, 0.5, -1.0, -1.0]),
        ("reinforce", [1.0, 0.0, 1.0, 0.0, 0.0]),
    ],
)
def test_every_advantage_of_single_answers_is_one_number_per_row(
    advantage: str, expected: list[float]
) -> None:
    rows = [*answers(1.0, 0.0, 1.0, group=5), *answers(0.0, 0.0, group=2)]
    for row in rows:
        row.baseline = 0.5 if row.group == 5 else 1.0
    compute_advantages(rows, replace(GRPO, advantage=advantage_of(advantage, normalize_by_std=False)))
    close(per_row(rows), expected)


def test_remax_without_a_greedy_answer_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="greedy answer"):
        compute_advantages(answers(1.0), replace(GRPO, advantage=advantage_of("remax")))


def test_reinforce_discounts_over_the_policys_tokens_alone() -> None:
    row = text(("", 1.0), ("ok", 4.0))
    compute_advantages([row], replace(GRPO, advantage=advantage_of("reinforce", gamma=0.5)))
    # from the end: 4, 2, then 1 + 1, 1; the reply between takes no part
    assert row.fields["advantages"].tolist() == [0.0, 1.0, 2.0, 0.0, 0.0, 2.0, 4.0]


def test_reinforce_of_turns_gives_all_tokens_of_a_turn_its_return() -> None:
    row = text(("", 1.0), ("ok", 4.0))
    compute_advantages([row], replace(GRPO, advantage=advantage_of("reinforce", level="turn", gamma=0.5)))
    assert row.fields["advantages"].tolist() == [0.0, 3.0, 3.0, 0.0, 0.0, 4.0, 4.0]


def test_statistics_of_a_source_span_its_groups() -> None:
    rows = [text(("", r), group=g, source=s) for r, g, s in ((1.0, 0, "a"), (3.0, 1, "a"), (9.0, 2, "b"))]
    recipe = replace(GRPO, advantage=advantage_of("reinforce"), reward_mean="source", reward_std="source")
    compute_advantages(rows, recipe)
    close(per_row(rows), [-1 / 2**0.5, 1 / 2**0.5, 0.0])


def test_gae_writes_returns_and_reports_explained_variance() -> None:
    row = text(("", 1.0))
    row.fields["values"] = np.array([0.0, 0.25, 0.5], np.float32)
    metrics = compute_advantages([row], RECIPES["ppo"])
    assert row.fields["returns"].tolist() == [0.0, 1.0, 1.0]
    assert set(metrics) == {"critic/explained_variance"}


def test_gae_of_turns_has_one_value_and_one_reward_per_turn() -> None:
    """Values 1 and 2 at the first tokens, rewards 1 and 4, gamma lambda 1/4: deltas 1 + 2/2 - 1 = 1 and 4 - 2
    = 2."""
    row = text(("", 1.0), ("ok", 4.0))
    row.fields["values"] = np.array([9.0, 1.0, 8.0, 9.0, 9.0, 2.0, 7.0], np.float32)
    recipe = replace(GRPO, advantage=advantage_of("gae", level="turn", gamma=0.5, gae_lambda=0.5))
    metrics = compute_advantages([row], recipe)
    assert row.fields["advantages"].tolist() == [0.0, 1.5, 1.5, 0.0, 0.0, 2.0, 2.0]
    assert row.fields["returns"].tolist() == [0.0, 2.5, 2.5, 0.0, 0.0, 4.0, 4.0]
    # values are learned at the first tokens: returns 2.5 and 4, errors 1.5 and 2
    assert metrics == {"critic/explained_variance": pytest.approx(1 - 0.0625 / 0.5625)}


def test_turns_that_touch_are_two() -> None:
    row = text(("", 1.0), ("", 3.0))
    row.fields["values"] = np.zeros(5, np.float32)
    assert row.mask.tolist() == [False, True, True, True, True]
    for recipe, expected in (
        (
            replace(GRPO, advantage=changed(GRPO.advantage, level="turn", normalize_by_std=False)),
            [-1.0, -1.0, 1.0, 1.0],
        ),
        (replace(GRPO, advantage=advantage_of("gae", level="turn", gamma=0.0)), [1.0, 1.0, 3.0, 3.0]),
    ):
        compute_advantages([row], recipe)
        close(row.fields["advantages"][1:].tolist(), expected)


# --- turns ---


def test_turns_compared_over_a_group_are_those_of_all_its_trajectories() -> None:
    """Rewards 1, 0 and 0, 3: mean 1, whatever their order; another group does not matter."""
    rows = [text(("", 1.0), ("a", 0.0)), text(("", 0.0), ("b", 3.0)), text(("", 9.0), group=1)]
    compute_advantages(
        rows, replace(GRPO, advantage=changed(GRPO.advantage, level="turn", normalize_by_std=False))
    )
    close(per_turn(rows[0]), [0.0, -1.0])
    close(per_turn(rows[1]), [-1.0, 2.0])
    close(per_turn(rows[2]), [0.0])


def test_turns_of_single_answers_are_trajectories() -> None:
    rows, turns = answers(1.0, 0.0, 0.3), answers(1.0, 0.0, 0.3)
    compute_advantages(rows, GRPO)
    compute_advantages(turns, replace(GRPO, advantage=changed(GRPO.advantage, level="turn")))
    assert per_row(rows) == per_row(turns)


GIGPO = replace(
    RECIPES["gigpo"], advantage=changed(RECIPES["gigpo"].advantage, normalize_by_std=False, gamma=0.5)
)


def test_gigpo_compares_turns_that_start_from_the_same_state() -> None:
    """Worked by hand. Rewards (1, 4), (0, 2), (0, 0): returns 1 + 4/2 = 3 and 4; 0 + 2/2 = 1 and 2; 0 and 0.

    Episodes: 5, 2, 0, mean 7/3. First turns start from the prompt: 3, 1, 0, mean 4/3. The second ones of the
    first two follow "hot": 4, 2, mean 3; that of the third follows "cold" and is alone.
    """
    rows = [
        text(("", 1.0), ("hot", 4.0)),
        text(("", 0.0), ("hot", 2.0)),
        text(("", 0.0), ("cold", 0.0)),
    ]
    compute_advantages(
        rows, replace(GIGPO, advantage=changed(GIGPO.advantage, episode_weight=1.0, turn_weight=10.0))
    )
    close(per_turn(rows[0]), [8 / 3 + 50 / 3, 8 / 3 + 10])
    close(per_turn(rows[1]), [-1 / 3 - 10 / 3, -1 / 3 - 10])
    close(per_turn(rows[2]), [-7 / 3 - 40 / 3, -7 / 3])


def test_gigpo_divides_both_parts_by_their_deviations() -> None:
    rows = [text(("", 0.0), ("x", 1.0)), text(("", 0.0), ("y", 0.0))]
    compute_advantages(rows, replace(GIGPO, advantage=changed(GIGPO.advantage, normalize_by_std=True)))
    # episodes 1, 0 and first turns 1/2, 0: both +-1/sqrt(2); second turns are alone
    close(per_turn(rows[0]), [2 * 0.707106, 0.707106])
    close(per_turn(rows[1]), [-2 * 0.707106, -0.707106])


def test_gigpo_keeps_equal_states_of_different_groups_apart() -> None:
    rows = [text(("", 0.0), ("hot", 1.0), group=0), text(("", 0.0), ("hot", 0.0), group=1)]
    compute_advantages(rows, GIGPO)
    assert [per_turn(row) for row in rows] == [[0.0, 0.0], [0.0, 0.0]]


def test_gigpo_finds_states_that_come_back_within_one_trajectory() -> None:
    row = text(("", 0.0), ("lost", 0.0), ("lost", 4.0))
    compute_advantages([row], replace(GIGPO, advantage=changed(GIGPO.advantage, gamma=0.5)))
    # returns 1, 2, 4; "lost" twice: mean 3
    close(per_turn(row), [0.0, -1.0, 1.0])


def test_gigpos_turn_returns_are_rolls_agentic_ones() -> None:
    """[0, 2, 2, 0, 0, 2, 2, 0] for rewards 1 and 2, gamma 1/2: against a turn-alike of no reward, less their
    mean."""
    mine, other = text(("", 1.0), ("o", 2.0)), text(("", 0.0), ("o", 0.0))
    compute_advantages([mine, other], replace(GIGPO, advantage=changed(GIGPO.advantage, episode_weight=0.0)))
    close(per_turn(mine), [1.0, 1.0])  # 2 - 1, 2 - 1
    close(per_turn(other), [-1.0, -1.0])


def simulated(states: list[float], rewards: list[float], group: int = 0) -> Row:
    observations = np.array(states, np.float32)[:, None]
    mask = np.ones(len(states), np.bool_)
    mask[-1] = False
    fields = {"rewards": np.array([*rewards, 0.0], np.float32)}
    decision = np.where(mask, np.arange(len(states)), -1).astype(np.int32)
    observed = {"state": observations}
    return Row({}, mask, group, next(_NUMBERS), fields=fields, observations=observed, decision=decision)


def test_an_env_step_is_a_turn_and_its_observation_the_state() -> None:
    rows = [simulated([0.0, 1.0, 9.0], [0.0, 1.0]), simulated([-0.0, 2.0, 1.0], [0.0, 0.0])]
    compute_advantages(rows, replace(GIGPO, advantage=changed(GIGPO.advantage, episode_weight=0.0)))
    # both start from 0 (of either sign): returns 1/2 and 0; the later states come up once, a last one is no
    # turn's
    close(rows[0].fields["advantages"].tolist(), [0.25, 0.0, 0.0])
    close(rows[1].fields["advantages"].tolist(), [-0.25, 0.0, 0.0])


# --- segments ---


def _of_one(*rows: Row) -> list[Row]:
    for row in rows:
        row.trajectory = rows[0].trajectory
    return list(rows)


def test_returns_run_over_the_segments_of_a_trajectory() -> None:
    first, second = _of_one(text(("", 1.0)), text(("", 4.0)))
    compute_advantages([first, second], replace(GRPO, advantage=advantage_of("reinforce", gamma=0.5)))
    assert first.fields["advantages"].tolist() == [0.0, 1.0, 2.0]
    assert second.fields["advantages"].tolist() == [0.0, 2.0, 4.0]


def test_gae_continues_in_the_next_segment() -> None:
    """lambda 1, gamma 1/2: returns are 1/2 (1 + 4/4) = 1 and 1 + 4/4 = 2, then 4/2 and 4."""
    rows = _of_one(text(("", 1.0)), text(("", 4.0)))
    for row in rows:
        row.fields["values"] = np.array([9.0, 1.0, 2.0], np.float32)
    compute_advantages(rows, replace(GRPO, advantage=advantage_of("gae", gamma=0.5, gae_lambda=1.0)))
    assert [row.fields["returns"].tolist() for row in rows] == [[0.0, 1.0, 2.0], [0.0, 2.0, 4.0]]


def test_a_trajectory_of_two_segments_counts_once_in_its_group() -> None:
    """Rewards 1 + 2 and 0: mean 3/2, as of one row each."""
    rows = [*_of_one(text(("", 1.0)), text(("", 2.0))), text(("", 0.0))]
    compute_advantages(rows, replace(GRPO, advantage=changed(GRPO.advantage, normalize_by_std=False)))
    assert per_row(rows) == [1.5, 1.5, -1.5]


def test_gigpo_compares_a_turn_after_a_cut_by_what_was_new_in_its_context() -> None:
    whole, other = text(("", 0.0), ("hot", 4.0)), text(("", 0.0), ("hot", 0.0))
    first, second = _of_one(text(("", 0.0)), text(("", 0.0), ("hot", 0.0)))
    second.mask[:3], second.decision[:] = False, [-1] * 6 + [0] * 2
    compute_advantages([whole, first, second], GIGPO)
    expected = [whole.fields["advantages"].tolist(), second.fields["advantages"][-1]]
    uncut = text(("", 0.0), ("hot", 4.0))
    compute_advantages([uncut, other], GIGPO)
    assert expected == [uncut.fields["advantages"].tolist(), other.fields["advantages"][-1]]


# --- statistics ---


def test_rewards_of_turns_are_centred_and_scaled() -> None:
    """Sums 5 and 1, mean 3, deviation sqrt(8) = 2.828427: every reward over that, the centre off at the last
    position."""
    rows = [text(("", 1.0), ("a", 4.0)), text(("", 1.0), ("b", 0.0))]
    compute_advantages(
        rows,
        replace(
            GRPO, reward_mean="batch", reward_std="batch", advantage=advantage_of("reinforce", gamma=1.0)
        ),
    )
    close(per_turn(rows[0]), [2 / 2.828428, 1 / 2.828428])
    close(per_turn(rows[1]), [-2 / 2.828428, -3 / 2.828428])


def test_a_terminal_reward_is_normalised_before_kl_is_subtracted() -> None:
    rows = answers(1.0, 0.0)
    for row in rows:
        row.fields |= {"old_logprobs": np.float32([0, 0.0, 0.5]), "ref_logprobs": np.float32([9, 0.0, 0.0])}
    recipe = replace(RECIPES["reinforce_pp"], whiten_advantages=False, reward_mean="batch", kl_coef=0.2)
    metrics = compute_advantages(rows, recipe)
    assert metrics == {"reward/kl": pytest.approx(0.25)}
    close(per_row(rows), [0.4, -0.6])  # +-0.5 - 0.2 * 0.5
    rows = answers(1.0, 0.0)
    for row in rows:
        row.fields |= {"old_logprobs": np.float32([0, 0.0, 0.5]), "ref_logprobs": np.float32([9, 0.0, 0.0])}
    compute_advantages(rows, recipe, kl_coef=0.4)  # steered
    close(per_row(rows), [0.3, -0.7])


@pytest.mark.parametrize(("place", "advantages"), [("reward", [0.7, 0.9]), ("advantage", [0.8, 0.9])])
def test_kl_in_the_advantage_is_not_credited_to_earlier_tokens(place: str, advantages: list[float]) -> None:
    """On-policy distillation with a task: the return of 1, less 0.2 KL of 1 at the first token, 0.5 at the
    second: from the reward, 1 - 0.2 (1 + 0.5) and 1 - 0.2 * 0.5."""
    (row,) = answers(1.0)
    row.fields |= {"old_logprobs": np.float32([0, 1.0, 0.5]), "ref_logprobs": np.float32([9, 0.0, 0.0])}
    recipe = replace(RECIPES["reinforce_pp"], whiten_advantages=False, kl_coef=0.2, kl_in=place)
    assert compute_advantages([row], recipe) == {"reward/kl": pytest.approx(0.75)}
    close(row.fields["advantages"].tolist(), [0.0, *advantages])
    assert row.fields["rewards"].sum() == pytest.approx(1.0 - 0.3 * (place == "reward"))


def test_kl_in_the_advantage_comes_before_whitening_and_the_clip() -> None:
    rows = answers(1.0, 0.0)
    for row in rows:
        row.fields |= {"old_logprobs": np.float32([0, 1.0, 1.0]), "ref_logprobs": np.zeros(3, np.float32)}
    recipe = replace(RECIPES["reinforce_pp"], kl_coef=3.0, kl_in="advantage")
    compute_advantages(rows, recipe)  # a KL that is equal everywhere cancels in whitening
    close(per_row(rows), [0.866025, -0.866025])
    compute_advantages(rows, replace(recipe, whiten_advantages=False, advantage_clip=0.5))
    close(per_row(rows), [-0.5, -0.5])


def test_the_full_kl_in_the_reward_is_the_field_up_to_the_clamp() -> None:
    rows = answers(1.0, 0.0)
    for row in rows:
        row.fields["kl"] = np.float32([0, 0.3, 0.9])
    recipe = replace(
        RECIPES["reinforce_pp"], whiten_advantages=False, kl_coef=0.2, kl_estimator="full", kl_clamp=0.5
    )
    assert compute_advantages(rows, recipe) == {"reward/kl": pytest.approx(0.4)}
    close(rows[0].fields["advantages"][1:].tolist(), [0.84, 0.9])  # 1 - 0.2 (0.3 + 0.5), 1 - 0.2 * 0.5


def test_running_statistics_continue_from_round_to_round() -> None:
    recipe = replace(GRPO, reward_mean="running", advantage=advantage_of("reinforce"))
    running = RunningMoments()
    first, second = answers(1.0, 0.0), answers(1.0, 1.0)
    compute_advantages(first, recipe, running=running)
    compute_advantages(second, recipe, running=running)
    close(per_row(first), [0.5, -0.5])
    close(per_row(second), [0.25, 0.25])  # mean 3/4 of four


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "remax", "raft"])
@pytest.mark.parametrize("mean", get_args(RewardStatistics))
def test_a_common_centre_cancels_in_differences(advantage: str, mean: RewardStatistics) -> None:
    """The baseline of remax moves with the rewards."""

    def credited(recipe: Recipe) -> list[float]:
        rows = [*answers(1.0, 0.25, 0.5, group=0), *answers(0.0, 0.75, group=1)]
        for row in rows:
            row.baseline = 0.5
        compute_advantages(rows, recipe)
        return per_row(rows)

    recipe = replace(GRPO, advantage=advantage_of(advantage))
    close(credited(replace(recipe, reward_mean=mean)), credited(recipe))


def test_whitened_rewards_have_mean_0_and_variance_1_over_the_policys_positions() -> None:
    rows = [text(("", 1.0), ("a", 4.0)), text(("", 1.0))]
    compute_advantages(
        rows, replace(GRPO, advantage=advantage_of("reinforce", gamma=0.0), whiten_rewards=True)
    )
    rewards = np.concatenate([row.fields["rewards"][row.mask] for row in rows])
    assert rewards.mean() == pytest.approx(0.0, abs=1e-6)
    assert rewards.var(ddof=1) == pytest.approx(1.0, abs=1e-6)
    assert all(not row.fields["rewards"][~row.mask].any() for row in rows)


def test_advantages_are_clipped_after_whitening() -> None:
    rows = answers(10.0, 0.0, 0.0, 0.0)
    compute_advantages(
        rows, replace(GRPO, advantage=advantage_of("reinforce"), whiten_advantages=True, advantage_clip=1.0)
    )
    # whitened over two tokens each: mean 2.5, variance 2 * (56.25 + 18.75) / 7, std 4.629100: 1.620185 and
    # -0.540062
    close(per_row(rows), [1.0, -0.540062, -0.540062, -0.540062])


# --- truncated trajectories ---


def _cut(rewards: list[float], is_truncated: list[bool]) -> list[Row]:
    return [text(("", r), is_truncated=cut) for r, cut in zip(rewards, is_truncated, strict=True)]


def test_a_masked_trajectory_counts_in_its_groups_baseline() -> None:
    recipe = replace(GRPO, mask_truncated=True, advantage=changed(GRPO.advantage, normalize_by_std=False))
    rows = _cut([1.0, 0.0, 0.5], [False, True, False])
    compute_advantages(rows, recipe)
    close(per_row(rows), [0.5, -0.5, 0.0])
    assert are_trained(rows, recipe) == [True, False, True]
    assert all(are_trained(rows, GRPO))


def test_only_long_failures_are_masked() -> None:
    recipe = replace(GRPO, mask_long_failures=4)
    rows = [
        text(("", reward), tokens=tokens, score=reward)
        for reward, tokens in [(0.0, 3), (0.0, 4), (1.0, 9), (-1.0, 9), (0.5, 9)]
    ]
    assert are_trained(rows, recipe) == [True, False, True, False, True]
    assert all(are_trained(rows, GRPO))
    rows[1].trajectory = rows[0].trajectory  # one failure of 7 tokens in two segments
    assert are_trained(rows, recipe) == [False, False, True, False, True]


def test_the_reward_clip_comes_after_statistics_and_before_kl_and_the_token_clip_after_it() -> None:
    recipe = replace(
        GRPO,
        advantage=advantage_of("reinforce"),
        reward_mean="group",
        reward_clip=0.4,
        kl_coef=1.0,
        kl_in="reward",
        kl_estimator="k1",
    )
    expected = {None: [[0.3, 0.4 - 1.0], [-0.1, -0.4]], 0.5: [[0.3, -0.5], [-0.1, -0.4]]}
    for bound, rewards in expected.items():
        rows = answers(2.0, 0.0)  # centred: 1 and -1, clipped to 0.4 and -0.4
        for row, kl in zip(rows, ([-0.3, 1.0], [0.1, 0.0]), strict=True):
            row.fields["old_logprobs"] = np.array([0.0, *kl], np.float32)
            row.fields["ref_logprobs"] = np.zeros(3, np.float32)
        compute_advantages(rows, replace(recipe, token_reward_clip=bound))
        close([row.fields["rewards"][1:].tolist() for row in rows], rewards)


def test_whitening_is_over_what_is_trained_on() -> None:
    recipe = replace(GRPO, advantage=advantage_of("reinforce"), whiten_advantages=True, mask_truncated=True)
    with_cut, without = _cut([1.0, 9.0, 0.0], [False, True, False]), answers(1.0, 0.0)
    for rows in (with_cut, without):
        compute_advantages(rows, recipe)
    assert per_row([with_cut[0], with_cut[2]]) == per_row(without)


# --- what credit does not hang on ---


@pytest.mark.parametrize("level", ["trajectory", "turn"])
@pytest.mark.parametrize("advantage", sorted(set(ADVANTAGES) - {"raft"}))
def test_advantages_do_not_depend_on_the_order_of_rows(advantage: str, level: str) -> None:
    """raft's ties are broken by order; its property is in tests/algorithms."""
    recipe = replace(GRPO, advantage=advantage_of(advantage, level=level, gamma=0.9), reward_mean="batch", reward_std="group", whiten_advantages=True)  # fmt: skip

    def rows() -> list[Row]:
        rng = np.random.default_rng(0)
        out = []
        for number in range(12):
            turns = [
                ("xy"[int(rng.integers(2))], float(rng.random())) for _ in range(int(rng.integers(1, 4)))
            ]
            row = text(*turns, group=number % 3, prompt=number % 3, baseline=0.5)
            row.trajectory = number
            row.fields["values"] = np.where(row.mask, rng.random(len(row)), 0).astype(np.float32)
            out.append(row)
        return out

    plain, mixed = rows(), rows()
    compute_advantages(plain, recipe)
    shuffled = [mixed[i] for i in np.random.default_rng(1).permutation(12)]
    compute_advantages(shuffled, recipe)
    for row, other in zip(plain, mixed, strict=True):
        # float64 sums in another order, given back in float32
        np.testing.assert_allclose(row.fields["advantages"], other.fields["advantages"], atol=1e-6)


def test_no_advantage_changes_masked_positions() -> None:
    row = text(("", 1.0), ("reply", 2.0))
    compute_advantages([row, *answers(0.0, 1.0)], GIGPO)
    assert not row.fields["advantages"][~row.mask].any()
    assert row.fields["advantages"].dtype == np.float32
    assert torch.from_numpy(row.fields["advantages"]).isfinite().all()


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_agents_with_rewards_of_their_own_are_compared_with_the_same_agent(name: str) -> None:
    """A zero-sum game: with one reward for both, every episode would have 0."""
    won, lost = (1.0, -1.0), (-1.0, 1.0)
    rows = [
        replace(row, trajectory=number, player=player)
        for number, rewards in enumerate((won, lost, won))
        for player, row in zip("ab", answers(*rewards), strict=True)
    ]
    recipe = replace(RECIPES[name], advantage=changed(RECIPES[name].advantage, normalize_by_std=False))
    compute_advantages(rows, recipe)
    scale = 1.5 if name == "rloo" else 1.0
    of_a = np.array([2 / 3, -4 / 3, 2 / 3]) * scale
    for player, expected in (("a", of_a), ("b", -of_a)):
        advantages = [row.fields["advantages"][-1] for row in rows if row.player == player]
        np.testing.assert_allclose(advantages, expected, **CLOSE)
