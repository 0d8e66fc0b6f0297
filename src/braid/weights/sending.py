"""The sender protocol, its options, and the split of weights into buckets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .fingerprint import Weights
from .wire import Receipt, TensorSpec, Ticket, Transport


class Sender(Protocol):
    """Sends the trainer's weights to engines."""

    @property
    def ticket(self) -> Ticket:
        """The data with which engines open their receivers."""
        ...

    def send(self, version: int, weights: Weights) -> Receipt:
        """Send `weights` as `version`; returns when every engine has verified all of it (transport `files`:
        when it is written). `weights` is exhausted even if sending fails, since iterating may be a
        collective. Raises EngineError."""
        ...

    def close(self) -> None:
        """Tell the engines that no more versions follow. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class SendOptions:
    """Options of a sender.

    `bucket_bytes` is the size of the buckets that engines receive, `timeout_s` the time limit for one
    version. With `dtype`, floating-point tensors are sent in that type. `existing`: whether a second engine
    with a name in use replaces the first or is refused. `device` is the trainer's, for GPU transports. `host`
    is the address at which engines reach this machine: by default loopback for single-machine transports,
    else that of the interface with the default route. Ray's workers have the address by which the cluster
    knows their machine. `folder` is where the transport `files` writes, and `beside` a model folder whose
    config and tokenizer are copied into each version there.
    """

    transport: Transport
    bucket_bytes: int
    timeout_s: float
    dtype: torch.dtype | None = None
    existing: Literal["replace", "refuse"] = "refuse"
    device: torch.device | None = None
    host: str | None = None
    folder: str | None = None
    beside: str | None = None


Bucket = list[tuple[TensorSpec, Tensor]]
"""Tensors that are sent and verified together."""


def buckets_of(weights: Weights, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[Bucket]:
    """Split `weights` in order into buckets of at most `bucket_bytes`; a larger tensor gets its own
    bucket."""
    held, tensors = 0, Bucket()
    for name, tensor in weights:
        value = tensor.detach()
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        spec = TensorSpec(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if tensors and held + spec.num_bytes > bucket_bytes:
            yield tensors
            held, tensors = 0, []
        tensors.append((spec, value))
        held += spec.num_bytes
    if tensors:
        yield tensors
