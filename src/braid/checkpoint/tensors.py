"""Streaming writer for safetensors files, one tensor at a time.

The library's own writer needs all tensors contiguous in host memory at once, and reports a full disk without
its errno. This one copies at most one tensor at a time, and passes the bytes on, so that they can be hashed
while they are written. Files are read with the library. Format: https://huggingface.co/docs/safetensors (8
bytes of header length, JSON header, data).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from braid.errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write_tensors(write: Callable[[bytes | memoryview], object], tensors: Mapping[str, Tensor]) -> None:
    """Pass the file's bytes to `write` in order. Raises CheckpointError for a dtype that the format lacks."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"the state at {name} has type {tensor.dtype}, which safetensors does not support"
            )
    # widest dtype first, so that every tensor is aligned to its item size
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header, end = {}, 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write(len(text).to_bytes(8, "little"))
    write(text)
    for name in names:
        if tensors[name].numel():
            write(_bytes_of(tensors[name]))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of the file into newly allocated CPU memory."""
    return dict(_tensors_of(path))


def _tensors_of(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # the file is not a mapping
            yield name, file.get_tensor(name).clone()


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.flatten().view(torch.uint8).numpy().data
