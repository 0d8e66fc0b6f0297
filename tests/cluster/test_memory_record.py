"""Memory records: a file per round with the held memory and each phase's peak."""

from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path

import pytest
import torch

from braid.cluster.memory_record import MemoryRecorder
from braid.errors import ReportError

CPU = torch.device("cpu")
MIB = 2**20


def _record(folder: Path, round_: int) -> dict:
    return json.loads((folder / f"round_{round_:06d}.json").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be reset")
def test_a_phase_has_its_own_peak(tmp_path: Path) -> None:
    recorder = MemoryRecorder(tmp_path / "memory", CPU, lambda: {"policy": {"weights": 12}})
    with recorder.phase("small"):
        pass
    # Pages of its own: memory that was freed before cannot serve it.
    with recorder.phase("large"), mmap.mmap(-1, 64 * MIB) as held:
        held.write(b"1" * (64 * MIB))
    recorder.write(3)
    record = _record(tmp_path / "memory", 3)
    assert record["round"] == 3
    assert record["held_bytes"] == {"policy": {"weights": 12}}
    peaks = record["peak_bytes"]
    assert peaks["large"] - peaks["small"] > 60 * MIB
    assert 0 < record["rss_bytes"] <= peaks["large"] + MIB


def test_each_round_starts_anew_and_a_phase_that_comes_twice_has_its_greatest_peak(tmp_path: Path) -> None:
    recorder = MemoryRecorder(tmp_path, CPU, dict)
    for _ in range(2):
        with recorder.phase("rollout"):
            pass
    recorder.write(1)
    with recorder.phase("update"):
        pass
    recorder.write(2)
    assert set(_record(tmp_path, 1)["peak_bytes"]) == {"rollout"}
    assert set(_record(tmp_path, 2)["peak_bytes"]) == {"update"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "memory").touch()
    recorder = MemoryRecorder(tmp_path / "memory", CPU, dict)
    with pytest.raises(ReportError, match=r"cannot write .*round_000001\.json"):
        recorder.write(1)
