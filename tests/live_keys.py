"""Observes which keys of a config a run depends on.

`settings` is what a run hands on: its plan, and the arguments that FSDP, DeepSpeed, Megatron-core, vLLM and
SGLang get. `recorded` collects the keys that a run reads, by their full paths: the run gets sections whose
fields note each read, while the plan, checks and warnings get plain ones. Reads of the plan's recipe count as
reads of `algorithm`.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, wraps
from inspect import isfunction, unwrap
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin
from unittest.mock import patch

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import AutoConfig

from braid.algorithms.recipes import Correction, Recipe
from braid.config.load import FAMILIES, KINDS, Loaded, leaves, plain_data
from braid.config.roles import TrainingRole, train_config
from braid.config.rollout import SamplingConfig
from braid.config.schema import RunConfig
from braid.config.source import parse_path, path_text, place
from braid.config.train import TrainConfig
from braid.errors import ConfigError, ModelError
from braid.kinds import Kind
from braid.plan import Plan, default_verb, derive, unused_keys, why_unused, with_examples
from braid.plan.checks import find_problems
from braid.rollout.engine import Sampling
from braid.rollout.engines.base import Model, ServedEngine
from braid.rollout.engines.sglang.kind import Sglang
from braid.rollout.engines.sglang.options import server_arguments
from braid.rollout.engines.vllm.kind import Vllm
from braid.rollout.engines.vllm.options import engine_arguments, environment
from braid.sections import Section
from braid.trainer import commands
from braid.trainer.watch import LearningWatch
from braid.trainer.weight_sync import send_options
from braid.training.backends.deepspeed.backend import _settings
from braid.training.backends.deepspeed.kind import DeepSpeed
from braid.training.backends.fsdp import backend as fsdp
from braid.training.backends.fsdp.kind import Fsdp2
from braid.training.backends.megatron.checks import check_model
from braid.training.backends.megatron.kind import Megatron, settings_of
from braid.training.backends.single.kind import Single

CPU = torch.device("cpu")
T = TypeVar("T")

# Reads


_READING_FOR_OTHERS = tuple(
    f"braid.config.{name}" for name in ("cluster", "data", "model", "report", "reward", "roles", "schema")
)
"""Modules whose functions read keys on behalf of their caller."""
_NOT_PART_OF_A_RUN = ("braid.config", "braid.plan", "braid.trainer.preflight", "braid.trainer.watch")
"""Modules whose functions get a config that records nothing."""


@dataclass(frozen=True, slots=True)
class _Reads:
    """The keys that a run reads. Settings of sampling that are converted to a Sampling count if a field of
    the same name is read from a Sampling."""

    keys: set[str] = field(default_factory=set)
    converted: set[str] = field(default_factory=set)
    of_sampling: set[str] = field(default_factory=set)


class _Recorded:
    """A field that notes each read of it."""

    def __init__(self, name: str, plain: Any, note: Callable[[Any, str], None]) -> None:
        """`plain` is the descriptor of the field in a class with slots, None for a field of a section."""
        self._name, self._plain, self._note = name, plain, note

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        self._note(instance, self._name)
        return vars(instance)[self._name] if self._plain is None else self._plain.__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        self._plain.__set__(instance, value)


@cache
def _recording_section(kind: type[Section]) -> type[Section]:
    """A section whose fields note by their path that they are read: `_at`, which copies keep."""

    def note(section: Any, *names: str) -> None:
        if "_at" in vars(section):
            path, reads = vars(section)["_at"]
            reads.keys.update(f"{path}{name}" for name in names)

    def dump(self: Any, **options: Any) -> dict[str, Any]:
        if isinstance(self, SamplingConfig):
            path, reads = vars(self)["_at"]
            reads.converted.update(f"{path}{name}" for name in kind.model_fields)
        elif not isinstance(self, RunConfig):  # which is stored, or compared with a stored one
            note(self, *kind.model_fields)
        return kind.model_dump(self, **options)

    def reduce(self: Any, protocol: Any) -> Any:
        return _unrecorded(self).__reduce_ex__(protocol)

    methods = {"model_dump": dump, "__reduce_ex__": reduce, "__module__": __name__}
    made: Any = type(kind)(kind.__name__, (kind,), methods)  # pyright: ignore[reportGeneralTypeIssues]
    for name in kind.model_fields:
        setattr(made, name, _Recorded(name, None, note))
    return made


def _recording(kind: type[T], note: Callable[[Any, str], None]) -> type[T]:
    """A dataclass with slots whose fields note their reads."""
    made: Any = type(kind.__name__, (kind,), {"__slots__": ()})
    for each in fields(kind):  # pyright: ignore[reportArgumentType]
        setattr(made, each.name, _Recorded(each.name, vars(kind)[each.name], note))
    return made


def _with_class(value: T, kind: type[T], changes: Mapping[str, Any]) -> T:
    """A copy of another class of the same layout."""
    if isinstance(value, Section):
        made = copy.copy(value)
        vars(made).update(changes)
    else:
        made: Any = replace(value, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue]
    object.__setattr__(made, "__class__", kind)
    return made


def _noting(value: Any, path: str, reads: _Reads) -> Any:
    """A section, and all within it, that notes its reads below `path`."""
    if isinstance(value, tuple):
        return tuple(_noting(item, path, reads) for item in value)
    if not isinstance(value, Section):
        return value
    inner = {
        name: _noting(item, f"{path}{name}{'[]' if isinstance(item, tuple) else ''}.", reads)
        for name, item in vars(value).items()
        if name in type(value).model_fields
    }
    return _with_class(value, _recording_section(type(value)), {**inner, "_at": (path, reads)})


def _unrecorded(value: Any) -> Any:
    """The same without records: a section, a loaded config, a plan, or anything else as it is."""
    match value:
        case tuple() if any(isinstance(item, Section) for item in value):
            return tuple(map(_unrecorded, value))
        case Section() if "_at" in vars(value):
            plain = _with_class(
                value, type(value).__mro__[1], {name: _unrecorded(item) for name, item in vars(value).items()}
            )
            del vars(plain)["_at"]
            return plain
        case Loaded():
            return replace(value, config=_unrecorded(value.config))
        case Plan():
            return replace(value, recipe=_plain_recipe(value.recipe))
        case _:
            return value


def _plain_recipe(recipe: Recipe) -> Recipe:
    values = {each.name: _unrecorded(_slot(recipe, Recipe, each.name)) for each in fields(Recipe)}
    values["corrections"] = tuple(
        Correction(**{each.name: _slot(item, Correction, each.name) for each in fields(Correction)})
        for item in values["corrections"]
    )
    return Recipe(**values)


def _slot(value: Any, kind: type, name: str) -> Any:
    return vars(kind)[name].__get__(value, kind)


@contextmanager
def recorded() -> Iterator[set[str]]:
    """The keys that runs in this block read, complete when it ends. `key[]` stands for the items of a
    list."""
    reads = _Reads()
    recipe_kind = _recording(Recipe, lambda _, name: reads.keys.add(f"algorithm.{name}"))
    correction_kind = _recording(
        Correction, lambda _, name: reads.keys.add(f"algorithm.corrections[].{name}")
    )
    sampling_kind = _recording(Sampling, lambda _, name: reads.of_sampling.add(name))

    def with_recipe(plan: Plan) -> Plan:
        plain = _plain_recipe(plan.recipe)
        kinds = {
            name: _noting(item, f"{item.config_key}.", reads)
            for name in ("advantage", "policy_loss")
            if isinstance(item := getattr(plain, name), Kind)
        }
        corrections = tuple(_with_class(item, correction_kind, {}) for item in plain.corrections)
        return replace(plan, recipe=_with_class(plain, recipe_kind, {**kinds, "corrections": corrections}))

    def apart(function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of what is no part of a run, whose reads do not count."""

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            made = function(
                *map(_unrecorded, args), **{name: _unrecorded(value) for name, value in options.items()}
            )
            return with_recipe(made) if isinstance(made, Plan) else made

        return call

    original = commands.with_absolute_paths

    def prepared(loaded: Loaded) -> Loaded:
        loaded = original(loaded)
        return replace(loaded, config=_noting(loaded.config, "", reads))

    with ExitStack() as patched:
        for module, name, value in _names_in_runs():
            # a module that an earlier run imported has what was patched for that run
            if isinstance(value, type) and issubclass(value, Sampling):
                patched.enter_context(patch.object(module, name, sampling_kind))
            elif value is LearningWatch or (
                isfunction(value)
                and value.__module__.startswith(_NOT_PART_OF_A_RUN)
                and value.__module__ not in _READING_FOR_OTHERS
            ):
                patched.enter_context(patch.object(module, name, apart(unwrap(value))))
        patched.enter_context(patch.object(Plan, "to_json", apart(Plan.to_json)))
        patched.enter_context(patch.object(commands, "with_absolute_paths", prepared))
        yield reads.keys
    reads.keys.update(key for key in reads.converted if key.rpartition(".")[2] in reads.of_sampling)


def _names_in_runs() -> list[tuple[Any, str, Any]]:
    """Module, name and value of all that the modules of a run have imported or defined."""
    modules = [module for name, module in sys.modules.items() if name.startswith("braid.")]
    return [
        (module, name, value)
        for module in modules
        if not module.__name__.startswith(_NOT_PART_OF_A_RUN)
        for name, value in vars(module).items()
    ]


# Settings


_ONLY_SHOWN = (
    "warnings", "num_prompts", "trajectories_per_round", "steps_per_round", "rows_per_step", "max_output_tokens",
    "max_tokens_per_round", "max_tokens_per_step", "kv_bytes_per_token", "kv_budget_bytes", "max_concurrent", "model_size",
    "memory", "total_bytes",
)  # fmt: skip
"""Fields of a plan that no run reads."""


def settings(config: RunConfig, plan: Plan) -> str:
    """What a run of the config hands to its parts and to libraries, as text. Excludes fields of the plan that
    are only shown, or that only repeat keys."""
    plan_json = {
        name: value for name, value in plan.to_json().items() if name not in (*_ONLY_SHOWN, "recipe")
    }
    for role in plan_json["layout"]["roles"]:
        if role["kind"] not in ("deepspeed", "megatron"):  # `recorded` sees what the others offload
            role["offload"] = None
    if plan.layout.mode == "in_process":
        plan_json["layout"] |= {"num_nodes": None, "devices_per_node": None}
    arguments: dict[str, Any] = {"plan": plan_json}
    arguments["engine"] = _engine(config, plan)
    for role in get_args(TrainingRole):
        if plan.layout.role(role):
            arguments[role] = _backend(train_config(config, role), plan)
    if plan.layout.role("policy") and (plan.layout.mode != "in_process" or config.rollout.engine.is_served):
        try:
            arguments["sync"] = send_options(
                config, plan.layout, "", torch.device("cpu" if config.run.device == "cpu" else "cuda")
            )
        except ConfigError as error:
            arguments["sync"] = str(error)
    return json.dumps(_plain(arguments), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return type(value).__name__ if "0x" in str(value) else str(value)


def _engine(config: RunConfig, plan: Plan) -> Any:
    engine = config.rollout.engine
    if not isinstance(engine, ServedEngine):
        return None
    longest = max(plan.max_trajectory_tokens or 1, plan.eval_max_trajectory_tokens or 1)
    if engine.servers:
        return engine.servers, engine.max_model_tokens or longest
    model = Model(
        "", tokenizer="", dtype=config.model.dtype, longest=longest, seed=config.run.seed,
        trust_remote_code=config.model.trust_remote_code, sleeps=bool(plan.engines_in_turns),
    )  # fmt: skip
    if isinstance(engine, Sglang):
        return server_arguments(engine, model)
    assert isinstance(engine, Vllm)
    made = engine_arguments(engine, model, on_gpu=config.run.device != "cpu")
    return made, environment(engine), engine.detokenize


def _backend(train: TrainConfig, plan: Plan) -> Any:
    match train.backend:
        case Single():
            return None
        case DeepSpeed():
            return _settings(nn.Linear(2, 2), train.backend, CPU)
        case Megatron():
            mixtures = (False, True) if plan.model_size is None else (plan.model_size.num_experts > 0,)
            return [_megatron(train, is_mixture=is_one) for is_one in mixtures]
        case _:
            return _fsdp(train)


class _Mesh(SimpleNamespace):
    """Replaces a device mesh."""

    shape: tuple[int, ...]

    def size(self, dim: int | None = None) -> int:
        return torch.Size(self.shape).numel() if dim is None else self.shape[dim]

    def __getitem__(self, name: str) -> tuple[str, tuple[int, ...]]:
        return name, self.shape


def _fsdp(train: TrainConfig) -> list[Any]:
    """Arguments of torch's sharding functions, on two machines with four devices each."""
    calls: list[Any] = [train.backend.sync_last_micro_batch_only]

    def take(module: nn.Module, **options: Any) -> None:
        calls.append(
            {name: vars(value) if name == "offload_policy" else value for name, value in options.items()}
        )

    def gather(out: list[str], _: str) -> None:
        out[:] = ["one"] * 4 + ["other"] * 4

    net = nn.Module()
    net.layers = nn.ModuleList([nn.Linear(2, 2)])
    with ExitStack() as patched:
        for owner, name, by in (
            (fsdp, "init_device_mesh", lambda _, shape, **__: _Mesh(shape=shape)),
            (fsdp, "fully_shard", take),
            (fsdp, "FullyShardedDataParallel", take),
            (fsdp.dist, "get_world_size", lambda *_: 8),
            (fsdp.dist, "all_gather_object", gather),
        ):
            patched.enter_context(patch.object(owner, name, by))
        settings: Any = train.backend
        mesh = fsdp._mesh(settings, CPU)
        if isinstance(settings, Fsdp2):
            fsdp._shard(net, settings, mesh, None)
        else:
            fsdp._wrap(net, settings, mesh, CPU, None)
    return calls


def _megatron(train: TrainConfig, *, is_mixture: bool) -> list[Any]:
    """Arguments of Megatron-core's layers, process groups, gradient buffers and optimizer, or why it cannot
    run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-core's own
        pytest.importorskip("megatron.core")
        from braid.training.backends.megatron import backend, ranks
        from braid.training.backends.megatron.model import layer_options

    sizes = AutoConfig.for_model(
        "qwen3_moe" if is_mixture else "qwen3", num_hidden_layers=16, num_key_value_heads=8
    )
    try:
        check_model(sizes, settings_of(train))
    except ModelError as error:
        return [str(error)]
    scale = backend._loss_scale(train, torch.float16)
    calls: list[Any] = [layer_options(sizes, train, torch.float16), None if scale is None else vars(scale)]

    def take(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        return SimpleNamespace(param_groups=[], ddp_config=args[1] if len(args) > 1 else None)

    parallel = SimpleNamespace(model_parallel_is_initialized=lambda: False, initialize_model_parallel=take)
    for name in (
        "tensor_model_parallel_rank",
        "context_parallel_rank",
        "data_parallel_rank",
        "data_parallel_world_size",
    ):
        setattr(parallel, f"get_{name}", lambda: 0)
    with ExitStack() as patched:
        for owner, name, by in (
            (backend, "DistributedDataParallel", take),
            (backend, "get_megatron_optimizer", take),
            (ranks, "_check_device", lambda: None),
            (ranks, "dist", SimpleNamespace(get_world_size=lambda: 64)),
            (ranks, "groups", parallel),
            (ranks, "model_parallel_cuda_manual_seed", lambda _: None),
            (ranks, "_set_up_with", {}),
        ):
            patched.enter_context(patch.object(owner, name, by))
        ranks.join(settings_of(train))
        wrapped: Any = backend._wrapped(None, 0, train, None)  # pyright: ignore[reportArgumentType]
        stub: Any = SimpleNamespace(_config=train, _dtype=torch.float16, _stages=[wrapped])
        backend.MegatronBackend._build_optimizer(stub)
    return calls


# Changes


def keys_of(config: RunConfig) -> list[str]:
    """All keys that have a value in the config; items of lists as `key[]`."""
    keys: dict[str, None] = {}

    def walk(value: Any, at: str) -> None:
        if isinstance(value, Section):
            for name in type(value).model_fields:
                walk(getattr(value, name), f"{at}.{name}" if at else name)
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            for item in value:
                walk(item, f"{at}[]")
        else:
            keys[at] = None

    walk(config, "")
    return list(keys)


def _placed(config: Any, key: str) -> tuple[str, Any, Any]:
    """(path, annotation, value) of a key; of lists the first item that has it."""
    *parents, name = key.split(".")
    section, path = config, ""
    for parent, child in zip(parents, [*parents, name][1:], strict=True):
        section, path = getattr(section, parent.removesuffix("[]")), f"{path}{parent.removesuffix('[]')}"
        if parent.endswith("[]"):
            below = child.removesuffix("[]")
            index = next(i for i, item in enumerate(section) if below in type(item).model_fields)
            section, path = section[index], f"{path}[{index}]"
        path += "."
    return path + name, type(section).model_fields[name].annotation, getattr(section, name)


def others(annotation: Any, value: Any) -> list[Any]:
    """Other values of the annotated type, as in a file; the schema may refuse some."""
    values: list[Any] = []
    for member in _members(annotation):
        inner = get_args(member)
        match get_origin(member) or member:
            case kind if kind is NoneType:
                values.append(None)
            case origin if origin is Literal:
                values += inner
            case kind if kind is bool:
                values += [True, False]
            case kind if kind is int:
                values += [value + 1, value * 2, max(1, value // 2)] if type(value) is int else [1, 2, 3]
            case kind if kind is float:
                values += [value / 2, value + 0.1, 2 * value + 1] if type(value) is float else [0.5, 1.5]
            case kind if kind is str:
                values.append(f"{value or ''}x")
            case kind if kind is dict:
                values += [{"x": "1"}, {"x": 1}]
            case kind if kind is tuple and inner[-1] is Ellipsis:
                values += [[], *([item] for item in others(inner[0], None)[:1])]
            case kind if kind is tuple:
                values.append([item / 2 if value else number for number, item in enumerate(value or inner)])
            case _:
                values.append({})  # a section with its defaults
    return [item for item in values if item != plain_data(value)]


def _members(annotation: Any) -> list[Any]:
    """The types of a union, without their constraints."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation]
    return [member for inner in get_args(annotation) for member in _members(inner)]


def planned(config: RunConfig, num_prompts: int | None) -> Plan:
    """The plan of the command that a config is for, as if its examples had been counted."""
    plan = derive(config, num_prompts, default_verb(config))
    try:
        return with_examples(plan, config, 10**6, lambda _: "")
    except ConfigError:  # what is wrong is in find_problems
        return plan


def observed(config: RunConfig, reads: Collection[str]) -> str:
    """What a run depends on, as text: its settings, the values of the keys in `reads` unless they are unused,
    and the plan's problems."""
    plan = planned(config, None)
    idle = unused_keys(config, plan)

    def is_read(name: str) -> bool:
        parts = re.sub(r"\[\d+\]", "[]", name).split(".")
        heads = (".".join(parts[: i + 1]) for i in range(len(parts)))
        return any(head in reads or head.removesuffix("[]") in reads for head in heads)

    values = {
        name: value
        for path, value in leaves(plain_data(config))
        if is_read(name := path_text(path)) and not why_unused(idle, name)
    }
    return json.dumps([values, find_problems(config, plan)]) + settings(config, plan)


_NAMES = {f"{key}.kind" for key, default in KINDS.items() if default}
"""Keys that name an engine or a backend."""


class Effects:
    """Effects of the keys of a config."""

    def __init__(self, config: RunConfig, reads: Iterable[str], num_prompts: int = 10**6) -> None:
        """`reads` are the keys that such a run reads, `num_prompts` its number of training prompts."""
        self._config, self._tree = config, json.dumps(plain_data(config))
        self._reads, self._num_prompts = frozenset(reads), num_prompts
        plan = planned(config, num_prompts)
        self._settings, self._problems = settings(config, plan), find_problems(config, plan)

    def of(self, key: str, values: Sequence[Any] = ()) -> str:
        """Effect of other values of a key (`values`, by default some of its type): `read` if the run reads
        the key, `changed` if one changes the settings, `refused` if the plan refuses them, `fixed` if the
        schema does, `unused: WHY` if the plan calls it unused; empty if there is none."""
        effect = "fixed"
        path, annotation, value = _placed(self._config, key)
        if path in _NAMES:
            values = [*FAMILIES[path.removesuffix(".kind")].kinds]
        for other in values or others(annotation, value):
            try:
                tree = json.loads(self._tree)
                if path in _NAMES:  # another kind has other settings
                    place(tree, parse_path(path)[:-1], {"kind": other})
                else:
                    place(tree, parse_path(path), other)
                config = RunConfig.model_validate(tree)
            except ValidationError:
                continue
            plan = planned(config, self._num_prompts)
            if why := why_unused(unused_keys(config, plan), key):
                return f"unused: {why}"
            if find_problems(config, plan) != self._problems:
                effect = "refused"
            elif key in self._reads:
                return "read"
            elif settings(config, plan) != self._settings:
                return "changed"
            elif effect == "fixed":
                effect = ""
        return effect
