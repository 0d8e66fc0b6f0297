"""RLinf's `algorithm` keys: batches, advantages, losses, KL, sampling."""

from __future__ import annotations

from typing import Any

from . import rlinf_facts as facts
from .compat import (
    Apply,
    Became,
    Implied,
    NoEffect,
    Rule,
    Source,
    Unsupported,
    mapped,
    no_effect,
    null_as,
    opposite,
    unless_null,
    unsupported,
    when,
)
from .rlinf_facts import fixed_batches, robots_only, text_only
from .rlinf_run import eval_prompts, logprob_rows
from .values import BOOL, COUNT, NON_NEGATIVE, POSITIVE, SHARE, choice, integer, list_of, nullable, number

_RECIPES = {
    "grpo": "grpo",
    "grpo_dynamic": "grpo",
    "gae": "ppo",
    "reinpp": "reinforce_pp",
    "raw": "reinforce",
}
_ESTIMATORS = {
    "kl": "k1", "k1": "k1",
    "abs": "abs",
    "mse": "k2", "k2": "k2",
    "low_var_kl": "k3", "k3": "k3",
}  # fmt: skip
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
}
_LOSSES = ("ppo", "grpo", "actor", "actor_critic", "decoupled_actor_critic", "gspo")
_BY_EPS = "null: set by algorithm.ratio_clip_eps"
NO_TOP_K = 1_000_000
"""RLinf's value for no limit; larger than any vocabulary."""


def _advantage(_: str, source: Source) -> Became:
    kind = facts.advantage(source)
    if kind not in _RECIPES:
        return unsupported("use grpo, gae or reinpp")
    native: dict[str, Any] = {"algorithm.recipe": _RECIPES[kind]}
    if kind in ("grpo", "grpo_dynamic"):
        native |= {"algorithm.advantage": "grpo", "algorithm.normalize_by_std": True}
    else:
        native["algorithm.advantage"] = "gae" if facts.has_critic(source) else "reinforce"
        has_group = kind == "reinpp" and source.get("algorithm.use_reinpp_baseline") is True
        native["algorithm.reward_mean"] = "group" if has_group else "none"
    if kind == "reinpp":
        native["algorithm.whiten_advantages"] = True
    if kind == "gae" and not facts.has_critic(source):
        native |= {"algorithm.gamma": 1.0}
        return Became(
            native,
            note="without a critic (critic.use_critic_model), the undiscounted return of each token",
        )
    return Became(native)


def _loss(value: str, source: Source) -> Became:
    if value not in _LOSSES:
        return unsupported(f"use one of {', '.join(_LOSSES)}")
    if value.endswith("actor_critic") and facts.advantage(source) != "gae":
        kind = source.get("algorithm.adv_type")
        raise ValueError(
            f"{value} learns values, but algorithm.adv_type={kind} does not use them; set adv_type to gae, or loss_type to actor"
        )
    native: dict[str, Any] = {"algorithm.policy_loss": "ppo_clip"}
    if value == "gspo":
        native["algorithm.ratio_level"] = "sequence"
    if value == "decoupled_actor_critic":
        native["algorithm.corrections"] = _decoupled(source.get("algorithm.behave_weight_threshold"))
    return Became(native)


def _decoupled(high: float | None) -> list[dict[str, Any]]:
    """Corrections that multiply the surrogate by w and mask tokens with w above the threshold."""
    weight = _correction("truncate", high)
    return [weight] if high is None else [weight, _correction("mask", high)]


def _correction(mode: str, high: float | None) -> dict[str, Any]:
    return {"level": "token", "mode": mode, "high": "off" if high is None else high}


def _threshold(value: float, source: Source) -> Became:
    if source.get("algorithm.loss_type") != "decoupled_actor_critic":
        return no_effect("for algorithm.loss_type=decoupled_actor_critic only")
    return Became({"algorithm.corrections": _decoupled(value)})


def _importance_fix(_: Any, source: Source) -> Became:
    if not source.get("algorithm.importance_sampling_fix"):
        return no_effect("algorithm.importance_sampling_fix is false")
    high = source.get("algorithm.importance_sampling_clip")
    return Became({"algorithm.corrections": [_correction("truncate", high)]})


def _clip(value: float, source: Source) -> Became:
    native = {
        f"algorithm.clip_{side}": value
        for side in ("low", "high")
        if source.get(f"algorithm.clip_ratio_{side}") is None
    }
    return (
        Became(native) if native else no_effect("overridden by algorithm.clip_ratio_low and clip_ratio_high")
    )


def _dual_clip(value: float | None, source: Source) -> Any:
    is_absent = "algorithm.clip_ratio_c" not in source.values
    return "off" if value is None or (is_absent and facts.is_robots(source)) else value


def _entropy(value: float, source: Source) -> Any:
    is_on = facts.is_robots(source) or source.get("algorithm.calculate_entropy")
    return (
        Became({"algorithm.entropy_coef": value})
        if is_on
        else no_effect("algorithm.calculate_entropy is false")
    )


def _calculate_entropy(value: bool, source: Source) -> Any:
    bonus = source.get("algorithm.entropy_bonus")
    if facts.is_robots(source) or not bonus:
        return no_effect("entropy is always measured, and only algorithm.entropy_bonus adds it to the loss")
    return Became({"algorithm.entropy_coef": bonus if value else 0.0})


def _estimator(value: str, source: Source) -> Became:
    if value not in _ESTIMATORS:
        return unsupported(f"use one of {', '.join(_ESTIMATORS)}")
    if not source.get("algorithm.kl_beta") and not source.get("algorithm.reinpp_kl_beta"):
        return no_effect("algorithm.kl_beta is 0")
    estimator = _ESTIMATORS[value]
    return Became(
        {"algorithm.kl_estimator": estimator, "algorithm.kl_clamp": 10.0 if estimator == "k3" else "off"}
    )


def _reward_kl(value: float, _: Source) -> Became:
    return Became({"algorithm.kl_coef": value, "algorithm.kl_in": "reward"})


def _top_k(value: int, _: Source) -> int:
    return 0 if value <= 0 or value >= NO_TOP_K else value


def _request_batch(value: int | None, source: Source) -> int | None:
    return None if value is None else value * facts.rollout_devices(source)


def _filtered(name: str) -> Any:
    def convert(value: float, source: Source) -> Any:
        is_on = source.get("algorithm.filter_rewards") is True
        return (
            Became({f"rollout.filter.{name}": value})
            if is_on
            else no_effect("algorithm.filter_rewards is false")
        )

    return convert


def _resets(name: str) -> Any:
    def convert(value: bool, source: Source) -> Any:
        said = source.has(f"env.train.{name}")
        return no_effect(f"overridden by env.train.{name}") if said else Became({f"env.{name}": value})

    return convert


def _kl_beta(value: float, source: Source) -> Became:
    if not value and facts.advantage(source) == "reinpp" and source.get("algorithm.reinpp_kl_beta"):
        return no_effect("overridden by algorithm.reinpp_kl_beta")
    return _reward_kl(value, source) if value else Became({"algorithm.kl_coef": value})


def _filter(value: bool, source: Source) -> Became:
    bounds = {"min_mean": "rewards_lower_bound", "max_mean": "rewards_upper_bound"}
    return Became(
        {
            f"rollout.filter.{name}": source.get(f"algorithm.{key}") if value else None
            for name, key in bounds.items()
        }
    )


def _reinpp(source: Source) -> str:
    return "" if facts.advantage(source) == "reinpp" else "for algorithm.adv_type=reinpp only"


def _grpo_dynamic(source: Source) -> str:
    return "" if facts.advantage(source) == "grpo_dynamic" else "for algorithm.adv_type=grpo_dynamic only"


def _values(source: Source) -> str:
    return "" if facts.has_critic(source) else "without a critic, gamma = lambda = 1"


_SCALES = list_of(choice("group_level", "agent_level", "turn_level"))


_SCALED = {
    ("group_level",): ("sequence_mean_token_sum", "turns"),
    ("group_level", "agent_level"): ("agent_mean_token_mean", "turns"),
    ("group_level", "agent_level", "turn_level"): ("agent_mean_token_mean", "tokens"),
}
"""algorithm.loss_scales with seq-mean-token-mean -> aggregation and turn_weighting."""


def _aggregation(value: str, source: Source) -> Became:
    levels = tuple(source.get("algorithm.loss_scales") or ())
    aggregation = _AGGREGATIONS[value]
    if levels and value == "seq-mean-token-mean":
        aggregation, _ = _SCALED.get(levels, (aggregation, ""))
    return Became({"algorithm.aggregation": aggregation})


def _loss_scales(value: list[str], source: Source) -> Any:
    if not value:
        return Became({"algorithm.turn_weighting": "tokens"})
    if tuple(value) not in _SCALED or source.get("algorithm.loss_agg_func") != "seq-mean-token-mean":
        return unsupported(
            "use [group_level], [group_level, agent_level] or [group_level, agent_level, turn_level], with "
            "algorithm.loss_agg_func=seq-mean-token-mean"
        )
    aggregation, weighting = _SCALED[tuple(value)]
    return Became({"algorithm.aggregation": aggregation, "algorithm.turn_weighting": weighting})


def _whitened(value: bool, source: Source) -> Any:
    if not value and facts.advantage(source) == "reinpp":
        return no_effect("algorithm.adv_type=reinpp always whitens advantages")
    return value


def _without_decoupling(source: Source) -> str:
    is_so = source.get("algorithm.loss_type") == "decoupled_actor_critic"
    return "not used by algorithm.loss_type=decoupled_actor_critic" if is_so else ""


def _level(value: str, _: Source) -> str:
    return value.removesuffix("_level")


def _new_tokens(value: int | None, _: Source) -> Any:
    return no_effect("null: the number that the actions need") if value is None else value


# fmt: off
RULES: tuple[Rule, ...] = (
    # batches
    Apply("algorithm.group_size", "rollout.group_size", COUNT),
    Apply(
        "algorithm.n_minibatches", "train.steps_per_pass", COUNT, when(text_only), default=1,
        note="optimizer steps per round; a step has rollout_batch_size * group_size // n_minibatches rows, in whole "
        "groups. ROLL and SkyRL set the size of a step instead",
    ),
    Apply("algorithm.update_epoch", "train.passes_per_round", COUNT, note="passes over a round's rows"),
    Apply("algorithm.shuffle_rollout", "train.shuffle", BOOL, note="by whole groups"),
    Apply(
        "algorithm.training_batch_size_per_gpu", "train.micro_batch_rows", COUNT, when(text_only, fixed_batches),
        default=1, note="rows per micro-batch; results do not depend on it",
    ),
    Apply(
        "algorithm.rollout_batch_size_per_gpu", "rollout.request_batch", nullable(COUNT),
        when(text_only, then=_request_batch), note="multiplied by the number of rollout devices; null: all prompts of a round at once",
    ),
    Apply(
        "algorithm.logprob_forward_micro_batch_size", "", COUNT, when(text_only, fixed_batches, then=logprob_rows),
        default=1, note="train.infer_batch_rows: rows per forward pass without gradients. Results do not depend on it",
    ),
    Apply(
        "algorithm.val_rollout_batch_size_per_gpu", "", nullable(COUNT), when(text_only, then=eval_prompts),
        note="prompts evaluated at once: multiplied by the number of rollout devices, at most "
        "data.val_rollout_batch_size. Not read by RLinf",
    ),
    # advantages
    Apply(
        "algorithm.adv_type", "",
        choice("grpo", "gae", "ppo", "reinpp", "raw", "grpo_dynamic", "grpo_video", "opd"), _advantage, default="grpo",
        note="grpo: (r - mean) / std of the group, std of n - 1. gae (older: ppo): with a critic. reinpp: REINFORCE++. "
        "raw: the reward. grpo_dynamic: per advantage_mode",
    ),
    Apply(
        "algorithm.advantage_mode", "algorithm.advantage_level", choice("trajectory", "turn"),
        when(_grpo_dynamic),
    ),
    Apply(
        "algorithm.use_reinpp_baseline", "algorithm.reward_mean", BOOL,
        when(_reinpp, then=mapped({True: "group", False: "none"})),
    ),
    Apply(
        "algorithm.normalize_advantages", "algorithm.whiten_advantages", BOOL, _whitened, default=True,
        note="(A - mean) / std over all valid tokens of the round, after the normalization of adv_type; RLinf's "
        "Megatron actor does it twice. reinpp always whitens",
    ),
    Apply("algorithm.gamma", "algorithm.gamma", SHARE, when(_values)),
    Apply("algorithm.gae_lambda", "algorithm.gae_lambda", SHARE, when(_values),
          note="the reward is at the last token; RLinf puts it at the last padded position"),
    # losses
    Apply(
        "algorithm.loss_type", "",
        choice(*_LOSSES, "drpo", "opd", "embodied_sac", "embodied_dagger", "nft", "iql", "rlt"), _loss, default="ppo",
        note="PPO's clipped ratio; newer names: actor, actor_critic. Values are learned with adv_type gae and one of "
        "actor_critic, critic.use_critic_model or, for robots, ppo",
    ),
    Apply(
        "algorithm.loss_agg_func", "algorithm.aggregation", choice(*_AGGREGATIONS), _aggregation,
        default="token-mean", note="denominators count the whole optimizer step; RLinf averages the means of micro-batches",
    ),
    Implied(
        "algorithm.use_valid_token_scale", BOOL,
        "token means are always over all valid tokens of the optimizer step (true in RLinf)",
    ),
    Apply("algorithm.ratio_clip_eps", "", NON_NEGATIVE, _clip, default=0.2,
          note="ratios are clipped to [1 - eps, 1 + eps]"),
    Apply("algorithm.clip_ratio_low", "algorithm.clip_low", nullable(NON_NEGATIVE), unless_null(why=_BY_EPS)),
    Apply("algorithm.clip_ratio_high", "algorithm.clip_high", nullable(NON_NEGATIVE), unless_null(why=_BY_EPS)),
    Apply(
        "algorithm.clip_ratio_c", "algorithm.dual_clip", nullable(number(1.0, above=True, samples=(2.0, 3.0))),
        _dual_clip, default=3.0,
        note="bound on the ratio where A < 0; null: none. A file without the key has 3.0, as in RLinf",
    ),
    Apply(
        "algorithm.early_stop_imp_ratio", "algorithm.early_stop_ratio", nullable(POSITIVE), null_as("off"),
        default=None,
        note="an optimizer step whose mean ratio exceeds it is skipped; RLinf checks each micro-batch, on Megatron",
    ),
    Apply("algorithm.importance_sampling_fix", "", BOOL, _importance_fix,
          note="the loss times min(exp(recomputed - engine's log-prob), importance_sampling_clip)"),
    Apply("algorithm.importance_sampling_clip", "", POSITIVE, _importance_fix),
    Apply("algorithm.behave_weight_threshold", "", nullable(POSITIVE), _threshold, default=None,
          note="for decoupled_actor_critic: tokens with exp(old - engine's log-prob) above it are masked, but in braid still "
          "count in the denominator. null: weights without a bound"),
    Apply("algorithm.value_clip", "algorithm.value_clip", POSITIVE, when(_values)),
    Apply("algorithm.critic_warmup_steps", "critic.warmup_rounds", integer(0), when(_values)),
    *(Unsupported(f"algorithm.drpo_{key}", "for algorithm.loss_type=drpo only, which is not supported") for key in
        ("lambda", "tau", "beta", "delta", "kl_type")),
    Apply("algorithm.huber_delta", "algorithm.huber_delta", POSITIVE, when(_values),
          note="value errors beyond it count linearly"),
    Apply("algorithm.clip_log_ratio_min", "algorithm.log_ratio_min", nullable(number(-20.0, 0.0)),
          when(_without_decoupling, then=null_as("off")), note="log-ratios are clamped before the clip"),
    Apply("algorithm.clip_log_ratio_max", "algorithm.log_ratio_max", nullable(NON_NEGATIVE),
          when(_without_decoupling, then=null_as("off")), note="log-ratios are clamped before the clip"),
    Apply("algorithm.loss_scales", "", _SCALES, _loss_scales,
          note="with seq-mean-token-mean. group_level: the turns of a trajectory are added up; with agent_level: agents "
          "count alike, and the turns of each; with turn_level: the tokens of each. KL and entropy are scaled too"),
    Unsupported("algorithm.staleness_threshold", "training is on-policy: each round is sampled with the current weights"),
    Unsupported("algorithm.on_policy_min_ratio", "training is on-policy: each round is sampled with the current weights"),
    # KL and entropy
    Apply(
        "algorithm.kl_beta", "", NON_NEGATIVE, _kl_beta,
        note="subtracted from each token's reward, as RLinf documents; its code adds it to the loss: braid.algorithm.kl_in=loss",
    ),
    Apply(
        "algorithm.kl_penalty_type", "", choice(*_ESTIMATORS, "full"), _estimator, default="low_var_kl",
        note="d = reference - policy. kl, k1: -d. abs: |d|. mse, k2: d^2 / 2. low_var_kl, k3: exp(d) - d - 1, at most 10. "
        "RLinf's FSDP actor swaps the two; braid does not",
    ),
    Apply("algorithm.reinpp_kl_beta", "", NON_NEGATIVE, when(_reinpp, then=_reward_kl)),
    NoEffect("algorithm.kl_penalty", choice("kl", "kl_penalty"), "the estimator is set by algorithm.kl_penalty_type"),
    Apply(
        "algorithm.entropy_bonus", "", NON_NEGATIVE, _entropy,
        note="loss - bonus * entropy; in text tasks only with calculate_entropy",
    ),
    Apply("algorithm.calculate_entropy", "", BOOL, _calculate_entropy),
    NoEffect("algorithm.entropy_op_type", choice("flash_attn", "torch", "liger_kernel"), "it does not change results"),
    # which groups are trained on
    Apply(
        "algorithm.filter_rewards", "", BOOL, _filter,
        note="groups whose mean reward is not between the bounds are dropped",
    ),
    Apply("algorithm.rewards_lower_bound", "", number(), _filtered("min_mean")),
    Apply("algorithm.rewards_upper_bound", "", number(), _filtered("max_mean")),
    Apply("algorithm.max_num_gen_batches", "rollout.filter.max_batches", COUNT),
    Unsupported("algorithm.down_sampling", "use braid.rollout.filter.min_std=0, which drops groups with equal rewards"),
    # sampling
    Apply("algorithm.sampling_params.do_sample", "rollout.sampling.greedy", BOOL, opposite,
          note="false: greedy decoding"),
    Apply("algorithm.sampling_params.use_greedy", "rollout.sampling.greedy", BOOL,
          note="older name; the opposite of do_sample"),
    Apply(
        "algorithm.sampling_params.temperature", "rollout.sampling.temperature", POSITIVE,
        note="log-probs in training use the same distribution",
    ),
    Apply("algorithm.sampling_params.top_k", "rollout.sampling.top_k", integer(-1, samples=(5, 50, -1)), _top_k,
          note=f"{NO_TOP_K} and more, 0 and -1: off"),
    Apply("algorithm.sampling_params.top_p", "rollout.sampling.top_p", number(0.0, 1.0, above=True)),
    Apply("algorithm.sampling_params.repetition_penalty", "rollout.sampling.repetition_penalty", POSITIVE),
    Apply("algorithm.sampling_params.max_new_tokens", "rollout.sampling.max_new_tokens", COUNT, when(text_only)),
    Apply("algorithm.sampling_params.min_new_tokens", "rollout.sampling.min_new_tokens", integer(0),
          when(text_only), note="not read by RLinf"),
    # robots
    Apply("algorithm.rollout_epoch", "env.episodes_per_round", COUNT, when(robots_only)),
    Apply("algorithm.reward_type", "algorithm.reward_level", choice("chunk_level", "action_level"),
          when(robots_only, then=_level),
          note="chunk_level: rewards of a chunk are summed, one advantage each; action_level: one per action"),
    Apply(
        "algorithm.logprob_type", "algorithm.logprob_level", choice("token_level", "action_level", "chunk_level"),
        when(robots_only, then=_level), note="granularity of the probability ratio",
    ),
    Apply(
        "algorithm.entropy_type", "algorithm.entropy_level", choice("token_level", "action_level", "chunk_level"),
        when(robots_only, then=_level),
    ),
    Apply(
        "algorithm.length_params.max_new_token", "rollout.sampling.max_new_tokens", nullable(COUNT),
        when(robots_only, then=_new_tokens),
    ),
    Apply("algorithm.length_params.max_length", "rollout.max_sequence_tokens", COUNT, when(robots_only)),
    Apply("algorithm.length_params.min_length", "rollout.sampling.min_new_tokens", integer(0), when(robots_only)),
    Apply("algorithm.auto_reset", "env.auto_reset", BOOL, when(robots_only, then=_resets("auto_reset"))),
    Apply("algorithm.ignore_terminations", "env.ignore_terminations", BOOL,
          when(robots_only, then=_resets("ignore_terminations"))),
    Unsupported("algorithm.bootstrap_type", "values are always bootstrapped at time limits (standard)"),
)
# fmt: on
