"""An engine's end of weight sync. Imports only torch and the standard library, since it runs inside the
processes of other projects."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from braid.errors import EngineError

from .fingerprint import Fingerprint, of_bytes
from .links import Inlet, Piece, Run, aligned, make_inlet, runs_of
from .wire import Message, Receipt, Tally, TensorSpec, Ticket, Wire, call, specs_from

_DOING = "sending weights"


class Receiver(Protocol):
    """Receives new weights for an engine."""

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the (name, tensor) pairs of `version`, bucket by bucket, each bucket after it has been
        verified. A tensor stays valid while the caller holds a reference to it; memory without references is
        reused. The version is confirmed to the trainer when the iterator is exhausted. Raises EngineError."""
        ...

    def receive_into(self, version: int, targets: Mapping[str, Tensor]) -> Receipt:
        """Write the tensors of `version` into the targets of the same names, converted to their dtypes.
        Raises EngineError, also if names or shapes differ; the targets then hold a mixture of versions."""
        ...

    @property
    def receipt(self) -> Receipt | None:
        """Receipt of the last version received completely; None before the first."""
        ...

    def close(self) -> None:
        """Disconnect. Idempotent."""
        ...


def open_receiver(
    ticket: Ticket, *, engine: str, timeout_s: float, device: torch.device | None = None
) -> Receiver:
    """Open a receiver for the named engine. `timeout_s` limits one version, including the wait for its start;
    `device` is that of the engine's weights, for GPU transports."""
    if ticket.transport == "files":
        from .files import FileReceiver

        return FileReceiver(ticket, engine=engine, timeout_s=timeout_s)
    return LinkedReceiver(ticket, engine=engine, timeout_s=timeout_s, device=device or torch.device("cpu"))


Place = Callable[[TensorSpec, torch.device | None], Tensor]
"""Returns the memory for the bytes of a large tensor: uint8 [num_bytes], on the given device (None: any)."""


class LinkedReceiver:
    """See Receiver. Connects on construction, and again on the first use after a failure."""

    def __init__(self, ticket: Ticket, *, engine: str, timeout_s: float, device: torch.device) -> None:
        self._ticket, self._engine, self._timeout_s, self._device = ticket, engine, timeout_s, device
        self._inlet: Inlet | None = None
        self._receipt: Receipt | None = None
        self._memory = _Memory()
        self._wire: Wire | None = call(ticket, engine, time.monotonic() + timeout_s)

    @property
    def receipt(self) -> Receipt | None:
        """See Receiver."""
        return self._receipt

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """See Receiver."""
        deadline = time.monotonic() + self._timeout_s

        def opened(specs: list[TensorSpec]) -> Place:
            total = sum(max(aligned(spec.num_bytes), 64) for spec in specs)
            return _places(self._memory.take(total, self._link.device))

        try:
            self._begin(version, deadline)
            tensors: list[tuple[TensorSpec, Tensor]] = []
            for arrived in self._arriving(opened, Tally(version), deadline):
                if arrived is not None:
                    tensors.append(arrived)
                    continue
                del arrived
                while tensors:  # drop our references, so that only the caller's keep the memory
                    spec, memory = tensors.pop(0)
                    yield spec.name, _shaped(memory, spec)
                    del memory
        except GeneratorExit:
            self._drop("the engine did not load all weights")
            raise
        except BaseException as error:
            self._drop(str(error))
            raise

    def receive_into(self, version: int, targets: Mapping[str, Tensor]) -> Receipt:
        """See Receiver."""
        deadline = time.monotonic() + self._timeout_s
        missing = dict.fromkeys(targets)

        def opened(specs: list[TensorSpec]) -> Place:
            self._check_targets(specs, targets)
            return _targets(targets, self._memory)

        try:
            self._begin(version, deadline)
            for arrived in self._arriving(opened, Tally(version), deadline):
                if arrived is not None:
                    spec, memory = arrived
                    _write(memory, spec, targets[spec.name])
                    missing.pop(spec.name, None)
            if missing:
                raise EngineError(
                    f"version {version} lacks {len(missing)} of the engine's tensors, among them {next(iter(missing))}: "
                    "the models of trainer and engine differ"
                )
        except BaseException as error:
            self._drop(str(error))
            raise
        assert self._receipt is not None
        return self._receipt

    def close(self) -> None:
        """See Receiver."""
        self._drop(f"engine {self._engine} was closed")

    @property
    def _link(self) -> Inlet:
        assert self._inlet is not None, "expected `link` first"
        return self._inlet

    @property
    def _line(self) -> Wire:
        assert self._wire is not None, "not connected, see _begin"
        return self._wire

    def _begin(self, version: int, deadline: float) -> None:
        if self._wire is None:
            self._wire = call(self._ticket, self._engine, deadline)
        message = self._line.receive_any(deadline, f"requesting version {version}")
        while message["kind"] == "link":
            if self._inlet is not None:
                self._inlet.close()
            self._inlet = make_inlet(message, self._line, device=self._device, deadline=deadline)
            message = self._line.receive_any(deadline, f"requesting version {version}")
        if message["kind"] != "begin":
            raise EngineError(f"{self._line.peer} sent {message['kind']!r} instead of 'begin'")
        if message["version"] != version:
            raise EngineError(
                f"engine {self._engine} expects version {version} of the weights, but the trainer sends version "
                f"{message['version']}: one of them missed a round"
            )

    def _arriving(
        self, opened: Callable[[list[TensorSpec]], Place], tally: Tally, deadline: float
    ) -> Iterator[tuple[TensorSpec, Tensor] | None]:
        """Yield the spec and bytes of each tensor as it arrives, and None after each bucket, when all tensors
        so far have been verified. If the next bucket is already announced, its pieces are requested while the
        last ones of the current bucket are in transit."""
        link, due = self._link, deque[_Due]()
        last: Message = {}

        def pieces() -> Iterator[Piece | None]:
            nonlocal last
            number, bucket = 0, _Bucket(0, [])
            while True:
                while due and not self._line.is_readable():
                    yield None
                last = self._line.receive_any(deadline, _DOING)
                if last["kind"] == "fingerprints":
                    bucket.sent = last["values"]
                    continue
                if last["kind"] != "bucket":
                    return
                if last["index"] != number:
                    raise EngineError(f"received bucket {last['index']} instead of {number}")
                bucket = _Bucket(number, specs_from(last))
                number += 1
                place = opened(bucket.specs)
                for piece, memory in _pieces(bucket, place, link):
                    due.append(piece)
                    yield memory, piece.of
                del place

        for _ in link.take(pieces(), deadline):
            piece = due.popleft()
            bucket = piece.bucket
            yield from piece.arrived()
            if piece.ends_bucket:
                if bucket.sent is None:
                    bucket.sent = self._line.receive("fingerprints", deadline, _DOING)["values"]
                self._compare(bucket, tally)
                del piece, bucket  # they hold the bucket's memory
                yield None
        self._end(last, tally, deadline)

    def _compare(self, bucket: _Bucket, tally: Tally) -> None:
        # All values in one go: code that has not run for a while takes three times as long.
        found = [of.value() for of in bucket.found]
        bucket.found.clear()
        wrong = [s.name for s, a, b in zip(bucket.specs, found, bucket.sent or (), strict=True) if a != b]
        if wrong:
            shown = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
            raise EngineError(
                f"{len(wrong)} of {len(found)} tensors in bucket {bucket.index} of the weights ({shown}) differ from what the "
                f"trainer sent by {self._ticket.transport} to engine {self._engine}: the transport or this machine's memory is "
                "faulty"
            )
        for spec, value in zip(bucket.specs, found, strict=True):
            tally.add(spec, value)

    def _end(self, message: Message, tally: Tally, deadline: float) -> None:
        receipt = tally.receipt()
        if message["kind"] != "end" or message["fingerprint"] != receipt.fingerprint:
            raise EngineError(
                f"engine {self._engine} received {receipt.num_tensors} tensors of version {receipt.version}, but the trainer sent "
                f"{message.get('num_tensors')}, or in a different order"
            )
        self._line.send({"kind": "done", "fingerprint": receipt.fingerprint}, deadline, _DOING)
        self._receipt = receipt

    def _check_targets(self, specs: list[TensorSpec], targets: Mapping[str, Tensor]) -> None:
        for spec in specs:
            if spec.name not in targets or tuple(targets[spec.name].shape) != spec.shape:
                has = f"of shape {tuple(targets[spec.name].shape)}" if spec.name in targets else "unknown"
                raise EngineError(
                    f"the trainer sends {spec.name} of shape {spec.shape}, which is {has} in engine {self._engine}: the models "
                    "of trainer and engine differ"
                )

    def _drop(self, why: str) -> None:
        if self._wire is not None:
            self._wire.close(why)  # first, so that the sender gets the reason before the group breaks
            self._wire = None
        if self._inlet is not None:
            self._inlet.close()
            self._inlet = None


@dataclass(slots=True)
class _Bucket:
    """Tensors that are verified together."""

    index: int
    specs: list[TensorSpec]
    found: list[Fingerprint] = field(default_factory=list)
    """Fingerprints of the tensors that have arrived."""
    sent: list[str] | None = None
    """The sender's fingerprints; None until received."""


@dataclass(slots=True)
class _Due:
    """A requested piece, with what to do on its arrival."""

    bucket: _Bucket
    run: Run
    memory: Tensor
    """Memory of the whole run."""
    of: Fingerprint | None
    """Fingerprint of a large tensor; None for a run of small ones."""
    ends_run: bool
    ends_bucket: bool

    def arrived(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Yield the tensors that this piece completes, and record their fingerprints."""
        if self.of is not None:
            if self.ends_run:
                self.bucket.found.append(self.of)
                yield self.run.specs[0], self.memory
            return
        for spec, offset in zip(self.run.specs, self.run.offsets, strict=True):
            part = self.memory[offset : offset + spec.num_bytes]
            self.bucket.found.append(of_bytes(spec.torch_dtype, spec.shape, part))
            yield spec, part


def _pieces(bucket: _Bucket, place: Place, link: Inlet) -> Iterator[tuple[_Due, Tensor]]:
    """The pieces of a bucket in order, each with the memory that it fills."""
    runs = runs_of(bucket.specs, link.piece_bytes)
    for run in runs:
        if run.is_packed:
            memory, of = torch.empty(run.num_bytes, dtype=torch.uint8, device=link.device), None
        else:
            spec = run.specs[0]
            memory = place(spec, link.device)
            of = Fingerprint(spec.torch_dtype, spec.shape, memory, link.piece_bytes)
        parts = memory.split(link.piece_bytes)
        for number, part in enumerate(parts, start=1):
            ends = number == len(parts)
            yield _Due(bucket, run, memory, of, ends, ends and run is runs[-1]), part


class _Memory:
    """Buffers for buckets. On the CPU they are reused once no tensor refers to them, since allocating fresh
    memory costs as much as a copy into it."""

    _MOST = 3

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []

    def take(self, num_bytes: int, device: torch.device | None) -> Tensor:
        """Uninitialised memory, uint8 [num_bytes]."""
        if device is not None and device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        size = num_bytes + _CACHE_LINE
        self._buffers = [b for b in self._buffers if len(b) >= size][-self._MOST :]
        free = [i for i in range(len(self._buffers)) if self._is_free(i)]
        if not free:
            self._buffers.append(bytearray(size))
        memory = torch.frombuffer(self._buffers[free[0] if free else -1], dtype=torch.uint8)
        start = -memory.data_ptr() % _CACHE_LINE
        return memory[start : start + num_bytes]

    def _is_free(self, index: int) -> bool:
        """Whether no tensor refers to a buffer: two references are those of the list and of getrefcount."""
        return sys.getrefcount(self._buffers[index]) <= 2


_CACHE_LINE = 64


def _places(bucket: Tensor) -> Place:
    """Place large tensors one after the other in a bucket's memory."""
    used = 0

    def place(spec: TensorSpec, _: torch.device | None) -> Tensor:
        nonlocal used
        start, used = used, used + aligned(spec.num_bytes)
        return bucket[start : start + spec.num_bytes]

    return place


def _targets(targets: Mapping[str, Tensor], memory: _Memory) -> Place:
    """Place a tensor directly in its target if device, dtype and memory layout match the received bytes, else
    in a temporary buffer."""

    def place(spec: TensorSpec, device: torch.device | None) -> Tensor:
        target = targets[spec.name].detach()
        is_here = target.device == device or (device is None and target.device.type == "cpu")
        if is_here and target.dtype == spec.torch_dtype and _is_plain(target):
            return target.view(-1).view(torch.uint8)
        return memory.take(spec.num_bytes, device)

    return place


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 8 == 0


def _shaped(memory: Tensor, spec: TensorSpec) -> Tensor:
    if not spec.num_bytes:
        return torch.empty(spec.shape, dtype=spec.torch_dtype, device=memory.device)
    return memory.view(spec.torch_dtype).view(spec.shape)


@torch.no_grad()
def _write(memory: Tensor, spec: TensorSpec, target: Tensor) -> None:
    if memory.data_ptr() != target.data_ptr():
        target.copy_(_shaped(memory, spec))
