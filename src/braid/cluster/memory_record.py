"""Memory use of a run, written after each round (`train.record_memory`).

memory/round_000003.json     bytes held by each role, and peak of the process or device in each phase
memory/round_000003.pickle   on CUDA: the allocator's snapshot, for https://docs.pytorch.org/memory_viz
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from braid.errors import ReportError, disk_fix
from braid.report.files import write_atomically

Held = Mapping[str, Mapping[str, int]]
"""role -> what -> bytes."""
_HISTORY = 100_000
"""Number of allocations and frees in a snapshot of CUDA's allocator."""


class MemoryRecorder:
    """Records memory phase by phase; `write` stores the record of a round and starts a new one."""

    def __init__(self, folder: Path, device: torch.device, held: Callable[[], Held]) -> None:
        """`held` returns the bytes that each role currently holds."""
        self._folder, self._device, self._held = folder, device, held
        self._peaks: dict[str, int] = {}
        if device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the peak memory within the context under `name`."""
        self._forget_peak()
        yield
        self._peaks[name] = max(self._peaks.get(name, 0), self._peak())

    def write(self, round_: int) -> None:
        """Store the record of a round. Raises ReportError if it cannot be written."""
        record = {
            "round": round_,
            "device": str(self._device),
            "held_bytes": self._held(),
            "peak_bytes": self._peaks,
            "rss_bytes": _status("VmRSS") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        file = self._folder / f"round_{round_:06d}.json"
        try:
            self._folder.mkdir(exist_ok=True)
            write_atomically(file, [json.dumps(record, indent=2) + "\n"])
            if self._device.type == "cuda":
                torch.cuda.memory._dump_snapshot(str(file.with_suffix(".pickle")))
        except OSError as error:
            raise ReportError(f"cannot write {file}: {error.strerror or error}; {disk_fix(error)}") from error
        self._peaks = {}

    def _forget_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # without /proc, the peak is that since the start
                Path("/proc/self/clear_refs").write_text("5")

    def _peak(self) -> int:
        """Peak bytes allocated on CUDA, else resident in this process."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(name: str) -> int | None:
    """A field of Linux's /proc/self/status, in bytes; None elsewhere."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
