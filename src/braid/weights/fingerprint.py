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

import torch
from torch import Tensor

from braid.errors import TrainingError

Weights = Iterable[tuple[str, Tensor]]
"""Tensors under their names."""

_COLUMNS, _ROWS = 8 * 127, 64
_ROW_BYTES = 8 * _COLUMNS
BLOCK_BYTES = _ROWS * _ROW_BYTES
"""Bytes that are summed at a time: they stay in a core's cache between a copy and the sum."""
SMALL_BYTES = 2**15
"""Up to this size a tensor is not summed first."""


class Fingerprint:
    """Of one tensor, whose bytes are summed piece by piece, each while it is in a core's cache."""

    def __init__(
        self, tensor_type: torch.dtype, shape: Iterable[int], memory: Tensor, piece_bytes: int | None = None
    ) -> None:
        """`memory` is uint8 [n], the tensor's bytes, whose pieces are of `piece_bytes`, a multiple of BLOCK_BYTES, but for the
        last; without it there is one piece."""
        self._about = f"{tensor_type} {tuple(shape)}".encode()
        num_bytes = memory.numel()
        is_small = num_bytes <= SMALL_BYTES
        middle = 0 if is_small else num_bytes - num_bytes % BLOCK_BYTES
        end = 0 if is_small else num_bytes - num_bytes % _ROW_BYTES
        step = -(-(piece_bytes or max(num_bytes, 1)) // BLOCK_BYTES)
        self._num_pieces, self._next = -(-num_bytes // (step * BLOCK_BYTES)), 0
        num_blocks = -(-end // BLOCK_BYTES)
        self._sums = memory.new_empty(num_blocks * _ROW_BYTES).view(torch.int64).view(num_blocks, _COLUMNS)
        """Of the columns of each block."""
        self._steps: list[tuple[Tensor, Tensor]] = []
        """[blocks, rows, columns] of each piece and where its sums go, and what is left after the last whole block."""
        if middle:
            blocks = memory[:middle].view(torch.int64).view(-1, _ROWS, _COLUMNS)
            self._steps += zip(blocks.split(step), self._sums[: len(blocks)].split(step), strict=True)
        if middle < end:
            self._steps.append((memory[middle:end].view(torch.int64).view(1, -1, _COLUMNS), self._sums[-1:]))
        self._rest = memory[end:]

    def add(self) -> None:
        """The next piece of the memory is there."""
        self._next += 1
        is_last = self._next == self._num_pieces
        for blocks, sums in self._steps[self._next - 1 : None if is_last else self._next]:
            torch.sum(blocks, 1, out=sums)

    def value(self) -> str:
        """128 bits in hexadecimal."""
        assert self._next == self._num_pieces, "of all pieces"
        digest = hashlib.blake2b(self._about, digest_size=16)
        if len(self._sums):
            total = (self._sums * _weights(len(self._sums), self._sums.device)).sum(0)
            digest.update(total.cpu().numpy().data)
        digest.update(self._rest.cpu().numpy().data)
        return digest.hexdigest()


@cache
def _power(exponent: int) -> int:
    """Of an odd number that generates many, so that a change in one block changes the sum; as int64 has it."""
    value = pow(0x9E3779B97F4A7C15, exponent, 2**64)
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
