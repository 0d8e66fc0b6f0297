"""No key that is said to be applied is without effect.

Two halves. A change of an applied key changes the native config, in the parts that the run's backend and engine read (or is
refused by name). And every native key that any rule sets is read by code, or belongs to a part that says it is missing.
"""

from __future__ import annotations

import ast
import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import braid
from braid.config.load import load_config, plain_data, validate
from braid.config.schema import RunConfig
from braid.config.shape import fields_of
from braid.config.source import Written, parse_path, place
from braid.dialects.load import DIALECTS, read_foreign
from braid.dialects.table import Apply, Dialect, Rule
from braid.dialects.translate import Translation, translate
from braid.dialects.values import Takes
from braid.errors import ConfigError
from braid.plan import derive, idle_keys, resolve

from .conftest import ALL_SEEDS, IN_ONE_PROCESS, TEXT_SEEDS, Reader, Seed

SRC = Path(braid.__file__).parent


@dataclass(frozen=True, slots=True)
class Variant:
    """A page's file under a choice of the command line."""

    seed: Seed
    backend: str | None = None
    engine: str | None = None

    def __str__(self) -> str:
        return "-".join([self.seed.name, *(name for name in (self.backend, self.engine) if name)])


_WHOLE = ("rlinf-math-003", "skyrl-004", "roll-rlvr-002-prose")
"""The fullest file of each language."""
_CHOICES = (("fsdp", "vllm"), ("fsdp2", "native"), ("megatron", "vllm"), ("deepspeed", "native"))
VARIANTS = (
    *(Variant(seed) for seed in ALL_SEEDS),
    *(Variant(seed, **IN_ONE_PROCESS) for seed in TEXT_SEEDS if seed.name in _WHOLE),
    *(
        pytest.param(variant, marks=pytest.mark.slow)
        for seed in TEXT_SEEDS
        for variant in (
            *(Variant(seed, *chosen) for chosen in _CHOICES if seed.name in _WHOLE),
            *((Variant(seed, **IN_ONE_PROCESS),) if seed.name not in _WHOLE else ()),
        )
    ),
)


class Changes:
    """A variant, and what becomes of it when one key has another value."""

    def __init__(self, reader: Reader, variant: Variant) -> None:
        self._variant = variant
        self._path = reader.path(variant.seed)
        self.dialect: Dialect = DIALECTS[variant.seed.dialect]
        self._foreign = read_foreign(self._path, (), self.dialect)
        self.baseline = self.outcome(self._foreign)
        read = reader.read(variant.seed, backend=variant.backend, engine=variant.engine)
        self.applied = [(row.path, row.value) for row in read.ledger if row.disposition == "applied"]

    def translated(self, foreign: Written) -> Translation:
        return translate(foreign, self.dialect, backend=self._variant.backend, engine=self._variant.engine)

    def with_value(self, path: str, value: Any) -> object:
        """The outcome with another value at a key."""
        foreign = copy.deepcopy(self._foreign)
        assert place(foreign.tree, parse_path(path), value) is None
        return self.outcome(foreign)

    def outcome(self, foreign: Written) -> object:
        """What a run would read: the config without the keys that nothing reads in it, or the problems by their keys."""
        translation = self.translated(foreign)
        if translation.written.problems:
            return sorted((problem.key, problem.message) for problem in translation.written.problems)
        try:
            config = validate(translation.written, self._path).config
        except ConfigError as error:
            return sorted((problem.key, problem.message) for problem in error.problems)
        return json.dumps(read_part(config), sort_keys=True)

    def rule(self, path: str) -> Rule:
        found = self.dialect.rule_of(self.dialect.aliases.get(path, path))
        assert found is not None
        return found


def read_part(config: RunConfig) -> dict[str, Any]:
    """The config without what nothing reads in its run."""
    data = plain_data(config)
    for path in idle_keys(config, derive(config, None, "train")):
        *parents, name = path.split(".")
        section = data
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(name, None)
    return data


EQUAL: dict[str, dict[str, tuple[tuple[Any, ...], ...]]] = {
    "rlinf": {
        "runner.task_type": (("math", "reasoning"),),
        "data.type": (("math", "reasoning"),),
        "data.val_rollout_batch_size": ((None, 8),),  # null: data.rollout_batch_size, which is 8 there
        "algorithm.adv_type": (("grpo", "grpo_dynamic"),),  # apart by algorithm.advantage_mode
        "algorithm.loss_type": (("ppo", "grpo", "actor"),),
        "algorithm.sampling_params.top_k": ((1_000_000, -1),),
        "actor.model.sequence_parallel": ((True, False),),  # without tensor parallelism
        "actor.model.trust_remote_code": ((True, False),),  # one of the two is enough
        "actor.tokenizer.trust_remote_code": ((True, False),),
    },
    "roll": {
        "actor_train.data_args.template": (("native", "qwen2_5", "qwen3"),),
        "actor_train.model_args.ulysses_size": ((None, 1),),
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size": ((None, 1),),
        "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size": ((None, 1),),
        "actor_train.strategy_args.strategy_config.context_parallel_size": ((None, 1),),
        "actor_train.strategy_args.strategy_config.expert_model_parallel_size": ((None, 1),),
        "actor_train.strategy_args.strategy_config.moe_grouped_gemm": ((None, False),),
        "actor_train.strategy_args.strategy_config.param_dtype": (("bf16", "bfloat16"),),
        "actor_train.strategy_args.strategy_config.reduce_dtype": (("fp32", "float32"),),
        "actor_train.strategy_args.strategy_config.reshard_after_forward": ((None, True),),
    },
    "skyrl": {
        "generator.max_input_length": ((None, 512),),  # null: trainer.max_prompt_length, which is 512 there
        "generator.eval_sampling_params.max_generate_length": ((None, 1024),),  # null: that of training
    },
}
"""Values of a key that mean the same in these files."""


def others(dialect: str, path: str, takes: Takes, value: Any) -> Iterator[Any]:
    """Accepted values that mean something else than `value`."""
    equal = [value, *(v for same in EQUAL[dialect].get(path, ()) if _is_in(value, same) for v in same)]
    for sample in takes.samples:
        if not _is_in(sample, equal):
            yield sample


def _is_in(value: Any, values: Iterable[Any]) -> bool:
    return any(type(value) is type(other) and value == other for other in values)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_change_of_an_applied_key_changes_what_the_run_reads(reader: Reader, variant: Variant) -> None:
    changes = Changes(reader, variant)
    assert isinstance(changes.baseline, str), changes.baseline
    dead = []
    for path, value in changes.applied:
        rule = changes.rule(path)
        assert isinstance(rule, Apply)
        for sample in others(variant.seed.dialect, path, rule.takes, value):
            is_dead = changes.with_value(path, sample) == changes.baseline
            dead += [f"{path}: {value!r} -> {sample!r}"] if is_dead else []
    assert dead == []


MISSING: dict[str, tuple[str, ...]] = {
    "env.kind": ("env",),
    "model.vla": ("model.vla", "algorithm.reward_level"),
}
"""The key whose choice is refused, by the name of the part that is missing -> sections and keys that only that part reads."""

CHOICES: dict[str, tuple[str, ...]] = {
    "train.backend=fsdp": ("train.fsdp",),
    "train.backend=deepspeed": ("train.deepspeed",),
    "train.backend=megatron": ("train.megatron", "inference"),
    "rollout.engine=vllm": ("rollout.vllm", "rollout.publish", "cluster"),
    "rollout.engine=sglang": ("rollout.sglang",),
}
"""What chooses a part of runs on workers -> the sections of its options."""

OF_THE_MODEL = {
    "train.megatron.transformer.layer_spec": "mine",
    "train.megatron.transformer.normalization": "layernorm",
    "train.megatron.transformer.position_embedding": "none",
    "train.megatron.transformer.add_bias_linear": "true",
}
"""Keys that have to say what the model is -> a value that is refused."""


def native_paths() -> set[str]:
    """Every native key that a rule names."""
    rules = [rule for dialect in DIALECTS.values() for rule in dialect.rules.values()]
    return {rule.native for rule in rules if isinstance(rule, Apply) and rule.native}


@cache
def names_read() -> frozenset[str]:
    """Names of attributes that code outside of the config and the dialects reads, and of recipe parts, which code reads from the
    recipe."""
    found: set[str] = set()
    for path in SRC.rglob("*.py"):
        part = path.relative_to(SRC).parts
        if part[0] in ("config", "dialects") or part in (("plan", "checks.py"), ("plan", "available.py")):
            continue
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        found |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(found)


def is_read(path: str) -> bool:
    return path.rpartition(".")[2].split("[")[0] in names_read()


def idle_with(choice: str) -> dict[str, str]:
    """What nothing reads in a run on several workers that has chosen so."""
    placement = "cluster.placement={policy: 0-1, inference: 2-3, rollout: 4-5}"
    config = load_config(
        None, ["model.build={}", "algorithm.old_logprobs=recompute", placement, choice]
    ).config
    return idle_keys(config, derive(config, None, "train"))


def test_every_native_key_that_a_rule_sets_is_read_or_idle_or_belongs_to_a_part_that_is_refused() -> None:
    missing = tuple(prefix for prefixes in MISSING.values() for prefix in prefixes)
    options = tuple(prefix for prefixes in CHOICES.values() for prefix in prefixes)
    unread = [
        path
        for path in sorted(native_paths())
        if not is_read(path)
        and not any(f"{path}.".startswith(f"{prefix}.") for prefix in missing)
        and not any(f"{prefix}." in f"{path}." for prefix in options)  # the next test's, a critic's too
    ]
    assert unread == []


@pytest.mark.parametrize("choice", CHOICES)
def test_every_option_of_a_part_that_is_chosen_is_read_or_idle_with_a_reason_or_refused(choice: str) -> None:
    known = [path for path, _ in fields_of(RunConfig)]
    idle = idle_with(choice)
    for section in CHOICES[choice]:
        options = [path for path in known if path.startswith(f"{section}.")]
        leaves = [path for path in options if not any(of.startswith(f"{path}.") for of in options)]
        assert leaves
        unread = {path for path in leaves if not is_read(path) and path not in idle}
        assert unread <= OF_THE_MODEL.keys()


@pytest.mark.parametrize("key", OF_THE_MODEL)
def test_a_layer_that_is_not_the_model_s_is_refused_by_its_key(key: str) -> None:
    overrides = ["model.build={}", "train.backend=megatron", f"{key}={OF_THE_MODEL[key]}"]
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(None, [*overrides, "run.max_rounds=1"]).config)
    assert key in [problem.key for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("key", "seed", "chosen"),
    [
        ("env.kind", "rlinf-embodied-003", {}),
        ("model.vla", "rlinf-embodied-003", {}),
    ],
)
def test_a_run_that_asks_for_a_missing_part_is_refused_by_name(
    reader: Reader, key: str, seed: str, chosen: dict[str, str]
) -> None:
    found = next(known for known in ALL_SEEDS if known.name == seed)
    with pytest.raises(ConfigError) as caught:
        resolve(reader.read(found, **chosen).loaded.config)
    assert key in [problem.key for problem in caught.value.problems]


def enumerated() -> list[tuple[str, str, Rule]]:
    """(dialect, key, rule) of every key with a list of values."""
    return [
        (name, path, rule)
        for name, dialect in DIALECTS.items()
        for path, rule in dialect.rules.items()
        if rule.takes.choices
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_each_value_of_an_enumerated_key_is_taken_and_another_is_refused_with_the_list(name: str) -> None:
    for dialect, path, rule in enumerated():
        if dialect != name:
            continue
        key = path.replace("*", "mine")
        for value in rule.takes.choices:
            assert not _complaints(dialect, key, value, "is not one of"), f"{path}={value!r}"
        for choice in rule.takes.choices:
            assert _WORDS.get(str(choice), str(choice)) in rule.takes.words, f"{path}: {choice!r}"
        refused = _complaints(dialect, key, "no-such-value", "is not")
        assert any(rule.takes.words in text for text in refused), path


_WORDS = {"True": "true", "False": "false", "None": "null"}


def _complaints(dialect: str, key: str, value: Any, text: str) -> list[str]:
    """What is said of a key in a file that has nothing else."""
    tree: dict[str, Any] = {}
    place(tree, parse_path(key), value)
    problems = translate(Written(tree), DIALECTS[dialect]).written.problems  # pyright: ignore[reportArgumentType]
    return [problem.message for problem in problems if problem.key == key and text in problem.message]
