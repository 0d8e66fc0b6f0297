"""SkyRL's files for supervised fine-tuning (SFTConfig), whose keys are flat.

Keys that the other files have below `trainer` or `trainer.policy` are aliases of those, with defaults of their
own; keys of data and length are here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from braid.config.data import HubSource, source_name

from . import skyrl_facts as facts
from .conditions import needs, refused, unless
from .conversions import at_least_0, folder_name, mapped, positive, unless_null
from .rows import always, ignored, missing, rows, to
from .skyrl_trainer import TRAINER
from .table import Became, Dialect, Rule, Source, no_effect, table, unsupported
from .values import Takes

_FILES = (".json", ".jsonl", ".csv", ".parquet")
_SLICE = re.compile(r"(\w+)\[:(\d+)\]")
_ROLES = ("trainer.critic", "trainer.ref", "trainer.placement.critic", "trainer.placement.ref")
_KEPT = (
    "trainer.policy.", "trainer.placement.policy_", "trainer.seed", "trainer.bf16", "trainer.flash_attn",
    "trainer.gradient_checkpointing", "trainer.use_sample_packing", "trainer.strategy", "trainer.logger",
    "trainer.project_name", "trainer.max_ckpts_to_keep", "trainer.hf_save_interval",
    "trainer.ckpt_interval", "trainer.log_path", "trainer.tags", "trainer.enable_ray_gpu_monitor",
    "trainer.logprobs_chunk_size", "trainer.fused_lm_head_logprob", "trainer.use_expandable_segments",
    "trainer.disable_fast_tokenizer", "trainer.target_modules", "trainer.exclude_modules", "trainer.rope_",
)  # fmt: skip
"""Beginnings of the keys that these files have too."""
_DEFAULTS: Mapping[str, Any] = {
    "trainer.strategy": "megatron",
    "trainer.policy.model.path": "Qwen/Qwen3-0.6B",
    "trainer.policy.megatron_config.tensor_model_parallel_size": 2,
    "trainer.policy.megatron_config.pipeline_model_parallel_size": 2,
    "trainer.logger": "console",
    "trainer.ckpt_interval": 0,
    "trainer.hf_save_interval": 0,
    "trainer.policy.sequence_parallel_size": 1,
}
"""Defaults that differ from those of the other files."""
_NOTES = {"trainer.strategy": "fsdp is FSDP2", "trainer.placement.policy_num_gpus_per_node": ""}
"""Notes that differ."""


def _shared() -> Iterator[Rule]:
    """Rows of the other files, for the optimizer of `sft`."""
    for rule in TRAINER:
        if rule.path.startswith(_KEPT) and not rule.path.startswith(_ROLES):
            native = rule.native.replace("{train}.optimizer", "sft.optimizer")
            native = native.replace("train.optimizer", "sft.optimizer")
            default = _DEFAULTS.get(rule.path, rule.default)
            note = _NOTES.get(rule.path, rule.note)
            yield replace(rule, native=native, default=default, note=note)


def _in_file(path: str) -> str:
    """A key of the table as these files spell it."""
    path = path.replace("trainer.placement.policy_", "placement.")
    return path.removeprefix("trainer.").removeprefix("policy.")


def _named(source: Source, kind: str) -> list[str]:
    """Names of the data sets of a kind, `train` or `eval`: unique ones, for metrics and shares."""
    single = source[f"{'' if kind == 'train' else 'eval_'}dataset_name"]
    paths = [single] if single else source[f"{kind}_datasets"] or ()
    asked = source["eval_dataset_names"] if kind == "eval" and paths else None
    names = [folder_name(name) for name in asked or (source_name(HubSource(path=path)) for path in paths)]
    return [name if names.count(name) == 1 else f"{i}-{name}" for i, name in enumerate(names)]


def _splits(source: Source, kind: str, num: int) -> list[str]:
    single = source[f"{'' if kind == 'train' else 'eval_'}dataset_split"]
    splits = [single] if single else source[f"{kind}_dataset_splits"]
    splits = splits or ["train"] * num
    if len(splits) != num:
        raise ValueError(f"there are {len(splits)} splits for {num} data sets; give one for each")
    return splits


def _sources(kind: str) -> Any:
    """Native sources of the data sets of a kind."""
    native = {"train": "sft.data", "eval": "sft.eval_data"}[kind]

    def convert(value: Any, source: Source) -> Became:
        paths = [value] if isinstance(value, str) else value
        made: dict[str, Any] = {}
        names = _named(source, kind)
        if len(names) != len(paths):
            raise ValueError(f"there are {len(names)} names for {len(paths)} data sets; give one for each")
        for i, (path, split) in enumerate(zip(paths, _splits(source, kind, len(paths)), strict=True)):
            at, is_file = f"{native}[{i}]", Path(path).suffix in _FILES
            made |= {f"{at}.kind": "file" if is_file else "hub", f"{at}.path": path, f"{at}.name": names[i]}
            part = _SLICE.fullmatch(split)
            if not is_file:
                made[f"{at}.split"] = split
            elif part is not None:
                made[f"{at}.limit"] = int(part[2])
            elif not split.isidentifier():
                raise ValueError(f"{split!r} of a file is not supported; use NAME or NAME[:N]")
        return Became(made)

    return convert


def _shares(value: list[float] | None, source: Source) -> Any:
    """Shares of several data sets; equal ones by default."""
    names = _named(source, "train")
    if len(names) < 2:
        return no_effect("there is one data set")
    shares = value or [1.0] * len(names)
    if len(shares) != len(names):
        raise ValueError(f"there are {len(shares)} weights for {len(names)} data sets; give one for each")
    native: dict[str, Any] = {}
    for i, (name, share) in enumerate(zip(names, shares, strict=True)):
        native |= {f"sft.mix[{i}].sources": [name], f"sft.mix[{i}].share": share}
    return Became(native)


def _columns(source: Source) -> list[str]:
    """Native paths of all sources."""
    kinds = {"train": "sft.data", "eval": "sft.eval_data"}
    return [f"{native}[{i}]" for kind, native in kinds.items() for i in range(len(_named(source, kind)))]


def _steps(value: int | None, source: Source) -> Any:
    """Optimizer steps: the fewer of num_steps and max_training_steps."""
    limits = [limit for limit in (source["num_steps"], source["max_training_steps"]) if limit]
    if value is None:
        return no_effect("null: no such limit")
    if source["num_steps"] is None:
        return unsupported("set num_steps to it, in place of num_epochs")
    return min(limits)


def _resume(value: str, _: Source) -> Any:
    return value or "none"


def _micro_rows(value: int, source: Source) -> Became:
    """Rows per forward pass; the token limit is set so that it never binds."""
    made: dict[str, Any] = {"train.micro_batch_rows": value}
    if source["max_length"]:
        made["train.micro_batch_tokens"] = value * source["max_length"]
    return Became(made)


_NO_EVALUATION = unless(lambda s: not _named(s, "eval"), "there are no eval_datasets")
_BY_NAME = unless(lambda s: s["dataset_name"], "overridden by dataset_name")
_EVAL_BY_NAME = unless(lambda s: s["eval_dataset_name"], "overridden by eval_dataset_name")
_BY_ROWS = unless(lambda s: s["max_tokens_per_microbatch"], "overridden by max_tokens_per_microbatch")

_TEXT = Takes("a string, empty for none", lambda v: isinstance(v, str))

# One rule per line.
# fmt: off
_SFT = rows(
    to("train_datasets", "", "[text]", _BY_NAME, _sources("train"), default=["yahma/alpaca-cleaned"],
       note="of the hub, or files of JSON, JSONL, CSV or Parquet"),
    to("train_dataset_splits", "", "[text]?", _BY_NAME, lambda _, s: _sources("train")(s["train_datasets"], s),
       default=["train[:100]"]),
    to("train_dataset_weights", "", "[non-negative]?", _shares, default=None,
       note="shares of any stretch of the examples, equal by default, whatever the sizes"),
    to("dataset_name", "", "text?", unless_null(), _sources("train"), default=None),
    to("dataset_split", "", "text?", unless_null(), needs("dataset_name"),
       lambda _, s: _sources("train")(s["dataset_name"], s), default=None),
    missing("pretokenized_dataset_paths", "use the conversations: train_datasets with messages_key"),
    to("eval_datasets", "", "[text]?", unless_null("there is no evaluation"), _EVAL_BY_NAME, _sources("eval"),
       default=None, note="loss per token of each"),
    to("eval_dataset_splits", "", "[text]?", unless_null(), _NO_EVALUATION, _EVAL_BY_NAME,
       lambda _, s: _sources("eval")(s["eval_datasets"], s), default=None),
    to("eval_dataset_names", "", "[text]?", unless_null(), _NO_EVALUATION, _EVAL_BY_NAME,
       lambda _, s: _sources("eval")(s["eval_datasets"], s), default=None),
    to("eval_dataset_name", "", "text?", unless_null("there is no evaluation"), _sources("eval"), default=None),
    to("eval_dataset_split", "", "text?", unless_null(), needs("eval_dataset_name"),
       lambda _, s: _sources("eval")(s["eval_dataset_name"], s), default=None),
    to("eval_interval", {"eval.every_rounds": at_least_0, "eval.at_end": positive}, "int", _NO_EVALUATION,
       default=0),
    to("eval_before_train", "eval.before", "bool", _NO_EVALUATION, default=False),
    to("messages_key", "{sources}.messages_key", "text", default="messages"),
    to("tools_key", "{sources}.tools_key", "text?",
       note="set it only if the column is there; SkyRL reads a column `tools` where it is"),
    missing("system_key", "write the system message into the conversations", default="system"),
    to("train_on_what", "sft.train_on",
       {"last_assistant_message": "last_turn", "all_assistant_messages": "all_turns"},
       default="last_assistant_message"),
    to("max_length", "sft.max_tokens", "count?", default=None, note="longer rows are cut at their end"),
    to("num_steps", "sft.steps", "count?",
       refused(lambda v, s: v and "num_epochs" in s.values and s["num_epochs"] is not None and
               "conflicts with num_epochs; set one of them"), _steps, default=None),
    to("num_epochs", "sft.epochs", "count?", unless(lambda s: s["num_steps"], "num_steps sets the length"),
       unless_null("one pass"), lambda v, _: float(v), default=1,
       note="the last step of a pass takes the rows that are left"),
    to("max_training_steps", "sft.steps", "count?", _steps, default=None),
    to("batch_size", "sft.rows_per_step", "count", default=4, note="rows of all devices"),
    to("micro_train_batch_size_per_gpu", "train.micro_batch_rows", "count", _BY_ROWS, _micro_rows, default=2,
       note="memory only"),
    to("max_tokens_per_microbatch", "train.micro_batch_tokens", "count?", unless_null("max_length")),
    to("sampler", "sft.shuffle", "random|sequential|custom",
       mapped({"random": True, "sequential": False,
               "custom": unsupported("use random or sequential, or write the rows in the order wanted")}),
       default="random"),
    missing("sampler_class_path", "write the rows in the order wanted, with sampler: sequential"),
    always("use_sequence_packing", "rows are always packed", "bool"),
    to("ckpt_path", "checkpoint.dir", _TEXT, lambda v, _: v or None, default=""),
    to("export_path", "checkpoint.export_dir", _TEXT, needs("trainer.hf_save_interval"), lambda v, _: v or None,
       default=""),
    to("resume_from", "run.resume", _TEXT, _resume, default="",
       note="latest, or a checkpoint of braid; of SkyRL's, only HF exports can be read"),
    to("run_name", "run.name", _TEXT,
       lambda v, _: folder_name(v) if v else no_effect("the name of the file's run is braid's default"),
       default=""),
    missing("dummy_run_full_ctx", "set it to false", default=False),
    ignored("dummy_run_max_steps num_workers cache_dir force_recache async_batch_collation "
            "dataloader_{num_workers,pin_memory,prefetch_factor,persistent_workers,drop_last}",
            "data is read as it is needed, without copies of it"),
)
# fmt: on


def _base(source: Source) -> dict[str, Any]:
    """Paths relative to the working directory, what becomes of long rows, and the backend of the command
    line."""
    out: dict[str, Any] = {"run.base_dir": str(Path.cwd()), "sft.overlong": "truncate_right"}
    return out | ({} if source.backend is None else {"train.backend.kind": source.backend})


_SHARED = list(_shared())

SKYRL_SFT = Dialect(
    name="skyrl",
    title="SkyRL",
    rules=table(rows(_SHARED, _SFT)),
    base=_base,
    places={
        "engine": lambda s: s.engine or "native",
        "backend": facts.backend,
        "train": lambda _: "train",
        "trained": lambda _: "train",
        "models": lambda _: "train",
        "tracker": lambda s: s["trainer.logger"],
        "trackers": lambda s: [
            f"report.{tracker}" for tracker in ("wandb", "swanlab") if tracker == s["trainer.logger"]
        ],
        "sources": _columns,
    },
    aliases={_in_file(rule.path): rule.path for rule in _SHARED}
    | {"remove_microbatch_padding": "trainer.use_sample_packing"},
    spelled={"trainer.placement.policy_": "placement.", "trainer.policy.": "", "trainer.": ""},
    versions=("0.5",),
    version="0.5",
    version_from="its files for supervised fine-tuning are read as of this version",
)
_MARKS = frozenset(path.partition(".")[0] for path in (*SKYRL_SFT.aliases, *(rule.path for rule in _SFT)))


def is_supervised(paths: Mapping[str, Any]) -> bool:
    """Whether a file is of supervised fine-tuning: it has such keys, and none of the sections of others."""
    sections = {path.partition(".")[0] for path in paths}
    return not sections & {"trainer", "generator", "environment", "data"} and bool(sections & _MARKS)
