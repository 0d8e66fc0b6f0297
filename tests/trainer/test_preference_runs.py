"""Runs of `braid prefer`: losses, resumes, adapters, separate references, ranks, and refused configs."""

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
from braid.config.reward import ModelReward
from braid.errors import ConfigError
from braid.models.sequence_classifier import load_classifier
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


REWARD_MODEL = "prefer.loss={kind: bradley_terry, center_coef: 0.01}"


def test_a_reward_model_scores_in_reinforcement_learning_what_it_scored_in_training(folder: Path) -> None:
    run = _run(folder, REWARD_MODEL, "prefer.steps=30", "checkpoint.export_every_rounds=30")
    last = _lines(run)[-1]
    assert last["eval/held_out/accuracy"] == 1.0
    exported = commands.export(run, output=folder / "reward")
    same = run / "exports" / "step_30"
    assert (same / "config.json").read_text() == (exported / "config.json").read_text()
    part = {"kind": "model", "path": str(exported)}
    classifier = load_classifier(ModelReward.model_validate(part), device=torch.device("cpu"), key="part")
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()][:7]
    conversations = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
        for row in rows
        for side in ("chosen", "rejected")
    ]
    scores = np.array(classifier.scores([classifier.encode(messages)[0] for messages in conversations]))
    assert np.mean(scores[::2] - scores[1::2]) == pytest.approx(last["eval/held_out/margin"], abs=1e-4)
    settings = json.loads((exported / "config.json").read_text())
    assert (settings["mean"], settings["std"]) == pytest.approx((scores.mean(), scores.std()), abs=1e-4)

    source = {"kind": "file", "path": "pairs.jsonl", "name": "letters"}
    config = _config() | {
        "data": {"train": [source | {"answer_key": None}]},
        "reward": {"parts": [part | {"normalize": True}]},
        "rollout": {"prompts_per_round": 4, "group_size": 4, "sampling": {"max_new_tokens": 3}},
    }
    del config["prefer"]
    (folder / "rl.yaml").write_text(yaml.safe_dump(config))
    learned = commands.train(load_config(folder / "rl.yaml", ["run.name=rl", "run.max_rounds=1"])).run_dir
    (line,) = [line for line in _lines(learned) if line["round"] == 1]
    assert abs(line["reward/mean"]) < 4, "of scores with mean 0 and deviation 1"
    assert line["rollout/invalid_fraction"] == 0


def test_a_resumed_reward_model_has_the_same_bits(folder: Path) -> None:
    whole = _run(folder, REWARD_MODEL, name="whole")
    _run(folder, REWARD_MODEL, "prefer.steps=4", name="cut")
    cut = _run(folder, REWARD_MODEL, "run.resume=latest", name="cut")
    assert _lines(cut)[-2:] == _lines(whole)[-2:]
    mine, other = _weights(cut, folder), _weights(whole, folder)
    assert all(torch.equal(mine[name], other[name]) for name in other)
    with pytest.raises(ConfigError, match="has a reward model, which writes no answers"):
        commands.evaluate(load_config(cut / "config.yaml", ["data.eval=[]"]), run_dir=cut)


def test_margins_and_targets_of_columns_change_a_reward_model(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    lines = (json.dumps(row | {"by": 1.0 + i % 2, "sure": 0.8}) for i, row in enumerate(rows))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    losses = {
        settings: _lines(_run(folder, REWARD_MODEL, *settings, name=f"run{len(settings)}"))[1]["prefer/loss"]
        for settings in (
            (),
            ("prefer.data.0.margin_key=by",),
            ("prefer.data.0.target_key=sure", "run.seed=0"),
        )
    }
    plain, margin, target = losses.values()
    assert plain == target == pytest.approx(np.log(2)), "all scores are 0 before the first step"
    assert margin == pytest.approx(np.mean(np.log1p(np.exp([1.0, 2.0]))), abs=0.3)
    assert margin > 1.2


NO_REWARD_MODEL: dict[str, tuple[str, str]] = {
    "answers": ("data.eval=[{kind: file, path: pairs.jsonl}]", "samples no answers"),
    "adapters": ("model.lora={rank: 2}", "all of its weights"),
    "imitation": ("sft={data: [{kind: file, path: pairs.jsonl, response_key: chosen}]}", "no supervised warm-up"),
    "cross-entropy": ("prefer.sft_coef=1", "sft_coef is for policies"),
    "backend": ("train.backend=megatron", "megatron does not"),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_REWARD_MODEL)
def test_what_a_reward_model_cannot_have_is_refused(folder: Path, case: str) -> None:
    override, message = NO_REWARD_MODEL[case]
    with pytest.raises(ConfigError, match=message):
        _run(folder, REWARD_MODEL, "reward.parts=[{kind: exact}]", override)
