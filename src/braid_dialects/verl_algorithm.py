"""verl's advantages, losses, KL, filter of groups, and corrections."""

from __future__ import annotations

from typing import Any

from . import verl_facts as facts
from .conditions import needs, refused, unless
from .conversions import (
    algorithm,
    policy_loss,
    unless_null,
)
from .rows import ignored, missing, section, to
from .table import Became, Source, no_effect, unsupported
from .values import choice
from .verl_facts import A

_LOSS = f"{A}.actor.policy_loss.loss_mode"
_ROLLOUT = f"{A}.rollout"
_ALGORITHM = "algorithm"

_ESTIMATORS = {
    "grpo": lambda _, s: (
        algorithm("with groups of one, the reward itself", advantage={"kind": "reinforce"})
        if s[f"{_ROLLOUT}.n"] == 1
        else algorithm("A = (r - mean) / (std + eps) of the group, std unbiased", advantage={"kind": "grpo"})
    ),
    "gae": algorithm("A_t = r_t + gamma*V_{t+1} - V_t + gamma*lam*A_{t+1}; then whitened", recipe="ppo"),
    "rloo": algorithm("A = (r - mean) * n / (n - 1) of the group", advantage={"kind": "rloo"}),
    "reinforce_plus_plus": algorithm(
        "discounted suffix sums of rewards, then whitened", advantage={"kind": "reinforce"}, whiten_advantages=True
    ),
    "reinforce_plus_plus_baseline": algorithm(
        "A = r - mean of the group, then whitened",
        advantage={"kind": "grpo", "normalize_by_std": False},
        whiten_advantages=True,
    ),
    "remax": algorithm("A = r - r of the greedy answer", advantage={"kind": "remax"}),
    "opo": algorithm("A = r - mean of the group, weighted by length", advantage={"kind": "opo"}),
    "gpg": algorithm("A = (r - mean) scaled by the share of groups with a signal; verl counts rewards other than 0", advantage={"kind": "gpg"}),
    **dict.fromkeys(
        ("grpo_passk", "grpo_vectorized", "rloo_vectorized", "gdpo", "optimal_token_baseline"),
        unsupported("use grpo, rloo, gae, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, opo or gpg"),
    ),
}  # fmt: skip
_LOSSES = {
    "vanilla": policy_loss("ppo_clip", "-min(r*A, clamp(r, 1-low, 1+high)*A), at most -clip_ratio_c*A where A < 0"),
    "gspo": policy_loss("ppo_clip", "r = exp of the mean log-ratio of the sequence", ratio_level="sequence"),
    "sapo": policy_loss("sapo", "-A*sigmoid(tau*(r-1))*4/tau"),
    "cispo": policy_loss("cispo", "-A*sg(clamp(r, 1-low, 1+high))*logp"),
    "clip_cov": policy_loss("clip_cov", "like vanilla, without some tokens of high covariance"),
    "kl_cov": policy_loss("kl_cov", "-r*A, plus |logp - old logp| where the covariance is highest"),
    "gpg": policy_loss("policy_gradient", "-A*logp"),
    "geo_mean": policy_loss("gmpo", "-A*exp of the mean clipped log-ratio of the sequence"),
    **dict.fromkeys(
        ("dppo_tv", "dppo_kl", "bypass_mode"),
        unsupported("use vanilla, gspo, geo_mean, sapo, cispo, clip_cov, kl_cov or gpg, or braid.algorithm.policy_loss"),
    ),
}  # fmt: skip
_REDUCTIONS = {
    "token-mean": "token_mean", "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean", "seq-mean-token-sum-norm": "token_sum_constant",
}  # fmt: skip
_KINDS_OF_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _kl_place(_: Any, source: Source) -> Became:
    if not facts.uses_reference(source):
        return algorithm(kl_coef=0.0)
    return algorithm(kl_in="reward" if facts.kl_in_reward(source) else "loss")


def _kl_kind(value: str, _: Source) -> Became:
    """verl bounds k3 by 10."""
    if value not in _KINDS_OF_KL:
        return unsupported("use kl, abs, mse or low_var_kl")
    kind = _KINDS_OF_KL[value]
    return algorithm(kl_estimator=kind, kl_clamp=10.0 if kind == "k3" else "off")


def _reduction(value: str, source: Source) -> Any:
    if source[_LOSS] in ("gspo", "geo_mean"):
        return "sequence_mean_token_mean"
    return _REDUCTIONS[value]


def _correction(_: Any, source: Source) -> Became:
    """Truncated importance sampling by w = exp(old - rollout log-prob)."""
    at = f"{_ALGORITHM}.rollout_correction"
    level = source[f"{at}.rollout_is"] or ("token" if source[f"{A}.actor.tis_imp_ratio_cap"] > 0 else None)
    if level is None:
        return algorithm(corrections=[])
    cap = (
        source[f"{at}.rollout_is_threshold"]
        if source[f"{at}.rollout_is"]
        else source[f"{A}.actor.tis_imp_ratio_cap"]
    )
    made = {"level": level, "mode": "truncate", "low": 0.0, "high": float(cap)}
    return algorithm(corrections=[made], old_logprobs="recompute")


# One rule per line.
# fmt: off
ACTOR_LOSS = section(f"{A}.actor", "algorithm")(
    to("policy_loss.loss_mode", ".policy_loss.kind", _LOSSES, default="vanilla"),
    to("clip_ratio_{low,high}", ".policy_loss.clip_{low,high}", "non-negative?",
       unless(lambda s: s[_LOSS] in ("kl_cov", "gpg", "sapo"), "for the clipped losses only"),
       lambda v, s: s[f"{A}.actor.clip_ratio"] if v is None else v, default=0.2,
       note="bounds of the ratio: 1 - clip_ratio_low, 1 + clip_ratio_high"),
    ignored("clip_ratio", "clip_ratio_low and clip_ratio_high count, which are 0.2 by default", "non-negative"),
    to("clip_ratio_c", ".policy_loss.dual_clip", "number > 1", needs(f"{A}.actor.policy_loss.loss_mode", "vanilla"), default=3.0),
    to("policy_loss.clip_cov_ratio", ".policy_loss.cov_fraction", "share", needs(_LOSS, "clip_cov"), default=0.0002),
    to("policy_loss.clip_cov_{lb,ub}", ".policy_loss.cov_{low,high}", "number", needs(_LOSS, "clip_cov")),
    to("policy_loss.kl_cov_ratio", ".policy_loss.cov_fraction", "share", needs(_LOSS, "kl_cov"), default=0.0002),
    to("policy_loss.ppo_kl_coef", ".policy_loss.cov_coef", "non-negative", needs(_LOSS, "kl_cov"), default=0.1),
    to("{tau_pos,tau_neg}", ".policy_loss.{tau_positive,tau_negative}", "positive", needs(_LOSS, "sapo")),
    to("loss_agg_mode", ".aggregation", choice(*_REDUCTIONS),
       unless(lambda s: f"{A}.actor.use_token_level_loss" in s.values, "overridden by use_token_level_loss"),
       _reduction, default="token-mean", note="over the whole optimizer step; in gspo and geo_mean always seq-mean-token-mean"),
    to("loss_scale_factor", ".aggregation_constant", "count?", needs(".loss_agg_mode", "seq-mean-token-sum-norm"),
       unless_null("max_response_length")),
    to("use_token_level_loss", ".aggregation", {True: "token_mean", False: "sequence_mean_token_mean"}),
    to("entropy_coeff", ".entropy_coef", "number", default=0, note="default: 0, in verl 0.2 0.001"),
    to("use_kl_loss", ".kl_in", "bool", _kl_place, default=False, note="loss + kl_loss_coef * KL"),
    to("kl_loss_coef", ".kl_coef", "non-negative", needs(".use_kl_loss"), default=0.001),
    to("kl_loss_type", ".kl_estimator", "text", needs(".use_kl_loss"), _kl_kind, default="low_var_kl",
       note="low_var_kl: k3 = exp(-d) - 1 + d, bounded by 10"),
    to("tis_imp_ratio_cap", ".corrections", "number", lambda v, s: _correction(v, s) if v > 0 else no_effect("off"), default=-1))

ALGORITHMS = section("algorithm", "algorithm")(
    to("adv_estimator", ".advantage.kind", _ESTIMATORS, default="gae"),
    to("gamma", ".advantage.gamma", "share", needs(".adv_estimator", "gae", "reinforce_plus_plus"), default=1.0),
    to("lam", ".advantage.gae_lambda", "share", needs(".adv_estimator", "gae"), default=1.0),
    to("norm_adv_by_std_in_grpo", ".advantage.normalize_by_std", "bool", needs(".adv_estimator", "grpo"),
       unless(lambda s: s[f"{_ROLLOUT}.n"] == 1, "groups of one have no deviation"), default=True, note="false: Dr. GRPO"),
    to("use_kl_in_reward", ".kl_in", "bool",
       refused(lambda v, s: v and s[f"{A}.actor.use_kl_loss"] and "braid has one KL term; set this or "
               f"{A}.actor.use_kl_loss to false"), _kl_place, default=False, note="reward_t - kl_ctrl.kl_coef * KL_t"),
    to("kl_penalty", ".kl_estimator", "text", unless(lambda s: not facts.kl_in_reward(s), "KL is not in the reward"),
       _kl_kind, default="kl"),
    section("kl_ctrl", "algorithm", unless(lambda s: not facts.kl_in_reward(s), "KL is not in the reward"))(
        to("type", ".kl_target", "fixed|adaptive", lambda v, s: s[".target_kl"] if v == "adaptive" else "off", default="fixed"),
        to("kl_coef", ".kl_coef", "non-negative", default=0.001),
        to("horizon", ".kl_horizon", "count", needs(".type", "adaptive"), default=10_000),
        to("target_kl", ".kl_target", "positive", needs(".type", "adaptive"), default=0.1)),
    to("filter_groups.enable", "rollout.filter.then rollout.filter.min_std", "bool",
       lambda v, _: Became({"rollout.filter.then": "resample", "rollout.filter.min_std": 0.0}) if v else
       no_effect("groups with equal rewards are kept; their advantages are 0"), default=False,
       note="until the round is full (DAPO)"),
    ignored("filter_groups.metric", "groups are compared by their rewards"),
    to("filter_groups.max_num_gen_batches", "rollout.filter.max_batches", "natural", needs(".enable"),
       lambda v, _: v or 10_000, default=0, note="0: no limit in verl, 10,000 here"),
    to("rollout_correction.rollout_is", ".corrections", choice(None, "token", "sequence"), _correction, default=None,
       note="truncated importance sampling against the engine's log-probs"),
    to("rollout_correction.rollout_is_threshold", ".corrections", "positive", needs(".rollout_is"), _correction, default=2.0),
    missing("rollout_correction.{rollout_rs,rollout_rs_threshold,rollout_rs_threshold_lower,rollout_token_veto_threshold}",
            "use braid.algorithm.corrections"),
    missing("rollout_correction.{bypass_mode,use_policy_gradient,rollout_is_batch_normalize}", "use braid.algorithm.old_logprobs", default=False),
    ignored("rollout_correction.loss_type", "for bypass_mode only"),
    missing("{use_pf_ppo,rollout_is}", "set it to false", default=False),
    ignored("pf_ppo.* rollout_is_* router_replay_metrics", "for a feature that is off"))

# fmt: on
