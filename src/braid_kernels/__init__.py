"""Kernels for CPUs that Numba compiles. This file does not import Numba, which takes half a second."""

from __future__ import annotations

from importlib.util import find_spec


def why_not_compiled() -> str | None:
    """Why kernels cannot be compiled on this machine, with what to do; None if they can."""
    if find_spec("numba") is None:
        return "the package numba is not installed; install it (pip install numba)"
    try:
        from numba import config

        if vars(config)["DISABLE_JIT"]:
            return "Numba is switched off by NUMBA_DISABLE_JIT; unset it"
        from .calls import openmp
    except Exception as error:  # an import that fails may raise any
        return (
            f"Numba does not work here ({type(error).__name__}: {error}); install it anew (pip install numba)"
        )
    try:
        openmp()
    except (AttributeError, OSError):
        return "it needs a PyTorch that uses GNU OpenMP, as on Linux"
    return None
