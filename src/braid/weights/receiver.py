"""An engine's end of a publication. Imports torch and the standard library only: it lives in the processes of other projects."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from braid.errors import EngineError

from .fingerprint import Fingerprint, of_bytes
from .links import Inlet, Run, aligned, make_inlet, runs_of
from .wire import Message, Receipt, Tally, TensorSpec, Ticket, Wire, call, specs_from

_DOING = "sending weights"


class Receiver(Protocol):
    """What an engine takes new weights from."""

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `version`, bucket by bucket, each bucket after it was checked. They are the caller's for as long as it
        holds them; memory of those that it has let go is used again. The version is taken over once the iterator has ended.
        Raises EngineError."""
        ...

    def receive_into(self, version: int, targets: Mapping[str, Tensor]) -> Receipt:
        """Write the tensors of `version` into those of the same names, converted to their types. Raises EngineError, also when names
        or shapes differ; the targets then hold a mixture."""
        ...

    @property
    def receipt(self) -> Receipt | None:
        """Of the last version that arrived whole."""
        ...

    def close(self) -> None:
        """Can be called twice."""
        ...


def open_receiver(
    ticket: Ticket, *, engine: str, timeout_s: float, device: torch.device | None = None
) -> Receiver:
    """A receiver for the engine of this name. `timeout_s` is the longest that one version may take, waiting for its beginning
    included; `device` is where the engine's weights are, for the transports of GPUs."""
    if ticket.transport == "files":
        from .files import FileReceiver

        return FileReceiver(ticket, engine=engine, timeout_s=timeout_s)
    return LinkedReceiver(ticket, engine=engine, timeout_s=timeout_s, device=device or torch.device("cpu"))


Place = Callable[[TensorSpec, torch.device | None], Tensor]
"""Where the bytes of a large tensor go: uint8 [num_bytes], on the device if one is needed."""


class LinkedReceiver:
    """See Receiver. Connects at once, and again after a failure."""

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
        try:
            self._begin(version, deadline)
            tally = Tally(version)
            for index, specs in self._announced(tally, deadline):
                total = sum(max(aligned(spec.num_bytes), 64) for spec in specs)
                bucket = self._memory.take(total, self._link.device)
                place = _places(bucket)
                tensors = list(self._fill(index, specs, place, tally, deadline))
                del bucket, place
                while tensors:  # without a reference of ours the caller's own keeps the memory
                    name, memory, spec = tensors.pop(0)
                    yield name, _shaped(memory, spec)
                    del memory
        except GeneratorExit:
            self._drop("the engine did not take all of the weights")
            raise
        except BaseException as error:
            self._drop(str(error))
            raise

    def receive_into(self, version: int, targets: Mapping[str, Tensor]) -> Receipt:
        """See Receiver."""
        deadline = time.monotonic() + self._timeout_s
        missing = dict.fromkeys(targets)
        try:
            self._begin(version, deadline)
            tally = Tally(version)
            for index, specs in self._announced(tally, deadline):
                self._check_targets(specs, targets)
                place = _targets(targets, self._memory)
                for name, memory, spec in self._fill(index, specs, place, tally, deadline):
                    _write(memory, spec, targets[name])
                    missing.pop(name, None)
            if missing:
                raise EngineError(
                    f"version {version} came without {len(missing)} of the engine's tensors, among them {next(iter(missing))}: "
                    "the trainer's and the engine's model are not the same"
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
        assert self._inlet is not None, "`link` comes before everything else"
        return self._inlet

    @property
    def _line(self) -> Wire:
        assert self._wire is not None, "connected in _begin"
        return self._wire

    def _begin(self, version: int, deadline: float) -> None:
        if self._wire is None:
            self._wire = call(self._ticket, self._engine, deadline)
        message = self._line.receive_any(deadline, f"asked for version {version}")
        while message["kind"] == "link":
            if self._inlet is not None:
                self._inlet.close()
            self._inlet = make_inlet(message, self._line, device=self._device, deadline=deadline)
            message = self._line.receive_any(deadline, f"asked for version {version}")
        if message["kind"] != "begin":
            raise EngineError(f"{self._line.peer} said {message['kind']!r} where 'begin' was due")
        if message["version"] != version:
            raise EngineError(
                f"engine {self._engine} waits for version {version} of the weights and the trainer sends version "
                f"{message['version']}: one of them has missed a round"
            )

    def _announced(self, tally: Tally, deadline: float) -> Iterator[tuple[int, list[TensorSpec]]]:
        """The buckets of a version; at its end the comparison of all of it."""
        number = 0
        while (message := self._line.receive_any(deadline, _DOING))["kind"] == "bucket":
            if message["index"] != number:
                raise EngineError(f"bucket {message['index']} came where {number} was due")
            yield number, specs_from(message)
            number += 1
        self._end(message, tally, deadline)

    def _fill(
        self, index: int, specs: list[TensorSpec], place: Place, tally: Tally, deadline: float
    ) -> Iterator[tuple[str, Tensor, TensorSpec]]:
        """Name, bytes and description of each tensor of a bucket. The comparison is made when the last has been taken."""
        link = self._link
        runs = runs_of(specs, link.piece_bytes)
        held: list[tuple[Run, Tensor]] = []

        def pieces() -> Iterator[Tensor]:
            for run in runs:
                memory = _packed(run, link.device) if run.is_packed else place(run.specs[0], link.device)
                held.append((run, memory))
                yield from memory.split(link.piece_bytes)

        found: list[Fingerprint] = []
        arriving = link.take(pieces(), deadline)
        for number in range(len(runs)):
            next(arriving)
            run, memory = held[number]
            if run.is_packed:
                for spec, offset in zip(run.specs, run.offsets, strict=True):
                    part = memory[offset : offset + spec.num_bytes]
                    found.append(of_bytes(spec.torch_dtype, spec.shape, part))
                    yield spec.name, part, spec
                continue
            (spec,) = run.specs
            of = Fingerprint(spec.torch_dtype, spec.shape, memory, link.piece_bytes)
            of.add()
            for _ in range(-(-run.num_bytes // link.piece_bytes) - 1):
                next(arriving)
                of.add()
            found.append(of)
            yield spec.name, memory, spec
        link.flush(deadline)
        # At once for all, since code that was not run for a while takes three times as long.
        self._compare(index, specs, [of.value() for of in found], tally, deadline)

    def _compare(
        self, index: int, specs: list[TensorSpec], found: list[str], tally: Tally, deadline: float
    ) -> None:
        sent = self._line.receive("fingerprints", deadline, _DOING)["values"]
        wrong = [spec.name for spec, a, b in zip(specs, found, sent, strict=True) if a != b]
        if wrong:
            shown = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
            raise EngineError(
                f"{len(wrong)} of {len(specs)} tensors in bucket {index} of the weights ({shown}) are not what the trainer sent "
                f"by {self._ticket.transport} to engine {self._engine}: the transport or this machine's memory is at fault"
            )
        for spec, value in zip(specs, found, strict=True):
            tally.add(spec, value)

    def _end(self, message: Message, tally: Tally, deadline: float) -> None:
        receipt = tally.receipt()
        if message["kind"] != "end" or message["fingerprint"] != receipt.fingerprint:
            raise EngineError(
                f"engine {self._engine} got {receipt.num_tensors} tensors of version {receipt.version} and the trainer sent "
                f"{message.get('num_tensors')}, or in another order"
            )
        self._line.send({"kind": "done", "fingerprint": receipt.fingerprint}, deadline, _DOING)
        self._receipt = receipt

    def _check_targets(self, specs: list[TensorSpec], targets: Mapping[str, Tensor]) -> None:
        for spec in specs:
            if spec.name not in targets or tuple(targets[spec.name].shape) != spec.shape:
                has = f"of shape {tuple(targets[spec.name].shape)}" if spec.name in targets else "not known"
                raise EngineError(
                    f"the trainer sends {spec.name} of shape {spec.shape}, which in engine {self._engine} is {has}: their "
                    "models are not the same"
                )

    def _drop(self, why: str) -> None:
        if self._wire is not None:
            self._wire.close(why)  # first, so that the sender hears why before it sees that a group broke
            self._wire = None
        if self._inlet is not None:
            self._inlet.close()
            self._inlet = None


class _Memory:
    """Memory for buckets on CPU, used again when no tensor in it is left. Fresh memory costs as much as a copy into it."""

    _MOST = 3

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []

    def take(self, num_bytes: int, device: torch.device | None) -> Tensor:
        """uint8 [num_bytes], of any content."""
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
        """A tensor's memory has a reference to its buffer; the list has one, and so has getrefcount."""
        return sys.getrefcount(self._buffers[index]) <= 2


_CACHE_LINE = 64


def _places(bucket: Tensor) -> Place:
    """Large tensors one after the other in a bucket's memory."""
    used = 0

    def place(spec: TensorSpec, _: torch.device | None) -> Tensor:
        nonlocal used
        start, used = used, used + aligned(spec.num_bytes)
        return bucket[start : start + spec.num_bytes]

    return place


def _targets(targets: Mapping[str, Tensor], memory: _Memory) -> Place:
    """In the engine's own tensor where its memory is as the bytes that travel, else beside it."""

    def place(spec: TensorSpec, device: torch.device | None) -> Tensor:
        target = targets[spec.name].detach()
        is_here = target.device == device or (device is None and target.device.type == "cpu")
        if is_here and target.dtype == spec.torch_dtype and _is_plain(target):
            return target.view(-1).view(torch.uint8)
        return memory.take(spec.num_bytes, device)

    return place


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 8 == 0


def _packed(run: Run, device: torch.device | None) -> Tensor:
    return torch.empty(run.num_bytes, dtype=torch.uint8, device=device)


def _shaped(memory: Tensor, spec: TensorSpec) -> Tensor:
    if not spec.num_bytes:
        return torch.empty(spec.shape, dtype=spec.torch_dtype, device=memory.device)
    return memory.view(spec.torch_dtype).view(spec.shape)


@torch.no_grad()
def _write(memory: Tensor, spec: TensorSpec, target: Tensor) -> None:
    if memory.data_ptr() != target.data_ptr():
        target.copy_(_shaped(memory, spec))
