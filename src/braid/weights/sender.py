"""The trainer's end of weight sync."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from braid.errors import EngineError

from .files import FileSender
from .fingerprint import Fingerprint, Weights, bytes_of, of_bytes
from .links import Outlet, Run, make_outlet, own_address, runs_of
from .sending import Bucket, Sender, SendOptions, buckets_of
from .wire import Caller, Receipt, Tally, Ticket, Wire, readable, specs_message, tell, wait_any

_LAST_WORDS_S = 0.5
"""Seconds to wait for engines' error messages after a failure."""
_MAX_CALLERS = 128
"""Most unauthenticated connections; beyond that, the oldest are dropped."""


def open_sender(engines: Sequence[str], options: SendOptions) -> Sender:
    """Open a sender for the named engines."""
    if options.transport == "files":
        return FileSender(options)
    return LinkedSender(engines, options)


def join_send(sender: Sender | None, version: int, weights: Weights) -> Receipt | None:
    """Send on the rank that has the sender; the others exhaust `weights`, because gathering them is a
    collective."""
    if sender is not None:
        return sender.send(version, weights)
    for _ in weights:
        pass
    return None


class LinkedSender:
    """See Sender. For connected engines: gathering the next bucket overlaps with sending the last."""

    def __init__(self, engines: Sequence[str], options: SendOptions) -> None:
        assert engines, "a sender needs at least one engine"
        assert len(set(engines)) == len(engines), f"names of engines must be unique: {engines}"
        self._engines, self._options = tuple(engines), options
        is_local = options.transport in ("shared_memory", "cuda_ipc")
        self._host = options.host or ("127.0.0.1" if is_local else own_address())
        self._secret = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server((self._host, 0), family=family, backlog=len(engines) + 128)
        self._listener.settimeout(0.0)
        self._callers: list[Caller] = []
        self._wires: dict[str, Wire] = {}
        self._outlet: Outlet | None = None

    @property
    def ticket(self) -> Ticket:
        """See Sender."""
        port: int = self._listener.getsockname()[1]
        return Ticket(self._options.transport, self._host, port, self._secret)

    def send(self, version: int, weights: Weights) -> Receipt:
        """See Sender."""
        deadline = time.monotonic() + self._options.timeout_s
        rest = iter(weights)
        try:
            outlet = self._linked(version, deadline)
            tell(self._wires, {"kind": "begin", "version": version}, deadline, "receiving weights")
            tally = Tally(version)
            self._stream(
                buckets_of(rest, self._options.bucket_bytes, self._options.dtype), outlet, tally, deadline
            )
            return self._finish(tally.receipt(), deadline)
        except BaseException as error:
            named = self._named(error, version)
            self._drop(str(named))
            for _ in rest:  # gathering them may be a collective that other ranks are in
                pass
            raise named from error

    def close(self) -> None:
        """See Sender."""
        self._drop("the trainer has closed its sender")
        for caller in self._callers:
            caller.connection.close()
        self._listener.close()

    def _linked(self, version: int, deadline: float) -> Outlet:
        """Wait for all engines to connect and return the link to them, rebuilt if any of them has
        reconnected."""
        self._admit(0.0)
        while missing := [name for name in self._engines if name not in self._wires]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError(
                    f"engine {', '.join(missing)} did not connect for version {version} within {self._options.timeout_s:g} s "
                    "(cluster.call_timeout_s); its log shows what it was doing"
                )
            self._admit(min(left, 1.0))
        if self._outlet is None:
            wires = {name: self._wires[name] for name in self._engines}
            self._outlet = make_outlet(
                self._options.transport,
                wires,
                host=self._host,
                device=self._options.device or torch.device("cpu"),
                deadline=deadline,
                timeout_s=self._options.timeout_s,
            )
        return self._outlet

    def _admit(self, wait_s: float) -> None:
        """Accept pending connections of engines, waiting at most `wait_s` for the first. Other peers are
        dropped."""
        until = time.monotonic() + wait_s
        while True:
            left = max(0.0, until - time.monotonic())
            ready = readable([self._listener, *self._callers], left)
            if self._listener in ready:
                with contextlib.suppress(OSError):  # the peer has disconnected again
                    self._callers.append(Caller.accepted(self._listener.accept()[0]))
            for caller in list(self._callers):
                if (heard := caller.hear(self._secret)) is not None:
                    self._callers.remove(caller)
                    self._take_in(*heard)
                    until = 0.0
            self._callers = [caller for caller in self._callers if caller.fileno() >= 0][-_MAX_CALLERS:]
            if not ready and time.monotonic() >= until:
                return

    def _take_in(self, name: str, wire: Wire) -> None:
        refusal = self._refusal(name)
        if refusal is not None:
            wire.close(refusal)
            return
        if name in self._wires:
            self._wires.pop(name).close("replaced by another engine of the same name")
        self._wires[name] = wire
        self._unlink()

    def _refusal(self, name: str) -> str | None:
        """Reason to refuse an engine of this name, or None."""
        if name not in self._engines:
            return f"unknown engine {name}; this sender serves {', '.join(self._engines)}"
        old = self._wires.get(name)
        # Engines send nothing between two versions: a readable connection means that the old engine died.
        if old is not None and self._options.existing == "refuse" and not old.is_readable():
            return f"engine {name} is already connected; stop the other one first, or set rollout.publish.existing_group=replace"
        return None

    def _stream(self, buckets: Iterator[Bucket], outlet: Outlet, tally: Tally, deadline: float) -> None:
        """Gather buckets in this thread, since that may be a collective, and send them from a second one."""
        gathered: queue.Queue[Bucket | None] = queue.Queue(maxsize=1)
        failures: list[BaseException] = []

        def run() -> None:
            try:
                while (bucket := gathered.get()) is not None:
                    self._send_bucket(bucket, outlet, tally, deadline)
                    del bucket
            except BaseException as error:  # re-raised in the first thread
                failures.append(error)
                while gathered.get() is not None:
                    pass

        thread = threading.Thread(target=run, name="braid-publish", daemon=True)
        thread.start()
        try:
            for bucket in buckets:
                if failures:
                    break
                gathered.put(bucket)
        finally:
            gathered.put(None)
            thread.join()
        if failures:
            raise failures[0]
        outlet.flush(deadline)

    def _send_bucket(self, bucket: Bucket, outlet: Outlet, tally: Tally, deadline: float) -> None:
        specs = [spec for spec, _ in bucket.tensors]
        tell(self._wires, specs_message(bucket.index, specs), deadline, "receiving weights")
        values = iter(tensor for _, tensor in bucket.tensors)
        sums: list[Fingerprint] = []
        for run in runs_of(specs, outlet.piece_bytes):
            tensors = [bytes_of(next(values)) for _ in run.specs]
            sums += _send_run(run, tensors, outlet, deadline)
        found = [of.value() for of in sums]
        tell(self._wires, {"kind": "fingerprints", "values": found}, deadline, "receiving weights")
        for spec, value in zip(specs, found, strict=True):
            tally.add(spec, value)

    def _finish(self, receipt: Receipt, deadline: float) -> Receipt:
        end = {"kind": "end", "num_tensors": receipt.num_tensors, "fingerprint": receipt.fingerprint}
        tell(self._wires, end, deadline, "receiving weights")
        for wire in self._wires.values():
            answer = wire.receive("done", deadline, f"loading version {receipt.version}")
            if answer["fingerprint"] != receipt.fingerprint:
                raise EngineError(f"{wire.peer} loaded different weights than were sent")
        return receipt

    def _named(self, error: BaseException, version: int) -> BaseException:
        """The error with the engines' own error messages added: a process group reports only that it
        broke."""
        if not isinstance(error, EngineError):
            return error
        told = [str(error)]
        wait_any(self._wires.values(), _LAST_WORDS_S)
        for wire in self._wires.values():
            try:
                while wire.is_readable():
                    wire.receive_any(time.monotonic() + 0.1, "receiving weights")
            except EngineError as said:
                if str(said) not in told:
                    told.insert(0, str(said))
        return EngineError(
            f"syncing version {version} by {self._options.transport} failed: {'; '.join(told)}"
        )

    def _unlink(self) -> None:
        if self._outlet is not None:
            self._outlet.close()
            self._outlet = None

    def _drop(self, why: str) -> None:
        self._unlink()
        for wire in self._wires.values():
            wire.close(why)
        self._wires = {}


def _send_run(run: Run, tensors: Sequence[Tensor], outlet: Outlet, deadline: float) -> list[Fingerprint]:
    """Send the bytes of a run's tensors and return their fingerprints."""
    if outlet.device is not None:
        tensors = [tensor.to(outlet.device) for tensor in tensors]
    if run.is_packed:
        packed = torch.zeros(run.num_bytes, dtype=torch.uint8, device=tensors[0].device)
        for tensor, offset in zip(tensors, run.offsets, strict=True):
            packed[offset : offset + tensor.numel()] = tensor
        outlet.put(packed, None, deadline)
        pairs = zip(run.specs, tensors, strict=True)
        return [of_bytes(spec.torch_dtype, spec.shape, tensor) for spec, tensor in pairs]
    (spec,), (memory,) = run.specs, tensors
    of = Fingerprint(spec.torch_dtype, spec.shape, memory, outlet.piece_bytes)
    for piece in memory.split(outlet.piece_bytes):
        outlet.put(piece, of, deadline)
    return [of]
