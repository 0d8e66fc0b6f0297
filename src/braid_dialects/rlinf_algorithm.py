"""RLinf's `algorithm` keys: batches, advantages, losses, KL, sampling."""

from __future__ import annotations

from typing import Any

from . import rlinf_facts as facts
from .conditions import needs, overridden, unless
from .conversions import algorithm, as_is, computed, mapped, null_as, opposite, unless_null
from .rlinf_facts import BY_ROWS, ROBOTS_ONLY, TEXT_ONLY, VALUES
from .rlinf_run import eval_prompts, seq_length
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source, implied, no_effect, unsupported
from .values import choice

_GRPO = {"recipe": "grpo", "advantage": {"kind": "grpo", "normalize_by_std": True}}
_PLAIN = {"advantage": {"kind": "reinforce"}, "reward_mean": "none"}
_ADVANTAGES: dict[str, dict[str, Any]] = {
    "grpo": _GRPO,
    "grpo_dynamic": _GRPO,
    "gae": {"recipe": "ppo", "advantage": {"kind": "gae"}, "reward_mean": "none"},
    "reinpp": {"recipe": "reinforce_pp", "whiten_advantages": True, **_PLAIN},
    "raw": {"recipe": "reinforce", **_PLAIN},
}
_ESTIMATORS = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"
}  # fmt: skip
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
}
_LOSSES = ("ppo", "grpo", "actor", "actor_critic", "decoupled_actor_critic", "gspo")
_OTHER_LOSSES = ("drpo", "opd", "embodied_sac", "embodied_dagger", "nft", "iql", "rlt")
_SCALED = {
    ("group_level",): ("sequence_mean_token_sum", "turns"),
    ("group_level", "agent_level"): ("agent_mean_token_mean", "turns"),
    ("group_level", "agent_level", "turn_level"): ("agent_mean_token_mean", "tokens"),
}
"""algorithm.loss_scales with seq-mean-token-mean -> aggregation and turn_weighting."""
NO_TOP_K = 1_000_000
"""RLinf's value for no limit; larger than any vocabulary."""
_NUM_BINS = 256
"""Values of an action of OpenVLA."""


def _advantage(_: str, source: Source) -> Became:
    kind, note = facts.advantage(source), ""
    if kind not in _ADVANTAGES:
        return unsupported("use grpo, gae or reinpp")
    made = dict(_ADVANTAGES[kind])
    if kind == "reinpp" and source["algorithm.use_reinpp_baseline"]:
        made["reward_mean"] = "group"
    if kind == "gae" and not facts.has_critic(source):
        made["advantage"] = {"kind": "reinforce", "gamma": 1.0}
        note = "without a critic (critic.use_critic_model), the undiscounted return of each token"
    return algorithm(note, **made)


def _loss(value: str, source: Source) -> Became:
    if value not in _LOSSES:
        return unsupported(f"use one of {', '.join(_LOSSES)}")
    if value.endswith("actor_critic") and facts.advantage(source) != "gae":
        why = f"algorithm.adv_type={source['algorithm.adv_type']} does not use them"
        raise ValueError(f"{value} learns values, but {why}; set adv_type to gae, or loss_type to actor")
    native: dict[str, Any] = {"algorithm.policy_loss.kind": "ppo_clip"}
    if value == "gspo":
        native["algorithm.policy_loss.ratio_level"] = "sequence"
    if value == "decoupled_actor_critic":
        native["algorithm.corrections"] = _decoupled(source["algorithm.behave_weight_threshold"], source)
    return Became(native)


def _decoupled(high: float | None, _: Source) -> list[dict[str, Any]]:
    """Corrections that multiply the surrogate by w and mask tokens with w above the threshold."""
    modes = ["truncate"] if high is None else ["truncate", "mask"]
    return [{"level": "token", "mode": mode, "high": "off" if high is None else high} for mode in modes]


def _clip(value: float, source: Source) -> Became:
    sides = [side for side in ("low", "high") if source[f"algorithm.clip_ratio_{side}"] is None]
    why = "overridden by algorithm.clip_ratio_low and clip_ratio_high"
    return (
        Became({f"algorithm.policy_loss.clip_{side}": value for side in sides}) if sides else no_effect(why)
    )


def _dual_clip(value: float | None, source: Source) -> Any:
    is_absent = "algorithm.clip_ratio_c" not in source.values
    return "off" if value is None or (is_absent and facts.is_robots(source)) else value


def _calculate_entropy(value: bool, source: Source) -> Any:
    bonus = source["algorithm.entropy_bonus"]
    if facts.is_robots(source) or not bonus:
        return no_effect("entropy is always measured, and only algorithm.entropy_bonus adds it to the loss")
    return bonus if value else 0.0


def _estimator(value: str, source: Source) -> Became:
    if value not in _ESTIMATORS:
        return unsupported(f"use one of {', '.join(_ESTIMATORS)}")
    if not source["algorithm.kl_beta"] and not source["algorithm.reinpp_kl_beta"]:
        return no_effect("algorithm.kl_beta is 0")
    clamp = 10.0 if (kind := _ESTIMATORS[value]) == "k3" else "off"
    return Became({"algorithm.kl_estimator": kind, "algorithm.kl_clamp": clamp})


def _aggregation(value: str, source: Source) -> str:
    levels, aggregation = tuple(source["algorithm.loss_scales"] or ()), _AGGREGATIONS[value]
    return _SCALED.get(levels, (aggregation, ""))[0] if value == "seq-mean-token-mean" else aggregation


def _loss_scales(value: list[str], source: Source) -> Became:
    if not value:
        return Became({"algorithm.turn_weighting": "tokens"})
    if tuple(value) not in _SCALED or source["algorithm.loss_agg_func"] != "seq-mean-token-mean":
        known = ", ".join(f"[{', '.join(levels)}]" for levels in _SCALED)
        return unsupported(f"use one of {known}, with algorithm.loss_agg_func=seq-mean-token-mean")
    aggregation, weighting = _SCALED[tuple(value)]
    return Became({"algorithm.aggregation": aggregation, "algorithm.turn_weighting": weighting})


def _top_k(value: int, source: Source) -> Any:
    limit = value if 0 < value < NO_TOP_K else 0
    if not facts.is_robots(source):
        return limit
    if source["actor.model.model_type"] not in facts.OPENVLA:
        return no_effect("only OpenVLA has a limit; actions are sampled from their whole distribution")
    if not 0 < limit < _NUM_BINS:
        return implied("actions are sampled from all of their values")
    return unsupported("actions are sampled from all of their values; set it to -1")


def _top_p(value: float, source: Source) -> Any:
    return no_effect("RLinf does not read it for robots") if facts.is_robots(source) else value


def _temperature(value: float, source: Source) -> Any:
    if value:
        return value
    if source["runner.only_eval"] or str(source["runner.task_type"]).endswith("_eval"):
        return no_effect("nothing is trained")
    raise ValueError("training samples actions; use a number above 0")


def _temperature_eval(value: float, source: Source) -> Became:
    if source["actor.model.model_type"] not in facts.OPENVLA:
        return no_effect("evaluations always have the likeliest actions, of pi0 those without noise")
    return Became({"eval.sampling.temperature": value} if value > 0 else {"eval.sampling.greedy": True})


def _is_elsewhere(source: Source) -> bool:
    """Whether the other section counts: `rollout` for robots, if the file has it, else `algorithm`."""
    is_rollout = facts.is_robots(source) and source.has("rollout.sampling_params")
    return source.at.startswith("algorithm." if is_rollout else "rollout.")


_HERE = unless(
    _is_elsewhere,
    lambda s: f"sampling_params are those of {'rollout' if s.at.startswith('algorithm.') else 'algorithm'}",
)
_FIX = computed(lambda s: _decoupled(s["algorithm.importance_sampling_clip"], s)[:1])
_LEVEL = mapped({f"{level}_level": level for level in ("token", "action", "chunk")})
_BY_REINPP = unless(
    lambda s: not s[".kl_beta"] and facts.advantage(s) == "reinpp" and s[".reinpp_kl_beta"],
    "overridden by algorithm.reinpp_kl_beta",
)
_WHITENED = unless(
    lambda s: not s[".normalize_advantages"] and facts.advantage(s) == "reinpp",
    "algorithm.adv_type=reinpp always whitens advantages",
)
_REINPP = needs("algorithm.adv_type", "reinpp")
_NOT_DECOUPLED = unless(
    lambda s: s["algorithm.loss_type"] == "decoupled_actor_critic",
    "not used by algorithm.loss_type=decoupled_actor_critic",
)
_HAS_ENTROPY = unless(
    lambda s: not facts.is_robots(s) and not s["algorithm.calculate_entropy"],
    "algorithm.calculate_entropy is false",
)
_BY_EPS = unless_null("set by algorithm.ratio_clip_eps")

# One rule per line.
# fmt: off
_SAMPLING = section("{algorithm,rollout}.sampling_params", "rollout.sampling", _HERE)(
    to("do_sample", ".greedy", "bool", opposite, note="false: greedy decoding"),
    to("use_greedy", ".greedy", "bool", note="older name; the opposite of do_sample"),
    to("temperature", ".temperature", "positive",
       unless(lambda s: s[".temperature_train"] is not None, "overridden by temperature_train"),
       note="log-probs in training use the same distribution"),
    to("top_k", ".top_k", "cadence", _top_k),
    to("top_p", ".top_p", "fraction", _top_p),
    to("repetition_penalty", ".repetition_penalty", "positive", TEXT_ONLY),
    to("max_new_tokens", ".max_new_tokens", "count?", unless_null("what the actions need, or runner.seq_length leaves")),
    to("min_new_tokens", ".min_new_tokens", "natural", TEXT_ONLY, note="not read by RLinf"),
    to("temperature_train", ".temperature", "non-negative", ROBOTS_ONLY, _temperature),
    to("temperature_eval", "", "number", ROBOTS_ONLY, _temperature_eval, note="0 or less: the likeliest actions"),
    ignored("add_BOS stop stop_token_ids", "not read by RLinf"))

RULES = rows(_SAMPLING, section("algorithm", "algorithm")(
    # batches
    to("group_size", "rollout.group_size", "count"),
    to("n_minibatches", "train.steps_per_pass", "count", TEXT_ONLY, default=1,
       note="optimizer steps per round, each of rollout_batch_size * group_size // n_minibatches rows"),
    to("update_epoch", "train.passes_per_round", "count", note="passes over a round's rows"),
    to("shuffle_rollout", "train.shuffle", "bool", note="by whole groups"),
    to("training_batch_size_per_gpu", "train.micro_batch_rows", "count", TEXT_ONLY, BY_ROWS, default=1),
    to("rollout_batch_size_per_gpu", "rollout.request_batch", "count?", TEXT_ONLY,
       lambda v, s: None if v is None else v * facts.size_of(s, "rollout"),
       note="times the rollout devices; null: the round"),
    to("logprob_forward_micro_batch_size",
       {"train.infer_batch_rows": as_is, "train.infer_batch_tokens": lambda v, s: v * seq_length(s)}, "count",
       TEXT_ONLY, BY_ROWS, default=1),
    to("val_rollout_batch_size_per_gpu", "eval.batch_prompts", "count?", TEXT_ONLY, computed(eval_prompts),
       note="times the rollout devices, at most data.val_rollout_batch_size"),
    # advantages
    to("adv_type", "", "grpo|gae|ppo|reinpp|raw|grpo_dynamic|grpo_video|opd", _advantage, default="grpo",
       note="grpo: (r - mean) / std; gae, ppo: with a critic; reinpp: REINFORCE++; raw: the reward"),
    to("advantage_mode", ".advantage.level", "trajectory|turn", needs("algorithm.adv_type", "grpo_dynamic")),
    to("use_reinpp_baseline", ".reward_mean", "bool", _REINPP, mapped({True: "group", False: "none"})),
    to("normalize_advantages", ".whiten_advantages", "bool", _WHITENED, default=True,
       note="(A - mean) / std over the round's valid tokens; reinpp always does"),
    to("gamma", ".advantage.gamma", "share", VALUES),
    to("gae_lambda", ".advantage.gae_lambda", "share", VALUES),
    # losses
    to("loss_type", "", choice(*_LOSSES, *_OTHER_LOSSES), _loss, default="ppo",
       note="PPO's clipped ratio. Values need adv_type gae and actor_critic or use_critic_model"),
    to("loss_agg_func", ".aggregation", choice(*_AGGREGATIONS), _aggregation, default="token-mean",
       note="denominators count the whole optimizer step; RLinf averages the means of micro-batches"),
    always("use_valid_token_scale", "token means are always over all valid tokens of the optimizer step "
           "(true in RLinf)", "bool"),
    to("ratio_clip_eps", "", "non-negative", _clip, default=0.2, note="ratios in [1 - eps, 1 + eps]"),
    to("clip_ratio_low", ".policy_loss.clip_low", "non-negative?", _BY_EPS),
    to("clip_ratio_high", ".policy_loss.clip_high", "non-negative?", _BY_EPS),
    to("clip_ratio_c", ".policy_loss.dual_clip", "number > 1?", _dual_clip,
       default=3.0, note="bound on the ratio where A < 0; null: none"),
    to("early_stop_imp_ratio", ".early_stop_ratio", "positive?", null_as("off"), default=None,
       note="skips an optimizer step whose mean ratio exceeds it; RLinf checks micro-batches"),
    to("importance_sampling_fix", ".corrections", "bool", needs("algorithm.importance_sampling_fix"),
       _FIX, note="loss * min(exp(recomputed - engine's log-prob), importance_sampling_clip)"),
    to("importance_sampling_clip", ".corrections", "positive", needs("algorithm.importance_sampling_fix"),
       _FIX),
    to("behave_weight_threshold", ".corrections", "positive?",
       needs("algorithm.loss_type", "decoupled_actor_critic"), _decoupled, default=None,
       note="masks tokens with exp(old - engine's log-prob) above it; null: no bound"),
    to("value_clip value_cliprange", ".value_clip", "positive", VALUES),
    to("critic_warmup_steps", "critic.warmup_rounds", "natural", VALUES),
    missing("drpo_{lambda,tau,beta,delta,kl_type}",
            "for algorithm.loss_type=drpo only, which is not supported"),
    to("huber_delta", ".huber_delta", "positive", VALUES, note="value errors beyond it count linearly"),
    to("clip_log_ratio_min", ".policy_loss.log_ratio_min", "number >= -20 and <= 0?", _NOT_DECOUPLED, null_as("off")),
    to("clip_log_ratio_max", ".policy_loss.log_ratio_max", "non-negative?", _NOT_DECOUPLED, null_as("off")),
    to("loss_scales", "", "[group_level|agent_level|turn_level]", _loss_scales,
       note="levels at which turns, agents and tokens count alike; KL and entropy are scaled too"),
    to("staleness_threshold", "pipeline.max_lag", "natural?", unless_null("sampling and training take turns"),
       default=None),
    missing("on_policy_min_ratio", "groups are taken as they finish; set braid.pipeline.max_lag"),
    # KL and entropy
    to("kl_beta", {".kl_coef": as_is, "{kl_in}": "reward"}, "non-negative", _BY_REINPP,
       note="subtracted from rewards, as RLinf documents; its code: braid.algorithm.kl_in=loss"),
    to("kl_penalty_type", "", choice(*_ESTIMATORS, "full"), _estimator, default="low_var_kl",
       note="d = reference - policy. kl, k1: -d; mse, k2: d^2 / 2; low_var_kl, k3: exp(d) - d - 1"),
    to("reinpp_kl_beta", {".kl_coef": as_is, ".kl_in": "reward"}, "non-negative", _REINPP),
    ignored("kl_penalty", "the estimator is set by algorithm.kl_penalty_type"),
    to("entropy_bonus", ".entropy_coef", "non-negative", _HAS_ENTROPY, note="loss - bonus * entropy"),
    to("calculate_entropy", ".entropy_coef", "bool", _calculate_entropy),
    ignored("entropy_op_type", "it does not change results"),
    # which groups are trained on
    to("filter_rewards",
       {"rollout.filter.min_mean": lambda v, s: s[".rewards_lower_bound"] if v else None,
        "rollout.filter.max_mean": lambda v, s: s[".rewards_upper_bound"] if v else None}, "bool"),
    to("rewards_lower_bound", "rollout.filter.min_mean", "number", needs("algorithm.filter_rewards")),
    to("rewards_upper_bound", "rollout.filter.max_mean", "number", needs("algorithm.filter_rewards")),
    to("max_num_gen_batches", "rollout.filter.max_batches", "count"),
    missing("down_sampling", "use braid.rollout.filter.min_std=0, which drops groups with equal rewards"),
    # robots
    to("rollout_epoch", "rollout.prompts_per_round", "count", ROBOTS_ONLY, computed(facts.prompts)),
    to("reward_type", ".reward_level", "chunk_level|action_level", ROBOTS_ONLY, _LEVEL,
       note="chunk_level: rewards of a chunk are summed, one advantage each; action_level: one per action"),
    to("logprob_type", ".logprob_level", "token_level|action_level|chunk_level", ROBOTS_ONLY, _LEVEL),
    to("entropy_type", ".entropy_level", "token_level|action_level|chunk_level", ROBOTS_ONLY, _LEVEL),
    to("length_params.max_new_token", "rollout.sampling.max_new_tokens", "count?", ROBOTS_ONLY,
       unless_null("the number that the actions need")),
    to("length_params.max_length", "rollout.max_sequence_tokens", "count", ROBOTS_ONLY),
    to("length_params.min_length", "rollout.sampling.min_new_tokens", "natural", ROBOTS_ONLY),
    to("auto_reset", "env.auto_reset", "bool", ROBOTS_ONLY, overridden("env.train.auto_reset")),
    to("ignore_terminations", "env.ignore_terminations", "bool", ROBOTS_ONLY,
       overridden("env.train.ignore_terminations")),
    to("reward_coef", "env.reward_scale", "positive", ROBOTS_ONLY, overridden("env.train.reward_coef")),
    to("bootstrap_type", ".advantage.bootstrap", {"standard": "truncated", "always": "always"}, ROBOTS_ONLY, VALUES,
       note=
           "always: the return of an episode goes on with its last state's value also where the task has "
           "ended")))
# fmt: on
