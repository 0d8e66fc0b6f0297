"""Advantages of a user's own: the example of docs/algorithms.md, a function passed to braid.train, and what
is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tests.test_api import config, even
from torch import Tensor

import braid
from braid.algorithms.advantages.rloo import leave_one_out_advantages
from braid.errors import ConfigError
from braid.functions import load_function
from braid.trainer import commands

from .conftest import LoadTiny

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
CODE = re.findall(r"```python\n(# mine\.py.*?)```", PAGE, re.DOTALL)[0]
OWN = "algorithm.advantage=mine.py:leave_one_out"


def test_the_example_of_the_documentation_is_rloo_and_trains(load_tiny: LoadTiny, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    run = commands.train(load_tiny(OWN, "run.max_rounds=1")).run_dir
    assert (
        json.loads((run / "plan.json").read_text())["recipe"]["advantage"]["kind"] == "mine.py:leave_one_out"
    )
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 3.0]).double(), torch.tensor([5, 5, 5, 2])
    ours = load_function("mine.py:leave_one_out", base_dir=tmp_path, key="x")(rewards, groups)
    theirs = leave_one_out_advantages(rewards, groups)
    torch.testing.assert_close(ours[:3], theirs[:3])  # of a group of one it has no others to compare with


def raw(rewards: Tensor, groups: Tensor) -> Tensor:
    return rewards


def test_a_function_passed_to_train_is_the_advantage(tmp_path: Path) -> None:
    run = braid.train(config(tmp_path), ["run.max_rounds=1"], reward=even, advantage=raw)
    assert run.summary["status"] == "finished"
    assert json.loads((run.path / "plan.json").read_text())["recipe"]["advantage"] == {
        "kind": "braid.given.raw"
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return rewards.mean()",
            r"must return a number for each of the 4 trajectories, not a tensor of shape \[\]",
        ),
        ("return [1.0]", r"must return a number for each of the 4 trajectories, not \[1\.0\]"),
        ("return rewards / 0", "which is not finite"),
        ("return rewards.nothing", r"it raised AttributeError: .*\(mine\.py:2\)"),
    ],
)
def test_a_function_that_is_no_advantage_is_refused_before_the_run(
    load_tiny: LoadTiny, tmp_path: Path, body: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def leave_one_out(rewards, groups):\n    {body}\n")
    with pytest.raises(ConfigError, match=rf"algorithm\.advantage: 'mine\.py:leave_one_out': .*{message}"):
        commands.train(load_tiny(OWN))
    assert not list(tmp_path.rglob("metrics.jsonl"))
