"""The trainer's end of weight sync."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from braid.errors import EngineError

from .files import FileSender
from .fingerprint import Weights, bytes_of, fingerprints
from .links import Link, open_link, own_address
from .sending import Bucket, Sender, SendOptions, buckets_of
from .wire import Listener, Receipt, Ticket, Wire, hear, readable, tell

_LAST_WORDS_S = 0.5
"""Seconds to wait for engines' error messages after a failure."""


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
        self._listener = Listener(self._host)
        self._wires: dict[str, Wire] = {}
        self._link: Link | None = None

    @property
    def ticket(self) -> Ticket:
        return Ticket(self._options.transport, self._host, self._listener.port, self._listener.secret)

    def send(self, version: int, weights: Weights) -> Receipt:
        deadline = time.monotonic() + self._options.timeout_s
        rest = iter(weights)
        try:
            link = self._linked(version, deadline)
            tell(self._wires.values(), {"kind": "begin", "version": version}, deadline, "receiving weights")
            receipt = Receipt(version)
            # Gathered in this thread, since that may be a collective, and sent from another one meanwhile.
            with ThreadPoolExecutor(1, "braid-weights") as thread:
                sending: Future[None] | None = None
                buckets = buckets_of(rest, self._options.bucket_bytes, self._options.dtype)
                for index, bucket in enumerate(buckets):
                    if sending is not None:
                        sending.result()
                    sending = thread.submit(self._send_bucket, index, bucket, link, receipt, deadline)
                if sending is not None:
                    sending.result()
            return self._finish(receipt, deadline)
        except BaseException as error:
            named = self._named(error, version)
            self._drop(str(named))
            for _ in rest:  # gathering them may be a collective that other ranks are in
                pass
            raise named from error

    def close(self) -> None:
        self._drop("the trainer has closed its sender")
        self._listener.close()

    def _linked(self, version: int, deadline: float) -> Link:
        """Wait for all engines to connect and return the link to them, rebuilt if any of them has
        reconnected."""
        self._admit(0.0)
        while missing := [name for name in self._engines if name not in self._wires]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError(
                    f"engine {', '.join(missing)} did not connect for version {version} within "
                    f"{self._options.timeout_s:g} s (cluster.call_timeout_s); its log shows what it was "
                    "doing"
                )
            self._admit(min(left, 1.0))
        if self._link is None:
            self._link = open_link(
                self._options.transport,
                [self._wires[name] for name in self._engines],
                host=self._host,
                device=self._options.device or torch.device("cpu"),
                deadline=deadline,
                timeout_s=self._options.timeout_s,
            )
        return self._link

    def _admit(self, wait_s: float) -> None:
        """Take in the engines that have connected, waiting at most `wait_s` for the first."""
        for name, wire in self._listener.accept(wait_s):
            # Engines send nothing between two versions: a readable connection means that the old engine died.
            old = self._wires.get(name)
            if name not in self._engines:
                wire.close(f"unknown engine {name}; this sender serves {', '.join(self._engines)}")
                continue
            if old is not None and self._options.existing == "refuse" and not old.is_readable():
                wire.close(
                    f"engine {name} is already connected; stop the other one first, or set "
                    "rollout.weight_sync.existing_group=replace"
                )
                continue
            if old is not None:
                old.close("replaced by another engine of the same name")
            self._wires[name] = wire
            self._unlink()

    def _send_bucket(self, index: int, bucket: Bucket, link: Link, receipt: Receipt, deadline: float) -> None:
        values = fingerprints(tensor for _, tensor in bucket)
        rows = [(spec, value) for (spec, _), value in zip(bucket, values, strict=True)]
        message = {
            "kind": "bucket",
            "index": index,
            "tensors": [[spec.name, spec.dtype, spec.shape, value] for spec, value in rows],
        }
        tell(self._wires.values(), message, deadline, "receiving weights")
        link.transfer([bytes_of(tensor).to(link.device) for _, tensor in bucket], deadline)
        for spec, value in rows:
            receipt.add(spec, value)

    def _finish(self, receipt: Receipt, deadline: float) -> Receipt:
        end = {"kind": "end", "num_tensors": receipt.num_tensors, "fingerprint": receipt.fingerprint}
        tell(self._wires.values(), end, deadline, "receiving weights")
        for answer in hear(self._wires.values(), "done", deadline, f"loading version {receipt.version}"):
            if answer["fingerprint"] != receipt.fingerprint:
                raise EngineError(
                    f"an engine loaded other weights than version {receipt.version} that was sent"
                )
        return receipt

    def _named(self, error: BaseException, version: int) -> BaseException:
        """The error with the engines' own error messages added: a process group reports only that it
        broke."""
        if not isinstance(error, EngineError):
            return error
        messages = [str(error)]
        readable(self._wires.values(), _LAST_WORDS_S)
        for wire in self._wires.values():
            try:
                wire.look_ahead(time.monotonic() + 0.1, "receiving weights")
            except EngineError as said:
                if not any(wire.peer in text for text in messages):
                    messages.insert(0, str(said))
        return EngineError(
            f"syncing version {version} by {self._options.transport} failed: {'; '.join(messages)}"
        )

    def _unlink(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _drop(self, why: str) -> None:
        self._unlink()
        for wire in self._wires.values():
            wire.close(why)
        self._wires = {}
