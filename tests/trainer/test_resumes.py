"""Messages of resumes, and refused resumes."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import yaml

from braid.config.load import load_config
from braid.errors import CheckpointError, ConfigError, ModelError
from braid.trainer import commands

from .conftest import LoadTiny

pytestmark = pytest.mark.slow

ONE, EACH = "run.max_rounds=1", "checkpoint.every_rounds=1"


def test_a_resume_names_its_checkpoint_and_the_settings_that_differ(
    load_tiny: LoadTiny, caplog: pytest.LogCaptureFixture
) -> None:
    run = commands.train(load_tiny(ONE)).run_dir
    with caplog.at_level(logging.INFO):
        commands.train(
            load_tiny("run.max_rounds=2", "run.resume=latest", "train.optimizer.lr=1e-4", "data.eval=[]")
        )
    folder = re.escape(str(run / "checkpoints/step_1"))
    assert re.search(rf"resumed from {folder}, after round 1 of 2, step 1\n", caplog.text)
    (message,) = (
        record.getMessage() for record in caplog.records if "settings changed" in record.getMessage()
    )
    assert "run.max_rounds: was 1, is now 2" in message
    assert "train.optimizer.lr: was 0.003, is now 0.0001" in message
    assert "model." not in message


@pytest.mark.parametrize("verb", ["train", "pipelined", "sft"])
def test_a_run_past_its_last_round_ends_at_once(
    load_tiny: LoadTiny, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    run, key, *settings = {
        "train": (commands.train, "run.max_rounds"),
        "pipelined": (commands.train, "run.max_rounds", "pipeline.max_lag=1"),
        "sft": (
            commands.sft,
            "sft.steps",
            "sft={data: [{kind: file, path: letters.jsonl, response_key: answer}], rows_per_step: 4}",
        ),
    }[verb]
    run(load_tiny(*settings, f"{key}=3", EACH))
    outcome = run(load_tiny(*settings, f"{key}=1", "run.resume=latest", "run.allow_changes=true"))
    assert "the run has finished all its 1 rounds" in caplog.text
    assert json.loads((outcome.run_dir / "summary.json").read_text())["round"] == 3


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("algorithm.policy_loss.clip_low=0.1", "algorithm.policy_loss.clip_low"),
        ("model.build.num_layers=1", "model.build.num_layers"),
        ("data.train.0.limit=3", r"data.train\[0\].limit"),
        ("reward.parts.0.weight=2", r"reward.parts\[0\].weight"),
    ],
)
def test_a_resume_with_another_task_must_be_allowed(load_tiny: LoadTiny, change: str, key: str) -> None:
    run = commands.train(load_tiny(ONE)).run_dir
    before = (run / "config.yaml").read_text()
    with pytest.raises(
        ConfigError, match=rf"{key}: is .*, but was .*; .*run\.allow_changes=true \[override\]"
    ):
        commands.train(load_tiny("run.resume=latest", change))
    assert (run / "config.yaml").read_text() == before
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"


def test_an_allowed_change_is_made(load_tiny: LoadTiny) -> None:
    run = commands.train(load_tiny(ONE)).run_dir
    commands.train(load_tiny("run.resume=latest", "reward.parts.0.weight=2", "run.allow_changes=true"))
    assert json.loads((run / "summary.json").read_text())["round"] == 3


def test_a_resume_that_loads_no_checkpoint_changes_nothing_in_the_folder(load_tiny: LoadTiny) -> None:
    run = commands.train(load_tiny("run.max_rounds=2", EACH, "report.samples_every_rounds=1")).run_dir

    def files() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in run.rglob("*") if p.is_file() and p.parent.name != "logs"}

    before = files()
    earlier = f"run.resume={run / 'checkpoints/step_1'}"
    for start in ("run.resume=latest", earlier):
        with pytest.raises(CheckpointError, match="is of a different model"):
            commands.train(load_tiny(start, "run.allow_changes=true", "model.build.hidden_size=16"))
        assert files() == before
    commands.train(load_tiny(earlier, "run.allow_changes=true", "reward.parts.0.weight=2"))
    stored = load_config(run / "config.yaml").config.run
    assert (stored.allow_changes, stored.resume) == (False, "none")
    with pytest.raises(ConfigError, match=r"run\.allow_changes=true"):
        commands.train(load_config(run / "config.yaml", ["run.resume=latest", "reward.parts.0.weight=1"]))


def test_resuming_a_finished_run_is_reported(load_tiny: LoadTiny, caplog: pytest.LogCaptureFixture) -> None:
    run = commands.train(load_tiny(ONE)).run_dir
    metrics = (run / "metrics.jsonl").read_bytes()
    commands.train(load_tiny(ONE, "run.resume=latest"))
    assert "the run has finished all its 1 rounds" in caplog.text
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_another_runs_checkpoint_is_resumed_only_when_allowed(load_tiny: LoadTiny, tmp_path: Path) -> None:
    first = commands.train(load_tiny(ONE, EACH)).run_dir
    fork = ("run.name=fork", f"run.resume={first / 'checkpoints/step_1'}", "run.max_rounds=2")
    with pytest.raises(
        ConfigError, match=r"run\.resume: .*step_1 is a checkpoint of another run than the one in"
    ):
        commands.train(load_tiny(*fork))
    commands.train(load_tiny(*fork, "run.allow_changes=true"))
    commands.train(load_tiny("run.name=fork", "run.resume=latest", "run.max_rounds=3"))  # its own now

    shared = f"checkpoint.dir={tmp_path / 'shared'}"
    commands.train(load_tiny(ONE, shared, "run.name=a"))
    with pytest.raises(ConfigError, match="is a checkpoint of another run"):
        commands.train(load_tiny(shared, "run.name=b", "run.resume=latest"))
    commands.train(load_tiny(shared, "run.name=a", "run.resume=latest"))


@pytest.mark.parametrize("way", ["copied", "copied without hidden files", "moved"])
def test_a_copied_or_moved_run_resumes_and_is_evaluated_in_its_own_folder(
    load_tiny: LoadTiny, tmp_path: Path, way: str
) -> None:
    first, there = commands.train(load_tiny(ONE)).run_dir, tmp_path / "elsewhere/second"
    if way == "moved":
        shutil.move(first, there)
    else:
        hidden = shutil.ignore_patterns(".*") if "hidden" in way else None
        shutil.copytree(first, there, ignore=hidden)
    summary = (there if way == "moved" else first) / "summary.json"
    before = summary.read_bytes()
    resumed = commands.train(load_config(there / "config.yaml", ["run.resume=latest", "run.max_rounds=2"]))
    assert resumed.run_dir == there
    assert json.loads((there / "summary.json").read_text())["round"] == 2
    assert first.exists() == (way != "moved")
    assert way == "moved" or summary.read_bytes() == before
    assert commands.evaluate(load_config(there / "config.yaml"), run_dir=there).run_dir == there.with_name(
        "second-eval"
    )


def test_a_copy_does_not_take_the_checkpoints_of_its_original(load_tiny: LoadTiny, tmp_path: Path) -> None:
    first = commands.train(load_tiny(ONE, f"checkpoint.dir={tmp_path / 'states'}")).run_dir
    copy = shutil.copytree(first, tmp_path / "copy")
    with pytest.raises(
        ConfigError, match=r"checkpoint\.dir: .*copy is a copy of .*tiny, and .*states holds that run's"
    ):
        commands.train(load_config(copy / "config.yaml", ["run.resume=latest"]))
    shutil.rmtree(first)
    commands.train(load_config(copy / "config.yaml", ["run.resume=latest"]))  # it was moved


def test_a_run_in_the_next_free_folder_resumes_there(load_tiny: LoadTiny) -> None:
    commands.train(load_tiny(ONE))
    second = commands.train(load_tiny(ONE, "run.if_exists=new")).run_dir
    assert load_config(second / "config.yaml").config.run.name == second.name == "tiny-2"
    assert commands.train(load_config(second / "config.yaml", ["run.resume=latest"])).run_dir == second


def test_a_step_without_a_checkpoint_lists_those_that_are_there(load_tiny: LoadTiny) -> None:
    run = commands.train(load_tiny("checkpoint.every_rounds=2")).run_dir
    with pytest.raises(ConfigError, match=r"--step 7: .* has no checkpoint of that step; available: 2, 3$"):
        commands.export(run, step=7)


def test_exporting_a_run_without_checkpoints_is_an_error(load_tiny: LoadTiny) -> None:
    run = commands.train(load_tiny(ONE, "checkpoint.at_end=false")).run_dir
    with pytest.raises(CheckpointError, match="has no checkpoint in"):
        commands.export(run)


def test_an_evaluation_names_the_checkpoint_that_it_read(
    load_tiny: LoadTiny, capsys: pytest.CaptureFixture[str]
) -> None:
    run = commands.train(load_tiny(ONE)).run_dir
    outcome = commands.evaluate(load_tiny("report.console=plain"), run_dir=run)
    newest = run / "checkpoints/step_1"
    assert f"evaluating {newest}" in capsys.readouterr().out.replace("\n", "")
    assert json.loads((outcome.run_dir / "summary.json").read_text())["checkpoint"] == str(newest)


def test_a_runs_weights_are_evaluated_only_in_the_runs_model(load_tiny: LoadTiny) -> None:
    run = commands.train(load_tiny(ONE)).run_dir
    commands.export(run, output=run / "model")
    other = ("model.build=null", f"model.path={run / 'model'}")
    resumes = ("run.eval_only=true", f"run.resume={run / 'checkpoints/step_1'}")
    with pytest.raises(
        ConfigError, match=r"model\.path.*: is .* but was .*step_1, whose weights are evaluated; remove it"
    ):
        commands.evaluate(load_tiny(*other), run_dir=run)
    with pytest.raises(ConfigError, match="whose weights are evaluated"):
        commands.train(load_tiny(*other, *resumes))
    commands.evaluate(load_tiny(*other, "run.allow_changes=true"), run_dir=run)  # the same model in a folder
    with pytest.raises(ModelError, match="of another shape"):
        commands.evaluate(load_tiny("model.build.hidden_size=64", "run.allow_changes=true"), run_dir=run)


def test_a_run_saves_by_time_without_a_cadence(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    never = "checkpoint.at_end=false"
    run = commands.train(load_tiny(never, "checkpoint.keep=null")).run_dir
    assert not list(run.glob("checkpoints/step_*")), "the first ten seconds need no checkpoint"
    monkeypatch.setattr("braid.trainer.progress._LEAST_S", 0.0)
    monkeypatch.setattr("braid.trainer.progress._SAVED_SHARE", float("inf"))
    run = commands.train(load_tiny(never, "checkpoint.keep=null", "run.name=b")).run_dir
    assert sorted(path.name for path in run.glob("checkpoints/step_*")) == [
        "step_0",
        "step_1",
        "step_2",
        "step_3",
    ]
    run = commands.train(load_tiny(never, "checkpoint.every_s=0", "run.name=c")).run_dir
    assert not list(run.glob("checkpoints/step_*"))


def test_a_run_is_evaluated_exported_and_resumed_from_any_directory(
    load_tiny: LoadTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = commands.train(load_tiny(ONE)).run_dir
    commands.export(first, output=tmp_path / "model")
    config = yaml.safe_load((tmp_path / "tiny.yaml").read_text())
    config["model"] = {"path": "model"}
    config["run"]["name"] = "second"
    (tmp_path / "second.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = commands.train(load_config(tmp_path / "second.yaml", [ONE])).run_dir
    assert run == tmp_path / "runs/second"
    (tmp_path / "nowhere").mkdir()
    monkeypatch.chdir(tmp_path / "nowhere")
    stored = load_config(run / "config.yaml")
    assert stored.config.model.path == str(tmp_path / "model")
    commands.evaluate(stored, run_dir=run)
    assert (commands.export(run) / "model.safetensors").exists()
    commands.train(load_config(tmp_path / "second.yaml", ["run.resume=latest"]))
    commands.train(load_config(run / "config.yaml", ["run.resume=latest", "run.max_rounds=4"]))
    assert json.loads((run / "summary.json").read_text())["round"] == 4
    assert not list(Path.cwd().iterdir())
