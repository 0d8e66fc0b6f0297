"""Kernels for CPUs that Numba compiles. This file does not import Numba, which takes half a second."""

from __future__ import annotations

from importlib.util import find_spec


def why_not_compiled() -> str | None:
    """Why kernels cannot be compiled on this machine, with what to do; None if it does."""
    if find_spec("numba") is None:
        return "the package numba is not installed; install it (pip install numba)"
    from .calls import openmp

    try:
        openmp()
    except (AttributeError, OSError):
        return "it needs a PyTorch that uses GNU OpenMP, as on Linux"
    return None
