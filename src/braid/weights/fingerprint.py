"""Tensor fingerprints, and the verification of an engine's weights with them.

A tensor's bytes are read as rows of 1,016 64-bit words, 64 rows per block. Each block is summed by column,
the blocks' sums are added with one weight per block (all modulo 2^64), and BLAKE2b hashes the sums, the bytes
after the last whole row, dtype and shape. Any change within a row's 8,128 bytes is detected, other corruption
except with a probability of 2^-64; swapped rows within a block are not, and the prime factor 127 of the row
length keeps tensor rows and memory pages from lining up with them. The sums are exact: CPU and GPU agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from braid.errors import TrainingError

Weights = Iterable[tuple[str, Tensor]]
"""(name, tensor) pairs."""

_COLUMNS, _ROWS = 8 * 127, 64
"""64-bit words per row, and rows per block."""
_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""The weights of blocks are its powers modulo 2^64. It is odd and of high order, so that a change in any
block changes the sum."""
BLOCK_BYTES = 8 * _COLUMNS * _ROWS
"""Bytes per block of the checksum."""
SMALL_BYTES = 2**15
"""Tensors up to this size in bytes are hashed directly, without column sums."""


def fingerprint(tensor: Tensor) -> str:
    """Fingerprint of dtype, shape and every bit, in hexadecimal; independent of device and memory layout."""
    return fingerprints([tensor])[0]


def fingerprints(tensors: Iterable[Tensor]) -> list[str]:
    """`fingerprint` of several tensors; the host waits for a GPU once."""
    heads, hashed = list[str](), list[Tensor]()
    for tensor in tensors:
        heads.append(f"{tensor.dtype} {tuple(tensor.shape)}")
        hashed.append(_hashed_bytes(tensor))
    places: dict[torch.device, list[int]] = {}
    for place, part in enumerate(hashed):
        places.setdefault(part.device, []).append(place)
    for device, of_device in places.items():
        if device.type != "cpu":
            sizes = [len(hashed[place]) for place in of_device]
            on_host = torch.cat([hashed[place] for place in of_device]).cpu().split(sizes)
            for place, part in zip(of_device, on_host, strict=True):
                hashed[place] = part
    digests = [hashlib.blake2b(head.encode(), digest_size=16) for head in heads]
    for digest, part in zip(digests, hashed, strict=True):
        digest.update(part.numpy().data)
    return [digest.hexdigest() for digest in digests]


def _hashed_bytes(tensor: Tensor) -> Tensor:
    """The sums of a tensor's columns and the bytes after them, uint8 [n], on its device."""
    rest = bytes_of(tensor)
    if rest.numel() <= SMALL_BYTES:
        return rest
    end = rest.numel() - rest.numel() % (8 * _COLUMNS)
    sums = _sums(rest[:end].view(torch.int64).view(-1, _COLUMNS))
    return torch.cat((sums.view(torch.uint8), rest[end:]))


def _sums(rows: Tensor) -> Tensor:
    """Weighted column sums of int64 [n, columns]; the last block may have fewer rows."""
    middle = len(rows) - len(rows) % _ROWS
    sums = rows[:middle].view(-1, _ROWS, _COLUMNS).sum(1)
    if middle < len(rows):
        sums = torch.cat([sums, rows[middle:].sum(0, keepdim=True)])
    exponents = torch.arange(len(sums) - 1, -1, -1, device=rows.device)
    return (sums * torch.pow(_FACTOR, exponents).unsqueeze(1)).sum(0)


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, uint8 [n]; a view if its memory is contiguous and 8-byte aligned."""
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return (flat.clone() if flat.data_ptr() % 8 else flat).view(torch.uint8)


def check_synced(trainer: Weights, engine: Weights, *, version: int, folder: Path) -> None:
    """Compare the engine's weights of `version` with the trainer's, tensor by tensor, in the engine's dtype.

    If they differ, writes both sets to `folder`/version_N_{trainer,engine}.safetensors and raises
    TrainingError.
    """
    ours, theirs = dict(trainer), dict(engine)
    wrong = sorted(ours.keys() ^ theirs.keys())
    both = [name for name in theirs if name in ours]
    expected = fingerprints(ours[name].to(theirs[name].dtype) for name in both)
    held = fingerprints(theirs[name] for name in both)
    wrong += [name for name, *values in zip(both, expected, held, strict=True) if values[0] != values[1]]
    if not wrong:
        return
    files = [
        save_tensors(folder / f"version_{version}_{who}.safetensors", tensors)
        for who, tensors in (("trainer", ours), ("engine", theirs))
    ]
    raise TrainingError(
        f"after syncing version {version} the engine's weights differ from the trainer's: {len(wrong)} of "
        f"{len(ours | theirs)} tensors ({first_few(wrong)}). Both sets are stored in {files[0]} and "
        f"{files[1]}. This is a bug in the engine or its transport; please report it with these files "
        "(rollout.check_weights=false disables the check)"
    )


def first_few(names: Sequence[str]) -> str:
    """At most three of the names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def save_tensors(path: Path, weights: Mapping[str, Tensor]) -> Path:
    """Write a safetensors file."""
    from safetensors.torch import save_file  # imported here, because receivers must not need it

    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    save_file(plain, path, metadata={"format": "pt"})
    return path
