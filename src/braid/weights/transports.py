"""Which way weights take to an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from braid.errors import ConfigError, Problem

from .wire import Transport

if TYPE_CHECKING:
    from braid.config.rollout import PublishConfig

_KEY = "rollout.publish.transport"


@dataclass(frozen=True, slots=True)
class Meeting:
    """How an engine stands to the trainer rank that sends.

    `shares_tensors`: it samples with the trainer's own. `is_one_machine` and `is_one_device`: it sees the same memory, and the same GPU.
    `is_cuda`: both have their weights on GPUs. `reads_folders`: it is a server that takes weights from disk."""

    shares_tensors: bool = False
    is_one_machine: bool = True
    is_one_device: bool = False
    is_cuda: bool = False
    reads_folders: bool = False


def choose_transport(config: PublishConfig, meeting: Meeting) -> Transport | None:
    """The transport that the config names, or for `auto` the cheapest that can work; None where nothing has to travel.

    Raises ConfigError when the named one cannot work here."""
    if meeting.shares_tensors:
        return None
    asked = config.transport
    if meeting.reads_folders or asked == "files":
        return "files"
    if asked == "auto":
        return _cheapest(meeting)
    if asked == "shared_memory" and not meeting.is_one_machine:
        raise _impossible("shared_memory ends at the machine, and an engine sits on another than the trainer")
    if asked == "nccl" and not meeting.is_cuda:
        raise _impossible("NCCL carries weights between GPUs, and the trainer or an engine has none")
    if asked == "nccl" and meeting.is_one_device:
        return "cuda_ipc"  # NCCL refuses two ranks on one GPU
    return asked


def _cheapest(meeting: Meeting) -> Transport:
    if not meeting.is_cuda:
        return "shared_memory" if meeting.is_one_machine else "gloo"
    return "cuda_ipc" if meeting.is_one_device else "nccl"


def _impossible(why: str) -> ConfigError:
    return ConfigError([Problem(_KEY, f"{why}; set it to auto")])


def on_existing(config: PublishConfig, *, is_server: bool) -> Literal["replace", "refuse"]:
    """What to do where an engine already has a connection for weights (`rollout.publish.existing_group`). A server outlives runs, and
    what it has is a former run's; an engine of this run that has one is a mistake."""
    if config.existing_group != "auto":
        return config.existing_group
    return "replace" if is_server else "refuse"
