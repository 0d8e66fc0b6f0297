"""SIGUSR1 says what a run does, and changes nothing."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest
from tests.leftovers import LIMIT_S

from braid.cluster.status import status_on_signal


def status(caplog: pytest.LogCaptureFixture) -> str:
    """Send the signal to this process, and wait for what it logs."""
    caplog.set_level(logging.INFO, "braid")
    caplog.clear()
    os.kill(os.getpid(), signal.SIGUSR1)
    deadline = time.monotonic() + LIMIT_S
    while not caplog.messages and time.monotonic() < deadline:
        time.sleep(0.01)
    return caplog.messages[0]


def test_the_phase_and_the_stacks_are_reported_each_time(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    phases = iter(["rollout", "update"])
    with (tmp_path / "stderr").open("w") as stderr:
        monkeypatch.setattr("sys.__stderr__", stderr)
        with status_on_signal(lambda: next(phases)):
            assert [status(caplog), status(caplog)] == ["SIGUSR1: rollout", "SIGUSR1: update"]
    assert (tmp_path / "stderr").read_text().count("in status\n") == 2
    assert signal.getsignal(signal.SIGUSR1) == before
