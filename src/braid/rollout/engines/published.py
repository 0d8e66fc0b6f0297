"""What engines outside this process have in common: weights are brought to them, and a version counts once it has arrived."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Literal

from torch import Tensor

from braid.errors import EngineError
from braid.rollout.engine import PublishedEngine
from braid.weights.sender import open_sender
from braid.weights.sending import Sender, SendOptions

Part = Literal["weights", "kv_cache"]
"""What an engine has on its device, as vLLM and SGLang call it."""
PARTS: tuple[Part, ...] = ("weights", "kv_cache")
_WHY_S = 2.0
"""How long an engine may take to say why it stopped receiving."""


class RemoteEngine(PublishedEngine):
    """The publishing half of a PublishedEngine; subclasses say how a version is received."""

    def __init__(self, name: str, sending: SendOptions) -> None:
        """`name` is what messages call it; `sending` is how `load_weights` brings weights from this process to it."""
        self.name, self.sending = name, sending
        self._sender: Sender | None = None
        self._version: int | None = None
        self._gone: tuple[Part, ...] = ()

    @property
    def cache_bytes(self) -> int:
        """See RolloutEngine: nothing in this process."""
        return 0

    @property
    @abstractmethod
    def receivers(self) -> Sequence[str]:
        """What a sender knows this engine's ends by: one for each process that has weights."""

    @property
    @abstractmethod
    def num_pending(self) -> int:
        """Requests without an answer yet."""

    @abstractmethod
    def _receive(self, version: int, ticket: Mapping[str, Any]) -> Future[Any]:
        """Begin to take `version` over from the sender of `ticket`."""

    @abstractmethod
    def _release(self) -> None:
        """Give the memory of all PARTS of an idle engine back; weights go to host memory."""

    @abstractmethod
    def _regain(self, parts: tuple[Part, ...]) -> None:
        """Take the memory of these parts again."""

    def sleep(self) -> None:
        """See RolloutEngine."""
        if self._gone == PARTS:
            return
        self.check_idle("sleep")
        self.wake()
        self._gone = PARTS
        self._release()

    def wake(self) -> None:
        """See RolloutEngine."""
        if self._gone:
            self._regain(self._gone)
            self._gone = ()

    def publish(self, version: int) -> None:
        """See RolloutEngine: `version` has to have been brought here before."""
        if version != self._version:
            raise EngineError(f"{self.name} has version {self._version} of the weights, not {version}")

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See PublishedEngine."""
        if self._sender is None:
            self._sender = open_sender(self.receivers, self.sending)
        send_to([self], self._sender, version, weights)

    def start_receiving(self, version: int, ticket: Mapping[str, Any]) -> Future[Any]:
        """Begin to take `version` over from a sender in any process (weights.open_sender with `receivers`). The engine has no
        weights until `finish_receiving`. Raises EngineError while requests run."""
        self.check_idle(f"publish version {version}")
        self._version = None
        if "weights" in self._gone:  # the cache is for others still
            self._regain(("weights",))
            self._gone = ("kv_cache",)
        return self._receive(version, ticket)

    def finish_receiving(self, version: int, receiving: Future[Any]) -> None:
        """Sample with `version` from now on. Raises EngineError when it did not arrive as it was sent."""
        try:
            receiving.result(self.sending.timeout_s)
        except FutureTimeoutError:
            raise EngineError(
                f"{self.name} did not take version {version} over within {self.sending.timeout_s:g} s; raise "
                "cluster.call_timeout_s if it only needs longer"
            ) from None
        self._version = version

    def close(self) -> None:
        """See RolloutEngine."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def check_idle(self, what: str) -> None:
        """Raise EngineError while requests run; `what` is what cannot be done then."""
        if self.num_pending:
            raise EngineError(f"cannot {what} while {self.num_pending} requests run; await them first")

    def _published(self) -> int:
        """The version that requests are answered with."""
        if self._gone:
            raise EngineError(f"{self.name} is asleep; wake it before it is asked")
        if self._version is None:
            raise EngineError(f"{self.name} has no weights: a publication has to come first, and to end well")
        return self._version

    def _check_finite(self, logprobs: Iterable[float], version: int) -> None:
        if not all(map(math.isfinite, logprobs)):
            raise EngineError(
                f"{self.name} gave log-probs that are not finite (policy version {version}); the policy's weights have "
                "diverged, or overflow in the engine's dtype"
            )


def send_to(
    engines: Sequence[RemoteEngine], sender: Sender, version: int, weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Bring `weights` to all `engines` at once; `sender` is for the receivers of all of them. Raises EngineError when one of them
    has not taken over what was sent, or while requests run."""
    for engine in engines:
        engine.check_idle(f"publish version {version}")
    receiving = [engine.start_receiving(version, sender.ticket.as_dict()) for engine in engines]
    try:
        sender.send(version, weights)
    except EngineError:
        # Where an engine itself failed, it knows why.
        for of in receiving:
            with contextlib.suppress(FutureTimeoutError):
                of.result(_WHY_S)
        raise
    for engine, of in zip(engines, receiving, strict=True):
        engine.finish_receiving(version, of)
