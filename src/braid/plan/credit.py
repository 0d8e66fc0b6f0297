"""Consistency checks of rewards, filters and advantages, and their unused keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from braid.config.schema import RunConfig
from braid.types import Advantage

from .available import Idle
from .plan import Plan

_COMPARING: frozenset[Advantage] = frozenset({"grpo", "rloo", "raft", "maxrl", "gigpo"})
"""Advantage estimators that compare trajectories within a group."""

_BOUNDS = ("min_std", "min_mean", "max_mean")


def credit_problems(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
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
            "algorithm.reward_mean=group takes the group's mean off, so with group_size=1 every reward is 0; raise it to 2 or "
            "more, or set algorithm.reward_mean=batch",
        )


def _advantages(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    recipe = plan.recipe
    if recipe.advantage == "remax" and config.rollout.sampling.greedy:
        yield (
            "rollout.sampling.greedy",
            "remax compares sampled answers with the greedy one, and these are the same; set it to false",
        )
    if recipe.advantage == "remax" and recipe.whiten_rewards:
        yield (
            "algorithm.whiten_rewards",
            "remax takes off the reward of the greedy answer, which has no positions to whiten; set it to false, or whiten "
            "advantages",
        )
    if recipe.advantage == "maxrl" and recipe.reward_mean != "none":
        yield (
            "algorithm.reward_mean",
            f"maxrl divides by a group's mean reward, which reward_mean={recipe.reward_mean} takes off; set it to none",
        )
    if recipe.advantage == "gigpo" and recipe.episode_weight == recipe.turn_weight == 0:
        yield (
            "algorithm.turn_weight",
            "with algorithm.episode_weight=0 too every advantage of gigpo is 0; raise one of them",
        )


def _filters(config: RunConfig) -> Iterator[tuple[str, str]]:
    low, high = config.rollout.filter.min_mean, config.rollout.filter.max_mean
    if low is not None and high is not None and low >= high:
        yield (
            "rollout.filter.min_mean",
            f"every group has a mean reward of at most {low:g} or of at least max_mean={high:g}, so every group is dropped; "
            "lower it below max_mean",
        )


def credit_warnings(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
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
            "makes rewards negative, and maxrl learns nothing from groups whose mean is not above 0",
        )
    is_engines = plan.old_logprobs in ("behavior", "interpolated")
    if is_engines and recipe.corrections and config.algorithm.corrections is None:
        yield (
            "algorithm.old_logprobs",
            f"{plan.old_logprobs} leaves the corrections of algorithm.recipe={config.algorithm.recipe} no difference to correct; set auto "
            "or recompute",
        )
    if config.rollout.filter.then == "resample" and config.run.max_epochs is not None:
        yield (
            "run.max_epochs",
            "rounds are counted as if each drew one batch of prompts; those that resample draw more, so the run passes over "
            "the data more often",
        )
    if config.rollout.filter.then != "mask" and not _has_filter(config, plan):
        yield (
            "rollout.filter.then",
            f"only groups without a valid answer are dropped: none of {', '.join(_BOUNDS)} is set",
        )


def _has_filter(config: RunConfig, _: Plan) -> bool:
    return any(getattr(config.rollout.filter, bound) is not None for bound in _BOUNDS)


def _is_of_differences(_: RunConfig, plan: Plan) -> bool:
    """Whether subtracting a constant from all rewards of a group leaves the advantages unchanged. Not with
    whitened rewards: there it matters at which position it is subtracted."""
    recipe = plan.recipe
    is_of_trajectories = recipe.advantage == "grpo" and recipe.advantage_level == "trajectory"
    return not recipe.whiten_rewards and (recipe.advantage in ("rloo", "remax", "raft") or is_of_trajectories)


def _is_of_order(_: RunConfig, plan: Plan) -> bool:
    """Whether advantages depend only on the order of the group's rewards, and no other term is weighed
    against them."""
    recipe = plan.recipe
    has_penalty = recipe.kl_coef > 0 and recipe.kl_in == "reward"
    return recipe.advantage == "raft" and not recipe.whiten_rewards and not has_penalty


def _unless(*advantages: Advantage) -> Callable[[RunConfig, Plan], bool]:
    return lambda _, plan: plan.recipe.advantage not in advantages


IDLE: tuple[Idle, ...] = (
    (
        "the advantage has no critic",
        lambda _, plan: not plan.needs_critic,
        (
            "algorithm.gae_lambda",
            "algorithm.value_clip",
            "algorithm.huber_delta",
            "algorithm.value_loss_coef",
        ),
    ),
    ("only gae, reinforce and gigpo discount", _unless("gae", "reinforce", "gigpo"), ("algorithm.gamma",)),
    (
        "only the advantages grpo and gigpo divide by the group's deviation",
        _unless("grpo", "gigpo"),
        ("algorithm.normalize_by_std",),
    ),
    ("only grpo compares turns in place of trajectories", _unless("grpo"), ("algorithm.advantage_level",)),
    (
        "only gigpo has two parts",
        _unless("gigpo"),
        ("algorithm.episode_weight", "algorithm.turn_weight"),
    ),
    (
        "the advantage is of differences within a group, in which a common centre of rewards cancels",
        _is_of_differences,
        ("algorithm.reward_mean",),
    ),
    (
        "the advantage is 1 for the best of a group, whatever rewards are divided by",
        _is_of_order,
        ("algorithm.reward_std",),
    ),
    (
        "algorithm.kl_coef is 0",
        lambda _, plan: not plan.needs_reference,
        ("algorithm.kl_target", "algorithm.kl_horizon"),
    ),
    (
        "algorithm.kl_target is off",
        lambda _, plan: plan.recipe.kl_target is None,
        ("algorithm.kl_horizon",),
    ),
    (
        "rollout.group_size is 1, and rewards of one trajectory have no deviation",
        lambda config, _: config.rollout.group_size == 1,
        ("rollout.filter.min_std",),
    ),
    (
        "rollout.filter.then is not resample",
        lambda config, _: config.rollout.filter.then != "resample",
        ("rollout.filter.max_batches",),
    ),
    (
        "rollout.filter.then is not replace",
        lambda config, _: config.rollout.filter.then != "replace",
        ("rollout.filter.min_kept_fraction",),
    ),
)
