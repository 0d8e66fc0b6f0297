"""Run folder and display after rounds, resumes and failures of sinks."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from braid.errors import ReportError, TrainingError
from braid.report.metrics import Metrics
from braid.report.names import describe
from braid.report.reporter import Reporter
from braid.report.run_dir import RunDir
from braid.report.samples import read_samples
from braid.report.sinks.base import SampleRow, Sink
from braid.report.sinks.build import build_sinks
from braid.report.sinks.console import Console
from braid.types import Group, Prompt, Row, Segment, Trajectory, Turn


@dataclass
class Counts:
    rows: int
    dropped_overlong: int = 0
    truncated: int = 0


@dataclass
class Prompts:
    counts: dict[str, Counts]


@dataclass
class BrokenSink:
    """A tracker whose service goes away."""

    name: str = "a tracker"
    calls: list[str] = field(default_factory=list)

    def log(self, round_: int, step: int, flat: Mapping[str, float]) -> None:
        self.calls.append(f"log {round_}")
        raise ConnectionError("the service is gone")

    def close(self) -> None:
        self.calls.append("close")


@dataclass
class TableSink:
    """A tracker that shows a trajectory at a time."""

    name: str = "a tracker"
    num_samples: int = 1
    tables: list[tuple[str, int, Sequence[SampleRow]]] = field(default_factory=list)

    def log(self, round_: int, step: int, flat: Mapping[str, float]) -> None:
        """Numbers are not looked at."""

    def log_samples(self, use: str, round_: int, samples: Sequence[SampleRow]) -> None:
        self.tables.append((use, round_, samples))

    def close(self) -> None:
        """Nothing to free."""


def reporter_of(path: Path, *sinks: Sink) -> Reporter:
    screen = RichConsole(file=io.StringIO(), width=100, color_system=None, _environ={})
    console = Console("plain", title="train run", folder=path, screen=screen)
    console.num_rounds = 4
    run_dir = RunDir(path)
    reporter = Reporter(run_dir, console, sinks)
    reporter.begin(build_sinks(run_dir, tensorboard_queue=None))
    return reporter


def printed(reporter: Reporter) -> str:
    file = reporter.console.screen.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def summary(reporter: Reporter) -> dict[str, Any]:
    return json.loads(reporter.run_dir.summary.read_text())


def answers(text: str, reward: float) -> list[Group]:
    prompt = Prompt("sums:0", "sums", (1,), ({"role": "user", "content": "1 + 2 ="},))
    turn = Turn([1], [2], [0.0], "stop", 0)
    return [
        Group(prompt, [Trajectory(prompt, 0, segments=[Segment([turn])], answer_text=text, reward=reward)])
    ]


def metrics_of(round_: int) -> Metrics:
    metrics = Metrics()
    metrics.mean("reward/mean", round_ / 3)
    if round_ % 2 == 0:
        for source in ("sums", "all"):
            metrics.mean(f"eval/{source}/mean@1", 0.2 * round_)
    return metrics


def run(reporter: Reporter, rounds: range, states: dict[int, dict[str, Any]] | None = None) -> None:
    """Report rounds like the loop; `states` collects the reporter's state after each."""
    for i in rounds:
        reporter.store_samples(f"round_{i:06d}", answers(f"three ({i})", 1.0))
        if i % 2 == 0:
            reporter.store_samples(f"eval_{i:06d}", answers(f"answer {i}", i / 4))
        reporter.log(i, 2 * i, metrics_of(i))
        if states is not None:
            states[i] = reporter.state(i)


def test_trackers_show_what_was_written(tmp_path: Path) -> None:
    sink = TableSink()
    run(reporter_of(tmp_path, sink), range(2))
    assert sink.tables == [
        ("train", 0, [SampleRow("sums:0", "1 + 2 =", "three (0)", 1.0, "finished")]),
        ("eval", 0, [SampleRow("sums:0", "1 + 2 =", "answer 0", 0.0, "finished")]),
        ("train", 1, [SampleRow("sums:0", "1 + 2 =", "three (1)", 1.0, "finished")]),
    ]


def test_a_finished_run_shows_what_was_learned(tmp_path: Path) -> None:
    reporter = reporter_of(tmp_path)
    run(reporter, range(5))
    reporter.finish("finished")
    stored = summary(reporter)
    assert stored["status"] == "finished"
    assert (stored["round"], stored["num_rounds"], stored["steps"], stored["error"]) == (4, 4, 8, None)
    assert stored["eval"]["first"] == {"all": {"mean@1": 0.0}, "sums": {"mean@1": 0.0}}
    assert stored["eval"]["last"] == {"all": {"mean@1": 0.8}, "sums": {"mean@1": 0.8}}
    assert stored["wall_s"] >= 0
    end = printed(reporter)
    assert re.search(r"finished after 0:\d\d\b", end)
    for part in (
        "sums",
        "+0.800",
        "1 + 2 =",
        "answer 0  0",
        "answer 4  1",
        str(tmp_path),
    ):
        assert part in end


def test_one_evaluation_is_shown_without_a_change(tmp_path: Path) -> None:
    reporter = reporter_of(tmp_path)
    run(reporter, range(1))
    reporter.finish("finished")
    table = printed(reporter).partition("evaluation")[2].splitlines()
    assert (table[0].split(), table[1].split()) == (["result"], ["sums", "mean@1", "0.000"])


def test_paths_of_the_closing_report_are_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "a_rather_long_name" / "of_a_run_folder"
    reporter = reporter_of(path)
    reporter.console.screen.width = 40
    run(reporter, range(1))
    reporter.finish("finished")
    assert f"metrics   {path / 'metrics.jsonl'}" in printed(reporter).splitlines()


def test_a_running_run_has_status_running_after_each_round(tmp_path: Path) -> None:
    reporter = reporter_of(tmp_path)
    run(reporter, range(2))
    assert summary(reporter)["status"] == "running"
    assert summary(reporter)["round"] == 1


def test_a_failed_run_keeps_its_error(tmp_path: Path) -> None:
    reporter = reporter_of(tmp_path)
    run(reporter, range(2))
    reporter.finish("failed", TrainingError("5 steps in a row were not finite"))
    assert summary(reporter)["status"] == "failed"
    assert summary(reporter)["error"] == "TrainingError: 5 steps in a row were not finite"


def test_a_run_that_cannot_restart_keeps_the_results_of_before(tmp_path: Path) -> None:
    reporter = reporter_of(tmp_path)
    run(reporter, range(3))
    for _ in range(2):
        reporter.restart()
    reporter.finish("failed", TrainingError("no worker answers"))
    stored = summary(reporter)
    assert (stored["status"], stored["round"], stored["steps"], stored["restarts"]) == ("failed", 2, 4, 2)
    assert stored["eval"]["last"]["all"] == {"mean@1": 0.4}


def test_a_resumed_run_is_running_before_its_first_round_ends(tmp_path: Path) -> None:
    states: dict[int, dict[str, Any]] = {}
    first = reporter_of(tmp_path)
    run(first, range(2), states)
    first.finish("interrupted")
    console = Console("none", title="train run", folder=tmp_path)
    resumed = Reporter(RunDir(tmp_path), console)
    resumed.load(states[1])
    assert summary(resumed)["status"] == "interrupted"
    resumed.begin()
    assert (summary(resumed)["status"], summary(resumed)["round"]) == ("running", 1)


def reproducible(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if describe(k).is_reproducible} for line in lines]


@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_a_resumed_run_leaves_what_the_unbroken_one_does(tmp_path: Path, last: int) -> None:
    states: dict[int, dict[str, Any]] = {}
    unbroken, broken = reporter_of(tmp_path / "a"), reporter_of(tmp_path / "b")
    run(unbroken, range(5))
    run(broken, range(4), states)  # then it is killed
    broken.run_dir.close()
    resumed = reporter_of(tmp_path / "b")
    resumed.load(json.loads(json.dumps(states[last])))
    run(resumed, range(last + 1, 5))
    for reporter in (unbroken, resumed):
        reporter.finish("finished")
    assert reproducible(resumed.run_dir.metrics) == reproducible(unbroken.run_dir.metrics)
    same = ("status", "round", "steps", "eval")
    assert [summary(resumed)[k] for k in same] == [summary(unbroken)[k] for k in same]
    names = sorted(p.name for p in unbroken.run_dir.samples.iterdir())
    assert sorted(p.name for p in resumed.run_dir.samples.iterdir()) == names


def test_a_run_killed_before_its_first_checkpoint_rewrites_its_files(tmp_path: Path) -> None:
    killed = reporter_of(tmp_path)
    run(killed, range(3))
    killed.run_dir.close()
    again = reporter_of(tmp_path)
    run(again, range(1))
    assert [record["round"] for record in again.run_dir.read_metrics()] == [0]
    assert not (again.run_dir.samples / "round_000002.jsonl").exists()


def test_time_before_a_resume_counts(tmp_path: Path) -> None:
    reporter = reporter_of(tmp_path)
    reporter.load({**reporter.state(0), "round": 0, "wall_s": 1000.0})
    reporter.log(1, 1, metrics_of(1))
    assert summary(reporter)["wall_s"] >= 1000


def test_a_failing_sink_is_reported_once_and_disabled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = BrokenSink()
    reporter = reporter_of(tmp_path, broken)
    with caplog.at_level(logging.WARNING):
        run(reporter, range(3))
        reporter.finish("finished")
    assert broken.calls == ["log 0"]
    assert (
        caplog.text.count(
            "a tracker failed and is disabled for the rest of the run: ConnectionError: the service is gone"
        )
        == 1
    )
    assert len(reporter.run_dir.read_metrics()) == 3
    assert summary(reporter)["status"] == "finished"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_run_and_the_summary_has_the_error(tmp_path: Path) -> None:
    reporter = reporter_of(tmp_path)
    run(reporter, range(1))
    reporter.run_dir.metrics.unlink()
    reporter.run_dir.metrics.symlink_to("/dev/full")
    with pytest.raises(ReportError, match="No space left on device") as caught:
        reporter.log(1, 1, metrics_of(1))
    reporter.finish("failed", caught.value)
    assert "metrics.jsonl: No space left on device" in summary(reporter)["error"]


def test_samples_that_cannot_be_stored_are_reported_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, groups: list[Group]
) -> None:
    reporter = reporter_of(tmp_path)
    reporter.run_dir.samples.rmdir()
    reporter.run_dir.samples.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        reporter.store_samples("round_000001", groups)
        reporter.log(1, 1, metrics_of(1))
    assert "cannot store samples: cannot write" in caplog.text


def test_samples_have_text_once_there_is_a_tokenizer(
    tmp_path: Path, groups: list[Group], rows: list[Row], decode: Callable[..., str]
) -> None:
    reporter = reporter_of(tmp_path)
    reporter.decode = decode
    reporter.store_samples("round_000001", groups, rows)
    first = next(read_samples(reporter.run_dir.samples / "round_000001.jsonl"))
    assert first.output_texts[0] == "three four"
    assert first.training["advantages"]


def test_prompts_are_counted_on_the_console_and_in_the_summary(tmp_path: Path) -> None:
    reporter = reporter_of(tmp_path)
    reporter.count_data(train=Prompts({"sums": Counts(2000, 12, 3)}), eval=Prompts({"sums": Counts(10)}))
    reporter.finish("finished")
    assert "train data  sums: 2,000 rows, 12 dropped as too long, 3 truncated" in printed(reporter)
    assert summary(reporter)["data"]["train"] == {
        "sums": {"rows": 2000, "dropped_overlong": 12, "truncated": 3}
    }


def test_each_line_has_the_time_since_the_one_before(tmp_path: Path) -> None:
    reporter = reporter_of(tmp_path)
    run(reporter, range(2))
    assert all(record["time/round_s"] >= 0 for record in reporter.run_dir.read_metrics())
