"""Links that carry the bytes of weights from one sender to all its receivers, in order.

A ring is a few slots of shared memory, in the host's or on a GPU: the sender fills one when every receiver
has read what it held before. A group is a torch.distributed process group, separate from any that the
processes already have.
"""

from __future__ import annotations

import base64
import datetime
import mmap
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from braid.cluster.loops import call_until
from braid.errors import EngineError

from .wire import Message, Transport, Wire, hear, own_end, tell

_RING = (4, 2**23)
"""Number of slots, and bytes per slot."""
_NAP_S = 5e-4
"""Seconds between two looks at a broadcast."""


class Link(Protocol):
    """One end of a link. `device` is the one on which parts must be."""

    device: torch.device

    def transfer(self, parts: Sequence[Tensor], deadline: float) -> None:
        """Send the parts, each uint8 [n], or at a receiver's end fill parts of the same sizes. Raises
        EngineError if a peer fails or time is up."""
        ...

    def close(self) -> None:
        """Free what peers that have failed would hold on to."""


class RingSender(Link):
    """See Link. `slots` is uint8 [num_slots, slot_bytes], in memory shared with all receivers."""

    def __init__(self, slots: Tensor, wires: Sequence[Wire]) -> None:
        self._slots, self._wires, self.device = slots, wires, slots.device

    def transfer(self, parts: Sequence[Tensor], deadline: float) -> None:
        num_filled = 0
        for pieces in _fills(parts, self._slots.shape[1]):
            if num_filled >= len(self._slots):
                hear(self._wires, "free", deadline, "receiving weights")
            _copy(pieces, _rooms(self._slots[num_filled % len(self._slots)], pieces))
            num_filled += 1
            tell(self._wires, {"kind": "filled"}, deadline, "receiving weights")
        for _ in range(min(num_filled, len(self._slots))):
            hear(self._wires, "free", deadline, "receiving weights")


class RingReceiver(Link):
    """The receiving side of a ring of slots in shared memory."""

    def __init__(self, slots: Tensor, wire: Wire) -> None:
        self._slots, self._wire, self.device = slots, wire, slots.device

    def transfer(self, parts: Sequence[Tensor], deadline: float) -> None:
        for number, pieces in enumerate(_fills(parts, self._slots.shape[1])):
            self._wire.receive("filled", deadline, "sending weights")
            _copy(_rooms(self._slots[number % len(self._slots)], pieces), pieces)
            self._wire.send({"kind": "free"}, deadline, "sending weights")


def _fills(parts: Sequence[Tensor], slot_bytes: int) -> Iterator[list[Tensor]]:
    """The parts in pieces, as many at a time as fit into a slot."""
    pieces, used = list[Tensor](), 0
    for part in parts:
        for piece in part.split(slot_bytes):
            if used + len(piece) > slot_bytes:
                yield pieces
                pieces, used = [], 0
            pieces.append(piece)
            used += len(piece)
    yield pieces


def _rooms(slot: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """The places of the pieces in a slot."""
    sizes = [len(piece) for piece in pieces]
    return slot[: sum(sizes)].split(sizes)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy, and wait until it is done on GPUs."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
    for device in {target.device for target in targets if target.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class GroupLink(Link):
    """See Link. Either end; `wires` connect to the processes at the others, which are `doing` that."""

    def __init__(self, group: Any, device: torch.device, wires: Sequence[Wire], doing: str) -> None:
        self._group, self.device, self._wires, self._doing = group, device, wires, doing
        self._is_broken = False

    def transfer(self, parts: Sequence[Tensor], deadline: float) -> None:
        """See Link. Completion is polled while the wires are watched for peers that fail: NCCL does not
        notice them, and waiting for its work blocks only the GPU's stream."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._is_broken = True
        try:
            works = [self._group.broadcast([part], options) for part in parts if part.numel()]
            while not all(work.is_completed() for work in works):
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"a broadcast of weights did not complete in time while {self._doing}; raise "
                        "cluster.call_timeout_s if it only needs longer"
                    )
                for wire in self._wires:
                    wire.look_ahead(deadline, self._doing)
                time.sleep(_NAP_S)
            for work in works:
                work.wait()
        except EngineError:
            raise
        except RuntimeError as error:  # the type that torch.distributed raises
            raise EngineError(
                f"the process group of the weight sync failed ({_first_line(error)})"
            ) from error
        self._is_broken = False

    def close(self) -> None:
        """See Link. Aborts a broadcast that has not completed: NCCL's kernels would wait for a peer that has
        failed."""
        if self._is_broken:
            self._group.abort()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def open_link(
    way: Transport,
    wires: Sequence[Wire],
    *,
    host: str,
    device: torch.device,
    deadline: float,
    timeout_s: float,
) -> Link:
    """Create the sender's end and wait until all receivers have created theirs. `device` is the trainer's."""
    how: Message = {"kind": "link", "way": way}
    if way in ("shared_memory", "cuda_ipc"):
        link: Link = _open_ring(how, wires, device, deadline)
    else:
        size = len(wires) + 1
        store = _open_store(host, size, timeout_s)
        how |= {"host": host, "port": store.port, "size": size, "timeout_s": timeout_s}
        for rank, wire in enumerate(wires, start=1):
            wire.send({**how, "rank": rank}, deadline, "linking")
        group, device = _join_group(way, store, 0, size, timeout_s, device, wires, deadline)
        link = GroupLink(group, device, wires, "receiving weights")
        hear(wires, "ready", deadline, "linking")
    return link


def join_link(message: Message, wire: Wire, *, device: torch.device, deadline: float) -> Link:
    """Create a receiver's end from a `link` message. `device` is the engine's."""
    way = message["way"]
    if way in ("shared_memory", "cuda_ipc"):
        slots = _from_cuda_handle(message) if way == "cuda_ipc" else _map(message["path"])
        link: Link = RingReceiver(slots.view(_RING), wire)
    else:
        left = datetime.timedelta(seconds=max(1.0, deadline - time.monotonic()))
        rank, size, timeout_s = message["rank"], message["size"], message["timeout_s"]
        store = dist.TCPStore(message["host"], message["port"], size, is_master=False, timeout=left)
        group, device = _join_group(way, store, rank, size, timeout_s, device, [wire], deadline)
        link = GroupLink(group, device, [wire], "sending weights")
    wire.send({"kind": "ready"}, deadline, "linking")
    return link


def _open_ring(how: Message, wires: Sequence[Wire], device: torch.device, deadline: float) -> RingSender:
    if how["way"] == "cuda_ipc":
        slots = torch.empty(_RING, dtype=torch.uint8, device=device)
        tell(wires, {**how, **_cuda_handle(slots)}, deadline, "linking")
        hear(wires, "ready", deadline, "linking")
        return RingSender(slots, wires)
    # A file without a name: it is gone with the last process that maps it, however that ends.
    file = os.memfd_create("braid-weights")
    try:
        os.truncate(file, _RING[0] * _RING[1])
        path = f"/proc/{os.getpid()}/fd/{file}"
        tell(wires, {**how, "path": path}, deadline, "linking")
        hear(wires, "ready", deadline, "linking")
        return RingSender(_map(path).view(_RING), wires)
    finally:
        os.close(file)


def _map(path: str) -> Tensor:
    """The memory of a file, uint8 [n]."""
    try:
        with open(path, "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    except OSError as error:
        raise EngineError(
            f"cannot open {path} ({error.strerror}): the engine does not share memory with the trainer "
            "(another machine, container or user); set rollout.weight_sync.transport=gloo, or nccl on GPUs"
        ) from None


def _open_store(host: str, size: int, timeout_s: float) -> dist.TCPStore:
    """The rendezvous of a process group. torch's own listener would bind to all interfaces."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return dist.TCPStore(
            host,
            listener.getsockname()[1],
            size,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )


def _join_group(
    way: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    device: torch.device,
    wires: Sequence[Wire],
    deadline: float,
) -> tuple[Any, torch.device]:
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
            return gloo(store, rank, size, settings), torch.device("cpu")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        first = torch.zeros(1, device=device)

        def watch() -> None:
            for wire in wires:
                wire.look_ahead(deadline, "connecting by NCCL")

        call_until(lambda: group.allreduce([first]), deadline, watch)
        return group, device
    except EngineError:
        raise
    except (RuntimeError, TimeoutError) as error:
        raise EngineError(
            f"cannot create a {way} process group with the engines ({_first_line(error)}); their machines "
            "must be able to connect (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME selects the network "
            "interface)"
        ) from error


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
            f"the trainer's GPU {handle['device']} is not one of the engine's "
            f"({', '.join(uuids) or 'none'}), but CUDA IPC works only within one GPU; set "
            "rollout.weight_sync.transport=nccl"
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
