"""SkyRL's `trainer.algorithm`: advantages, KL, policy and value losses, corrections, filters.

Two names are misleading. `kl_loss_coef` is the KL coefficient in the reward as well as in the loss.
`normalize_reward` normalises the critic's targets, not rewards.
"""

from __future__ import annotations

from typing import Any

from .conditions import needs, unless
from .conversions import as_is, computed, null_as, unless_null
from .rows import ignored, section, to
from .skyrl_facts import AT, FIX, NO_CRITIC, NO_REFERENCE, uses_reference
from .table import Became, Convert, Source, implied, no_effect, unsupported
from .values import choice

_ESTIMATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("A = (r - mean) / (std + eps) of the group, std unbiased", {"advantage": "grpo"}),
    "gae": ("A_t = r_t + gamma*V_{t+1} - V_t + gamma*lambd*A_{t+1}; then whitened", {"recipe": "ppo"}),
    "rloo": ("A = (r - mean) * n / (n - 1) over the group's trajectories", {"advantage": "rloo"}),
    "reinforce++": (
        "discounted suffix sums of rewards, then whitened",
        {"advantage": "reinforce", "whiten_advantages": True},
    ),
    "maxrl": ("A = (r - mean) / (mean + eps) over the group's trajectories", {"advantage": "maxrl"}),
}
"""advantage_estimator -> note, keys of `algorithm`."""
_PPO, _BEHAVIOR = {"policy_loss": "ppo_clip"}, {"old_logprobs": "behavior"}
_LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "regular": ("-min(r*A, clamp(r, 1-eps_clip_low, 1+eps_clip_high)*A)", _PPO),
    "dual_clip": ("like regular; at most -clip_ratio_c*A where A < 0", _PPO),
    "gspo": ("like regular, with r = exp of the mean log-ratio", _PPO | {"ratio_level": "sequence"}),
    "cispo": ("-A*sg(clamp(r, 1-low, 1+high))*logp", {}),
    "sapo": ("-A*sigmoid(tau*(r-1))*4/tau", {}),
    "clip_cov": ("like regular, but drops some of the tokens with high covariance; SkyRL drops none", {}),
    "kl_cov": ("-r*A, plus |logp - old logp| for the tokens with the highest covariance", {}),
    "dppo": ("-r*A where the token's probability has not moved too far from the sampler's", _BEHAVIOR),
    "cross_entropy": ("-logp", {}),
    "rollout_is": (
        "-A*sg(r)*logp where 1-eps_clip_low < r < 1+eps_clip_high, r against the sampler",
        {"policy_loss": "masked_is"} | _BEHAVIOR,
    ),
    "importance_sampling": ("-r*A, reduced by loss_reduction; SkyRL sums over tokens", {}),
}
"""ppo_loss_type -> formula, keys of `algorithm`; the loss has the same name unless they say otherwise."""
_REDUCTIONS = {
    "sequence_mean": "sequence_mean_token_mean",
    "token_mean": "token_mean",
    "token_mean_legacy": "token_mean",
    "seq_mean_token_sum_norm": "token_sum_constant",
    "prompt_mean": "prompt_mean",
}


def _algorithm(note: str = "", **parts: Any) -> Became:
    """Native keys of `algorithm`."""
    return Became({f"algorithm.{name}": value for name, value in parts.items()}, note=note)


def _estimator(value: str, source: Source) -> Became:
    if value == "grpo" and source["generator.n_samples_per_prompt"] == 1:
        note = "with groups of one, SkyRL's GRPO uses the reward itself as the advantage, like reinforce"
        return _algorithm(note, advantage="reinforce")
    note, parts = _ESTIMATORS[value]
    return _algorithm(note, **parts)


def _loss(value: str, _: Source) -> Became:
    note, parts = _LOSSES[value]
    return _algorithm(note, **{"policy_loss": value} | parts)


def _of_loss(*names: str) -> Convert:
    return needs(f"{AT}.ppo_loss_type", *names)


def _kl_place(_: bool, source: Source) -> Became:
    """Place of the KL term, from both flags; with neither it is off."""
    if not uses_reference(source):
        return _algorithm(kl_coef=0.0)
    return _algorithm(kl_in="reward" if source[f"{AT}.use_kl_in_reward"] else "loss")


def _flagged_estimator(source: Source) -> str:
    """The estimator selected by the first release's two flags. |k3| is k3, which is never negative."""
    other = "abs" if source[f"{AT}.use_abs_kl"] else "k1"
    return "k3" if source[f"{AT}.use_kl_estimator_k3"] else other


def _clamped(kind: str, _: Source) -> Became:
    """A KL estimator, with the clamp that SkyRL has applied to k3 since 2025."""
    return _algorithm(kl_estimator=kind, kl_clamp=10.0 if kind == "k3" else "off")


def _kl_control(value: str, source: Source) -> Became:
    if value == "adaptive" and not source[f"{AT}.use_kl_in_reward"]:
        return no_effect("in SkyRL only KL in the reward has an adaptive coefficient")
    return _algorithm(kl_target=source[".kl_target"] if value == "adaptive" else "off")


_NAMED = unless(
    lambda s: s[f"{AT}.kl_estimator_type"],
    lambda s: f"overridden by kl_estimator_type={s[f'{AT}.kl_estimator_type']}",
)
_ADAPTIVE = unless(
    lambda s: s[f"{AT}.kl_ctrl.type"] != "adaptive" or not s[f"{AT}.use_kl_in_reward"],
    "the KL coefficient is fixed",
)


def _max_seq_len(value: int | None, source: Source) -> Any:
    if source[f"{AT}.loss_reduction"] != "seq_mean_token_sum_norm" or value is None:
        return no_effect("for loss_reduction=seq_mean_token_sum_norm only")
    return float(value)


def _temperature(value: float | None, source: Source) -> Became:
    if value not in (None, source["generator.sampling_params.temperature"]):
        raise ValueError(
            "log-probs always use the sampling temperature; set it to sampling_params.temperature, or to null"
        )
    return implied("log-probs of policy, old policy and reference always use the sampling temperature")


def corrections(source: Source) -> list[dict[str, Any]]:
    """Native corrections with w = exp(old - rollout log-prob), in SkyRL's order: each covers the tokens that
    the earlier ones kept."""
    fix = {name: source[f"{FIX}.{name}"] for name in (rule.path.partition(".")[2] for rule in CORRECTIONS)}
    out = []
    for mode, name in (("mask_sequence", "outlier_token_is"), ("mask", "token_mask_is")):
        low, high = fix[f"{name}_threshold_low"], fix[f"{name}_threshold_high"]
        if low is not None or high is not None:
            bounds = {"low": low or 0.0, "high": "off" if high is None else high}
            out.append({"level": "token", "mode": mode, **bounds})
    is_old = source[f"{AT}.use_tis"] and fix["tis_ratio_type"] is None
    if (kind := "token" if is_old else fix["tis_ratio_type"]) is not None:
        cap = source[f"{AT}.tis_imp_ratio_cap"] if is_old else fix[f"{kind}_tis_ratio_clip_high"]
        out.append({"level": kind, "mode": "truncate", "low": 0.0, "high": float(cap), "tokens": "kept"})
    if (metric := fix["sequence_mask_metric"]) is not None:
        name, level = ("product", "sequence") if metric == "product" else ("geo", "geometric")
        bounds = {"low": float(fix[f"{name}_mask_low"]), "high": float(fix[f"{name}_mask_high"])}
        out.append({"level": level, "mode": "mask", **bounds, "tokens": "kept"})
    return out


def _corrected(_: Any, source: Source) -> Became:
    if made := corrections(source):
        return _algorithm(corrections=made, old_logprobs="recompute")
    return no_effect("no correction is enabled")


def _dynamic(value: str, source: Source) -> Became:
    then = "resample" if value == "filter" else "replace"
    return Became({"rollout.filter.min_std": _tolerance(value, source), "rollout.filter.then": then})


def _tolerance(_: Any, source: Source) -> float:
    return source[f"{AT}.zero_variance_filter_tol"] if source[f"{AT}.zero_variance_filter"] else 0.0


def _zero_variance(value: bool, source: Source) -> Any:
    if not value:
        return no_effect("groups with equal rewards are kept; their advantages are 0")
    if source["generator.n_samples_per_prompt"] == 1:
        return no_effect("groups of one are always kept")
    return _tolerance(value, source)


_CLIPPED = _of_loss("regular", "dual_clip", "gspo", "clip_cov", "rollout_is")
_WHITENED = unless(
    lambda s: s[f"{AT}.advantage_estimator"] in ("gae", "reinforce++"),
    lambda s: f"{s[f'{AT}.advantage_estimator']} always whitens advantages",
)
_OLD_TIS = unless(
    lambda s: not s[f"{AT}.use_tis"] or s[f"{FIX}.tis_ratio_type"] is not None,
    "overridden by off_policy_correction",
)

# One rule per line.
# fmt: off
_TOKEN, _SEQUENCE = (needs(".tis_ratio_type", name) for name in ("token", "sequence"))
_GEO, _PRODUCT = (needs(".sequence_mask_metric", name) for name in ("geometric", "product"))
CORRECTIONS = section("off_policy_correction")(
    to("tis_ratio_type", ".corrections", choice(None, "token", "sequence"), _corrected, default=None),
    to("token_tis_ratio_clip_high", ".corrections", "positive", _TOKEN, _corrected, default=2.0),
    to("sequence_tis_ratio_clip_high", ".corrections", "positive", _SEQUENCE, _corrected, default=5.0),
    to("sequence_mask_metric", ".corrections", choice(None, "product", "geometric"), _corrected, default=None,
       note="masks sequences with w out of bounds, over the tokens kept before"),
    to("geo_mask_low", ".corrections", "non-negative", _GEO, _corrected, default=0.99),
    to("geo_mask_high", ".corrections", "positive", _GEO, _corrected, default=1.01),
    to("product_mask_low", ".corrections", "non-negative", _PRODUCT, _corrected, default=0.5),
    to("product_mask_high", ".corrections", "positive", _PRODUCT, _corrected, default=2.0),
    to("{token_mask_is,outlier_token_is}_threshold_{low,high}", ".corrections", "positive?", _corrected))

ALGORITHM = section("trainer.algorithm", "algorithm")(
    # advantages
    to("advantage_estimator", ".advantage", choice(*_ESTIMATORS), _estimator, default="grpo",
       note="grpo: (r - mean) / (std + eps) of the group; the others: docs/algorithms.md"),
    to("grpo_norm_by_std", ".normalize_by_std", "bool", needs(".advantage_estimator", "grpo"), default=True,
       note="false: Dr. GRPO"),
    to("lambd", ".gae_lambda", "share", needs(".advantage_estimator", "gae"), default=1.0),
    to("gamma", ".gamma", "share", needs(".advantage_estimator", "gae", "reinforce++"), default=1.0),
    to("advantage_batch_normalize", ".whiten_advantages", "bool", _WHITENED, default=False,
       note="(A - mean) / std over the batch's trained tokens; SkyRL's mean counts padding too"),
    # KL
    to("use_kl_loss", ".kl_in", "bool", _kl_place, default=True, note="loss + kl_loss_coef * KL"),
    to("use_kl_in_reward", ".kl_in", "bool", _kl_place, default=False, note="reward_t - kl_loss_coef * KL_t"),
    to("kl_loss_coef", ".kl_coef", "non-negative", NO_REFERENCE, default=0.001,
       note="for KL in the loss and in the reward"),
    to("use_kl_estimator_k3", ".kl_estimator", "bool", NO_REFERENCE, _NAMED, computed(_flagged_estimator),
       _clamped, default=True,
       note="k3 = exp(-d) - 1 + d, clamped at 10; false: k1 = d; d = logp - ref logp"),
    to("use_abs_kl", ".kl_estimator", "bool", NO_REFERENCE, _NAMED,
       unless(lambda s: s[".use_kl_estimator_k3"], "k3 is never negative"), computed(_flagged_estimator),
       _clamped, default=False, note="|k1|; also in the loss (in SkyRL only in the reward)"),
    to("kl_estimator_type", ".kl_estimator", "k1|k2|k3|abs", NO_REFERENCE, _clamped),
    to("kl_ctrl.type", ".kl_target", "fixed|adaptive", NO_REFERENCE, _kl_control, default="fixed"),
    to("kl_ctrl.kl_target", ".kl_target", "positive", NO_REFERENCE, _ADAPTIVE, default=0.1,
       note="coef *= 1 + clip(kl/target - 1, -0.2, 0.2) * n / horizon"),
    to("kl_ctrl.horizon", ".kl_horizon", "count", NO_REFERENCE, _ADAPTIVE, default=10_000),
    ignored("{kl_target,init_kl_coef}", "not read by SkyRL; use kl_ctrl and kl_loss_coef"),
    # policy loss
    to("ppo_loss_type", ".policy_loss", choice(*_LOSSES), _loss, default="regular",
       note="regular: -min(r*A, clamp(r, 1-eps_clip_low, 1+eps_clip_high)*A); others: docs/algorithms.md"),
    to("eps_clip_low", ".clip_low", "non-negative", _CLIPPED, default=0.2, note="ratios below 1 - this"),
    to("eps_clip_high", ".clip_high", "non-negative", _CLIPPED, default=0.2, note="ratios above 1 + this"),
    to("clip_ratio_c", ".dual_clip", "number > 1", _of_loss("dual_clip"),
       default=3.0),
    to("loss_reduction", ".aggregation", _REDUCTIONS, default="sequence_mean",
       note="later releases default to token_mean. KL and entropy too (in SkyRL always by sequence_mean)"),
    to("max_seq_len", ".aggregation_constant", "count?", _max_seq_len),
    to("use_entropy_loss", ".entropy_coef", "bool", lambda v, s: s[".entropy_loss_coef"] if v else 0.0,
       default=False),
    to("entropy_loss_coef", ".entropy_coef", "number", needs(".use_entropy_loss"), default=0.01),
    to("temperature", "", "positive?", _temperature, default=None),
    to("cispo.cispo_eps_clip_low", ".clip_low", "non-negative", _of_loss("cispo"), default=1.0),
    to("cispo.cispo_eps_clip_high", ".clip_high", "non-negative", _of_loss("cispo"), default=4.0),
    to("cispo.cispo_anchor", ".old_logprobs", {"old": "recompute", "rollout": "behavior"}, _of_loss("cispo"),
       default="old"),
    to("sapo.tau_pos", ".sapo_tau_positive", "positive", _of_loss("sapo"), default=1.0),
    to("sapo.tau_neg", ".sapo_tau_negative", "positive", _of_loss("sapo"), default=1.05),
    to("clip_cov.clip_ratio", ".cov_fraction", "share", _of_loss("clip_cov"), default=0.0002),
    to("clip_cov.clip_cov_lb", ".cov_low", "number", _of_loss("clip_cov"), default=1.0),
    to("clip_cov.clip_cov_ub", ".cov_high", "number", _of_loss("clip_cov"), default=5.0),
    to("kl_cov.kl_cov_frac", ".cov_fraction", "share", _of_loss("kl_cov"), default=0.2),
    to("kl_cov.ppo_kl_coef", ".cov_coef", "non-negative", _of_loss("kl_cov"), default=1.0),
    to("dppo.dppo_type", ".dppo_divergence", {"binary_tv": "tv", "binary_kl": "kl"}, _of_loss("dppo"),
       default="binary_tv"),
    to("dppo.delta_low", ".clip_low", "non-negative", _of_loss("dppo"), default=0.2),
    to("dppo.delta_high", ".clip_high", "non-negative", _of_loss("dppo"), default=0.2),
    # off-policy correction
    CORRECTIONS,
    to("use_tis", ".corrections", "bool", _OLD_TIS, _corrected, default=False),
    to("tis_imp_ratio_cap", ".corrections", "positive or -1", _OLD_TIS, _corrected,
       default=-1.0),
    # filters
    to("dynamic_sampling.type", "rollout.filter.then", choice(None, "filter", "replace"),
       unless_null("one batch of prompts per round", implied), _dynamic, default=None,
       note="filter: until the batch is full (DAPO); replace: copies of good groups (POLARIS)"),
    to("dynamic_sampling.max_sample_batches", "rollout.filter.max_batches", "count or -1",
       needs(f"{AT}.dynamic_sampling.type", "filter"),
       lambda v, _: unsupported("set a number of batches, so that a round ends") if v < 0 else v, default=30),
    to("dynamic_sampling.min_replace_ratio", "rollout.filter.min_kept_fraction", "share",
       needs(f"{AT}.dynamic_sampling.type", "replace"), default=0.3),
    to("zero_variance_filter", "rollout.filter.min_std", "bool", _zero_variance, default=False),
    to("zero_variance_filter_tol", "rollout.filter.min_std", "non-negative", needs(".zero_variance_filter"),
       default=1e-6),
    # DAPO's overlong penalty, from SkyRL's example examples/algorithms/dapo
    to("overlong_buffer_len", "reward.overlong.buffer_tokens", "count",
       note="r - factor * clip((length - (max_generate_length - len)) / len, 0, 1)"),
    to("overlong_buffer_penalty_factor", {"reward.overlong.penalty": as_is, "reward.overlong.buffer_tokens":
       computed(lambda s: s[".overlong_buffer_len"] or 512)}, "positive"),
    # values
    to("value_head_prefix", "critic.head_name", "text", NO_CRITIC, default="value_head"),
    to("value_clip", ".value_clip", "positive?", NO_CRITIC, null_as("off"), default=0.2,
       note="0.5 * max((clamped V - R)^2, (V - R)^2); null for no clipping"),
    to("normalize_reward", "critic.normalize_values", "bool", NO_CRITIC, default=True,
       note="values, not rewards, by running statistics of returns, as documented; SkyRL's stay at 0 and 1"))
# fmt: on
