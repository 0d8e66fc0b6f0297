"""Small tasks with a known optimum, learned through the whole loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from braid.config.load import load_config
from braid.trainer import commands

EXAMPLES = Path(__file__).parents[2] / "examples"

LETTERS = {
    "run": {"name": "letters", "max_rounds": 40, "device": "cpu", "output_dir": "runs"},
    "model": {
        "build": {
            "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1,
            "head_dim": 16, "characters": "abcd",
        }
    },
    "data": {
        "train": [{"kind": "file", "name": "letters", "path": "letters.jsonl"}],
        "eval": [{"kind": "file", "name": "letters", "path": "letters.jsonl"}],
    },
    "reward": {"parts": [{"kind": "pattern", "pattern": "^b"}]},
    "rollout": {"prompts_per_round": 4, "group_size": 16, "sampling": {"max_new_tokens": 2}},
    "train": {"optimizer": {"lr": 3e-3}},
    "eval": {"samples_per_prompt": 16},
    "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 0},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["grpo", pytest.param("ppo", marks=pytest.mark.nightly)])
def test_a_language_model_learns_to_write_one_letter(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("letters.jsonl").write_text("".join(f'{{"prompt": "{c}", "answer": ""}}\n' for c in "abcd"))
    Path("letters.yaml").write_text(yaml.safe_dump(LETTERS))
    outcome = commands.train(load_config("letters.yaml", [f"algorithm.recipe={recipe}"]))
    evals = json.loads((outcome.run_dir / "summary.json").read_text())["eval"]
    # The optimum is 1; chance is one in about sixteen tokens.
    assert evals["first"]["all"]["mean@16"] < 0.4
    assert evals["last"]["all"]["mean@16"] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("example", [pytest.param("agent", marks=pytest.mark.nightly), "openai_agent"])
def test_an_example_of_an_agent_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one round: that it learns takes minutes, and is held by benchmarks/learned.py."""
    monkeypatch.chdir(tmp_path)
    small = ["run.max_rounds=1", "sft.steps=20", "data.eval[0].size=16", "rollout.prompts_per_round=4"]
    overrides = ["run.output_dir=runs", "report.console=none", "eval.target={}", *small]
    loaded = load_config(EXAMPLES / f"{example}.yaml", overrides)
    outcome = commands.train(loaded)
    lines = [json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines()]
    (trained,) = [line for line in lines if "reward/mean" in line]
    assert trained["rollout/trajectories"] == 4 * loaded.config.rollout.group_size
    assert trained.get("status/invalid", 0) == 0
