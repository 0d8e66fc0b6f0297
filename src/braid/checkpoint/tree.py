"""Lossless conversion of a state to JSON plus named tensors, and back.

A state is a tree of dict, list, tuple, str, int, float, bool, None, bytes, numpy arrays and torch tensors.
Types are preserved, floats bit for bit (including nan and infinities), integers of any size, with these
exceptions: numpy scalars become Python numbers, instances of subclasses (OrderedDict, enums) their base type,
and tensors are restored on the CPU without gradients. Leaves that are the same tensor (same memory and shape)
are stored once and restored as one tensor; other views of shared memory are restored as separate tensors.

Values without a JSON form are written as a mapping with one key that begins with `$`: {"$tuple": [...]},
{"$dict": [[key, value], ...]}, {"$float": "nan"}, {"$bytes": base64}, {"$tensor": name}, {"$array": name}. A
mapping with keys that are not strings, or begin with `$`, is written as $dict.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from braid.errors import CheckpointError


def pack(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Convert a state to (JSON data, tensors by name). Tensors are not copied. Raises CheckpointError for a
    value of an unsupported type."""
    packer = _Packer()
    return packer.pack(state, ""), packer.tensors


def unpack(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Restore the state from the results of `pack`."""
    if isinstance(data, list):
        return [unpack(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1 and next(iter(data)).startswith("$"):
        return _unpack_tagged(*next(iter(data.items())), tensors)
    return {key: unpack(value, tensors) for key, value in data.items()}


def _unpack_tagged(tag: str, content: Any, tensors: Mapping[str, Tensor]) -> Any:
    match tag:
        case "$tuple":
            return tuple(unpack(item, tensors) for item in content)
        case "$dict":
            return {unpack(key, tensors): unpack(value, tensors) for key, value in content}
        case "$float":
            return float(content)
        case "$bytes":
            return base64.b64decode(content)
        case "$tensor":
            return tensors[content]
        case "$array":
            return tensors[content].numpy()
        case _:
            raise CheckpointError(
                f"the state contains {tag!r}, which this version of braid does not support; update braid"
            )


class _Packer:
    """Converts a state and collects its tensors under their paths."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def pack(self, value: Any, path: str) -> Any:
        match value:
            case None | bool():
                return value
            case str():
                return str.__str__(value)
            case int() | np.integer() | np.bool_():
                return bool(value) if isinstance(value, np.bool_) else int(value)
            case float() | np.floating():
                number = float(value)
                return number if math.isfinite(number) else {"$float": repr(number)}
            case bytes():
                return {"$bytes": base64.b64encode(value).decode("ascii")}
            case Tensor():
                return {"$tensor": self._name(value, path)}
            case np.ndarray():
                return {"$array": self._name(self._as_tensor(value, path), path)}
            case tuple():
                return {"$tuple": self._items(value, path)}
            case list():
                return self._items(value, path)
            case Mapping():
                return self._mapping(value, path)
            case _:
                raise _cannot(path, f"a {type(value).__name__}")

    def _items(self, values: list[Any] | tuple[Any, ...], path: str) -> list[Any]:
        return [self.pack(value, f"{path}/{i}") for i, value in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str.__str__(key): self.pack(item, f"{path}/{key}") for key, item in value.items()}
        return {"$dict": [[self.pack(k, path), self.pack(v, f"{path}/{k}")] for k, v in value.items()]}

    def _as_tensor(self, array: np.ndarray, path: str) -> Tensor:
        try:
            native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
            return torch.from_numpy(native if native.flags.writeable else native.copy())
        except (TypeError, ValueError):
            raise _cannot(path, f"a numpy array of {array.dtype}") from None

    def _name(self, tensor: Tensor, path: str) -> str:
        """Name under which the tensor is stored: its path, or that of an earlier leaf that is the same
        tensor."""
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise _cannot(path, f"a tensor that is not dense ({tensor.layout}, {tensor.device})")
        tensor = tensor.detach()
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and same in self._names:
            return self._names[same]
        name = path.removeprefix("/")
        while name in self.tensors or name == "__metadata__":
            name += "~"
        self.tensors[name] = tensor
        if tensor.numel():
            self._names[same] = name
        return name


def _cannot(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the state at {path.removeprefix('/') or 'its root'} contains {what}, which checkpoints do not support; allowed are "
        "dict, list, tuple, str, int, float, bool, None, bytes, numeric numpy arrays, and dense tensors"
    )
