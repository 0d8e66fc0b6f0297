"""SkyRL's `trainer.algorithm`: advantages, KL, policy and value losses, corrections, filters.

Two names are misleading. `kl_loss_coef` is the KL coefficient in the reward as well as in the loss.
`normalize_reward` normalises the critic's targets, not rewards.
"""

from __future__ import annotations

from typing import Any

from .compat import (
    Apply,
    Became,
    NoEffect,
    Rule,
    Source,
    implied,
    mapped,
    no_effect,
    null_as,
    unsupported,
    when,
)
from .skyrl_facts import (
    not_estimator,
    not_loss,
    uses_reference,
    without_critic,
    without_reference,
)
from .values import (
    BOOL,
    COUNT,
    NON_NEGATIVE,
    NUMBER,
    POSITIVE,
    SHARE,
    TEXT,
    choice,
    either,
    nullable,
    number,
)

_AT = "trainer.algorithm"
_REPORTS = "it sets algorithm.kl_coef and algorithm.kl_in"


# --- advantages --------------------------------------------------------------------------------------------------


_ESTIMATOR_NOTES = {
    "grpo": "A = (r - mean) / (std + eps) over the group's trajectories, std unbiased",
    "rloo": "A = (r - mean) * n / (n - 1) over the group's trajectories",
    "maxrl": "A = (r - mean) / (mean + eps) over the group's trajectories",
}


def _estimator(value: str, source: Source) -> Became:
    if value == "gae":
        return Became(
            {"algorithm.recipe": "ppo"},
            note="delta_t = r_t + gamma*V_{t+1} - V_t; A_t = delta_t + gamma*lambd*A_{t+1}; then whitened",
        )
    if value == "reinforce++":
        return Became(
            {"algorithm.advantage": "reinforce", "algorithm.whiten_advantages": True},
            note="discounted suffix sums of rewards, then whitened",
        )
    if value == "grpo" and source.get("generator.n_samples_per_prompt") == 1:
        return Became(
            {"algorithm.advantage": "reinforce"},
            note="with groups of one, SkyRL's GRPO uses the reward itself as the advantage, like reinforce",
        )
    return Became({"algorithm.advantage": value}, note=_ESTIMATOR_NOTES[value])


def _batch_normalize(value: bool, source: Source) -> Became:
    estimator = source.get(f"{_AT}.advantage_estimator")
    if estimator in ("gae", "reinforce++"):
        return no_effect(f"{estimator} always whitens advantages")
    return Became({"algorithm.whiten_advantages": value})


# --- KL ----------------------------------------------------------------------------------------------------------


def _kl_place(_: bool, source: Source) -> Became:
    """Place of the KL term, from both flags; with neither it is off."""
    if not uses_reference(source):
        return Became({"algorithm.kl_coef": 0.0})
    return Became({"algorithm.kl_in": "reward" if source.get(f"{_AT}.use_kl_in_reward") else "loss"})


def _estimated(kind: str) -> Became:
    """A KL estimator, with the clamp that SkyRL has applied to k3 since 2025."""
    return Became({"algorithm.kl_estimator": kind, "algorithm.kl_clamp": 10.0 if kind == "k3" else "off"})


def _flagged_estimator(source: Source) -> Became:
    """The estimator selected by the first release's two flags. |k3| is k3, which is never negative."""
    if source.get(f"{_AT}.use_kl_estimator_k3"):
        return _estimated("k3")
    return _estimated("abs" if source.get(f"{_AT}.use_abs_kl") else "k1")


def _named(source: Source) -> str:
    named = source.get(f"{_AT}.kl_estimator_type")
    return f"overridden by kl_estimator_type={named}" if named else ""


def _k3_idle(source: Source) -> str:
    return "k3 is never negative" if source.get(f"{_AT}.use_kl_estimator_k3") else ""


def _kl_target(value: float, source: Source) -> Became:
    is_adaptive = source.get(f"{_AT}.kl_ctrl.type") == "adaptive" and source.get(f"{_AT}.use_kl_in_reward")
    return Became({"algorithm.kl_target": value}) if is_adaptive else no_effect("the KL coefficient is fixed")


def _kl_horizon(value: int, source: Source) -> Became:
    made = _kl_target(1.0, source)
    return Became({"algorithm.kl_horizon": float(value)}) if made.native else made


def _kl_control(value: str, source: Source) -> Became:
    if value == "adaptive" and not source.get(f"{_AT}.use_kl_in_reward"):
        return no_effect("in SkyRL only KL in the reward has an adaptive coefficient")
    if value == "adaptive":
        return Became({"algorithm.kl_target": source.get(f"{_AT}.kl_ctrl.kl_target")})
    return Became({"algorithm.kl_target": "off"})


# --- losses ------------------------------------------------------------------------------------------------------

_LOSSES: dict[str, dict[str, Any]] = {
    "regular": {"algorithm.policy_loss": "ppo_clip"},
    "dual_clip": {"algorithm.policy_loss": "ppo_clip"},
    "gspo": {"algorithm.policy_loss": "ppo_clip", "algorithm.ratio_level": "sequence"},
    "cispo": {"algorithm.policy_loss": "cispo"},
    "sapo": {"algorithm.policy_loss": "sapo"},
    "clip_cov": {"algorithm.policy_loss": "clip_cov"},
    "kl_cov": {"algorithm.policy_loss": "kl_cov"},
    "dppo": {"algorithm.policy_loss": "dppo", "algorithm.old_logprobs": "behavior"},
    "cross_entropy": {"algorithm.policy_loss": "cross_entropy"},
    "rollout_is": {"algorithm.policy_loss": "masked_is", "algorithm.old_logprobs": "behavior"},
    "importance_sampling": {"algorithm.policy_loss": "importance_sampling"},
}
_LOSS_NOTES = {
    "regular": "-min(r*A, clamp(r, 1-eps_clip_low, 1+eps_clip_high)*A)",
    "dual_clip": "like regular; at most -clip_ratio_c*A where A < 0",
    "gspo": "like regular, with a sequence-level ratio: exp of the mean log-ratio",
    "cispo": "-A*sg(clamp(r, 1-low, 1+high))*logp",
    "sapo": "-A*sigmoid(tau*(r-1))*4/tau",
    "clip_cov": "like regular, but drops a random fraction of the tokens with high covariance; SkyRL scales advantages before, so it drops none",
    "kl_cov": "-r*A, plus |logp - old logp| for the fraction of tokens with the highest covariance",
    "dppo": "-r*A where the token's probability has not moved too far from the sampler's",
    "cross_entropy": "-logp",
    "rollout_is": "-A*sg(r)*logp where 1-eps_clip_low < r < 1+eps_clip_high, r against the sampler",
    "importance_sampling": "-r*A, reduced by loss_reduction; SkyRL sums over tokens",
}  # fmt: skip


def _loss(value: str, _: Source) -> Became:
    return Became(_LOSSES[value], note=_LOSS_NOTES[value])


_CLIPPED = not_loss("regular", "dual_clip", "gspo", "clip_cov", "rollout_is")


def _anchor(value: str, _: Source) -> Became:
    return Became({"algorithm.old_logprobs": "behavior" if value == "rollout" else "recompute"})


_REDUCTIONS = {
    "sequence_mean": "sequence_mean_token_mean",
    "token_mean": "token_mean",
    "token_mean_legacy": "token_mean",
    "seq_mean_token_sum_norm": "token_sum_constant",
    "prompt_mean": "prompt_mean",
}


def _reduction(value: str, _: Source) -> Became:
    note = "a mean over all tokens; SkyRL's mean of micro-batch means depends on micro-batching"
    return Became(
        {"algorithm.aggregation": _REDUCTIONS[value]}, note=note if value == "token_mean_legacy" else ""
    )


def _max_seq_len(value: int | None, source: Source) -> Became:
    if source.get(f"{_AT}.loss_reduction") != "seq_mean_token_sum_norm" or value is None:
        return no_effect("for loss_reduction=seq_mean_token_sum_norm only")
    return Became({"algorithm.aggregation_constant": float(value)})


def _entropy(value: float, source: Source) -> Became:
    if not source.get(f"{_AT}.use_entropy_loss"):
        return no_effect("use_entropy_loss is false")
    return Became({"algorithm.entropy_coef": float(value)})


def _temperature(value: float | None, source: Source) -> Became:
    if value not in (None, source.get("generator.sampling_params.temperature")):
        raise ValueError(
            "log-probs always use the sampling temperature; set it to sampling_params.temperature, or to null"
        )
    return implied("log-probs of policy, old policy and reference always use the sampling temperature")


# --- off-policy correction ---------------------------------------------------------------------------------------

_FIX = f"{_AT}.off_policy_correction"


def corrections(source: Source) -> list[dict[str, Any]]:
    """Native corrections with w = exp(old - rollout log-prob), in SkyRL's order: each covers the tokens that
    the earlier ones kept."""

    def get(name: str) -> Any:
        return source.get(f"{_FIX}.{name}")

    out = []
    for mode, name in (("mask_sequence", "outlier_token_is"), ("mask", "token_mask_is")):
        low, high = get(f"{name}_threshold_low"), get(f"{name}_threshold_high")
        if low is not None or high is not None:
            bounds = {"low": low or 0.0, "high": "off" if high is None else high}
            out.append({"level": "token", "mode": mode, **bounds})
    kind = get("tis_ratio_type") or ("token" if source.get(f"{_AT}.use_tis") else None)
    if kind is not None:
        is_old = source.get(f"{_AT}.use_tis") and get("tis_ratio_type") is None
        cap = source.get(f"{_AT}.tis_imp_ratio_cap") if is_old else get(f"{kind}_tis_ratio_clip_high")
        out.append({"level": kind, "mode": "truncate", "low": 0.0, "high": float(cap), "tokens": "kept"})
    if (metric := get("sequence_mask_metric")) is not None:
        name, level = ("product", "sequence") if metric == "product" else ("geo", "geometric")
        bounds = {"low": float(get(f"{name}_mask_low")), "high": float(get(f"{name}_mask_high"))}
        out.append({"level": level, "mode": "mask", **bounds, "tokens": "kept"})
    return out


def _corrected(_: Any, source: Source) -> Became:
    made = corrections(source)
    if not made:
        return no_effect("no correction is enabled")
    return Became({"algorithm.corrections": made, "algorithm.old_logprobs": "recompute"})


def _correction_read(name: str, *wanted: Any) -> Any:
    """Convert to corrections if off_policy_correction's `name` is one of `wanted`; else no effect."""

    def convert(value: Any, source: Source) -> Became:
        chosen = source.get(f"{_FIX}.{name}")
        return _corrected(value, source) if chosen in wanted else no_effect(f"{name} is {chosen or 'null'}")

    return convert


def _use_tis(value: Any, source: Source) -> Became:
    is_on = source.get(f"{_AT}.use_tis") and source.get(f"{_FIX}.tis_ratio_type") is None
    return _corrected(value, source) if is_on else no_effect("overridden by off_policy_correction")


# --- filters -----------------------------------------------------------------------------------------------------


def _dynamic(value: str | None, source: Source) -> Became:
    if value is None:
        return implied("one batch of prompts per round")
    keep = {"rollout.filter.min_std": _tolerance(source)}
    return Became({**keep, "rollout.filter.then": "resample" if value == "filter" else "replace"})


def _tolerance(source: Source) -> float:
    return source.get(f"{_AT}.zero_variance_filter_tol") if source.get(f"{_AT}.zero_variance_filter") else 0.0


def _dynamic_is(kind: str) -> Any:
    def idle(source: Source) -> str:
        chosen = source.get(f"{_AT}.dynamic_sampling.type")
        return "" if chosen == kind else f"dynamic_sampling.type is {chosen or 'null'}"

    return idle


def _max_batches(value: int, _: Source) -> Became:
    if value < 0:
        return unsupported("set a number of batches, so that a round ends")
    return Became({"rollout.filter.max_batches": value})


def _zero_variance(value: bool, source: Source) -> Became:
    if not value:
        return no_effect("groups with equal rewards are kept; their advantages are 0")
    if source.get("generator.n_samples_per_prompt") == 1:
        return no_effect("groups of one are always kept")
    return Became({"rollout.filter.min_std": _tolerance(source)})


def _filter_idle(source: Source) -> str:
    return "" if source.get(f"{_AT}.zero_variance_filter") else "zero_variance_filter is false"


def _penalty(value: float, source: Source) -> Became:
    tokens = source.get(f"{_AT}.overlong_buffer_len") or 512
    return Became({"reward.overlong.penalty": float(value), "reward.overlong.buffer_tokens": tokens})


_ESTIMATORS = choice("grpo", "gae", "rloo", "reinforce++", "maxrl")
_LOSS_NAMES = choice(*_LOSSES)
_BOUND = nullable(POSITIVE)
_K3 = "k3 = exp(-d) - 1 + d; false: k1 = d; d = logp - ref logp. k3 is clamped at 10, as in later releases"

ALGORITHM: tuple[Rule, ...] = (
    # advantages
    Apply(f"{_AT}.advantage_estimator", "algorithm.advantage", _ESTIMATORS, _estimator, default="grpo",
        note="grpo: A = (r - mean) / (std + eps) of the group; gae: sum of (gamma*lambd)^k * delta; rloo: the mean of the "
        "other samples as baseline; maxrl: (r - mean) / mean"),
    Apply(f"{_AT}.grpo_norm_by_std", "algorithm.normalize_by_std", BOOL, when(not_estimator("grpo")), default=True,
        note="(r - mean) / (std + eps), std unbiased; false: Dr. GRPO"),
    Apply(f"{_AT}.lambd", "algorithm.gae_lambda", SHARE, when(not_estimator("gae")), default=1.0),
    Apply(f"{_AT}.gamma", "algorithm.gamma", SHARE, when(not_estimator("gae", "reinforce++")), default=1.0),
    Apply(f"{_AT}.advantage_batch_normalize", "algorithm.whiten_advantages", BOOL, _batch_normalize, default=False,
        note="(A - mean) / std over the batch's trained tokens; SkyRL's mean counts padding too"),
    # KL
    Apply(f"{_AT}.use_kl_loss", "algorithm.kl_in", BOOL, _kl_place, default=True,
        note="loss + kl_loss_coef * KL; not together with use_kl_in_reward"),
    Apply(f"{_AT}.use_kl_in_reward", "algorithm.kl_in", BOOL, _kl_place, default=False,
        note="reward_t - kl_loss_coef * KL_t at every token"),
    Apply(f"{_AT}.kl_loss_coef", "algorithm.kl_coef", NON_NEGATIVE, when(without_reference), default=0.001,
        note="for KL in the loss and in the reward"),
    Apply(f"{_AT}.use_kl_estimator_k3", "algorithm.kl_estimator", BOOL,
        when(without_reference, _named, then=lambda _, source: _flagged_estimator(source)), default=True, note=_K3),
    Apply(f"{_AT}.use_abs_kl", "algorithm.kl_estimator", BOOL,
        when(without_reference, _named, _k3_idle, then=lambda _, source: _flagged_estimator(source)), default=False,
        note="|k1|; also in the loss (in SkyRL only in the reward)"),
    Apply(f"{_AT}.kl_estimator_type", "algorithm.kl_estimator", choice("k1", "k2", "k3", "abs"),
        when(without_reference, then=lambda v, _: _estimated(v)),
        note="replaces use_kl_estimator_k3 and use_abs_kl; k2 = d^2/2"),
    Apply(f"{_AT}.kl_ctrl.type", "algorithm.kl_target", choice("fixed", "adaptive"),
        when(without_reference, then=_kl_control), default="fixed"),
    Apply(f"{_AT}.kl_ctrl.kl_target", "algorithm.kl_target", POSITIVE, when(without_reference, then=_kl_target),
        default=0.1, note="coef *= 1 + clip(kl/target - 1, -0.2, 0.2) * n / horizon"),
    Apply(f"{_AT}.kl_ctrl.horizon", "algorithm.kl_horizon", COUNT, when(without_reference, then=_kl_horizon),
        default=10_000, note="trajectories"),
    NoEffect(f"{_AT}.kl_target", nullable(NUMBER), "not read by SkyRL; use kl_ctrl"),
    NoEffect(f"{_AT}.init_kl_coef", NUMBER, "not read by SkyRL; the coefficient is kl_loss_coef"),
    # policy loss
    Apply(f"{_AT}.ppo_loss_type", "algorithm.policy_loss", _LOSS_NAMES, _loss, default="regular",
        note="regular: -min(r*A, clamp(r, 1-eps_clip_low, 1+eps_clip_high)*A), r = exp(logp - old logp); dual_clip: at most "
        "-clip_ratio_c*A where A < 0; docs/algorithms.md has the others"),
    Apply(f"{_AT}.eps_clip_low", "algorithm.clip_low", NON_NEGATIVE, when(_CLIPPED), default=0.2,
        note="ratios below 1 - eps_clip_low are clipped"),
    Apply(f"{_AT}.eps_clip_high", "algorithm.clip_high", NON_NEGATIVE, when(_CLIPPED), default=0.2,
        note="ratios above 1 + eps_clip_high are clipped"),
    Apply(f"{_AT}.clip_ratio_c", "algorithm.dual_clip", number(1.0, above=True, samples=(2.0, 4.0)),
        when(not_loss("dual_clip")), default=3.0, note="the loss is at most -c*A where A < 0"),
    Apply(f"{_AT}.loss_reduction", "algorithm.aggregation", choice(*_REDUCTIONS), _reduction,
        default="sequence_mean",
        note="the first release has sequence_mean only; later ones default to token_mean. KL and entropy are reduced in "
        "the same way (in SkyRL by sequence_mean)"),
    Apply(f"{_AT}.max_seq_len", "algorithm.aggregation_constant", nullable(COUNT), _max_seq_len),
    Apply(f"{_AT}.use_entropy_loss", "algorithm.entropy_coef", BOOL, lambda v,
        source: Became({"algorithm.entropy_coef": float(source.get(f"{_AT}.entropy_loss_coef")) if v else 0.0}),
        default=False),
    Apply(f"{_AT}.entropy_loss_coef", "algorithm.entropy_coef", NUMBER, _entropy, default=0.01),
    Apply(f"{_AT}.temperature", "", nullable(POSITIVE), _temperature, default=None),
    Apply(f"{_AT}.cispo.cispo_eps_clip_low", "algorithm.clip_low", NON_NEGATIVE, when(not_loss("cispo")),
        default=1.0),
    Apply(f"{_AT}.cispo.cispo_eps_clip_high", "algorithm.clip_high", NON_NEGATIVE, when(not_loss("cispo")),
        default=4.0),
    Apply(f"{_AT}.cispo.cispo_anchor", "algorithm.old_logprobs", choice("old", "rollout"),
        when(not_loss("cispo"), then=_anchor), default="old"),
    Apply(f"{_AT}.sapo.tau_pos", "algorithm.sapo_tau_positive", POSITIVE, when(not_loss("sapo")), default=1.0),
    Apply(f"{_AT}.sapo.tau_neg", "algorithm.sapo_tau_negative", POSITIVE, when(not_loss("sapo")), default=1.05),
    Apply(f"{_AT}.clip_cov.clip_ratio", "algorithm.cov_fraction", SHARE, when(not_loss("clip_cov")),
        default=0.0002),
    Apply(f"{_AT}.clip_cov.clip_cov_lb", "algorithm.cov_low", NUMBER, when(not_loss("clip_cov")), default=1.0),
    Apply(f"{_AT}.clip_cov.clip_cov_ub", "algorithm.cov_high", NUMBER, when(not_loss("clip_cov")), default=5.0),
    Apply(f"{_AT}.kl_cov.kl_cov_frac", "algorithm.cov_fraction", SHARE, when(not_loss("kl_cov")), default=0.2),
    Apply(f"{_AT}.kl_cov.ppo_kl_coef", "algorithm.cov_coef", NON_NEGATIVE, when(not_loss("kl_cov")), default=1.0),
    Apply(f"{_AT}.dppo.dppo_type", "algorithm.dppo_divergence", choice("binary_tv", "binary_kl"),
        when(not_loss("dppo"), then=mapped({"binary_tv": "tv", "binary_kl": "kl"})), default="binary_tv"),
    Apply(f"{_AT}.dppo.delta_low", "algorithm.clip_low", NON_NEGATIVE, when(not_loss("dppo")), default=0.2),
    Apply(f"{_AT}.dppo.delta_high", "algorithm.clip_high", NON_NEGATIVE, when(not_loss("dppo")), default=0.2),
    # off-policy correction
    Apply(f"{_FIX}.tis_ratio_type", "algorithm.corrections", choice(None, "token", "sequence"), _corrected,
        default=None, note="the loss times min(w, cap)"),
    Apply(f"{_FIX}.token_tis_ratio_clip_high", "algorithm.corrections", POSITIVE,
        _correction_read("tis_ratio_type", "token"), default=2.0),
    Apply(f"{_FIX}.sequence_tis_ratio_clip_high", "algorithm.corrections", POSITIVE,
        _correction_read("tis_ratio_type", "sequence"), default=5.0),
    Apply(f"{_FIX}.sequence_mask_metric", "algorithm.corrections", choice(None, "product", "geometric"), _corrected,
        default=None, note="masks sequences with w outside the bounds; w is computed over the tokens that the outlier and "
        "token masks keep"),
    Apply(f"{_FIX}.geo_mask_low", "algorithm.corrections", NON_NEGATIVE,
        _correction_read("sequence_mask_metric", "geometric"), default=0.99),
    Apply(f"{_FIX}.geo_mask_high", "algorithm.corrections", POSITIVE,
        _correction_read("sequence_mask_metric", "geometric"), default=1.01),
    Apply(f"{_FIX}.product_mask_low", "algorithm.corrections", NON_NEGATIVE,
        _correction_read("sequence_mask_metric", "product"), default=0.5),
    Apply(f"{_FIX}.product_mask_high", "algorithm.corrections", POSITIVE,
        _correction_read("sequence_mask_metric", "product"), default=2.0),
    Apply(f"{_FIX}.token_mask_is_threshold_low", "algorithm.corrections", _BOUND, _corrected),
    Apply(f"{_FIX}.token_mask_is_threshold_high", "algorithm.corrections", _BOUND, _corrected),
    Apply(f"{_FIX}.outlier_token_is_threshold_low", "algorithm.corrections", _BOUND, _corrected,
        note="masks sequences that have a token with w below it"),
    Apply(f"{_FIX}.outlier_token_is_threshold_high", "algorithm.corrections", _BOUND, _corrected,
        note="masks sequences that have a token with w above it"),
    Apply(f"{_AT}.use_tis", "algorithm.corrections", BOOL, _use_tis, default=False,
        note="older form of off_policy_correction.tis_ratio_type=token"),
    Apply(f"{_AT}.tis_imp_ratio_cap", "algorithm.corrections", either(POSITIVE, choice(-1.0, -1)), _use_tis,
        default=-1.0),
    # filters
    Apply(f"{_AT}.dynamic_sampling.type", "rollout.filter.then", choice(None, "filter", "replace"), _dynamic,
        default=None,
        note="filter: sample on until the batch is full (DAPO); replace: copies of good groups (POLARIS)"),
    Apply(f"{_AT}.dynamic_sampling.max_sample_batches", "rollout.filter.max_batches", either(COUNT, choice(-1)),
        when(_dynamic_is("filter"), then=_max_batches), default=30),
    Apply(f"{_AT}.dynamic_sampling.min_replace_ratio", "rollout.filter.min_kept_fraction", SHARE,
        when(_dynamic_is("replace")), default=0.3),
    Apply(f"{_AT}.zero_variance_filter", "rollout.filter.min_std", BOOL, _zero_variance, default=False,
        note="masked in the loss"),
    Apply(f"{_AT}.zero_variance_filter_tol", "rollout.filter.min_std", NON_NEGATIVE, when(_filter_idle),
        default=1e-6),
    # DAPO's overlong penalty, from SkyRL's example examples/algorithms/dapo
    Apply(f"{_AT}.overlong_buffer_len", "reward.overlong.buffer_tokens", COUNT,
        note="r - factor * clip((length - (max_generate_length - len)) / len, 0, 1)"),
    Apply(f"{_AT}.overlong_buffer_penalty_factor", "reward.overlong.penalty", POSITIVE, _penalty),
    # values
    Apply(f"{_AT}.value_head_prefix", "critic.head_name", TEXT, when(without_critic), default="value_head"),
    Apply(f"{_AT}.value_clip", "algorithm.value_clip", nullable(POSITIVE),
        when(without_critic, then=null_as("off")), default=0.2,
        note="0.5 * max((clamped V - R)^2, (V - R)^2); null for no clipping"),
    Apply(f"{_AT}.normalize_reward", "critic.normalize_values", BOOL, when(without_critic), default=True,
        note="normalizes values, not rewards, by running mean and standard deviation of returns, as documented; "
        "SkyRL's stay at 0 and 1"),
)  # fmt: skip
