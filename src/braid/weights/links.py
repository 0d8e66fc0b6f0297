"""Ways for the bytes of weights: from one sender to all its receivers, piece by piece, in order.

A ring is a small memory that both sides see: the sender fills slots, and fills one again when every receiver has read it. It
stays in the processor's caches whatever the model's size, which is what makes it fast, and fits the small /dev/shm that containers
have. A group is one of torch.distributed, apart from any that the processes have.
"""

from __future__ import annotations

import base64
import datetime
import errno
import fcntl
import mmap
import os
import secrets
import socket
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from braid.errors import EngineError

from .fingerprint import BLOCK_BYTES, SMALL_BYTES
from .wire import Message, TensorSpec, Transport, Wire, tell

_SLOT_BYTES = 8 * BLOCK_BYTES
_NUM_SLOTS = 2
_GROUP_PIECE_BYTES = 32 * BLOCK_BYTES
_AHEAD = 2
"""Pieces under way in a group at once."""
_ALIGNMENT = 64


class Group(Protocol):
    """What of a torch.distributed group is used; its stubs leave it out."""

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work: ...


class Outlet(Protocol):
    """The sender's end. Pieces are uint8 [n] of at most `piece_bytes`, which is a multiple of BLOCK_BYTES."""

    @property
    def piece_bytes(self) -> int: ...

    @property
    def device(self) -> torch.device | None:
        """Where pieces have to be; None for anywhere."""
        ...

    def put(self, piece: Tensor, deadline: float) -> None:
        """Send a piece, which stays as it is until `flush`."""
        ...

    def flush(self, deadline: float) -> None:
        """Everything has left."""
        ...

    def close(self) -> None: ...


class Inlet(Protocol):
    """A receiver's end."""

    @property
    def piece_bytes(self) -> int: ...

    @property
    def device(self) -> torch.device | None: ...

    def take(self, pieces: Iterable[Tensor], deadline: float) -> Iterator[Tensor]:
        """Fill each piece with what the sender put, and give it when it is filled."""
        ...

    def flush(self, deadline: float) -> None:
        """Everything has been taken."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors whose bytes travel back to back: one large tensor, or several small ones at `offsets`."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @property
    def is_packed(self) -> bool:
        """Whether it is of small tensors."""
        return self.specs[0].num_bytes <= SMALL_BYTES

    def pieces(self, memory: Tensor, piece_bytes: int) -> Iterator[Tensor]:
        """`memory` [num_bytes] cut as it travels."""
        for start in range(0, self.num_bytes, piece_bytes):
            yield memory[start : min(start + piece_bytes, self.num_bytes)]


def runs_of(specs: Sequence[TensorSpec], piece_bytes: int) -> list[Run]:
    """The runs of a bucket; the same on both sides."""
    runs: list[Run] = []
    small: list[TensorSpec] = []
    offsets: list[int] = []
    used = 0

    def close() -> None:
        nonlocal used
        if small:
            runs.append(Run(tuple(small), tuple(offsets), used))
            small.clear()
            offsets.clear()
            used = 0

    for spec in specs:
        if spec.num_bytes > SMALL_BYTES:
            close()
            runs.append(Run((spec,), (0,), spec.num_bytes))
            continue
        size = max(aligned(spec.num_bytes), _ALIGNMENT)
        if used + size > piece_bytes:
            close()
        small.append(spec)
        offsets.append(used)
        used += size
    close()
    return runs


def aligned(num_bytes: int) -> int:
    """The next multiple of a cache line."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class RingOutlet:
    """See Outlet. `slots` are uint8 [slots, slot_bytes] of memory that all receivers have."""

    def __init__(self, slots: Tensor, wires: Mapping[str, Wire]) -> None:
        self.piece_bytes, self.device = BLOCK_BYTES, None
        self._slots, self._wires = slots, wires
        self._filled = self._used = 0
        self._freed = dict.fromkeys(wires, 0)

    def put(self, piece: Tensor, deadline: float) -> None:
        """See Outlet."""
        slot_bytes = self._slots.shape[1]
        if self._used + piece.numel() > slot_bytes:
            self.flush(deadline)
        if not self._used:
            self._await_slot(deadline)
        slot = self._slots[self._filled % len(self._slots)]
        slot[self._used : self._used + piece.numel()].copy_(piece)
        self._used += aligned(piece.numel())
        if self._used == slot_bytes:  # at once: the receivers read while this piece is summed
            self.flush(deadline)

    def flush(self, deadline: float) -> None:
        """See Outlet."""
        if self._used:
            _finish(self._slots)
            tell(self._wires, {"kind": "filled"}, deadline, "taking over weights")
            self._filled, self._used = self._filled + 1, 0

    def close(self) -> None:
        """See Outlet."""
        self._slots = self._slots.new_empty(0, 0)

    def _await_slot(self, deadline: float) -> None:
        """Until every receiver has read what the next slot holds."""
        for name, wire in self._wires.items():
            while self._freed[name] <= self._filled - len(self._slots):
                wire.receive("freed", deadline, "taking over weights")
                self._freed[name] += 1

    def settle(self, deadline: float) -> None:
        """Hear of every slot that it was read, so that what the receivers say next is about the version."""
        for name, wire in self._wires.items():
            while self._freed[name] < self._filled:
                wire.receive("freed", deadline, "taking over weights")
                self._freed[name] += 1


class RingInlet:
    """See Inlet."""

    def __init__(self, slots: Tensor, wire: Wire) -> None:
        self.piece_bytes, self.device = BLOCK_BYTES, None
        self._slots, self._wire = slots, wire
        self._read = self._used = 0

    def take(self, pieces: Iterable[Tensor], deadline: float) -> Iterator[Tensor]:
        """See Inlet."""
        slot_bytes = self._slots.shape[1]
        for piece in pieces:
            if self._used + piece.numel() > slot_bytes:
                self.flush(deadline)
            if not self._used:
                self._wire.receive("filled", deadline, "sending weights")
            slot = self._slots[self._read % len(self._slots)]
            piece.copy_(slot[self._used : self._used + piece.numel()])
            self._used += aligned(piece.numel())
            if self._used == slot_bytes:
                self.flush(deadline)
            yield piece

    def flush(self, deadline: float) -> None:
        """See Inlet."""
        if self._used:
            _finish(self._slots)
            self._wire.send({"kind": "freed"}, deadline, "sending weights")
            self._read, self._used = self._read + 1, 0

    def close(self) -> None:
        """See Inlet."""
        self._slots = self._slots.new_empty(0, 0)


def _finish(memory: Tensor) -> None:
    """Wait for copies that a GPU still makes."""
    if memory.is_cuda:
        torch.cuda.current_stream(memory.device).synchronize()


class GroupOutlet:
    """See Outlet."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.piece_bytes, self.device = _GROUP_PIECE_BYTES, device
        self._group: Group | None = group
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()

    def put(self, piece: Tensor, deadline: float) -> None:
        """See Outlet."""
        self._pending.append((_broadcast(self._group, piece), piece))
        if len(self._pending) > _AHEAD:
            _await(self._pending.popleft()[0], deadline)

    def flush(self, deadline: float) -> None:
        """See Outlet."""
        while self._pending:
            _await(self._pending.popleft()[0], deadline)

    def close(self) -> None:
        """See Outlet."""
        self._pending.clear()
        self._group = None


class GroupInlet:
    """See Inlet."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.piece_bytes, self.device = _GROUP_PIECE_BYTES, device
        self._group: Group | None = group

    def take(self, pieces: Iterable[Tensor], deadline: float) -> Iterator[Tensor]:
        """See Inlet."""
        pending: deque[tuple[dist.Work, Tensor]] = deque()
        for piece in pieces:
            pending.append((_broadcast(self._group, piece), piece))
            if len(pending) > _AHEAD:
                yield _arrived(pending.popleft(), deadline)
        while pending:
            yield _arrived(pending.popleft(), deadline)

    def flush(self, deadline: float) -> None:
        """See Inlet. Every piece was waited for."""

    def close(self) -> None:
        """See Inlet."""
        self._group = None


def _broadcast(group: Group | None, piece: Tensor) -> dist.Work:
    if group is None:
        raise EngineError("the group for weights is closed")
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    try:
        return group.broadcast([piece], options)
    except RuntimeError as error:
        raise EngineError(f"the group for weights broke ({_first_line(error)})") from error


def _arrived(entry: tuple[dist.Work, Tensor], deadline: float) -> Tensor:
    _await(entry[0], deadline)
    return entry[1]


def _await(work: dist.Work, deadline: float) -> None:
    try:
        work.wait(datetime.timedelta(seconds=max(1e-3, deadline - time.monotonic())))
    except RuntimeError as error:  # torch.distributed's errors are such
        raise EngineError(f"the group for weights broke ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def make_outlet(
    way: Transport,
    wires: Mapping[str, Wire],
    *,
    host: str,
    device: torch.device,
    deadline: float,
    timeout_s: float,
) -> Outlet:
    """The sender's end, when all receivers have theirs. `device` is that of the trainer."""
    if way in ("gloo", "nccl"):
        return _open_group(way, wires, host=host, device=device, deadline=deadline, timeout_s=timeout_s)
    num_bytes = _NUM_SLOTS * _SLOT_BYTES
    if way == "cuda_ipc":
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        _tell_and_await(wires, {"way": way, "memory": _cuda_handle(memory)}, deadline)
        return RingOutlet(memory.view(_NUM_SLOTS, _SLOT_BYTES), wires)
    with _SharedFile(num_bytes) as file:
        _tell_and_await(wires, {"way": way, "path": str(file.path)}, deadline)
        return RingOutlet(file.map().view(_NUM_SLOTS, _SLOT_BYTES), wires)


def make_inlet(message: Message, wire: Wire, *, device: torch.device, deadline: float) -> Inlet:
    """A receiver's end, as a `link` message says. `device` is that of the engine."""
    way = message["way"]
    if way in ("gloo", "nccl"):
        timeout_s = max(1.0, deadline - time.monotonic())
        store = dist.TCPStore(
            message["host"],
            message["port"],
            message["size"],
            is_master=False,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        group, device = _join(way, store, message["rank"], message["size"], message["timeout_s"], device)
        wire.send({"kind": "ready"}, deadline, "linking")
        return GroupInlet(group, device)
    memory = _from_cuda_handle(message["memory"]) if way == "cuda_ipc" else _map(message["path"])
    wire.send({"kind": "ready"}, deadline, "linking")
    return RingInlet(memory.view(-1, _SLOT_BYTES), wire)


def _tell_and_await(wires: Mapping[str, Wire], how: Message, deadline: float) -> None:
    tell(wires, {"kind": "link", **how}, deadline, "linking")
    for wire in wires.values():
        wire.receive("ready", deadline, "linking")


def _open_group(
    way: Transport,
    wires: Mapping[str, Wire],
    *,
    host: str,
    device: torch.device,
    deadline: float,
    timeout_s: float,
) -> GroupOutlet:
    size = len(wires) + 1
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=timeout)
    how = {"kind": "link", "way": way, "host": host, "port": store.port, "size": size, "timeout_s": timeout_s}
    for rank, wire in enumerate(wires.values(), start=1):
        wire.send({**how, "rank": rank}, deadline, "linking")
    group, device = _join(way, store, 0, size, timeout_s, device)
    for wire in wires.values():
        wire.receive("ready", deadline, "linking")
    return GroupOutlet(group, device)


def _join(
    way: str, store: dist.Store, rank: int, size: int, timeout_s: float, device: torch.device
) -> tuple[Group, torch.device]:
    """This process's place in a group that is no part of its default one, and where its tensors are."""
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        if way == "gloo":
            return cast("Group", dist.ProcessGroupGloo(store, rank, size, timeout)), torch.device("cpu")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return cast("Group", dist.ProcessGroupNCCL(store, rank, size, options)), device
    except RuntimeError as error:
        raise EngineError(
            f"no {way} group for weights could be made with the engines ({_first_line(error)}); their machines must reach "
            "each other (for gloo GLOO_SOCKET_IFNAME, for NCCL NCCL_SOCKET_IFNAME names the network interface)"
        ) from error


class _SharedFile:
    """A file in memory that goes as soon as every receiver has it open. Its owner holds a lock, which ends with the process
    however it ends: files of dead owners are removed when the next is made."""

    def __init__(self, num_bytes: int) -> None:
        shm = Path("/dev/shm")
        folder = shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
        _remove_unowned(folder)
        self.path = folder / f"{_PREFIX}{secrets.token_hex(8)}"
        self._num_bytes = num_bytes
        self._file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            os.posix_fallocate(self._file, 0, num_bytes)
        except OSError as error:
            self.__exit__()
            what = "is full" if error.errno == errno.ENOSPC else f"cannot be used ({error.strerror})"
            raise EngineError(
                f"{folder} {what}: publishing weights through shared memory takes {num_bytes >> 20} MiB of it; give the "
                "container more (docker run --shm-size) or set rollout.publish.transport=gloo"
            ) from None

    def map(self) -> Tensor:
        """uint8 [num_bytes]; lives on without the file."""
        return torch.frombuffer(mmap.mmap(self._file, self._num_bytes), dtype=torch.uint8)

    def __enter__(self) -> _SharedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._file)


_PREFIX = "braid-weights-"
_YOUNG_S = 60.0
"""A file so young may not have its lock yet."""


def _remove_unowned(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime < _YOUNG_S:
                continue
            file = os.open(path, os.O_RDWR)
        except OSError:  # gone, or another user's
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:  # its owner lives
            pass
        finally:
            os.close(file)


def _map(path: str) -> Tensor:
    try:
        file = os.open(path, os.O_RDWR)
    except OSError as error:
        raise EngineError(
            f"cannot open {path} ({error.strerror}): the engine does not share this memory with the trainer (another machine or "
            "container); set rollout.publish.transport=gloo, or nccl on GPUs"
        ) from None
    try:
        return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)
    finally:
        os.close(file)


def _cuda_handle(memory: Tensor) -> dict[str, Any]:
    """What another process needs to open memory of a GPU (CUDA IPC), as JSON."""
    _, *fields = memory.untyped_storage()._share_cuda_()
    values = [base64.b64encode(v).decode() if isinstance(v, bytes) else v for v in fields]
    uuid = str(torch.cuda.get_device_properties(memory.device).uuid)
    return {"device": uuid, "fields": values, "is_bytes": [isinstance(v, bytes) for v in fields]}


def _from_cuda_handle(handle: Mapping[str, Any]) -> Tensor:
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if handle["device"] not in uuids:
        raise EngineError(
            f"the trainer's GPU {handle['device']} is none of the engine's ({', '.join(uuids) or 'none'}): weights pass "
            "by CUDA IPC within one GPU only; set rollout.publish.transport=nccl"
        )
    torch.cuda.init()
    fields = [
        base64.b64decode(v) if is_bytes else v
        for v, is_bytes in zip(handle["fields"], handle["is_bytes"], strict=True)
    ]
    storage: Any = torch.UntypedStorage._new_shared_cuda(uuids.index(handle["device"]), *fields)
    device = torch.device("cuda", uuids.index(handle["device"]))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def own_address() -> str:
    """The address at which other machines reach this one: that of the interface with the default route; loopback without."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address (RFC 5737); connecting sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
