"""The folder of a run, its content, and rewinding to the round of a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from braid.errors import ConfigError, ReportError
from braid.report.run_dir import RunDir
from braid.report.sinks.jsonl import JsonlSink


def a_run(parent: Path, name: str = "run") -> RunDir:
    return RunDir.open(parent, name, if_exists="refuse", resume=False)


def with_lines(run: RunDir, rounds: range) -> RunDir:
    sink = JsonlSink(run.metrics)
    for i in rounds:
        sink.log(i, 2 * i, {"reward/mean": i / 3, "policy/kl": float("nan")})
    sink.close()
    return run


def test_a_new_run_gets_its_folder(tmp_path: Path) -> None:
    run = a_run(tmp_path / "runs")
    assert run.path == tmp_path / "runs" / "run"
    run.describe("seed: 0\n", {"rounds": 3})
    assert run.config.read_text() == "seed: 0\n"
    assert json.loads(run.plan.read_text()) == {"rounds": 3}


def test_a_folder_with_a_run_is_refused_with_alternatives(tmp_path: Path) -> None:
    with_lines(a_run(tmp_path), range(1)).close()
    with pytest.raises(ConfigError) as caught:
        a_run(tmp_path)
    for way in (str(tmp_path / "run"), "run.resume=latest", "run.if_exists=new", "run.name", "delete"):
        assert way in str(caught.value)


def test_if_exists_new_takes_the_next_free_name(tmp_path: Path) -> None:
    for name in ("run", "run-2"):
        with_lines(a_run(tmp_path, name), range(1)).close()
    assert RunDir.open(tmp_path, "run", if_exists="new", resume=False).path.name == "run-3"


def test_a_start_that_failed_before_its_first_round_does_not_block_the_name(tmp_path: Path) -> None:
    first = a_run(tmp_path)
    first.describe("seed: 0\n", {})
    first.write_summary({"status": "failed"})
    first.close()
    assert a_run(tmp_path).path.name == "run"


def test_a_resumed_run_takes_the_folder_as_it_is(tmp_path: Path) -> None:
    with_lines(a_run(tmp_path), range(2)).close()
    run = RunDir.open(tmp_path, "run", if_exists="refuse", resume=True)
    assert [record["round"] for record in run.read_metrics()] == [0, 1]


def test_two_processes_cannot_work_in_one_folder(tmp_path: Path) -> None:
    holder = "import sys; from pathlib import Path; from braid.report.run_dir import RunDir\nrun = RunDir(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="is in use by another process"):
            RunDir(tmp_path)
        process.kill()
    RunDir(tmp_path).close()  # a killed process holds nothing


def test_if_exists_new_does_not_touch_a_run_that_has_written_nothing_yet(tmp_path: Path) -> None:
    names = [RunDir.open(tmp_path, "run", if_exists="new", resume=False) for _ in range(3)]
    assert [run.path.name for run in names] == ["run", "run-2", "run-3"]


def test_a_folder_that_cannot_be_created_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError,
        match=r"run\.output_dir: cannot use the folder .*file/run for the run: Not a "
        r"directory",
    ):
        a_run(tmp_path / "file")


def test_rewinding_leaves_the_bytes_that_the_unbroken_run_would_have(tmp_path: Path) -> None:
    unbroken, resumed = with_lines(a_run(tmp_path, "a"), range(6)), with_lines(a_run(tmp_path, "b"), range(5))
    with resumed.metrics.open("a") as file:
        file.write('{"round": 5, "ste')  # killed while it wrote
    for name in ("round_000003", "round_000004", "eval_000004", "eval_000000"):
        (resumed.samples / f"{name}.jsonl").write_text("")
    resumed.rewind(3)
    assert sorted(p.stem for p in resumed.samples.iterdir()) == ["eval_000000", "round_000003"]
    with_lines(resumed, range(4, 6))
    assert resumed.metrics.read_bytes() == unbroken.metrics.read_bytes()


def test_rewinding_to_the_beginning_leaves_nothing(tmp_path: Path) -> None:
    run = with_lines(a_run(tmp_path), range(3))
    run.rewind(None)
    assert run.metrics.read_text() == ""
    a_run(tmp_path, "empty").rewind(None)


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    run = with_lines(a_run(tmp_path), range(1))
    assert json.loads(run.metrics.read_text()) == {
        "round": 0,
        "step": 0,
        "reward/mean": 0.0,
        "policy/kl": None,
    }


def test_a_summary_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run.path / ".summary.json.new").mkdir()  # in the way of the file written beside
    with pytest.raises(ReportError, match=r"cannot write .*summary\.json"):
        run.write_summary({"status": "running"})
