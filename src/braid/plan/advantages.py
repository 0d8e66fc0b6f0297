"""Consistency checks of rewards, filters and advantages."""

from __future__ import annotations

from collections.abc import Iterator

from braid.config.schema import RunConfig

from .plan import Plan

_BOUNDS = ("min_std", "min_mean", "max_mean")


def advantage_problems(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of every setting that leaves nothing to learn from or has no meaning."""
    if plan.verb != "train":
        return
    recipe, rollout = plan.recipe, config.rollout
    advantage, name = recipe.advantage, recipe.advantage.kind
    if rollout.group_size == 1 and advantage.compares_group:
        why = f"{name} compares the answers of a group, so with group_size=1 every advantage is 0"
        yield "rollout.group_size", f"{why}; raise it to 2 or more, or set algorithm.recipe=ppo"
    elif rollout.group_size < (least := advantage.least_group):
        size = rollout.group_size
        why = f"{name} compares sets of {least - 1} answers, so in groups of {size} every advantage is 0"
        yield "rollout.group_size", f"{why}; raise it to {least} or more, or lower algorithm.advantage.k"
    elif rollout.group_size == 1 and recipe.reward_mean == "group":
        why = "algorithm.reward_mean=group subtracts the group's mean, so with group_size=1 every reward is 0"
        yield "rollout.group_size", f"{why}; raise it to 2 or more, or set algorithm.reward_mean=batch"
    if advantage.needs_greedy and rollout.sampling.greedy:
        why = (
            f"{name} compares sampled answers with the greedy one, so sampling must not be greedy; set it to "
            "false"
        )
        yield "rollout.sampling.greedy", why
    if advantage.needs_greedy and recipe.whiten_rewards:
        why = f"{name} subtracts the reward of the greedy answer, which has no tokens to whiten over"
        yield "algorithm.whiten_rewards", f"{why}; set it to false, or use algorithm.whiten_advantages"
    if advantage.divides_by_mean and (mean := recipe.reward_mean) != "none":
        why = f"{name} divides by the group's mean reward, which reward_mean={mean} subtracts; set it to none"
        yield "algorithm.reward_mean", why
    if advantage.bootstraps_ends and not config.env.is_simulator:
        why = "a text has no state after its end whose value could be added; set it to truncated"
        yield "algorithm.advantage.bootstrap", why
    low, high = rollout.filter.min_mean, rollout.filter.max_mean
    if low is not None and high is not None and low >= high:
        why = f"min_mean={low:g} is not below max_mean={high:g}, so every group is dropped"
        yield "rollout.filter.min_mean", f"{why}; lower it below max_mean"


def advantage_warnings(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of settings that are legal but rarely intended."""
    if plan.verb != "train":
        return
    recipe, reward, group_filter = plan.recipe, config.reward, config.rollout.filter
    may_be_negative = {
        "reward.scale": reward.scale < 0,
        "reward.shift": reward.shift < 0,
        "reward.overlong": reward.overlong is not None,
        "algorithm.kl_in": recipe.kl_coef > 0 and recipe.kl_in == "reward",
    }
    negative = next((key for key, is_so in may_be_negative.items() if is_so), None)
    if recipe.advantage.divides_by_mean and negative:
        yield (
            negative,
            f"makes rewards negative, but {recipe.advantage.kind} learns nothing from groups with a mean of "
            "0 or less",
        )
    env, compares = config.env, recipe.advantage.compares_group or recipe.reward_mean == "group"
    if compares and not env.has_equal_starts:
        which = "the episodes of a group are compared although they begin in different states"
        yield "env.fixed_reset_states", f"{which}; set it to true, or use algorithm.recipe=ppo"
    is_engines = plan.old_logprobs in ("behavior", "interpolated")
    if is_engines and recipe.corrections and config.algorithm.corrections is None:
        which = f"with {plan.old_logprobs} the corrections of algorithm.recipe={config.algorithm.recipe}"
        yield "algorithm.old_logprobs", f"{which} have nothing to correct; set it to auto or recompute"
    if group_filter.then == "resample" and config.run.max_epochs is not None:
        yield (
            "run.max_epochs",
            "the number of rounds assumes one batch of prompts per round; rounds that resample draw more, "
            "so the run makes more passes over the data",
        )
    if group_filter.then != "mask" and all(getattr(group_filter, bound) is None for bound in _BOUNDS):
        why = f"only groups without a valid answer are dropped, as none of {', '.join(_BOUNDS)} is set"
        yield "rollout.filter.then", why
