"""Arguments of TRL's GRPOTrainer: groups, sampling, the loss, vLLM and reward functions."""

from __future__ import annotations

from typing import Any

from . import trl_facts as facts
from .conditions import BY_ENGINE, needs, of_engine, refused, unless
from .conversions import algorithm, part_of, policy_loss, unless_null
from .rows import ignored, missing, rows, to
from .table import Became, Source, no_effect, unsupported
from .values import choice

_SEQUENCES = unless(
    lambda s: s["loss_type"] in ("luspo", "vespo"),
    lambda s: f"{s['loss_type']} always has ratios of sequences",
)
_LOSSES = {
    "dapo": ("ppo_clip", "token_mean"), "bnpo": ("ppo_clip", "token_mean"), "grpo": ("ppo_clip", "sequence_mean_token_mean"),
    "dr_grpo": ("ppo_clip", "token_sum_constant"), "luspo": ("ppo_clip", "sequence_mean_token_sum"),
    "cispo": ("cispo", "token_mean"), "sapo": ("sapo", "sequence_mean_token_mean"), "vespo": ("vespo", "token_mean"),
}  # fmt: skip
"""loss_type -> the kind of policy loss, and the aggregation."""
_PARTS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"kind": "math", "name": "accuracy"},
    "think_format_reward": {
        "kind": "pattern",
        "name": "think_format",
        "pattern": r"^<think>(?!.*<think>)(.*?)</think>.*$",
    },
}
"""Rewards of trl.rewards -> reward parts."""


def _loss(value: str, source: Source) -> Any:
    kind, aggregation = _LOSSES[value]
    level = {"ratio_level": "sequence"} if value == "luspo" else {}
    made: dict[str, Any] = {**policy_loss(kind, **level).native, "algorithm.aggregation": aggregation}
    if value == "dr_grpo":
        made["algorithm.aggregation_constant"] = float(source["max_completion_length"])
    note = "a mean over the tokens of the whole step; in TRL of a micro-batch" if value == "bnpo" else ""
    return Became(made, note=note)


def _bound(value: float | None, source: Source) -> Became | float:
    """Bounds of the ratio: of CISPO the ratio itself, at most epsilon_high."""
    high = source["epsilon"] if value is None else value
    if source["loss_type"] != "cispo":
        return high
    if high < 1:
        raise ValueError(
            f"cispo bounds the ratio itself, which {high} would always cut; set epsilon_high, for example 5.0"
        )
    return Became({"algorithm.policy_loss.clip_high": high - 1.0, "algorithm.policy_loss.clip_low": 1.0})


def _scaled(value: str | bool, _: Source) -> Became:
    """The advantage's denominator."""
    match value:
        case True | "group" | "true" | "True":
            return algorithm("A = (r - mean) / std of the group", advantage={"normalize_by_std": True})
        case "batch":
            return algorithm(
                "A = (r - mean of the group) / std of the round",
                advantage={"normalize_by_std": False},
                reward_std="batch",
            )
        case "mean":
            return unsupported("use braid.algorithm.advantage=maxrl")
    return algorithm("A = r - mean of the group", advantage={"normalize_by_std": False})


def _correction(_: Any, source: Source) -> Became:
    """By w = exp(log-prob in training - in vLLM), of a token or the product over a sequence."""
    if not source["use_vllm"] or not source["vllm_importance_sampling_correction"]:
        return algorithm(corrections=[])
    level, _, mode = source["vllm_importance_sampling_mode"].partition("_")
    made = {"level": level, "mode": mode, "low": 0.0, "high": float(source["vllm_importance_sampling_cap"])}
    return algorithm(corrections=[made], old_logprobs="recompute")


def _servers(value: str | None, source: Source) -> Any:
    return [value or f"http://{source['vllm_server_host']}:{source['vllm_server_port']}"]


def _rewards(value: Any, source: Source) -> Any:
    """Rewards of TRL and reward models as parts; functions of the user's have other parameters in braid."""
    if "reward.parts" in source.braid_values:
        return no_effect("overridden by braid.reward.parts")
    names = value if isinstance(value, list) else [value]
    weights = source["reward_weights"] or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(
            f"there are {len(names)} rewards, but {len(weights)} reward_weights; give one for each"
        )
    parts = []
    for name, weight in zip(names, weights, strict=True):
        if name in _PARTS:
            part = _PARTS[name]
        elif isinstance(name, str) and "/" in name and ":" not in name:
            part = {"kind": "model", "path": name}
        else:
            return unsupported(
                f"{name} takes lists of completions; write a function that takes one text, in a separate file, and set "
                "braid.reward.parts=[{kind: function, path: FILE.py:NAME}] (docs/rewards.md; with group: true of lists)"
            )
        parts.append(part | ({"weight": float(weight)} if weight != 1 else {}))
    return Became({"reward.parts": parts})


_VLLM = needs("use_vllm")
_SERVED = of_engine("vllm")
_CLIPPED = unless(
    lambda s: s["loss_type"] in ("cispo", "sapo", "vespo"), lambda s: f"{s['loss_type']} has no such bound"
)
_HAS_BOUNDS = unless(
    lambda s: s["loss_type"] in ("sapo", "vespo"), lambda s: f"{s['loss_type']} has no such bound"
)
_COLOCATED = unless(facts.is_served, "of the server's own")

# One rule per line.
# fmt: off
GRPO = rows(
    to("learning_rate", "train.optimizer.lr", "positive", default=1e-6),
    to("num_generations", "rollout.group_size", "integer >= 2", default=8),
    ignored("num_generations_eval", "see braid.eval.samples_per_prompt", "count?"),
    to("steps_per_generation generation_batch_size", "", "count?", unless_null("one step's completions"), part_of("per_device_train_batch_size")),
    to("num_iterations", "train.passes_per_round", "count", default=1),
    to("max_prompt_length", "data.max_prompt_tokens data.overlong", "count?", unless_null("no limit"),
       lambda v, _: Became({"data.max_prompt_tokens": v, "data.overlong": "truncate_left"}), note="of TRL before 1.0: cut at their beginning"),
    to("max_completion_length", "rollout.sampling.max_new_tokens", "count", default=512, note="default: 512, before TRL 1.0 256"),
    to("temperature", "rollout.sampling.temperature", "positive", default=1.0, note="also in training, for all log-probs"),
    to("{top_p,repetition_penalty}", "rollout.sampling.*", "positive", default=1.0),
    to("top_k", "rollout.sampling.*", "int?", lambda v, _: max(v or 0, 0), default=0, note="0: off"),
    to("min_p", "rollout.sampling.*", "share?", lambda v, _: v or 0.0, default=None),
    to("chat_template_kwargs", "data.chat_template_kwargs", "{any}?", unless_null()),
    missing("generation_kwargs generation_kwargs.*", "use the keys of sampling, or braid.rollout.sampling"),
    to("shuffle_dataset", "data.shuffle", "bool", default=True),
    # loss
    to("loss_type", "algorithm.policy_loss.kind algorithm.aggregation", choice(*_LOSSES), _loss, default="dapo",
       note="dapo: a mean over the step's tokens; grpo: over answers of means; dr_grpo: sums over max_completion_length"),
    to("beta", "algorithm.kl_coef", "non-negative", default=0.0, note="k3 in the loss; 0: no reference"),
    to("epsilon", "algorithm.policy_loss.clip_low", "non-negative", _CLIPPED, default=0.2),
    to("epsilon_high", "algorithm.policy_loss.clip_high", "non-negative?", _HAS_BOUNDS, _bound, default=None, note="null: epsilon; of cispo the bound of the ratio itself"),
    to("delta", "algorithm.policy_loss.dual_clip", "number > 1?", _CLIPPED, unless_null("no bound"),
       refused(lambda v, s: v < 1 + (s["epsilon_high"] or s["epsilon"]) and "is below 1 + epsilon_high; raise it"),
       note="upper bound of the ratio where A < 0"),
    to("importance_sampling_level", "algorithm.policy_loss.ratio_level", "token|sequence", _SEQUENCES, default="token",
       note="sequence: the geometric mean of a sequence (GSPO)"),
    to("sapo_temperature_{pos,neg}", "algorithm.policy_loss.tau_{positive,negative}", "positive", needs("loss_type", "sapo")),
    to("vespo_{k_pos,lambda_pos,k_neg,lambda_neg}", "algorithm.policy_loss.{k_positive,lambda_positive,k_negative,lambda_negative}", "non-negative", needs("loss_type", "vespo")),
    to("scale_rewards", "algorithm.advantage.normalize_by_std", "bool or group|batch|none|mean", _scaled, default="group"),
    to("mask_truncated_completions", "algorithm.mask_truncated", "bool", default=False),
    missing("multi_objective_aggregation", "use sum_then_normalize, or braid.algorithm.advantage=gdpo", default="sum_then_normalize"),
    missing("top_entropy_quantile", "set it to 1", default=1.0),
    missing("off_policy_mask_threshold", "set braid.algorithm.policy_loss to {kind: sequence_mask, max_gap: ...}"),
    missing("{use_bias_correction_kl,sync_ref_model}", "set it to false; see braid.reference.update_every_epochs", default=False),
    ignored("ref_model_mixup_alpha ref_model_sync_steps", "for sync_ref_model only"),
    missing("ref_model", "set braid.reference.path"),
    # rewards
    to("reward_funcs", "reward.parts", "text or list", _rewards, note="accuracy_reward compares with the column `solution`"),
    to("reward_weights", "", "[number]?", unless_null("1 each"), part_of("reward_funcs")),
    to("reward_model_name_or_path", "reward.parts", "text?", unless_null("no reward model"),
       lambda v, _: Became({"reward.parts": [{"kind": "model", "path": v}]})),
    missing("reward_processing_classes", "use the reward model's own tokenizer"),
    # engine
    to("use_vllm", "rollout.engine.kind", "bool", BY_ENGINE, lambda v, _: "vllm" if v else "native", default=False),
    to("vllm_mode", "rollout.engine.servers", "server|colocate", _VLLM, _SERVED,
       lambda v, s: _servers(s["vllm_server_base_url"], s) if v == "server" else no_effect("engines share the devices"), default="colocate",
       note="default: colocate, before TRL 1.0 server"),
    to("vllm_server_base_url", "", "text?", unless_null(), _VLLM, part_of("vllm_mode")),
    to("vllm_server_host", "", "text", _VLLM, part_of("vllm_mode"), default="0.0.0.0"),
    to("vllm_server_port", "", "count", _VLLM, part_of("vllm_mode"), default=8000),
    to("vllm_gpu_memory_utilization", "rollout.engine.memory_fraction", "fraction", _VLLM, _COLOCATED, _SERVED, default=0.3),
    to("vllm_tensor_parallel_size", "rollout.engine.tensor_parallel", "count", _VLLM, _COLOCATED, _SERVED, default=1),
    to("vllm_max_model_length", "rollout.engine.max_model_tokens", "count?", _VLLM, _SERVED, unless_null("the longest prompt and answer")),
    ignored("vllm_enable_sleep_mode vllm_server_timeout vllm_group_port vllm_model_impl", "engines are started, reached and freed by the run itself"),
    missing("vllm_structured_outputs_regex vllm_guided_decoding_regex", "remove it"),
    to("vllm_importance_sampling_correction", "algorithm.corrections", "bool", _correction, default=True, note="where vLLM samples"),
    to("vllm_importance_sampling_mode", "algorithm.corrections", "token_truncate|token_mask|sequence_truncate|sequence_mask", _VLLM,
       needs("vllm_importance_sampling_correction"), _correction, default="sequence_mask"),
    to("vllm_importance_sampling_cap", "algorithm.corrections", "positive", _VLLM, needs("vllm_importance_sampling_correction"), _correction, default=3.0),
    ignored("use_transformers_paged use_transformers_continuous_batching cache_implementation", "answers are sampled by braid's engine"),
    # reports
    ignored("log_completions num_completions_to_print wandb_log_unique_prompts log_unique_prompts log_completions_hub_repo log_multimodal",
            "answers are stored in samples/ in the run's folder"),
    missing("max_tool_calling_iterations", "use braid.env.kind=tools, with max_turns"))
# fmt: on
