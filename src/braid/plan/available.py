"""What a config may ask for and this version does not run, and options of parts that a run has not chosen.

Both tables shrink as parts are built. Files for other backends and engines load, and are carried whole; what cannot run is
said before a run starts, with the value that runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pydantic import BaseModel

from braid.config.backends import DeepSpeedConfig, FsdpConfig, MegatronConfig
from braid.config.cluster import InferenceConfig
from braid.config.rollout import NativeEngineConfig, PublishConfig, SglangConfig, VllmConfig
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig

from .megatron import IDLE_IN_MEGATRON, missing_in_megatron
from .placement import parse_placement
from .plan import Plan

_EXTRAS = {
    "fsdp": None,
    "fsdp2": None,
    "deepspeed": "deepspeed",
    "vllm": "vllm",
    "sglang": "sglang",
    "maniskill": "maniskill",
    "libero": "libero",
}
"""The extra that a part will come with, beside the packages that every installation has."""


def missing_parts(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of everything that this version cannot run."""
    for key, train in _train_sections(config, plan):
        if train.backend in _SHARDED:
            if key == "train":
                yield from _not_sharded(config, plan)
        elif train.backend != "single":
            yield f"{key}.backend", _not_yet(f"the training backend {train.backend}", train.backend, "single")
        elif train.sequence_parallel > 1:
            yield (
                f"{key}.sequence_parallel",
                f"sharing each sequence among {train.sequence_parallel} devices needs one of the backends fsdp, fsdp2 and "
                "deepspeed, which this version does not have yet; 1 runs here",
            )
    if config.rollout.engine != "native":
        engine = config.rollout.engine
        yield "rollout.engine", _not_yet(f"the rollout engine {engine}", engine, "native")
    if config.env.kind in _EXTRAS:
        kind = config.env.kind
        yield "env.kind", _not_yet(f"the simulator {kind}", kind, "gymnasium or a text environment")
    if config.model.vla is not None:
        yield (
            "model.vla",
            "vision-language-action policies are not in this version yet; leave model.vla out and give model.path, "
            "model.build or model.mlp",
        )
    if config.model.attention == "flash_attention_2" and _computes_in_fp32(config):
        yield (
            "model.attention",
            "flash_attention_2 computes in bf16 or fp16, and this run in fp32; set model.dtype or train.autocast to "
            "bf16, or model.attention=auto",
        )
    yield from missing_in_megatron(config)
    yield from _missing_devices(config)


_SHARDED = ("fsdp", "fsdp2", "megatron")
"""Backends whose ranks are processes of their own."""


def _not_sharded(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """What the sharded backends do not do yet."""
    backend, key = config.train.backend, "train.backend"
    if plan.verb != "train":
        yield (
            key,
            f"braid {plan.verb} runs in one process in this version, not on {backend}; set train.backend=single",
        )
    if config.model.mlp is not None:
        yield key, f"a perceptron trains in one process, not on {backend}; set train.backend=single"
    fsdp = config.train.fsdp
    if config.model.lora is not None and backend == "fsdp" and (fsdp.sharding == "none" or fsdp.size == 1):
        yield (
            "train.fsdp.sharding",
            "fsdp cannot train adapters beside frozen weights that it does not shard; set train.backend=fsdp2 with "
            "train.fsdp.size=1, or train.fsdp.sharding=full",
        )
    if config.cluster.runtime == "in_process":
        yield (
            "cluster.runtime",
            f"train.backend={backend} needs worker processes; set cluster.runtime=auto or ray",
        )


def _is_sharded(config: RunConfig) -> bool:
    return config.train.backend in _SHARDED


def _uses_workers(config: RunConfig) -> bool:
    """Whether roles have processes of their own."""
    return config.cluster.runtime == "ray" or _is_sharded(config)


def _train_sections(config: RunConfig, plan: Plan) -> Iterator[tuple[str, TrainConfig]]:
    """The training settings that somebody in this run has."""
    yield "train", config.train
    if plan.needs_critic and config.critic.train is not None:
        yield "critic.train", config.critic.train
    if plan.needs_reference and config.reference.train is not None:
        yield "reference.train", config.reference.train


def _missing_devices(config: RunConfig) -> Iterator[tuple[str, str]]:
    cluster = config.cluster
    here = "everything runs in one process on one device"
    if cluster.num_nodes > 1:
        yield "cluster.num_nodes", f"{cluster.num_nodes} machines need the runtime ray, which this version does not have yet: {here}; 1 runs here"  # fmt: skip
    try:
        placed = parse_placement(cluster.placement)
    except ValueError:
        return  # checks.py says what is wrong with it
    if _uses_workers(config):
        placed = {}
    elif not placed and (cluster.devices_per_node or 1) > 1:
        yield (
            "cluster.devices_per_node",
            f"with no cluster.placement every role takes all {cluster.devices_per_node} devices, and in this version {here}; "
            "set it to 1, or leave it out",
        )
    numbers = {number for devices in placed.values() if devices for number in devices.numbers}
    if len(numbers) > 1:
        yield (
            "cluster.placement",
            f"it names {len(numbers)} devices ({', '.join(map(str, sorted(numbers)))}), and in this version {here}; "
            "leave it out, or put every role on device 0",
        )


def _computes_in_fp32(config: RunConfig) -> bool:
    return config.model.dtype == "fp32" and config.train.autocast == "none"


def _not_yet(part: str, value: str, here: str) -> str:
    extra = _EXTRAS.get(value)
    comes = f" (it will come with the extra `{extra}`: pip install 'braid-rl[{extra}]')" if extra else ""
    return f"{part} is not in this version yet{comes}; what runs here is {here}"


def _leaves(key: str, section: type[BaseModel]) -> tuple[str, ...]:
    """All keys of a section, those of sections in it included."""
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
    shares = config.model.mlp is not None or config.rollout.native.dtype in ("auto", config.model.dtype)
    return shares and not plan.needs_critic and not plan.needs_reference


def _infers_nothing(_: RunConfig, plan: Plan) -> bool:
    return plan.old_logprobs != "recompute" and not plan.needs_critic and not plan.needs_reference


def _has_fp16(config: RunConfig) -> bool:
    return config.model.dtype == "fp16" or config.train.autocast == "fp16"


Idle = tuple[str, Callable[[RunConfig, Plan], bool], tuple[str, ...]]
"""(why, when, keys)."""

IDLE: tuple[Idle, ...] = (
    *(
        (
            f"train.backend is not {' or '.join(names)}",
            lambda config, _, names=names: config.train.backend not in names,
            _leaves(f"train.{key}", section),
        )
        for key, section, names in (
            ("fsdp", FsdpConfig, ("fsdp", "fsdp2")),
            ("deepspeed", DeepSpeedConfig, ("deepspeed",)),
            ("megatron", MegatronConfig, ("megatron",)),
        )
    ),
    *IDLE_IN_MEGATRON,
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
    (
        "the native engine reads the trainer's weights where they are",
        lambda config, _: config.rollout.engine == "native",
        _leaves("rollout.publish", PublishConfig),
    ),
    (
        "the policy itself computes log-probs where everything runs in one process",
        lambda config, _: not _uses_workers(config),
        _leaves("inference", InferenceConfig),
    ),
    (
        "everything runs in one process",
        lambda config, _: not _uses_workers(config),
        (
            "cluster.address",
            "cluster.start_timeout_s",
            "cluster.call_timeout_s",
            *_each(_TRAINS, "balance_ranks"),
        ),
    ),
    (
        "train.backend=single frees gradients after every step anyway",
        lambda config, _: config.train.backend == "single",
        _each(_TRAINS, "offload.gradients"),
    ),
    (
        "run.device=cpu: host memory is where everything is",
        _is_on_cpu,
        _each(_TRAINS, "offload.weights", "offload.optimizer"),
    ),
    ("the engine samples with these very weights", _weights_stay, ("train.offload.weights",)),
    (
        "no number is computed without gradients in this run",
        _infers_nothing,
        ("train.infer_batch_tokens", "train.infer_batch_rows"),
    ),
    (
        "nothing computes in fp16",
        lambda config, _: not _has_fp16(config),
        ("train.grad_scaler",),
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
        "the policy has no value head and the critic, if any, has settings of its own",
        lambda config, plan: not plan.needs_critic or config.critic.train is not None,
        ("train.optimizer.value_lr",),
    ),
    ("the policy has no value head", lambda *_: True, ("sft.optimizer.value_lr",)),
    (
        "the advantage has no critic",
        lambda _, plan: not plan.needs_critic,
        ("critic.normalize_values", "critic.head_name"),
    ),
    (
        "only the policy's compile counts",
        lambda *_: True,
        ("critic.train.compile", "reference.train.compile"),
    ),
    (
        "adapters have no dropout: log-probs must be the same in rollout and in training",
        lambda *_: True,
        ("model.lora.dropout",),
    ),
    (
        "the adapters of model.lora.path have it already",
        lambda config, _: config.model.lora is not None and config.model.lora.path is not None,
        ("model.lora.rank", "model.lora.alpha", "model.lora.targets"),
    ),
    (
        "a model made from sizes has no files",
        lambda config, _: config.model.path is None,
        ("model.low_memory_load",),
    ),
    (
        "a perceptron is no transformer",
        lambda config, _: config.model.mlp is not None,
        (
            "model.architecture",
            "model.attention",
            "model.lora",
            "train.compile",
            "train.liger_kernels",
        ),
    ),
)


def _value(config: RunConfig, path: str) -> object:
    """The value at a dotted path; None where a section on the way is not given."""
    value: object = config
    for name in path.split("."):
        value = getattr(value, name, None)
    return value
