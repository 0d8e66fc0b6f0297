"""Commands that run something, on a model with a few thousand weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.leftovers import LIMIT_S, error_output

from braid.cli.main import main
from braid.config.schema import RunConfig
from braid.plan import Plan, Verb

CONFIG = """\
run: {name: tiny, output_dir: OUT, max_rounds: 2}
model:
  build: {hidden_size: 16, intermediate_size: 16, num_layers: 1, num_heads: 1, num_kv_heads: 1, head_dim: 16}
data:
  train: [{kind: procedural, generator: chain_sum, template: "{metadata[expression]}", size: 20}]
  eval: [{kind: procedural, generator: chain_sum, template: "{metadata[expression]}", size: 2, seed: 100}]
  max_prompt_tokens: 64
reward: {parts: [{kind: exact}]}
rollout: {prompts_per_round: 2, group_size: 2, sampling: {max_new_tokens: 4}}
report: {console: none, tensorboard: false}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG.replace("OUT", str(tmp_path / "runs")))
    return str(path)


@pytest.mark.slow
def test_a_run_trains_evaluates_and_exports(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config]) == 0
    run = tmp_path / "runs/tiny"
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"

    assert main(["train", config]) == 2
    assert "already contains a run" in capsys.readouterr().err

    assert main(["eval", str(run)]) == 0
    assert (tmp_path / "runs/tiny-eval/summary.json").exists()

    assert main(["export", str(run), "--output", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'model'}\n")
    assert (tmp_path / "model/config.json").exists()


@pytest.mark.slow
def test_the_plan_is_derived_once_a_start(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a run whose number of rounds is known only once its data is read."""
    derived: list[str] = []
    module = sys.modules["braid.plan.resolve"]
    derive = module.derive

    def counted(config: RunConfig, num_prompts: int | None, verb: Verb, num_gpus: int = 0) -> Plan:
        derived.append(verb)
        return derive(config, num_prompts, verb, num_gpus)

    monkeypatch.setattr(module, "derive", counted)
    (Path(config).parent / "two.jsonl").write_text(2 * '{"prompt": "1", "answer": "1"}\n')
    epochs = ["run.max_rounds=null", "run.max_epochs=1", "eval.before=false", "eval.at_end=false"]
    file = f"data.train=[{{kind: file, path: {Path(config).parent / 'two.jsonl'}}}]"
    assert main(["train", config, file, *epochs]) == 0
    assert derived == ["train"]
    run = Path(config).parent / "runs/tiny"
    assert json.loads((run / "plan.json").read_text())["planned_rounds"] == 1


def test_a_missed_target_exits_with_3(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config, "eval.target.min_final=2"]) == 3  # a reward is 1 at most
    summary = tmp_path / "runs/tiny/summary.json"
    assert capsys.readouterr().err.endswith(f"braid: eval.target was not reached; see {summary}\n")
    assert json.loads(summary.read_text())["status"] == "not_learned"


def test_an_evaluation_that_is_mostly_invalid_exits_with_1(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "down.py").write_text("def score():\n    raise ConnectionError('the judge is down')\n")
    part = f"reward.parts=[{{kind: function, path: '{tmp_path / 'down.py'}:score'}}]"
    assert main(["eval", config, part, "reward.retries=0"]) == 1
    assert "2 of 2 trajectories of the evaluation" in (err := capsys.readouterr().err)
    assert "the judge is down" in err


def test_a_run_that_only_evaluates_needs_no_training_data(config: str, tmp_path: Path) -> None:
    assert main(["train", config, "run.eval_only=true", "data.train=[]", "run.max_rounds=null"]) == 0
    assert (
        json.loads((tmp_path / "runs/tiny-eval/summary.json").read_text())["eval"]["last"]["all"]["num"] == 2
    )


def test_missing_data_exits_with_2_and_names_the_file(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config, "data.train=[{kind: file, path: nope.jsonl}]"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("braid: data.train[0]")
    assert "nope.jsonl" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("target", ["/dev/full", "summary.json"])
def test_a_run_whose_output_cannot_be_written_keeps_its_exit_code(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    run = tmp_path / "runs/tiny"
    if target == "summary.json":
        (run / ".summary.json.new").mkdir(parents=True)  # in the way of the file that is written beside
    with open("/dev/full", "w") as full:
        if target == "/dev/full":
            monkeypatch.setattr("sys.stdout", full)
        assert main(["train", config, "report.console=plain"]) == 0
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert (run / "checkpoints/step_2").exists()


def test_what_a_reward_prints_is_in_the_runs_log_and_not_on_the_console(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talks.py").write_text("def score(text):\n    print('scoring')\n    return 1.0\n")
    part = "reward.parts=[{kind: function, path: %s}]" % (tmp_path / "talks.py:score")
    assert main(["train", config, part, "report.console=plain", "run.max_rounds=1"]) == 0
    out = capsys.readouterr().out
    log = tmp_path / "runs/tiny/logs/rewards.log"
    assert set(log.read_text().splitlines()) == {"scoring"}
    assert out.count("a reward writes to stdout") == 1
    assert "scoring" not in out


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_and_prints_the_resume_command(config: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-Xfaulthandler",
        "-m",
        "braid.cli.main",
        "train",
        config,
        "run.max_rounds=100000",
        "checkpoint.every_rounds=1",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        checkpoints = tmp_path / "runs/tiny/checkpoints"
        ends = time.monotonic() + LIMIT_S
        while not list(checkpoints.glob("step_*")) and run.poll() is None and time.monotonic() < ends:
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        err = error_output(run)
    assert run.returncode == 130, err
    interrupted, go_on = err.splitlines()[-2:]
    assert interrupted.startswith(
        f"braid: interrupted; the run is in {tmp_path / 'runs/tiny'}, the newest checkpoint is"
    )
    assert go_on.startswith(f"to resume: braid train {config} run.max_rounds=100000")
    assert go_on.endswith("run.name=tiny run.resume=latest")
    done = main(
        [*go_on.split()[3:], "run.max_rounds=1"]
    )  # the run is past its first round: nothing is left to do
    assert done == 0
