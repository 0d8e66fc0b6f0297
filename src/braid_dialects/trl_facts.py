"""Values that follow from several arguments of TRL: the pipeline, sizes of batches, data sets."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from .conditions import unless
from .table import Source

FILES = (".json", ".jsonl", ".csv", ".parquet")
PIPELINES = ("grpo", "dpo", "sft", "reward")
OPTIMIZERS = {"grpo": "train.optimizer", "sft": "sft.optimizer"}
"""Pipeline -> its optimizer; preferences and reward models have the same."""
_TOLD_BY = {
    "grpo": ("reward_funcs", "num_generations", "max_completion_length", "steps_per_generation", "use_vllm"),
    "reward": ("center_rewards_coefficient",),
    "dpo": ("beta", "precompute_ref_log_probs", "rpo_alpha", "f_divergence_type", "label_smoothing"),
}
"""Pipeline -> arguments that only it has, in a file that does not name its trainer."""


def pipeline(values: Any) -> str:
    """The pipeline of a file: that of its trainer, or told by its arguments; sft if none tells."""
    if values.get("trainer") in PIPELINES:
        return values["trainer"]
    names = {path.partition(".")[0] for path in values}
    return next((name for name, keys in _TOLD_BY.items() if names.intersection(keys)), "sft")


def pipeline_of(source: Source) -> str:
    return source.dialect.version_from.partition(" ")[0]


def backend(source: Source) -> str:
    """The training backend: from the command line, else one process, or FSDP2 on several devices."""
    return source.backend or ("single" if source["num_processes"] == 1 else "fsdp2")


def engine(source: Source) -> str:
    """The rollout engine: from the command line, else vLLM if the file uses it."""
    return source.engine or ("vllm" if source["use_vllm"] else "native")


def is_served(source: Source) -> bool:
    """Whether vLLM is a server that is already running."""
    return bool(source["use_vllm"]) and source["vllm_mode"] == "server"


def rows_per_step(source: Source) -> int:
    """Rows, pairs or completions of an optimizer step, of all processes."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    per_device, accumulated, processes = (source[name] for name in names)
    return per_device * accumulated * processes


def completions_per_round(source: Source) -> int:
    """Completions that are sampled together. Raises ValueError if the sizes do not divide."""
    step, num = rows_per_step(source), source["num_generations"]
    micro = source["per_device_train_batch_size"] * source["num_processes"]
    whole = source["generation_batch_size"] or micro * (
        source["steps_per_generation"] or source["gradient_accumulation_steps"]
    )
    if whole % num:
        raise ValueError(
            f"the {whole} completions of a generation batch are not a multiple of {num}; change one"
        )
    if whole % step:
        raise ValueError(
            f"a generation batch of {whole} completions is not a multiple of the {step} of a step"
        )
    return whole


def steps_per_round(source: Source) -> int:
    """Optimizer steps of a round, all iterations included; outside GRPO a round is a step."""
    if pipeline_of(source) != "grpo":
        return 1
    return completions_per_round(source) // rows_per_step(source) * source["num_iterations"]


def in_rounds(steps: int, source: Source) -> int:
    """A number of optimizer steps in rounds, at least one."""
    return max(1, steps // steps_per_round(source))


def is_file(path: str) -> bool:
    return PurePath(path).suffix in FILES


def data(source: Source) -> tuple[str, str]:
    """Native paths of the sources of training and of evaluation."""
    return {"grpo": ("data.train", "data.eval"), "sft": ("sft.data", "sft.eval_data")}.get(
        pipeline_of(source), ("prefer.data", "prefer.eval_data")
    )


def columns(source: Source) -> dict[str, Any]:
    """The columns of the pipeline's rows."""
    match pipeline_of(source):
        case "grpo":
            funcs = source["reward_funcs"] or []
            return {"answer_key": "solution" if "accuracy_reward" in str(funcs) else None}
        case "sft" if source["completion_only_loss"]:
            return {"prompt_key": "prompt", "response_key": "completion"}
        case "sft":
            return {"messages_key": "messages"}
        case _:
            return {}


def evaluates(source: Source) -> bool:
    return source["eval_strategy"] != "no" or source["eval_on_start"]


NO_EVALUATION = unless(lambda s: not evaluates(s), "eval_strategy is no")
IN_GROUPS = unless(lambda s: pipeline_of(s) != "grpo", "for GRPO only")
