"""ROLL's judges with a model of their own: a reward worker with judge_model_type inference, whose model, engine,
sampling and devices are those of any worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from braid.plan.placement import format_numbers

from . import roll_facts as facts
from .devices import parse_devices
from .roll_facts import ENGINES, ONE_PROCESS
from .table import Became, Source, unsupported

_ENGINES = ", ".join(ENGINES)
_DTYPES = {name: name for name in ("fp32", "bf16", "fp16")}
_KEYS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "model_args": (
        frozenset({"model_name_or_path", "dtype"}),
        frozenset({"attn_implementation", "disable_gradient_checkpointing", "model_type", "device_map"}),
    ),
    "generating_args": (
        frozenset({"max_new_tokens", "temperature", "top_p", "top_k", "do_sample", "num_beams"}),
        frozenset({"num_return_sequences", "logprobs", "max_length", "length_penalty"}),
    ),
    "data_args": (frozenset({"template"}), frozenset()),
    "strategy_args": (frozenset({"strategy_name", "strategy_config"}), frozenset()),
}
"""Mapping of a reward worker -> its keys that a judge reads, and those without effect on it."""
_OF_ENGINE: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "gpu_memory_utilization": ("memory_fraction", float),
    "mem_fraction_static": ("memory_fraction", float),
    "max_model_len": ("max_model_tokens", int),
    "context_length": ("max_model_tokens", int),
    "block_size": ("block_size", int),
    "tensor_parallel_size": ("tensor_parallel", int),
    "tp_size": ("tensor_parallel", int),
    "max_num_seqs": ("max_running", int),
    "enforce_eager": ("cuda_graphs", lambda eager: not eager),
}
"""Key of strategy_config -> that of `engine`, and its value."""
_OF_WEIGHTS = {"load_format", "sleep_level"}
"""Keys of strategy_config about weights, which a judge loads once."""


def loads_judge(source: Source, domain: str) -> bool:
    """Whether a domain's judge is a model that the run loads."""
    return source[f"rewards.{domain}.judge_model_type"] == "inference"


def judge_part(source: Source, domain: str) -> dict[str, Any]:
    """The judge's model, engine and sampling, as keys of a reward part. ROLL's defaults apply."""
    at = f"rewards.{domain}"
    model, sampling = (source[f"{at}.{name}"] or {} for name in ("model_args", "generating_args"))
    part = {
        "path": model.get("model_name_or_path"),
        "dtype": model.get("dtype") or "bf16",
        "engine": _engine(source, at),
    }
    if (most := sampling.get("max_new_tokens")) is not None:
        part["max_tokens"] = most
    temperature = sampling.get("temperature", 0.95)
    if temperature == 0 or sampling.get("do_sample") is False:
        return part
    top_k = sampling.get("top_k", 50)
    sampled = {"temperature": temperature, "top_p": sampling.get("top_p", 0.7), "top_k": max(0, top_k)}
    return part | sampled


def _engine(source: Source, at: str) -> dict[str, Any]:
    """The judge's engine. One chosen on the command line takes precedence, without the file's settings."""
    strategy = source[f"{at}.strategy_args"] or {}
    kind = ENGINES[strategy.get("strategy_name") or "hf_infer"]
    if source.engine not in (None, kind) or kind == "native":
        return {"kind": source.engine or kind}
    settings = strategy.get("strategy_config") or {}
    made: dict[str, Any] = {"kind": kind}
    if (per_worker := source[f"{at}.num_gpus_per_worker"] or 1) > 1:
        made["tensor_parallel"] = per_worker
    for key, (native, convert) in _OF_ENGINE.items():
        if settings.get(key) is not None:
            made[native] = convert(settings[key])
    return made


def check_mapping(value: Mapping[str, Any] | None, source: Source) -> Any:
    """Refuse keys of a judge's mapping that braid does not know, and values that it does not have."""
    (read, without), given = _KEYS[source.name], value or {}
    if unknown := sorted(given.keys() - read - without):
        known = ", ".join(sorted(read))
        return unsupported(f"remove {', '.join(unknown)}; a judge's {source.name} has {known}")
    match source.name:
        case "model_args" if given.get("dtype") not in (None, *_DTYPES):
            return unsupported(f"dtype={given['dtype']} is not one of {', '.join(_DTYPES)}; use one of them")
        case "generating_args" if (given.get("num_beams") or 1) != 1:
            return unsupported("set num_beams to 1; beam search is not supported")
        case "data_args" if given.get("template") not in (None, "native", "qwen2_5", "qwen3"):
            return unsupported(
                f"template={given['template']} is not the tokenizer's own; set it to native, and the template "
                "in the tokenizer's folder"
            )
        case "strategy_args":
            return _check_strategy(given, value)
        case _:
            return value


def _check_strategy(given: Mapping[str, Any], value: Any) -> Any:
    name = given.get("strategy_name")
    if name not in (None, *ENGINES):
        return unsupported(f"strategy_name={name} is not one of {_ENGINES}; use one of them")
    settings = given.get("strategy_config") or {}
    if ENGINES[name or "hf_infer"] == "native":
        return value
    if unknown := sorted(settings.keys() - _OF_ENGINE.keys() - _OF_WEIGHTS):
        known = ", ".join(_OF_ENGINE)
        return unsupported(f"remove {', '.join(unknown)} of strategy_config; a judge's engine has {known}")
    return value


def judge_devices(value: Any, source: Source) -> Any:
    """The devices of a judge's workers."""
    devices = parse_devices(value)
    if facts.is_one_process(source):
        return ONE_PROCESS(value, source)
    return Became({"cluster.placement.reward": format_numbers(devices)})
