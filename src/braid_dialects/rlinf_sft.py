"""RLinf's supervised fine-tuning of language models, with or without images: `runner.task_type: sft`.

Keys of the cluster, the logger and the actor are those of other files, for the optimizer of `sft`; keys of data,
batches and length are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from . import rlinf_facts as facts
from . import rlinf_run
from .conditions import refused, unless
from .conversions import at_least_0, listed, positive, unless_null
from .rlinf_actor import RULES as ACTOR
from .rlinf_checks import OF_ALL
from .rlinf_rollout import OTHER_MODELS, ROBOT_MODELS
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Dialect, Rule, Source, implied, no_effect, table
from .values import choice

_OTHER = (
    "runner.task_type", "runner.max_epochs", "runner.max_steps", "runner.val_check_interval", "runner.seq_length",
    "runner.enable_dynamic_batch_size", "runner.max_tokens_per_mbs", "runner.only_eval", "runner.max_prompt_length",
    "runner.weight_sync_interval", "runner.overlap_env_bootstrap", "runner.use_training_pipeline",
    "actor.micro_batch_size", "actor.global_batch_size", "actor.optim.critic_warmup_steps", "actor.optim.value_lr",
    "actor.combine_reference_model", "data.", "reward.", "critic.",
)  # fmt: skip
"""Beginnings of keys whose rows are not those of other files."""
_ANY_LENGTH = 2**31 - 1


def is_supervised(values: Mapping[str, Any]) -> bool:
    """Whether a file is of supervised fine-tuning of a language model. Robots imitate demonstrations."""
    kind = values.get("actor.model.model_type")
    is_robot = kind in (*ROBOT_MODELS, *OTHER_MODELS) or any(path.startswith("env.") for path in values)
    return values.get("runner.task_type") == "sft" and not is_robot


def _shared() -> Iterator[Rule]:
    for rule in rows(rlinf_run.RULES, ACTOR):
        if not rule.path.startswith(_OTHER):
            yield replace(rule, native=rule.native.replace("train.optimizer", "sft.optimizer"))


def _sources(source: Source) -> list[str]:
    """Native paths of the data sources in the file."""
    keys = {"sft.data[0]": "data.train_data_paths", "sft.eval_data[0]": "data.val_data_paths"}
    return [native for native, key in keys.items() if source[key]]


def _files(value: Any, source: Source) -> list[str]:
    """Paths of files; of a folder all its files."""
    paths = listed(value, source)
    return [f"{path.rstrip('/')}/**/*.*" if rlinf_run.FOLDER_PATH.search(path) else path for path in paths]


def _epochs(value: int, source: Source) -> Any:
    if value > 0:
        return Became({"sft.epochs": float(value)})
    if (source["runner.max_steps"] or -1) >= 0:
        return no_effect("no limit: runner.max_steps ends the run")
    return implied("without a limit there is one pass, as in RLinf")


def _steps(value: int, source: Source) -> Any:
    if value < 0:
        return no_effect("no limit: runner.max_epochs ends the run")
    if value == 0:
        raise ValueError("a run needs at least one step; set it to -1 for no limit")
    if (epochs := source["runner.max_epochs"]) > 0:
        raise ValueError(
            f"{value}, with runner.max_epochs={epochs}: which of them ends the run depends on the data; set "
            "one of them to -1"
        )
    return value


def _rows_per_step(value: int, source: Source) -> int:
    micro, ranks = source["actor.micro_batch_size"] or 1, facts.dp_size(source)
    if value % (micro * ranks):
        raise ValueError(
            f"{value} rows of an optimizer step are not a multiple of actor.micro_batch_size={micro} * {ranks} "
            f"data-parallel ranks = {micro * ranks}"
        )
    return value


_HAS_EVALUATION = unless(lambda s: not s["data.val_data_paths"], "data.val_data_paths is not set")
_HAS_COLUMN = unless(lambda s: not _sources(s), "data.train_data_paths is not set")

# One rule per line.
# fmt: off
_SFT = rows(
    always("runner.task_type", "supervised fine-tuning", choice("sft")),
    to("runner.max_epochs", "sft.epochs", "int", _epochs, default=-1,
       note="the last step of a pass takes the rows that are left"),
    to("runner.max_steps", "sft.steps", "cadence", _steps, default=-1, note="optimizer steps"),
    to("runner.val_check_interval",
       {"eval.every_rounds": at_least_0, "eval.at_end": positive, "eval.before": False}, "cadence",
       _HAS_EVALUATION, default=-1, note="in optimizer steps, and after the last"),
    missing("runner.only_eval", "use braid eval", default=False),
    ignored("runner.{seq_length,enable_dynamic_batch_size,max_tokens_per_mbs,weight_sync_interval,max_prompt_length}",
            "for rollouts; see actor.micro_batch_size and data.max_prompt_length"),
    to("actor.micro_batch_size", "train.micro_batch_rows", "count", note="rows per device and forward pass"),
    to("actor.global_batch_size", "sft.rows_per_step", "count", _rows_per_step,
       note="the loss is the mean over the tokens of the step; in RLinf over micro-batches of their means"),
    to("actor.eval_batch_size", "train.infer_batch_rows", "count", _HAS_EVALUATION, default=1),
    section("data")(
        always("type", "image_keys and the model tell whether rows have images; the vision tower is trained too, "
               "unless there are adapters", "text?"),
        to("train_data_paths", {"sft.data[0].kind": "file", "sft.data[0].path": _files}, "path or [path]?",
           refused(lambda v, _: not v and "an evaluation alone is braid eval; set it"), default=None,
           note="of a folder all files"),
        to("val_data_paths", {"sft.eval_data[0].kind": "file", "sft.eval_data[0].path": _files},
           "path or [path]?", unless_null("there is no evaluation"),
           note="loss and perplexity of the answers; RLinf samples them and counts the right ones"),
        to("prompt_key", "{sources}.prompt_key", "text", _HAS_COLUMN, default="prompt"),
        to("answer_key", "{sources}.response_key", "text", _HAS_COLUMN, default="answer"),
        missing("choice_key", "write the choices into the prompt"),
        to("image_keys", "{sources}.images_key", "[text]?", _HAS_COLUMN, unless_null("rows have no images"),
           rlinf_run.image_column, note="<image> in a prompt places each; without it they come first"),
        to("system_prompt", "{sources}.system", "text?", _HAS_COLUMN, unless_null()),
        to("use_chat_template apply_chat_template", "data.use_chat_template", "bool",
           lambda v, _: "always" if v else "never"),
        to("max_prompt_length", "data.max_prompt_tokens", "count", note="longer prompts are dropped"),
        to("shuffle", "sft.shuffle", "bool", default=True),
        to("data_size", "sft.data[0].limit", "cadence", lambda v, _: v if v > 0 else None, note="0, -1: all"),
        ignored("dataset_name lazy_loading num_workers prefetch_factor process_workers process_batch_size seed "
                "filter_prompt_by_length solution_key rollout_batch_size val_rollout_batch_size",
                "rows stay in their files and are read as they are needed, in an order of the run's seed"),
        missing("video_root data_root video_nframes video_fps video_max_pixels",
                "videos are not read; write frames as images")),
    ignored("algorithm.* rollout.* reward.* critic.* inference.*", "not read in supervised fine-tuning"),
)
# fmt: on


def _base(source: Source) -> dict[str, Any]:
    """Prompts of any length, and a tower where there are images."""
    native: dict[str, Any] = {"data.max_prompt_tokens": _ANY_LENGTH}
    if facts.reads_images(source):
        native["model.vision.train"] = "none" if source["actor.model.is_lora"] else "all"
    return native


def dialect(aliases: Mapping[str, str]) -> Dialect:
    """RLinf's dialect of these files, with those of its `aliases` that they have."""
    rules = table(rows([*_shared()], _SFT))
    names = {alias: name for alias, name in aliases.items() if name in rules and alias not in rules}
    return Dialect(
        name="rlinf",
        title="RLinf",
        rules=rules,
        base=_base,
        places={
            "engine": facts.engine,
            "backend": facts.backend,
            "sinks": rlinf_run.sinks,
            "sources": _sources,
            "scaler": lambda s: ["train.backend"] if facts.backend(s) == "megatron" else [],
        },
        checks=OF_ALL,
        aliases=names,
    )
