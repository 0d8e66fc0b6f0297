"""braid: reinforcement learning after pre-training, for language models, agents and robot policies."""

from importlib import import_module
from typing import Any

from braid.cores import wait_passively

__version__ = "0.1.0"
__all__ = ["STOP", "Run", "StopTraining", "evaluate", "load_run", "train"]  # pyright: ignore[reportUnsupportedDunderAll]

wait_passively()  # in each process that braid starts, before it imports torch


def __getattr__(name: str) -> Any:
    """The names of braid.api, imported when they are first used, so that `import braid` stays cheap."""
    if name not in __all__:
        raise AttributeError(f"module 'braid' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module("braid.api"), name)
