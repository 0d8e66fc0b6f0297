"""Features that a config may request but this version cannot run.

Configs for other backends and engines load completely; what
cannot run is reported before the run starts, with a value that works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

from braid.config.model import ModelConfig
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig
from braid.gguf_file import is_gguf

from .machine import count_gpus, memory_bytes
from .parallel import served_engine
from .placement import format_numbers, parse_placement
from .plan import Plan
from .sizes import size_of_folder


def missing_parts(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of everything that this version cannot run."""
    is_robot = config.model.kind.is_robot
    for key, train in train_sections(config, plan):
        backend = train.backend
        if train.sequence_parallel > 1 and is_robot:
            why = "a robot policy has no long sequences to split over devices"
            yield f"{key}.sequence_parallel", f"{why}; set it to 1"
        elif train.sequence_parallel > 1 and not backend.splits_sequences:
            instead = backend.instead_of_sequence_parallel.format(key)
            why = f"sequence parallelism over {train.sequence_parallel} devices needs backend"
            yield (
                f"{key}.sequence_parallel",
                f"{why} fsdp, fsdp2 or deepspeed, not {backend.kind}; set it to 1 and use {instead}",
            )
        if is_robot and not backend.trains_robots:
            why = f"{backend.kind} trains language models only"
            yield f"{key}.backend", f"{why}; for a robot policy set it to fsdp2, fsdp or deepspeed"
        yield from backend.problems(config, train, key)
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
        needed = f"{plan.round_bytes[0] / 2**30:.3g} GiB"
        why = f"a round of {plan.trajectories_per_round:,} trajectories takes at least {needed}"
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
    is_on_cpu = not num_gpus or config.run.device == "cpu"
    yield from config.rollout.engine.problems(config, plan, on_cpu=is_on_cpu)
    for number, part in config.reward.judges():
        model = ModelConfig(path=part.path, dtype=part.weights_dtype)
        as_policy = config.model_copy(update={"model": model})
        size = size_of_folder(part.path)
        for key, why in part.engine.problems(as_policy, replace(plan, model_size=size), on_cpu=is_on_cpu):
            yield f"reward.parts[{number}].{key.removeprefix('rollout.').removeprefix('model.')}", why


def _needs_gpu(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Key, value and remedy of each setting of the run that needs a GPU."""
    if config.run.device == "cuda":
        yield "run.device", "cuda", "set it to cpu or auto"
    for key, train in train_sections(config, plan):
        if train.backend.needs_gpu:
            yield f"{key}.backend", train.backend.kind, "set it to fsdp2, fsdp or deepspeed"
        if train.liger_kernels:
            yield f"{key}.liger_kernels", "Liger", "set it to false (same results up to rounding)"
    if config.model.attention == "flash_attention_2":
        yield "model.attention", "flash_attention_2", "set it to auto"
    engine = served_engine(config)
    if engine is not None and engine.needs_gpu and not engine.servers:
        yield "rollout.engine", engine.kind, "set rollout.engine.servers, or set it to native"
    for number, part in config.reward.judges():
        if part.engine.needs_gpu:
            yield (
                f"reward.parts[{number}].engine",
                part.engine.kind,
                "set it to native, or url instead of path",
            )
    yield from config.env.needs_gpu()


def missing_packages(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of every package that the run needs and that is not installed. Not an error for commands
    that only inspect a config."""
    needed = [
        (f"{key}.backend", train.backend.package, f"'braid-rl[{train.backend.kind}]'", "set it to fsdp2")
        for key, train in train_sections(config, plan)
        if train.backend.package
    ]
    engine = served_engine(config)
    if engine is not None and engine.package and not engine.servers:
        instead = "set rollout.engine.servers, or set it to native"
        needed.append(("rollout.engine", engine.package, engine.install, instead))
    needed += [
        (f"reward.parts[{number}].engine", judge.engine.package, judge.engine.install, "set it to native")
        for number, judge in config.reward.judges()
        if judge.engine.package
    ]
    if is_gguf(config.model.source or ""):
        needed.append(("model.path", "gguf", "'braid-rl[gguf]'", "set it to a Hugging Face folder"))
    if (package := config.env.package) is not None:
        needed.append(("env.kind", package, f"'braid-rl[{config.env.kind}]'", "use another environment"))
    if (video := config.env.video_of("eval") or config.env.video_of("train")) is not None:
        key, fix = ("save", "set it to false") if video.save else ("train_every_rounds", "set it to null")
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
        if not is_installed(package):
            why = f"needs the package {package}, which is not installed"
            yield key, f"{why}; run: pip install {install}, or {instead}"


def is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


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
    sizes = {
        f"reward.parts[{number}].engine": judge.engine.num_devices()
        for number, judge in config.reward.judges()
    }
    where, num = "another judge's", max(sizes.values(), default=1)
    if plan.layout.role("reward") is None:
        where, num = "rollout's", config.rollout.engine.num_devices() or 1
    for key, size in sizes.items() if rollout else ():
        if size != num:
            why = f"its engine has {size} devices, on the same workers as {where} engine with {num}"
            fix = "give both the same parallel sizes, or place reward on other devices (cluster.placement)"
            yield key, f"{why}; {fix}"
    if any(config.reward.models()) and reward and rollout and not set(reward.numbers) <= set(rollout.devices):
        where = f"the devices of rollout ({format_numbers(rollout.devices)}) in this version"
        why = f"reward models run on {where}, but reward is placed on {format_numbers(reward.numbers)}"
        yield "cluster.placement", f"{why}; place reward on those, or remove it"
