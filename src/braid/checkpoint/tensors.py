"""Streaming writer for safetensors files: 8 bytes of header length, JSON header, data.

The library's own writer needs all tensors contiguous in host memory at once, and reports a full disk without
its errno. This one copies one tensor at a time, and its bytes can be hashed while they are written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from braid.errors import CheckpointError

DTYPES = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}
"""Names of the types in the format."""


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
            plain = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
            write(plain.flatten().view(torch.uint8).numpy().data)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of the file into newly allocated CPU memory."""
    return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
