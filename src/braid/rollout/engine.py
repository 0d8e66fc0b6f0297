"""The protocol of a rollout engine: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from braid.types import StopReason

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are drawn; fields as in config.rollout.SamplingConfig.

    `stop_token_ids` holds all end tokens. `stop_strings` end generation once the decoded output contains one.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample. `key` seeds its random numbers: the same key, prompt and weights give the same
    tokens whatever else runs. Requests with equal `prompt_ids` that wait together are prefilled once."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    key: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """`token_ids` include the end token when it was drawn. `logprobs` has one natural log per token, of the
    distribution that the token was drawn from. Times are those of time.perf_counter()."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    policy_version: int
    start_s: float
    end_s: float


class RolloutEngine(Protocol):
    """Samples completions. Cancelling the task that awaits `generate` frees the request's place at once."""

    @property
    def cache_bytes(self) -> int:
        """Memory that the engine's key/value cache takes in this process."""
        ...

    async def generate(self, request: Request) -> Completion: ...

    def publish(self, version: int) -> None:
        """Take the policy's weights as they are now, as `version`. Not while requests run."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that it samples with, in its own type."""
        ...

    def close(self) -> None: ...
