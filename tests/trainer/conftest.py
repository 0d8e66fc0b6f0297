"""A tiny run that needs no files: a model of a few thousand parameters and a reward that it can learn in
seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.config.load import Loaded, load_config
from braid.plan import Plan, resolve
from braid.trainer import preflight
from braid.types import Trajectory

TINY_MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "characters": "abcdefgh",
}

BASE: dict[str, Any] = {
    "run": {"name": "tiny", "max_rounds": 3, "device": "cpu", "output_dir": "runs"},
    "model": {"build": TINY_MODEL},
    "data": {
        "train": [{"kind": "file", "name": "letters", "path": "letters.jsonl"}],
        "eval": [{"kind": "file", "name": "letters", "path": "letters.jsonl"}],
    },
    "reward": {"parts": [{"kind": "exact"}]},
    "rollout": {"prompts_per_round": 4, "group_size": 8, "sampling": {"max_new_tokens": 2}},
    "train": {"optimizer": {"lr": 3e-3}},
    "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 0},
}

LoadTiny = Callable[..., Loaded]


@pytest.fixture
def load_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadTiny:
    """`load_tiny("key=value", ...)` loads the tiny config from a separate folder, with `rewards.py` next to
    it."""
    monkeypatch.chdir(tmp_path)
    rows = [f'{{"prompt": "{letter}", "answer": "{letter}"}}\n' for letter in "abcd"]
    (tmp_path / "letters.jsonl").write_text("".join(rows))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(BASE))

    def load(*overrides: str, rewards: str = "") -> Loaded:
        (tmp_path / "rewards.py").write_text(rewards)
        return load_config(tmp_path / "tiny.yaml", overrides)

    return load


def check(loaded: Loaded) -> tuple[Plan, Trajectory | None]:
    """Plan a training run and check it, as `braid show --check` does."""
    return preflight.check(loaded, resolve(loaded.config, origin_of=loaded.origin))
