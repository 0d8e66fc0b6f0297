"""Features that a config may request but this version cannot run.

Configs for other backends and engines load completely; what
cannot run is reported before the run starts, with a value that works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

from braid.config.reward import ModelReward
from braid.config.rollout import GymnasiumEnv
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig

from .parallel import served_engine
from .placement import format_numbers, parse_placement
from .plan import Plan

_SIMULATORS = ("maniskill", "libero")
_PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron.core"}
"""Training backend -> the package it imports, installed by the extra of the backend's name."""


def missing_parts(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of everything that this version cannot run."""
    for key, train in _train_sections(config, plan):
        if train.sequence_parallel > 1 and train.backend in ("single", "megatron"):
            instead = (
                "train.megatron.context_parallel" if train.backend == "megatron" else f"{key}.backend=fsdp2"
            )
            yield (
                f"{key}.sequence_parallel",
                f"sequence parallelism over {train.sequence_parallel} devices needs backend fsdp, fsdp2 or deepspeed, not "
                f"{train.backend}; set it to 1 and use {instead}",
            )
    if config.train.backend != "single":
        yield from _not_sharded(config)
    for key, train in _train_sections(config, plan):
        yield from _not_in_megatron(config, key, train)
    for section, why in missing_sections(config).items():
        yield ("env.kind" if section == "env" else section), why
    if config.model.attention == "flash_attention_2" and _computes_in_fp32(config):
        yield (
            "model.attention",
            "flash_attention_2 needs bf16 or fp16, but this run computes in fp32; set model.dtype or train.autocast to "
            "bf16, or model.attention=auto",
        )
    yield from _missing_devices(config, plan)


def missing_sections(config: RunConfig) -> dict[str, str]:
    """Config section that only unavailable parts read -> what is available instead."""
    missing = {}
    if config.env.kind in _SIMULATORS:
        missing["env"] = _not_yet(f"the simulator {config.env.kind}", "gymnasium or a text environment")
    if config.model.vla is not None:
        missing["model.vla"] = (
            "vision-language-action policies are not implemented in this version; remove model.vla and set model.path, "
            "model.build or model.mlp"
        )
    return missing


def missing_packages(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of every package that the run needs and that is not installed. Not an error for commands
    that only inspect a config."""
    for key, train in _train_sections(config, plan):
        package = _PACKAGES.get(train.backend)
        if package is not None and not _is_installed(package):
            yield (
                f"{key}.backend",
                f"{train.backend} needs the package {package}, which is not installed; run: pip install "
                f"'braid-rl[{train.backend}]', or set it to fsdp2",
            )

    engine, served = config.rollout.engine, served_engine(config)
    if served is not None and not served.servers and not _is_installed(engine):
        on_cpu = " (on a CPU: make vllm)" if engine == "vllm" else ", which needs a GPU"
        yield (
            "rollout.engine",
            f"{engine} needs the package {engine}, which is not installed; run: pip install 'braid-rl[{engine}]'{on_cpu}, "
            f"set rollout.{engine}.servers, or set it to native",
        )
    for key, package, extra, is_used in _EXTRAS:
        if is_used(config) and not _is_installed(package):
            yield (
                key,
                f"needs the package {package}, which is not installed; run: pip install {extra}, or remove this key",
            )


_EXTRAS: tuple[tuple[str, str, str, Callable[[RunConfig], bool]], ...] = (
    ("report.wandb", "wandb", "'braid-rl[wandb]'", lambda config: config.report.wandb is not None),
    ("report.swanlab", "swanlab", "'braid-rl[swanlab]'", lambda config: config.report.swanlab is not None),
    ("train.liger_kernels", "liger_kernel", "'braid-rl[liger]'", lambda config: config.train.liger_kernels),
    (
        "model.attention",
        "flash_attn",
        "flash-attn",
        lambda config: config.model.attention == "flash_attention_2",
    ),
)
"""(key, package, what to install, whether a run imports it)."""


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _not_sharded(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, message) of everything that the multi-process training backends do not support."""
    backend, key = config.train.backend, "train.backend"
    if config.model.mlp is not None:
        yield key, f"an MLP trains in one process, not with {backend}; set train.backend=single"
    fsdp = config.train.fsdp
    if config.model.lora is not None and backend == "fsdp" and (fsdp.sharding == "none" or fsdp.size == 1):
        yield (
            "train.fsdp.sharding",
            "fsdp cannot train adapters without sharding the frozen weights; set train.backend=fsdp2 and "
            "train.fsdp.size=1, or train.fsdp.sharding=full",
        )


def _not_in_megatron(config: RunConfig, key: str, train: TrainConfig) -> Iterator[tuple[str, str]]:
    """(key, message) of everything in the training settings at section `key` that megatron does not support.
    Checks that depend on the model's sizes are made when it is built (training/backends/megatron)."""
    if train.backend != "megatron":
        return
    if config.model.lora is not None and key != "critic.train":
        yield (
            "model.lora",
            f"megatron does not support adapters; set {key}.backend to fsdp2, fsdp or deepspeed, or remove it",
        )
    if train.liger_kernels:
        yield f"{key}.liger_kernels", "not supported by megatron, which has its own layers; set it to false"
    if train.megatron.virtual_pipeline is not None and train.megatron.pipeline_parallel == 1:
        yield (
            f"{key}.megatron.virtual_pipeline",
            "interleaving needs several pipeline stages; set pipeline_parallel above 1, or remove it",
        )


def _train_sections(config: RunConfig, plan: Plan) -> Iterator[tuple[str, TrainConfig]]:
    """(key, training settings) of every role of the run that has its own."""
    yield "train", config.train
    if plan.needs_critic and config.critic.train is not None:
        yield "critic.train", config.critic.train
    if plan.needs_reference and config.reference.train is not None:
        yield "reference.train", config.reference.train


def _missing_devices(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of worker placements that this version does not support."""
    cluster = config.cluster
    if isinstance(config.env, GymnasiumEnv) and cluster.runtime == "ray":
        yield (
            "cluster.runtime",
            "a gymnasium environment and its policy run in one process; set it to auto",
        )
    try:
        placed = parse_placement(cluster.placement)
    except ValueError:
        return  # reported as a refusal of the layout
    numbers = sorted({number for devices in placed.values() if devices for number in devices.numbers})
    if isinstance(config.env, GymnasiumEnv) and len(numbers) > 1:
        yield (
            "cluster.placement",
            f"uses {len(numbers)} devices ({format_numbers(numbers)}), but a gymnasium environment and its policy run in one "
            "process; remove it, or place all roles on device 0",
        )
    reward, rollout = placed.get("reward"), plan.layout.role("rollout")
    has_models = any(isinstance(part, ModelReward) for part in config.reward.parts)
    if has_models and reward and rollout and not set(reward.numbers) <= set(rollout.devices):
        yield (
            "cluster.placement",
            f"reward models run on the devices of rollout ({format_numbers(rollout.devices)}) in this version, but reward is "
            f"placed on {format_numbers(reward.numbers)}; place reward on those, or remove it",
        )


def _computes_in_fp32(config: RunConfig) -> bool:
    return config.model.dtype == "fp32" and config.train.autocast == "none"


def _not_yet(part: str, instead: str) -> str:
    return f"{part} is not implemented in this version; use {instead}"
