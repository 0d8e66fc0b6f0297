"""An engine's end of weight sync. Imports only torch and the standard library, since it runs inside the
processes of other projects."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from braid.errors import EngineError

from .fingerprint import fingerprints, first_few
from .links import Link, join_link
from .wire import Message, Receipt, TensorSpec, Ticket, Wire, call

_DOING = "sending weights"
_ALIGNMENT = 64
"""Bytes; also a multiple of every dtype's size, as views need."""
_NUM_BUFFERS = 2
_NUM_REFERENCES = 3
"""Reference count of a buffer that no tensor uses: by the list, the loop's variable and getrefcount."""


class NamedWeights(Protocol):
    """A model whose weights have names."""

    def named_weights(self) -> Iterable[tuple[str, Tensor]]: ...


class Receiver(ABC):
    """Receives new weights for an engine."""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    @abstractmethod
    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the (name, tensor) pairs of `version`, bucket by bucket, each bucket after it has been
        verified. A tensor stays valid while the caller holds a reference to it; memory without references is
        reused. The version is confirmed to the trainer when the iterator is exhausted. Raises EngineError."""

    def receive_into(self, version: int, targets: Mapping[str, Tensor]) -> None:
        """Write the tensors of `version` into the targets of the same names, converted to their dtypes.
        Raises EngineError, also if names or shapes differ; the targets then may hold a mixture of
        versions."""
        missing = dict.fromkeys(targets)
        try:
            for name, tensor in self.receive(version):
                if name not in targets or targets[name].shape != tensor.shape:
                    has = f"of shape {tuple(targets[name].shape)}" if name in targets else "unknown"
                    raise EngineError(
                        f"the trainer sends {name} of shape {tuple(tensor.shape)}, which is {has} in engine "
                        f"{self._engine}: the models of trainer and engine differ"
                    )
                targets[name].detach().copy_(tensor)
                missing.pop(name)
            if missing:
                raise EngineError(
                    f"version {version} lacks {len(missing)} of the engine's tensors, among them "
                    f"{next(iter(missing))}: the models of trainer and engine differ"
                )
        except BaseException as error:
            self._drop(str(error))
            raise

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._drop(f"engine {self._engine} was closed")

    def _verify(self, sent: Mapping[str, str], tensors: Mapping[str, Tensor], what: str, where: str) -> None:
        """Raise EngineError unless `tensors` have the names and fingerprints `sent`."""
        strange = [name for name in tensors if name not in sent]
        received = dict(zip(tensors, fingerprints(tensors.values()), strict=True))
        wrong = [name for name, value in sent.items() if received.get(name) != value]
        if wrong or strange:
            raise EngineError(
                f"{len(wrong)} of {len(sent)} tensors in {what} ({first_few(wrong or strange)}) differ from "
                f"what the trainer {where}"
            )

    @abstractmethod
    def _drop(self, why: str) -> None:
        """Disconnect, and tell the sender why."""


def open_receiver(
    ticket: Ticket, *, engine: str, timeout_s: float, device: torch.device | None = None
) -> Receiver:
    """Open a receiver for the named engine. `timeout_s` limits one version, including the wait for its start;
    `device` is that of the engine's weights, for GPU transports."""
    if ticket.transport == "files":
        from .files import FileReceiver

        return FileReceiver(ticket, engine=engine, timeout_s=timeout_s)
    return LinkedReceiver(ticket, engine=engine, timeout_s=timeout_s, device=device or torch.device("cpu"))


class LinkedReceiver(Receiver):
    """See Receiver. Connects on construction, and again on the first use after a failure."""

    def __init__(self, ticket: Ticket, *, engine: str, timeout_s: float, device: torch.device) -> None:
        super().__init__(engine)
        self._ticket, self._timeout_s, self._device = ticket, timeout_s, device
        self._link: Link | None = None
        self._buffers: list[bytearray] = []
        self._wire: Wire | None = call(ticket, engine, time.monotonic() + timeout_s)

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        deadline = time.monotonic() + self._timeout_s
        try:
            if self._wire is None:
                self._wire = call(self._ticket, self._engine, deadline)
            wire, receipt = self._wire, Receipt(version)
            link = self._begin(wire, version, deadline)
            while (message := wire.receive_any(deadline, _DOING))["kind"] == "bucket":
                yield from self._bucket(message, link, receipt, deadline)
            self._end(wire, message, receipt, deadline)
        except GeneratorExit:
            self._drop("the engine did not load all weights")
            raise
        except BaseException as error:
            self._drop(str(error))
            raise

    def _begin(self, wire: Wire, version: int, deadline: float) -> Link:
        while (message := wire.receive_any(deadline, f"requesting version {version}"))["kind"] == "link":
            if self._link is not None:
                self._link.close()
            self._link = join_link(message, wire, device=self._device, deadline=deadline)
        if message["kind"] != "begin" or self._link is None:
            raise EngineError(f"{wire.peer} sent {message['kind']!r} instead of 'begin'")
        if message["version"] != version:
            raise EngineError(
                f"engine {self._engine} expects version {version} of the weights, but the trainer sends "
                f"version {message['version']}: one of them missed a round"
            )
        return self._link

    def _bucket(
        self, message: Message, link: Link, receipt: Receipt, deadline: float
    ) -> Iterator[tuple[str, Tensor]]:
        """Receive and verify the tensors of a `bucket` message, then yield them."""
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape, _ in message["tensors"]]
        parts = self._memory([spec.num_bytes for spec in specs], link.device)
        link.transfer(parts, deadline)
        tensors = {
            spec.name: part.view(spec.torch_dtype).view(spec.shape)
            for spec, part in zip(specs, parts, strict=True)
        }
        del parts  # only the caller's references keep the memory
        sent = {name: value for name, *_, value in message["tensors"]}
        self._verify(
            sent,
            tensors,
            f"bucket {message['index']} of the weights",
            f"sent by {self._ticket.transport} to engine {self._engine}: the transport or this machine's "
            "memory is faulty",
        )
        for spec in specs:
            receipt.add(spec, sent[spec.name])
            yield spec.name, tensors.pop(spec.name)

    def _end(self, wire: Wire, message: Message, receipt: Receipt, deadline: float) -> None:
        if message["kind"] != "end" or message["fingerprint"] != receipt.fingerprint:
            raise EngineError(
                f"engine {self._engine} received {receipt.num_tensors} tensors of version "
                f"{receipt.version}, but the trainer sent {message.get('num_tensors')}, or in a different "
                "order"
            )
        wire.send({"kind": "done", "fingerprint": receipt.fingerprint}, deadline, _DOING)

    def _memory(self, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Uninitialised memory of these numbers of bytes. On the CPU that of an earlier bucket to which no
        tensor refers any more, since fresh memory costs more than a copy."""
        rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        if device.type != "cpu":
            memory = torch.empty(sum(rooms), dtype=torch.uint8, device=device)
        else:
            for buffer in self._buffers:
                if len(buffer) >= sum(rooms) and sys.getrefcount(buffer) == _NUM_REFERENCES:
                    break
            else:
                buffer = bytearray(sum(rooms) + 1)
                self._buffers = [*self._buffers, buffer][-_NUM_BUFFERS:]
            memory = torch.frombuffer(buffer, dtype=torch.uint8)[: sum(rooms)]
        return [room[:size] for room, size in zip(memory.split(rooms), sizes, strict=True)]

    def _drop(self, why: str) -> None:
        if self._wire is not None:
            self._wire.close(why)  # first, so that the sender gets the reason before the group breaks
            self._wire = None
        if self._link is not None:
            self._link.close()
            self._link = None


class ModelReceiver:
    """Receives versions directly into the tensors of a model in this process. Connects at the first."""

    def __init__(self, name: str, model: NamedWeights, timeout_s: float, device: torch.device) -> None:
        """A sender addresses it by `name`. `timeout_s` is the time limit per version."""
        self.receivers = (name,)
        self._model, self._timeout_s, self._device = model, timeout_s, device
        self._receiver: Receiver | None = None

    def receive(self, version: int, ticket: Mapping[str, Any] | None) -> None:
        """Receive `version` from the sender of the ticket. Raises EngineError like Receiver.receive_into."""
        assert ticket is not None, "the sender is in another process"
        if self._receiver is None:
            (name,) = self.receivers
            self._receiver = open_receiver(
                Ticket(**ticket), engine=name, timeout_s=self._timeout_s, device=self._device
            )
        self._receiver.receive_into(version, dict(self._model.named_weights()))

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if self._receiver is not None:
            self._receiver.close()
