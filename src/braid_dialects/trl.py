"""The arguments of TRL: scripts with a trainer's config, and the files of `trl grpo|dpo|sft|reward --config`.

Each trainer has its own table; what they share, the fields of transformers' TrainingArguments and of TRL's ModelConfig
and ScriptArguments, is here. The number of processes, which TRL leaves to accelerate, is the key `num_processes`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from . import trl_facts as facts
from .conditions import needs, unless
from .conversions import folder_name, listed, part_of, trackers, unless_null
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Dialect, Rule, Source, implied, no_effect, table, unsupported
from .trl_facts import NO_EVALUATION
from .trl_grpo import GRPO
from .trl_offline import DPO, REWARD, SFT
from .values import choice


def _sources(value: str, source: Source) -> Became:
    """The data set of the hub, or the file, for training and evaluation."""
    made: dict[str, Any] = {}
    kinds = zip(facts.data(source), ("dataset_train_split", "dataset_test_split"), strict=True)
    for at, split in kinds:
        if split == "dataset_test_split" and not facts.evaluates(source):
            continue
        one: dict[str, Any] = {"kind": "hub", "path": value, "split": source[split]}
        if source["dataset_config"]:
            one["subset"] = source["dataset_config"]
        if facts.is_file(value):
            if split == "dataset_test_split":
                raise ValueError(
                    "a file has no split for evaluation; set braid." + at + ", or eval_strategy=no"
                )
            one = {"kind": "file", "path": value}
        made[at] = [one | facts.columns(source)]
    return Became(made)


def _mixture(value: list[dict[str, Any]] | None, source: Source) -> Any:
    """Several data sets, in proportion to their sizes."""
    if not value:
        return no_effect("dataset_name is the data")
    made = []
    for one in value:
        if others := set(one) - {"path", "name", "split"}:
            return unsupported(f"{', '.join(sorted(others))}: set braid.{facts.data(source)[0]}")
        subset = {"subset": one["name"]} if one.get("name") else {}
        kind = (
            {"kind": "file"}
            if facts.is_file(one["path"])
            else {"kind": "hub", "split": one.get("split", "train"), **subset}
        )
        made.append({"path": one["path"], **kind, **facts.columns(source)})
    return Became({facts.data(source)[0]: made})


def _folder(value: str, _: Source) -> Became:
    """TRL's folder of a run: its last name is the run's."""
    path = PurePath(os.path.expanduser(value))
    return Became({"run.name": folder_name(path.name) or "run", "run.output_dir": str(path.parent)})


_TRACKERS = ("wandb", "swanlab", "tensorboard")


def _trackers(source: Source) -> list[str]:
    value = source["report_to"]
    names = [value] if isinstance(value, str) else value or []
    return list(_TRACKERS) if names == ["all"] else names


def _report(_: Any, source: Source) -> Became:
    return trackers([name for name in _trackers(source) if name != "none"])


def _processes(value: int, source: Source) -> Became:
    """All roles on the devices of all processes."""
    if value == 1 or source.backend == "single":
        return implied("everything runs in one process")
    roles = {"grpo": "policy,rollout", "dpo": "policy,reference"}.get(facts.pipeline_of(source), "policy")
    if source["beta"] and facts.pipeline_of(source) == "grpo":
        roles = "policy,reference,rollout"
    native: dict[str, Any] = {
        "cluster.placement": {roles: f"0-{value - 1}"},
        "cluster.devices_per_node": value,
    }
    return Became(native | {"train.backend.kind": facts.backend(source)})


def _steps(value: int, source: Source) -> Any:
    """The length in optimizer steps, in place of epochs."""
    if value <= 0:
        return no_effect("num_train_epochs sets the length")
    match facts.pipeline_of(source):
        case "grpo":
            return Became({"run.max_rounds": facts.in_rounds(value, source)})
        case "sft":
            return Became({"sft.steps": value})
        case _:
            return Became({"prefer.steps": value})


def _epochs(value: float, source: Source) -> Any:
    if source["max_steps"] > 0:
        return no_effect("max_steps sets the length")
    match facts.pipeline_of(source):
        case "grpo" if value != int(value):
            return unsupported("use whole epochs, or max_steps")
        case "grpo":
            return Became({"run.max_epochs": int(value)})
        case "sft":
            return Became({"sft.epochs": float(value)})
        case _:
            return Became({"prefer.epochs": float(value)})


def _batch(_: Any, source: Source) -> Became:
    """Rows of an optimizer step; in GRPO completions, in whole groups."""
    pipeline = facts.pipeline_of(source)
    if pipeline != "grpo":
        return Became(
            {
                "sft.rows_per_step" if pipeline == "sft" else "prefer.pairs_per_step": facts.rows_per_step(
                    source
                )
            }
        )
    whole = facts.completions_per_round(source)
    return Became(
        {
            "rollout.prompts_per_round": whole // source["num_generations"],
            "train.steps_per_pass": whole // facts.rows_per_step(source),
        }
    )


def _per_device(value: int, source: Source) -> Became:
    # a pair is two rows
    rows_of = value * (2 if facts.pipeline_of(source) in ("dpo", "reward") else 1)
    return Became({**_batch(value, source).native, "train.micro_batch_rows": rows_of})


def _cadence(key: str, section_: str) -> Any:
    """Every so many steps, or none; an epoch is the end of training or not known beforehand."""

    def convert(value: str, source: Source) -> Any:
        match value:
            case "no":
                return Became({f"{section_}.every_rounds": 0, f"{section_}.at_end": False})
            case "steps" if (steps := source[key] or source["logging_steps"] or 10) >= 1:
                return Became(
                    {
                        f"{section_}.every_rounds": facts.in_rounds(int(steps), source),
                        f"{section_}.at_end": True,
                    }
                )
            case "best" | "steps":
                return unsupported(f"use steps, with {key} as a number of steps")
        return Became(
            {f"{section_}.every_rounds": 0, f"{section_}.at_end": True},
            note="at the end of training; for others set a number of steps",
        )

    return convert


def _warmup(value: float, _: Source) -> Any:
    if value < 1:
        return {"warmup_fraction": float(value)}
    return {"warmup_steps": int(value)}


def _schedule(value: float, source: Source) -> Became:
    at = facts.OPTIMIZERS.get(facts.pipeline_of(source), "prefer.optimizer")
    return Became({f"{at}.schedule.{name}": item for name, item in _warmup(value, source).items()})


_SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine", "inverse_sqrt": "inverse_sqrt",
    **dict.fromkeys(("cosine_with_restarts", "polynomial", "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"),
                    unsupported("use constant, linear, cosine or inverse_sqrt")),
}  # fmt: skip
_DTYPES = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16",
    **dict.fromkeys(("auto", None), no_effect("weights are trained in fp32")),
}  # fmt: skip
_NO_WARMUP = unless(
    lambda s: s["lr_scheduler_type"] == "constant", "constant has no warmup; see constant_with_warmup"
)
_PEFT = needs("use_peft")

# One rule per line.
# fmt: off
_COMMON = rows(
    ignored("trainer", "chooses the pipeline", choice(*facts.PIPELINES)),
    to("num_processes", "cluster.placement", "count", _processes, default=1, note="of accelerate: one for each device; FSDP2 unless --backend names another"),
    # model
    to("model_name_or_path", "model.path", "text"),
    missing("model_revision", "download the revision, and give its folder", default="main"),
    to("dtype", "model.dtype", _DTYPES, note="trained with fp32 weights, computed in this type"),
    to("attn_implementation", "model.attention", "text?", unless_null("chosen by the device"),
       lambda v, _: v if v in ("sdpa", "eager") else "auto"),
    to("trust_remote_code", "model.trust_remote_code", "bool", default=False),
    missing("model_init_kwargs.*", "use the keys of `model` in docs/config.md"),
    ignored("use_peft", "adapters have the keys lora_*", "bool"),
    to("lora_r", "model.lora.rank", "count", _PEFT, default=16),
    to("lora_alpha", "model.lora.alpha", "positive", _PEFT, default=32),
    missing("lora_dropout", "set it to 0: log-probs must be the same each time", _PEFT, default=0.0),
    to("lora_target_modules", "model.lora.targets", "text or [text]?", _PEFT, lambda v, _: v or ["q_proj", "v_proj"], listed, default=None,
       note="null: q_proj and v_proj"),
    missing("{lora_modules_to_save,lora_target_parameters}", "list the layers in lora_target_modules", _PEFT),
    missing("{use_rslora,use_dora}", "set it to false", _PEFT, default=False),
    always("lora_task_type lora_bias", "adapters are of a language model, without biases", "any"),
    missing("{load_in_4bit,load_in_8bit}", "set it to false; weights are trained in fp32", default=False),
    ignored("bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage", "weights are not quantized"),
    missing("chat_template_path", "set braid.model.chat_template to the Jinja file"),
    # data
    to("dataset_name", "{data}", "text", unless(lambda s: s["datasets"], "overridden by datasets"), _sources, note="a data set of the hub, or a .json, .jsonl, .csv or .parquet file"),
    to("datasets", "{data}", "list?", _mixture),
    to("dataset_config", "", "text?", unless_null(), part_of("dataset_name")),
    to("dataset_train_split", "", "text", part_of("dataset_name"), default="train"),
    to("dataset_test_split", "", "text", NO_EVALUATION, part_of("dataset_name"), default="test"),
    ignored("{dataset_streaming,streaming}", "rows are read as they are needed"),
    missing("test_split_size", "set the source of evaluation below braid"),
    missing("{train_dataset,eval_dataset}", "write the rows to a file, and set dataset_name to it, or the sources below braid"),
    # run and report
    to("output_dir", "run.name run.output_dir", "text", _folder, default="trainer_output"),
    to("run_name", "{named}.name", "text?", unless_null(), unless(lambda s: not set(_trackers(s)) & {"wandb", "swanlab"}, "no tracker is used")),
    to("project", "{named}.project", "text", unless(lambda s: not set(_trackers(s)) & {"wandb", "swanlab"}, "no tracker is used")),
    to("report_to", "report.tensorboard", "text or [text]?", _report, default="none"),
    to("seed", "run.seed", "natural", default=42),
    to("data_seed", "data.seed", "natural?", unless_null("seed")),
    to("resume_from_checkpoint", "run.resume", "text or bool?", unless_null("a new run"),
       lambda v, _: {True: "latest", False: "none"}.get(v, v), note="a checkpoint of braid"),
    to("use_cpu", "run.device", {True: "cpu", False: no_effect("a GPU is used if there is one")}),
    # batches and length
    to("per_device_train_batch_size", "{batch} train.micro_batch_rows", "count", _per_device, default=8,
       note="rows; in DPO pairs, in GRPO completions"),
    to("gradient_accumulation_steps", "{batch}", "count", _batch, default=1),
    to("num_train_epochs", "{length}", "positive", _epochs, default=3),
    to("max_steps", "{length}", "int", _steps, default=-1, note="optimizer steps"),
    # optimizer
    to("lr_scheduler_type", "{optimizer}.schedule.decay", _SCHEDULES, default="linear"),
    missing("lr_scheduler_kwargs lr_scheduler_kwargs.*", "use braid's schedules: train.optimizer.schedule in docs/config.md"),
    to("warmup_steps", "{optimizer}.schedule.warmup_steps", "non-negative", _NO_WARMUP, _schedule, note="below 1: a share of all steps", default=0),
    to("warmup_ratio", "{optimizer}.schedule.warmup_fraction", "share", _NO_WARMUP),
    to("weight_decay", "{optimizer}.weight_decay", "non-negative", default=0.0),
    section("", "{optimizer}")(
        to("adam_beta1", ".betas", "share", lambda v, s: [v, s["adam_beta2"]], default=0.9),
        to("adam_beta2", ".betas", "share", lambda v, s: [s["adam_beta1"], v], default=0.999),
        to("adam_epsilon", ".eps", "positive", default=1e-8)),
    to("max_grad_norm", "train.max_grad_norm", "non-negative", lambda v, _: v or None, default=1.0, note="0: no clipping"),
    to("optim", "{optimizer}.kind", {**dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"), "sgd": "sgd",
       **dict.fromkeys(("paged_adamw_8bit", "paged_adamw_32bit", "adamw_8bit", "adamw_bnb_8bit", "adafactor", "lion_8bit", "muon", "galore_adamw"),
                       unsupported("use adamw_torch"))}, default="adamw_torch"),
    missing("optim_args optim_target_modules", "use adamw_torch"),
    missing("{neftune_noise_alpha,label_smoothing_factor}", "remove it", default=0.0),
    missing("auto_find_batch_size", "set a batch size", default=False),
    # memory and speed
    to("bf16", "train.autocast", "bool?", lambda v, s: "fp16" if s["fp16"] else "none" if v is False else "auto", default=None,
       note="by default on: bf16 products on GPUs"),
    to("fp16", "train.autocast", "bool", lambda v, _: "fp16" if v else no_effect("see bf16")),
    to("gradient_checkpointing", "train.gradient_checkpointing", "bool", default=True),
    to("use_liger_kernel", "train.liger_kernels", "bool", default=False),
    to("torch_compile", "train.compile", "bool", default=False),
    ignored("gradient_checkpointing_kwargs gradient_checkpointing_kwargs.* gradient_checkpointing_use_reentrant tf32 bf16_full_eval fp16_full_eval "
            "torch_compile_backend torch_compile_mode liger_kernel_config use_cache torch_empty_cache_steps activation_offloading pad_to_multiple_of "
            "ds3_gather_for_generation full_determinism accelerator_config.* cast_lm_head_to_fp32", "memory and speed: braid sets its own"),
    always("disable_dropout", "models have no dropout", "bool"),
    missing("{deepspeed,fsdp,fsdp_config,parallelism_config}", "use --backend fsdp2 or --backend deepspeed"),
    missing("{deepspeed,fsdp_config,parallelism_config}.*", "use --backend fsdp2 or --backend deepspeed"),
    # evaluation and checkpoints
    to("eval_strategy", "eval.every_rounds eval.at_end", "no|steps|epoch", _cadence("eval_steps", "eval"), default="no"),
    to("eval_steps", "", "positive?", NO_EVALUATION, part_of("eval_strategy")),
    to("eval_on_start", "eval.before", "bool", default=False),
    to("save_strategy", "checkpoint.every_rounds checkpoint.at_end", "no|steps|epoch|best", _cadence("save_steps", "checkpoint"), default="steps"),
    to("save_steps", "", "positive", part_of("save_strategy"), default=500),
    to("save_total_limit", "checkpoint.keep", "count?", default=None, note="null: all"),
    missing("load_best_model_at_end", "choose a checkpoint by its evaluation", default=False),
    missing("push_to_hub", "export with braid export, and upload the folder", default=False),
    missing("callbacks compute_metrics data_collator formatting_func processing_class preprocess_logits_for_metrics optimizers optimizer_cls_and_kwargs "
            "compute_loss_func quantization_config rollout_func environment_factory", "braid has no such hook in its config; see docs/api.md"),
    missing("tools", "use braid.env.kind=tools (docs/agents.md)"),
    missing("teacher_model_name_or_path", "see docs/distillation.md"),
    missing("reward_model_path", "use reward_model_name_or_path, of GRPO"),
    missing("{peft_config,args}", "write the adapters as lora_r, lora_alpha and lora_target_modules, and the config's arguments out"),
    missing("missing_eos_penalty", "use braid.reward.truncated=zero, or a reward function"),
    ignored("logging_steps", "each round is reported", "non-negative"),
    ignored("logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter logging_dir log_level log_level_replica disable_tqdm "
            "include_num_input_tokens_seen include_tokens_per_second trackio_space_id trackio_bucket_id trackio_static_space_id hub_token hub_private_repo hub_model_id "
            "hub_strategy hub_always_push hub_revision metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint "
            "save_only_model save_on_each_node save_safetensors enable_jit_checkpoint overwrite_output_dir", "reports and checkpoints are braid's own"),
    ignored("per_device_eval_batch_size prediction_loss_only eval_delay eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
            "include_for_metrics batch_eval_metrics do_train do_eval do_predict dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
            "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names "
            "train_sampling_strategy group_by_length length_column_name dataset_num_proc dataset_kwargs dataset_kwargs.* average_tokens_across_devices "
            "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout debug skip_memory_metrics local_rank "
            "ignore_bias_buffers use_reentrant env.* pad_token", "braid reads rows and runs processes in its own way"))
# fmt: on


def _named(source: Source) -> list[str]:
    return [f"report.{name}" for name in ("wandb", "swanlab") if name in _trackers(source)]


_LENGTH = {"grpo": ["run.max_epochs", "run.max_rounds"], "sft": ["sft.epochs", "sft.steps"]}
_BATCH = {"grpo": ["rollout.prompts_per_round", "train.steps_per_pass"], "sft": ["sft.rows_per_step"]}


def _base(source: Source) -> dict[str, Any]:
    """Paths relative to the working directory, and what TRL does always."""
    out: dict[str, Any] = {"run.base_dir": str(Path.cwd())}
    if source.backend is not None:
        out["train.backend.kind"] = source.backend
    match facts.pipeline_of(source):
        case "grpo":
            out |= {
                "data.overlong": "error",
                "algorithm.kl_estimator": "k3",
                "algorithm.kl_clamp": "off",
                "algorithm.kl_in": "loss",
            }
            out |= {"algorithm.advantage.kind": "grpo", "rollout.engine.kind": facts.engine(source)}
        case "sft":
            out |= {"sft.overlong": "truncate_right"}
        case "reward":
            out |= {"prefer.loss.kind": "bradley_terry"}
    return out


_DIALECT = Dialect(
    name="trl",
    title="TRL",
    rules={},
    base=_base,
    places={
        "engine": facts.engine,
        "backend": facts.backend,
        "train": lambda _: "train",
        "optimizer": lambda s: facts.OPTIMIZERS.get(facts.pipeline_of(s), "prefer.optimizer"),
        "named": _named,
        "data": lambda s: facts.data(s)[0],
        "length": lambda s: _LENGTH.get(facts.pipeline_of(s), ["prefer.epochs", "prefer.steps"]),
        "batch": lambda s: _BATCH.get(facts.pipeline_of(s), ["prefer.pairs_per_step"]),
    },
    aliases={
        "model": "model_name_or_path",
        "torch_dtype": "dtype",
        "model_init_kwargs.dtype": "dtype",
        "model_init_kwargs.torch_dtype": "dtype",
        "model_init_kwargs.attn_implementation": "attn_implementation",
        "model_init_kwargs.trust_remote_code": "trust_remote_code",
        "lora_task": "lora_task_type",
        "evaluation_strategy": "eval_strategy",
    },
    telling=(
        "model_name_or_path",
        "dataset_name",
        "datasets",
        "learning_rate",
        "per_device_train_batch_size",
        "num_train_epochs",
    ),
    versions=("0", "1"),
)


def _of(name: str, rules: list[Rule]) -> Dialect:
    """The dialect of a pipeline."""
    return replace(_DIALECT, rules=table(rows(_COMMON, rules)), version_from=f"{name} ")


_OF = {
    "grpo": _of("grpo", GRPO),
    "dpo": _of("dpo", DPO),
    "sft": _of("sft", SFT),
    "reward": _of("reward", REWARD),
}
_OLD: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"max_completion_length": 256, "vllm_mode": "server"},
    "reward": {"learning_rate": 5e-5},
}
"""Pipeline -> defaults before 1.0 that have changed."""
_MARKS = ("max_prompt_length", "torch_dtype", "evaluation_strategy", "warmup_ratio")
"""Arguments that 1.0 no longer has."""


def _of_file(_: Dialect, values: Mapping[str, Any], version: str | None) -> Dialect:
    """The dialect of the file's pipeline, in the version that is given or told by its arguments."""
    name = facts.pipeline(values)
    mark = next((key for key in _MARKS if key in values), None)
    why = (
        "set by --dialect"
        if version
        else f"told by {mark}"
        if mark
        else "the newest, no argument tells another"
    )
    version = version or ("0" if mark else "1")
    chosen, how = _OF[name], "named by its trainer" if "trainer" in values else "told by its arguments"
    rules = dict(chosen.rules)
    if version == "0":
        rules |= {key: replace(rules[key], default=default) for key, default in _OLD.get(name, {}).items()}
    return replace(chosen, rules=rules, version=version, version_from=f"{name} {how}; version {why}")


TRL = replace(_OF["grpo"], of_file=_of_file, others=tuple(_OF.values()))
