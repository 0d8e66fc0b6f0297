"""Features that a config may request but this version cannot run, and options of parts that a run does not
use.

Both tables shrink as parts are implemented. Configs for other backends and engines load completely; what
cannot run is reported before the run starts, with a value that works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel

from braid.config.backends import DeepSpeedConfig, FsdpConfig, MegatronConfig
from braid.config.cluster import InferenceConfig
from braid.config.reward import ModelReward
from braid.config.roles import train_config
from braid.config.rollout import GymnasiumEnv, NativeEngineConfig, PublishConfig, SglangConfig, VllmConfig
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig

from .megatron import idle_in_megatron, missing_in_megatron
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
        yield from missing_in_megatron(config, key, train)
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


def _is_in_process(_: RunConfig, plan: Plan) -> bool:
    return plan.layout.mode == "in_process"


def _leaves(key: str, section: type[BaseModel]) -> tuple[str, ...]:
    """All keys of a section, including those of nested sections."""
    out: list[str] = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
        out += _leaves(f"{key}.{name}", inner) if is_section else (f"{key}.{name}",)  # pyright: ignore[reportArgumentType]
    return tuple(out)


_TRAINS = ("train", "critic.train", "reference.train")
_OPTIMIZERS = ("train.optimizer", "critic.train.optimizer", "sft.optimizer")


def _each(sections: tuple[str, ...], *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for section in sections for name in names)


def _is_on_cpu(config: RunConfig, _: Plan) -> bool:
    return config.run.device == "cpu"


def _weights_stay(config: RunConfig, plan: Plan) -> bool:
    dtype, is_native = config.rollout.native.dtype, config.rollout.engine == "native"
    is_one = is_native and _is_in_process(config, plan) and dtype in ("auto", config.model.dtype)
    shares = config.model.mlp is not None or is_one
    return shares and not plan.needs_critic and not plan.needs_reference


def _infers_nothing(config: RunConfig, plan: Plan) -> bool:
    """Whether no role with the settings `train` runs a forward pass without gradients."""
    has_critic = plan.needs_critic and config.critic.train is None
    has_reference = plan.needs_reference and config.reference.train is None
    return plan.old_logprobs != "recompute" and not has_critic and not has_reference


_When = Callable[[RunConfig, Plan], bool]
Idle = tuple[str, _When, tuple[str, ...]]
"""(why, when, keys)."""


def _idle_options(at: str) -> Iterator[Idle]:
    """Unused options of the training backend in section `at`."""

    def train_of(config: RunConfig) -> TrainConfig | None:
        return _value(config, at)

    def on(*backends: str, where: Callable[[TrainConfig], bool] = lambda _: True) -> _When:
        def is_idle(config: RunConfig, _: Plan) -> bool:
            train = train_of(config)
            return train is not None and train.backend in backends and where(train)

        return is_idle

    yield from idle_in_megatron(at, train_of)
    yield (
        f"{at}.backend=fsdp2 does not have this option",
        on("fsdp2"),
        _each((f"{at}.fsdp",), "forward_prefetch", "backward_prefetch", "limit_all_gathers", "buffer_dtype"),
    )
    yield (
        f"{at}.backend=fsdp does not have this option",
        on("fsdp"),
        _each((f"{at}.fsdp",), "pin_memory", "reshard_after_forward"),
    )
    yield (
        "original parameters are always used, for parameter groups and adapters",
        on("fsdp", "fsdp2"),
        (f"{at}.fsdp.use_orig_params",),
    )
    yield (
        f"{at}.backend always frees gradients after a step",
        on("single", "fsdp", "fsdp2"),
        (f"{at}.offload.gradients",),
    )
    yield (
        f"{at}.fsdp.cpu_offload already keeps everything in host memory",
        on("fsdp", "fsdp2", where=lambda train: train.fsdp.cpu_offload),
        _each((f"{at}.offload",), "weights", "optimizer"),
    )
    yield (
        f"{at}.deepspeed.cpu_offload already keeps everything in host memory",
        on("deepspeed", where=lambda train: train.deepspeed.cpu_offload),
        _each((f"{at}.offload",), "weights", "gradients", "optimizer"),
    )
    yield (
        f"{at}.fsdp.cpu_offload is false",
        on("fsdp2", where=lambda train: not train.fsdp.cpu_offload),
        (f"{at}.fsdp.pin_memory",),
    )
    yield (
        f"{at}.fsdp.sharding=grad_op keeps weights gathered",
        on("fsdp2", where=lambda train: train.fsdp.sharding == "grad_op"),
        (f"{at}.fsdp.reshard_after_forward",),
    )
    yield (
        f"{at}.fsdp.sharding=none shards nothing",
        on("fsdp", "fsdp2", where=lambda train: train.fsdp.sharding == "none"),
        (f"{at}.fsdp.size",),
    )
    yield (
        "fp16 is not used",
        lambda config, _: config.model.dtype != "fp16" and _value(config, f"{at}.autocast") != "fp16",
        (f"{at}.grad_scaler",),
    )


IDLE: tuple[Idle, ...] = (
    (
        "only vision-language-action policies have action chunks, and this version does not support them",
        lambda *_: True,
        ("algorithm.reward_level",),
    ),
    *(
        (
            f"{at}.backend is not {' or '.join(names)}",
            lambda config, _, path=f"{at}.backend", names=names: _value(config, path) not in names,
            _leaves(f"{at}.{key}", section),
        )
        for at in _TRAINS
        for key, section, names in (
            ("fsdp", FsdpConfig, ("fsdp", "fsdp2")),
            ("deepspeed", DeepSpeedConfig, ("deepspeed",)),
            ("megatron", MegatronConfig, ("megatron",)),
        )
    ),
    *(row for at in _TRAINS for row in _idle_options(at)),
    *(
        (
            f"rollout.engine is not {name}",
            lambda config, _, name=name: config.rollout.engine != name,
            _leaves(f"rollout.{name}", section),
        )
        for name, section in (
            ("native", NativeEngineConfig),
            ("vllm", VllmConfig),
            ("sglang", SglangConfig),
        )
    ),
    *(
        (
            f"external servers have their own options (rollout.{name}.servers)",
            lambda config, _, name=name: (
                config.rollout.engine == name and bool(getattr(config.rollout, name).servers)
            ),
            tuple(
                key
                for key in _leaves(f"rollout.{name}", section)
                if key.rpartition(".")[2] not in ("servers", "max_model_tokens")
            ),
        )
        for name, section in (("vllm", VllmConfig), ("sglang", SglangConfig))
    ),
    (
        "SGLang always detokenizes, to find stop strings",
        lambda config, _: config.rollout.engine == "sglang",
        ("rollout.sglang.detokenize",),
    ),
    (
        "SGLang reads weights from files",
        lambda config, _: config.rollout.engine == "sglang",
        ("rollout.publish.transport", "rollout.publish.existing_group"),
    ),
    (
        "each engine has a single device",
        lambda config, _: config.rollout.vllm.tensor_parallel * config.rollout.vllm.pipeline_parallel == 1,
        ("rollout.vllm.executor",),
    ),
    (
        "weights are synced between rounds, when no request runs",
        lambda *_: True,
        ("rollout.native.on_new_weights",),
    ),
    (
        "weights sent to other processes are always verified by fingerprints on arrival",
        lambda config, plan: config.rollout.engine != "native" or not _is_in_process(config, plan),
        ("rollout.check_weights", "rollout.check_weights_dir"),
    ),
    (
        "inference workers receive the policy's weights every round",
        lambda *_: True,
        ("inference.load_from_policy",),
    ),
    (
        "the native engine reads the trainer's weights in place",
        lambda config, plan: config.rollout.engine == "native" and _is_in_process(config, plan),
        _leaves("rollout.publish", PublishConfig),
    ),
    (
        "inference has no separate devices: the policy's workers compute log-probs",
        lambda _, plan: plan.layout.role("inference") is None,
        _leaves("inference", InferenceConfig),
    ),
    (
        "train.backend is not megatron",
        lambda config, _: config.train.backend != "megatron",
        _each(("inference",), "tensor_parallel", "pipeline_parallel", "sequence_parallel"),
    ),
    (
        "inference has no tensor parallelism",
        lambda config, _: train_config(config, "inference").megatron.tensor_parallel == 1,
        ("inference.sequence_parallel",),
    ),
    (
        "everything runs in one process",
        _is_in_process,
        (
            "cluster.address",
            "cluster.start_timeout_s",
            "cluster.call_timeout_s",
            *_each(_TRAINS, "balance_ranks"),
        ),
    ),
    (
        "everything runs in one process, on the first device",
        lambda config, plan: _is_in_process(config, plan) and not config.cluster.placement,
        ("cluster.num_nodes", "cluster.devices_per_node"),
    ),
    (
        "with run.device=cpu everything is in host memory",
        _is_on_cpu,
        _each(_TRAINS, "offload.weights", "offload.optimizer"),
    ),
    (
        "there are no CUDA graphs with run.device=cpu",
        _is_on_cpu,
        (
            "rollout.native.cuda_graphs",
            *_each(("rollout.vllm", "rollout.sglang"), "cuda_graphs", "cuda_graph_max_batch"),
        ),
    ),
    *(
        (f"{key} is false", lambda config, _, key=key: not _value(config, key), (of,))
        for key, of in (
            ("rollout.vllm.cuda_graphs", "rollout.vllm.cuda_graph_max_batch"),
            ("rollout.sglang.cuda_graphs", "rollout.sglang.cuda_graph_max_batch"),
            ("rollout.sglang.torch_compile", "rollout.sglang.torch_compile_max_batch"),
        )
    ),
    ("the engine samples with the trainer's own weights", _weights_stay, ("train.offload.weights",)),
    (
        "this run has no inference passes (log-probs or values before the update)",
        _infers_nothing,
        ("train.infer_batch_tokens", "train.infer_batch_rows"),
    ),
    *(
        (f"{key}.{name}={value}", when, _each((key,), *keys))
        for key in _OPTIMIZERS
        for name, value, keys in (
            ("kind", "sgd", ("betas", "eps")),
            ("schedule.decay", "constant", ("schedule.min_ratio", "schedule.decay_steps")),
            ("schedule.decay", "inverse_sqrt", ("schedule.decay_steps",)),
        )
        for when in (lambda config, _, path=f"{key}.{name}", value=value: _value(config, path) == value,)
    ),
    *(
        (
            f"{key} has no warm-up",
            lambda config, _, key=key: (
                not (
                    _value(config, f"{key}.schedule.warmup_steps")
                    or _value(config, f"{key}.schedule.warmup_fraction")
                )
            ),
            (f"{key}.schedule.start_ratio",),
        )
        for key in _OPTIMIZERS
    ),
    (
        "the policy has no value head and the critic, if any, has its own settings",
        lambda config, plan: not plan.needs_critic or config.critic.train is not None,
        ("train.optimizer.value_lr",),
    ),
    ("the policy has no value head", lambda *_: True, ("sft.optimizer.value_lr",)),
    (
        "the advantage uses no critic",
        lambda _, plan: not plan.needs_critic,
        ("critic.normalize_values", "critic.head_name"),
    ),
    (
        "a critic computes no log-probs",
        lambda *_: True,
        ("critic.train.compile", "critic.train.logprob_chunk_bytes"),
    ),
    (
        "train.record_memory records all roles",
        lambda *_: True,
        ("critic.train.record_memory", "reference.train.record_memory"),
    ),
    (
        "without critic.path the critic's layers are a copy of the policy's",
        lambda config, _: config.critic.path is None,
        ("critic.train.liger_kernels",),
    ),
    (
        "without reference.path the reference is a copy of the policy",
        lambda config, _: config.reference.path is None,
        ("reference.train.liger_kernels",),
    ),
    (
        "the reference is the policy's model with the initial adapters",
        lambda config, plan: (
            config.model.lora is not None and config.reference.path is None and _is_in_process(config, plan)
        ),
        ("reference.train.compile", "reference.train.logprob_chunk_bytes"),
    ),
    (
        "reference.train.infer_batch_tokens is used instead",
        lambda config, _: _value(config, "reference.train.infer_batch_tokens") is not None,
        ("reference.train.micro_batch_tokens",),
    ),
    (
        "dropout is disabled: log-probs must be the same in rollout and training",
        lambda *_: True,
        ("model.lora.dropout",),
    ),
    (
        "the adapters in model.lora.path determine it",
        lambda config, _: config.model.lora is not None and config.model.lora.path is not None,
        ("model.lora.rank", "model.lora.alpha", "model.lora.targets"),
    ),
    (
        "a model built from sizes has no files",
        lambda config, _: config.model.path is None,
        ("model.low_memory_load",),
    ),
    (
        "neither the model nor the tokenizer comes from a folder",
        lambda config, _: config.model.path is None and config.model.tokenizer is None,
        ("model.trust_remote_code",),
    ),
    (
        "the character tokenizer has no chat template",
        lambda config, _: (
            config.model.build is not None and not (config.model.tokenizer or config.model.chat_template)
        ),
        ("data.chat_template_kwargs",),
    ),
    (
        "an MLP is not a transformer",
        lambda config, _: config.model.mlp is not None,
        (
            *_each(
                ("model",),
                "architecture",
                "attention",
                "dtype",
                "eos_token_id",
                "lora",
                "pad_token_id",
            ),
            *_each(_TRAINS, "compile", "gradient_checkpointing", "liger_kernels", "logprob_chunk_bytes"),
        ),
    ),
)


def _value(config: RunConfig, path: str) -> Any:
    """The value at a dotted path; None if a section on the path is null."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name, None)
    return value
