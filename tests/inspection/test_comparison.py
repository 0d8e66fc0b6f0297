"""How two runs differ: keys, metrics, and answers to the same prompts."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braid.inspection.comparison import MISSING, compare_by_prompt, config_differences, metrics_at
from braid.inspection.folder import Run


def record(uid: str, reward: float | None, fields: dict[str, Any] | None = None) -> dict[str, Any]:
    prompt = {"fields": {"prompt": uid} if fields is None else fields, "messages": []}
    status = "invalid" if reward is None else "finished"
    return {"uid": uid, "status": status, "reward": reward, "prompt": prompt}


def samples(file: Path, *records: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    return file


def test_prompts_are_paired_by_uid_and_their_answers_averaged(tmp_path: Path) -> None:
    one = samples(
        tmp_path / "1",
        *(record("a", r) for r in (0.0, 1.0)),
        record("b", 1.0),
        record("c", 0.0),
        record("gone", 1),
    )
    two = samples(
        tmp_path / "2",
        record("c", 1.0),
        record("b", 1.0),
        *(record("a", r) for r in (0.0, 0.0)),
        record("new", 1),
    )
    wins = compare_by_prompt(one, two)
    assert wins is not None
    assert (wins.num_prompts, wins.wins, wins.ties, wins.losses) == (3, 1, 1, 1)
    assert (wins.first, wins.second) == pytest.approx((0.5, 2 / 3))
    assert wins.difference == pytest.approx(1 / 6)
    assert dict(wins.most) == {"a": -0.5, "c": 1.0}


def test_invalid_answers_and_prompts_of_other_data_are_left_out(tmp_path: Path) -> None:
    one = samples(tmp_path / "1", record("a", 0.0), record("a", None), record("b", None), record("c", 1.0))
    two = samples(tmp_path / "2", record("a", 1.0), record("b", 1.0), record("c", 1.0, {"prompt": "another"}))
    wins = compare_by_prompt(one, two)
    assert wins is not None
    assert (wins.num_prompts, wins.num_unlike, wins.wins) == (1, 1, 1)
    assert compare_by_prompt(one, samples(tmp_path / "3", record("z", 1.0))) is None


def test_the_interval_is_that_of_all_resamples_of_few_prompts(tmp_path: Path) -> None:
    """Of four prompts there are 256 resamples, which are listed here."""
    changes = [-0.5, 0.25, 1.0, 0.75]
    one = samples(tmp_path / "1", *(record(f"p{i}", 0.0) for i in range(4)))
    two = samples(tmp_path / "2", *(record(f"p{i}", change) for i, change in enumerate(changes)))
    wins = compare_by_prompt(one, two)
    assert wins is not None
    means = [np.mean(draw) for draw in product(changes, repeat=4)]
    assert (wins.low, wins.high) == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.07)


@pytest.mark.parametrize(("num_better", "is_certain"), [(40, True), (5, False)])
def test_few_changed_prompts_are_no_certain_difference(
    tmp_path: Path, num_better: int, is_certain: bool
) -> None:
    one = samples(tmp_path / "1", *(record(f"p{i}", 0.0) for i in range(200)))
    two = samples(tmp_path / "2", *(record(f"p{i}", float(i < num_better)) for i in range(200)))
    wins = compare_by_prompt(one, two)
    assert wins is not None
    assert wins.low > 0
    assert wins.is_certain == is_certain


def test_equal_runs_are_called_different_about_one_time_in_twenty(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    certain = 0
    for _ in range(100):
        one, two = (
            samples(tmp_path / name, *(record(f"p{i}", float(draws.random() < 0.5)) for i in range(100)))
            for name in "12"
        )
        wins = compare_by_prompt(one, two)
        assert wins is not None
        certain += wins.is_certain
    assert certain <= 12


def run(folder: Path, config: str, lines: list[dict[str, Any]]) -> Run:
    folder.mkdir()
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(folder)


def test_keys_differ_by_value_and_not_by_name_and_folder_of_the_run(tmp_path: Path) -> None:
    one = run(
        tmp_path / "one",
        "run: {name: one, output_dir: /runs, seed: 1}\ntrain: {lr: 1e-6}\nreport: {dir: /runs/one/tb}\n"
        "rollout: {engine: {kind: native, max_running: 8}}",
        [],
    )
    two = run(
        tmp_path / "two",
        "run: {name: two, output_dir: /else, seed: 1}\ntrain: {lr: 2e-6}\nreport: {dir: /else/two/tb}\n"
        "rollout: {engine: {kind: vllm}}",
        [],
    )
    assert config_differences([one, two]) == {
        "train.lr": (1e-6, 2e-6),
        "rollout.engine.kind": ("native", "vllm"),
        "rollout.engine.max_running": (8, MISSING),
    }


def test_metrics_are_compared_up_to_the_last_round_that_all_have_reached(tmp_path: Path) -> None:
    lines = [{"round": i, "reward/mean": float(i), "eval/all/mean@1": i / 10} for i in range(1, 11)]
    short, long = run(tmp_path / "a", "", lines[:6]), run(tmp_path / "b", "", lines)
    last, rows = metrics_at([short, long])
    assert last == 6
    assert rows == {
        "reward/mean": (4.0, 4.0), "eval/all/mean@1": (0.6, 0.6)
    }  # fmt: skip
