"""SkyRL's `trainer.algorithm`: advantages, KL, policy and value losses, corrections, filters.

Two names are misleading. `kl_loss_coef` is the KL coefficient in the reward as well as in the loss.
`normalize_reward` normalises the critic's targets, not rewards.
"""

from __future__ import annotations

from typing import Any

from .conditions import needs, refused, unless
from .conversions import algorithm, as_is, computed, null_as, policy_loss, unless_null
from .rows import ignored, section, to
from .skyrl_facts import AT, FIX, NO_CRITIC, NO_REFERENCE, uses_reference
from .table import Became, Source, implied, no_effect, unsupported
from .values import choice

_GRPO_OF_ONE = "with groups of one, SkyRL's GRPO uses the reward itself as the advantage, like reinforce"
_ESTIMATORS = {
    "grpo": lambda _, source: (
        algorithm(_GRPO_OF_ONE, advantage={"kind": "reinforce"})
        if source["generator.n_samples_per_prompt"] == 1
        else algorithm("A = (r - mean) / (std + eps) of the group, std unbiased", advantage={"kind": "grpo"})
    ),
    "gae": algorithm("A_t = r_t + gamma*V_{t+1} - V_t + gamma*lambd*A_{t+1}; then whitened", recipe="ppo"),
    "rloo": algorithm(
        "A = (r - mean) * n / (n - 1) over the group's trajectories", advantage={"kind": "rloo"}
    ),
    "reinforce++": algorithm(
        "discounted suffix sums of rewards, then whitened",
        advantage={"kind": "reinforce"},
        whiten_advantages=True,
    ),
    "maxrl": algorithm(
        "A = (r - mean) / (mean + eps) over the group's trajectories", advantage={"kind": "maxrl"}
    ),
}


_LOSSES = {
    "regular": policy_loss("ppo_clip", "-min(r*A, clamp(r, 1-eps_clip_low, 1+eps_clip_high)*A)"),
    "dual_clip": policy_loss("ppo_clip", "like regular; at most -clip_ratio_c*A where A < 0"),
    "gspo": policy_loss("ppo_clip", "like regular, with r = exp of the mean log-ratio", ratio_level="sequence"),
    "cispo": policy_loss("cispo", "-A*sg(clamp(r, 1-low, 1+high))*logp"),
    "sapo": policy_loss("sapo", "-A*sigmoid(tau*(r-1))*4/tau"),
    "clip_cov": policy_loss(
        "clip_cov", "like regular, but drops some tokens with high covariance; SkyRL drops none"),
    "kl_cov": policy_loss("kl_cov", "-r*A, plus |logp - old logp| where the covariance is highest"),
    "dppo": lambda _, s: policy_loss(
        "dppo", "-r*A where the token's probability has not moved too far from the sampler's", **_to_sampler(s)),
    "cross_entropy": policy_loss("cross_entropy", "-logp"),
    "rollout_is": lambda _, s: policy_loss(
        "masked_is", "-A*sg(r)*logp where 1-eps_clip_low < r < 1+eps_clip_high, r against the sampler",
        **_to_sampler(s)),
    "importance_sampling": policy_loss(
        "importance_sampling", "-r*A, reduced by loss_reduction; SkyRL sums over tokens"),
}  # fmt: skip


def _to_sampler(source: Source) -> dict[str, str]:
    """The ratio is to the sampler. Corrections also need log-probs that the trainer computes before the
    update."""
    return {"ratio_to": "behavior"} if corrections(source) else {"old_logprobs": "behavior"}


_REDUCTIONS = {
    "sequence_mean": "sequence_mean_token_mean",
    "token_mean": "token_mean", "token_mean_legacy": "token_mean",
    "seq_mean_token_sum_norm": "token_sum_constant", "prompt_mean": "prompt_mean",
}  # fmt: skip


def _row_tokens(value: int | None, source: Source) -> int:
    """max_seq_len, which SkyRL computes up to 0.4."""
    if value is None and source.dialect.version >= "0.5":
        raise ValueError("loss_reduction=seq_mean_token_sum_norm needs it; set it")
    prompt = source["generator.max_input_length"] or source["trainer.max_prompt_length"]
    return value or prompt + source["generator.sampling_params.max_generate_length"]


def _kl_place(_: bool, source: Source) -> Became:
    """Place of the KL term, from both flags; with neither it is off."""
    if not uses_reference(source):
        return algorithm(kl_coef=0.0)
    return algorithm(kl_in="reward" if source[f"{AT}.use_kl_in_reward"] else "loss")


def _estimator(_: Any, source: Source) -> Became:
    """The KL estimator: named, or selected by the first release's two flags (|k3| is k3). SkyRL has
    clamped k3 since 2025."""
    flagged = "k3" if source[f"{AT}.use_kl_estimator_k3"] else "abs" if source[f"{AT}.use_abs_kl"] else "k1"
    kind = source[f"{AT}.kl_estimator_type"] or flagged
    return algorithm(kl_estimator=kind, kl_clamp=10.0 if kind == "k3" else "off")


def _kl_control(value: str, source: Source) -> Became:
    if value == "adaptive" and not source[f"{AT}.use_kl_in_reward"]:
        return no_effect("in SkyRL only KL in the reward has an adaptive coefficient")
    return algorithm(kl_target=source[".kl_target"] if value == "adaptive" else "off")


def corrections(source: Source) -> list[dict[str, Any]]:
    """Native corrections with w = exp(old - rollout log-prob), in SkyRL's order: each covers the tokens that
    the earlier ones kept."""
    at, out = f"{FIX}.", []
    for mode, name in (("mask_sequence", "outlier_token_is"), ("mask", "token_mask_is")):
        low, high = (source[f"{at}{name}_threshold_{end}"] for end in ("low", "high"))
        if low is not None or high is not None:
            bounds = {"low": low or 0.0, "high": "off" if high is None else high}
            out.append({"level": "token", "mode": mode, **bounds})
    kind = source[f"{at}tis_ratio_type"]
    if kind or source[f"{AT}.use_tis"]:
        cap = source[f"{at}{kind}_tis_ratio_clip_high" if kind else f"{AT}.tis_imp_ratio_cap"]
        truncation = {"level": kind or "token", "mode": "truncate"}
        out.append({**truncation, "low": 0.0, "high": float(cap), "tokens": "kept"})
    if metric := source[f"{at}sequence_mask_metric"]:
        name, level = {"product": ("product", "sequence"), "geometric": ("geo", "geometric")}[metric]
        low, high = (float(source[f"{at}{name}_mask_{end}"]) for end in ("low", "high"))
        out.append({"level": level, "mode": "mask", "low": low, "high": high, "tokens": "kept"})
    return out


def _corrected(_: Any, source: Source) -> Became:
    if made := corrections(source):
        return algorithm(corrections=made, old_logprobs="recompute")
    return no_effect("no correction is enabled")


def _tolerance(_: Any, source: Source) -> float:
    return source[f"{AT}.zero_variance_filter_tol"] if source[f"{AT}.zero_variance_filter"] else 0.0


# One rule per line.
# fmt: off
_NAMED = unless(lambda s: s[".kl_estimator_type"], "overridden by kl_estimator_type")
_ADAPTIVE = unless(lambda s: s[".type"] != "adaptive" or not s["..use_kl_in_reward"],
                   "the KL coefficient is fixed")
_WHITENED = unless(lambda s: s[".advantage_estimator"] in ("gae", "reinforce++"),
                   "advantage_estimator=gae and reinforce++ always whiten advantages")
_OLD_TIS = unless(lambda s: not s[".use_tis"] or s[f"{FIX}.tis_ratio_type"],
                  "overridden by off_policy_correction")
_CLIPPED = needs(".ppo_loss_type", "regular", "dual_clip", "gspo", "clip_cov", "rollout_is")
_CISPO, _SAPO, _CLIP_COV, _KL_COV, _DPPO = (
    needs("..ppo_loss_type", name) for name in ("cispo", "sapo", "clip_cov", "kl_cov", "dppo"))
_TOKEN, _SEQUENCE = (needs(".tis_ratio_type", name) for name in ("token", "sequence"))
_GEO, _PRODUCT = (needs(".sequence_mask_metric", name) for name in ("geometric", "product"))
_BELOW_HIGH = refused(
    lambda low, s: None not in (low, high := s[s.at.replace("_low", "_high")]) and low > high and
    f"{low} is above {s.name.replace('_low', '_high')}={high}; lower it")
_CORRECTIONS = section("off_policy_correction")(
    to("tis_ratio_type", ".corrections", choice(None, "token", "sequence"), _corrected, default=None),
    to("token_tis_ratio_clip_high", ".corrections", "positive", _TOKEN, _corrected, default=2.0),
    to("sequence_tis_ratio_clip_high", ".corrections", "positive", _SEQUENCE, _corrected, default=5.0),
    to("sequence_mask_metric", ".corrections", choice(None, "product", "geometric"), _corrected, default=None,
       note="masks sequences with w out of bounds, over the tokens kept before"),
    to("geo_mask_low", ".corrections", "non-negative", _GEO, _BELOW_HIGH, _corrected, default=0.99),
    to("geo_mask_high", ".corrections", "positive", _GEO, _corrected, default=1.01),
    to("product_mask_low", ".corrections", "non-negative", _PRODUCT, _BELOW_HIGH, _corrected, default=0.5),
    to("product_mask_high", ".corrections", "positive", _PRODUCT, _corrected, default=2.0),
    to("{token_mask_is,outlier_token_is}_threshold_{low,high}", ".corrections", "positive?", _BELOW_HIGH,
       _corrected))

ALGORITHM = section("trainer.algorithm", "algorithm")(
    # advantages
    to("advantage_estimator", ".advantage.kind", _ESTIMATORS, default="grpo",
       note="grpo: (r - mean) / (std + eps) of the group; the others: docs/algorithms.md"),
    to("grpo_norm_by_std", ".advantage.normalize_by_std", "bool", needs(".advantage_estimator", "grpo"),
       unless(lambda s: s["generator.n_samples_per_prompt"] == 1, _GRPO_OF_ONE), default=True, note="false: Dr. GRPO"),
    to("lambd", ".advantage.gae_lambda", "share", needs(".advantage_estimator", "gae"), default=1.0),
    to("gamma", ".advantage.gamma", "share", needs(".advantage_estimator", "gae", "reinforce++"), default=1.0),
    to("advantage_batch_normalize", ".whiten_advantages", "bool", _WHITENED, default=False,
       note="(A - mean) / std over the batch's trained tokens; SkyRL's mean counts padding too"),
    # KL
    to("use_kl_loss", ".kl_in", "bool", _kl_place, default=True, note="loss + kl_loss_coef * KL"),
    to("use_kl_in_reward", ".kl_in", "bool",
       refused(lambda v, s: v and s[".use_kl_loss"] and
               "use_kl_in_reward and use_kl_loss are mutually exclusive; set one of them to false"),
       _kl_place, default=False, note="reward_t - kl_loss_coef * KL_t"),
    to("kl_loss_coef", ".kl_coef", "non-negative", NO_REFERENCE, default=0.001,
       note="for KL in the loss and in the reward"),
    to("use_kl_estimator_k3", ".kl_estimator", "bool", NO_REFERENCE, _NAMED, _estimator, default=True,
       note="k3 = exp(-d) - 1 + d, clamped at 10; false: k1 = d; d = logp - ref logp"),
    to("use_abs_kl", ".kl_estimator", "bool", NO_REFERENCE, _NAMED,
       unless(lambda s: s[".use_kl_estimator_k3"], "k3 is never negative"), _estimator, default=False,
       note="|k1|; also in the loss (in SkyRL only in the reward)"),
    to("kl_estimator_type", ".kl_estimator", "k1|k2|k3|abs", NO_REFERENCE, _estimator),
    to("kl_ctrl.type", ".kl_target", "fixed|adaptive", NO_REFERENCE, _kl_control, default="fixed"),
    to("kl_ctrl.kl_target", ".kl_target", "positive", NO_REFERENCE, _ADAPTIVE, default=0.1,
       note="coef *= 1 + clip(kl/target - 1, -0.2, 0.2) * n / horizon"),
    to("kl_ctrl.horizon", ".kl_horizon", "count", NO_REFERENCE, _ADAPTIVE, default=10_000),
    ignored("{kl_target,init_kl_coef}", "not read by SkyRL; use kl_ctrl and kl_loss_coef"),
    # policy loss
    to("ppo_loss_type", ".policy_loss.kind", _LOSSES,
       refused(lambda v, s: v in ("clip_cov", "kl_cov") and corrections(s) and
               f"{v} does not apply off_policy_correction; disable the correction"), default="regular",
       note="regular: -min(r*A, clamp(r, 1-eps_clip_low, 1+eps_clip_high)*A); others: docs/algorithms.md"),
    to("eps_clip_{low,high}", ".policy_loss.clip_{low,high}", "non-negative", _CLIPPED, default=0.2,
       note="bounds of the ratio: 1 - eps_clip_low, 1 + eps_clip_high"),
    to("clip_ratio_c", ".policy_loss.dual_clip", "number > 1",
       needs(".ppo_loss_type", "dual_clip"), default=3.0),
    to("loss_reduction", ".aggregation", _REDUCTIONS, default="sequence_mean",
       note=
           "default: sequence_mean, from SkyRL 0.1 on token_mean. KL and entropy too (in SkyRL always by "
           "sequence_mean)"),
    to("max_seq_len", ".aggregation_constant", "count?", needs(".loss_reduction", "seq_mean_token_sum_norm"),
       _row_tokens, default=None,
       note="null: max_input_length + max_generate_length up to SkyRL 0.4"),
    to("use_entropy_loss", ".entropy_coef", "bool", lambda v, s: s[".entropy_loss_coef"] if v else 0.0,
       default=False),
    to("entropy_loss_coef", ".entropy_coef", "number", needs(".use_entropy_loss"), default=0.01),
    to("temperature", "", "positive?",
       refused(lambda v, s: v not in (None, s["generator.sampling_params.temperature"]) and "log-probs "
               "always use the sampling temperature; set it to sampling_params.temperature, or to null"),
       lambda *_: implied("all log-probs use the sampling temperature"), default=None),
    to("cispo.cispo_eps_clip_low", ".policy_loss.clip_low", "non-negative", _CISPO, default=1.0),
    to("cispo.cispo_eps_clip_high", ".policy_loss.clip_high", "non-negative", _CISPO, default=4.0),
    to("cispo.cispo_anchor", ".old_logprobs", {
        "old": "recompute",
        "rollout": lambda _, s: Became({"algorithm.policy_loss.ratio_to": "behavior"}) if corrections(s)
        else "behavior"}, _CISPO, default="old"),
    to("sapo.tau_pos", ".policy_loss.tau_positive", "positive", _SAPO, default=1.0),
    to("sapo.tau_neg", ".policy_loss.tau_negative", "positive", _SAPO, default=1.05),
    to("clip_cov.clip_ratio", ".policy_loss.cov_fraction", "share", _CLIP_COV, default=0.0002),
    to("clip_cov.clip_cov_lb", ".policy_loss.cov_low", "number", _CLIP_COV, default=1.0),
    to("clip_cov.clip_cov_ub", ".policy_loss.cov_high", "number", _CLIP_COV, default=5.0),
    to("kl_cov.kl_cov_frac", ".policy_loss.cov_fraction", "share", _KL_COV, default=0.2),
    to("kl_cov.ppo_kl_coef", ".policy_loss.cov_coef", "non-negative", _KL_COV, default=1.0),
    to("dppo.dppo_type", ".policy_loss.divergence", {"binary_tv": "tv", "binary_kl": "kl"}, _DPPO,
       default="binary_tv"),
    to("dppo.delta_{low,high}", ".policy_loss.clip_{low,high}", "non-negative", _DPPO, default=0.2),
    # off-policy correction
    _CORRECTIONS,
    to("use_tis", ".corrections", "bool", _OLD_TIS, _corrected, default=False),
    to("tis_imp_ratio_cap", ".corrections", "positive or -1", _OLD_TIS,
       refused(lambda v, _: v <= 0 and
               "use_tis needs a cap above 0; set it, or use off_policy_correction.tis_ratio_type"),
       _corrected, default=-1.0),
    # filters
    to("dynamic_sampling.type", "rollout.filter.then", choice(None, "filter", "replace"),
       unless_null("one batch of prompts per round", implied),
       lambda v, s: Became({"rollout.filter.then": "resample" if v == "filter" else "replace",
                            "rollout.filter.min_std": _tolerance(v, s)}), default=None,
       note="filter: until the batch is full (DAPO); replace: copies of good groups (POLARIS)"),
    to("dynamic_sampling.max_sample_batches", "rollout.filter.max_batches", "count or -1",
       needs(".type", "filter"),
       lambda v, _: unsupported("set a number of batches, so that a round ends") if v < 0 else v, default=30),
    to("dynamic_sampling.min_replace_ratio", "rollout.filter.min_kept_fraction", "share",
       needs(".type", "replace"), default=0.3),
    to("zero_variance_filter", "rollout.filter.min_std", "bool",
       lambda v, _: v or no_effect("groups with equal rewards are kept; their advantages are 0"),
       unless(lambda s: s["generator.n_samples_per_prompt"] == 1, "groups of one are always kept"),
       _tolerance, default=False),
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
