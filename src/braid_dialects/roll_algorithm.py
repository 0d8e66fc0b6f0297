"""ROLL's keys of advantages and loss."""

from __future__ import annotations

from math import inf
from typing import Any

from . import roll_facts as facts
from .conversions import mapped, null_as, only, when
from .table import (
    Apply,
    Became,
    Implied,
    Rule,
    Source,
    implied,
    no_effect,
    unsupported,
)
from .values import (
    ANY,
    BOOL,
    COUNT,
    NATURAL,
    NON_NEGATIVE,
    NUMBER,
    POSITIVE,
    SHARE,
    choice,
    list_of,
    mapping_of,
    nullable,
)

AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "token_sum_constant",
}
KL_PENALTIES = {"kl": "k1", "abs": "abs", "mse": "k2", "k3": "k3", "full": "full"}
LEVELS = {"token": "token", "segment": "turn_geometric", "geometric": "geometric", "sequence": "sequence"}


def _advantage(value: str, source: Source) -> Became:
    match value:
        case "gae" | "reinforce":
            return Became({"algorithm.advantage": value})
        case "grpo" if facts.is_plain_grpo(source):
            return Became({"algorithm.advantage": "grpo", "algorithm.normalize_by_std": True})
        case "grpo":
            mean, std = facts.normalisation(source)
            return Became(
                {
                    "algorithm.advantage": "reinforce",
                    "algorithm.reward_mean": mean,
                    "algorithm.reward_std": std,
                }
            )
    other = " (for gigpo: braid.algorithm.advantage=gigpo)" if value == "gigpo" else ""
    return unsupported(f"use gae, reinforce or grpo; {value} belongs to ROLL's agentic pipeline{other}")


def _normalised(index: int) -> Any:
    def convert(_: Any, source: Source) -> Any:
        if source.get("adv_estimator") == "grpo":
            return no_effect("adv_estimator=grpo always normalizes by the group")
        return facts.normalisation(source)[index]

    return convert


def _reward_clip(value: float | None, source: Source) -> Became:
    """Clip the normalised reward of a response, and then the reward of each token, which differs only if it
    includes KL."""
    if value is None:
        return implied("null: no clipping")
    has_kl = facts.kl_place(source) == "reward"
    return Became(
        {"algorithm.reward_clip": value} | ({"algorithm.token_reward_clip": value} if has_kl else {})
    )


def _clip(_: Any, source: Source) -> Became:
    low, high = facts.clip_range(source)
    return Became({"algorithm.clip_low": low, "algorithm.clip_high": high} | _dual_clip(source))


def _dual_clip(source: Source) -> dict[str, Any]:
    """Dual clip: bound on the ratio of tokens with negative advantage; PPO only."""
    if facts.variant(source) != "ppo":
        return {}
    bound = 1.0 + 2.0 * source.get("pg_clip") if source.get("dual_clip_loss") else "off"
    return {"algorithm.dual_clip": bound}


def _ppo_only(source: Source) -> str:
    chosen = facts.variant(source)
    return "" if chosen == "ppo" else f"pg_variant={chosen} has fixed bounds"


def _no_range(source: Source) -> str:
    return _ppo_only(source) or ("" if source.get("use_pg_clip_range") else "use_pg_clip_range is false")


def _pg_clip_unread(source: Source) -> str:
    is_read = not source.get("use_pg_clip_range") or source.get("dual_clip_loss")
    return _ppo_only(source) or (
        "" if is_read else "overridden by pg_clip_low and pg_clip_high (use_pg_clip_range)"
    )


def _kl(_: Any, source: Source) -> Became:
    """The single KL term, in the loss or in the reward, or none."""
    match facts.kl_place(source):
        case "loss":
            coef, estimator = source.get("kl_loss_coef"), "k3"
        case "reward":
            coef, estimator = (
                source.get("init_kl_coef"),
                KL_PENALTIES.get(source.get("kl_penalty") or "kl", "k1"),
            )
        case _:
            return Became({"algorithm.kl_coef": 0.0})
    return Became(
        {
            "algorithm.kl_coef": float(coef),
            "algorithm.kl_in": facts.kl_place(source),
            "algorithm.kl_estimator": estimator,
            "algorithm.kl_clamp": 10.0 if estimator == "k3" else "off",
        }
    )


def _old_logprobs(_: Any, source: Source) -> str:
    if source.get("force_disable_old_logprobs_recompute"):
        return "current"
    return "recompute" if source.get("enable_old_logprobs_recompute") else "auto"


def _corrections(_: Any, source: Source) -> Became:
    """Corrections in ROLL's order: importance weights, then filters."""
    made: list[dict[str, Any]] = []
    weight = "train_infer_correction.is_weight"
    if source.get(f"{weight}.enabled"):
        level = LEVELS[source.get(f"{weight}.weight_type")]
        made.append(
            {"level": level, "mode": "truncate", "low": 0.0, "high": source.get(f"{weight}.upper_bound")}
        )
    for filtered in source.get("train_infer_correction.filters") or []:
        if not filtered.get("enabled", False):
            continue
        level = LEVELS[filtered.get("agg_type", "token")]
        for name, measure, is_on, low, high in _FILTER_KINDS:
            if filtered.get(f"{name}_enabled", is_on):
                bounds = {"low": filtered.get(f"{name}_low", low), "high": filtered.get(f"{name}_high", high)}
                made.append({"level": level, "mode": "mask", "measure": measure, **bounds})
    if not made:
        return implied("no correction")
    return Became({"algorithm.corrections": made, "algorithm.old_logprobs": "recompute"})


def _no_weight(source: Source) -> str:
    is_on = source.get("train_infer_correction.is_weight.enabled")
    return "" if is_on else "train_infer_correction.is_weight.enabled is false"


_FILTER_KINDS = (("ratio", "ratio", True, 0.8, 1.2), ("diff", "difference", False, -0.2, 0.2))
"""ROLL's two kinds of filters: (key prefix, native measure, enabled by default, default low, default
high)."""
_FILTERS = mapping_of(ANY, {"enabled": True}, {"enabled": True, "ratio_high": 1.5}, {"enabled": False})
_FILTER_KEYS = {
    "enabled", "agg_type", "ratio_enabled", "ratio_low", "ratio_high", "diff_enabled", "diff_low", "diff_high"
}  # fmt: skip


def _filters(value: list[dict[str, Any]], source: Source) -> Became:
    for filtered in value:
        if unknown := set(filtered) - _FILTER_KEYS:
            raise ValueError(
                f"unknown filter key {min(unknown)!r}; the keys are {', '.join(sorted(_FILTER_KEYS))}"
            )
        for name, takes in _FILTER_TAKES.items():
            if name in filtered and not takes.accepts(filtered[name]):
                raise ValueError(f"filter key {name}: {filtered[name]!r} is not {takes.words}")
    return _corrections(value, source)


_FILTER_TAKES = {
    "enabled": BOOL,
    "ratio_enabled": BOOL,
    "diff_enabled": BOOL,
    "agg_type": choice(*LEVELS),
    "ratio_low": NON_NEGATIVE,
    "ratio_high": POSITIVE,
    "diff_low": NUMBER,
    "diff_high": POSITIVE,
}


def _difficulty_mask(value: bool, source: Source) -> Became:
    if not value:
        return implied("all groups are used")
    low, high = (source.get(f"difficulty_{name}_threshold") for name in ("low", "high"))
    if facts.filters_groups(source):
        bounds = [facts.query_filter(source, name) for name in facts.domains(source)]
        if all(b.get("min_mean", -inf) >= low and b.get("max_mean", inf) <= high for b in bounds):
            return implied("the query filter drops all groups that it masks")
        raise ValueError(
            f"masks groups (mean reward <= {low:g}, or >= {high:g}) that the query filter keeps, but braid has a single "
            "filter; widen its thresholds to those of the query filter, or set it to false"
        )
    bounds = {"rollout.filter.min_mean": low, "rollout.filter.max_mean": high}
    return Became({**bounds, "rollout.filter.then": "mask"})


def _long_failures(_: Any, source: Source) -> Became:
    is_on = source.get("error_max_len_clip")
    limit = source.get("error_max_len_threshold")
    return Became({"algorithm.mask_long_failures": limit if is_on else "off"})


def _no_difficulty_mask(source: Source) -> str:
    if not source.get("difficulty_mask"):
        return "difficulty_mask is false"
    return (
        "the query filter drops all groups that difficulty_mask masks" if facts.filters_groups(source) else ""
    )


ALGORITHM: tuple[Rule, ...] = (
    # Advantages
    Apply(
        "adv_estimator", "algorithm.advantage",
        choice("gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce"), _advantage,
        default="gae",
        note="gae needs a critic. grpo: (r - mean of the group) / (std of the group + 1e-6) on every token: advantage grpo for "
        "gamma=1 without KL in the reward, else reinforce with normalized rewards",
    ),
    Apply(
        "gamma", "algorithm.gamma", SHARE,
        when(lambda s: "adv_estimator=grpo has a single reward, at the end" if facts.is_plain_grpo(s) else ""),
        default=1.0, note="discount per token, of gae and reinforce",
    ),
    Apply("lambd", "algorithm.gae_lambda", SHARE, when(facts.no_values), default=0.95),
    Apply(
        "norm_mean_type", "algorithm.reward_mean", nullable(choice("batch", "group", "running", "None")), _normalised(0),
        default=None, note="statistics over the round; in ROLL over each domain. Any mean can be combined with any standard "
        "deviation; in ROLL std=group needs mean=group",
    ),
    Apply(
        "norm_std_type", "algorithm.reward_std", nullable(choice("batch", "group", "running", "None")), _normalised(1),
        default=None, note="divides by the unbiased standard deviation + 1e-6",
    ),
    Apply("reward_clip", "algorithm.reward_clip", nullable(POSITIVE), _reward_clip,
          note="clips a response's reward after normalisation, and each token's after subtracting KL"),
    Apply("whiten_rewards", "algorithm.whiten_rewards", BOOL, default=False, note="over the tokens of the round"),
    Apply(
        "whiten_advantages", "algorithm.whiten_advantages", BOOL, default=False,
        note="over the valid tokens of the round; in ROLL over each domain separately",
    ),
    Apply(
        "advantage_clip", "algorithm.advantage_clip", nullable(POSITIVE), null_as("off"), default=None,
        note="after whitening",
    ),
    Apply(
        "critic_warmup", "critic.warmup_rounds", NATURAL, when(facts.no_values), default=0,
        note="rounds that train only the critic",
    ),
    Apply("value_clip", "algorithm.value_clip", nullable(POSITIVE), when(facts.no_values, then=null_as("off")),
          default=None, note="new values clipped around the old ones"),
    # Loss
    Apply("ppo_epochs", "train.passes_per_round", COUNT,
          lambda v, s: Became({"train.passes_per_round": v} | ({} if facts.no_critic(s) else {
              "critic.train.passes_per_round": v})), default=1),
    Apply("pg_clip", "algorithm.clip_high", POSITIVE, when(_pg_clip_unread, then=_clip), default=0.2,
          note="ratio in [1 - pg_clip, 1 + pg_clip]; the dual clip is 1 + 2 pg_clip"),
    Apply("use_pg_clip_range", "algorithm.clip_high", BOOL, when(_ppo_only, then=_clip), default=False,
          note="true: ratio in [1 - pg_clip_low, 1 + pg_clip_high]"),
    Apply("pg_clip_low", "algorithm.clip_low", NON_NEGATIVE, when(_no_range, then=_clip), default=0.2),
    Apply("pg_clip_high", "algorithm.clip_high", NON_NEGATIVE, when(_no_range, then=_clip), default=0.2),
    Apply("dual_clip_loss", "algorithm.dual_clip", BOOL,
          when(_ppo_only, then=lambda _, s: Became(_dual_clip(s))), default=False,
          note="for negative advantages the loss is at most -(1 + 2 pg_clip) A"),
    Apply("importance_sampling", "algorithm.ratio_level", choice("token", "seq"),
          when(lambda s: "pg_variant=vanilla uses no ratio" if facts.variant(s) == "vanilla" else "",
               then=mapped({"token": "token", "seq": "sequence"})), default="token",
          note="seq: exp(mean log-ratio of the response) for all its tokens, as in GSPO"),
    Apply("loss_agg_mode", "algorithm.aggregation", choice(*AGGREGATIONS), mapped(AGGREGATIONS),
          default="seq-mean-token-mean",
          note="counts are over the whole optimizer step. ROLL's token-mean ignores the mask in the entropy term; its "
          "seq-mean-token-sum-norm divides only by the padded length, here also by the number of responses"),
    Apply("rl_loss_coef", "algorithm.policy_loss_coef", NON_NEGATIVE, default=1.0,
          note="multiplies surrogate and KL, not the entropy"),
    Apply("entropy_loss_coef", "algorithm.entropy_coef", NUMBER, default=0.0, note="loss - coef * entropy"),
    Apply("use_kl_loss", "algorithm.kl_coef", BOOL, _kl, default=False,
          note="+ kl_loss_coef * k3(policy, reference), clamped to 10, in the loss"),
    Apply("kl_loss_coef", "algorithm.kl_coef", NON_NEGATIVE, when(facts.not_in_loss, then=_kl), default=0.0),
    Apply("add_token_level_kl", "algorithm.kl_coef", BOOL, _kl, default=False,
          note="reward_t - init_kl_coef * KL_t for each token"),
    Apply("init_kl_coef", "algorithm.kl_coef", NON_NEGATIVE, when(facts.not_in_reward, then=_kl), default=0.2,
          note="ROLL loads a reference and recomputes old log-probs whenever it is not 0; here only if KL is used"),
    Apply("kl_penalty", "algorithm.kl_estimator", choice("kl", "abs", "mse", "k3", "full"),
          when(facts.not_in_reward, then=_kl), default="kl",
          note="of the KL in the reward, with d = log policy - log reference: kl d, abs |d|, mse d^2/2, "
          "k3 exp(-d) + d - 1, full the sum of p d over the vocabulary (ROLL sums over positions by mistake, and fails on "
          "most shapes). The KL in the loss is always k3"),
    Apply("target_kl", "algorithm.kl_target", nullable(POSITIVE),
          when(facts.not_in_reward, then=null_as("off")), default=None,
          note="coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * n / kl_horizon after each round"),
    Apply("kl_horizon", "algorithm.kl_horizon", COUNT,
          when(facts.not_in_reward, lambda s: "" if s.get("target_kl") else "target_kl is null"), default=10000),
    Implied("enable_reference", BOOL, "a reference model is loaded whenever a KL term needs it"),
    Apply("enable_old_logprobs_recompute", "algorithm.old_logprobs", BOOL, _old_logprobs, default=False,
          note="false: recomputed before the update only if a round has several steps or another feature needs them"),
    Apply("force_disable_old_logprobs_recompute", "algorithm.old_logprobs", BOOL, _old_logprobs, default=False,
          note="true: every ratio is 1, so nothing is clipped"),
    Apply("train_infer_correction.is_weight.enabled", "algorithm.corrections", BOOL, _corrections, default=False,
          note="loss * w, w = exp(old log-prob - the engine's) clamped to [0, upper_bound]"),
    Apply("train_infer_correction.is_weight.weight_type", "algorithm.corrections", choice(*LEVELS),
          when(_no_weight, then=_corrections), default="token", note="segment is a turn"),
    Apply("train_infer_correction.is_weight.upper_bound", "algorithm.corrections", POSITIVE,
          when(_no_weight, then=_corrections), default=1.2),
    Apply("train_infer_correction.is_weight.detach", "", BOOL,
          only(True, "set it to true; weights have no gradient", "weights have no gradient")),
    Apply("train_infer_correction.filters", "algorithm.corrections", list_of(_FILTERS), _filters,
          note="tokens with a ratio outside [ratio_low, ratio_high], or a difference of probabilities outside [diff_low, "
          "diff_high], are masked; with token-mean, ROLL's filters have no effect"),
    Apply("max_len_mask", "algorithm.mask_truncated", BOOL, default=False,
          note="truncated responses are masked in the loss, but count in their group's statistics"),
    Apply("difficulty_mask", "rollout.filter.min_mean", BOOL, _difficulty_mask,
          note="keeps groups with low < mean reward < high; ROLL compares the mean score, which is 0 or 1"),
    Apply("difficulty_low_threshold", "rollout.filter.min_mean", NUMBER, when(_no_difficulty_mask), default=0.0),
    Apply("difficulty_high_threshold", "rollout.filter.max_mean", NUMBER, when(_no_difficulty_mask), default=1.0),
    Apply("error_max_len_clip", "algorithm.mask_long_failures", BOOL, _long_failures, default=False,
          note="responses of at least error_max_len_threshold tokens with a score of 0 are masked in the loss. ROLL drops scores "
          "other than 0 and 1, too"),
    Apply("error_max_len_threshold", "algorithm.mask_long_failures", COUNT,
          when(facts.only_where("error_max_len_clip", True, "error_max_len_clip is false"), then=_long_failures),
          default=9_999_999_999),
    Apply("difficulty_loss_weight", "", BOOL, only(False, "sample weights are not implemented; use difficulty_mask")),
    Apply("length_loss_weight", "", BOOL, only(False, "sample weights are not implemented; use loss_agg_mode")),
    Apply("max_grad_norm", "train.max_grad_norm", NON_NEGATIVE,
          lambda v, s: Became(dict.fromkeys(
              ["train.max_grad_norm", *([] if facts.no_critic(s) else ["critic.train.max_grad_norm"])], v or None)),
          default=1.0, note="0: no clipping"),
)  # fmt: skip
