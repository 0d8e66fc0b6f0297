"""`braid ls`, `samples`, `compare` and `diagnose` on the folders of real runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from braid.cli.main import OK, USAGE, main
from braid.inspection.folder import Run, find_runs
from braid.report.run_dir import RunDir


@pytest.fixture(scope="module")
def runs(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the two runs, which these tests add to."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("look") / "runs")


Capture = pytest.CaptureFixture[str]


def test_runs_are_listed_with_what_they_reached(runs: Path, capsys: Capture) -> None:
    assert main(["ls", str(runs)]) == OK
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["run", "status", "round"]
    assert [row.split()[1:3] for row in rows] == [["finished", "2/2"]] * 2
    assert main(["ls", "--json", str(runs)]) == OK
    listed = json.loads(capsys.readouterr().out)
    assert [Path(one["run"]).name for one in listed] == ["seed1", "seed2"]
    assert listed[0]["eval_last"] == Run(runs / "seed1").values(listed[0]["eval_name"])[-1][1]


def test_a_run_without_a_process_is_killed_and_one_with_it_runs(runs: Path, tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "mine")
    folder.write_summary({"status": "running"})
    assert Run(tmp_path / "mine").status == "running"
    folder.close()
    assert Run(tmp_path / "mine").status == "killed"
    assert Run(runs / "seed1").status == "finished"


def test_folders_inside_a_run_are_not_searched(runs: Path) -> None:
    (runs / "seed1/exports/step_1").mkdir(parents=True, exist_ok=True)
    (runs / "seed1/exports/step_1/config.yaml").write_text("")
    (runs / "seed1/exports/step_1/plan.json").write_text("")
    assert [run.name for run in find_runs(runs.parent)] == ["seed1", "seed2"]


def test_samples_are_chosen_by_reward_text_and_prompt(runs: Path, capsys: Capture) -> None:
    run = runs / "seed1"
    stored = [json.loads(line) for line in (run / "samples/round_000002.jsonl").read_text().splitlines()]

    def chosen(*options: str) -> list[dict[str, Any]]:
        assert main(["samples", str(run), "--json", *options]) == OK
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert chosen() == stored[:3]
    best = chosen("--best", "1000")
    assert sorted((one["reward"] for one in best), reverse=True) == [one["reward"] for one in best]
    assert len(best) == sum(one["reward"] is not None for one in stored)
    uid = str(stored[-1]["uid"])
    assert chosen("--uid", uid, "--first", "99") == [one for one in stored if one["uid"] == uid]
    assert chosen("--round", "1", "--first", "1")[0]["turns"][0]["policy_version"] == 0
    evaluated = (run / "samples/eval_000002.jsonl").read_text().splitlines()
    assert chosen("--eval", "--first", "1") == [json.loads(evaluated[0])]
    text = stored[0]["turns"][0]["output_text"]
    assert all(text in str(one) for one in chosen("--contains", text, "--first", "99"))


def test_a_sample_is_printed_with_its_prompt_answer_and_reward(runs: Path, capsys: Capture) -> None:
    assert main(["samples", str(runs / "seed1"), "--best", "1"]) == OK
    out = capsys.readouterr().out
    assert out.startswith("best 1 of ")
    for word in ("letters:", "reward", "user", "policy", "advantage"):
        assert word in out


def test_control_characters_of_a_model_do_not_reach_the_terminal(runs: Path, capsys: Capture) -> None:
    file = runs / "seed2/samples/round_000001.jsonl"
    text = file.read_text()
    record = json.loads(text.splitlines()[0])
    record["turns"][0]["output_text"] = "\x1b[2Jred\x07"
    file.write_text(json.dumps(record) + "\n")
    assert main(["samples", str(runs / "seed2"), "--round", "1"]) == OK
    out = capsys.readouterr().out
    file.write_text(text)
    assert "[2Jred" in out
    assert "\x1b[2J" not in out
    assert "\x07" not in out


def test_runs_are_compared(runs: Path, capsys: Capture) -> None:
    assert main(["compare", str(runs / "seed1"), str(runs / "seed2")]) == OK
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["run.seed", "1", "2"] in rows
    assert "evaluation by prompt: seed2, round 2 against seed1, round 2" in out
    assert "4 prompts" in out
    assert main(["compare", str(runs / "seed1")]) == OK
    assert "evaluation by prompt: round 2 against round 0" in capsys.readouterr().out


def test_short_runs_are_not_judged(runs: Path, capsys: Capture) -> None:
    assert main(["diagnose", str(runs / "seed1")]) == OK
    assert "fewer than 6 rounds" in capsys.readouterr().out
    assert main(["diagnose", "--json", str(runs / "seed1")]) == OK
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("diagnose RUNS", "holds 2 runs: pass one of them, or braid ls"),
        ("diagnose RUNS/sed1", "did you mean 'seed1'?"),
        (
            "samples RUNS/seed1 --round 9",
            "has no samples of round 9; it has 1, 2 (report.samples_every_rounds)",
        ),
        ("samples RUNS/seed1 --eval 1", "has no samples of round 1; it has 0, 2 (eval.every_rounds)"),
        ("samples RUNS/seed1 --best 0", "--best 0: print at least 1"),
        ("samples RUNS/seed1 --contains zebra", "trajectories in"),
        ("compare RUNS/seed1 RUNS/seed2 --eval 0 1 2", "3 rounds for 2 runs"),
        ("ls RUNS/seed1/samples", "there is no run in"),
    ],
)
def test_what_cannot_be_shown_is_an_error(runs: Path, capsys: Capture, command: str, message: str) -> None:
    assert main(command.replace("RUNS", str(runs)).split()) == USAGE
    assert message in capsys.readouterr().err


def test_a_line_that_is_being_written_is_left_out(runs: Path, tmp_path: Path) -> None:
    text = (runs / "seed1/metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text + '{"round": 3, "rew')
    assert [line["round"] for line in Run(tmp_path).lines] == [0, 1, 2]
