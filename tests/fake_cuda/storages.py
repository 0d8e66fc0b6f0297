"""Storages of the device: resizing, copies, and CUDA's IPC, by files that other processes map."""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch

_ops = torch.ops.fake_cuda


def install() -> None:
    storage = torch.UntypedStorage
    resize_host, clone_host, to_host = storage.resize_, storage.clone, torch._utils._to

    def resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize_host(self, size)
        _ops.resize_storage(_bytes(self), size)
        return self

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return _bytes(self).clone().untyped_storage() if self.device.type == "cuda" else clone_host(self)

    def to(self: torch.UntypedStorage, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        if torch.device(device).type != "cuda" or self.device.type == "cuda":
            return to_host(self, device, non_blocking)
        return _bytes(self).to(device).untyped_storage()

    def share(self: torch.UntypedStorage) -> tuple[Any, ...]:
        file, mapped_bytes, size = _ops.export_file(_bytes(self))
        handle = f"{os.getpid()}:{file}:{mapped_bytes}".encode()
        return self.device.index, handle, size, 0, b"", 0, b"", False

    def open_shared(device: int, handle: bytes, size: int, *_: Any) -> torch.UntypedStorage:
        pid, file, mapped_bytes = handle.decode().split(":")
        is_own = int(pid) == os.getpid() and not os.environ.get("FAKE_CUDA_OWN_IPC")
        assert not is_own, "CUDA IPC: a process cannot open its own handle"
        with open(f"/proc/{pid}/fd/{file}", "r+b") as opened:
            memory = mmap.mmap(opened.fileno(), int(mapped_bytes))
        mapped = torch.frombuffer(memory, dtype=torch.uint8)[:size].view(-1)
        return _ops.import_file(mapped, device).untyped_storage()

    storage.resize_, storage.clone = resize, clone
    storage._share_cuda_, storage._new_shared_cuda = share, staticmethod(open_shared)
    torch._utils._to = torch.storage._to = to


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
