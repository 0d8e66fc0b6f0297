"""The protocol of a rollout engine: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from braid.errors import EngineError
from braid.types import Placed, PolicyVersion, StopReason, Turn, identity

from .random import stream

if TYPE_CHECKING:
    from torch import Tensor


NewWeights = Literal["drain", "interrupt"]
"""When an engine switches to new weights. drain: after the running requests; later ones wait. interrupt: at
once; running requests continue with the new weights."""


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

    def within(self, room: int) -> Sampling:
        """The same with at most `room` new tokens."""
        if room >= self.max_new_tokens:
            return self
        return replace(self, max_new_tokens=room, min_new_tokens=min(self.min_new_tokens, room))


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample. `key` seeds its random numbers: the same key, prompt and weights give the
    same tokens whatever else runs. Requests with equal `prompt_ids` that wait together are prefilled once.
    The turns of a `conversation` have the same name, by which an engine finds the cache of the turns
    before. `images` are the images of the prompt."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    key: tuple[int, ...]
    conversation: tuple[int, ...] | None = None
    images: tuple[Placed, ...] = ()

    @property
    def identity(self) -> tuple[int, ...]:
        """Equal for equal prompts, their images among them."""
        return identity(self.prompt_ids, self.images) if self.images else self.prompt_ids


@dataclass(frozen=True, slots=True)
class Completion:
    """`token_ids` include the end token when it was drawn. `logprobs` has one natural log per token, of the
    distribution that the token was drawn from. Times are wall-clock seconds, of time.time(). `experts` [n, L,
    K] are those that were chosen in L layers for each token of prompt and completion but the last; None
    unless the engine records them."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    policy_version: PolicyVersion
    start_s: float
    end_s: float
    experts: NDArray[np.signedinteger] | None = None

    def turn(self, context_ids: list[int], images: tuple[Placed, ...] = ()) -> Turn:
        """The turn after `context_ids`, the tokens read since the turn before, with `images`."""
        num_new = len(context_ids) + len(self.token_ids)
        return Turn(
            context_ids=context_ids,
            output_ids=self.token_ids,
            logprobs=self.logprobs,
            stop_reason=self.stop_reason,
            policy_version=self.policy_version,
            start_s=self.start_s,
            end_s=self.end_s,
            experts=None if self.experts is None else self.experts[-num_new:],
            images=images,
        )


class Engine(Protocol):
    """What samples from the policy's weights."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the engine's key/value cache in this process."""
        ...

    async def set_weights(
        self, version: int, when: NewWeights = "drain", load: Callable[[], object] | None = None
    ) -> None:
        """Sample with new weights from now on, as `version`; returns once that is so. `load` brings the
        weights to the engine. It is called in a thread, while nothing is sampled. Without it the engine reads
        the trainer's tensors, which must not change until this returns.

        If `load` fails, its error is raised, running requests fail, and further ones are refused until a call
        succeeds. Calls take effect in order. Cancelling a call that waits has no effect on requests."""
        ...

    def sleep(self) -> None:
        """Free device memory until `wake`: the cache, and the engine's own weights where they can be kept in
        host memory. Requests are refused meanwhile. Not while requests run. Idempotent, as is `wake`."""
        ...

    def wake(self) -> None:
        """Accept requests again; no effect on an engine that is awake."""
        ...

    def close(self) -> None:
        """Fail pending requests and stop child processes. Idempotent."""
        ...


class NoEngine:
    """An engine of a run that samples nothing."""

    cache_bytes = 0

    async def set_weights(
        self, version: int, when: NewWeights = "drain", load: Callable[[], object] | None = None
    ) -> None:
        """Do nothing: there is nothing that samples."""

    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class RolloutEngine(Engine, Protocol):
    """Samples completions. Cancelling the task that awaits `generate` frees the request's slot at once.

    Every failure is raised as EngineError: a request that fails or times out has no completion.
    """

    async def generate(self, request: Request) -> Completion: ...


class SyncedEngine(RolloutEngine, Protocol):
    """An engine in another process, which receives copies of the weights."""

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load these weights as `version`, also while asleep. Not while requests run. Raises EngineError if
        the data that arrived differs from the data sent; requests are then refused until a weight sync
        succeeds."""
        ...


def check_request(request: Request, *, longest: int, key: str) -> None:
    """Raise EngineError for a request that no engine can answer. `longest` is the most tokens that the engine
    accepts, set by `key`."""
    prompt, new = len(request.prompt_ids), request.sampling.max_new_tokens
    if prompt == 0:
        raise EngineError("the prompt has no tokens; use the model's tokenizer")
    if new < 1:
        raise EngineError(f"max_new_tokens={new} must be at least 1")
    if prompt + new > longest:
        raise EngineError(
            f"{prompt} prompt tokens + max_new_tokens={new} = {prompt + new} tokens, above the engine's "
            f"{longest} positions; raise {key} if the model allows more, or lower "
            "rollout.sampling.max_new_tokens or data.max_prompt_tokens"
        )


def version_runs(versions: Sequence[int]) -> PolicyVersion:
    """The versions of all tokens in compact form."""
    runs = tuple((version, sum(1 for _ in same)) for version, same in groupby(versions))
    return runs[0][0] if len(runs) == 1 else runs


def seed_of(key: tuple[int, ...]) -> int:
    """A request's key as a 63-bit seed, for engines with their own random generators."""
    return int(stream(key) >> np.uint64(1))
