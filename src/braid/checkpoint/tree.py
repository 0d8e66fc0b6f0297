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
    tensors = _Tensors()
    return _pack(state, "", tensors), tensors.by_name


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


def _pack(value: Any, path: str, tensors: _Tensors) -> Any:
    match value:
        case np.generic():
            return _pack(value.item(), path, tensors)
        case float() if not math.isfinite(value):
            return {"$float": repr(value)}
        case None | bool() | str() | int() | float():
            return value
        case bytes():
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        case Tensor():
            return {"$tensor": tensors.add(value, path)}
        case np.ndarray():
            try:
                native = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
                tensor = torch.from_numpy(native if native.flags.writeable else native.copy())
            except (TypeError, ValueError):
                raise _cannot(path, f"a numpy array of {value.dtype}") from None
            return {"$array": tensors.add(tensor, path)}
        case tuple():
            return {"$tuple": _pack(list(value), path, tensors)}
        case list():
            return [_pack(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        case Mapping() if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _pack(item, f"{path}/{key}", tensors) for key, item in value.items()}
        case Mapping():
            pairs = value.items()
            return {"$dict": [[_pack(k, path, tensors), _pack(v, f"{path}/{k}", tensors)] for k, v in pairs]}
        case _:
            raise _cannot(path, f"a {type(value).__name__}")


class _Tensors:
    """The tensors of a state under their paths."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def add(self, tensor: Tensor, path: str) -> str:
        """The name of the tensor: its path, or that of an earlier leaf that is the same tensor."""
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise _cannot(path, f"a tensor that is not dense ({tensor.layout}, {tensor.device})")
        tensor = tensor.detach()
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and same in self._names:
            return self._names[same]
        name = path.removeprefix("/")
        while name in self.by_name or name == "__metadata__":
            name += "~"
        self.by_name[name] = tensor
        if tensor.numel():
            self._names[same] = name
        return name


def _cannot(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the state at {path.removeprefix('/') or 'its root'} contains {what}, which checkpoints do not "
        "support; allowed are dict, list, tuple, str, int, float, bool, None, bytes, numeric numpy arrays, "
        "and dense tensors"
    )
