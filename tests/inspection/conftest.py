"""The folder of two short runs that tests of inspection read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.trainer.conftest import BASE

from braid.config.load import load_config
from braid.trainer import commands


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of two rounds, of different seeds. Tests that change a run take a copy."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "letters.jsonl").write_text(
        "".join(f'{{"prompt": "{letter}", "answer": "{letter}"}}\n' for letter in "abcd")
    )
    (folder / "tiny.yaml").write_text(yaml.safe_dump(BASE))
    (folder / "rewards.py").write_text("")
    for seed in (1, 2):
        overrides = [
            f"run.seed={seed}",
            f"run.name=seed{seed}",
            "run.max_rounds=2",
            "report.samples_every_rounds=1",
        ]
        commands.train(load_config(folder / "tiny.yaml", overrides))
    return folder / "runs"
