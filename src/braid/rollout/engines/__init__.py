"""Rollout engines, one folder a kind: kind.py has its settings, engine.py what samples.

The kinds import nothing heavy: configs and plans are made of them.
"""

from collections.abc import Mapping

from .base import Engine
from .native.kind import Native
from .sglang.kind import Sglang
from .vllm.kind import Vllm

__all__ = ["ENGINES", "Engine"]

ENGINES: Mapping[str, type[Engine]] = {
    "native": Native,
    "vllm": Vllm,
    "sglang": Sglang,
}
"""The kinds of `rollout.engine`."""
