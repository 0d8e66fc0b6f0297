"""The steps of docs/index.md run as they are written there, with fewer rounds and a smaller model."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest

from braid.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "index.md").read_text("utf-8")
STEPS = re.split(r"^## \d\. ", PAGE, flags=re.MULTILINE)[1:]

DEMO = "braid train examples/quickstart.yaml sft.steps=2 eval.target=null data.eval.0.size=4"
SHORT = (
    "rollout.prompts_per_round=2",
    "rollout.group_size=2",
    "rollout.sampling.max_new_tokens=4",
    "run.max_rounds=1",
    "report.samples_every_rounds=1",
)


def _take(step: str) -> None:
    """Write the files of a step, and run its commands."""
    for name, text in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', step, re.MULTILINE | re.DOTALL):
        Path(name).write_text(text)
    for line in re.findall(r"^\$ (.+)", step, re.MULTILINE):
        if "braid view" in line:  # serves until Ctrl-C; tests/inspection/test_view.py
            continue
        command, *arguments = shlex.split(DEMO if line == "make demo" else line)
        if command == "python":
            runpy.run_path(arguments[0])
        elif arguments[0] == "train":
            assert main([*arguments, *SHORT]) == 0, line
        else:
            assert main(arguments) == 0, line


@pytest.mark.slow
@pytest.mark.parametrize(
    "last", [4, pytest.param(5, marks=[pytest.mark.nightly, pytest.mark.xdist_group("ray")])]
)
def test_each_step_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("runs"))
    monkeypatch.chdir(tmp_path)
    assert len(STEPS) == 5
    for step in STEPS[:last]:
        _take(step)
