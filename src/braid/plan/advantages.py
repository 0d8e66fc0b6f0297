"""Consistency checks of rewards, filters and advantages."""

from __future__ import annotations

from collections.abc import Iterator

from braid.config.schema import RunConfig
from braid.types import Advantage

from .plan import Plan

_COMPARING: frozenset[Advantage] = frozenset({"grpo", "rloo", "raft", "maxrl", "gigpo"})
"""Advantage estimators that compare trajectories within a group."""

_BOUNDS = ("min_std", "min_mean", "max_mean")


def advantage_problems(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of every setting that leaves nothing to learn from or has no meaning."""
    if plan.verb == "train":
        yield from _groups(config, plan)
        yield from _advantages(config, plan)
        yield from _filters(config)


def _groups(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    recipe = plan.recipe
    if config.rollout.group_size > 1:
        return
    if recipe.advantage in _COMPARING:
        yield (
            "rollout.group_size",
            f"{recipe.advantage} compares the answers of a group, so with group_size=1 every advantage is 0; "
            "raise it to 2 or more, or set algorithm.recipe=ppo",
        )
    elif recipe.reward_mean == "group":
        yield (
            "rollout.group_size",
            "algorithm.reward_mean=group subtracts the group's mean, so with group_size=1 every reward is 0; raise it to 2 or "
            "more, or set algorithm.reward_mean=batch",
        )


def _advantages(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    recipe = plan.recipe
    if recipe.advantage == "remax" and config.rollout.sampling.greedy:
        yield (
            "rollout.sampling.greedy",
            "remax compares sampled answers with the greedy one, so sampling must not be greedy; set it to false",
        )
    if recipe.advantage == "remax" and recipe.whiten_rewards:
        yield (
            "algorithm.whiten_rewards",
            "remax subtracts the reward of the greedy answer, which has no tokens to whiten over; set it to false, or use "
            "algorithm.whiten_advantages",
        )
    if recipe.advantage == "maxrl" and recipe.reward_mean != "none":
        yield (
            "algorithm.reward_mean",
            f"maxrl divides by the group's mean reward, which reward_mean={recipe.reward_mean} subtracts; set it to none",
        )
    if recipe.advantage == "gigpo" and recipe.episode_weight == recipe.turn_weight == 0:
        yield (
            "algorithm.turn_weight",
            "algorithm.episode_weight is 0 too, so every advantage of gigpo is 0; raise one of them",
        )


def _filters(config: RunConfig) -> Iterator[tuple[str, str]]:
    low, high = config.rollout.filter.min_mean, config.rollout.filter.max_mean
    if low is not None and high is not None and low >= high:
        yield (
            "rollout.filter.min_mean",
            f"min_mean={low:g} is not below max_mean={high:g}, so every group is dropped; lower it below max_mean",
        )


def advantage_warnings(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of settings that are legal but rarely intended."""
    if plan.verb != "train":
        return
    recipe, reward = plan.recipe, config.reward
    negative = [
        key
        for key, is_so in (
            ("reward.scale", reward.scale < 0),
            ("reward.shift", reward.shift < 0),
            ("reward.overlong", reward.overlong is not None),
            ("algorithm.kl_in", recipe.kl_coef > 0 and recipe.kl_in == "reward"),
        )
        if is_so
    ]
    if recipe.advantage == "maxrl" and negative:
        yield (
            negative[0],
            "makes rewards negative, but maxrl learns nothing from groups with a mean of 0 or less",
        )
    is_engines = plan.old_logprobs in ("behavior", "interpolated")
    if is_engines and recipe.corrections and config.algorithm.corrections is None:
        yield (
            "algorithm.old_logprobs",
            f"with {plan.old_logprobs} the corrections of algorithm.recipe={config.algorithm.recipe} have nothing to correct; "
            "set it to auto or recompute",
        )
    if config.rollout.filter.then == "resample" and config.run.max_epochs is not None:
        yield (
            "run.max_epochs",
            "the number of rounds assumes one batch of prompts per round; rounds that resample draw more, so the run makes "
            "more passes over the data",
        )
    if config.rollout.filter.then != "mask" and not _has_filter(config, plan):
        yield (
            "rollout.filter.then",
            f"only groups without a valid answer are dropped, as none of {', '.join(_BOUNDS)} is set",
        )


def _has_filter(config: RunConfig, _: Plan) -> bool:
    return any(getattr(config.rollout.filter, bound) is not None for bound in _BOUNDS)
