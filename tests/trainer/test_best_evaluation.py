"""The checkpoint of the best evaluation is kept, and a run that finds no better one ends early."""

from __future__ import annotations

import json
from math import nan
from pathlib import Path

import pytest

from braid.checkpoint.store import CheckpointStore
from braid.errors import ConfigError
from braid.report.metrics import Metrics
from braid.trainer import commands
from braid.trainer.evaluation import Evaluation

from .conftest import LoadTiny

DATA = (
    "data.eval=[{kind: file, path: letters.jsonl}]",
    "eval.every_rounds=1",
    "checkpoint.every_rounds=1",
    "checkpoint.keep=1",
)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Round -> the result of its evaluation; nan, where no answer is valid."""
    by_round: dict[int, float] = {}

    def evaluate(self: Evaluation, round_: int) -> Metrics:
        metrics = Metrics()
        metrics.mean("eval/all/mean@1", by_round[round_])
        return metrics

    monkeypatch.setattr(Evaluation, "evaluate", evaluate)
    return by_round


def run(load_tiny: LoadTiny, *overrides: str) -> tuple[str, list[int], dict[str, float | None], Path]:
    """Status, steps with a checkpoint, the best evaluation in the summary, and the run's folder."""
    folder = commands.train(load_tiny(*DATA, *overrides)).run_dir
    summary = json.loads((folder / "summary.json").read_text())
    return summary["status"], CheckpointStore(folder / "checkpoints").steps(), summary["eval"]["best"], folder


def test_the_best_and_the_newest_checkpoint_are_kept_across_a_resume(
    load_tiny: LoadTiny, results: dict[int, float]
) -> None:
    results.update(enumerate([0.2, 0.5, 0.4, nan, 0.5, 0.3, 0.6, 0.1]))
    keep = "checkpoint.keep_best=true"
    status, steps, best, folder = run(load_tiny, keep, "run.max_rounds=3")
    assert (status, steps, best) == ("finished", [1, 3], {"round": 1, "step": 1, "value": 0.5})
    assert run(load_tiny, keep, "run.max_rounds=5", "run.resume=latest")[1:3] == ([1, 5], best)
    _, steps, best, _ = run(load_tiny, keep, "run.max_rounds=7", "run.resume=latest")
    assert (steps, best) == ([6, 7], {"round": 6, "step": 6, "value": 0.6})
    assert (commands.export(folder, step="best") / "config.json").is_file()


def test_a_checkpoint_of_the_best_that_was_not_kept_is_asked_for(
    load_tiny: LoadTiny, results: dict[int, float]
) -> None:
    results.update(enumerate([0.2, 0.5, 0.4]))
    status, steps, _, folder = run(load_tiny, "run.max_rounds=2")
    assert (status, steps) == ("finished", [2])
    with pytest.raises(ConfigError, match=r"is of step 1 \(checkpoint\.keep_best .*available: 2"):
        commands.export(folder, step="best")
    (folder / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--step best: .* has no evaluation .*pass a number of 2"):
        commands.export(folder, step="best")


@pytest.mark.parametrize("pipeline", [(), ("pipeline.max_lag=1",)])
def test_a_run_ends_after_evaluations_without_a_better_one(
    load_tiny: LoadTiny, results: dict[int, float], pipeline: tuple[str, ...]
) -> None:
    results.update(enumerate([0.2, 0.1, 0.5, 0.5, nan, 0.9, 0.9]))
    patience = ("eval.patience=2", "run.max_rounds=6", *pipeline)
    status, steps, best, _ = run(load_tiny, *patience)
    assert (status, steps, best["round"]) == ("stopped", [4], 2)
    assert run(load_tiny, *patience, "run.resume=latest")[:2] == ("stopped", [4])
    assert run(load_tiny, *patience, "eval.patience=3", "run.resume=latest")[:2] == ("finished", [6])


def test_a_loss_that_falls_is_better(load_tiny: LoadTiny) -> None:
    """By held-out loss, in supervised fine-tuning."""
    data = "{kind: file, path: letters.jsonl, response_key: answer}"
    sft = [
        "data.eval=[]",
        f"sft.data=[{data}]",
        f"sft.eval_data=[{data}]",
        "sft.steps=4",
        "eval.target.metric=loss",
    ]
    loaded = load_tiny(*DATA, *sft, "sft.optimizer.lr=0.01", "checkpoint.keep_best=true")
    folder = commands.sft(loaded).run_dir
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["round"]: line["eval/all/loss"] for line in lines}
    best = json.loads((folder / "summary.json").read_text())["eval"]["best"]
    assert losses[best["round"]] == best["value"] == min(losses.values()) < losses[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.patience=2", "data.eval=[]"], r"eval\.patience: .*needs evaluation data; add sources to data\.eval"),
        (["checkpoint.keep_best=true", "data.eval=[]"], r"checkpoint\.keep_best: .*needs evaluation data"),
        (["eval.patience=2", "eval.target.metric=los"], "evaluations do not compute 'los'; use mean@1"),
    ],
)  # fmt: skip
def test_evaluations_that_cannot_be_compared_are_refused(
    load_tiny: LoadTiny, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        commands.train(load_tiny(*DATA, *overrides))
