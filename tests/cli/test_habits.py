"""Habits from other frameworks, and unusual ways to start braid: a helpful message, never a traceback."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from braid.cli.main import main
from braid.config.habits import HABITS
from braid.config.load import load_config
from braid.config.schema import RunConfig
from braid.config.shape import fields_of
from braid.errors import ConfigError

CONFIG = {
    "run": {"name": "tiny", "max_rounds": 1, "device": "cpu"},
    "model": {
        "build": {
            "hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 16,
            "characters": "ab",
        }
    },
    "data": {"train": [{"kind": "file", "path": "rows.jsonl"}]},
    "reward": {"parts": [{"kind": "function", "path": "rewards.py:brevity"}]},
    "rollout": {"prompts_per_round": 1, "group_size": 2, "sampling": {"max_new_tokens": 2}},
    "report": {"console": "none", "tensorboard": False},
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a", "answer": "a"}\n')
    Path("rewards.py").write_text("def brevity(text):\n    return -float(len(text))\n")
    Path("c.yaml").write_text(yaml.safe_dump(CONFIG))
    return "c.yaml"


def complaints(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model.build={}", *overrides])
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.adv_estimator=grpo",
            "algorithm.adv_estimator: unknown key; braid's equivalent: algorithm.recipe (grpo, ppo, rloo, "
            "...)"),
        ("rollout.num_generations=8", "rollout.num_generations: unknown key; braid's equivalent: rollout.group_size"),
        ("algorithm.beta=0.1", "algorithm.beta: unknown key; braid's equivalent: algorithm.kl_coef"),
        ("train.per_device_train_batch_size=8",
            "train.per_device_train_batch_size: unknown key; braid's equivalent: train.micro_batch_rows, "
            "or rollout."),
        ("actor_rollout_ref.actor.lr=1",
            "actor_rollout_ref: unknown key; braid's equivalent: the sections model, rollout, train and "
            "reference"),
        ("model.dtype=bfloat16", "model.dtype: 'bfloat16' is not one of fp32, bf16, fp16; write bf16"),
        ("model.dtype=torch.float16", "model.dtype: 'torch.float16' is not one of fp32, bf16, fp16; write fp16"),
    ],
)  # fmt: skip
def test_a_key_of_another_framework_is_answered_with_its_equivalent(override: str, message: str) -> None:
    (complaint,) = complaints(override)
    assert complaint.startswith(message)


def test_every_answer_names_keys_that_exist() -> None:
    known = {path for path, _ in fields_of(RunConfig)}
    leaf_names = {path.rpartition(".")[2] for path in known}
    for habit, answer in HABITS.items():
        words = (
            answer.replace("[0]", "[]")
            .replace("=", " ")
            .replace(",", " ")
            .replace(":", " ")
            .replace("(", " ")
            .replace(")", " ")
            .split()
        )
        named = [word for word in words if word.strip(".").count(".")]
        assert all(word in known for word in named), answer
        assert named or any(word in leaf_names for word in words), answer
        assert habit not in RunConfig.model_fields


def test_the_keys_of_a_section_are_listed_once() -> None:
    problems = complaints("algorithm.qqq=1", "algorithm.zzz=2", "run.xxxx=3")
    listed = [text for text in problems if "the keys of this section are" in text]
    assert sorted(text.partition(":")[0].partition(".")[0] for text in listed) == ["algorithm", "run"]
    assert sum(text.endswith(": unknown key [override]") for text in problems) == 1


def test_a_number_is_an_environment_variable_too() -> None:
    assert load_config(None, ["model.build={}", "cluster.env.FOO=1"]).config.cluster.variables == {"FOO": "1"}


def test_a_reward_function_is_logged_under_its_own_name(config: str) -> None:
    assert main(["train", config]) == 0
    lines = [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert "reward/part/brevity" in lines[-1]


def test_braid_runs_inside_a_running_event_loop(config: str) -> None:
    async def notebook() -> int:
        return main(["train", config])

    assert asyncio.run(notebook()) == 0
    assert json.loads(Path("runs/tiny/summary.json").read_text())["status"] == "finished"


def test_python_m_braid_is_braid() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "braid", "--version"], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.split()[0]) == (0, "braid")
