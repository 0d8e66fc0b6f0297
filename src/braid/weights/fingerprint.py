"""Tensor fingerprints, computed at about memory bandwidth, and the verification of an engine's weights with
them.

A tensor's bytes are read as rows of 1,016 64-bit words, 64 rows per block. Each block is summed by column,
the blocks' sums are added with one weight per block (all modulo 2^64), and BLAKE2b hashes the 1,016 sums, the
bytes after the last whole row, dtype and shape to 128 bits. Therefore

* any change within a span of one row (8,128 bytes), at any offset, is always detected (up to collisions of
  BLAKE2b);
* other corruption goes undetected with probability of about 2^-64;
* swapped rows within a block are not detected: the prime factor 127 of the row length keeps tensor rows and
  memory pages from lining up with them.

This guards against faulty memory, transports and bookkeeping, not against an attacker. Tensors of up to 32
KiB are hashed by BLAKE2b directly. The sums are exact, so CPU and GPU agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braid.errors import TrainingError

from .copying import COLUMNS, FACTOR, ROWS, copy, copy_and_sum

Weights = Iterable[tuple[str, Tensor]]
"""(name, tensor) pairs."""

_ROW_BYTES = 8 * COLUMNS
BLOCK_BYTES = ROWS * _ROW_BYTES
"""Bytes per block of the checksum."""
SMALL_BYTES = 2**15
"""Tensors up to this size in bytes are hashed directly, without column sums."""


class Fingerprint:
    """Incremental fingerprint of one tensor, whose bytes are summed piece by piece, during a copy or on their
    own."""

    def __init__(
        self, tensor_type: torch.dtype, shape: Iterable[int], memory: Tensor, piece_bytes: int | None = None
    ) -> None:
        """`memory` is the tensor's bytes, uint8 [n]. Every piece but the last has `piece_bytes` bytes, a
        multiple of BLOCK_BYTES; None: one piece."""
        self._about = f"{tensor_type} {tuple(shape)}".encode()
        self._memory, self._size, self._next = memory, memory.numel(), 0
        self._piece_bytes = piece_bytes or max(self._size, 1)
        self._end = 0 if self._size <= SMALL_BYTES else self._size - self._size % _ROW_BYTES
        self._total = torch.zeros(COLUMNS if self._end else 0, dtype=torch.int64, device=memory.device)

    def add(self) -> None:
        """Sum the next piece of the memory, which must have arrived."""
        start, stop = self._advance()
        if start >= stop:
            return
        piece = self._memory[start:stop]
        if (one_pass := self._one_pass()) is not None:
            one_pass(piece.data_ptr(), None, self._total.data_ptr(), stop - start)
            return
        rows = piece.view(torch.int64).view(-1, COLUMNS)
        middle = len(rows) - len(rows) % ROWS
        for blocks in (rows[:middle].view(-1, ROWS, COLUMNS), rows[middle:].unsqueeze(0)):
            if blocks.numel():
                weights = _weights(len(blocks), blocks.device)
                self._total.mul_(_power(len(blocks))).add_((blocks.sum(1) * weights).sum(0))

    def add_copied(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` to `target`, one of which is the next piece of the memory, and sum it."""
        one_pass = self._one_pass() if source.device == target.device else None
        if one_pass is None:
            copy(source, target)
            self.add()
            return
        self._advance()
        size = min(source.numel(), target.numel())
        one_pass(source.data_ptr(), target.data_ptr(), self._total.data_ptr(), size)

    def value(self) -> str:
        """The 128-bit fingerprint in hexadecimal, once all pieces have been added."""
        assert self._next >= self._size, "of all pieces"
        digest = hashlib.blake2b(self._about, digest_size=16)
        digest.update(self._total.cpu().numpy().data)
        digest.update(self._memory[self._end :].cpu().numpy().data)
        return digest.hexdigest()

    def _advance(self) -> tuple[int, int]:
        """Advance by one piece; return its start and the end of its whole rows."""
        start, self._next = self._next, self._next + self._piece_bytes
        return start, min(self._next, self._end)

    def _one_pass(self) -> Any:
        """The fused copy-and-sum function, for tensors in host memory that are large enough to be summed."""
        return copy_and_sum() if self._end and self._memory.device.type == "cpu" else None


@cache
def _power(exponent: int) -> int:
    """FACTOR ** exponent modulo 2^64, as a signed int64. FACTOR is odd and of high order, so that a change in
    any block changes the sum."""
    value = pow(FACTOR, exponent, 2**64)
    return value - 2**64 if value >= 2**63 else value


@cache
def _weights(number: int, device: torch.device) -> Tensor:
    """Weights of consecutive blocks, int64 [number, 1]; the last is 1."""
    powers = [_power(exponent) for exponent in reversed(range(number))]
    return torch.tensor(powers, dtype=torch.int64, device=device).view(-1, 1)


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, uint8 [n]; a view if its memory is contiguous and 8-byte aligned."""
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return (flat.clone() if flat.data_ptr() % 8 else flat).view(torch.uint8)


def fingerprint(tensor: Tensor) -> str:
    """Fingerprint of dtype, shape and every bit; independent of device and memory layout."""
    return of_bytes(tensor.dtype, tensor.shape, bytes_of(tensor)).value()


def of_bytes(tensor_type: torch.dtype, shape: Iterable[int], memory: Tensor) -> Fingerprint:
    """Fingerprint of a complete tensor, given its bytes `memory`, uint8 [n]."""
    of = Fingerprint(tensor_type, shape, memory)
    if memory.numel():
        of.add()
    return of


def fingerprints(weights: Weights, like: Mapping[str, torch.dtype] | None = None) -> dict[str, str]:
    """Fingerprint by name. With `like`, only of the names in it, after conversion to its dtypes."""
    if like is None:
        return {name: fingerprint(tensor) for name, tensor in weights}
    return {name: fingerprint(tensor.to(like[name])) for name, tensor in weights if name in like}


def check_published(trainer: Weights, engine: Weights, *, version: int, folder: Path) -> None:
    """Compare the engine's weights of `version` with the trainer's, tensor by tensor, in the engine's dtype.

    If they differ, writes both sets to `folder`/version_N_{trainer,engine}.safetensors and raises
    TrainingError.
    """
    ours, theirs = dict(trainer), dict(engine)
    taken = fingerprints(theirs.items())
    given = fingerprints(ours.items(), {name: tensor.dtype for name, tensor in theirs.items()})
    wrong = sorted(ours.keys() ^ theirs.keys()) + [name for name in given if given[name] != taken[name]]
    if not wrong:
        return
    files = [
        _store(folder / f"version_{version}_{who}.safetensors", of)
        for who, of in (("trainer", ours), ("engine", theirs))
    ]
    shown = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
    raise TrainingError(
        f"after syncing version {version} the engine's weights differ from the trainer's: {len(wrong)} of "
        f"{len(ours | theirs)} tensors ({shown}). Both sets are stored in {files[0]} and {files[1]}. This is a bug in the "
        "engine or its transport; please report it with these files (rollout.check_weights=false disables the check)"
    )


def _store(path: Path, weights: Mapping[str, Tensor]) -> Path:
    from safetensors.torch import save_file  # imported here, because receivers must not need it

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}, path)
    return path
