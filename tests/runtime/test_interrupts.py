"""Signals at moments that cannot be cut in two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.leftovers import LIMIT_S

from braid.runtime.interrupts import interrupts_held

_START = """
import sys
from braid.config.cluster import ClusterConfig
from braid.runtime.machines import connect
print("starting", flush=True)
try:
    connect(ClusterConfig(), num_processes=1)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_signal_that_comes_while_held_is_told_afterwards_and_later_ones_interrupt_again() -> None:
    with interrupts_held() as caught:
        os.kill(os.getpid(), signal.SIGINT)
        assert caught == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("after_s", [0.5, 2.0])
def test_an_interrupt_while_ray_starts_leaves_nothing_of_it(after_s: float) -> None:
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
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"TEST_MARK={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found
