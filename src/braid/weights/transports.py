"""Choice of the transport from the trainer to an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from braid.errors import ConfigError, Problem

from .wire import Transport

if TYPE_CHECKING:
    from braid.config.rollout import WeightSyncConfig

_KEY = "rollout.weight_sync.transport"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Placement of an engine relative to the sending trainer rank.

    `is_one_machine`, `is_one_device`: it shares host memory, or the GPU. `is_cuda`: both have their weights
    on GPUs. `reads_folders`: it is a server that loads weights from disk."""

    is_one_machine: bool = True
    is_one_device: bool = False
    is_cuda: bool = False
    reads_folders: bool = False


def choose_transport(config: WeightSyncConfig, meeting: Meeting) -> Transport:
    """The configured transport, or for `auto` the cheapest that works. Raises ConfigError if the configured
    one cannot work for this placement."""
    asked = config.transport
    if meeting.reads_folders or asked == "files":
        return "files"
    if asked == "auto" and not meeting.is_cuda:
        return "shared_memory" if meeting.is_one_machine else "gloo"
    if asked == "shared_memory" and not meeting.is_one_machine:
        raise _impossible(
            "shared_memory works only within a machine, but an engine is on another one than the trainer"
        )
    if asked == "nccl" and not meeting.is_cuda:
        raise _impossible("NCCL needs GPUs, but the trainer or an engine has none")
    if asked in ("auto", "nccl"):
        return "cuda_ipc" if meeting.is_one_device else "nccl"  # NCCL refuses two ranks on one GPU
    return asked


def _impossible(why: str) -> ConfigError:
    return ConfigError([Problem(_KEY, f"{why}; set it to auto")])


def on_existing(config: WeightSyncConfig, *, is_server: bool) -> Literal["replace", "refuse"]:
    """What to do with an engine that already has a weight connection (`rollout.weight_sync.existing_group`).
    By default a server's is replaced, since servers outlive runs and it belongs to an earlier run; for an
    engine of this run it is an error."""
    if config.existing_group != "auto":
        return config.existing_group
    return "replace" if is_server else "refuse"
