"""Keys that have no effect in a run, each with the reason: those that the config's sections say, and those
of engines and backends.

Where several rules name a key, the first gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from itertools import chain
from operator import attrgetter
from typing import Any

from braid.config.roles import train_config
from braid.config.schema import RunConfig
from braid.config.shape import fields_of, sections_of
from braid.config.train import TrainConfig
from braid.sections import Section, Unused

from .parallel import served_engine
from .plan import Plan
from .sizes import engine_dtype

ONLY_EVALUATES = "an evaluation trains nothing"
_ALL = tuple(path for path, field in fields_of(RunConfig) if not sections_of(field))


def unused_keys(config: RunConfig, plan: Plan) -> dict[str, str]:
    """Unused key or section -> the reason, whether or not it is set. `key[]` stands for all items of a
    list."""
    sections = [("env", config.env), *_sections_below("", config)]  # "a simulator has no text" explains most
    rules = chain(
        (_placed(rule, at) for at, section in sections for rule in section.unused(config, plan)),
        *(rule(config, plan) for rule in _RULES),
        ((ONLY_EVALUATES, section.only_for_training) for _, section in sections if plan.verb == "eval"),
    )
    reasons: dict[str, str] = {}
    for why, patterns in rules:
        for key in (key for pattern in patterns.split() for key in _keys(pattern)):
            reasons.setdefault(key, why)
    return reasons


def _sections_below(at: str, section: Section) -> Iterator[tuple[str, Section]]:
    """(path, section) of `section` at the path `at` and of those in it, but not in its lists."""
    yield at, section
    for name in type(section).model_fields:
        if isinstance(below := getattr(section, name), Section):
            yield from _sections_below(f"{at}.{name}".removeprefix("."), below)


def _placed(rule: tuple[str, str], at: str) -> tuple[str, str]:
    why, keys = rule
    return why.replace("@", at), keys.replace("@", at)


def why_unused(reasons: Mapping[str, str], key: str) -> str:
    """The reason that `unused_keys` gives for a key or a section that contains it; empty if there is none."""
    parts = re.sub(r"\[\d+\]", "[]", key).split(".")
    above = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((reasons[name] for name in above if name in reasons), "")


def set_keys(section: Any, key: str, at: str = "") -> Iterator[str]:
    """The keys that `key` stands for whose values differ from their defaults."""
    name, _, rest = key.partition(".")
    is_list, name = name.endswith("[]"), name.removesuffix("[]")
    if isinstance(section, dict):
        yield from set_keys(section[name], rest, f"{at}{name}.")
        return
    field = type(section).model_fields.get(name)
    value = None if field is None else getattr(section, name)
    if not rest:
        if field is not None and value != field.get_default(call_default_factory=True):
            yield f"{at}{name}"
    elif is_list:
        for i, item in enumerate(value or ()):
            yield from set_keys(item, rest, f"{at}{name}[{i}].")
    elif value is not None:
        yield from set_keys(value, rest, f"{at}{name}.")


@cache
def _keys(pattern: str) -> tuple[str, ...]:
    """The keys that a pattern stands for."""
    if found := re.search(r"\{([^{}]*)\}", pattern):
        before, after = pattern[: found.start()], pattern[found.end() :]
        return tuple(key for option in found[1].split(",") for key in _keys(before + option + after))
    if pattern.endswith(".*"):
        return tuple(path for path in _ALL if path.startswith(pattern[:-1]))
    return (pattern,)


_UNLESS: tuple[tuple[str, str, str], ...] = (
    ("rollout.engine", "native", "rollout.native.*"),
    ("rollout.engine", "sglang", "rollout.sglang.*"),
    ("rollout.engine", "vllm", "rollout.vllm.*"),
    ("train.backend", "megatron", "inference.{tensor_parallel,pipeline_parallel,sequence_parallel}"),
    ("@.backend", "fsdp fsdp2", "@.fsdp.*"),
    ("@.backend", "deepspeed", "@.deepspeed.*"),
    ("@.backend", "megatron", "@.megatron.*"),
    ("@.megatron.recompute_granularity", "full", "@.megatron.{recompute_method,recompute_num_layers}"),
)
"""(key, values, keys): no effect unless `key` has one of these values. `@` is each section of training
settings."""

_WHILE: tuple[tuple[str, Any, str], ...] = (
    ("rollout.check_weights", False, "rollout.check_weights_dir"),
    ("rollout.sglang.cuda_graphs", False, "rollout.sglang.cuda_graph_max_batch"),
    ("rollout.sglang.torch_compile", False, "rollout.sglang.torch_compile_max_batch"),
    ("rollout.vllm.cuda_graphs", False, "rollout.vllm.cuda_graph_max_batch"),
    ("@.backend", "fsdp", "@.fsdp.{pin_memory,reshard_after_forward}"),
    ("@.backend", "fsdp2", "@.fsdp.{forward_prefetch,backward_prefetch,limit_all_gathers,buffer_dtype}"),
    ("@.fsdp.cpu_offload", False, "@.fsdp.pin_memory"),
    ("@.fsdp.sharding", "grad_op", "@.fsdp.reshard_after_forward"),
    ("@.fsdp.sharding", "none", "@.fsdp.size"),
    ("@.megatron.recompute_granularity", "full", "@.megatron.moe_layer_recompute"),
    ("@.megatron.tensor_parallel", 1, "@.megatron.sequence_parallel"),
    ("@.megatron.pipeline_parallel", 1, "@.megatron.transformer.batch_p2p_comm"),
    ("@.megatron.overlap_grad_reduce", False, "@.megatron.ddp_bucket_size"),
    ("@.megatron.distributed_optimizer", False, "@.megatron.overlap_param_gather"),
)
"""(key, value, keys): no effect while `key` has this value."""


def _by_one_key(config: RunConfig, _: Plan) -> Unused:
    for key, values, keys in _UNLESS:
        for at in _sections(config, key):
            if attrgetter(key.replace("@", at))(config) not in values.split():
                yield f"{key} is not {' or '.join(values.split())}".replace("@", at), keys.replace("@", at)
    for key, value, keys in _WHILE:
        for at in _sections(config, key):
            if attrgetter(key.replace("@", at))(config) == value:
                yield f"{key} is {str(value).lower()}".replace("@", at), keys.replace("@", at)


def _sections(config: RunConfig, key: str = "@") -> list[str]:
    """What `@` in a key stands for: the sections of training settings that are set."""
    if "@" not in key:
        return [""]
    sections = (("critic.train", config.critic.train), ("reference.train", config.reference.train))
    return ["train", *(at for at, section in sections if section is not None)]


def _roles(config: RunConfig, _: Plan) -> Unused:
    if train_config(config, "inference").megatron.tensor_parallel == 1:
        yield "inference has no tensor parallelism", "inference.sequence_parallel"


def _engines(config: RunConfig, plan: Plan) -> Unused:
    if (config.env.turn_limit or 1) == 1:
        yield "episodes have a single turn", "rollout.native.prefix_caching"
    rollout, name, served = config.rollout, config.rollout.engine, served_engine(config)
    is_in_place = name == "native" and plan.layout.mode == "in_process"
    if served is not None and served.servers:
        own = ",".join(set(type(served).model_fields) - {"servers", "max_model_tokens"})
        why = f"external servers have their own options (rollout.{name}.servers)"
        yield why, f"rollout.{name}.{{{own}}}"
    if name == "sglang":
        yield "SGLang always detokenizes, to find stop strings", "rollout.sglang.detokenize"
        yield "SGLang reads weights from files", "rollout.weight_sync.{transport,existing_group}"
    if config.pipeline is None or config.pipeline.on_new_weights == "finish":
        yield "running turns finish before engines get new weights", "rollout.native.recompute_cache"
    elif config.pipeline.max_lag == 0:
        why = "with pipeline.max_lag=0 nothing runs when engines get new weights"
        yield why, "rollout.native.recompute_cache"
    if rollout.vllm.tensor_parallel * rollout.vllm.pipeline_parallel == 1:
        yield "each engine has a single device", "rollout.vllm.executor"
    if is_in_place:
        yield "the native engine reads the trainer's weights in place", "rollout.weight_sync.*"
    else:
        keys = "rollout.{check_weights,check_weights_dir}"
        yield "weights sent to other processes are always verified by fingerprints on arrival", keys
    dtype = engine_dtype(config, plan.num_parameters, has_gpus=plan.layout.has_gpus)
    if dtype != "fp32" and not plan.layout.has_gpus:
        yield "only decoding in fp32 on CPUs is compiled by Numba", "rollout.native.compile"
    is_shared = is_in_place and (config.model.kind.is_robot or dtype == config.model.dtype)
    if is_shared and not plan.needs_critic and not plan.needs_reference:
        yield "the engine samples with the trainer's own weights", "train.offload.weights"


def _training(config: RunConfig, plan: Plan) -> Unused:
    if config.run.device == "cpu":
        keys = "rollout.{native,vllm,sglang}.cuda_graphs rollout.{vllm,sglang}.cuda_graph_max_batch"
        why = "with run.device=cpu everything is in host memory"
        yield why, "{train,critic.train,reference.train}.offload.{weights,optimizer}"
        yield "there are no CUDA graphs with run.device=cpu", keys
    for at in _sections(config):
        rules = _megatron if (train := attrgetter(at)(config)).backend == "megatron" else _backend
        for why, keys in rules(config, plan, train):
            yield why.replace("@", at), keys.replace("@", at)
        if "fp16" not in (config.model.dtype, train.autocast):
            yield "fp16 is not used", f"{at}.grad_scaler {at}.megatron.dynamic_loss_scale_window"


def _backend(_: RunConfig, __: Plan, train: TrainConfig) -> Unused:
    if train.backend != "deepspeed":
        yield "@.backend always frees gradients after a step", "@.offload.gradients"
    elif train.deepspeed.cpu_offload:
        keys = "@.offload.{weights,gradients,optimizer}"
        yield "@.deepspeed.cpu_offload already keeps everything in host memory", keys
    if train.backend in ("fsdp", "fsdp2") and train.fsdp.cpu_offload:
        yield "@.fsdp.cpu_offload already keeps everything in host memory", "@.offload.{weights,optimizer}"


def _megatron(config: RunConfig, plan: Plan, train: TrainConfig) -> Unused:
    if find_spec("transformer_engine") is None:
        why = "the fused kernel needs Transformer Engine, which is not installed"
        yield why, "@.megatron.transformer.apply_rope_fusion"
    is_other = config.critic.path is not None or config.reference.path is not None
    if plan.model_size is not None and not plan.model_size.num_experts and not is_other:
        keys = "@.megatron.{moe_grouped_gemm,moe_layer_recompute,moe_token_dispatcher}"
        yield "the model has no experts", keys
    if train.optimizer.kind == "sgd":
        yield "SGD has no optimizer states", "@.megatron.{distributed_optimizer,overlap_param_gather}"
    if train.megatron.recompute_granularity != "off":
        yield "@.megatron.recompute_granularity is used instead", "@.gradient_checkpointing"
    why = "the backend megatron uses @.megatron.dynamic_loss_scale_window"
    yield why, "@.grad_scaler.growth_interval"


_RULES: tuple[Callable[[RunConfig, Plan], Unused], ...] = (_roles, _by_one_key, _engines, _training)
