"""Fingerprints of tensors, at about the speed at which memory is read, and the comparison of an engine's weights by them.

A tensor's bytes are read as rows of 1,016 words of 64 bits, 64 rows to a block. The words of a column are summed in each block,
the sums of all blocks are summed with a weight for each block (all modulo 2^64), and BLAKE2b makes 128 bits of the 1,016
sums, of what is left after the last whole row, and of type and shape. So

* whatever changes in one row's length of bytes (8,128), anywhere, is noticed for certain (as surely as BLAKE2b tells bytes apart);
* other damage goes unnoticed with a chance of about 2^-64;
* rows that trade places within a block are not noticed: the prime 127 in their length keeps tensors and pages from being such.

That is a guard against faulty memory, transports and bookkeeping, not against an enemy. Tensors of up to 32 KiB are given to
BLAKE2b as they are. Sums are exact, so CPU and GPU agree.
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
"""Tensors under their names."""

_ROW_BYTES = 8 * COLUMNS
BLOCK_BYTES = ROWS * _ROW_BYTES
"""Bytes that are summed at a time."""
SMALL_BYTES = 2**15
"""Up to this size a tensor is not summed first."""


class Fingerprint:
    """Of one tensor, whose bytes are summed piece by piece, each as it is copied or by itself."""

    def __init__(
        self, tensor_type: torch.dtype, shape: Iterable[int], memory: Tensor, piece_bytes: int | None = None
    ) -> None:
        """`memory` is uint8 [n], the tensor's bytes, whose pieces are of `piece_bytes`, a multiple of BLOCK_BYTES, but for the
        last; without it there is one piece."""
        self._about = f"{tensor_type} {tuple(shape)}".encode()
        self._memory, self._size, self._next = memory, memory.numel(), 0
        self._piece_bytes = piece_bytes or max(self._size, 1)
        self._end = 0 if self._size <= SMALL_BYTES else self._size - self._size % _ROW_BYTES
        self._total = torch.zeros(COLUMNS if self._end else 0, dtype=torch.int64, device=memory.device)

    def add(self) -> None:
        """Sum the next piece of the memory, which is there."""
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
        """Copy the next piece of the memory, which is `source` or `target`, from or to other memory, and sum it."""
        one_pass = self._one_pass() if source.device == target.device else None
        if one_pass is None:
            copy(source, target)
            self.add()
            return
        self._advance()
        size = min(source.numel(), target.numel())
        one_pass(source.data_ptr(), target.data_ptr(), self._total.data_ptr(), size)

    def value(self) -> str:
        """128 bits in hexadecimal."""
        assert self._next >= self._size, "of all pieces"
        digest = hashlib.blake2b(self._about, digest_size=16)
        digest.update(self._total.cpu().numpy().data)
        digest.update(self._memory[self._end :].cpu().numpy().data)
        return digest.hexdigest()

    def _advance(self) -> tuple[int, int]:
        """Where the next piece begins, and where its whole rows end."""
        start, self._next = self._next, self._next + self._piece_bytes
        return start, min(self._next, self._end)

    def _one_pass(self) -> Any:
        """For what is in host memory and large enough to be summed."""
        return copy_and_sum() if self._end and self._memory.device.type == "cpu" else None


@cache
def _power(exponent: int) -> int:
    """Of an odd number that generates many, so that a change in one block changes the sum; as int64 has it."""
    value = pow(FACTOR, exponent, 2**64)
    return value - 2**64 if value >= 2**63 else value


@cache
def _weights(number: int, device: torch.device) -> Tensor:
    """int64 [number, 1]: of blocks one after the other, the last one's 1."""
    powers = [_power(exponent) for exponent in reversed(range(number))]
    return torch.tensor(powers, dtype=torch.int64, device=device).view(-1, 1)


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [n] of a tensor, in its own memory where that is contiguous and begins at a whole word."""
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return (flat.clone() if flat.data_ptr() % 8 else flat).view(torch.uint8)


def fingerprint(tensor: Tensor) -> str:
    """Of type, shape and every bit; the same on every device and for every layout in memory."""
    return of_bytes(tensor.dtype, tensor.shape, bytes_of(tensor)).value()


def of_bytes(tensor_type: torch.dtype, shape: Iterable[int], memory: Tensor) -> Fingerprint:
    """Of a tensor whose bytes, `memory` [n], are all there."""
    of = Fingerprint(tensor_type, shape, memory)
    if memory.numel():
        of.add()
    return of


def fingerprints(weights: Weights, like: Mapping[str, torch.dtype] | None = None) -> dict[str, str]:
    """Fingerprint by name. With `like`, of the weights in those types, and of its names only."""
    if like is None:
        return {name: fingerprint(tensor) for name, tensor in weights}
    return {name: fingerprint(tensor.to(like[name])) for name, tensor in weights if name in like}


def check_published(trainer: Weights, engine: Weights, *, version: int, folder: Path) -> None:
    """Compare what the engine took over as `version` with what the trainer gave, tensor by tensor, in the engine's type.

    Raises TrainingError when they differ, after writing both sets as `folder`/version_N_{trainer,engine}.safetensors.
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
        f"after the publication of version {version} the engine's weights are not the trainer's: {len(wrong)} of "
        f"{len(ours | theirs)} tensors differ ({shown}). Both sets are in {files[0]} and {files[1]}. The engine or its "
        "transport is at fault; report it with these files (rollout.check_weights=false leaves the comparison out)"
    )


def _store(path: Path, weights: Mapping[str, Tensor]) -> Path:
    from safetensors.torch import save_file  # here alone: receivers do without

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}, path)
    return path
