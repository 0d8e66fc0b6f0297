"""Runs of `braid sft`: passes over the examples, shares of sources, evaluations, resumes, adapters, ranks, and
refused configs."""

from __future__ import annotations

import json
from collections import Counter
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
from braid.plan import resolve
from braid.trainer import commands, supervised
from braid.trainer.inputs import example_sampler, planned, read_inputs

from .conftest import TINY_MODEL

LETTERS = "abcdefgh"
NUM_ROWS = 14
"""Examples, which steps of 4 do not divide."""


def _config() -> dict[str, Any]:
    source = {"kind": "file", "path": "letters.jsonl", "response_key": "answer"}
    return {
        "run": {"name": "run", "device": "cpu", "output_dir": "runs", "num_threads": 1},
        "model": {"build": TINY_MODEL},
        "sft": {
            "data": [source],
            "eval_data": [{**source, "name": "first", "limit": 5}, {**source, "name": "whole"}],
            "optimizer": {"lr": 3e-3},
            "rows_per_step": 4,
            "epochs": 2,
        },
        "eval": {"every_rounds": 3},
        "checkpoint": {"every_rounds": 1, "keep": None},
        "report": {"console": "none", "tensorboard": False},
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": "".join(rng.choice(list(LETTERS), 3)), "answer": LETTERS[i % 8] * (1 + i % 3)}
        for i in range(NUM_ROWS)
    ]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def _run(folder: Path, *overrides: str, name: str = "run") -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(_config()))
    return commands.sft(load_config(path, [f"run.name={name}", *overrides])).run_dir


def _lines(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "memory/"))}
        for line in lines
    ]


def _weights(run: Path, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(commands.export(run, output=folder / f"{run.name}-export") / "model.safetensors")


def test_each_example_is_trained_once_in_a_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[list[int]]()

    class Recorded(supervised.ExampleRows):
        def item(self, index: int) -> Any:
            drawn[-1].append(index)
            return super().item(index)

    learn = supervised.Supervised.learn

    def learning(self: supervised.Supervised) -> Any:
        drawn.append([])
        return learn(self)

    monkeypatch.setattr(supervised, "ExampleRows", Recorded)
    monkeypatch.setattr(supervised.Supervised, "learn", learning)
    lines = _lines(_run(folder, "sft.epochs=2.5", "sft.eval_data=[]"))
    assert [len(step) for step in drawn] == [4, 4, 4, 2, 4, 4, 4, 2, 4, 4]
    first, second = ([i for step in steps for i in step] for steps in (drawn[:4], drawn[4:8]))
    assert sorted(first) == sorted(second) == list(range(NUM_ROWS))
    assert first != second
    rows = [json.loads(line) for line in (folder / "letters.jsonl").read_text().splitlines()]
    for line, step in zip(lines[1:], drawn, strict=True):
        assert line["sft/tokens"] == sum(len(rows[i]["answer"]) + 1 for i in step)
    trained = np.cumsum([len(step) for step in drawn])
    assert [line["sft/epoch"] for line in lines[1:]] == pytest.approx(trained / NUM_ROWS)


def test_examples_may_keep_their_order_and_steps_may_cross_passes(folder: Path) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump(_config()))
    loaded = load_config(folder / "config.yaml", ["sft.shuffle=false", "sft.steps=5"])
    inputs = read_inputs(loaded, "sft")
    assert inputs is not None
    plan = planned(loaded, resolve(loaded.config, verb="sft"), inputs)
    sampled = supervised.supervised_of(loaded.config, plan, inputs, lambda: pytest.fail("not needed"))
    assert sampled is not None
    assert not sampled.ends_passes
    assert plan.sft_steps == 5
    assert sampled.sampler.take(20) == [*range(14), *range(6)]


def test_sources_have_their_shares_of_every_stretch(folder: Path) -> None:
    config = _config()
    source = config["sft"]["data"][0]
    config["sft"]["data"] = [{**source, "name": f"s{i}", "limit": n} for i, n in enumerate((2, 8, 3))]
    shares = [
        {"sources": ["s0"], "share": 3},
        {"sources": ["s1"], "share": 1},
        {"sources": ["*"], "share": 0},
    ]
    config["sft"]["mix"] = shares
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    loaded = load_config(folder / "config.yaml")
    inputs = read_inputs(loaded, "sft")
    assert inputs is not None
    sampler = example_sampler(loaded.config, inputs.examples)
    drawn = Counter("s0" if i < 2 else "s1" if i < 10 else "s2" for i in sampler.take(40))
    assert drawn == {"s0": 30, "s1": 10}
    plan = planned(loaded, resolve(loaded.config, verb="sft"), inputs)
    assert plan.sft_steps == 2 * 3, "a pass is 10 examples: those of the sources with a share"
    with pytest.raises(ConfigError, match=r"sft\.mix: the source 's2' has no share"):
        resolve(load_config(folder / "config.yaml", [f"sft.mix={json.dumps(shares[:2])}"]).config, verb="sft")


def test_a_cut_run_resumes_within_a_pass_to_the_same_bits(folder: Path) -> None:
    for case, settings in {
        "whole": (),
        "adapters": ("model.lora={rank: 2}",),
        "shares": ("sft.mix=[{sources: [letters], share: 1}]",),
    }.items():
        whole = _run(folder, *settings, name=f"whole-{case}")
        _run(folder, *settings, "sft.steps=2", "run.allow_changes=true", name=f"cut-{case}")
        resumed = ("sft.steps=null", "run.resume=latest")
        cut = _run(folder, *settings, *resumed, name=f"cut-{case}")
        assert _lines(cut)[3:] == _lines(whole)[3:], case
        mine, other = _weights(cut, folder), _weights(whole, folder)
        assert all(torch.equal(mine[name], other[name]) for name in other), case


def test_held_out_loss_is_the_mean_over_tokens_whatever_the_micro_batch(folder: Path) -> None:
    settings = ("sft.epochs=1", "eval.every_rounds=0")
    lines = {
        batch: _lines(_run(folder, *settings, *batch.split(), name=f"run{i}"))
        for i, batch in enumerate(
            ("train.micro_batch_tokens=8192", "train.infer_batch_tokens=8", "train.infer_batch_rows=3")
        )
    }
    whole, *others = lines.values()
    last = whole[-1]
    for other in others:
        for name in ("first", "whole", "all"):
            assert other[0][f"eval/{name}/loss"] == pytest.approx(whole[0][f"eval/{name}/loss"], rel=1e-6)
            assert other[-1][f"eval/{name}/loss"] == pytest.approx(last[f"eval/{name}/loss"], rel=1e-5)
    rows = [json.loads(line) for line in (folder / "letters.jsonl").read_text().splitlines()]
    num_first, num_whole = (sum(len(row["answer"]) + 1 for row in part) for part in (rows[:5], rows))
    mean = (last["eval/first/loss"] * num_first + last["eval/whole/loss"] * num_whole) / (
        num_first + num_whole
    )
    assert last["eval/all/loss"] == pytest.approx(mean)
    assert last["eval/all/perplexity"] == pytest.approx(np.exp(mean))
    assert last["eval/all/loss"] < whole[0]["eval/all/loss"]


def test_the_first_step_has_the_loss_that_was_evaluated_before_it(folder: Path) -> None:
    lines = _lines(_run(folder, f"sft.rows_per_step={NUM_ROWS}", "sft.epochs=1", "train.micro_batch_rows=3"))
    assert lines[1]["sft/loss"] == pytest.approx(lines[0]["eval/whole/loss"], rel=1e-5)


def test_losses_are_those_of_the_model_whatever_the_sampling_temperature(folder: Path) -> None:
    plain, hot = (
        _lines(_run(folder, f"rollout.sampling.temperature={number}", name=f"run{number}"))
        for number in (1, 3)
    )
    assert plain == hot


def test_answers_are_sampled_and_scored_beside_held_out_examples(folder: Path) -> None:
    data = "data.eval=[{kind: file, path: letters.jsonl, name: sampled, limit: 4}]"
    lines = _lines(_run(folder, data, "reward.parts=[{kind: exact}]", "rollout.sampling.max_new_tokens=2"))
    assert {"eval/sampled/mean@1", "eval/whole/loss"} <= lines[-1].keys()


def test_long_examples_are_dropped_or_cut_and_counted(folder: Path) -> None:
    """Prompts of 3 tokens, answers of 1 to 3 with the end token after them."""
    rows = [json.loads(line) for line in (folder / "letters.jsonl").read_text().splitlines()]
    lengths = [len(row["answer"]) + 1 for row in rows]
    settings = ("sft.max_tokens=5", "sft.epochs=1", f"sft.rows_per_step={NUM_ROWS}")
    counts, tokens = {}, {}
    for overlong in ("drop", "truncate_right"):
        run = _run(folder, *settings, f"sft.overlong={overlong}", name=overlong)
        counts[overlong] = json.loads((run / "summary.json").read_text())["data"]["sft"]["letters"]
        tokens[overlong] = _lines(run)[1]["sft/tokens"]
    num_long = sum(length > 2 for length in lengths)
    whole = {"rows": NUM_ROWS, "dropped_overlong": 0, "truncated": 0, "dropped_untrained": 0}
    assert counts == {
        "drop": whole | {"dropped_overlong": num_long},
        "truncate_right": whole | {"truncated": num_long},
    }
    assert tokens == {"drop": 2 * (NUM_ROWS - num_long), "truncate_right": 2 * NUM_ROWS}


REFUSED: dict[str, tuple[Sequence[str], str]] = {
    "no column": (["sft.eval_data.0.response_key=null"], r"sft\.eval_data\[0\]: set exactly one of response_key"),
    "target without data": (["sft.eval_data=[]", "eval.target.max_final=0.5"], "a target needs evaluation data"),
    "metric that is not measured": (["eval.target={max_final: 0.5, metric: accuracy}"], "use loss or perplexity"),
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
    shown = " ".join(capsys.readouterr().out.split())
    assert "braid sft" in shown
    assert "known once the data is read" in shown
    missed = ["eval.target={max_final: 0.001, metric: loss}", "sft.steps=3", "sft.train_on=last_turn"]
    assert main(["sft", "config.yaml", *missed]) == 3
    missed_because = json.loads((folder / "runs/run/summary.json").read_text())["error"]
    assert "above eval.target.max_final=0.001" in missed_because
    said = capsys.readouterr().err
    assert "sft.epochs: has no effect: sft.steps sets the length" in said
    assert "sft.train_on: has no effect: every example is a prompt with one response" in said


def test_a_loss_that_falls_reaches_its_target(folder: Path) -> None:
    gained = "eval.target={min_gain: 0.01, max_final: 100, metric: loss}"
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(_config()))
    assert commands.sft(load_config(path, [gained])).is_target_reached
