"""The functions and classes of torch.cuda, for the fake device."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.graphs
import torch.cuda.memory
import torch.cuda.streams

_ops = torch.ops.fake_cuda


class Graph:
    """torch.cuda.CUDAGraph: records the operators of a capture."""

    _ids = itertools.count(1)

    def __init__(self, keep_graph: bool = False) -> None:
        self._id = next(self._ids)
        self._pool = (0, self._id)
        self._is_captured = False

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        self._pool = pool or self._pool
        _ops.begin_capture(self._id, capture_error_mode == "global")
        time.sleep(float(os.environ.get("FAKE_CUDA_CAPTURE_S", "0")))  # other threads run meanwhile

    def capture_end(self) -> None:
        _ops.end_capture()
        self._is_captured = True

    def replay(self) -> None:
        assert self._is_captured, "replay before capture"
        _ops.replay(self._id)

    def pool(self) -> tuple[int, int]:
        return self._pool

    def reset(self) -> None:
        if _ops is not None:  # None while Python ends
            _ops.forget(self._id)

    __del__ = reset


@contextmanager
def capturing(
    graph: Graph,
    pool: tuple[int, int] | None = None,
    stream: Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """torch.cuda.graph."""
    _ops.wait("synchronize before the capture of a graph")
    gc.collect()
    with stream or Stream():
        graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **more: Any) -> Stream:
        if more:  # an existing stream, by its numbers
            return super().__new__(cls, **more)
        return super().__new__(cls, torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(stream or torch.accelerator.current_stream())

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(stream or torch.accelerator.current_stream())


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """torch.cuda.stream."""
    if stream is None:
        yield
    else:
        with stream:
            yield


class Device:
    """torch.cuda.device."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        self._before = _ops.set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _ops.set_device(self._before)


def _index(device: Any) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return _ops.device() if index is None else index


def _current_stream(device: Any = None) -> Stream:
    stream = torch.accelerator.current_stream(torch.device("cuda", _index(device)))
    return Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def _default_stream(device: Any = None) -> Stream:
    kind = torch._C._autograd.DeviceType.CUDA.value
    return Stream(stream_id=0, device_index=_index(device), device_type=kind)


def _exchange_device(index: int) -> int:
    return _ops.set_device(index) if index >= 0 else -1


def _set_device(device: Any) -> None:
    _ops.set_device(_index(device))


def _dump_snapshot(filename: str = "dump_snapshot.pickle", **_: Any) -> None:
    Path(filename).write_bytes(pickle.dumps({"segments": [], "device_traces": []}))


def install(num_devices: int, total_bytes: int, *, first: int) -> None:
    """`first` is the number of the first visible device on the machine."""

    def allocated(device: Any = None) -> int:
        return _ops.counts()[0]

    def peak(device: Any = None) -> int:
        return _ops.counts()[1]

    def memory_info(device: Any = None) -> tuple[int, int]:
        return total_bytes - allocated(), total_bytes

    def properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name="Fake H100", major=9, minor=0, total_memory=total_bytes, multi_processor_count=132,
            uuid=f"GPU-fake-{first + _index(device)}", warp_size=32, regs_per_multiprocessor=65536, L2_cache_size=50 * 2**20,
            max_threads_per_multi_processor=2048, gcnArchName="",
        )  # fmt: skip

    class Cudart:
        """torch.cuda.cudart()."""

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            _ops.pin(address, size)
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            _ops.pin(address, 0)
            return 0

        def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
            return memory_info()

    memory = {
        "empty_cache": lambda: None,
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": lambda device=None: _ops.reset_peak(),
        "mem_get_info": memory_info,
        "memory_stats": lambda device=None: defaultdict(int, {"allocated_bytes.all.current": allocated()}),
    }
    functions = {
        **memory,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "_is_compiled": lambda: False,
        "device_count": lambda: num_devices,
        "device": Device,
        "current_device": _ops.device,
        "set_device": _set_device,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "get_device_name": lambda device=None: "Fake H100",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": properties,
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "cudart": Cudart,
        "synchronize": lambda device=None: _ops.wait("torch.cuda.synchronize"),
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "set_stream": torch.accelerator.set_stream,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "CUDAGraph": Graph,
        "graph": capturing,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": _ops.is_capturing,
        "manual_seed": _ops.seed,
        "manual_seed_all": _ops.seed,
        "ipc_collect": lambda: None,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
        "memory_snapshot": lambda *_, **__: [],
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    for name, function in memory.items():
        setattr(torch.cuda.memory, name, function)
    torch.cuda.memory._record_memory_history = lambda *_, **__: None
    torch.cuda.memory._dump_snapshot = _dump_snapshot
    torch.cuda.graphs.CUDAGraph, torch.cuda.graphs.graph = Graph, capturing
    torch.cuda.streams.Stream, torch.cuda.streams.Event = Stream, Event
    torch.version.cuda = "12.8"
    torch._C._get_accelerator = lambda *_: torch.device("cuda")
    try:
        import pynvml
    except ImportError:
        return
    pynvml.nvmlInit = pynvml.nvmlShutdown = lambda *_: None
    pynvml.nvmlDeviceGetCount = lambda: int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
