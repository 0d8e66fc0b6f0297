"""Runs of soft actor-critic: chunks, evaluation of a checkpoint, and what `braid show` says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from braid.cli.main import main
from braid.config.load import load_config
from braid.trainer import commands

CONFIG = """
run: {name: it, max_rounds: 4, num_threads: 1, device: cpu}
model: {mlp: {hidden_sizes: [8], num_action_chunks: 2}}
env:
  {kind: gymnasium, id: Pendulum-v1, rescale_actions: true, max_episode_steps: 5, num_envs: 2, processes: 0, eval_episodes: 3}
rollout: {prompts_per_round: 2, group_size: 1}
sac: {batch_size: 4, random_decisions: 6, min_transitions: 9, updates_per_decision: 0.5}
eval: {every_rounds: 4, sampling: {greedy: true}}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def test_a_round_takes_the_updates_that_are_due_and_a_checkpoint_evaluates_alike(
    path: Path, tmp_path: Path
) -> None:
    loaded = load_config(path, [f"run.output_dir={tmp_path}/runs"])
    run_dir = commands.train(loaded).run_dir
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if "sac/updates" in line]
    # an episode of 5 env steps is 3 chunks, the last of which has one action; a round has two episodes
    assert [line["sac/transitions"] for line in rounds] == [6, 12, 18, 24]
    assert [line["sac/updates"] for line in rounds] == [0, 1, 3, 3]  # half of what is beyond 9, rounded down
    assert [line["step"] for line in rounds] == [0, 1, 4, 7]
    assert [line["env/steps"] for line in rounds] == [10] * 4

    evaluation = load_config(path, [f"run.output_dir={tmp_path}/evals"])
    eval_dir = commands.evaluate(evaluation, run_dir=run_dir).run_dir
    again = json.loads((eval_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert again["eval/all/mean@1"] == rounds[-1]["eval/all/mean@1"]


def test_show_says_how_many_updates_follow(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "updates 0.5 per decision sac.updates_per_decision, after the first 9 decisions" in out
    assert "recipe" not in out
    assert main(["show", str(path), "sac.updates_per_round=3"]) == 0
    assert "updates 3 per round" in " ".join(capsys.readouterr().out.split())
