"""Publication of weights against a plain copy of the same bytes by the same transport, between two processes.

A publication names, fingerprints on both sides and compares every tensor; a plain copy is one stretch of
memory of the same size that goes over as it is, in steps that overlap on both sides:

    shared memory   by memcpy through two slots, in steps of 4 MiB (small; less than that is slower) and of a whole bucket
    gloo            by torch.distributed.broadcast, in steps of 2 MiB and of a whole bucket

The figure to reach is 50 % of the faster of the two plain copies, each repetition compared within itself and
the median taken. Also shown: `receive` into memory of the receiver's own, which an engine like vLLM then
copies from, and `receive_into` tensors of the same names.

    python benchmarks/weight_sync.py [--mib 256] [--bucket-mib 32] [--repeats 15]

Exits with 1 when a transport misses the figure. Needs two cores that do nothing else.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import mmap
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from braid.weights.receiver import open_receiver
from braid.weights.sender import open_sender
from braid.weights.sending import SendOptions

GOAL = 0.5
STEPS = {"shared_memory": 2**22, "gloo": 2**21}
"""The small steps of a plain copy."""
Transport = Literal["shared_memory", "gloo"]


@dataclass(frozen=True)
class Case:
    transport: Transport
    num_bytes: int
    bucket_bytes: int
    repeats: int
    folder: str


def weights(num_bytes: int) -> dict[str, Tensor]:
    """Float32 tensors in the shapes of a model with 1,024 hidden dimensions."""
    shapes = {"q": (1024, 1024), "k": (512, 1024), "v": (512, 1024), "o": (1024, 1024), "norm_1": (1024,)}
    shapes |= {"gate": (2816, 1024), "up": (2816, 1024), "down": (1024, 2816), "norm_2": (1024,)}
    out: dict[str, Tensor] = {}
    left, layer = num_bytes // 4, 0
    while left:
        for name, shape in shapes.items():
            size = min(left, torch.Size(shape).numel())
            if size:
                out[f"layers.{layer}.{name}"] = torch.randn(size).view(
                    -1 if size < 1024 else (-1, size % 1024 or 1024)
                )
            left -= size
        layer += 1
    return out


class Plain:
    """One end of a plain copy of a flat tensor in `step_bytes`."""

    def __init__(self, case: Case, rank: int, line: Connection) -> None:
        self._case, self._rank, self._line = case, rank, line
        if case.transport == "gloo":
            timeout = datetime.timedelta(seconds=60)
            dist.init_process_group(
                "gloo", init_method=f"file://{case.folder}/gloo", rank=rank, world_size=2, timeout=timeout
            )
            return
        path = Path(case.folder, "plain")
        if rank == 0:
            path.write_bytes(bytes(2 * case.bucket_bytes))
            line.send_bytes(b"made")
        else:
            line.recv_bytes()
        with path.open("r+b") as file:
            self._memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    def copy(self, flat: Tensor, step_bytes: int) -> None:
        steps = list(flat.split(step_bytes))
        if self._case.transport == "gloo":
            works = [dist.broadcast(step, 0, async_op=True) for step in steps]
            for work in works:
                assert work is not None
                work.wait()
            if self._rank == 0:
                self._line.recv_bytes()
            else:
                self._line.send_bytes(b"done")
            return
        slots = self._memory[: 2 * step_bytes].view(2, step_bytes)
        for number, step in enumerate(steps):
            slot = slots[number % 2][: step.numel()]
            if self._rank == 0:
                if number > 1:
                    self._line.recv_bytes()
                ctypes.memmove(slot.data_ptr(), step.data_ptr(), step.numel())
                self._line.send_bytes(b"filled")
            else:
                self._line.recv_bytes()
                ctypes.memmove(step.data_ptr(), slot.data_ptr(), step.numel())
                self._line.send_bytes(b"freed")
        if self._rank == 0:
            for _ in range(min(2, len(steps))):
                self._line.recv_bytes()


def receive(case: Case, line: Connection) -> None:
    """The engine's process."""
    torch.set_num_threads(1)
    plain = Plain(case, 1, line)
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights(case.num_bytes).items()}
    flat = torch.zeros(case.num_bytes, dtype=torch.uint8)
    receiver = open_receiver(line.recv(), engine="engine", timeout_s=60)
    for round_ in range(case.repeats + 1):
        for step in (STEPS[case.transport], case.bucket_bytes):
            plain.copy(flat, step)
        receiver.receive_into(2 * round_, targets)
        for _ in receiver.receive(2 * round_ + 1):
            pass
    receiver.close()


def measure(case: Case) -> Iterator[tuple[float, float, float, float]]:
    """Seconds of plain copies in small and in large steps, of `receive_into` and of `receive`; the first
    round is left out."""
    line, far = Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(case, far), daemon=True)
    process.start()
    plain = Plain(case, 0, cast("Connection", line))
    tensors = weights(case.num_bytes)
    flat = torch.randint(0, 255, (case.num_bytes,), dtype=torch.uint8)
    sender = open_sender(("engine",), SendOptions(case.transport, case.bucket_bytes, 60.0))
    line.send(sender.ticket)
    for round_ in range(case.repeats + 1):
        seconds: list[float] = []
        for step in (STEPS[case.transport], case.bucket_bytes):
            start = time.perf_counter()
            plain.copy(flat, step)
            seconds.append(time.perf_counter() - start)
        for version in (2 * round_, 2 * round_ + 1):
            start = time.perf_counter()
            sender.send(version, tensors.items())
            seconds.append(time.perf_counter() - start)
        if round_:
            yield (seconds[0], seconds[1], seconds[2], seconds[3])
    process.join()
    sender.close()
    if case.transport == "gloo":
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--bucket-mib", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--transports", nargs="+", default=["shared_memory", "gloo"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    misses = False
    print(
        "transport      plain, small  plain, bucket  receive_into        receive   (GB/s; share of the "
        "faster plain)"
    )
    for transport in args.transports:
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=in_memory) as folder:
            case = Case(transport, args.mib * 2**20, args.bucket_mib * 2**20, args.repeats, folder)
            rounds = list(measure(case))
        small, bucket, into, out = (
            case.num_bytes / statistics.median(column) / 1e9 for column in zip(*rounds, strict=True)
        )
        shares = [statistics.median(min(r[:2]) / r[place] for r in rounds) for place in (2, 3)]
        misses |= max(shares) < GOAL
        print(
            f"{transport:<13} {small:>13.2f} {bucket:>14.2f} {into:>7.2f} ({shares[0]:>4.0%}) {out:>7.2f} "
            f"({shares[1]:>4.0%})",
            flush=True,
        )
    sys.exit(misses)


if __name__ == "__main__":
    main()
