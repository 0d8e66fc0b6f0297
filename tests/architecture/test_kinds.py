"""Only a kind's own file, its family's table, recipes, dialects and messages for old keys know its name."""

from __future__ import annotations

import ast
from pathlib import Path

from braid.algorithms.policy_losses import POLICY_LOSSES

SRC = Path(__file__).parents[2] / "src"
KNOW_NAMES = (
    "braid/algorithms/recipes.py",
    "braid/config/moved.py",
    "braid/models/kernels.py",  # an option of Liger, cross_entropy
    "braid_dialects/",
)


def test_no_other_code_names_a_policy_loss() -> None:
    classes = {loss.__name__ for loss in POLICY_LOSSES.values()}
    found = []
    for file in SRC.rglob("*.py"):
        name = str(file.relative_to(SRC))
        if name.startswith((*KNOW_NAMES, "braid/algorithms/policy_losses/")):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            is_name = isinstance(node, ast.Constant) and node.value in POLICY_LOSSES
            is_class = isinstance(node, ast.alias) and node.name in classes
            if is_name or is_class:
                found.append(f"{name}:{getattr(node, 'lineno', '')}")
    assert not found
