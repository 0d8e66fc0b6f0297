"""The config language of verl: files and scripts of `main_ppo`, and of the recipe DAPO.

verl's batch sizes count prompts, its micro batch sizes count samples of one GPU. All roles share all devices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import verl_facts as facts
from .conditions import BY_BACKEND, BY_ENGINE, needs, of_backend, of_engine, refused, unless
from .conversions import (
    algorithm,
    as_is,
    at_least_0,
    computed,
    folder_name,
    greedy_at_0,
    listed,
    null_as,
    opposite,
    part_of,
    policy_loss,
    positive,
    unless_null,
    wandb_mode,
)  # fmt: skip
from .launcher import CONFIG_NAME, VERL_CONFIGS
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Dialect, Source, implied, no_effect, table, unsupported
from .values import choice, list_of
from .verl_facts import NO_CRITIC, NO_EVALUATION, ONE_PROCESS, SERVED, A, used

_ALGORITHM, _ROLLOUT, _LOSS = "algorithm", f"{A}.rollout", f"{A}.actor.policy_loss.loss_mode"


# Data and rewards


def _sources(value: str | list[str], source: Source) -> list[dict[str, Any]]:
    """One native source of all files, in verl's columns; none without files."""
    columns = {
        "prompt_key": source["data.prompt_key"],
        "answer_key": "reward_model.ground_truth",
        "source_key": source["data.reward_fn_key"],
    }
    if facts.reads_images(source):
        columns["images_key"] = source["data.image_key"] or "images"
    files = [os.path.expanduser(path) for path in facts.paths(value)]
    return [{"kind": "file", "path": files, **columns}] if files else []


_GSM8K = {"kind": "exact", "name": "gsm8k", "pattern": r"####\s*(-?[\d.,]*\d)", "ignore": ",$"}
_DAPO = {"kind": "math", "name": "dapo", "pattern": r"(?i)Answer\s*:\s*([^\n]+)"}
_MATH = {"kind": "math", "name": "math"}


def _reward(_: str, source: Source) -> Became:
    """The rule of the data, which verl chooses by each row's `data_source`."""
    if source["custom_reward_function.path"] or "reward.parts" in source.braid_values:
        return no_effect("the reward is a function of the user's own")
    if facts.is_dapo(source):
        native: dict[str, Any] = {"reward.parts": [_DAPO], "reward.scale": 2.0, "reward.shift": -1.0}
        return Became(
            native,
            note="math_dapo: 1 if the text after the last `Answer:` is right, else -1 (0 in evaluation)",
        )
    are_gsm8k = ["gsm8k" in path.lower() for path in facts.paths(source["data.train_files"])]
    if all(are_gsm8k):
        return Became(
            {"reward.parts": [_GSM8K]}, note="gsm8k: 1 if the number after the last #### is right, else 0"
        )
    if not any(are_gsm8k):
        return Became(
            {"reward.parts": [_MATH]},
            note="1 if the boxed answer is right, else 0; others: braid.reward.parts",
        )
    parts = [{**_GSM8K, "sources": ["openai/gsm8k"]}, {**_MATH, "sources": ["*"]}]
    return Became(
        {"reward.parts": parts},
        note="openai/gsm8k: the number after the last ####; the others: the boxed answer",
    )


_OWN_REWARD = (
    "verl calls it with data_source, solution_str, ground_truth and extra_info; give it the parameters text and "
    "answer, and set braid.reward.parts=[{kind: function, path: FILE.py:NAME}]"
)


def _overlong(value: float, source: Source) -> Any:
    """The penalty before the reward's scale, which is applied after it."""
    return value / 2 if facts.is_dapo(source) and "reward.parts" not in source.braid_values else value


# Sizes


def _steps(value: int | None, source: Source) -> int:
    """Optimizer steps of a pass: the batch in mini-batches, both in prompts."""
    mini, batch = value or source[f"{A}.actor.ppo_mini_batch_size"] or 256, source["data.train_batch_size"]
    if batch % mini:
        raise ValueError(f"data.train_batch_size={batch} is not a multiple of {mini}; change one of them")
    return batch // mini


def _rows_and_tokens(value: int, source: Source) -> Became:
    """Samples per forward pass; the token limit is set so that it never binds."""
    whole = value * (source["data.max_prompt_length"] + source["data.max_response_length"])
    return Became({path: whole if path.endswith("tokens") else value for path in source.native})


def _of_all_gpus(value: int, source: Source) -> int:
    return max(1, value // facts.gpus(source))


def _is_dynamic(source: Source) -> bool:
    """Whether micro-batches of the role are limited in tokens: as the actor's are, unless it says so."""
    flag = ".log_prob_use_dynamic_bsz" if ".log_prob_" in source.at else ".use_dynamic_bsz"
    value = source[flag]
    return source[f"{A}.actor.use_dynamic_bsz"] if value is None else value


_BY_ROWS = unless(_is_dynamic, "use_dynamic_bsz counts tokens instead")
_BY_TOKENS = unless(
    lambda s: not _is_dynamic(s), "use_dynamic_bsz is off: micro-batches are counted in samples"
)


def _placed(_: Any, source: Source) -> Became:
    if facts.gpus(source) % (shared := facts.model_parallel(source)):
        raise ValueError(
            f"the {facts.gpus(source)} GPUs are not a multiple of the {shared} per model replica; change one"
        )
    settings = facts.cluster(source)
    return Became({path: settings[path] for path in source.native})


# Reports


def _loggers(value: str | list[str], _: Source) -> Became:
    names = facts.paths(value)
    if others := sorted({*names} - {"console", "wandb", "tensorboard", "swanlab", "file"}):
        return unsupported(f"{', '.join(others)}: use tensorboard, wandb or swanlab, or read metrics.jsonl")
    native: dict[str, Any] = {"report.tensorboard": "tensorboard" in names}
    if "swanlab" in names:
        native["report.swanlab.mode"] = "cloud"
    if "wandb" not in names:
        return Became(native)
    mode, why = wandb_mode()
    return Became(native | {"report.wandb.mode": mode}, note=why)


def _trackers(source: Source) -> list[str]:
    return [
        f"report.{name}" for name in ("wandb", "swanlab") if name in facts.paths(source["trainer.logger"])
    ]


def _resume(value: str, source: Source) -> Any:
    if value == "resume_path" and not source["trainer.resume_from_path"]:
        raise ValueError("needs the folder of a checkpoint in resume_from_path; set it, or use auto")
    return {"auto": "latest", "disable": "none"}.get(value) or source["trainer.resume_from_path"]


# Algorithm

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
    "gpg": algorithm("A = (r - mean) scaled by the share of groups with a signal", advantage={"kind": "gpg"}),
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
    **dict.fromkeys(
        ("geo_mean", "dppo_tv", "dppo_kl", "bypass_mode"),
        unsupported("use vanilla, gspo, sapo, cispo, clip_cov, kl_cov or gpg, or braid.algorithm.policy_loss"),
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
    if source[_LOSS] == "gspo":
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
_CHOSEN = rows(
    to(CONFIG_NAME, "{models}.backend.kind", choice(*VERL_CONFIGS), BY_BACKEND,
       unless(lambda s: s[f"{A}.actor.strategy"], f"overridden by {A}.actor.strategy"),
       computed(facts.backend), note="a config of verl's own, whose keys have verl's defaults"),
    to("model_engine", "{models}.backend.kind", "dp|megatron|fsdp", BY_BACKEND,
       unless(lambda s: s[f"{A}.actor.strategy"], f"overridden by {A}.actor.strategy"), computed(facts.backend)))

_DATA = section("data")(
    to("train_files", "data.train", "text or [text]", _sources, default="~/data/rlhf/gsm8k/train.parquet",
       note="columns prompt, reward_model.ground_truth, data_source"),
    to("val_files", "data.eval", "text or [text]?", NO_EVALUATION, _sources, default="~/data/rlhf/gsm8k/test.parquet"),
    to("prompt_key", "", "text", part_of("data.train_files"), default="prompt"),
    to("reward_fn_key", "", "text", part_of("data.train_files"), default="data_source"),
    to("image_key", "model.vision.train", "text", unless(lambda s: not facts.reads_images(s), "there are no images"),
       lambda _, s: "none" if s[f"{A}.actor.freeze_vision_tower"] or s[f"{A}.model.lora_rank"] else "all",
       note="images are read by the key; the vision tower is trained too"),
    missing("video_key", "only images are read", default="videos"),
    to("tokenizer", "model.tokenizer", "text?", unless_null("the model's own")),
    to("train_batch_size", "rollout.prompts_per_round", "count", default=1024, note="in prompts"),
    ignored("gen_batch_size", "each further batch has train_batch_size prompts, until the round is full"),
    to("val_batch_size", "eval.batch_prompts", "count?", NO_EVALUATION, unless_null("all at once"), default=None),
    to("max_prompt_length", "data.max_prompt_tokens", "count", default=512),
    to("max_response_length", "rollout.sampling.max_new_tokens", "count", default=512),
    to("truncation", "data.overlong", "error|left|right|middle",
       unless(lambda s: s[".filter_overlong_prompts"], "overridden by filter_overlong_prompts"),
       lambda v, _: unsupported("use left, right or error, or filter_overlong_prompts") if v == "middle" else
       {"error": "error"}.get(v, f"truncate_{v}"), default="error"),
    to("filter_overlong_prompts", "data.overlong", "bool", lambda v, _: "drop" if v else no_effect("truncation decides"),
       default=False),
    to("shuffle", "data.shuffle", "bool", default=True),
    to("seed", "data.seed", "natural?", unless_null()),
    to("validation_shuffle", "eval.shuffle", "bool", NO_EVALUATION, default=False),
    to("trust_remote_code", "model.trust_remote_code", "bool", default=False),
    to("apply_chat_template_kwargs", "data.chat_template_kwargs", "{any}?", lambda v, _: v or no_effect("no arguments")),
    always("return_raw_chat return_raw_input_ids return_full_prompt return_multi_modal_inputs",
           "rows keep their columns and messages", "bool"),
    ignored("filter_overlong_prompts_workers dataloader_num_workers use_shm tokenizer_kwargs cache_dir "
            "image_patch_size need_tools_kwargs", "data is read as it is needed"),
    to("train_max_samples", "data.train[0].limit", "int", lambda v, _: v if v > 0 else no_effect("-1: all rows")),
    to("val_max_samples", "data.eval[0].limit", "int", NO_EVALUATION, lambda v, _: v if v > 0 else no_effect("-1: all rows")),
    missing("custom_cls.{path,name} datagen.{path,name} sampler.{class_path,class_name} tool_config_path "
            "return_multi_modal_audio", "write the rows in the columns prompt, data_source and reward_model"))

_MODEL = section(f"{A}.model")(
    to("path", "model.path", "text", lambda v, _: os.path.expanduser(v)),
    to("tokenizer_path", "model.tokenizer", "text?", unless_null("the model's own")),
    to("custom_chat_template", "model.chat_template", "text?", unless_null("the tokenizer's")),
    to("trust_remote_code", "model.trust_remote_code", "bool", default=False),
    to("enable_gradient_checkpointing", "train.gradient_checkpointing", "bool", default=True),
    always("use_remove_padding", "rows are always packed", "bool"),
    to("use_liger", "train.liger_kernels", "bool", default=False),
    to("lora_rank", "model.lora.rank", "natural", lambda v, _: v or no_effect("0 trains all weights"), default=0),
    to("lora_alpha", "model.lora.alpha", "positive", needs(".lora_rank"), default=16),
    to("target_modules", "model.lora.targets", "text or [text]?", needs(".lora_rank"), listed, default="all-linear"),
    to("lora_adapter_path", "model.lora.path", "text?", unless_null("new adapters")),
    missing("exclude_modules", "list the wanted layers in target_modules"),
    missing("external_lib", "set braid.model.trust_remote_code, or register the model in your own code"),
    to("override_config.attn_implementation", "model.attention", {"flash_attention_2": "auto", "sdpa": "sdpa", "eager": "eager"}),
    missing("override_config.{attention_dropout,embd_pdrop,resid_pdrop,hidden_dropout}",
            "set it to 0: log-probs must be the same in rollout and training", default=0.0),
    missing("override_config.* override_config.model_config.* override_config.moe_config.*", "set it in config.json of the model folder"),
    missing("enable_activation_offload", "use gradient checkpointing", default=False),
    missing("{lora,mtp}.*", "set braid.model.lora, without draft heads", default=False),
    ignored("use_shm use_fused_kernels fused_kernel_options.* hf_config_path load_tokenizer tiled_mlp.*", "log-probs are computed in chunks of train.logprob_chunk_bytes"))

_ACTOR_LOSS = section(f"{A}.actor", "algorithm")(
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
       _reduction, default="token-mean", note="over the whole optimizer step; in gspo always seq-mean-token-mean"),
    to("loss_scale_factor", ".aggregation_constant", "count?", needs(".loss_agg_mode", "seq-mean-token-sum-norm"),
       unless_null("max_response_length")),
    to("use_token_level_loss", ".aggregation", {True: "token_mean", False: "sequence_mean_token_mean"}),
    to("entropy_coeff", ".entropy_coef", "number", default=0, note="default: 0, in verl 0.2 0.001"),
    to("use_kl_loss", ".kl_in", "bool", _kl_place, default=False, note="loss + kl_loss_coef * KL"),
    to("kl_loss_coef", ".kl_coef", "non-negative", needs(".use_kl_loss"), default=0.001),
    to("kl_loss_type", ".kl_estimator", "text", needs(".use_kl_loss"), _kl_kind, default="low_var_kl",
       note="low_var_kl: k3 = exp(-d) - 1 + d, bounded by 10"),
    to("tis_imp_ratio_cap", ".corrections", "number", lambda v, s: _correction(v, s) if v > 0 else no_effect("off"), default=-1))

_ALGORITHMS = section("algorithm", "algorithm")(
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

_WORKER = section(f"{{{A}.actor,critic}}", "{train}", used)(
    to("ppo_mini_batch_size", ".steps_per_pass", "count?", _steps, default=None,
       note="optimizer steps = train_batch_size / ppo_mini_batch_size, both in prompts"),
    to("ppo_micro_batch_size_per_gpu", ".micro_batch_rows .micro_batch_tokens", "count?", unless_null(), _BY_ROWS,
       _rows_and_tokens, note="memory only"),
    to("ppo_micro_batch_size", ".micro_batch_rows .micro_batch_tokens", "count?", unless_null(), _BY_ROWS, _of_all_gpus,
       _rows_and_tokens, note="samples of all GPUs; memory only"),
    ignored("use_dynamic_bsz", "decides whether micro-batches are counted in samples or tokens", "bool?"),
    to("ppo_epochs", ".passes_per_round", "count?", lambda v, s: v or s[f"{A}.actor.ppo_epochs"] or 1, default=None),
    to("shuffle", ".shuffle", "bool?", lambda v, s: bool(s[f"{A}.actor.shuffle"] if v is None else v), default=None),
    to("grad_clip", ".max_grad_norm", "positive", default=1.0),
    to("ulysses_sequence_parallel_size", ".sequence_parallel", "count?", of_backend("fsdp", "fsdp2"), unless_null(), default=1),
    ignored("checkpoint.* profiler.* profiler.tool_config.* profiler.tool_config.{nsys,npu,torch,torch_memory}.* data_loader_seed rollout_n",
            "checkpoints hold all of the training state; profilers are external"),
    section("optim", ".optimizer")(
        to("lr_warmup_steps", ".schedule.warmup_steps", "int?", lambda v, _: max(v or 0, 0), default=-1),
        to("lr_warmup_steps_ratio", ".schedule.warmup_fraction", "share",
           unless(lambda s: (s[".lr_warmup_steps"] or 0) > 0, "overridden by lr_warmup_steps"), default=0.0),
        to("weight_decay", ".weight_decay", "non-negative", default=0.01, note="decoupled; not of biases and norms"),
        to("betas", ".betas", list_of("share", length=2), default=[0.9, 0.999]),
        to("lr_scheduler_type", ".schedule.decay", "constant|cosine", default="constant"),
        to("lr_decay_style", ".schedule.decay", "constant|cosine|linear"),
        to("min_lr_ratio", ".schedule.min_ratio", "share?", needs(".lr_scheduler_type", "cosine"), lambda v, _: v or 0.0, default=0.0),
        to("clip_grad", "{train}.max_grad_norm", "positive", of_backend("megatron")),
        missing("num_cycles", "use 0.5", default=0.5),
        always("optimizer optimizer_impl", "the optimizer is AdamW", "text"),
        ignored("total_training_steps lr_decay_steps zero_indexed_step lr_warmup_init weight_decay_incr_style lr_wsd_decay_style "
                "lr_wsd_decay_steps min_lr use_checkpoint_opt_param_scheduler", "schedules follow from the run's length"),
        missing("override_optimizer_config override_optimizer_config.*", "use train.optimizer in docs/config.md")))

_ACTOR = section(f"{A}.actor", "train")(
    to("optim.lr", ".optimizer.lr", "positive", default=1e-6),
    to("strategy", "{models}.backend.kind", "fsdp|fsdp2|megatron?", BY_BACKEND, computed(facts.backend), default=None,
       note="fsdp by default, megatron with ppo_megatron_trainer"),
    to("ppo_max_token_len_per_gpu", ".micro_batch_tokens", "count", _BY_TOKENS, default=16384, note="memory only"),
    ignored("ppo_infer_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu counts"),
    to("use_torch_compile", ".compile", "bool", note="rounding only"),
    to("router_replay.mode", ".router_replay", {"disabled": "none", "R2": "old", "R3": "rollout"}),
    ignored("router_replay.{record_file,replay_file} use_remove_padding use_fused_kernels calculate_entropy calculate_sum_pi_squared "
            "sum_pi_squared_checkpointing entropy_from_logits_with_chunking entropy_checkpointing use_rollout_log_probs "
            "load_weight use_dynamic_bsz_balance", "log-probs and entropy are computed in chunks of train.logprob_chunk_bytes"),
    missing("{use_prefix_grouper,self_distillation.enable}", "set it to false", default=False),
    to("freeze_vision_tower", "model.vision.train", "bool", unless(lambda s: not facts.reads_images(s), "there are no images"),
       lambda v, _: "none" if v else "all"))

_CRITIC = section("critic", "critic", NO_CRITIC)(
    to("optim.lr", ".train.optimizer.lr", "positive", default=1e-5),
    to("model.path", ".path", "text?", unless_null("the policy's"), lambda v, _: os.path.expanduser(v),
       note="with a random value head"),
    to("model.enable_gradient_checkpointing", ".train.gradient_checkpointing", "bool", default=True),
    to("ppo_max_token_len_per_gpu", ".train.micro_batch_tokens", "count", _BY_TOKENS, default=32768, note="memory only"),
    to("forward_max_token_len_per_gpu", ".train.infer_batch_tokens", "count?", _BY_TOKENS, unless_null()),
    to("forward_micro_batch_size_per_gpu", ".train.infer_batch_rows .train.infer_batch_tokens", "count?", unless_null(), _BY_ROWS, _rows_and_tokens),
    to("forward_micro_batch_size", ".train.infer_batch_rows .train.infer_batch_tokens", "count?", unless_null(), _BY_ROWS, _of_all_gpus, _rows_and_tokens),
    to("cliprange_value", "algorithm.value_clip", "positive", default=0.5),
    ignored("strategy enable loss_agg_mode model.{tokenizer_path,use_remove_padding,trust_remote_code,use_shm,external_lib} "
            "nccl_timeout load_weight", "as of the policy"),
    missing("model.{override_config,exclude_modules}", "set it in config.json of the model folder"),
    missing("model.enable_activation_offload", "use gradient checkpointing", default=False),
    missing("model.lora_rank", "only the policy has adapters", default=0),
    ignored("model.{lora_alpha,target_modules}", "only the policy has adapters"))

_FSDP = section(f"{{{A}.actor.fsdp_config,{A}.ref.fsdp_config,critic.fsdp_config,critic.model.fsdp_config}}", "{train}", of_backend("fsdp", "fsdp2"), used)(
    to("param_offload", ".offload.weights", "bool", default=False),
    to("optimizer_offload", ".offload.optimizer", "bool"),
    to("offload_policy", ".backend.cpu_offload", "bool", of_backend("fsdp2")),
    to("fsdp_size", ".backend.size", "int", lambda v, _: v if v > 0 else None, default=-1, note="-1: all"),
    to("reshard_after_forward", ".backend.*", "bool", of_backend("fsdp2"), default=True),
    to("forward_prefetch", ".backend.*", "bool", of_backend("fsdp"), default=False),
    to("mixed_precision.{param_dtype,reduce_dtype,buffer_dtype}", ".backend.*", "bf16|fp32|fp16"),
    to("ulysses_sequence_parallel_size", ".sequence_parallel", "count"),
    to("strategy", "{models}.backend.kind", "fsdp|fsdp2", BY_BACKEND, note="as actor.strategy"),
    missing("model_dtype", "trained weights are fp32, with bf16 products", default="fp32"),
    always("dtype", "products are bf16", choice("bfloat16")),
    ignored("grad_offload wrap_policy.* use_orig_params seed full_determinism forward_only use_torch_compile entropy_from_logits_with_chunking "
            "use_fused_kernels entropy_checkpointing qat.*", "each layer is a unit; offload.weights covers gradients"))

_MEGATRON = section(f"{{{A}.actor.megatron,{A}.ref.megatron,critic.megatron}}", "{train}", of_backend("megatron"), used)(
    to("tensor_model_parallel_size", {".backend.tensor_parallel": as_is, ".backend.sequence_parallel": lambda v, _: v > 1}, "count", default=1),
    to("{pipeline_model,context,expert_model}_parallel_size", ".backend.{pipeline,context,expert}_parallel", "count", default=1),
    to("expert_tensor_parallel_size", ".backend.expert_tensor_parallel", "count?"),
    to("param_offload", ".offload.weights", "bool", default=False),
    to("grad_offload", ".offload.gradients", "bool"),
    to("optimizer_offload", ".offload.optimizer", "bool"),
    to("use_distributed_optimizer", ".backend.distributed_optimizer", "bool"),
    always("sequence_parallel", "with tensor parallelism always", "bool"),
    missing("virtual_pipeline_model_parallel_size", "use braid.train.backend.virtual_pipeline, in chunks per stage"),
    section("override_transformer_config", "{train}.backend")(
        to("recompute_granularity", ".*", "full|selective?", null_as("off")),
        to("recompute_method", ".*", "block|uniform?"),
        to("recompute_num_layers", ".*", "count?"),
        to("moe_token_dispatcher_type", ".moe_token_dispatcher", "alltoall|allgather|flex"),
        to("moe_grouped_gemm", ".*", "bool"),
        to("{apply_rope_fusion,gradient_accumulation_fusion,bias_dropout_fusion,bias_activation_fusion}", ".transformer.*", "bool"),
        to("moe_aux_loss_coeff", "train.router_aux_coef", "non-negative"),
        ignored("attention_backend moe_router_dtype moe_permute_fusion moe_enable_deepep moe_shared_expert_overlap recompute_modules "
                "masked_softmax_fusion deallocate_pipeline_outputs persist_layer_norm variable_seq_lengths",
                "kernels and memory; braid sets its own"),
        missing("*", "use train.backend in docs/config.md")),
    missing("override_ddp_config.*", "use train.backend in docs/config.md"),
    missing("dist_checkpointing_path", "the Hugging Face folder is read"),
    missing("use_dist_checkpointing forward_only", "set it to false: the Hugging Face folder is read", default=False),
    always("use_mbridge vanilla_mbridge", "Hugging Face weights are read and written directly", "bool"),
    always("dtype", "products are bf16", choice("bfloat16")),
    ignored("seed extra.* use_remove_padding load_weight override_mcore_model_config.* dist_checkpointing_prefix "
            "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient use_megatron_fsdp",
            "not needed where the Hugging Face folder is read"))

_REF = section(f"{A}.ref", "{train}", used)(
    to("model.path", "reference.path", "text?", unless_null("the policy's")),
    ignored("model", "null: the policy's", choice(None)),
    to("ulysses_sequence_parallel_size", ".sequence_parallel", "count?", of_backend("fsdp", "fsdp2"), unless_null()),
    ignored("strategy use_torch_compile use_remove_padding use_fused_kernels entropy_from_logits_with_chunking entropy_checkpointing "
            "profiler.* profiler.tool_config.* profiler.tool_config.{nsys,npu,torch,torch_memory}.* load_weight router_replay.*",
            "as of the policy"))
_LOGPROBS = section(f"{{{A}.rollout,{A}.ref}}", "{train}", used)(
    to("log_prob_micro_batch_size_per_gpu", ".infer_batch_rows .infer_batch_tokens", "count?", unless_null(), _BY_ROWS, _rows_and_tokens, note="memory only"),
    to("log_prob_micro_batch_size", ".infer_batch_rows .infer_batch_tokens", "count?", unless_null(), _BY_ROWS, _of_all_gpus, _rows_and_tokens,
       note="samples of all GPUs; memory only"),
    ignored("log_prob_use_dynamic_bsz", "decides whether micro-batches are counted in samples or tokens", "bool?"),
    to("log_prob_max_token_len_per_gpu", ".infer_batch_tokens", "count?", unless_null(), _BY_TOKENS, note="memory only"))

_IS_SERVED, _IS_VLLM = of_engine(*SERVED), of_engine("vllm")
_IS_SAMPLED = unless(lambda s: not s[".do_sample"], "do_sample is off: greedy decoding")
_NO_TURNS = unless(lambda s: not s[f"{_ROLLOUT}.multi_turn.enable"], "multi_turn is off")
_ENGINE = section(_ROLLOUT, "rollout.engine")(
    to("name", ".kind", "vllm|sglang|hf|trtllm", BY_ENGINE, lambda v, _: v if v in SERVED else unsupported("use vllm or sglang, or --engine native"),
       default="vllm"),
    to("dtype", ".dtype", {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}, default="bfloat16"),
    to("tensor_model_parallel_size", {".tensor_parallel": as_is, ".replicas": lambda _, s: facts.engine_replicas(s)}, "count", _IS_SERVED, default=2),
    to("pipeline_model_parallel_size", ".pipeline_parallel", "count", _IS_SERVED),
    missing("{data_parallel_size,expert_parallel_size}", "use more engines, or tensor parallelism", default=1),
    to("gpu_memory_utilization", ".memory_fraction", "fraction", _IS_SERVED, default=0.5),
    to("enforce_eager", ".cuda_graphs", "bool", opposite, default=False),
    to("enable_chunked_prefill", ".chunked_prefill", "bool", _IS_SERVED, default=True),
    to("enable_prefix_caching", ".prefix_caching", "bool", _IS_SERVED, default=True),
    to("max_num_batched_tokens", ".prefill_tokens", "count?", unless_null(), default=8192, note="prompt tokens per pass"),
    to("max_num_seqs", ".max_running", "count", default=1024),
    to("max_model_len", ".max_model_tokens", "count?", _IS_SERVED, unless_null("the longest prompt and answer")),
    to("disable_log_stats", ".log_stats", "bool", _IS_VLLM, opposite, default=True),
    to("update_weights_bucket_megabytes", "rollout.weight_sync.bucket_bytes", "count", ONE_PROCESS, lambda v, _: v * 2**20),
    missing("engine_kwargs.{vllm,sglang,trtllm} engine_kwargs.{vllm,sglang,trtllm}.*", "use rollout.engine in docs/config.md",
            unless(lambda s: not s.at.startswith(f"{_ROLLOUT}.engine_kwargs.{facts.engine(s)}"), "of another engine")),
    missing("{ignore_eos,skip_rollout,enable_rollout_routing_replay}", "set it to false", default=False),
    missing("{quantization,quantization_config_file}", "remove it"),
    missing("over_sample_rate", "set it to 0", default=0),
    always("calculate_log_probs", "the engine's log-probs are always kept", "bool"),
    always("free_cache_engine", "engines that share devices free their cache during training", "bool"),
    ignored("mode prompt_length response_length cudagraph_capture_sizes load_format layered_summon multi_stage_wake_up skip_dump_dir agent.num_workers "
            "skip_tokenizer_init trace.* profiler.* profiler.tool_config.* profiler.tool_config.{nsys,npu,torch,torch_memory}.* checkpoint_engine.* checkpoint_engine.engine_kwargs.* "
            "prometheus.* update_weights_bucket_megabytes_* nnodes n_gpus_per_node logprobs_mode scheduling_policy max_tool_response_length "
            "enable_sleep_mode skip.*", "engines are started, reached and freed by the run itself"),
    missing("agent.{agent_loop_config_path,default_agent_loop,custom_async_server.path,custom_async_server.name}", "use braid.env", default="single_turn_agent"),
    missing("multi_turn.enable", "use braid.env.kind=tools (docs/agents.md)", default=False),
    ignored("multi_turn.*", "for several turns: braid.env", "any"))

_SAMPLING = section(_ROLLOUT)(
    to("n", "rollout.group_size", "count", default=1),
    section("", "rollout.sampling")(
        to("temperature", ".*", "positive", default=1.0, note="also in training, for all log-probs"),
        to("top_p", ".*", "fraction", default=1),
        to("top_k", ".*", "natural or -1", at_least_0, default=-1, note="-1: off"),
        to("repetition_penalty", ".*", "positive"),
        missing("do_sample", "set it to true: groups need different answers", default=True)),
    section("val_kwargs", "eval.sampling", NO_EVALUATION)(
        to("do_sample", ".greedy", "bool", opposite, default=False),
        to("temperature", ".*", "non-negative", _IS_SAMPLED, greedy_at_0, default=0),
        to("top_p", ".*", "fraction", _IS_SAMPLED, default=1.0),
        to("top_k", ".*", "natural or -1", _IS_SAMPLED, at_least_0, default=-1),
        to("n", {"eval.samples_per_prompt": as_is, "eval.pass_at": lambda v, _: [1, v] if v > 1 else [1]}, "count", default=1),
        to("repetition_penalty", ".*", "positive")))

_REWARD = rows(
    to("reward_model.reward_manager", "reward.parts", "text", _reward, default="naive",
       note="verl scores each row by the rule of its data_source"),
    missing("custom_reward_function.path", _OWN_REWARD,
            unless(lambda s: "reward.parts" in s.braid_values, "overridden by braid.reward.parts")),
    ignored("custom_reward_function.{name,reward_kwargs} custom_reward_function.reward_kwargs.*", "of custom_reward_function.path"),
    section("reward_model.reward_kwargs.overlong_buffer_cfg", "reward.overlong")(
        ignored("enable", "decides whether the penalty applies", "bool"),
        to("len", ".buffer_tokens", "count", needs(".enable")),
        to("penalty_factor", ".penalty", "positive", needs(".enable"), _overlong, note="where answers score 1 or -1, before the scale of 2"),
        ignored("log", "reward/overlong is always reported")),
    ignored("reward_model.reward_kwargs.{max_resp_len,max_response_length}", "data.max_response_length counts"),
    missing("reward_model.enable", "use braid.reward.parts=[{kind: model, path: ...}]", default=False),
    missing("reward_model.{sandbox_fusion.url,reward_loop_source,reward_loop_module_path,reward_loop_class_name,reward_manager_path}",
            "use braid.reward.parts"),
    ignored("reward_model.* reward_model.{model,rollout,megatron,profiler,sandbox_fusion,data_processor_config}.* reward_model.{model.fsdp_config,model.override_config,profiler.tool_config}.* "
            "reward_model.model.fsdp_config.wrap_policy.* reward.{num_workers,reward_model,sandbox_fusion}.*", "reward models are reward parts (braid.reward.parts)"))

_TRAINER = section("trainer")(
    to("total_epochs", "run.max_epochs", "count", default=30),
    to("total_training_steps", "run.max_rounds", "count?", unless_null("total_epochs")),
    to("nnodes", "cluster.num_nodes cluster.placement", "count", ONE_PROCESS, _placed, default=1),
    to("n_gpus_per_node", "cluster.devices_per_node cluster.placement", "count", ONE_PROCESS, _placed, default=8),
    to("save_freq", {"checkpoint.every_rounds": at_least_0, "checkpoint.at_end": positive}, "int", default=-1),
    to("test_freq", {"eval.every_rounds": at_least_0, "eval.at_end": positive}, "int", default=-1),
    to("val_before_train", "eval.before", "bool", NO_EVALUATION, default=True),
    to("val_only", "run.eval_only", "bool", default=False),
    to("critic_warmup", "critic.warmup_rounds", "natural", NO_CRITIC, default=0),
    to("balance_batch", "{models}.balance_ranks", "bool", default=True),
    to("default_local_dir", "checkpoint.dir", "text", lambda v, _: os.path.expanduser(v)),
    to("resume_mode", "run.resume", "auto|disable|resume_path", _resume, default="auto",
       note="checkpoints of braid; of verl's, Hugging Face exports can be read as the model"),
    ignored("resume_from_path", "for resume_mode=resume_path", "text?"),
    to("max_actor_ckpt_to_keep", "checkpoint.keep", "count?", default=None),
    to("logger", "report.tensorboard", "text or [text]", _loggers, default=["console", "wandb"]),
    to("project_name", "{trackers}.project", "text", unless(lambda s: not _trackers(s), "no tracker is used"), default="verl_examples"),
    to("experiment_name", {"run.name": folder_name, "{trackers}.name": as_is}, "text", default="gsm8k"),
    to("device", "run.device", {"cuda": implied("a GPU is used where there is one"), "cpu": "cpu",
                                "npu": unsupported("braid runs on CUDA devices and CPUs")}),
    missing("default_hdfs_dir", "copy the checkpoints yourself"),
    ignored("log_val_generations rollout_data_dir validation_data_dir", "answers are stored in samples/ in the run's folder"),
    ignored("max_critic_ckpt_to_keep del_local_ckpt_after_load ray_wait_register_center_timeout esi_redundant_time use_legacy_worker_impl "
            "remove_previous_ckpt_in_save use_v1 npu_profile.* profile_steps controller_nsight_options.* worker_nsight_options.* "
            "max_ckpt_to_keep v1.*", "checkpoints and workers are braid's own"))

_OTHERS = rows(
    always(f"{A}.hybrid_engine", "policy and engine share the devices", choice(True)),
    ignored(f"{A}.nccl_timeout", "see braid.cluster.call_timeout_s"),
    ignored("global_profiler.* global_profiler.global_tool_config.* global_profiler.global_tool_config.{nsys,torch_memory}.* "
            "global_profiler.global_tool_config.nsys.{controller_nsight_options,worker_nsight_options}.* ray_init.* ray_kwargs.* ray_kwargs.ray_init.* transfer_queue.*",
            "profilers are external, and Ray is started by the run"),
    missing("distillation.enabled", "see docs/distillation.md", default=False),
    ignored("distillation.*", "distillation is off"))
# fmt: on


def _aliases() -> dict[str, str]:
    """Spellings of other releases."""
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg"
    return {
        **{f"{at}.{key}": f"{overlong}.{key}"
           for at in ("reward_model.overlong_buffer", "custom_reward_function.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg")
           for key in ("enable", "len", "penalty_factor", "log")},
        "reward.reward_manager.name": "reward_model.reward_manager",
        "reward.reward_kwargs.max_resp_len": "reward_model.reward_kwargs.max_resp_len",
        **{f"reward.custom_reward_function.{key}": f"custom_reward_function.{key}" for key in ("path", "name", "reward_kwargs")},
        **{f"reward.reward_model.{key}": f"reward_model.{key}" for key in ("enable",)},
        f"{A}.actor.optim.warmup_style": f"{A}.actor.optim.lr_scheduler_type",
        "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    }  # fmt: skip


def _base(source: Source) -> dict[str, Any]:
    """Paths relative to the working directory, and the backend of the command line."""
    out: dict[str, Any] = {"run.base_dir": str(Path.cwd())}
    if facts.reads_images(source):
        out["model.vision.train"] = "none" if source[f"{A}.model.lora_rank"] else "all"
    if source.backend is not None:
        out |= {f"{path}.backend.kind": source.backend for path in facts.models(source)}
    return out


_OLD = {f"{A}.actor.entropy_coeff": 0.001, f"{A}.model.enable_gradient_checkpointing": False, f"{_ROLLOUT}.enforce_eager": True,
        "algorithm.use_kl_in_reward": None}  # fmt: skip
"""Defaults of 0.2 that have changed since."""
_MARKS = (f"{A}.actor.use_token_level_loss", f"{A}.actor.fsdp_config.grad_offload", "data.val_batch_size")
"""Keys of 0.2 that later releases no longer have."""


def _of_file(dialect: Dialect, values: Mapping[str, Any], version: str | None) -> Dialect:
    """verl's dialect in the version that is given, or that the file's keys tell."""
    why = "set by --dialect"
    if version is None:
        mark = next((key for key in _MARKS if key in values), None)
        newer = f"{A}.actor.strategy" in values or "algorithm.use_kl_in_reward" in values
        version = "0.2" if mark and not newer else "0.7"
        why = (
            f"told by {mark}"
            if version == "0.2"
            else "the newest, no key tells another; --dialect verl@0.2 sets it"
        )
    rules = dict(dialect.rules)
    if version == "0.2":
        rules |= {path: replace(rules[path], default=default) for path, default in _OLD.items()}
    return replace(dialect, rules=rules, version=version, version_from=why)


VERL = Dialect(
    name="verl",
    title="verl",
    rules=table(
        rows(
            _CHOSEN,
            _DATA,
            _MODEL,
            _ACTOR_LOSS,
            _ALGORITHMS,
            _WORKER,
            _ACTOR,
            _CRITIC,
            _FSDP,
            _MEGATRON,
            _REF,
            _LOGPROBS,
            _ENGINE,
            _SAMPLING,
            _REWARD,
            _TRAINER,
            _OTHERS,
        )
    ),
    base=_base,
    places={
        "engine": facts.engine,
        "backend": facts.backend,
        "train": lambda s: facts.TRAIN[facts.role_of(s)],
        "trained": facts.trained,
        "models": facts.models,
        "trackers": _trackers,
    },
    aliases=_aliases(),
    of_file=_of_file,
    versions=("0.2", "0.7"),
    telling=(A,),
)
