"""Base class of engines in other processes: weight sync and versions."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from braid.errors import EngineError
from braid.rollout.engine import Completion, NewWeights, Request, SyncedEngine, version_runs
from braid.types import StopReason
from braid.weights.sender import open_sender
from braid.weights.sending import Sender, SendOptions

Part = Literal["weights", "kv_cache"]
"""Parts of an engine's device memory, by their names in vLLM and SGLang."""
PARTS: tuple[Part, ...] = ("weights", "kv_cache")
Answer = tuple[list[int], list[float], StopReason | Literal["abort"]]
"""Tokens, their log-probs, and the stop reason."""
_AGAIN_S = 0.5
"""Time after which requests that an interrupt did not end, since they were still on their way, are
interrupted again."""
_WHY_S = 2.0
"""Time to wait for an engine's error after a failed weight transfer."""


class RemoteEngine(SyncedEngine):
    """The weight sync of a SyncedEngine; subclasses implement how a version is received."""

    def __init__(self, name: str, sending: SendOptions) -> None:
        """`name` is used in messages; `sending` configures how `load_weights` sends weights from this
        process."""
        self.name, self.sending = name, sending
        self._sender: Sender | None = None
        self._version: int | None = None
        self._gone: tuple[Part, ...] = ()
        self.num_pending = 0
        """Number of unanswered requests."""
        self._num_interrupts = 0
        self._turn = asyncio.Lock()
        self._idle = asyncio.Event()  # set when no request is pending
        self._released: asyncio.Event | None = None  # new requests wait for it

    @property
    def version(self) -> int | None:
        """The version of the weights that the engine has; None if it has none."""
        return self._version

    @property
    def cache_bytes(self) -> int:
        """See RolloutEngine. 0: the cache is in another process."""
        return 0

    @property
    @abstractmethod
    def receivers(self) -> Sequence[str]:
        """Names by which a sender addresses this engine: one per engine process that holds weights."""

    @abstractmethod
    def _check(self, request: Request) -> None:
        """Raise EngineError for a request that can never be answered."""

    @abstractmethod
    async def _ask(self, request: Request, version: int) -> Answer:
        """Send a request, and wait for the answer of weights `version`."""

    @abstractmethod
    def _interrupt(self) -> None:
        """End the running requests with their tokens so far, for the reason "abort"."""

    @abstractmethod
    def _receive(self, version: int, ticket: Mapping[str, Any]) -> Future[Any]:
        """Start to receive `version` from the sender of `ticket`."""

    @abstractmethod
    def _release(self) -> None:
        """Free the device memory of all PARTS of an idle engine; weights move to host memory."""

    @abstractmethod
    def _regain(self, parts: tuple[Part, ...]) -> None:
        """Restore the device memory of these parts."""

    def sleep(self) -> None:
        """Free the device memory of all PARTS until `wake`. Raises EngineError while requests run."""
        if self._gone == PARTS:
            return
        self.check_idle("sleep")
        self.wake()
        self._gone = PARTS
        self._release()

    def wake(self) -> None:
        """Restore the device memory that `sleep` freed."""
        if self._gone:
            self._regain(self._gone)
            self._gone = ()

    async def generate(self, request: Request) -> Completion:
        """See RolloutEngine. A request that new weights interrupt is sent again with its tokens so far as
        part of the prompt; a stop string that spans both parts is not found."""
        self._check(request)
        start_s, sampling = time.time(), request.sampling
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        while True:
            while self._released is not None:
                await self._released.wait()
            version, num, num_interrupts = self._published(), len(token_ids), self._num_interrupts
            rest = replace(
                request,
                prompt_ids=(*request.prompt_ids, *token_ids),
                sampling=replace(
                    sampling,
                    max_new_tokens=sampling.max_new_tokens - num,
                    min_new_tokens=max(0, sampling.min_new_tokens - num),
                ),
                key=(*request.key, num) if num else request.key,
            )
            self.num_pending += 1
            try:
                more, of_more, reason = await self._ask(rest, version)
            finally:
                self.num_pending -= 1
                if not self.num_pending:
                    self._idle.set()
            self._check_finite(of_more, version)
            token_ids, logprobs = [*token_ids, *more], [*logprobs, *of_more]
            versions += [version] * len(more)
            if reason != "abort":
                return Completion(token_ids, logprobs, reason, version_runs(versions), start_s, time.time())
            if not more and num_interrupts == self._num_interrupts:
                raise EngineError(f"{self.name} aborted a request that had no tokens")

    @asynccontextmanager
    async def at_rest(self, when: NewWeights) -> AsyncIterator[None]:
        """Within the block no request runs, and new ones wait; see Engine.set_weights."""
        async with self._turn:
            released = self._released = asyncio.Event()
            try:
                while self.num_pending:
                    self._idle = asyncio.Event()
                    if when == "interrupt":
                        self._num_interrupts += 1
                        await asyncio.to_thread(self._interrupt)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._idle.wait(), _AGAIN_S if when == "interrupt" else None)
                yield
            finally:
                self._released = None
                released.set()

    async def set_weights(
        self, version: int, when: NewWeights = "drain", load: Callable[[], object] | None = None
    ) -> None:
        """See RolloutEngine. Raises EngineError unless `version` has been received."""
        await set_weights_of([self], version, when, load)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send `weights` to the engine as `version`. Raises EngineError if they do not arrive intact, or
        while requests run."""
        if self._sender is None:
            self._sender = open_sender(self.receivers, self.sending)
        send_to([self], self._sender, version, weights)

    def receive(self, version: int, ticket: Mapping[str, Any] | None) -> None:
        """Receive `version` from the sender of the ticket. Raises EngineError."""
        receive_by([self], version, ticket)

    def start_receiving(self, version: int, ticket: Mapping[str, Any]) -> Future[Any]:
        """Start to receive `version` from a sender in any process (weights.open_sender with `receivers`). The
        engine has no usable weights until `finish_receiving`. Raises EngineError while requests run."""
        self.check_idle(f"sync version {version}")
        self._version = None
        if "weights" in self._gone:  # the cache's memory is still in use by others
            self._regain(("weights",))
            self._gone = ("kv_cache",)
        return self._receive(version, ticket)

    def finish_receiving(self, version: int, receiving: Future[Any]) -> None:
        """Wait for `version` and sample with it from now on. Raises EngineError if it did not arrive
        intact."""
        try:
            receiving.result(self.sending.timeout_s)
        except FutureTimeoutError:
            raise EngineError(
                f"{self.name} did not load version {version} within {self.sending.timeout_s:g} s; raise "
                "cluster.call_timeout_s if it needs more time"
            ) from None
        self._version = version

    def use_loaded_weights(self) -> None:
        """Sample with the weights that the engine loaded at its start, as version 0."""
        self._version = 0

    def close(self) -> None:
        """Close the weight sender, if one is open."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def check_idle(self, what: str) -> None:
        """Raise EngineError while requests run; `what` names the refused operation."""
        if self.num_pending:
            raise EngineError(f"cannot {what} while {self.num_pending} requests run; await them first")

    def _published(self) -> int:
        """The version of the weights that requests are sampled with. Raises EngineError if asleep or without
        weights."""
        if self._gone:
            raise EngineError(f"{self.name} is asleep; call wake() first")
        if self._version is None:
            raise EngineError(
                f"{self.name} has no weights: they have not been synced, or the last sync failed"
            )
        return self._version

    def _check_finite(self, logprobs: Iterable[float], version: int) -> None:
        if not all(map(math.isfinite, logprobs)):
            raise EngineError(
                f"{self.name} gave log-probs that are not finite (policy version {version}); the policy's "
                "weights have diverged, or overflow in the engine's dtype"
            )


async def set_weights_of(
    engines: Sequence[RemoteEngine], version: int, when: NewWeights, load: Callable[[], object] | None
) -> None:
    """`set_weights` of several engines whose weights `load` brings together."""
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.TaskGroup() as tasks:  # an error of one cancels the others
                for engine in engines:
                    tasks.create_task(stack.enter_async_context(engine.at_rest(when)))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        if load is not None:
            await asyncio.to_thread(load)
        for engine in engines:
            if version != engine.version:
                raise EngineError(f"{engine.name} has version {engine.version} of the weights, not {version}")


def receive_by(engines: Sequence[RemoteEngine], version: int, ticket: Mapping[str, Any] | None) -> None:
    """Have all `engines` receive `version` in parallel from a sender in another process. Raises
    EngineError."""
    assert ticket is not None, "the sender is in another process"
    receiving = [engine.start_receiving(version, ticket) for engine in engines]
    for engine, under_way in zip(engines, receiving, strict=True):
        engine.finish_receiving(version, under_way)


def send_to(
    engines: Sequence[RemoteEngine], sender: Sender, version: int, weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Send `weights` to all `engines` in parallel; `sender` is open to the receivers of all of them. Raises
    EngineError if an engine did not receive them intact, or while requests run."""
    for engine in engines:
        engine.check_idle(f"sync version {version}")
    receiving = [engine.start_receiving(version, sender.ticket.as_dict()) for engine in engines]
    try:
        sender.send(version, weights)
    except EngineError:
        # If an engine caused the failure, its error says why.
        for future in receiving:
            with contextlib.suppress(FutureTimeoutError):
                future.result(_WHY_S)
        raise
    for engine, future in zip(engines, receiving, strict=True):
        engine.finish_receiving(version, future)
