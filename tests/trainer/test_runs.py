"""Whole runs of a tiny model: the files they write, how they resume, and how they fail.

Killing processes is tests/resume's; the command line's exit codes are tests/cli's.
"""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from braid.algorithms.policy_losses.ppo_clip import PpoClip
from braid.checkpoint.store import CheckpointStore
from braid.errors import CheckpointError, ConfigError, RolloutError, TrainingError
from braid.report.names import describe
from braid.report.samples import read_samples
from braid.trainer import commands

from .conftest import LoadTiny

ROOT = Path(__file__).parents[2]


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    *_, state = CheckpointStore(run / "checkpoints").locate()
    return state["policy"]["weights"]


def test_a_run_leaves_every_file_that_it_promises(load_tiny: LoadTiny) -> None:
    outcome = commands.train(load_tiny("report.samples_every_rounds=1", "report.tensorboard=true"))
    run = outcome.run_dir
    names = {
        "config.yaml",
        "plan.json",
        "metrics.jsonl",
        "summary.json",
        "samples",
        "checkpoints",
        "tensorboard",
    }
    assert names <= {path.name for path in run.iterdir()}
    assert [line["round"] for line in lines(run)] == [0, 1, 2, 3]
    assert [line["step"] for line in lines(run)] == [0, 1, 2, 3]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 3
    assert summary["wall_s"] > 0
    assert {"letters", "all"} == set(summary["eval"]["first"]) == set(summary["eval"]["last"])
    samples = list(read_samples(run / "samples" / "round_000002.jsonl"))
    assert len(samples) == 32
    assert all(len(s.training["advantages"]) == s.trajectory.num_output_tokens for s in samples)


def test_a_stopped_and_resumed_run_equals_the_unbroken_one(load_tiny: LoadTiny) -> None:
    common = (
        "algorithm.recipe=ppo",
        "algorithm.kl_coef=0.01",
        "train.steps_per_pass=2",
        "checkpoint.every_rounds=1",
    )
    whole = commands.train(load_tiny("run.name=whole", *common)).run_dir
    commands.train(load_tiny("run.name=parts", "run.max_rounds=2", *common))
    parts = commands.train(load_tiny("run.name=parts", "run.resume=latest", *common)).run_dir
    ours, theirs = weights(parts), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    kept = [
        [{k: v for k, v in line.items() if describe(k).is_reproducible} for line in lines(run)]
        for run in (parts, whole)
    ]
    # The shorter first part evaluated at what was then its end.
    stripped = [
        [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in run] for run in kept
    ]
    assert stripped[0] == stripped[1]


def test_resuming_without_a_checkpoint_starts_from_the_beginning(load_tiny: LoadTiny) -> None:
    run = commands.train(load_tiny("run.resume=latest")).run_dir
    assert [line["round"] for line in lines(run)] == [0, 1, 2, 3]


def test_resuming_from_a_folder_that_is_not_a_checkpoint_is_refused(
    load_tiny: LoadTiny, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere"):
        commands.train(load_tiny(f"run.resume={tmp_path / 'nowhere'}"))


def test_if_the_newest_checkpoint_is_damaged_the_previous_one_is_used(
    load_tiny: LoadTiny, caplog: pytest.LogCaptureFixture
) -> None:
    run = commands.train(load_tiny("checkpoint.every_rounds=1")).run_dir
    newest = run / "checkpoints" / "step_3" / "tensors.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[-1] ^= 1
    newest.write_bytes(damaged)
    commands.train(load_tiny("checkpoint.every_rounds=1", "run.resume=latest"))
    assert any("using the previous one" in r.getMessage() for r in caplog.records)
    assert [line["round"] for line in lines(run)] == [0, 1, 2, 3]


def test_a_folder_that_holds_a_run_is_not_overwritten(load_tiny: LoadTiny) -> None:
    commands.train(load_tiny())
    with pytest.raises(ConfigError, match=r"already contains a run.*run\.resume=latest"):
        commands.train(load_tiny())
    assert commands.train(load_tiny("run.if_exists=new")).run_dir.name == "tiny-2"


def test_a_failing_reward_invalidates_its_trajectories_and_the_run_continues(
    load_tiny: LoadTiny, caplog: pytest.LogCaptureFixture
) -> None:
    rewards = "def moody(prompt, text):\n    if prompt == 'a':\n        raise ValueError('not today')\n    return float(len(text))\n"
    part = "reward.parts=[{kind: function, path: 'rewards.py:moody'}]"
    run = commands.train(load_tiny(part, "reward.retries=0", rewards=rewards)).run_dir
    for line in lines(run)[1:]:
        assert line["status/invalid"] == 8
        assert line["status/finished"] + line["status/truncated"] == 24
        assert line["rollout/invalid_fraction"] == 0.25
    assert lines(run)[-1]["eval/all/invalid_fraction"] == 0.25
    # once, although every evaluation and every round has them
    (warned,) = [r.getMessage() for r in caplog.records if "invalid" in r.getMessage()]
    assert warned == (
        "1 of 4 trajectories of the evaluation on 'letters' after round 0 are invalid, and in no mean; "
        "most common: 1 x reward moody: ValueError: not today (rewards.py:3)"
    )


def test_a_reason_is_warned_of_again_once_its_share_has_doubled(
    load_tiny: LoadTiny, caplog: pytest.LogCaptureFixture
) -> None:
    rewards = """
calls = []
def moody(text, trajectory):
    calls.append(text)
    if len(calls) % (16 if len(calls) <= 33 else 4) == 2:
        raise ValueError(f"call {len(calls)}")
    return 0.0
"""
    part = "reward.parts=[{kind: function, path: 'rewards.py:moody'}]"
    settings = ("reward.retries=0", "reward.concurrency=1", "eval.before=false", "eval.at_end=false")
    commands.train(load_tiny(part, *settings, rewards=rewards))
    warned = [r.getMessage().partition(" of round")[0] for r in caplog.records if "invalid" in r.getMessage()]
    assert warned == ["2 of 32 trajectories", "8 of 32 trajectories"]


@pytest.mark.parametrize("allowed", [0.2, 1.0])
def test_an_evaluation_with_too_many_invalid_answers_fails_and_is_never_nan(
    load_tiny: LoadTiny, capsys: pytest.CaptureFixture[str], allowed: float
) -> None:
    """With a limit of 1 a source may be invalid as a whole: its mean is unknown."""
    rewards = "def down(trajectory):\n    raise ConnectionError('judge')\n"
    part = "reward.parts=[{kind: function, path: 'rewards.py:down'}]"
    loaded = load_tiny(
        part, "reward.retries=0", f"rollout.max_invalid_fraction={allowed}", "eval.target.min_final=0",
        "report.console=plain", rewards=rewards,
    )  # fmt: skip
    if allowed < 1:
        with pytest.raises(
            RolloutError, match=r"4 of 4 .*evaluation on 'letters'.*=0.2; most common: 4 x reward down: "
        ):
            commands.evaluate(loaded)
        status = "failed"
    else:
        assert not commands.evaluate(loaded).is_target_reached
        status = "not_learned"
    summary = json.loads(Path("runs/tiny-eval/summary.json").read_text())
    assert summary["status"] == status
    assert "nan" not in (shown := capsys.readouterr().out)
    assert "nan" not in summary["error"]
    assert ("accuracy -" in shown) == (allowed == 1)
    assert len(list(read_samples(Path("runs/tiny-eval/samples/eval_000000.jsonl")))) == 4


AFTER_ONE = """
calls = []

def broken(text):
    calls.append(text)
    if len(calls) == 1:  # the call on an example before the run
        return 0.0
    %s
"""


@pytest.mark.parametrize(
    ("body", "reason", "timeout_s"),
    [
        ("raise ValueError('broken')", "ValueError: broken", 300),
        ("return float('nan')", "nan", 300),
        ("return 'good'", "good", 300),
        ("import time; time.sleep(60)", "no result within", 2.0),
    ],
)
def test_a_reward_that_always_fails_ends_the_run_with_its_reason(
    load_tiny: LoadTiny, body: str, reason: str, timeout_s: float
) -> None:
    part = "reward.parts=[{kind: function, path: 'rewards.py:broken'}]"
    loaded = load_tiny(
        part, f"reward.timeout_s={timeout_s}", "reward.retries=0", "eval.before=false",
        "rollout.prompts_per_round=2", "rollout.group_size=2", rewards=AFTER_ONE % body,
    )  # fmt: skip
    with pytest.raises(TrainingError, match=r"max_invalid_fraction") as caught:
        commands.train(loaded)
    assert reason in str(caught.value)
    summary = json.loads(Path("runs/tiny/summary.json").read_text())
    assert summary["status"] == "failed"
    assert "RolloutError" in summary["error"]


def test_a_round_without_any_valid_answer_ends_the_run_even_when_allowed(load_tiny: LoadTiny) -> None:
    part = "reward.parts=[{kind: function, path: 'rewards.py:broken'}]"
    rewards = AFTER_ONE % "raise ValueError('broken')"
    loaded = load_tiny(part, "rollout.max_invalid_fraction=1.0", "eval.before=false", rewards=rewards)
    with pytest.raises(TrainingError, match=r"nothing to train on: .*most common: "):
        commands.train(loaded)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("{min_final: 2}", r"final mean@1 is [\d.]+, below eval.target.min_final=2$"),
        (
            "{metric: pass@1, min_final: 0, min_gain: 2}",
            r"pass@1 rose .* by less than eval.target.min_gain=2$",
        ),
    ],
)
def test_a_missed_target_is_reported(load_tiny: LoadTiny, target: str, why: str) -> None:
    outcome = commands.train(load_tiny(f"eval.target={target}"))
    assert not outcome.is_target_reached
    summary = json.loads((outcome.run_dir / "summary.json").read_text())
    assert summary["status"] == "not_learned"
    assert re.search(why, summary["error"])


def test_a_target_may_be_for_the_share_of_successes(load_tiny: LoadTiny) -> None:
    """Every answer succeeds with a lower bar, whatever its reward."""
    bar = ["eval.success_reward=-9", "eval.target={metric: pass@1, min_final: 1}"]
    assert commands.train(load_tiny(*bar)).is_target_reached


def test_an_exported_run_loads_in_transformers_with_the_trained_weights(load_tiny: LoadTiny) -> None:
    run = commands.train(load_tiny()).run_dir
    folder = commands.export(run)
    model = AutoModelForCausalLM.from_pretrained(folder)
    trained = weights(run)
    exported = model.state_dict()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)


def test_a_run_can_be_evaluated_afterwards(load_tiny: LoadTiny) -> None:
    run = commands.train(load_tiny()).run_dir
    again = commands.evaluate(load_tiny(), run_dir=run).run_dir
    first, last = (json.loads((r / "summary.json").read_text())["eval"]["last"] for r in (again, run))
    assert first == last


def test_supervised_fine_tuning_alone_lowers_its_loss(load_tiny: LoadTiny) -> None:
    sft = "sft={data: [{kind: file, path: letters.jsonl, response_key: answer}], steps: 30, rows_per_step: 4, optimizer: {lr: 3.0e-3}}"
    run = commands.sft(load_tiny(sft)).run_dir
    losses = [line["sft/loss"] for line in lines(run) if "sft/loss" in line]
    assert len(losses) == 30
    assert losses[-1] < 0.5 * losses[0]


def test_a_folder_of_a_trained_model_starts_another_run(load_tiny: LoadTiny) -> None:
    folder = commands.export(commands.train(load_tiny()).run_dir)
    run = commands.train(load_tiny("run.name=second", "model.build=null", f"model.path={folder}")).run_dir
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"


def test_the_files_that_the_readme_names_call_one_another(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def seen(*args: Any, **kwargs: Any) -> Any:
        called[:] = [frame.filename for frame in traceback.extract_stack()]
        return computed(*args, **kwargs)

    computed = PpoClip.per_token
    monkeypatch.setattr(PpoClip, "per_token", seen)
    commands.train(load_tiny("run.max_rounds=1", "eval.before=false", "eval.at_end=false"))
    section = (
        (ROOT / "docs" / "architecture.md").read_text().partition("## Read the code")[2].partition("\n## ")[0]
    )
    named = [
        name.removeprefix("src/braid/") for name in re.findall(r"^\d\. \[`(.*?)`\]", section, re.MULTILINE)
    ]
    passed = [file.partition("/src/braid/")[2] for file in called if "/src/braid/" in file]
    distinct = list(dict.fromkeys(passed[passed.index(named[0]) :]))
    assert [*distinct, "algorithms/policy_losses/ppo_clip.py"] == named
    assert len(named) == 6
