"""Only a kind's own file, its family's table, recipes, dialects and messages for old keys know its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from braid.algorithms.advantages import ADVANTAGES
from braid.algorithms.policy_losses import POLICY_LOSSES
from braid.kinds import Kind
from braid.rollout.engines import ENGINES
from braid.training.backends import BACKENDS

SRC = Path(__file__).parents[2] / "src"
KNOW_NAMES = (
    "braid/algorithms/advantages/",
    "braid/algorithms/policy_losses/",
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
    "braid/trainer/collectors.py": {"Native"},
}
"""The defaults, braid's own config language, and the builder of engines that sample with the policy's model."""


def _names(kinds: Mapping[str, type[Kind]], know: tuple[str, ...]) -> Iterator[tuple[str, int, str]]:
    """(file, line, name) of each kind or its class in files other than those that `know` them."""
    classes = {kind.__name__ for kind in kinds.values()}
    for file in sorted(SRC.rglob("*.py")):
        name = str(file.relative_to(SRC))
        if name.startswith(know):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and node.value in kinds:
                yield name, node.lineno, str(node.value)
            elif isinstance(node, ast.alias) and node.name in classes:
                yield name, node.lineno, node.name


def test_no_other_code_names_a_kind() -> None:
    named = _names(POLICY_LOSSES | ADVANTAGES, KNOW_NAMES)
    assert [place for place in named if place[2] != OTHERS.get(place[0])] == []


def test_no_other_code_names_an_engine_or_a_backend() -> None:
    named = _names(ENGINES | BACKENDS, KNOW_ENGINES)
    assert [place for place in named if place[2] not in OTHER_ENGINES.get(place[0], ())] == []


def test_keys_without_effect_are_keys_of_their_kind() -> None:
    """A kind's table of keys without effect names its own keys."""
    for kind in (*ENGINES.values(), *BACKENDS.values()):
        for key, _, keys in kind.unused_while:
            assert {key, *(name.partition(".")[0] for name in keys.split())} <= kind.model_fields.keys()
