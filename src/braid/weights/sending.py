"""What every sender is told, and how it takes weights: bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .fingerprint import Weights
from .wire import Receipt, TensorSpec, Ticket, Transport


class Sender(Protocol):
    """What a trainer publishes with."""

    @property
    def ticket(self) -> Ticket:
        """What engines receive by."""
        ...

    def send(self, version: int, weights: Weights) -> Receipt:
        """Publish `weights` as `version`; returns when every engine has checked all of it. `weights` are read to their end even
        when the publication fails, since reading them may be a call that other ranks make too. Raises EngineError."""
        ...

    def close(self) -> None:
        """Engines are told that nothing more comes. Can be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How a sender sends.

    `bucket_bytes` is what an engine is given at a time, `timeout_s` the longest that one version may take. With `dtype`,
    floating tensors travel in that type. `existing`: whether a second engine that calls itself by a name in use takes the
    first one's place. `device` is the trainer's, for
    the transports of GPUs. `host` is the address of this machine for the engines: by default loopback for
    transports of one machine, and else that of the interface with the default route. `folder` is where the transport `files`
    writes, and `beside` a model's folder whose config and tokenizer each version gets there too.
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


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that an engine is given together."""

    index: int
    tensors: list[tuple[TensorSpec, Tensor]]


def buckets_of(weights: Weights, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[Bucket]:
    """As many tensors as fit, in order; one that does not fit alone is a bucket of its own."""
    index, held, tensors = 0, 0, list[tuple[TensorSpec, Tensor]]()
    for name, tensor in weights:
        value = tensor.detach()
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        spec = TensorSpec(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if tensors and held + spec.num_bytes > bucket_bytes:
            yield Bucket(index, tensors)
            index, held, tensors = index + 1, 0, []
        tensors.append((spec, value))
        held += spec.num_bytes
    if tensors:
        yield Bucket(index, tensors)
