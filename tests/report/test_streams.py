"""Output that cannot be printed does not end a run, and output of rewards goes to a file."""

from __future__ import annotations

import errno
import io
import logging
import sys
from pathlib import Path
from threading import Thread

import pytest

from braid.report.streams import REWARD_THREADS, Forgiving, forgiven, reward_prints_in


def test_characters_that_the_encoding_lacks_become_question_marks() -> None:
    raw = io.BytesIO()
    stream = Forgiving(io.TextIOWrapper(raw, encoding="ascii"), only_encoding=True)
    print("größer … 1", file=stream, flush=True)
    assert raw.getvalue() == b"gr??er ? 1\n"


class Full(io.StringIO):
    """On a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, f"no space for {text!r}")


def test_a_full_disk_or_a_closed_stream_drops_what_is_written() -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (Full(), closed):
        print("lost", file=Forgiving(stream), flush=True)
        with pytest.raises((OSError, ValueError)):
            print("kept", file=Forgiving(stream, only_encoding=True), flush=True)


def test_a_stream_that_was_closed_before_the_start_is_the_null_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with forgiven("stdout"):
        print("lost")  # noqa: T201
    assert sys.stdout is None


def test_only_prints_of_rewards_go_to_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "logs/rewards.log"

    def score() -> None:
        for i in range(3):
            print("scoring", i)  # noqa: T201

    with reward_prints_in(log), caplog.at_level(logging.INFO):
        thread = Thread(target=score, name=f"{REWARD_THREADS}-1")
        thread.start()
        thread.join()
        print("of the run")  # noqa: T201
    assert log.read_text() == "scoring 0\nscoring 1\nscoring 2\n"
    assert capsys.readouterr().out == "of the run\n"
    assert [record.getMessage() for record in caplog.records] == [
        f"a reward writes to stdout; its output is redirected to {log}"
    ]
