"""Sinks of metrics: files are read back, real trackers run without a network."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from braid.errors import ReportError
from braid.report.run_dir import RunDir
from braid.report.sinks.base import SampleRow, run_id
from braid.report.sinks.build import build_sinks
from braid.report.sinks.jsonl import JsonlSink
from braid.report.sinks.tensorboard import TensorboardSink


def test_a_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log(0, 0, {"reward/mean": 0.1 + 0.2})
    assert json.loads(path.read_text()) == {"round": 0, "step": 0, "reward/mean": 0.1 + 0.2}  # to the bit
    sink.log(1, 4, {"reward/mean": float("inf")})
    sink.close()
    assert json.loads(path.read_text().splitlines()[1]) == {"round": 1, "step": 4, "reward/mean": None}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_with_the_path_of_the_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(
        ReportError, match=r"cannot write round 3 to .*metrics\.jsonl: No space left on device.*resume"
    ):
        JsonlSink(path).log(3, 3, {})


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_has_a_point_for_each_round(tmp_path: Path) -> None:
    sink = TensorboardSink(tmp_path)
    for i in range(3):
        sink.log(i, 2 * i, {"reward/mean": i / 2})
    assert scalars(tmp_path, "reward/mean") == [(0, 0.0), (1, 0.5), (2, 1.0)]  # before it is closed
    sink.close()
    assert scalars(tmp_path, "step") == [(0, 0.0), (1, 2.0), (2, 4.0)]


def test_tensorboard_queues_the_configured_number_of_values(tmp_path: Path) -> None:
    sink = TensorboardSink(tmp_path, queue=6)
    num_written = []
    for i in range(4):
        sink.log(i, i, {"reward/mean": 0.0})  # two values with the step
        num_written.append(len(scalars(tmp_path, "step")) if any(tmp_path.iterdir()) else 0)
    sink.close()
    assert [*num_written, len(scalars(tmp_path, "step"))] == [0, 0, 3, 3, 4]


def test_tensorboard_drops_rounds_that_the_same_process_does_again(tmp_path: Path) -> None:
    sink = TensorboardSink(tmp_path)
    for i, value in ((0, 1.0), (1, 1.0), (1, 2.0), (2, 2.0)):
        sink.log(i, i, {"reward/mean": value})
    sink.close()
    assert scalars(tmp_path, "reward/mean") == [(0, 1.0), (1, 2.0), (2, 2.0)]


def test_tensorboard_shows_samples_as_text(tmp_path: Path) -> None:
    """Of a round that is done again both, the later one last: TensorBoard drops numbers alone."""
    sink = TensorboardSink(tmp_path, num_samples=2)
    for i, answer in ((0, "a"), (1, "b"), (1, "c")):
        sink.log_samples("train", i, [SampleRow(f"sums:{i}", "1 + 1 =\n", f"# {answer}", 0.5, "finished")])
        sink.log(i, i, {"reward/mean": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    shown = events.Tensors("samples/train/text_summary")
    assert [event.step for event in shown] == [0, 1, 1]
    text = shown[-1].tensor_proto.string_val[0].decode()
    assert text == "**sums:1**: reward 0.5, finished\n\n    1 + 1 =\n\n\n    # c"
    assert scalars(tmp_path, "reward/mean") == [(0, 0.5), (1, 0.5)]


def test_tensorboard_drops_rounds_that_a_resumed_run_does_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = event_file_writer.AtomicCounter(10)  # 9 would come after 10
    monkeypatch.setattr(event_file_writer, "_global_uid", names)
    for rounds, value in ((range(4), 1.0), (range(2, 5), 2.0)):
        sink = TensorboardSink(tmp_path)
        for i in rounds:
            sink.log(i, i, {"reward/mean": value})
        sink.close()
        for file in tmp_path.iterdir():  # event files of one second are told apart by their number only
            os.utime(file)
    assert scalars(tmp_path, "reward/mean") == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[str]]]:
    """An HTTP proxy that rejects everything, and the first lines of its requests."""
    asked: list[str] = []
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                asked.append(connection.recv(1000).decode(errors="replace").splitlines()[0])

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


TRACKED_RUN = textwrap.dedent(
    """
    import math, sys
    from pathlib import Path
    from braid.report.run_dir import RunDir
    from braid.report.sinks.base import SampleRow, Tracker
    from braid.report.sinks.build import build_sinks

    run = RunDir(Path(sys.argv[2]))
    tracker = Tracker("a-project", "a-name", "offline", 4, {"train": {"lr": 0.1}})
    jsonl, sink = build_sinks(run, tensorboard_queue=None, **{sys.argv[1]: tracker})
    for i in range(3):
        sink.log_samples("train", i, [SampleRow("sums:1", "1 + 1 =", "2", 1.0, "finished")])
        sink.log(i, i, {"reward/mean": i / 2, "policy/kl": math.nan})
    sink.close()
    """
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "files"), [("wandb", "wandb/offline-run-*/run-*.wandb"), ("swanlab", "swanlab/run-*/*.swanlab")]
)
def test_an_offline_tracker_writes_files_and_sends_no_requests(
    tmp_path: Path, proxy: tuple[str, list[str]], name: str, files: str
) -> None:
    pytest.importorskip(name)
    url, asked = proxy
    proxies = {f"{scheme}_proxy".upper(): url for scheme in ("http", "https", "all")}
    environment = {**os.environ, **proxies, "HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TRACKED_RUN, name, str(tmp_path / "run")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = list((tmp_path / "run").glob(files))
    assert len(written) == 1
    content = written[0].read_bytes()
    assert b"reward/mean" in content
    assert b"a-name" in content
    assert b"samples/train" in content
    assert asked == []
    assert done.stdout == ""  # the terminal is the run's own


def test_metrics_jsonl_is_always_among_the_sinks(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert [sink.name for sink in build_sinks(run, tensorboard_queue=None)] == ["metrics.jsonl"]
    assert [sink.name for sink in build_sinks(run, tensorboard_queue=10)] == ["metrics.jsonl", "TensorBoard"]


def test_sinks_may_have_a_separate_folder(tmp_path: Path) -> None:
    run, folder = RunDir(tmp_path / "run"), tmp_path / "curves"
    jsonl, tensorboard = build_sinks(run, folder=folder, tensorboard_queue=1)
    for sink in (jsonl, tensorboard):
        sink.log(1, 1, {"reward/mean": 0.5})
        sink.close()
    assert scalars(folder / "tensorboard", "reward/mean") == [(1, 0.5)]
    assert run.metrics.exists()
    assert not (run.path / "tensorboard").exists()


def test_a_copied_folder_gets_an_id_of_its_own_in_a_tracker_and_a_moved_one_keeps_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, copy, moved = (tmp_path / name for name in ("first", "copy", "moved"))
    first.mkdir()
    name = run_id(first / ".wandb_id")
    assert run_id(first / ".wandb_id") == name, "a resumed run goes on under it"
    shutil.copytree(first, copy)
    copy_id = run_id(copy / ".wandb_id")
    assert copy_id != name
    assert f"{copy} is a copy of {first}: it gets a run of its own" in caplog.text
    assert (run_id(copy / ".wandb_id"), run_id(first / ".wandb_id")) == (copy_id, name)
    shutil.move(first, moved)
    assert [run_id(moved / ".wandb_id") for _ in range(2)] == [name, name]
