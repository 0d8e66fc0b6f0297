"""Light modules import none of the heavy packages, in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SEEDS = Path(__file__).parents[1] / "dialects/seeds"

HEAVY = (
    "torch",
    "transformers",
    "datasets",
    "gymnasium",
    "reasoning_gym",
    "math_verify",
    "wandb",
    "swanlab",
    "ray",
    "peft",
)


@pytest.mark.parametrize(
    "module",
    [
        "braid",
        "braid.types",
        "braid.errors",
        "braid.config.schema",
        "braid.config.load",
        "braid.plan",
        "braid_dialects.load",
        "braid.report.metrics",
    ],
)
def test_a_light_module_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("is_foreign", [False, True])
def test_only_a_foreign_config_loads_the_dialects(*, is_foreign: bool) -> None:
    native = Path(__file__).parents[2] / "examples/quickstart.yaml"
    config = SEEDS / "roll-rlvr-002.yaml" if is_foreign else native
    code = (
        "import sys; from braid.cli.main import main; code = main(['show', sys.argv[1]]); "
        "print('braid_dialects' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, config], capture_output=True, text=True, check=True)
    assert done.stderr.split()[-1] == str(is_foreign)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rlinf-math-003", "rlinf-embodied-003", "roll-rlvr-002", "skyrl-004"])
def test_inspecting_a_foreign_config_imports_nothing_heavy(name: str) -> None:
    code = (
        "import sys; from braid.cli.main import main; path = sys.argv[1]; main(['explain', path]); "
        "code = main(['convert', path]) or "
        "main(['show', path, '--backend', 'single', '--engine', 'native']); "
        f"print(*[m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    environment = {**os.environ, "HOME": "/home/user", "REPO_PATH": "/opt/rlinf"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(SEEDS / f"{name}.yaml")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    loaded = [
        line for line in done.stderr.splitlines() if line.strip() and not line.startswith(("braid:", "  - "))
    ]
    assert loaded == []
    assert done.returncode == 0 or name == "rlinf-embodied-003", done.stderr
