"""Arrays in memory that two processes share, which the system frees with the last of both."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


class SharedArrays:
    """Memory without a name. The process that makes it passes `descriptor` on to a child, and both then
    `map` the same arrays."""

    def __init__(self, descriptor: int | None = None) -> None:
        """With a `descriptor`, the memory that another process has made."""
        self.descriptor = os.memfd_create("braid-arrays") if descriptor is None else descriptor
        os.set_inheritable(self.descriptor, False)

    def map(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, NDArray[np.uint8]]:
        """Arrays by name; the first call makes the memory large enough."""
        if not shapes:
            return {}
        ends = np.cumsum([math.prod(shape) for shape in shapes.values()]).tolist()
        os.ftruncate(self.descriptor, ends[-1])
        whole = np.frombuffer(mmap.mmap(self.descriptor, ends[-1]), np.uint8)
        parts = np.split(whole, ends[:-1])
        return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    def close(self) -> None:
        """Close the descriptor; arrays that are in use keep the memory."""
        os.close(self.descriptor)
