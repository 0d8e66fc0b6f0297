"""Only a kind's own file, its family's table, recipes, dialects and messages for old keys know its name."""

from __future__ import annotations

import ast
from pathlib import Path

from braid.algorithms.advantages import ADVANTAGES
from braid.algorithms.policy_losses import POLICY_LOSSES

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


def test_no_other_code_names_a_kind() -> None:
    kinds = POLICY_LOSSES | ADVANTAGES
    classes = {kind.__name__ for kind in kinds.values()}
    found = []
    for file in SRC.rglob("*.py"):
        name = str(file.relative_to(SRC))
        if name.startswith(KNOW_NAMES):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            is_name = isinstance(node, ast.Constant) and node.value in kinds
            is_class = isinstance(node, ast.alias) and node.name in classes
            if (is_name and node.value != OTHERS.get(name)) or is_class:
                found.append(f"{name}:{getattr(node, 'lineno', '')}")
    assert not found
