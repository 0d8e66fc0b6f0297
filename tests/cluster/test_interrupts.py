"""Signals during operations that must not be interrupted."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.leftovers import LIMIT_S

from braid.cluster.interrupts import NUMBERS, RoundCut, interrupts_held, stop_signals

_START = """
import sys
from braid.config.cluster import ClusterConfig
from braid.cluster.machines import connect
print("starting", flush=True)
try:
    connect(ClusterConfig(), num_processes=1)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_held_signal_is_reported_afterwards_and_later_ones_interrupt_again() -> None:
    with interrupts_held() as caught:
        os.kill(os.getpid(), signal.SIGINT)
        assert caught == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_interrupts_once_and_further_ones_do_not_disturb_shutdown() -> None:
    with stop_signals():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_first_signal_requests_a_stop_and_a_later_one_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stop_signals() as stop, stop.graceful(60.0):
        signal.raise_signal(signal.SIGHUP)
        assert stop.is_requested
        signal.raise_signal(signal.SIGHUP)  # at once: the same request
        monkeypatch.setattr("braid.cluster.interrupts._SAME_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_request_to_stop_is_logged_before_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def slow_warning(*_: object) -> None:
        time.sleep(0.1)
        lines.append("stopping")

    monkeypatch.setattr("braid.cluster.interrupts.logger.warning", slow_warning)
    with stop_signals() as stop, stop.graceful(60):
        signal.raise_signal(signal.SIGINT)
    assert lines == ["stopping"]


def test_interruptible_work_is_cut_when_the_time_is_over() -> None:
    with stop_signals() as stop, stop.graceful(0.01):
        with stop.cuttable():
            pass
        with pytest.raises(RoundCut), stop.cuttable():
            _wait_after(signal.SIGTERM)
        with pytest.raises(RoundCut), stop.cuttable():
            pass
        with pytest.raises(RoundCut):
            stop.check_time(None)


def test_work_is_not_cut_while_a_context_manager_is_entered_or_left() -> None:
    """Otherwise it would stay entered."""

    class Slow:
        is_entered = False

        def __enter__(self) -> None:
            self.is_entered = True
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.3)

        def __exit__(self, *_: object) -> None:
            time.sleep(0.3)
            self.is_entered = False

    slow = Slow()
    with stop_signals() as stop, stop.graceful(0.01):
        with pytest.raises(RoundCut), stop.cuttable(), slow:
            time.sleep(60)
        assert not slow.is_entered


@pytest.mark.parametrize("cut_after_s", [0.0, 1e-5, 1e-4, 1e-3])
def test_a_round_is_cut_wherever_the_first_signal_is_handled(cut_after_s: float) -> None:
    """The second comes while the handler of the first may still be at work."""
    for _ in range(50):
        with stop_signals() as stop, stop.graceful(cut_after_s or 1e-9):
            with pytest.raises(RoundCut), stop.cuttable():
                _wait_after(signal.SIGINT)
            assert stop.is_requested


def test_a_signal_while_a_line_is_logged_does_not_wait_for_it() -> None:
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger("braid").addHandler(handler)
    try:
        with stop_signals() as stop, stop.graceful(60.0), handler.lock or nullcontext():
            signal.raise_signal(signal.SIGINT)
            assert stop.is_requested
    finally:
        logging.getLogger("braid").removeHandler(handler)


def _wait_after(number: int) -> None:
    signal.raise_signal(number)
    time.sleep(60)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


_BUSY = """
import hashlib, sys, threading, time
from braid.cluster import interrupts, last_resort
last_resort.ENDS_WITHIN_S = 0.5
interrupts._SAME_S = 0.0

def insist():  # as a block that takes long to be left
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass

def compute():  # hours in a call that releases the interpreter's lock, and that no signal ends
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

main = threading.get_ident()

def tell():  # once the main thread is busy
    while sys._current_frames()[main].f_code.co_name not in ("insist", "compute", "work"):
        time.sleep(0.01)
    print("ready", flush=True)

def work():
    for _ in range(20):
        time.sleep(0.1)

def heed():
    try:
        while True:
            work()
    except KeyboardInterrupt:
        pass

threading.Thread(target=tell).start()
with interrupts.stop_signals(ends_process=True) as stop:
    %s
print("finished", flush=True)
"""


def _busy(code: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", _BUSY % code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize(
    ("code", "num_signals", "number"),
    [
        *(("insist()", 1, number) for number in NUMBERS),
        ("compute()", 1, signal.SIGTERM),
        ("with stop.graceful(3600): insist()", 2, signal.SIGTERM),
        ("with stop.graceful(3600): compute()", 2, signal.SIGTERM),
        ("with stop.graceful(0.01), stop.cuttable(): insist()", 1, signal.SIGTERM),
        ("with stop.graceful(0.01): insist()", 1, signal.SIGTERM),
    ],
)
def test_a_process_that_does_not_end_is_ended_whatever_it_is_doing(
    code: str, num_signals: int, number: int
) -> None:
    child = _busy(code)
    for _ in range(num_signals):
        child.send_signal(number)
        _await_delivery(child, number)  # equal signals that are pending together are one
    out, err = child.communicate(timeout=LIMIT_S)
    assert child.returncode == 130, err
    assert "ended without cleaning up" in err
    assert out == ""


def _await_delivery(child: subprocess.Popen[str], number: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while child.poll() is None and _pending(child.pid) >> (number - 1) & 1:
        assert time.monotonic() < deadline, f"signal {number} is still pending"
        time.sleep(0.01)


def _pending(pid: int) -> int:
    """Signals of a process that have not been delivered, as a bit mask."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:")), 0)


def test_an_update_or_save_is_finished_however_long_it_takes() -> None:
    child = _busy("with stop.graceful(0.01), stop.finishing(): work()")
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=LIMIT_S)
    assert (child.returncode, out) == (0, "finished\n"), err


def test_a_process_that_ends_in_time_is_left_alone() -> None:
    child = _busy("heed()")
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=LIMIT_S)
    assert (child.returncode, out, err) == (0, "finished\n", "")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("after_s", [0.5, 2.0])
def test_an_interrupt_while_ray_starts_leaves_no_process(after_s: float) -> None:
    mark = f"{os.getpid()}-{after_s}"
    child = subprocess.Popen(
        [sys.executable, "-c", _START],
        env={**os.environ, "TEST_MARK": mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "starting\n"
    time.sleep(after_s)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=LIMIT_S)
    assert child.returncode in (130, 0), "0 when Ray was there already"
    deadline = time.monotonic() + LIMIT_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _marked(mark: str) -> list[int]:
    """Processes that have inherited the mark."""
    pids = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"TEST_MARK={mark}".encode() in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
        except OSError:  # it has ended, or is not ours
            continue
    return pids
