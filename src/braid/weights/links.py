"""Links that carry the bytes of weights from one sender to all its receivers, piece by piece, in order.

A ring is a small shared memory: the sender fills slots and reuses one when every receiver has read it. The
progress counters are in the same memory, since a write there is seen sooner than a message. A ring fits into
the small /dev/shm of containers, whatever the model's size. A group is a torch.distributed process group,
separate from any that the processes already have.
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
import threading
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
from braid.runtime.loops import call_until

from .copying import copy
from .fingerprint import BLOCK_BYTES, SMALL_BYTES, Fingerprint
from .wire import Message, TensorSpec, Transport, Wire, own_end

_GLOO_PIECE_BYTES, _GPU_PIECE_BYTES = 16 * BLOCK_BYTES, 32 * BLOCK_BYTES
"""Bytes per piece. Each piece has a fixed cost to send; one that has arrived is summed while the next are in
transit."""
_RINGS = {"shared_memory": (16, 2 * BLOCK_BYTES), "cuda_ipc": (2, _GPU_PIECE_BYTES)}
"""(number of slots, bytes per slot)."""
_STRIDE = 8
"""Distance between counters, in units of 8 bytes: each has its own cache line."""
_SPIN_S = 2e-4
"""Seconds of busy waiting, after which a process sleeps `_NAP_S` between checks."""
_NAP_S = 1e-4
_AHEAD = 4
"""Pieces in flight in a group."""
_ALIGNMENT = 64


Piece = tuple[Tensor, Fingerprint | None]
"""Memory, uint8 [n], and the fingerprint of the tensor that it is the next piece of, if any."""


class Group(Protocol):
    """The interface of torch.distributed process groups used here, which their type stubs omit."""

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work: ...

    def abort(self) -> None: ...


class Outlet(Protocol):
    """The sender's end of a link. Pieces are uint8 [n], n at most `piece_bytes`, which is a multiple of
    BLOCK_BYTES."""

    @property
    def piece_bytes(self) -> int: ...

    @property
    def device(self) -> torch.device | None:
        """Device on which pieces must be; None for any."""
        ...

    def put(self, piece: Tensor, of: Fingerprint | None, deadline: float) -> None:
        """Send a piece and add it to its tensor's fingerprint `of`, if any. It must not change until
        `flush`."""
        ...

    def flush(self, deadline: float) -> None:
        """Wait until all pieces have been sent."""
        ...

    def close(self) -> None: ...


class Inlet(Protocol):
    """A receiver's end of a link; properties as in Outlet."""

    @property
    def piece_bytes(self) -> int: ...

    @property
    def device(self) -> torch.device | None: ...

    def take(self, pieces: Iterable[Piece | None], deadline: float) -> Iterator[None]:
        """Fill each piece with the sender's bytes, add it to its fingerprint, if any, and yield once per
        completed piece, in order. A None in `pieces` means that the next piece is not known yet: one that is
        pending is completed first."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors whose bytes are sent back to back: one large tensor, or several small ones at `offsets`
    (bytes)."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @property
    def is_packed(self) -> bool:
        """Whether the run packs small tensors."""
        return self.specs[0].num_bytes <= SMALL_BYTES


def runs_of(specs: Sequence[TensorSpec], piece_bytes: int) -> list[Run]:
    """Split a bucket into runs; the result is the same on both sides."""
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
    """Round up to a multiple of a cache line."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class _Counters:
    """Progress counters in shared memory, one cache line each: number of pieces that the sender has put into
    a ring (at place 0), and that each receiver has taken."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._cells = memoryview(memory).cast("q")
        self._fence = threading.Lock()

    def post(self, place: int, value: int) -> None:
        """Set a counter, ordered after all earlier writes to the ring."""
        self._order()
        self._cells[place * _STRIDE] = value

    def wait(self, place: int, least: int, wire: Wire, deadline: float, doing: str) -> None:
        """Wait until a counter has reached `least`. `wire` connects to the process that writes it; raises
        EngineError if that process fails, dies or times out."""
        cells, place = self._cells, place * _STRIDE
        patience = time.monotonic() + _SPIN_S
        while cells[place] < least:
            if (now := time.monotonic()) < patience:
                continue
            if wire.is_readable() and cells[place] < least:
                wire.receive("failed", deadline, doing)
            if now > deadline:
                raise wire.late(doing)
            time.sleep(_NAP_S)
        self._order()

    def _order(self) -> None:
        """Memory barrier, since not all processors keep the program order of reads and writes: lock functions
        also synchronise memory (POSIX, 4.12)."""
        with self._fence:
            pass


class RingOutlet:
    """See Outlet. `slots` is uint8 [num_slots, piece_bytes], in memory shared with all receivers."""

    def __init__(self, slots: Tensor, counters: _Counters, wires: Sequence[Wire]) -> None:
        self.piece_bytes, self.device = slots.shape[1], None
        self._slots, self._counters, self._wires = slots.unbind(0), counters, wires
        self._num_put = 0

    def put(self, piece: Tensor, of: Fingerprint | None, deadline: float) -> None:
        """See Outlet."""
        free = self._num_put + 1 - len(self._slots)
        for place, wire in enumerate(self._wires, start=1):
            self._counters.wait(place, free, wire, deadline, "receiving weights")
        slot = self._slots[self._num_put % len(self._slots)]
        copy(piece, slot) if of is None else of.add_copied(piece, slot)
        self._num_put += 1
        self._counters.post(0, self._num_put)

    def flush(self, deadline: float) -> None:
        """See Outlet. Nothing to wait for: `put` has copied every piece into a slot."""

    def close(self) -> None:
        """See Outlet."""
        self._slots = ()


class RingInlet:
    """See Inlet. `place` is the index of its counter."""

    def __init__(self, slots: Tensor, counters: _Counters, place: int, wire: Wire) -> None:
        self.piece_bytes, self.device = slots.shape[1], None
        self._slots, self._counters, self._place, self._wire = slots.unbind(0), counters, place, wire
        self._num_taken = 0

    def take(self, pieces: Iterable[Piece | None], deadline: float) -> Iterator[None]:
        """See Inlet. Each piece is filled as soon as it is requested."""
        for asked in pieces:
            assert asked is not None, "requested, but no piece is expected"
            piece, of = asked
            self._counters.wait(0, self._num_taken + 1, self._wire, deadline, "sending weights")
            slot = self._slots[self._num_taken % len(self._slots)]
            copy(slot, piece) if of is None else of.add_copied(slot, piece)
            self._num_taken += 1
            self._counters.post(self._place, self._num_taken)
            yield

    def close(self) -> None:
        """See Inlet."""
        self._slots = ()


class _GroupEnd:
    """One end of a process group that broadcasts pieces; `wires` connect to the processes at the other ends."""

    def __init__(self, group: Group, device: torch.device, wires: Iterable[Wire]) -> None:
        self.piece_bytes = _GLOO_PIECE_BYTES if device.type == "cpu" else _GPU_PIECE_BYTES
        self.device = device
        self._group: Group | None = group
        self._wires = list(wires)
        self._pending: deque[tuple[dist.Work, Piece]] = deque()

    def close(self) -> None:
        """See Outlet. Aborts the group if pieces are in transit: NCCL's kernels would wait for a peer that
        has failed."""
        if self._group is not None and self._pending:
            self._group.abort()
        self._pending.clear()
        self._group = None

    def _broadcast(self, piece: Piece) -> None:
        if self._group is None:
            raise EngineError("the process group of the weight sync is closed")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            self._pending.append((self._group.broadcast([piece[0]], options), piece))
        except RuntimeError as error:
            raise EngineError(
                f"the process group of the weight sync failed ({_first_line(error)})"
            ) from error

    def _await(self, deadline: float, doing: str) -> Fingerprint | None:
        """Wait for the oldest piece in transit, and return its tensor's fingerprint, if any. gloo finds out
        by itself that a peer is gone. NCCL does not, and waiting for its work blocks only the GPU's stream:
        completion is polled, and the wires are watched for peers that fail."""
        work, (_, of) = self._pending[0]
        patience = time.monotonic() + _SPIN_S
        try:
            while self.device.type != "cpu" and not work.is_completed():
                if (now := time.monotonic()) > deadline:
                    raise EngineError(
                        f"a broadcast of weights did not complete in time while {doing}; raise cluster.call_timeout_s if it only "
                        "needs longer"
                    )
                if now > patience:
                    for wire in self._wires:
                        wire.look_ahead(deadline, doing)
                    time.sleep(_NAP_S)
            work.wait(datetime.timedelta(seconds=max(1e-3, deadline - time.monotonic())))
        except RuntimeError as error:  # the type that torch.distributed raises
            raise EngineError(
                f"the process group of the weight sync failed ({_first_line(error)})"
            ) from error
        self._pending.popleft()
        return of


class GroupOutlet(_GroupEnd):
    """See Outlet."""

    def put(self, piece: Tensor, of: Fingerprint | None, deadline: float) -> None:
        """See Outlet."""
        self._broadcast((piece, None))
        if of is not None:
            of.add()  # while the piece is in transit
        if len(self._pending) > _AHEAD:
            self._await(deadline, "receiving weights")

    def flush(self, deadline: float) -> None:
        """See Outlet."""
        while self._pending:
            self._await(deadline, "receiving weights")


class GroupInlet(_GroupEnd):
    """See Inlet."""

    def take(self, pieces: Iterable[Piece | None], deadline: float) -> Iterator[None]:
        """See Inlet."""
        for asked in pieces:
            if asked is not None:
                self._broadcast(asked)
            if asked is None or len(self._pending) > _AHEAD:
                yield self._arrived(deadline)
        while self._pending:
            yield self._arrived(deadline)

    def _arrived(self, deadline: float) -> None:
        if (of := self._await(deadline, "sending weights")) is not None:
            of.add()


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
    """Create the sender's end and wait until all receivers have created theirs. `device` is the trainer's."""
    if way in ("gloo", "nccl"):
        return _open_group(way, wires, host=host, device=device, deadline=deadline, timeout_s=timeout_s)
    num_slots, piece_bytes = _RINGS[way]
    header = -(-8 * _STRIDE * (len(wires) + 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    how: Message = {"kind": "link", "way": way, "header": header, "piece_bytes": piece_bytes}
    slots = None
    if way == "cuda_ipc":
        slots = torch.empty(num_slots * piece_bytes, dtype=torch.uint8, device=device)
        how["memory"] = _cuda_handle(slots)
    with _SharedFile(header + (0 if slots is not None else num_slots * piece_bytes)) as file:
        for place, wire in enumerate(wires.values(), start=1):
            wire.send({**how, "path": str(file.path), "place": place}, deadline, "linking")
        for wire in wires.values():
            wire.receive("ready", deadline, "linking")
        memory = file.map()
    slots = torch.frombuffer(memory, dtype=torch.uint8, offset=header) if slots is None else slots
    return RingOutlet(slots.view(num_slots, piece_bytes), _Counters(memory), list(wires.values()))


def make_inlet(message: Message, wire: Wire, *, device: torch.device, deadline: float) -> Inlet:
    """Create a receiver's end from a `link` message. `device` is the engine's."""
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
        timeout_s = message["timeout_s"]
        group, device = _join(
            way, store, message["rank"], message["size"], timeout_s, device, [wire], deadline
        )
        wire.send({"kind": "ready"}, deadline, "linking")
        return GroupInlet(group, device, [wire])
    memory = _map(message["path"])
    if way == "cuda_ipc":
        slots = _from_cuda_handle(message["memory"])
    else:
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=message["header"])
    wire.send({"kind": "ready"}, deadline, "linking")
    return RingInlet(slots.view(-1, message["piece_bytes"]), _Counters(memory), message["place"], wire)


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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(
        (host, 0), family=family
    ) as listener:  # torch's own listener binds to all interfaces
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            size,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
    how = {"kind": "link", "way": way, "host": host, "port": store.port, "size": size, "timeout_s": timeout_s}
    for rank, wire in enumerate(wires.values(), start=1):
        wire.send({**how, "rank": rank}, deadline, "linking")
    group, device = _join(way, store, 0, size, timeout_s, device, list(wires.values()), deadline)
    for wire in wires.values():
        wire.receive("ready", deadline, "linking")
    return GroupOutlet(group, device, wires.values())


def _join(
    way: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    device: torch.device,
    wires: Sequence[Wire],
    deadline: float,
) -> tuple[Group, torch.device]:
    """Join a process group that is independent of the default one; return it with the device of its tensors.
    gloo listens at this end of the `wires` to the other processes unless GLOO_SOCKET_IFNAME names an
    interface other than loopback. NCCL connects at the first collective, and would wait for ever for a peer
    that has failed: it is made here, while the wires are watched."""
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        if way == "gloo":
            gloo: Any = dist.ProcessGroupGloo  # the type stubs omit its options
            settings = gloo._Options()
            settings._timeout = timeout
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
            is_named = interface and not interface.startswith("lo")  # loopback: for groups on one machine
            where = {"interface": interface} if is_named else {"hostname": own_end(wires)}
            settings._devices = [gloo.create_device(**where)]
            return cast("Group", gloo(store, rank, size, settings)), torch.device("cpu")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        first = torch.zeros(1, device=device)

        def watch() -> None:
            for wire in wires:
                wire.look_ahead(deadline, "connecting by NCCL")

        call_until(lambda: group.allreduce([first]), deadline, watch)
        return cast("Group", group), device
    except EngineError:
        raise
    except (RuntimeError, TimeoutError) as error:
        raise EngineError(
            f"cannot create a {way} process group with the engines ({_first_line(error)}); their machines must be able to "
            "connect (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME selects the network interface)"
        ) from error


class _SharedFile:
    """A file in shared memory, removed as soon as every receiver has opened it. Its owner holds a lock, which
    the kernel releases when the process ends for any reason; files of dead owners are removed when the next
    one is created."""

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
            what = "is full" if error.errno == errno.ENOSPC else f"is not usable ({error.strerror})"
            raise EngineError(
                f"{folder} {what}: weight sync through shared memory needs {num_bytes >> 20} MiB; raise the container's limit "
                "(docker run --shm-size), or set rollout.publish.transport=gloo"
            ) from None

    def map(self) -> mmap.mmap:
        """Map its memory, initially zero, which outlives the file."""
        return mmap.mmap(self._file, self._num_bytes)

    def __enter__(self) -> _SharedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._file)


_PREFIX = "braid-weights-"
_YOUNG_S = 60.0
"""Age in seconds below which a file may not be locked yet, and is kept."""


def _remove_unowned(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime < _YOUNG_S:
                continue
            file = os.open(path, os.O_RDWR)
        except OSError:  # already removed, or owned by another user
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:  # its owner is alive
            pass
        finally:
            os.close(file)


def _map(path: str) -> mmap.mmap:
    try:
        file = os.open(path, os.O_RDWR)
    except OSError as error:
        raise EngineError(
            f"cannot open {path} ({error.strerror}): the engine does not share this memory with the trainer (another machine or "
            "container); set rollout.publish.transport=gloo, or nccl on GPUs"
        ) from None
    try:
        return mmap.mmap(file, os.fstat(file).st_size)
    finally:
        os.close(file)


def _cuda_handle(memory: Tensor) -> dict[str, Any]:
    """The CUDA IPC handle with which another process opens this GPU memory, JSON-serialisable."""
    _, *fields = memory.untyped_storage()._share_cuda_()
    values = [base64.b64encode(v).decode() if isinstance(v, bytes) else v for v in fields]
    uuid = str(torch.cuda.get_device_properties(memory.device).uuid)
    return {"device": uuid, "fields": values, "is_bytes": [isinstance(v, bytes) for v in fields]}


def _from_cuda_handle(handle: Mapping[str, Any]) -> Tensor:
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if handle["device"] not in uuids:
        raise EngineError(
            f"the trainer's GPU {handle['device']} is not one of the engine's ({', '.join(uuids) or 'none'}), but CUDA IPC "
            "works only within one GPU; set rollout.publish.transport=nccl"
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
    """The address at which other machines reach this one: that of the interface with the default route, or
    loopback if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address (RFC 5737); connecting sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
