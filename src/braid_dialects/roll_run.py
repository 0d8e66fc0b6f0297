"""ROLL's pipeline keys: the run, models, sizes, rollouts, evaluation; and keys of its other pipelines."""

from __future__ import annotations

import re
from typing import Any

from . import roll_facts as facts
from .conversions import only, when
from .table import (
    Apply,
    Became,
    Implied,
    NoEffect,
    Rule,
    Source,
    Unsupported,
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
    PATH,
    TEXT,
    choice,
    either,
    integer,
    mapping_of,
    nullable,
)

_BYTES_PER_MB = 2**20
_DEAD = "not read by ROLL"
_OTHER_PIPELINE = "remove it; it belongs to ROLL's {0}, and only RLVR configs are supported"


def _prompts(value: int, source: Source) -> Became:
    return Became({"rollout.prompts_per_round": value} | facts.batches(source))


def _group(value: int, source: Source) -> Became:
    return Became({"rollout.group_size": value} | facts.batches(source))


def _prompt_length(value: int, source: Source) -> Became:
    new = {"rollout.sampling.max_new_tokens": facts.max_new_tokens(source)}
    return Became({"data.max_prompt_tokens": value} | (new if source.get("sequence_length") else {}))


def max_new_tokens(_: Any, source: Source) -> Became:
    """Maximum response length, which several keys limit."""
    return Became({"rollout.sampling.max_new_tokens": facts.max_new_tokens(source)})


def _response_length(value: int | None, source: Source) -> Became:
    if source.get("sequence_length") is not None:
        return no_effect("overridden by sequence_length")
    return max_new_tokens(value, source)


def _run_name(value: str, _: Source) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", value)


def _resume(value: bool | str, _: Source) -> str:
    return value if isinstance(value, str) else "latest" if value else "none"


def _tracker(value: str, _: Source) -> Became:
    sinks = {"report.tensorboard": value == "tensorboard"}
    match value:
        case "wandb" | "swanlab":
            online = {"wandb": "online", "swanlab": "cloud"}[value]
            return Became(sinks | {f"report.{value}.mode": online})
        case "trackio" | "ml_tracker":
            return unsupported("use tensorboard, wandb or swanlab")
    return Became(sinks)


def _tracker_name(field: str) -> Any:
    def convert(value: str, source: Source) -> Any:
        tracker = source.get("track_with")
        if tracker not in ("wandb", "swanlab"):
            return no_effect(f"not used with track_with={tracker}")
        return Became({f"report.{tracker}.{field}": value})

    return convert


def _profiler(value: bool, _: Source) -> Any:
    return (
        unsupported("use profiler_memory, or a sampling profiler such as py-spy")
        if value
        else implied("no profiler")
    )


def _max_running(value: int, source: Source) -> Became:
    return Became({f"rollout.{facts.engine(source)}.max_running": value})


# Evaluation


def _eval_length(_: Any, source: Source) -> Any:
    prompt, whole = source.get("val_prompt_length"), source.get("val_sequence_length")
    if prompt is None or whole is None:
        return implied("evaluation uses the lengths of training")
    if prompt != source.get("prompt_length"):
        return unsupported("set it to prompt_length; evaluation uses the prompt length of training")
    return Became({"eval.sampling.max_new_tokens": max(1, whole - prompt)})


PIPELINE: tuple[Rule, ...] = (
    # The run
    Apply("exp_name", "run.name", TEXT, _run_name, note="characters other than letters, digits, _ . - become -"),
    Apply("seed", "run.seed", NATURAL, default=42),
    Apply("output_dir", "run.output_dir", PATH, default="./output", note="parent of the run folder"),
    Apply(
        "max_steps", "run.max_rounds", COUNT, default=500,
        note="a step of the pipeline is a round: one rollout batch with its optimizer steps",
    ),
    Apply("save_steps", "checkpoint.every_rounds", COUNT, default=50, note="and after the last round"),
    Apply(
        "max_ckpt_to_keep", "checkpoint.keep", NATURAL, lambda v, _: v or None, default=0, note="0 keeps all"
    ),
    Apply("checkpoint_config.type", "", choice("file_system"), only("file_system", "")),
    Apply(
        "checkpoint_config.output_dir", "checkpoint.dir", PATH,
        note="used unchanged; ROLL appends the time, so that a resume uses another folder",
    ),
    NoEffect("checkpoint_config.async_upload", BOOL, "checkpoints are written directly to their final location"),
    NoEffect("checkpoint_config.use_hard_links", BOOL, "checkpoints are written directly to their final location"),
    NoEffect("checkpoint_config.keep_local_file", BOOL, "checkpoints are written directly to their final location"),
    Apply("resume_from_checkpoint", "run.resume", either(BOOL, PATH), _resume, default=False),
    Apply(
        "track_with", "report.tensorboard", choice("tensorboard", "wandb", "swanlab", "trackio", "stdout", "ml_tracker"),
        _tracker, default="tensorboard", note="metrics.jsonl and the console are always written",
    ),
    Apply(
        "tracker_kwargs.log_dir", "report.dir", PATH,
        when(facts.only_where("track_with", "tensorboard", "for TensorBoard only")),
    ),
    Apply("tracker_kwargs.project", "", TEXT, _tracker_name("project")),
    Apply("tracker_kwargs.name", "", TEXT, _tracker_name("name")),
    Unsupported("tracker_kwargs.api_key", "set the environment variable WANDB_API_KEY or SWANLAB_API_KEY"),
    Unsupported("tracker_kwargs.*", "configure it in the tracker itself"),
    Implied("logging_steps", COUNT, "metrics are written every round"),
    NoEffect("logging_dir", PATH, "logs are in the run folder"),
    NoEffect("base_dir", PATH, "the run folder is in output_dir"),
    Apply(
        "rollout_dump_dir", "", nullable(PATH),
        lambda v, _: Became({} if v is None else {"report.samples_every_rounds": 1}, "implied",
                            "trajectories are stored in samples/ of the run folder"),
    ),
    Apply(
        "profiler_memory", "train.record_memory", BOOL, default=False,
        note="snapshots are stored in memory/ of the run folder",
    ),
    Apply("profiler_timeline", "", BOOL, _profiler),
    NoEffect("profiler_output_dir", PATH, "snapshots are stored in memory/ of the run folder"),
    NoEffect("otlp_output_dir", PATH, "braid has no OpenTelemetry export"),
    Apply("rpc_timeout", "cluster.call_timeout_s", COUNT, when(facts.one_process), default=3600),
    Apply(
        "system_envs", "cluster.env", mapping_of(TEXT, {"A_VARIABLE": "1"}, {"A_VARIABLE": "2"}),
        note="set before workers start",
    ),
    NoEffect("num_nodes", COUNT, "detected at the start, as in ROLL; braid.cluster.num_nodes sets it"),
    NoEffect(
        "num_gpus_per_node", COUNT,
        "detected at the start, as in ROLL; braid.cluster.devices_per_node sets it",
    ),
    Apply(
        "model_download_type", "", nullable(choice("HUGGINGFACE_HUB", "MODELSCOPE")),
        lambda v, _: unsupported("download the model and set the path of its folder") if v == "MODELSCOPE" else implied(
            "models are always loaded from the Hugging Face hub"),
    ),
    Apply(
        "model_update_buffer_size_mb", "rollout.publish.bucket_bytes", COUNT,
        when(facts.one_process, then=lambda v, _: v * _BYTES_PER_MB), default=1024,
    ),
    # Models
    Apply(
        "pretrain", "model.path", PATH,
        when(
            lambda s: "" if s.get("actor_train.model_args.model_name_or_path") in (None, s.get("pretrain"))
            else "overridden by actor_train.model_args.model_name_or_path; in ROLL pretrain overrides that of every role"
        ),
        note="the policy; reference and critic are initialised from it by default",
    ),
    Apply("reward_pretrain", "critic.path", PATH, when(facts.no_values), note="initial model of the critic"),
    # Sizes
    Apply(
        "rollout_batch_size", "rollout.prompts_per_round", COUNT, _prompts, default=128,
        note="prompts per round; S = rollout_batch_size * num_return_sequences_in_group trajectories are used in training",
    ),
    Apply(
        "num_return_sequences_in_group", "rollout.group_size", COUNT, _group, default=1,
        note="samples per prompt; in braid a mini-batch contains all samples of its prompts",
    ),
    Apply(
        "prompt_length", "data.max_prompt_tokens", COUNT, _prompt_length, default=1024,
        note="longer prompts are dropped and counted; ROLL also drops those of 5 tokens or fewer",
    ),
    Apply(
        "response_length", "rollout.sampling.max_new_tokens", nullable(COUNT), _response_length,
        note="sequence_length = prompt_length + response_length",
    ),
    Apply(
        "sequence_length", "rollout.sampling.max_new_tokens", nullable(integer(2, samples=(4096, 8192))),
        lambda v, s: implied("prompt_length + response_length") if v is None else max_new_tokens(v, s),
        note="prompt plus response, of which prompt_length is for the prompt",
    ),
    # How rollouts run
    Apply("async_generation_ratio", "", NON_NEGATIVE, only(0, "set it to 0; asynchronous training is not implemented")),
    Implied("generate_opt_level", choice(0, 1), "continuous batching is always used"),
    Implied("is_num_return_sequences_expand", BOOL, "each sample is a separate request; the prefill of a prompt is shared"),
    Apply(
        "is_use_additional_prompts", "", BOOL,
        only(False, "set it to false: keeping the first finished answers favors short ones; use a query_filter, which samples until "
             "the batch is full"),
    ),
    NoEffect("max_additional_running_prompts", COUNT, "for is_use_additional_prompts only, which is not supported"),
    Apply("max_running_requests", "", COUNT, _max_running, default=128,
          note="sequences decoded concurrently by an engine"),
    NoEffect(
        "router_args.router_name", TEXT, "requests of a group always go together to the least loaded engine"
    ),
    NoEffect("router_args.router_config", ANY, "requests always go to the least loaded engine"),
    Apply("reward_system_config.skip_special_tokens", "", BOOL,
          only(True, "set it to true; rewards read text without special tokens", "rewards read text without special tokens")),
    Unsupported("user_defined_rollout_loop_cls", "use an environment or a reward function"),
    Apply("rollout_mock.enable", "", BOOL, only(False, "set it to false; trajectories are stored in samples/ of the run folder")),
    NoEffect("rollout_mock.mode", choice("dump", "mock"), "for rollout_mock only, which is not supported"),
    NoEffect("rollout_mock.dump_dir", PATH, "for rollout_mock only, which is not supported"),
    Apply("transfer_backend.backend_name", "", nullable(TEXT), only(None, "remove it; rows are transferred by Ray's object store")),
    NoEffect("transfer_backend.backend_config", ANY, "rows are transferred by Ray's object store"),
    # Evaluation
    Apply("eval_steps", "eval.every_rounds", NATURAL, when(facts.no_validation), default=10,
          note="and before the first round"),
    Apply("val_batch_size", "eval.batch_prompts", COUNT, when(facts.no_validation), default=128),
    Apply("val_prompt_length", "eval.sampling.max_new_tokens", nullable(COUNT),
          when(facts.no_validation, then=_eval_length)),
    Apply("val_sequence_length", "eval.sampling.max_new_tokens", nullable(integer(2)),
          when(facts.no_validation, then=_eval_length),
          note="at most val_sequence_length - val_prompt_length new tokens"),
    # Templates
    Apply("tag_to_template", "", mapping_of(TEXT),
          only({}, "use a single template for all rows: data_args.template")),
    # On-policy distillation
    *(
        Apply(name, "", BOOL, only(False, "distillation from a teacher is not implemented"))
        for name in ("is_pure_opd", "use_opd")
    ),
    *(
        Unsupported(f"{name}.*", "distillation from a teacher is not implemented")
        for name in ("teacher", "student_train", "student_infer")
    ),
    # Keys that ROLL itself does not read or overrides
    *(
        NoEffect(name, ANY, _DEAD)
        for name in (
            "use_policy_loss_type", "use_topr_loss", "postive_loss_coef", "positive_loss_coef",
            "use_topr_neg_loss_coef", "balance_length", "minibatch_data_iter_num", "l2", "use_reward_scaling",
            "use_reward_norm", "add_len_reward", "report_length_and_rewards", "length_profiler_dir", "val_greedy",
            "val_n_sample", "mask_type", "local_rank", "save_logging_board_dir", "offload_nccl", "reward_norm",
            "reward_shift", "reward_scale", "use_remove_padding", "token_level_loss",
        )
    ),
    NoEffect("dataset_filter.*", ANY, _DEAD),
    NoEffect("offload_backend", TEXT, "roles on the same devices always take turns"),
    NoEffect("is_offload_states", BOOL, "roles on the same devices always take turns"),
    NoEffect("is_offload_optimizer_states_in_train_step", BOOL, "roles on the same devices always take turns"),
    NoEffect("hydra.*", ANY, "for Hydra's working directory only"),
    NoEffect("defaults", ANY, "the listed presets are merged into the file"),
)  # fmt: skip

OTHER_PIPELINES: tuple[Rule, ...] = tuple(
    Unsupported(name, _OTHER_PIPELINE.format(pipeline))
    for pipeline, names in {
        "agentic pipeline": (
            "custom_envs.*", "train_env_manager.*", "val_env_manager.*", "reward.*", "reward_normalization.*",
            "env_monitor.*", "render_save_dir", "batch_adjust_mode", "episode_reward_weight", "step_reward_weight",
            "step_reward_gamma", "ratio_type", "exp_mode", "partial_gpu_mode", "parse_tool_call_parameter_to_dict",
            "skip_mock_system_prompt", "dirty_data_mask", "open_feedback_turn", "use_token_reward",
        ),
        "supervised pipeline (here: braid sft)": (
            "sft_train.*", "system_key", "prompt_key", "query_key", "response_key",
        ),
        "preference pipeline": ("ipo", "beta", "label_smoothing", "chosen_key", "rejected_key"),
        "distillation pipeline": (
            "student_pretrain", "teacher_pretrain", "student.*", "question_key", "answer_key", "logits_topk",
            "distill_loss_weight", "kd_temperature", "teacher_temperature", "kd_objective", "adaptive_kl_alpha",
            "skew_lambda", "distill_on_prompt", "logits_transfer_backend",
        ),
    }.items()
    for name in names
)  # fmt: skip

ALIASES = {
    "use_additional_prompts": "is_use_additional_prompts",
    "router_args.max_running_requests": "max_running_requests",
    "global_template": "actor_train.data_args.template",
}
"""Other spellings of keys, used by ROLL's examples."""
