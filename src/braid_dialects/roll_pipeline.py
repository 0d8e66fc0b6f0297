"""ROLL's pipeline keys: the run, sizes, rollouts, evaluation, algorithm; keys of other pipelines."""

from __future__ import annotations

from math import ceil, inf
from typing import Any

from . import roll_facts as facts
from .conditions import needs, refused, unless
from .conversions import (
    algorithm,
    as_is,
    computed,
    folder_name,
    mapped,
    null_as,
    or_null,
    presets,
    sets,
    unless_null,
)
from .roll_agentic import estimator
from .roll_facts import HAS_RATIO, NO_VALIDATION, ONE_PROCESS, kl_place, variant
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source, implied, unsupported
from .values import Takes, choice, takes

_TRACKERS = {
    "tensorboard": True,
    "wandb": Became({"report.tensorboard": False, "report.wandb.mode": "online"}),
    "swanlab": Became({"report.tensorboard": False, "report.swanlab.mode": "cloud"}),
    "trackio": unsupported("use tensorboard, wandb or swanlab"),
    "stdout": False,
    "ml_tracker": unsupported("use tensorboard, wandb or swanlab"),
}


def with_batches(value: Any, source: Source) -> Became:
    """Set the key's own native keys, and the optimizer steps that follow from it."""
    return Became(dict.fromkeys(source.native, value) | facts.batches(source))


def _episode(value: Any, source: Source) -> Any:
    """Limits of an agentic episode and of its turns."""
    if not facts.is_agentic(source):
        return value
    limits = {"env.max_context_tokens": facts.context(source)}
    return Became(limits | {"rollout.sampling.max_new_tokens": facts.max_new_tokens(source)})


def _eval_length(_: Any, source: Source) -> Any:
    prompt, whole = source["val_prompt_length"], source["val_sequence_length"]
    if prompt is None and whole is None:
        return implied("evaluation uses the lengths of training")
    if prompt is None or whole is None:
        raise ValueError("set both val_prompt_length and val_sequence_length, or neither")
    if whole <= prompt:
        why = f"val_sequence_length={whole} leaves no room for a response with val_prompt_length={prompt}"
        raise ValueError(f"{why}; raise it")
    if prompt != source["prompt_length"]:
        return unsupported("set it to prompt_length; evaluation uses the prompt length of training")
    return facts.eval_max_new_tokens(source)


# One rule per line.
# fmt: off
_NO_VALUES = needs("adv_estimator", "gae")
_NO_EPISODES = unless(facts.is_agentic, "not read in ROLL's agentic pipeline")
PIPELINE = rows(
    # The run
    to("exp_name", "run.name", "text", folder_name),
    to("seed", "run.seed", "natural", default=42),
    to("output_dir", "run.output_dir", "path", default="./output", note="parent of the run folder"),
    to("max_steps", "run.max_rounds", "count", default=500, note="a step is a round"),
    to("save_steps", "checkpoint.every_rounds", "count", default=50, note="and after the last round"),
    to("max_ckpt_to_keep", "checkpoint.keep", "natural", or_null, default=0, note="0 keeps all"),
    to("checkpoint_config.output_dir", "checkpoint.dir", "path", note="unchanged; ROLL appends the time"),
    always("checkpoint_config.type", "braid always does this", choice("file_system")),
    ignored("checkpoint_config.{async_upload,use_hard_links,keep_local_file}",
            "checkpoints are written directly to their final location"),
    to("resume_from_checkpoint", "run.resume", "bool or path",
       lambda v, _: v if isinstance(v, str) else "latest" if v else "none", default=False),
    to("track_with", "report.tensorboard", _TRACKERS, default="tensorboard"),
    to("tracker_kwargs.log_dir", "report.dir", "path", needs("track_with", "tensorboard")),
    to("tracker_kwargs.{project,name}", "report.{tracker}.*", "text",
       needs("track_with", "wandb", "swanlab")),
    missing("tracker_kwargs.api_key", "set the environment variable WANDB_API_KEY or SWANLAB_API_KEY"),
    missing("tracker_kwargs.*", "configure it in the tracker itself"),
    always("logging_steps", "metrics are written every round", "count"),
    ignored("logging_dir base_dir profiler_output_dir otlp_output_dir", "files are in the run folder"),
    to("rollout_dump_dir", "", "path?", lambda v, _: Became(
        {} if v is None else {"report.samples_every_rounds": 1}, "implied",
        "trajectories are stored in samples/ of the run folder")),
    to("profiler_memory", "train.record_memory", "bool", default=False, note="in memory/ of the run folder"),
    missing("profiler_timeline", "use profiler_memory, or a sampling profiler such as py-spy", default=False),
    to("rpc_timeout", "cluster.call_timeout_s", "count", ONE_PROCESS, default=3600),
    to("system_envs", "cluster.env", "{text}"),
    ignored("num_nodes num_gpus_per_node",
            "detected at the start; see braid.cluster.num_nodes and devices_per_node"),
    missing("model_download_type", "download the model and set the path of its folder",
            default="HUGGINGFACE_HUB"),
    to("model_update_buffer_size_mb", "rollout.weight_sync.bucket_bytes", "count", ONE_PROCESS,
       lambda v, _: v * 2**20, default=1024),
    # Models
    to("pretrain", "model.path", "path",
       unless(lambda s: s["actor_train.model_args.model_name_or_path"] not in (None, s["pretrain"]),
              "overridden by actor_train.model_args.model_name_or_path, unlike in ROLL")),
    to("reward_pretrain", "critic.path", "path", _NO_VALUES, note="initial model of the critic"),
    # Sizes
    to("rollout_batch_size", "rollout.prompts_per_round", "count",
       refused(lambda v, s: facts.backend(s, "actor_train") == "megatron" and not facts.is_agentic(s) and
               v % (dp := facts.data_parallel(s, "actor_train")) and
               f"{v} prompts cannot be divided among dp={dp} ranks; set it to a multiple of {dp}"),
       lambda v, s: Became(facts.round_size(s)) if facts.is_agentic(s) else with_batches(v, s), default=128,
       note=
           "prompts per round (agentic: trajectories), of S = rollout_batch_size * "
           "num_return_sequences_in_group trajectories"),
    to("num_return_sequences_in_group", "rollout.group_size", "count", _NO_EPISODES, with_batches, default=1,
       note="samples per prompt; in braid a mini-batch contains all samples of its prompts"),
    to("prompt_length", {"data.max_prompt_tokens": as_is, "{limit}": computed(facts.max_new_tokens)}, "count",
       unless(lambda s: facts.is_agentic(s) and s["sequence_length"], "sequence_length limits the episode"),
       _episode, default=1024, note="longer prompts are dropped; ROLL also drops those of 5 tokens or fewer"),
    to("response_length", "rollout.sampling.max_new_tokens", "count?",
       unless(lambda s: s["sequence_length"] is not None, "overridden by sequence_length"),
       refused(lambda v, _: v is None and "set response_length, or sequence_length (prompt plus response)"),
       _episode, computed(facts.max_new_tokens), default=None),
    to("sequence_length", "rollout.sampling.max_new_tokens", "integer >= 2?",
       unless_null("prompt_length + response_length", implied),
       refused(lambda v, s: v <= (prompt := s["prompt_length"]) and
               not facts.is_agentic(s) and
               f"{v} leaves no room for a response with prompt_length={prompt}; raise it"),
       _episode, computed(facts.max_new_tokens)),
    # How rollouts run
    to("async_generation_ratio", "pipeline.max_lag pipeline.on_new_weights pipeline.over_lag", "non-negative",
       lambda value, source: sets(ceil(value), "interrupt", "drop")(value, source) if value else
       implied("sampling and training take turns"), default=0,
       note="rounded up; running requests continue with new weights, and older groups are dropped"),
    always("generate_opt_level", "continuous batching is always used", choice(0, 1)),
    always("is_num_return_sequences_expand", "each sample is a request; prefills are shared", "bool"),
    missing("is_use_additional_prompts", "set it to false: keeping the first finished answers favors short "
            "ones; use a query_filter, which samples until the batch is full", default=False),
    ignored("max_additional_running_prompts rollout_mock.{mode,dump_dir} transfer_backend.backend_config",
            "for a feature that is not supported"),
    to("max_running_requests", "rollout.engine.max_running", "count", default=128, note="per engine"),
    ignored("router_args.{router_name,router_config}", "a group always goes to the least loaded engine"),
    missing("reward_system_config.skip_special_tokens",
            "set it to true; rewards read text without special tokens", default=True),
    missing("user_defined_rollout_loop_cls", "use an environment or a reward function"),
    missing("rollout_mock.enable", "set it to false; trajectories are stored in samples/ of the run folder",
            default=False),
    missing("transfer_backend.backend_name", "remove it; rows are transferred by Ray's object store"),
    # Evaluation
    to("eval_steps", "eval.every_rounds", "natural", NO_VALIDATION, default=10),
    to("val_batch_size", "eval.batch_prompts", "count", NO_VALIDATION,
       lambda v, s: Became({"env.eval_episodes": facts.eval_episodes(s)}) if facts.is_agentic(s) else v,
       default=128, note="agentic: episodes"),
    to("val_prompt_length val_sequence_length", "eval.sampling.max_new_tokens", "count?", _NO_EPISODES, NO_VALIDATION,
       _eval_length,
       note="at most val_sequence_length - val_prompt_length new tokens"),
    # Other features
    missing("tag_to_template", "use a single template for all rows: data_args.template"),
    missing("teacher.*",
        "braid has one reference, which is the teacher with use_opd: set use_opd to true and remove the other "
        "model; several teachers are braid.reference.teachers"),
    ignored("use_policy_loss_type use_topr_loss postive_loss_coef positive_loss_coef use_topr_neg_loss_coef "
            "balance_length minibatch_data_iter_num l2 use_reward_scaling use_reward_norm add_len_reward "
            "report_length_and_rewards length_profiler_dir val_greedy val_n_sample mask_type local_rank "
            "save_logging_board_dir offload_nccl reward_norm reward_shift reward_scale use_remove_padding "
            "token_level_loss dataset_filter.*", "not read by ROLL"),
    ignored("offload_backend is_offload_states is_offload_optimizer_states_in_train_step",
            "roles on the same devices always take turns"),
    ignored("vlm_filter.*", "prompts above prompt_length, images counted, are dropped; as its default"),
    ignored("hydra.*", "for Hydra's working directory only"),
    to("defaults", "", "any", presets),
)
# fmt: on


# Advantages and loss

_AGGREGATIONS = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum", "seq-mean-token-sum-norm": "token_sum_constant",
}  # fmt: skip
_KL_COEFS = {"loss": "kl_loss_coef", "reward": "init_kl_coef", "advantage": "opd_kl_coef"}
_KL_PENALTIES = {"kl": "k1", "abs": "abs", "mse": "k2", "k3": "k3", "full": "full"}
_LEVELS = {"token": "token", "segment": "turn_geometric", "geometric": "geometric", "sequence": "sequence"}
_OTHER_ESTIMATOR = "use gae, reinforce or grpo; it belongs to ROLL's agentic pipeline"
_ESTIMATORS = {
    "gae": "gae",
    "reinforce": "reinforce",
    "grpo": lambda _, source: (
        algorithm(advantage={"kind": "grpo", "normalize_by_std": True})
        if facts.is_plain_grpo(source)
        else algorithm(advantage={"kind": "reinforce"}, reward_mean="group", reward_std="group")
    ),
    **dict.fromkeys(("gigpo", "step_reinforce", "agentic_reinforce"), unsupported(_OTHER_ESTIMATOR)),
}
_STATISTICS = {name: name for name in ("batch", "group", "running")} | {"None": "none", None: "none"}


def _clip(_: Any, source: Source) -> Became:
    low, high = ("pg_clip_low", "pg_clip_high") if source["use_pg_clip_range"] else ("pg_clip", "pg_clip")
    dual = 1.0 + 2.0 * source["pg_clip"] if source["dual_clip_loss"] else "off"
    return Became(
        {
            "algorithm.policy_loss.clip_low": float(source[low]),
            "algorithm.policy_loss.clip_high": float(source[high]),
            "algorithm.policy_loss.dual_clip": dual,
        }
    )


def _kl(_: Any, source: Source) -> Became:
    """The single KL term, in the loss, the reward or the advantage, or none."""
    if (where := kl_place(source)) is None:
        return algorithm(kl_coef=0.0)
    coef, estimator = source[_KL_COEFS[where]], _KL_PENALTIES[source["kl_penalty"]]
    if where == "loss":
        estimator = "k3"
    elif where == "advantage" and (opd_coef := source["reference.opd_kl_coef"]) is not None:
        coef = opd_coef
    clamp = 10.0 if estimator == "k3" else "off"
    return algorithm(kl_coef=float(coef), kl_in=where, kl_estimator=estimator, kl_clamp=clamp)


def _opd(value: bool, source: Source) -> Became:
    """ROLL's distillation: A - opd_kl_coef * KL, or that KL alone, before whitening and clipping. Refuses what braid
    computes otherwise. Raises ValueError."""
    if not value:
        return implied("no distillation")
    for other, coef in (("use_kl_loss", "kl_loss_coef"), ("add_token_level_kl", "init_kl_coef")):
        if not source["is_pure_opd"] and source[other] and source[coef] > 0:
            raise ValueError(
                f"adds a KL term to that of {other}, but braid has only one; set {other} to false, or use_opd"
            )
    if source["kl_penalty"] == "full":
        raise ValueError(
            "with kl_penalty=full, ROLL sums over the tokens of a response what it means to sum over the "
            "vocabulary; set kl_penalty to kl, abs or mse"
        )
    if source["force_disable_old_logprobs_recompute"]:
        raise ValueError(
            "takes the KL of the policy before the update; set force_disable_old_logprobs_recompute to false"
        )
    if source["async_generation_ratio"] and not facts.recomputes_old_logprobs(source):
        raise ValueError(
            "with async_generation_ratio above 0 and no recomputed log-probs, ROLL takes the KL of the "
            "older policies that sampled; set enable_old_logprobs_recompute to true"
        )
    return _kl(value, source)


def _old_logprobs(_: Any, source: Source) -> str:
    if kl_place(source) == "advantage":
        return "recompute"  # the KL is of the policy before the update
    if source["force_disable_old_logprobs_recompute"]:
        return "current"
    return "recompute" if source["enable_old_logprobs_recompute"] else "auto"


_FILTER: dict[str, tuple[Takes, Any]] = {
    name: (takes(spec), default)
    for name, spec, default in (
        ("enabled", "bool", False), ("agg_type", "|".join(_LEVELS), "token"),
        ("ratio_enabled", "bool", True), ("ratio_low", "non-negative", 0.8), ("ratio_high", "positive", 1.2),
        ("diff_enabled", "bool", False), ("diff_low", "number", -0.2), ("diff_high", "positive", 0.2),
    )
}  # fmt: skip
"""Keys of a filter -> allowed values, ROLL's default."""
_FILTERS = Takes(
    f"a list of filters with {', '.join(f'{name} ({values.words})' for name, (values, _) in _FILTER.items())}",
    lambda v: (
        takes("[{any}]").accepts(v)
        and all(key in _FILTER and _FILTER[key][0].accepts(each[key]) for each in v for key in each)
    ),
)


def _corrections(_: Any, source: Source) -> Became:
    """Corrections in ROLL's order: importance weights, then filters."""
    made: list[dict[str, Any]] = []
    weight = "train_infer_correction.is_weight"
    if source[f"{weight}.enabled"]:
        level, high = _LEVELS[source[f"{weight}.weight_type"]], source[f"{weight}.upper_bound"]
        made.append({"level": level, "mode": "truncate", "low": 0.0, "high": high})
    for written in source["train_infer_correction.filters"] or []:
        keys = {name: written.get(name, default) for name, (_, default) in _FILTER.items()}
        for name, measure in (("ratio", "ratio"), ("diff", "difference")):
            if keys["enabled"] and keys[f"{name}_enabled"]:
                bounds = {"low": keys[f"{name}_low"], "high": keys[f"{name}_high"]}
                made.append(
                    {"level": _LEVELS[keys["agg_type"]], "mode": "mask", "measure": measure, **bounds}
                )
    return algorithm(corrections=made, old_logprobs="recompute") if made else implied("no correction")


def _difficulty_mask(value: bool, source: Source) -> Became:
    if not value:
        return implied("all groups are used")
    low, high = source["difficulty_low_threshold"], source["difficulty_high_threshold"]
    if not any(filters := facts.query_filters(source)):
        bounds = {"min_mean": low, "max_mean": high, "then": "mask"}
        return Became({f"rollout.filter.{name}": bound for name, bound in bounds.items()})
    if all(each.get("min_mean", -inf) >= low and each.get("max_mean", inf) <= high for each in filters):
        return implied("the query filter drops all groups that it masks")
    raise ValueError(
        f"masks groups (mean reward <= {low:g}, or >= {high:g}) that the query filter keeps, but braid has a "
        "single filter; widen its thresholds to those of the query filter, or set it to false"
    )


_LONG_FAILURES = computed(lambda s: s["error_max_len_threshold"] if s["error_max_len_clip"] else "off")

# One rule per line.
# fmt: off
_BY_GROUP = unless(lambda s: s["adv_estimator"] == "grpo", "adv_estimator=grpo normalizes by the group")
_PPO_ONLY = unless(lambda s: variant(s) != "ppo", lambda s: f"pg_variant={variant(s)} has fixed bounds")
_UNREAD_CLIP = unless(lambda s: s["use_pg_clip_range"] and not s["dual_clip_loss"],
                      "overridden by use_pg_clip_range")
_IN_LOSS = unless(lambda s: kl_place(s) != "loss", "there is no KL in the loss (use_kl_loss, kl_loss_coef)")
_BEFORE_UPDATE = unless(lambda s: kl_place(s) in (None, "loss"),
                        "there is no KL in the reward (add_token_level_kl) or the advantage (use_opd)")
_OF_OPD = unless(lambda s: not facts.distils(s), "there is no distillation (use_opd, is_pure_opd)")
_IN_REWARD = unless(lambda s: kl_place(s) != "reward", "there is no KL in the reward (add_token_level_kl)")
_FILTERED = unless(lambda s: any(facts.query_filters(s)),
                   "the query filter drops all groups that difficulty_mask masks")
_MASKED, _WEIGHTED = needs("difficulty_mask"), needs("train_infer_correction.is_weight.enabled")
ALGORITHM = section("", "algorithm")(
    # Advantages
    to("adv_estimator", ".advantage.kind", choice(*_ESTIMATORS),
       lambda v, s: algorithm("set by is_pure_opd", advantage={"kind": "reinforce"}) if s["is_pure_opd"] else v,
       lambda v, s: (estimator if facts.is_agentic(s) else mapped(_ESTIMATORS))(v, s), default="gae",
       note="grpo: (r - mean) / (std + 1e-6); with gamma < 1 or KL in the reward, reinforce with rewards "
       "normalized so"),
    to("gamma", ".advantage.gamma", "share",
       lambda v, s: algorithm("set by is_pure_opd", advantage={"gamma": 0.0}) if s["is_pure_opd"] else v,
       unless(lambda s: s["adv_estimator"] in ("gigpo", "step_reinforce"), "step_reward_gamma is used instead"),
       unless(facts.is_plain_grpo, "adv_estimator=grpo has a single reward, at the end"), default=1.0),
    to("lambd", ".advantage.gae_lambda", "share", _NO_VALUES,
       unless(lambda s: s["is_pure_opd"], "is_pure_opd uses no critic"), default=0.95),
    to("norm_mean_type", ".reward_mean", _STATISTICS, _NO_EPISODES, _BY_GROUP, default=None,
       note="over the round; in ROLL over each domain"),
    to("norm_std_type", ".reward_std", _STATISTICS, _NO_EPISODES, _BY_GROUP, default=None,
       note="divides by the unbiased deviation + 1e-6"),
    to("reward_clip", {".reward_clip": as_is,
                       ".token_reward_clip": lambda v, s: v if kl_place(s) == "reward" else None},
       "positive?", unless_null("no clipping", implied),
       note="clips a response's reward after normalisation, and each token's after subtracting KL"),
    to("whiten_rewards", ".*", "bool", default=False, note="over the tokens of the round"),
    to("whiten_advantages", ".*", "bool", default=False, note="over the tokens of the round; in ROLL over each domain"),
    to("advantage_clip", ".*", "positive?", null_as("off"), default=None, note="after whitening"),
    to("critic_warmup", "critic.warmup_rounds", "natural", _NO_VALUES, default=0, note="critic-only rounds"),
    to("value_clip", ".*", "positive?", _NO_VALUES, null_as("off"), default=None),
    # Loss
    to("ppo_epochs", "{trained}.passes_per_round", "count", default=1),
    to("pg_clip", ".policy_loss.clip_high", "positive", _PPO_ONLY, _UNREAD_CLIP, _clip, default=0.2,
       note="ratio in [1 - pg_clip, 1 + pg_clip]; the dual clip is 1 + 2 pg_clip"),
    to("use_pg_clip_range", ".policy_loss.clip_high", "bool", _PPO_ONLY, _clip, default=False),
    to("pg_clip_low pg_clip_high", ".policy_loss.clip_high", "non-negative", _PPO_ONLY, needs("use_pg_clip_range"), _clip,
       default=0.2),
    to("dual_clip_loss", ".policy_loss.dual_clip", "bool", _PPO_ONLY, _clip, default=False,
       note="for negative advantages the loss is at most -(1 + 2 pg_clip) A"),
    to("importance_sampling", ".policy_loss.ratio_level", {"token": "token", "seq": "sequence"},
       HAS_RATIO, default="token",
       note="seq: exp(mean log-ratio) for all tokens, as in GSPO"),
    to("loss_agg_mode", ".aggregation", _AGGREGATIONS, default="seq-mean-token-mean",
       note="over the optimizer step; ROLL's seq-mean-token-sum-norm divides by padded lengths"),
    to("rl_loss_coef", ".policy_loss_coef", "non-negative", default=1.0),
    to("entropy_loss_coef", ".entropy_coef", "number", default=0.0, note="loss - coef * entropy"),
    to("use_kl_loss", ".kl_coef", "bool", _kl, default=False,
       note="+ kl_loss_coef * k3(policy, reference), clamped to 10, in the loss"),
    to("kl_loss_coef", ".kl_coef", "non-negative", _IN_LOSS, _kl, default=0.0),
    to("add_token_level_kl", ".kl_coef", "bool",
       refused(lambda v, s: v and kl_place(s) == "loss" and "conflicts with use_kl_loss: braid has only one "
               "KL term, in the loss or in the reward; choose one"),
       _kl, default=False, note="reward_t - init_kl_coef * KL_t for each token"),
    to("init_kl_coef", ".kl_coef", "non-negative", _IN_REWARD, _kl, default=0.2,
       note="above 0, ROLL loads a reference and recomputes old log-probs; here only if KL is used"),
    to("kl_penalty", ".kl_estimator", choice(*_KL_PENALTIES), _BEFORE_UPDATE, _kl, default="kl",
       note="d = log policy - log reference. kl: d; mse: d^2/2; k3: exp(-d) + d - 1; full: over the "
       "vocabulary. The KL in the loss is always k3"),
    to("target_kl", ".kl_target", "positive?", _IN_REWARD, null_as("off"), default=None,
       note="coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * n / kl_horizon after each round"),
    to("kl_horizon", ".kl_horizon", "count", _IN_REWARD, needs("target_kl"), default=10000),
    to("use_opd", ".kl_coef", "bool", _opd, default=False,
       note=
           "A - opd_kl_coef * KL(policy before the update, teacher) for each token, before whitening and "
           "clipping"),
    to("is_pure_opd", ".kl_coef", "bool", _opd, default=False,
       note="-opd_kl_coef * KL alone is the advantage, and rewards are only reported; implied by student_train"),
    to("opd_kl_coef", ".kl_coef", "non-negative", _OF_OPD,
       unless(lambda s: s["reference.opd_kl_coef"] is not None, "overridden by that of the teacher"), _kl, default=1.0),
    to("reference.opd_kl_coef", ".kl_coef", "non-negative?", _OF_OPD, unless_null("1"), _kl),
    missing("reference.tag_included", "remove it: the teacher distils all rows"),
    always("enable_reference", "a reference model is loaded whenever a KL term needs it", "bool"),
    to("enable_old_logprobs_recompute", ".old_logprobs", "bool", _old_logprobs,
       default=False, note="false: only if a round has several steps or another feature needs them"),
    to("force_disable_old_logprobs_recompute", ".old_logprobs", "bool",
       refused(lambda v, s: v and s["enable_old_logprobs_recompute"] and
               "contradicts enable_old_logprobs_recompute; choose one"), _old_logprobs, default=False,
       note="every ratio is 1, so nothing is clipped"),
    section("train_infer_correction")(
        to("is_weight.enabled", ".corrections", "bool", _corrections, default=False,
           note="loss * w, w = exp(old log-prob - the engine's) clamped to [0, upper_bound]"),
        to("is_weight.weight_type", ".corrections", choice(*_LEVELS), _WEIGHTED, _corrections,
           default="token"),
        to("is_weight.upper_bound", ".corrections", "positive", _WEIGHTED, _corrections, default=1.2),
        missing("is_weight.detach", "set it to true; weights have no gradient", default=True),
        to("filters", ".corrections", _FILTERS, _corrections,
           note="masks tokens with ratios or differences of probabilities out of bounds")),
    to("max_len_mask", ".mask_truncated", "bool", default=False),
    to("difficulty_mask", "rollout.filter.min_mean", "bool", _difficulty_mask,
       note="keeps groups with low < mean reward < high; ROLL compares the mean score, which is 0 or 1"),
    to("difficulty_low_threshold", "rollout.filter.min_mean", "number", _MASKED, _FILTERED, default=0.0),
    to("difficulty_high_threshold", "rollout.filter.max_mean", "number", _MASKED, _FILTERED, default=1.0),
    to("error_max_len_clip", ".mask_long_failures", "bool", _LONG_FAILURES, default=False,
       note="masks responses of at least error_max_len_threshold tokens with score 0"),
    to("error_max_len_threshold", ".mask_long_failures", "count", needs("error_max_len_clip"),
       _LONG_FAILURES, default=9_999_999_999),
    missing("difficulty_loss_weight length_loss_weight",
            "there are no sample weights; use difficulty_mask, or loss_agg_mode", default=False),
    to("max_grad_norm", "{trained}.max_grad_norm", "non-negative", or_null, default=1.0),
)

OTHER_PIPELINES = missing(
    "ipo beta label_smoothing chosen_key rejected_key "
    # distillation
    "student_pretrain teacher_pretrain student.* question_key answer_key logits_topk distill_loss_weight "
    "kd_temperature teacher_temperature kd_objective adaptive_kl_alpha skew_lambda distill_on_prompt "
    "logits_transfer_backend",
    "remove it; it belongs to another of ROLL's pipelines: to preferences, which are not supported, or to distillation on a "
    "file, which has the sections student and teacher")
# fmt: on
ALIASES = {
    "use_additional_prompts": "is_use_additional_prompts",
    "router_args.max_running_requests": "max_running_requests",
    "global_template": "actor_train.data_args.template",
}
"""Other spellings of keys, used by ROLL's examples."""
