"""Inconsistent or unused keys of rewards, filters and advantages."""

from __future__ import annotations

import pytest

from .test_checks import SIMULATOR, TEXT, complaints, warnings


@pytest.mark.parametrize(
    "advantage", ["grpo", "rloo", "raft", "maxrl", "gigpo", "opo", "gpg", "pass_at_k", "gdpo"]
)
def test_advantages_that_compare_need_a_group(advantage: str) -> None:
    assert complaints(TEXT, f"algorithm.advantage={advantage}", "rollout.group_size=1") == [
        f"rollout.group_size: {advantage} compares the answers of a group, so with group_size=1 every "
        "advantage is 0; raise it to 2 or more, or set algorithm.recipe=ppo"
    ]


@pytest.mark.parametrize(("k", "size"), [(4, 4), (4, 2), (2, 2)])
def test_sets_of_answers_are_smaller_than_the_group(k: int, size: int) -> None:
    advantage = f"algorithm.advantage={{kind: pass_at_k, k: {k}}}"
    assert complaints(TEXT, advantage, f"rollout.group_size={size}") == [
        f"rollout.group_size: pass_at_k compares sets of {k} answers, so in groups of {size} every advantage is "
        f"0; raise it to {k + 1} or more, or lower algorithm.advantage.k"
    ]
    assert warnings(TEXT, advantage, f"rollout.group_size={k + 1}") == []


@pytest.mark.parametrize("recipe", ["remax", "ppo", "reinforce", "reinforce_pp"])
def test_other_advantages_take_single_answers(recipe: str) -> None:
    assert warnings(TEXT, f"algorithm.recipe={recipe}", "rollout.group_size=1") == []


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["algorithm.recipe=reinforce_pp_baseline", "rollout.group_size=1"],
            "rollout.group_size: algorithm.reward_mean=group subtracts the group's mean, so with "
            "group_size=1 every reward is 0; raise it to 2 or more, or set algorithm.reward_mean=batch",
        ),
        (
            ["algorithm.recipe=remax", "rollout.sampling.greedy=true"],
            "rollout.sampling.greedy: remax compares sampled answers with the greedy one, so sampling must "
            "not be greedy; set it to false",
        ),
        (
            ["algorithm.recipe=remax", "algorithm.whiten_rewards=true"],
            "algorithm.whiten_rewards: remax subtracts the reward of the greedy answer, which has no "
            "tokens to whiten over; set it to false, or use algorithm.whiten_advantages",
        ),
        (
            ["algorithm.recipe=maxrl", "algorithm.reward_mean=group"],
            "algorithm.reward_mean: maxrl divides by the group's mean reward, which reward_mean=group "
            "subtracts; set it to none",
        ),
        (
            ["rollout.filter={min_mean: 0.8, max_mean: 0.2}"],
            "rollout.filter.min_mean: min_mean=0.8 is not below max_mean=0.2, so every group "
            "is dropped; lower it below max_mean",
        ),
    ],
)
def test_settings_without_a_learning_signal_are_refused(overrides: list[str], complaint: str) -> None:
    assert complaints(TEXT, *overrides) == [complaint]


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (
            ["algorithm.recipe=maxrl", "reward.shift=-1"],
            "reward.shift: makes rewards negative, but maxrl learns nothing from groups with a mean of 0 "
            "or less",
        ),
        (
            ["algorithm.recipe=decoupled_ppo", "algorithm.old_logprobs=behavior"],
            "algorithm.old_logprobs: with behavior the corrections of algorithm.recipe=decoupled_ppo "
            "have nothing to correct; set it to auto or recompute",
        ),
        (
            ["rollout.filter={min_std: 0, then: resample}", "run.max_epochs=1"],
            "run.max_epochs: the number of rounds assumes one batch of prompts per round; rounds that "
            "resample draw more, so the run makes more passes over the data",
        ),
        (
            ["rollout.filter.then=replace"],
            "rollout.filter.then: only groups without a valid answer are dropped, as none of min_std, "
            "min_mean, max_mean is set",
        ),
    ],
)
def test_suspicious_settings_cause_warnings(overrides: list[str], warning: str) -> None:
    assert warnings(TEXT, *overrides) == [warning]


@pytest.mark.parametrize(
    ("overrides", "key", "because"),
    [
        (
            ["algorithm.recipe=rloo", "algorithm.reward_mean=batch"],
            "algorithm.reward_mean",
            "advantages are differences within a group, so a constant subtracted from its rewards cancels",
        ),
        (
            ["algorithm.recipe=raft", "algorithm.reward_std=batch"],
            "algorithm.reward_std",
            "raft only compares rewards, so their scale does not matter",
        ),
        (["algorithm.kl_target=0.1"], "algorithm.kl_target", "algorithm.kl_coef is 0"),
        (
            ["algorithm.kl_coef=0.1", "algorithm.kl_horizon=100"],
            "algorithm.kl_horizon",
            "algorithm.kl_target is off",
        ),
        (
            ["rollout.filter={min_std: 0, max_batches: 3}"],
            "rollout.filter.max_batches",
            "rollout.filter.then is mask",
        ),
        (
            ["rollout.filter={min_std: 0, min_kept_fraction: 0.5}"],
            "rollout.filter.min_kept_fraction",
            "rollout.filter.then is mask",
        ),
    ],
)
def test_a_key_of_a_part_that_is_not_used_has_no_effect(overrides: list[str], key: str, because: str) -> None:
    assert warnings(TEXT, *overrides) == [f"{key}: has no effect: {because}"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.recipe=gigpo", "algorithm.advantage={gamma: 0.9, normalize_by_std: false}"],
        ["algorithm.recipe=reinforce", "algorithm.advantage.gamma=0.9"],
        ["algorithm.advantage.level=turn", "algorithm.reward_mean=batch"],
        ["algorithm.kl_coef=0.1", "algorithm.kl_target=0.1", "algorithm.kl_horizon=100"],
        ["rollout.filter={min_std: 0, then: resample, max_batches: 3}"],
        ["rollout.filter={max_mean: 0.9, then: replace, min_kept_fraction: 0.5}"],
        ["data.eval=[]", "algorithm.supervised_coef=0.1", "eval.success_reward=0.5"],
        ["reward={parts: [{kind: exact}], overlong: {buffer_tokens: 256}, scale: 2, truncated: zero}"],
    ],
)
def test_keys_that_are_read_cause_no_warnings(overrides: list[str]) -> None:
    assert warnings(TEXT, *overrides) == []


def test_a_simulators_episode_has_no_length_in_tokens_to_punish() -> None:
    assert warnings(SIMULATOR, "reward.overlong.buffer_tokens=10") == [
        "reward.overlong: has no effect: a simulator has no text"
    ]
