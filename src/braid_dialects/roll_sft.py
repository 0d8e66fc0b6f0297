"""ROLL's pipeline for supervised fine-tuning: a file with the section `sft_train`.

Its worker is one that trains, as `actor_train` in the other pipelines: keys of models, devices and strategies
are those of roll_workers.py under another name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from . import roll_facts as facts
from .conditions import unless
from .conversions import as_is, unless_null
from .roll_data import DATA
from .roll_facts import TRAIN
from .roll_pipeline import ALGORITHM, PIPELINE
from .roll_workers import WORKERS
from .rows import ignored, missing, rows, section, to
from .table import Dialect, Rule, Source, table

ANY_LENGTH = 2**31 - 1
"""A limit of prompts that no example reaches: files have one limit, of prompt and response together."""
_ROLE = "actor_train."
_OTHER_WORK = (
    "worker_cls", "pg_variant", "topr_", "model_update_frequency", "router_replay.", "model_args.model_name_or_path",
    "model_args.freeze_module_prefix", "training_args.num_train_epochs", "training_args.gradient_accumulation_steps",
)  # fmt: skip
"""Beginnings of the keys of actor_train whose rows are not those of sft_train."""
_OF_THE_RUN = [
    "exp_name",
    "seed",
    "output_dir",
    "save_steps",
    "max_ckpt_to_keep",
    "checkpoint_config.",
    "resume_from_checkpoint",
    "track_with",
    "tracker_kwargs.",
    "logging_steps",
    "logging_dir",
    "base_dir",
    "profiler_",
    "otlp_output_dir",
    "rpc_timeout",
    "system_envs",
    "num_nodes",
    "num_gpus_per_node",
    "model_download_type",
    "max_grad_norm",
    "eval_steps",
    "hydra.",
    "defaults",
    "offload_nccl",
    "is_offload_states",
    "is_offload_optimizer_states_in_train_step",
    "save_logging_board_dir",
    "local_rank",
    "use_remove_padding",
]
"""Beginnings of the keys of the run that all pipelines have."""


def _of_worker() -> Iterator[Rule]:
    for rule in rows(WORKERS, DATA):
        name = rule.path.removeprefix(_ROLE)
        is_other = name.startswith(_OTHER_WORK) or (name.startswith("data_args.") and "template" not in name)
        if rule.path.startswith(_ROLE) and not is_other:
            native = rule.native.replace("{train}.optimizer", "sft.optimizer")
            yield replace(rule, path=f"sft_train.{name}", native=native)


def _of_run() -> Iterator[Rule]:
    return (rule for rule in rows(PIPELINE, ALGORITHM) if rule.path.startswith(tuple(_OF_THE_RUN)))


def _examples(source: Source) -> list[str]:
    """Native paths of the sources: training, and evaluation if there is one."""
    return ["sft.data[0]", *(["sft.eval_data[0]"] if facts.validates(source) else [])]


# One rule per line.
# fmt: off
_SFT = rows(
    to("pretrain", "model.path", "path"),
    to("sft_train.model_args.model_name_or_path", "model.path", "path?",
       unless(lambda s: s["pretrain"] is not None, "overridden by pretrain, as in ROLL"),
       unless_null()),
    missing("sft_train.model_args.freeze_module_prefix", "use adapters: lora_target"),
    to("sequence_length", {"sft.max_tokens": as_is, "data.max_prompt_tokens": as_is}, "integer >= 2?",
       unless_null("the model's positions"), default=None,
       note="prompt and response; longer rows are dropped and counted. In ROLL they break the batch"),
    to("prompt_key", "{examples}.prompt_key", "text", default="instruction", note="the user's message"),
    to("query_key", "{examples}.template", "text?", unless_null("the prompt alone"),
       lambda v, s: f"{{{s['prompt_key']}}}\n{{{v}}}", default=None,
       note="after the prompt, in a new line, which stays where it is empty; not in ROLL"),
    to("response_key", "{examples}.response_key", "text", default="output",
       note="with the end token of the chat template; prompts are not learned"),
    missing("system_key", "write conversations with a system message, and set braid.sft.data to them "
            "(messages_key); one message for all rows is braid.sft.data[0].system"),
    to("sft_train.data_args.file_name", "sft.data[0].path", "text or [text]",
       note="JSON, JSONL, CSV or Parquet; several files are concatenated"),
    section("validation.data_args")(
        to("file_name", "sft.eval_data[0].path", "text or [text]?", unless_null("there is no evaluation"),
           note="with the columns and the template of training: loss per token"),
        ignored("template prompt messages prompt_key response_key query_key system_key", "as in training"),
        ignored("dataset_type dataset_dir preprocessing_num_workers interleave_probs id tag response "
                "domain_interleave_probs eval_file_name", "determined by the file, or not read")),
    ignored("validation.{worker_cls,name,world_size,num_gpus_per_worker,device_mapping,infer_batch_size,eval_steps} "
            "validation.{model_args,strategy_args,training_args,generating_args,system_envs}.*",
            "evaluation uses the model and the devices of training"),
    ignored("sft_train.data_args.{dataset_type,dataset_dir,preprocessing_num_workers,interleave_probs,id,tag} "
            "sft_train.data_args.{prompt,messages,response,domain_interleave_probs,eval_file_name}",
            "determined by the file and the keys of columns at top level"),
    to("sft_train.training_args.num_train_epochs", "sft.epochs", "count", lambda v, _: float(v), default=1,
       note="not shuffled; each pass ends with a smaller step of the rows that are left, which ROLL drops"),
    to("sft_train.training_args.gradient_accumulation_steps", "sft.rows_per_step", "count",
       lambda _, s: facts.global_batch(s, "sft_train"), default=1,
       note="rows per step = per_device_train_batch_size * this * dp"),
    ignored("max_steps", "the length follows from num_train_epochs and the data, as in ROLL"),
    ignored("sft_train.{worker_cls,generating_args,generating_args.*}", "determined by the pipeline"),
)
# fmt: on


def _base(source: Source) -> dict[str, Any]:
    """Kinds of the sources, their order, and micro-batches: as many tokens as their rows can have."""
    made: dict[str, Any] = {"sft.shuffle": False, "data.max_prompt_tokens": ANY_LENGTH}
    made |= {f"{native}.kind": "file" for native in _examples(source)}
    if whole := source["sequence_length"]:
        at = "sft_train.training_args.per_device_train_batch_size"
        made |= {"train.micro_batch_tokens": whole * source[at]}
        made |= {"train.infer_batch_tokens": whole * source["sft_train.infer_batch_size"]}
    return made


ROLL_SFT = Dialect(
    name="roll",
    title="ROLL",
    rules=table(rows([*_of_run()], [*_of_worker()], _SFT)),
    base=_base,
    places={
        "engine": facts.engine,
        "backend": lambda s: facts.backend(s, "sft_train"),
        "train": lambda _: TRAIN["sft_train"],
        "trained": lambda _: ["train"],
        "placed": lambda _: "policy",
        "tracker": lambda s: s["track_with"],
        "examples": _examples,
    },
    aliases={"global_template": "sft_train.data_args.template"},
)
