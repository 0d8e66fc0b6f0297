"""Only a kind's own file, its family's table, recipes, dialects and messages for old keys know its name; other
code asks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from braid.algorithms.advantages import ADVANTAGES
from braid.algorithms.policy_losses import POLICY_LOSSES
from braid.algorithms.preference_losses import PREFERENCE_LOSSES
from braid.config.shape import kind_of
from braid.envs.kinds import ENVIRONMENTS, Environment, SimulatorEnv, TextEnv
from braid.kinds import Kind
from braid.models.kinds import PolicyKind
from braid.rewards.kinds import REWARDS
from braid.rollout.engines import ENGINES
from braid.sections import Section
from braid.training.backends import BACKENDS

SRC = Path(__file__).parents[2] / "src"
KNOW_NAMES = (
    "braid/algorithms/advantages/",
    "braid/algorithms/policy_losses/",
    "braid/algorithms/preference_losses/",
    "braid/algorithms/recipes.py",
    "braid/config/moved.py",
    "braid_dialects/",
)
OTHERS = {
    "braid/models/kernels.py": "cross_entropy",
    "braid/config/algorithm.py": "grpo",
    "braid/algorithms/__init__.py": "gae",
}
"""An option of Liger, the recipe that is the default, and a formula that can be imported."""


HOMONYMS = ("sft", "sigmoid")
"""Preference losses that are called like a command, and like a function."""


pytestmark = pytest.mark.xdist_group("kinds")  # whose names are collected once a process


@cache
def names() -> dict[str, list[ast.Constant | ast.alias]]:
    """Path of each file -> its texts and what it imports."""
    return {
        str(file.relative_to(SRC)): [
            node
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Constant | ast.alias)
        ]
        for file in SRC.rglob("*.py")
    }


KNOW_ENGINES = (
    "braid/training/backends/",
    "braid/rollout/engines/",
    "braid/config/moved.py",
    "braid_dialects/",
)
OTHER_ENGINES = {
    "braid/config/rollout.py": {"native", "Native"},
    "braid/config/train.py": {"single", "Single"},
    "braid/cli/main.py": {"native"},
    "braid/rewards/kinds/judge.py": {"native", "Native"},
    "braid/trainer/collectors.py": {"Native"},
    "braid/trainer/judges.py": {"Native"},
}
"""The defaults, braid's own config language, and the builders of engines that sample in the run's processes."""


def _names(kinds: Mapping[str, type[Kind]], know: tuple[str, ...]) -> Iterator[tuple[str, int, str]]:
    """(file, line, name) of each kind or its class in files other than those that `know` them."""
    classes = {kind.__name__ for kind in kinds.values()}
    for name, nodes in names().items():
        if name.startswith(know):
            continue
        for node in nodes:
            if isinstance(node, ast.alias):
                if node.name in classes:
                    yield name, node.lineno, node.name
            elif node.value in kinds:
                yield name, node.lineno, str(node.value)


def test_no_other_code_names_a_kind() -> None:
    preferences = {name: kind for name, kind in PREFERENCE_LOSSES.items() if name not in HOMONYMS}
    named = _names({**POLICY_LOSSES, **ADVANTAGES, **preferences}, KNOW_NAMES)
    assert [place for place in named if place[2] != OTHERS.get(place[0])] == []


def test_no_other_code_names_an_engine_or_a_backend() -> None:
    named = _names(ENGINES | BACKENDS, KNOW_ENGINES)
    assert [place for place in named if place[2] not in OTHER_ENGINES.get(place[0], ())] == []


def test_keys_without_effect_are_keys_of_their_kind() -> None:
    """A kind's table of keys without effect names its own keys."""
    for kind in (*ENGINES.values(), *BACKENDS.values()):
        for key, _, keys in kind.unused_while:
            assert {key, *(name.partition(".")[0] for name in keys.split())} <= kind.model_fields.keys()


@pytest.mark.parametrize("kinds", [POLICY_LOSSES, ADVANTAGES, ENVIRONMENTS, REWARDS, ENGINES, BACKENDS])
def test_a_table_has_each_kind_by_its_name(kinds: Mapping[str, type[Section]]) -> None:
    assert [kind_of(kind) for kind in kinds.values()] == list(kinds)


BUILDERS = {
    "env": (set(ENVIRONMENTS.values()), ("braid/config/schema.py", "braid/envs/")),
    "reward": (
        set(REWARDS.values()),
        (
            "braid/config/reward.py",
            "braid/rewards/",
            "braid/models/sequence_classifier.py",
            "braid/trainer/judges.py",
        ),
    ),
    "policy": (set(PolicyKind.__subclasses__()), ("braid/config/model.py", "braid/models/")),
}
"""Family -> its kinds, and the code that knows their classes: what they are built by."""


@pytest.mark.parametrize("family", BUILDERS)
def test_only_what_builds_a_kind_imports_its_class(family: str) -> None:
    kinds, builders = BUILDERS[family]
    classes = {kind.__name__ for kind in kinds}
    importing = []
    for name, nodes in names().items():
        if name.startswith((*builders, "braid_dialects/")):
            continue
        imported = (node for node in nodes if isinstance(node, ast.alias))
        importing += [f"{name}:{node.lineno}: {node.name}" for node in imported if node.name in classes]
    assert importing == []


AT_MOST = {
    r"isinstance\([a-z_.]*env": 2,
    r"(mlp|vla) is (not )?None": 2,
    r"isinstance\([a-z_.]*part, [A-Za-z |]*Reward": 1,
}
"""Tests for a kind's class -> how many there are: where the type of a key is narrowed once for all code."""


@pytest.mark.parametrize("pattern", AT_MOST)
def test_code_asks_a_kind_instead_of_testing_its_class(pattern: str) -> None:
    lines = [
        f"{file.relative_to(SRC)}: {line.strip()}"
        for file in sorted(SRC.rglob("*.py"))
        for line in file.read_text().splitlines()
        if re.search(pattern, line)
    ]
    assert len(lines) <= AT_MOST[pattern], "\n".join(lines)


def test_rules_for_keys_without_effect_stand_beside_the_keys() -> None:
    size = len((SRC / "braid/plan/unused.py").read_text().splitlines())
    assert size <= 150, "unused.py walks over the sections; a rule is a line of its section's `unused`"


def test_an_environment_is_a_simulator_or_one_of_text() -> None:
    for kind in ENVIRONMENTS.values():
        assert issubclass(kind, Environment)
        assert kind.is_simulator == issubclass(kind, SimulatorEnv)
        assert kind.is_simulator != issubclass(kind, TextEnv)
