"""Runs of `braid prefer`: losses, resumes, adapters, a reference of its own, ranks, and refused configs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from braid.cli.main import main
from braid.config.load import load_config
from braid.errors import ConfigError
from braid.trainer import commands

from .conftest import TINY_MODEL

pytestmark = pytest.mark.slow

LETTERS = "abcdefgh"


def _config() -> dict[str, Any]:
    source = {"kind": "file", "path": "pairs.jsonl"}
    return {
        "run": {"name": "run", "device": "cpu", "output_dir": "runs", "num_threads": 1},
        "model": {"build": TINY_MODEL},
        "prefer": {
            "data": [source],
            "eval_data": [{**source, "name": "held_out", "limit": 7}],
            "optimizer": {"lr": 3e-3},
            "pairs_per_step": 6,
            "steps": 6,
        },
        "eval": {"every_rounds": 3},
        "train": {"micro_batch_tokens": 24},
        "checkpoint": {"every_rounds": 2, "keep": None},
        "report": {"console": "none", "tensorboard": False},
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": letter, "chosen": letter * 2, "rejected": "".join(rng.choice(list(LETTERS), 3))}
        for letter in LETTERS * 2
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def _run(folder: Path, *overrides: str, name: str = "run", config: dict[str, Any] | None = None) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config or _config()))
    return commands.prefer(load_config(path, [f"run.name={name}", *overrides])).run_dir


def _lines(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "memory/"))}
        for line in lines
    ]


def _weights(run: Path, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(commands.export(run, output=folder / f"{run.name}-export") / "model.safetensors")


def test_a_run_learns_its_pairs_and_reports_them(folder: Path) -> None:
    run = _run(folder, "prefer.steps=20")
    lines = _lines(run)
    assert lines[0]["eval/held_out/accuracy"] == 0.0, "policy and reference are the same, and ties are wrong"
    assert lines[0]["eval/all/loss"] == pytest.approx(np.log(2))
    assert lines[1]["prefer/loss"] == pytest.approx(np.log(2))
    assert lines[-1]["eval/held_out/accuracy"] == 1.0
    last = lines[-1]
    assert last["prefer/margin"] == pytest.approx(
        last["prefer/reward_chosen"] - last["prefer/reward_rejected"]
    )
    assert [line["step"] for line in lines] == list(range(21))
    counts = json.loads((run / "summary.json").read_text())["data"]["prefer"]
    assert counts == {"pairs": {"rows": 16, "dropped_overlong": 0, "truncated": 0, "dropped_equal": 0}}


@pytest.mark.parametrize("epochs", [1, 2.5])
def test_epochs_are_rounded_up_to_steps(folder: Path, epochs: float) -> None:
    run = _run(folder, "prefer.steps=null", f"prefer.epochs={epochs}")
    assert _lines(run)[-1]["step"] == np.ceil(epochs * 16 / 6)


RESUMED: dict[str, tuple[str, ...]] = {
    "reference": (),
    "computed once": ("prefer.precompute_reference=true",),
    "adapters": ("model.lora={rank: 2}",),
    "adapters, computed once": ("model.lora={rank: 2}", "prefer.precompute_reference=true"),
    "no reference": ("prefer.loss=simpo",),
    "sorted": ("prefer.loss=aot",),
    "after imitation": (
        "sft={data: [{kind: file, path: pairs.jsonl, response_key: chosen}], steps: 3, rows_per_step: 4}",
    ),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_has_the_same_bits(folder: Path, case: str) -> None:
    settings = RESUMED[case]
    whole = _run(folder, *settings, name="whole")
    _run(folder, *settings, "prefer.steps=4", name="cut")
    cut = _run(folder, *settings, "run.resume=latest", name="cut")
    assert _lines(cut)[-2:] == _lines(whole)[-2:]
    mine, other = _weights(cut, folder), _weights(whole, folder)
    assert all(torch.equal(mine[name], other[name]) for name in other)


def test_log_probs_of_the_reference_may_be_computed_once(folder: Path) -> None:
    often = _lines(_run(folder, name="often"))
    once = _lines(_run(folder, "prefer.precompute_reference=true", name="once"))
    for one, other in zip(once, often, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_the_reference_may_be_another_model(folder: Path) -> None:
    other = commands.export(_run(folder, "prefer.loss=sft", name="other"), output=folder / "other-export")
    lines = _lines(_run(folder, f"reference.path={other}"))
    assert lines[0]["eval/all/loss"] != pytest.approx(np.log(2), abs=1e-3)


def test_imitation_before_preferences_moves_the_reference_too(folder: Path) -> None:
    lines = _lines(_run(folder, *RESUMED["after imitation"]))
    assert lines[0]["sft/loss"] > 0
    assert lines[0]["eval/all/loss"] == pytest.approx(np.log(2))


def test_answers_are_sampled_and_scored_beside_held_out_pairs(folder: Path) -> None:
    data = "data.eval=[{kind: file, path: pairs.jsonl, name: letters, answer_key: chosen, limit: 4}]"
    rules = ("reward.parts=[{kind: exact}]", "rollout.sampling.max_new_tokens=2")
    lines = _lines(_run(folder, data, *rules))
    assert {"eval/letters/mean@1", "eval/held_out/accuracy"} <= lines[-1].keys()


OWN = """
from braid.algorithms import PreferenceLoss


class Squared(PreferenceLoss):
    goal: float = 1.0
    metrics = {"distance": "Mean distance from the goal."}

    def per_pair(self, pairs):
        return (pairs.chosen - pairs.rejected - self.goal) ** 2

    def diagnostics(self, pairs):
        return {"distance": (pairs.chosen - pairs.rejected - self.goal).abs()}


def logistic(pairs):
    return -(0.1 * (pairs.chosen - pairs.ref_chosen - pairs.rejected + pairs.ref_rejected)).sigmoid().log()


def scalar(pairs):
    return pairs.chosen.mean()
"""


def test_a_loss_of_the_users_own(folder: Path) -> None:
    (folder / "mine.py").write_text(OWN)
    lines = _lines(_run(folder, "prefer.loss={kind: mine.py:Squared, goal: 2.0}", name="class"))
    assert lines[-1]["prefer/distance"] > 0
    mine = _lines(_run(folder, "prefer.loss=mine.py:logistic", name="function"))
    braids = _lines(_run(folder, name="braids"))
    assert [line["eval/all/loss"] for line in mine if "eval/all/loss" in line] == pytest.approx(
        [line["eval/all/loss"] for line in braids if "eval/all/loss" in line], rel=1e-5
    )
    with pytest.raises(ConfigError, match=r"prefer\.loss: 'mine.py:scalar': .* each of the 4 pairs, not"):
        _run(folder, "prefer.loss=mine.py:scalar", name="scalar")


REFUSED: dict[str, tuple[Sequence[str], str]] = {
    "no pairs": (["prefer.data=[]"], r"prefer\.data: no pairs; add sources"),
    "unknown loss": (["prefer.loss=sigmod"], r"prefer\.loss"),
    "key of another loss": (["prefer.loss={kind: hinge, label_smoothing: 0.1}"], "label_smoothing"),
    "target without data": (["prefer.eval_data=[]", "eval.target.min_final=0.5"], "a target needs evaluation data"),
    "metric that is not measured": (["eval.target={min_final: 0.5, metric: pass@1}"], "use accuracy or margin"),
    "simulator": (["env={kind: gymnasium, id: CartPole-v1}", "model={mlp: {}}"], "only language models"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_cannot_run_is_refused_by_its_key(folder: Path, case: str) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        _run(folder, *overrides)


def test_the_command_line_plans_trains_and_says_what_has_no_effect(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump(_config()))
    assert main(["show", "config.yaml"]) == 0
    assert "braid prefer" in capsys.readouterr().out
    missed = ["eval.target={min_final: 1.1, metric: accuracy}", "prefer.epochs=3"]
    assert main(["prefer", "config.yaml", *missed]) == 3
    assert "prefer.epochs: has no effect: prefer.steps sets the length" in capsys.readouterr().err
