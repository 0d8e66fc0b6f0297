"""Features that a config may request but this version cannot run.

Configs for other backends and engines load completely; what
cannot run is reported before the run starts, with a value that works.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from braid.config.env import LiberoEnv, ManiskillEnv, MetaworldEnv, RobosuiteEnv, SimulatorEnv
from braid.config.reward import ModelReward
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig
from braid.gguf_file import is_gguf

from .machine import count_gpus, memory_bytes
from .parallel import served_engine
from .placement import format_numbers, parse_placement
from .plan import Plan

_PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron.core"}
"""Training backend -> the package it imports, installed by the extra of the backend's name."""
_SIMULATORS = {
    MetaworldEnv: "metaworld",
    ManiskillEnv: "mani_skill",
    LiberoEnv: "libero",
    RobosuiteEnv: "robosuite",
}
"""Environment -> the package it imports, installed by the extra of its kind's name."""


def missing_parts(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of everything that this version cannot run."""
    for key, train in train_sections(config, plan):
        if train.sequence_parallel > 1 and train.backend in ("single", "megatron"):
            is_megatron = train.backend == "megatron"
            instead = "train.megatron.context_parallel" if is_megatron else f"{key}.backend=fsdp2"
            why = (
                f"sequence parallelism over {train.sequence_parallel} devices needs backend fsdp, fsdp2 or "
                "deepspeed"
            )
            yield f"{key}.sequence_parallel", f"{why}, not {train.backend}; set it to 1 and use {instead}"
    backend, fsdp = config.train.backend, config.train.fsdp
    if config.model.mlp is not None or config.model.vla is not None:
        for key, train in train_sections(config, plan):
            if train.backend == "megatron":
                why = "megatron trains language models only"
                yield f"{key}.backend", f"{why}; for a robot policy set it to fsdp2, fsdp or deepspeed"
            if train.sequence_parallel > 1:
                why = "a robot policy has no long sequences to split over devices"
                yield f"{key}.sequence_parallel", f"{why}; set it to 1"
    if backend == "fsdp" and config.model.lora is not None and (fsdp.sharding == "none" or fsdp.size == 1):
        why = "fsdp cannot train adapters without sharding the frozen weights"
        fix = "set train.backend=fsdp2 and train.fsdp.size=1, or train.fsdp.sharding=full"
        yield "train.fsdp.sharding", f"{why}; {fix}"
    for key, train in train_sections(config, plan):
        if train.backend == "megatron":
            yield from _not_in_megatron(config, key, train)
    computes_in_fp32 = config.model.dtype == "fp32" and config.train.autocast == "none"
    if config.model.attention == "flash_attention_2" and computes_in_fp32:
        why = "flash_attention_2 needs bf16 or fp16, but this run computes in fp32"
        yield "model.attention", f"{why}; set model.dtype or train.autocast to bf16, or model.attention=auto"
    yield from _missing_devices(config, plan)


def machine_problems(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of every package, GPU and kernel that the run needs and this machine lacks. Not an error
    for commands that only inspect a config. Of a cluster that the run joins, only packages are checked: its
    machines may have GPUs."""
    yield from missing_packages(config, plan)
    if plan.layout.mode != "in_process" and config.cluster.is_joined:
        return
    memory = memory_bytes()
    if plan.round_bytes is not None and plan.round_bytes[0] > memory:
        why = (
            f"a round of {plan.trajectories_per_round:,} trajectories takes at least "
            f"{plan.round_bytes[0] / 2**30:.3g} GiB"
        )
        fix = "lower it or rollout.group_size, and raise run.max_rounds"
        yield (
            "rollout.prompts_per_round",
            f"{why}, but this machine has {memory / 2**30:.3g} GiB of memory; {fix}",
        )
    num_gpus = count_gpus()
    if not num_gpus:
        for key, what, fix in _needs_gpu(config, plan):
            yield key, f"{what} needs a GPU, and this machine has none; {fix}"
    devices = {device for role in plan.layout.roles for device in role.devices}
    if plan.layout.has_gpus and plan.layout.mode != "in_process" and max(devices, default=0) >= num_gpus:
        why = f"device {max(devices)} is used, but this machine has {num_gpus} GPUs (0 to {num_gpus - 1})"
        yield "cluster.placement", f"{why}; use those, or run on a cluster (cluster.address)"
    engine = served_engine(config)
    is_on_cpu = not num_gpus or config.run.device == "cpu"
    if config.rollout.engine == "vllm" and engine is not None and not engine.servers and is_on_cpu:
        yield from _head_size_problems(config, plan)


def _needs_gpu(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Key, value and remedy of each setting of the run that needs a GPU."""
    if config.run.device == "cuda":
        yield "run.device", "cuda", "set it to cpu or auto"
    for key, train in train_sections(config, plan):
        if train.backend == "megatron":
            yield f"{key}.backend", "megatron", "set it to fsdp2, fsdp or deepspeed"
        if train.liger_kernels:
            yield f"{key}.liger_kernels", "Liger", "set it to false (same results up to rounding)"
    if config.model.attention == "flash_attention_2":
        yield "model.attention", "flash_attention_2", "set it to auto"
    engine = served_engine(config)
    if config.rollout.engine == "sglang" and engine is not None and not engine.servers:
        yield "rollout.engine", "sglang", "set rollout.sglang.servers, or set it to native"
    if isinstance(config.env, ManiskillEnv) and config.env.on_gpu:
        yield "env.on_gpu", "a scene of ManiSkill on the GPU", "set it to false"


VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads for which vLLM has kernels on CPUs (vllm/v1/attention/backends/cpu_attn.py of vLLM
0.32)."""


def _head_size_problems(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.model_size is None or plan.model_size.is_latent:
        return
    if (size := plan.model_size.head_dim) in VLLM_CPU_HEAD_SIZES:
        return
    key = "model.path" if config.model.build is None else "model.build.head_dim"
    sizes = ", ".join(map(str, VLLM_CPU_HEAD_SIZES))
    why = f"the model's attention heads have size {size}, and vLLM on CPUs has kernels for {sizes} only"
    yield key, f"{why}; use a model with one of these, or set rollout.engine=native"


def missing_packages(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of every package that the run needs and that is not installed. Not an error for commands
    that only inspect a config."""
    needed = [
        (f"{key}.backend", _PACKAGES[train.backend], f"'braid-rl[{train.backend}]'", "set it to fsdp2")
        for key, train in train_sections(config, plan)
        if train.backend in _PACKAGES
    ]
    engine, served = config.rollout.engine, served_engine(config)
    if served is not None and not served.servers:
        install = f"'braid-rl[{engine}]' " + (
            "(on a CPU: make vllm)" if engine == "vllm" else "on a GPU machine"
        )
        instead = f"set rollout.{engine}.servers, or set it to native"
        needed.append(("rollout.engine", engine, install, instead))
    if is_gguf(config.model.source or ""):
        needed.append(("model.path", "gguf", "'braid-rl[gguf]'", "set it to a Hugging Face folder"))
    if (package := _SIMULATORS.get(type(config.env))) is not None:
        needed.append(("env.kind", package, f"'braid-rl[{config.env.kind}]'", "use another environment"))
    if isinstance(config.env, SimulatorEnv) and config.env.video.are_saved:
        key, fix = (
            ("save", "set it to false") if config.env.video.save else ("train_every_rounds", "set it to null")
        )
        needed.append((f"env.video.{key}", "av", "'braid-rl[video]'", fix))
    for key, package, install, is_used in (
        ("report.wandb", "wandb", "'braid-rl[wandb]'", config.report.wandb),
        ("report.swanlab", "swanlab", "'braid-rl[swanlab]'", config.report.swanlab),
        ("train.liger_kernels", "liger_kernel", "'braid-rl[liger]'", config.train.liger_kernels or None),
        (
            "model.attention",
            "flash_attn",
            "flash-attn",
            config.model.attention == "flash_attention_2" or None,
        ),
    ):
        if is_used is not None:
            needed.append((key, package, install, "remove this key"))
    for key, package, install, instead in needed:
        if not _is_installed(package):
            why = f"needs the package {package}, which is not installed"
            yield key, f"{why}; run: pip install {install}, or {instead}"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _not_in_megatron(config: RunConfig, key: str, train: TrainConfig) -> Iterator[tuple[str, str]]:
    """(key, message) of what megatron does not support in the training settings at section `key`. Checks that
    depend on the model's sizes are made when it is built (training/backends/megatron)."""
    if config.model.lora is not None and key != "critic.train":
        why = (
            f"megatron does not support adapters; set {key}.backend to fsdp2, fsdp or deepspeed, or remove it"
        )
        yield "model.lora", why
    if train.liger_kernels:
        yield f"{key}.liger_kernels", "not supported by megatron, which has its own layers; set it to false"
    if train.megatron.virtual_pipeline is not None and train.megatron.pipeline_parallel == 1:
        why = "interleaving needs several pipeline stages; set pipeline_parallel above 1, or remove it"
        yield f"{key}.megatron.virtual_pipeline", why


def train_sections(config: RunConfig, plan: Plan) -> Iterator[tuple[str, TrainConfig]]:
    """(key, training settings) of every role of the run that has its own."""
    yield "train", config.train
    if plan.needs_critic and config.critic.train is not None:
        yield "critic.train", config.critic.train
    if plan.needs_reference and config.reference.train is not None:
        yield "reference.train", config.reference.train


def _missing_devices(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of worker placements that this version does not support."""
    try:
        placed = parse_placement(config.cluster.placement)
    except ValueError:
        return  # reported as a refusal of the layout
    reward, rollout = placed.get("reward"), plan.layout.role("rollout")
    has_models = any(isinstance(part, ModelReward) for part in config.reward.parts)
    if has_models and reward and rollout and not set(reward.numbers) <= set(rollout.devices):
        where = f"the devices of rollout ({format_numbers(rollout.devices)}) in this version"
        why = f"reward models run on {where}, but reward is placed on {format_numbers(reward.numbers)}"
        yield "cluster.placement", f"{why}; place reward on those, or remove it"
