"""Training backends, one folder a kind: kind.py has its settings, backend.py what trains.

The kinds import nothing heavy: configs and plans are made of them.
"""

from collections.abc import Mapping

from .base import Backend
from .deepspeed.kind import DeepSpeed
from .fsdp.kind import Fsdp, Fsdp2
from .megatron.kind import Megatron
from .single.kind import Single

__all__ = ["BACKENDS", "Backend"]

BACKENDS: Mapping[str, type[Backend]] = {
    "single": Single,
    "fsdp": Fsdp,
    "fsdp2": Fsdp2,
    "deepspeed": DeepSpeed,
    "megatron": Megatron,
}
"""The kinds of `train.backend`."""
