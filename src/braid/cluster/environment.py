"""Environment variables of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

THREADS: Mapping[str, str | None] = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""One thread for each of the worker processes that share a machine."""


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` for this process and its children during the block, and restore the previous values at
    its end.

    Variables that a library reads at import, such as OMP_NUM_THREADS, must be set before the import.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
