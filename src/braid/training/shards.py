"""Sharded checkpoint files, written by all ranks in parallel with torch.distributed.checkpoint.

    policy/.metadata       index: the file and offset of each box of each tensor
    policy/__0_0.distcp    written by rank 0; policy/__1_0.distcp by rank 1; ...

Tensors are named weights/NAME and optimizer/NAME/MOMENT, with the names and shapes of the unsharded model, so
a checkpoint can be read with any parallel layout: each rank reads the boxes that it needs. Counters are small
and stored elsewhere.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from braid.errors import CheckpointError

from .backend import Written

WholeMoments = Mapping[str, Mapping[str, tuple[torch.Size, torch.dtype]]]
"""Parameter -> moment -> (full shape, type)."""
_WEIGHTS, _OPTIMIZER = "weights/", "optimizer/"
_FLAT = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
"""Names are already flat."""


class Boxes:
    """This rank's parts of a tensor: boxes (offsets, part), where part[i, j] is element [offset + i, offset +
    j] of the whole. Several parts may hold the same box.

    The dunder methods implement torch.distributed.checkpoint's `_Checkpointable` protocol.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[tuple[Sequence[int], Tensor]]
    ) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        self.parts = [(torch.Size(offsets), part.detach()) for offsets, part in parts if part.numel()]

    @classmethod
    def of(cls, tensor: Tensor) -> Boxes:
        """Boxes of a DTensor's local part, or of the whole of any other tensor."""
        if not isinstance(tensor, DTensor):
            return cls(tensor.shape, tensor.dtype, [([0] * tensor.ndim, tensor)])
        local = tensor.to_local()
        (chunk,) = tensor.__create_chunk_list__()
        return cls(tensor.shape, tensor.dtype, [(chunk.offsets, local)])

    @classmethod
    def of_range(cls, flat: Tensor, shape: Sequence[int], start: int) -> Boxes:
        """Boxes of `flat`, which holds the whole's elements from `start` in row-major order."""
        return cls(shape, flat.dtype, list(boxes_of_range(flat.view(-1), shape, start)))

    def size(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.shape

    @torch.no_grad()
    def take(self, whole: Tensor) -> None:
        """Copy the parts' values from the whole tensor."""
        for offsets, part in self.parts:
            part.copy_(whole[_slices(offsets, part.shape)])

    def put(self, whole: Tensor) -> None:
        """Copy the parts' values into the whole tensor."""
        for offsets, part in self.parts:
            whole[_slices(offsets, part.shape)] = part

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, part.shape) for offsets, part in self.parts]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        once = {chunk.offsets: chunk for chunk in self.__create_chunk_list__()}
        return [
            WriteItem(
                MetadataIndex(fqn, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for offsets, chunk in once.items()
        ]

    def part_at(self, offset: Sequence[int] | None) -> Tensor:
        """The first part at this offset."""
        return next(part for offsets, part in self.parts if offsets == offset)


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


class _SavePlanner(DefaultSavePlanner):
    """DefaultSavePlanner that also looks up parts in `Boxes`; torch's looks only in tensors."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].part_at(index.offset)


class _Writer(dcp.FileSystemWriter):
    """FileSystemWriter that raises the OSError of a full disk instead of the RuntimeError about the broken
    archive that follows from it."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class _Unpickler(pickle.Unpickler):
    """Reads a checkpoint's index, which torch pickles, without executing code: any global that is not part of
    an index is rejected."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle members of enums by it
            return _memory_format
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _IN_INDEX:
            raise pickle.UnpicklingError(f"unexpected global {module}.{name}")
        return super().find_class(module, name)


def _memory_format(owner: object, name: str) -> object:
    """`getattr` for the one enum of an index."""
    if owner is not metadata._MEM_FORMAT_ENCODING or name not in metadata._MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"unexpected attribute {name} of {owner!r}")
    return metadata._MEM_FORMAT_ENCODING[name]


_IN_INDEX = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *((metadata.__name__, name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")),
}


class _Reader(dcp.FileSystemReader):
    """FileSystemReader that unpickles the index safely; torch's own unpickles anything."""

    def read_metadata(self, **kwargs: Any) -> Metadata:
        assert not kwargs.get("rank"), "there is a single index, written by rank 0"
        try:
            with (Path(self.path) / ".metadata").open("rb") as file:
                index = _Unpickler(file).load()
        except Exception as error:  # of many types, for damaged data
            raise CheckpointError(f"the checkpoint {self.path} is damaged: .metadata: {error}") from error
        if not isinstance(index, Metadata):
            raise CheckpointError(
                f"the checkpoint {self.path} is damaged: .metadata contains a {type(index).__name__}"
            )
        return index


class _LoadPlanner(DefaultLoadPlanner):
    """DefaultLoadPlanner that reads into `Boxes`."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None, "no chunk index"
        return self.state_dict[index.fqn].parts[index.index][1]


def boxes_of_range(flat: Tensor, shape: Sequence[int], start: int) -> Iterator[tuple[list[int], Tensor]]:
    """Boxes (offsets, part) in `flat` [n], which holds a tensor's elements from `start` in row-major order.
    The parts are views."""
    row = math.prod(shape[1:])
    while len(flat):
        if not shape:
            yield [], flat.view(())
            return
        index, inner = divmod(start, row)
        if inner == 0 and len(flat) >= row:
            size = len(flat) // row * row
            yield [index, *[0] * (len(shape) - 1)], flat[:size].view(-1, *shape[1:])
        else:
            size = min(row - inner, len(flat))
            for offsets, part in boxes_of_range(flat[:size], shape[1:], inner):
                yield [index, *offsets], part.unsqueeze(0)
        start, flat = start + size, flat[size:]


def write_state(folder: Path, state: Mapping[str, Any]) -> Written:
    """Write this rank's part of a TrainingBackend's state, whose tensors may be `Boxes`. Collective, also for
    ranks without any part. Disk errors are not raised; all ranks return them in `Written.error`."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    tensors = {
        name: tensor if isinstance(tensor, Boxes) else Boxes.of(tensor)
        for name, tensor in _flattened(state).items()
    }
    try:
        writer = _Writer(folder, overwrite=False)
        with _quiet():
            dcp.save(tensors, storage_writer=writer, planner=_SavePlanner(**_FLAT))
        names = [path.name for path in folder.glob(f"__{rank}_*")] + ([".metadata"] if rank == 0 else [])
        files = {name: _line_of(folder / name) for name in names}
    except CheckpointException as error:
        return Written(error=_disk_error(error))
    except OSError as error:
        return Written(error=error)
    return Written({k: v for k, v in state.items() if k not in ("weights", "optimizer")}, files)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the whole weights, without optimizer state. Not collective."""
    weights: dict[str, Any] = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in _described(folder).items()
        if name.startswith(_WEIGHTS)
    }
    with _quiet():
        dcp.load(weights, storage_reader=_Reader(folder), no_dist=True)
    return _unflattened(weights)["weights"]


def read_into(source: Path | Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Read into the `state`'s Boxes in place, from the files in a folder or from a state of whole tensors.
    Collective: each rank passes its boxes under the same names. Raises CheckpointError if the source belongs
    to another model."""
    boxes: dict[str, Any] = _flattened(state)
    expected = {name: box.shape for name, box in boxes.items()}
    described = {name: shape for name, (shape, _) in _described(source).items()}
    stored = {
        name: shape for name, shape in described.items() if name in expected or name.startswith(_WEIGHTS)
    }
    if wrong := sorted({name for name, _ in expected.items() ^ stored.items()}):
        here, there = (
            tuple(shapes[wrong[0]]) if wrong[0] in shapes else "absent" for shapes in (expected, stored)
        )
        raise CheckpointError(
            f"the checkpoint{f' {source}' if isinstance(source, Path) else ''} is of a different model: "
            f"{wrong[0]} is {here} in this run and {there} in the checkpoint ({len(wrong)} tensors differ); "
            "resume with the model of the checkpoint, or start a new run"
        )
    if isinstance(source, Path):
        with _quiet():
            dcp.load(boxes, storage_reader=_Reader(source), planner=_LoadPlanner(**_FLAT))
    else:
        whole = _flattened(source)
        for name, box in boxes.items():
            box.take(whole[name])


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the ranks' states, whose tensors are `Boxes`, into one state of whole tensors: the live ones of a
    rank that has a tensor whole."""
    whole: dict[str, Tensor] = {}
    for name, boxes in itertools.chain.from_iterable(_flattened(part).items() for part in parts):
        if len(boxes.parts) == 1 and boxes.parts[0][1].shape == boxes.shape:
            whole[name] = boxes.parts[0][1]
            continue
        if name not in whole:
            whole[name] = torch.empty(boxes.shape, dtype=boxes.dtype)
        boxes.put(whole[name])
    state = _unflattened(whole)
    return {**parts[0], **state, "optimizer": None if parts[0]["optimizer"] is None else state["optimizer"]}


def stored_moments(source: Path | Mapping[str, Any]) -> WholeMoments:
    """The moments of the optimizer state in a folder, or in a state of whole tensors."""
    return _unflattened(_described(source))["optimizer"]


def _flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    out = {_WEIGHTS + name: tensor for name, tensor in state["weights"].items()}
    for name, moments in (state["optimizer"] or {}).items():
        out.update({f"{_OPTIMIZER}{name}/{moment}": tensor for moment, tensor in moments.items()})
    return out


def _unflattened(tensors: Mapping[str, Any]) -> dict[str, Any]:
    weights, optimizer = {}, {}
    for name, tensor in tensors.items():
        if name.startswith(_WEIGHTS):
            weights[name.removeprefix(_WEIGHTS)] = tensor
        else:
            parameter, _, moment = name.removeprefix(_OPTIMIZER).rpartition("/")
            optimizer.setdefault(parameter, {})[moment] = tensor
    return {"weights": weights, "optimizer": optimizer}


def _described(source: Path | Mapping[str, Any]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of each tensor."""
    if not isinstance(source, Path):
        return {name: (tensor.shape, tensor.dtype) for name, tensor in _flattened(source).items()}
    entries = _Reader(source).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _line_of(file: Path) -> dict[str, Any]:
    """The file's entry in a checkpoint's manifest."""
    with file.open("rb", buffering=0) as opened:
        return {
            "bytes": os.fstat(opened.fileno()).st_size,
            "sha256": hashlib.file_digest(opened, "sha256").hexdigest(),
        }


def _disk_error(error: CheckpointException) -> OSError:
    """The first rank's failure as an OSError."""
    rank, (failure, _) = next(iter(error.failures.items()))
    if isinstance(failure, OSError):
        return OSError(failure.errno, failure.strerror)
    return OSError(None, f"rank {rank}: {failure}")


def _quiet() -> warnings.catch_warnings[None]:
    """Suppress torch's warnings about saving and loading in a single process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)  # pyright: ignore[reportReturnType]
