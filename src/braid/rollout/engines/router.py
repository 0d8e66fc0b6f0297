"""Routes requests to several engines: to the least loaded one, those of a group together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from braid.errors import EngineError
from braid.rollout.engine import Completion, NewWeights, Request
from braid.weights.sender import open_sender
from braid.weights.sending import Sender

from .remote import RemoteEngine, receive_by, send_to, set_weights_of


@dataclass(slots=True)
class _Home:
    """The engine for requests with the same prompt while any of them is pending."""

    engine: int
    num_requests: int = 0


@dataclass(slots=True)
class Router:
    """See SyncedEngine for the contract. Load is the sum of max_new_tokens of pending requests.

    Requests with the same prompt go to one engine while any of them is pending, so that the prompt is
    prefilled once. A request fails with its engine, whose name is in the error; a retry by the caller goes to
    another engine.
    """

    engines: Sequence[RemoteEngine]
    _loads: list[int] = field(default_factory=list)
    _failures: list[int] = field(default_factory=list)
    _homes: dict[tuple[int, ...], _Home] = field(default_factory=dict)
    _sender: Sender | None = None

    def __post_init__(self) -> None:
        assert self.engines, "a router needs at least one engine"
        self._loads = [0] * len(self.engines)
        self._failures = [0] * len(self.engines)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all engines' key/value caches in this process."""
        return sum(engine.cache_bytes for engine in self.engines)

    async def generate(self, request: Request) -> Completion:
        """Sample on the engine that has requests with the same prompt, else on the least loaded one."""
        prompt, load = request.prompt_ids, request.sampling.max_new_tokens
        home = self._homes.get(prompt)
        if home is None:
            home = self._homes[prompt] = _Home(self._least_loaded())
        home.num_requests += 1
        self._loads[home.engine] += load
        try:
            completion = await self.engines[home.engine].generate(request)
        except EngineError:
            self._failures[home.engine] += 1
            if self._homes.get(prompt) is home:
                del self._homes[prompt]
            raise
        finally:
            self._loads[home.engine] -= load
            home.num_requests -= 1
            if not home.num_requests and self._homes.get(prompt) is home:
                del self._homes[prompt]
        self._failures[home.engine] = 0
        return completion

    async def set_weights(
        self, version: int, when: NewWeights = "drain", load: Callable[[], object] | None = None
    ) -> None:
        """Sample with `version` on all engines from now on. They switch together, and `load` is called once.
        Raises EngineError unless all have received the version."""
        await set_weights_of(self.engines, version, when, load)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See SyncedEngine; the weights are read once and sent to all engines in parallel."""
        if self._sender is None:
            self._sender = open_sender(self.receivers, self.engines[0].sending)
        send_to(self.engines, self._sender, version, weights)

    @property
    def receivers(self) -> Sequence[str]:
        """The names of all engines' processes that hold weights."""
        return [name for engine in self.engines for name in engine.receivers]

    def receive(self, version: int, ticket: Mapping[str, Any] | None) -> None:
        """Receive `version` from the sender of the ticket, all engines in parallel. Raises EngineError."""
        receive_by(self.engines, version, ticket)

    def sleep(self) -> None:
        """Free the device memory of all engines until `wake`. Raises EngineError while requests run."""
        for engine in self.engines:
            engine.sleep()

    def wake(self) -> None:
        """Restore the device memory of all engines."""
        for engine in self.engines:
            engine.wake()

    def close(self) -> None:
        """Close the weight sender and all engines."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        for engine in self.engines:
            engine.close()

    def _least_loaded(self) -> int:
        """Index of the engine with the fewest consecutive failures, then the least load; ties go to the
        first."""
        return min(range(len(self.engines)), key=lambda i: (self._failures[i], self._loads[i]))
