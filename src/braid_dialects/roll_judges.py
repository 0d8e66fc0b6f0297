"""ROLL's judges with a model of their own: a reward worker with judge_model_type inference, whose model, engine,
sampling and devices are those of any worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from braid.plan.placement import format_numbers

from . import roll_facts as facts
from .devices import parse_devices
from .roll_facts import ENGINES, ONE_PROCESS
from .table import Became, Source, unsupported

_ENGINES = ", ".join(ENGINES)
_DTYPES = ("fp32", "bf16", "fp16")
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
_OF_ENGINE = {
    "gpu_memory_utilization": "memory_fraction",
    "mem_fraction_static": "memory_fraction",
    "max_model_len": "max_model_tokens",
    "context_length": "max_model_tokens",
    "block_size": "block_size",
    "tensor_parallel_size": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "max_num_seqs": "max_running",
    "enforce_eager": "cuda_graphs",  # its opposite
}
"""Key of strategy_config -> that of `engine`."""
_OF_WEIGHTS = {"load_format", "sleep_level"}
"""Keys of strategy_config about weights, which a judge loads once."""


def loads_judge(source: Source, domain: str) -> bool:
    """Whether a domain's judge is a model that the run loads."""
    return source[f"rewards.{domain}.judge_model_type"] == "inference"


def judge_part(source: Source, domain: str) -> dict[str, Any]:
    """The judge's model, engine and sampling, as keys of a reward part. ROLL's defaults apply."""
    at = f"rewards.{domain}"
    model, sampling = (_mapping(source[f"{at}.{name}"]) for name in ("model_args", "generating_args"))
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
    kept = {"top_p": sampling.get("top_p", 0.7), "top_k": 0 if top_k == -1 else top_k}
    return part | {"temperature": temperature} | kept


def _mapping(value: Any) -> Mapping[str, Any]:
    """The value, or an empty mapping for any other, which its own row refuses."""
    return value if isinstance(value, dict) else {}


def _engine(source: Source, at: str) -> dict[str, Any]:
    """The judge's engine. One chosen on the command line takes precedence, without the file's settings."""
    strategy = _mapping(source[f"{at}.strategy_args"])
    kind = ENGINES.get(strategy.get("strategy_name") or "hf_infer", "native")
    if source.engine not in (None, kind) or kind == "native":
        return {"kind": source.engine or kind}
    settings = _mapping(strategy.get("strategy_config"))
    made: dict[str, Any] = {"kind": kind}
    if (per_worker := source[f"{at}.num_gpus_per_worker"] or 1) != 1:
        made["tensor_parallel"] = per_worker
    for key, native in _OF_ENGINE.items():
        if (setting := settings.get(key)) is not None:
            made[native] = not setting if key == "enforce_eager" else setting
    return made


def check_mapping(value: Mapping[str, Any] | None, source: Source) -> Any:
    """Refuse keys of a judge's mapping that braid does not know, and values that it does not have."""
    (read, without), keys = _KEYS[source.name], _mapping(value)
    if unknown := sorted(keys.keys() - read - without):
        known = ", ".join(sorted(read))
        return unsupported(f"remove {', '.join(unknown)}; a judge's {source.name} has {known}")
    match source.name:
        case "model_args" if keys.get("dtype") not in (None, *_DTYPES):
            return unsupported(f"dtype={keys['dtype']} is not one of {', '.join(_DTYPES)}; use one of them")
        case "generating_args" if (keys.get("num_beams") or 1) != 1:
            return unsupported("set num_beams to 1; beam search is not supported")
        case "data_args" if keys.get("template") not in (None, "native", "qwen2_5", "qwen3"):
            return unsupported(
                f"template={keys['template']} is not the tokenizer's own; set it to native, and the template "
                "in the tokenizer's folder"
            )
        case "strategy_args":
            return _check_strategy(keys, value, _mapping(source[".generating_args"]))
        case _:
            return value


def _check_strategy(keys: Mapping[str, Any], value: Any, sampling: Mapping[str, Any]) -> Any:
    name = keys.get("strategy_name")
    if name not in (None, *ENGINES):
        return unsupported(f"strategy_name={name} is not one of {_ENGINES}; use one of them")
    settings = _mapping(keys.get("strategy_config"))
    if ENGINES[name or "hf_infer"] == "native":
        return value
    if name == "sglang" and (sampling.get("top_p", 0.7) != 1 or sampling.get("top_k", 50) not in (0, -1)):
        return unsupported("set generating_args.top_p to 1 and top_k to 0, or strategy_name to vllm")
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
