"""A CUDA device without a GPU, on which the code for GPUs runs in tests.

device.cpp registers a device in a CPU build of PyTorch; its operators run on the CPU, over the same memory.
torch_cuda.py replaces the functions of torch.cuda, kernels.py has kernels that only CUDA has, storages.py
CUDA's IPC, nccl.py a process group "nccl" over gloo. build.py compiles the library once per version of
PyTorch; `environment` is that of a process with the device.

It raises what CUDA raises: for tensors on different devices, operators without a CUDA kernel, products of
integers, and, while a graph is captured, for anything that waits for the device, copies of pageable memory,
and allocations of other threads (capture_error_mode "global"). A replayed graph runs on the same memory, so
stale addresses and shapes show as wrong numbers; new memory holds 0xFF. `waits` counts each time that the
host waits for the device, with the line of code.

It does not show speed, the numbers of CUDA's kernels and of its generator, streams that run at the same time,
reads beyond a tensor's end, fragmentation, memory of other processes, torch.compile, NCCL's hangs, or other
versions of PyTorch.

    eval $(python -m tests.fake_cuda)         # sets the environment of this shell
    pytest tests/gpu
    python tests/gpu/machine.py --device cuda --tiny

FAKE_CUDA_DEVICES and FAKE_CUDA_BYTES are the number of devices (1) and the memory of each (8 GiB); a capture
takes FAKE_CUDA_CAPTURE_S (0), while other threads run; with FAKE_CUDA_OWN_IPC=1 a process opens its own IPC
handles, where threads stand in for processes.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

waits: Counter[tuple[str, str]] = Counter()
"""(operation, line of code outside of PyTorch) of each wait for the device."""


def environment(**more: str) -> dict[str, str]:
    """Environment variables of a process whose torch has the device; its child processes have it too. Skips
    the test where the library cannot be built."""
    import pytest

    from .build import BuildError, built

    try:
        library = built()
    except BuildError as error:
        pytest.skip(f"the fake CUDA device cannot be built: {error}")
    return {**os.environ, **variables(library), **more}


def variables(library: Path) -> dict[str, str]:
    folders = [HERE / "site", REPOSITORY / "src", REPOSITORY]
    return {
        "FAKE_CUDA": str(library),
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "OMP_NUM_THREADS": "1",
    }


def load(torch_folder: Path) -> None:
    """Load the library, before torch is imported, since PyTorch looks for CUDA's hooks only then."""
    for file in (
        torch_folder / "lib/libc10.so",
        torch_folder / "lib/libtorch_cpu.so",
        os.environ["FAKE_CUDA"],
    ):
        ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)


def install() -> None:
    """Present the device in this process, after torch is imported."""
    import torch

    from . import kernels, nccl, storages, torch_cuda

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [int(number) for number in visible.split(",") if number] if visible is not None else None
    num = int(os.environ.get("FAKE_CUDA_DEVICES", "1")) if devices is None else len(devices)
    total_bytes = int(os.environ.get("FAKE_CUDA_BYTES", str(8 * 2**30)))
    names = json.loads(Path(os.environ["FAKE_CUDA"]).with_suffix(".json").read_text())
    torch.ops.fake_cuda.setup(total_bytes, num, names)
    torch.ops.fake_cuda.on_wait(ctypes.cast(_COUNT, ctypes.c_void_p).value)
    if not num:
        return
    torch_cuda.install(num, total_bytes, first=devices[0] if devices else 0)
    kernels.install()
    storages.install()
    nccl.install()


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _COUNT(operation: bytes) -> None:
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and not file.startswith("<") and Path(file).parent != HERE:
            break
        frame = frame.f_back
    place = "?" if frame is None else f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
    waits[operation.decode(), place] += 1
