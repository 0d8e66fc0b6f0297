"""RLinf's keys for the run, the cluster, the data, rewards and the critic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from braid.errors import suggest
from braid.plan.placement import parse_placement, split_roles

from . import rlinf_agents
from . import rlinf_facts as facts
from .conditions import needs, overridden, unless
from .conversions import at_least_0, computed, folder_name, listed, positive, presets, unless_null, wandb_mode
from .rlinf_facts import HAS_IMAGES, ROBOTS_ONLY, TEXT_ONLY, WORKERS, is_robots
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source, no_effect, unsupported
from .values import Takes, choice


def _placement(value: Mapping[str, Any], source: Source) -> Any:
    if any(isinstance(devices, dict) for devices in value.values()):
        return unsupported("remove node groups and number the devices across nodes, such as actor: 0-7")
    lines = {line: str(devices) for line, devices in value.items()}
    for name in parse_placement(lines, facts.num_devices(source)):
        if name not in facts.ROLES:
            known, near = ", ".join(facts.ROLES), suggest(name, facts.ROLES)
            raise ValueError(f"unknown component {name!r}{near}; the components are {known}")
    roles = {",".join(facts.ROLES[name] for name in split_roles(line)): lines[line] for line in lines}
    return WORKERS(
        Became({f"cluster.placement.{names}": devices for names, devices in roles.items()}), source
    )


def _task(value: str, source: Source) -> Became:
    if value in ("coding_online_rl", "sft", "offline"):
        return unsupported(
            "use math or embodied; robots imitate demonstrations: write sft.demonstrations (braid sft)"
        )
    native: dict[str, Any] = {"run.eval_only": True} if value.endswith("_eval") else {}
    kind = source["env.train.env_type"] if is_robots(source) else rlinf_agents.kind(source)
    return Became(native | ({} if kind is None else {"env.kind": kind}))


def _backends(value: list[str] | None, source: Source) -> Became:
    modes = {"wandb": wandb_mode()[0], "swanlab": source["runner.logger.swanlab_mode"] or "cloud"}
    tracked = {f"report.{sink}.mode": mode for sink, mode in modes.items() if sink in (value or ())}
    return Became({"report.tensorboard": "tensorboard" in (value or ()), **tracked})


def sinks(source: Source) -> list[str]:
    """Native paths of the trackers in logger_backends."""
    chosen = source["runner.logger.logger_backends"] or ()
    return [f"report.{sink}" for sink in ("wandb", "swanlab") if sink in chosen]


def _wandb(value: bool, _: Source) -> Became:
    mode, why = wandb_mode()
    return Became({"report.wandb.mode": mode}, note=why) if value else Became({"report.wandb": None})


def _robot_rounds(source: Source) -> int | None:
    limits = (source["runner.max_epochs"], source["runner.max_steps"])
    return min((limit for limit in limits if limit is not None and limit > 0), default=None)


def _epochs(value: int, source: Source) -> Became:
    if value == -1 and (source["runner.max_steps"] or 0) <= 0:
        raise ValueError("without a limit of epochs a run needs runner.max_steps above 0")
    if value == -1:
        return no_effect("no limit of epochs: runner.max_steps ends the run")
    if not is_robots(source):
        return Became({"run.max_epochs": value})
    note = "a simulator has no prompts: an epoch is a round"
    return Became({"run.max_rounds": _robot_rounds(source)}, note=note)


def _steps(value: int, source: Source) -> int | None:
    if value == 0:
        raise ValueError(
            "a run needs at least one step; set runner.only_eval=true to evaluate, -1 for no limit"
        )
    return _robot_rounds(source) if is_robots(source) else value if value > 0 else None


def seq_length(source: Source) -> int:
    return source["runner.seq_length"] or 2048


def _dynamic(value: bool, source: Source) -> Became:
    """Bound micro-batches by tokens, or set a fixed number of rows."""
    tokens, rows_of = source["runner.max_tokens_per_mbs"], source["algorithm.training_batch_size_per_gpu"]
    if value:
        limit = {"train.micro_batch_tokens": tokens} if tokens else {}
        return Became({"train.micro_batch_rows": None, **limit})
    tokens = rows_of * seq_length(source)
    return Became({"train.micro_batch_rows": rows_of, "train.micro_batch_tokens": tokens})


def given_sources(source: Source) -> list[str]:
    """Native paths of the data sources in the file."""
    keys = {"data.train[0]": "data.train_data_paths", "data.eval[0]": "data.val_data_paths"}
    return [native for native, key in keys.items() if source[key]]


def _data_type(value: str, source: Source) -> Became:
    if facts.reads_images(source):
        trained = "none" if source["actor.model.is_lora"] else "all"
        kind = {"data.train[0].kind": "file"} if source["data.train_data_paths"] else {}
        note = "the vision tower is trained too, unless there are adapters"
        return Became({"model.vision.train": trained} | kind, note=note)
    if value not in ("math", "reasoning"):
        return unsupported("use math: rows with a prompt and its solutions")
    native = {"data.train[0].kind": "file"} if source["data.train_data_paths"] else {}
    return Became(native, note="rows have a prompt and `solutions`, a list; any of them is accepted")


def image_column(value: list[str], _: Source) -> Any:
    if len(value) > 1:
        return unsupported("put the images of a row into one column, a list")
    return value[0] if value else no_effect("rows have no images")


FOLDER_PATH = re.compile(r"/$|/[^./*]+$")
"""A path without an extension: a folder, in which RLinf reads all files."""


def _paths(value: Any, source: Source) -> list[str]:
    """Files; with images RLinf also takes folders, of which it reads all files."""
    paths = listed(value, source)
    if not facts.reads_images(source):
        return paths
    return [f"{path.rstrip('/')}/**/*.*" if FOLDER_PATH.search(path) else path for path in paths]


def eval_prompts(source: Source) -> int | None:
    """Compute the evaluation batch in prompts: the smaller of the global limit and the sum of the per-device
    limits."""
    whole = source["data.val_rollout_batch_size"] or source["data.rollout_batch_size"]
    per_device = source["algorithm.val_rollout_batch_size_per_gpu"]
    limits = [whole, per_device and per_device * facts.size_of(source, "rollout")]
    return min((limit for limit in limits if limit), default=None)


def _reward_model(value: bool, source: Source) -> str:
    if value and not source.has("reward.model.model_path"):
        raise ValueError("with true, set reward.model.model_path to the folder of the reward model")
    return "model" if value else source["reward.reward_type"]


def _reward_scale(_: Any, source: Source) -> Became:
    """Map a score s in [0, 1] to scale * (low + (high - low) * s)."""
    low, high, scale = (source[f"reward.reward_{name}"] for name in ("min_val", "max_val", "scale"))
    if source["reward.use_reward_model"]:
        return Became({"reward.scale": float(scale)}, note="a reward model's score times reward_scale")
    return Became({"reward.scale": float(scale * (high - low)), "reward.shift": float(scale * low)})


def _critic(value: bool, source: Source) -> Any:
    if facts.advantage(source) == "gae":
        return "gae" if facts.has_critic(source) else "reinforce"
    if value:
        kind = source["algorithm.adv_type"]
        raise ValueError(f"algorithm.adv_type={kind} does not use values; set it to gae, or this to false")
    return no_effect("algorithm.adv_type does not use values")


def _critic_view(source: Source) -> Source:
    """The file with the `critic` keys in place of those of `actor`."""
    critic = {f"actor{key.removeprefix('critic')}": source[key] for key in source.values if _is_critic(key)}
    return replace(
        source, values=source.values | {source.dialect.name_of(key): critic[key] for key in critic}
    )


def _is_critic(key: str) -> bool:
    return key.startswith("critic.")


def _of_critic(native: Mapping[str, Any]) -> dict[str, Any]:
    """The training settings among native values, as those of the critic."""
    return {f"critic.{key}": value for key, value in native.items() if key.startswith("train.")}


def critic_settings(source: Source) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """All training settings of a critic with its own settings, for which the actor's are the defaults, and
    (actor's key, error) where such a default does not suit the critic."""
    sections = ("critic.optim.", "critic.model.", "critic.lr_sched.")
    has_own = any(key.startswith(sections) for key in source.values if key != "critic.model.model_path")
    if not facts.has_critic(source) or not has_own:
        return {}, []
    view, native, errors = _critic_view(source), dict[str, Any](), list[tuple[str, str]]()
    for path, value in (source.dialect.defaults | view.values).items():
        rule = source.dialect.rules.get(path)
        if rule is not None and rule.disposition == "applied" and not _is_critic(path):
            try:
                native |= rule.become(value, replace(view, at=path)).native
            except ValueError as error:
                errors += [(path, f"for the critic: {error}")] if path.startswith("actor.") else []
    chosen = {} if source.backend is None else {"critic.train.backend.kind": source.backend}
    return _of_critic(native) | chosen, errors


def _as_actor(value: Any, source: Source) -> Became:
    """Convert a key that the actor has too, using the actor's rule."""
    key = f"actor{source.at.removeprefix('critic')}"
    if (rule := source.dialect.rule_of(key)) is None:
        raise ValueError(f"the critic has the same keys as the actor, and {key} does not exist")
    if not rule.takes.accepts(value):
        raise ValueError(f"{value!r} is not {rule.takes.words}")
    made = rule.become(value, replace(_critic_view(source), at=source.dialect.name_of(key)))
    if made.disposition != "applied":
        return made
    native = _of_critic(made.native)
    return Became(native) if native else no_effect("the actor's value applies to both models")


_TASKS = "math|reasoning|embodied|reasoning_eval|embodied_eval|coding_online_rl|sft|offline"
_PLACEMENT = Takes(
    "a mapping of components to devices, such as actor,rollout: 0-3",
    lambda v: isinstance(v, dict) and v != {},
)
_EPOCHS = Takes(
    "an integer >= 1, or -1", lambda v: isinstance(v, int) and not isinstance(v, bool) and (v >= 1 or v == -1)
)
_HAS_SINKS = unless(lambda s: not sinks(s), "runner.logger.logger_backends has neither wandb nor swanlab")
_HAS_SWANLAB = unless(
    lambda s: "report.swanlab" not in sinks(s), "runner.logger.logger_backends does not have swanlab"
)
_HAS_DATA = unless(lambda s: not given_sources(s), "data.train_data_paths is not set")

# One rule per line.
# fmt: off
_CLUSTER = section("cluster")(
    to("num_nodes", "cluster.num_nodes", "count", WORKERS),
    to("num_gpus_per_node", "cluster.devices_per_node", "count", WORKERS),
    to("component_placement", "", _PLACEMENT, _placement, note="roles on the same devices take turns"),
    missing("node_groups", "number the devices across nodes in cluster.component_placement"),
    ignored("tracer.* profiling.*", "metrics have the time of each stage (time/<verb>_s)"),
    missing("auto_scheduler", "set cluster.component_placement", default=False),
    ignored("assign_policy use_pre_process_policy rollout_use_all_gpus monitor_interval preprocess_threshold "
            "migrate_out_max_bs use_wait_before_last_iter_policy fuse_rollout_inference_only "
            "recreate_nccl_groups", "for cluster.auto_scheduler only"))

_RUNNER = section("runner")(
    to("task_type", "", _TASKS, _task, note="math (newer: reasoning); embodied: robots in a simulator"),
    section("logger", "report")(
        to("path", ".dir", "path", lambda v, _: str(Path(v).parent if Path(v).name == "tensorboard" else v),
           note="TensorBoard's files are in `tensorboard/` there"),
        to("log_path", ".dir", "path", note="each sink writes to a folder of its name there"),
        to("tensorboard.enable", ".tensorboard", "bool"),
        to("tensorboard.queue_size", ".tensorboard_queue", "count"),
        to("wandb.enable", "", "bool", _wandb),
        to("wandb.project_name", ".wandb.project", "text", needs("runner.logger.wandb.enable")),
        to("wandb.experiment_name", ".wandb.name", "text", needs("runner.logger.wandb.enable")),
        to("project_name", "{sinks}.project", "text", _HAS_SINKS),
        to("experiment_name", "{sinks}.name", "text", _HAS_SINKS),
        to("logger_backends", "", "[tensorboard|wandb|swanlab]?", _backends, note="metrics.jsonl is always written as well"),
        to("swanlab_mode", ".swanlab.mode", "cloud|local|offline", _HAS_SWANLAB),
        missing("wandb_proxy", "set HTTPS_PROXY in the environment"),
        missing("wandb_entity", "set WANDB_ENTITY in the environment")),
    to("max_epochs", "", _EPOCHS, _epochs, note="an epoch is one pass over the training prompts"),
    to("max_steps", "run.max_rounds", "cadence", _steps,
       note="a step is a round; the smaller of this and max_epochs"),
    to("val_check_interval", {"eval.every_rounds": at_least_0, "eval.at_end": positive, "eval.before": False},
       "cadence", default=-1, note="in rounds, and after the last; RLinf's math task never validates"),
    to("save_interval",
       {"checkpoint.every_rounds": at_least_0, "checkpoint.at_end": positive, "checkpoint.keep": None},
       "cadence", note="in rounds, and after the last; all are kept"),
    to("seq_length", "rollout.max_sequence_tokens", "count", TEXT_ONLY),
    to("enable_dynamic_batch_size", "", "bool",
       unless(is_robots, "for text tasks only; robots use actor.micro_batch_size"), _dynamic, default=False,
       note="micro-batches are bounded by tokens instead of rows"),
    to("max_tokens_per_mbs", "train.micro_batch_tokens", "count", TEXT_ONLY,
       needs("runner.enable_dynamic_batch_size")),
    to("resume_dir", "run.resume", "path?", lambda v, _: {None: "none", "auto": "latest"}.get(v, v),
       note="auto: the newest of this run. Checkpoints are braid's own; RLinf's cannot be read"),
    to("experiment_name", "run.name", "text", folder_name),
    to("output_dir", "run.output_dir", "path"),
    to("only_eval", "run.eval_only", "bool"),
    to("max_prompt_length", "model.vla.max_prompt_tokens", "count", ROBOTS_ONLY, facts.VLA,
       overridden("actor.model.max_prompt_length")),
    always("weight_sync_interval", "weights are synced after every round", choice(1)),
    ignored("per_worker_log per_worker_log_path", "logs/ in the run folder has a file for each worker"),
    ignored("pad_after_pack", "rows are packed without padding"),
    missing("overlap_env_bootstrap", "use env.pipeline_stages to overlap simulation and policy"),
    missing("use_training_pipeline", "the update always starts when the round is complete"))

_DATA = section("data", "data", TEXT_ONLY)(
    to("type", "", "math|reasoning|vlm|vision_language|wideseek_r1|rstar2|searchr1", _data_type),
    to("max_prompt_length", ".max_prompt_tokens", "count"),
    to("filter_prompt_by_length", ".overlong", "bool",
       unless(facts.reads_images, "with images longer prompts are always dropped; RLinf cuts within an image"),
       lambda v, _: "drop" if v else "truncate_right", default=True),
    to("rollout_batch_size", "rollout.prompts_per_round", "count"),
    to("val_rollout_batch_size", "eval.batch_prompts", "count?", computed(eval_prompts),
       note="null: data.rollout_batch_size. RLinf takes the whole set if given, else no batch"),
    missing("is_{markdown,hybrid}", "how RLinf reads WideSeek-R1's rows and answers: write a function of rewards",
            default=False),
    ignored("{num_workers,prefetch_factor,process_workers,process_batch_size}", "prompts are tokenized once, at the start"),
    missing("dataset_name",
            "use base, with choices and their letters in the column of prompt_key, the right letter in that "
            "of answer_key, and braid.reward.parts=[{kind: choice}]",
            unless(lambda s: not facts.reads_images(s), "data.type determines how rows are read"),
            default="base"),
    to("image_keys", "{given}.images_key", "[text]?", HAS_IMAGES, _HAS_DATA,
       unless_null("rows have no images"), image_column, note="<image> in a prompt places each; without it they come first"),
    to("use_chat_template", ".use_chat_template", "bool", HAS_IMAGES,
       lambda v, _: "always" if v else "never"),
    to("system_prompt", "{given}.system", "text?", HAS_IMAGES, _HAS_DATA, unless_null()),
    missing("choice_key", "write the choices into the prompt", HAS_IMAGES),
    ignored("solution_key lazy_loading", "rewards read answer_key, and rows stay in their files"),
    to("prepend_prompt", "{given}.template", "text?", HAS_IMAGES, _HAS_DATA, unless_null(),
       lambda v, _: v.replace("{", "{{").replace("}", "}}") + "{prompt}", note="before the prompt, in its message"),
    missing("video_root data_root video_nframes video_fps video_max_pixels",
            "videos are not read; write frames as images"),
    to("prompt_key", "{given}.prompt_key", "text", _HAS_DATA),
    to("answer_key", "{given}.answer_key", "text", _HAS_DATA, default="solutions"),
    to("apply_chat_template", ".use_chat_template", "bool",
       unless(facts.reads_images, "with images data.use_chat_template decides"), rlinf_agents.use_template,
       default=False,
       note=
           "RLinf's data is chat-formatted already; planner and workers (agentloop.workflow=mas) speak by "
           "the template, if there is one"),
    to("data_size", "data.train[0].limit", "cadence", lambda v, _: v if v > 0 else None, note="0, -1: all"),
    to("shuffle", ".shuffle", "bool", note="false: in the files' order"),
    to("validation_shuffle", "eval.shuffle", "bool"),
    to("seed", ".seed", "natural"),
    to("train_data_paths", {"data.train[0].kind": "file", "data.train[0].path": _paths}, "path or [path]?",
       unless_null()),
    to("val_data_paths", {"data.eval[0].kind": "file", "data.eval[0].path": _paths}, "path or [path]?",
       unless_null()))

_REWARD = section("reward", "reward.parts[0]")(
    to("use_reward_model", ".kind", "bool", TEXT_ONLY, _reward_model, default=False),
    to("model.model_path", ".path", "path", needs("reward.use_reward_model")),
    to("reward_type", ".kind", "math|vqa|code_offline|searchr1|rstar2", TEXT_ONLY,
       unless(lambda s: s["reward.use_reward_model"], "overridden by reward.use_reward_model"),
       lambda v, _: v if v == "math" else unsupported(
           "use math, braid.reward.parts=[{kind: choice}], or a function: "
           "[{kind: function, path: file.py:score}]"),
       default="math",
       note="1 if math-verify finds the answer equal to a solution, else 0; see reward_scale"),
    to("reward_scale", "", "positive", TEXT_ONLY, _reward_scale, default=1.0,
       note="+reward_scale or -reward_scale in training; evaluation reports the share of correct answers"),
    to("reward_min_val", "", "number", TEXT_ONLY, _reward_scale, default=-1.0),
    to("reward_max_val", "", "number", TEXT_ONLY, _reward_scale, default=1.0),
    ignored("tokenizer.*", "rewards receive text; a reward model uses its own tokenizer"),
    ignored("reward_weights.*", "for reward.reward_type=vqa only"),
    ignored("{len_reward_penalty,safe_length,max_length}", "not read by RLinf"),
    to("group_name", "cluster.group_names.reward", "text", WORKERS))

_CRITIC = section("critic")(
    to("use_critic_model", "algorithm.advantage.kind", "bool", TEXT_ONLY, _critic, default=False,
       note="with adv_type gae; without values gae is the plain return: gamma = lambda = 1"),
    to("* {model,optim,lr_sched,tokenizer,megatron,fsdp_config}.* megatron.{ckpt_convertor,profiler}.* "
       "fsdp_config.{mixed_precision,amp_autocast,grad_scaler}.*", "", "any", TEXT_ONLY,
       unless(lambda s: not facts.has_critic(s), "there is no critic"), _as_actor),
    to("group_name", "cluster.group_names.critic", "text", WORKERS),
    to("model.model_path", "critic.path", "path?", TEXT_ONLY))

RULES = rows(
    to("defaults", "", "list", presets),
    to("hydra.run.dir", "run.base_dir", "path", lambda v, _: str(Path.cwd() / v), default=".",
       note="relative data paths start at the working directory, not at the file"),
    always("hydra.output_subdir", "the resolved config is always stored in the run folder", "text?"),
    always("hydra.searchpath", "folders searched for the presets of `defaults`, after the file's own folder",
           "list"),
    ignored("hydra.job.*", "braid does not use Hydra jobs"),
    ignored("profile_data.*", "for RLinf's placement search only"),
    _CLUSTER, _RUNNER, _DATA, _REWARD, _CRITIC,
)
# fmt: on
