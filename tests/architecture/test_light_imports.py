"""What must stay light does: in a fresh interpreter, none of the heavy packages comes along."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "datasets", "gymnasium", "reasoning_gym", "math_verify", "wandb", "swanlab")


@pytest.mark.parametrize(
    "module",
    [
        "braid",
        "braid.types",
        "braid.errors",
        "braid.config.schema",
        "braid.config.load",
        "braid.plan",
        "braid.report.metrics",
    ],
)
def test_a_light_module_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
