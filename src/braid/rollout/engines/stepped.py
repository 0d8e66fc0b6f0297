"""Base class of engines in this process: an asyncio task steps the engine while anything is pending, yields
to other tasks between steps, and switches to new weights between two steps."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from braid.errors import EngineError
from braid.rollout.engine import NewWeights


@dataclass(slots=True, eq=False)
class _Switch:
    """A pending call of `set_weights`."""

    version: int
    when: NewWeights
    load: Callable[[], object] | None
    future: asyncio.Future[None]


class SteppedEngine(ABC):
    """Subclasses hold the requests and the weights. `_version` is None after weights failed to load."""

    def __init__(self) -> None:
        self._switches: deque[_Switch] = deque()
        self._stepper: asyncio.Task[None] | None = None
        self._version: int | None = 0
        self._is_closed = False

    @property
    @abstractmethod
    def shares_weights(self) -> bool:
        """Whether the engine uses the trainer's tensors rather than a copy."""

    @property
    @abstractmethod
    def num_pending(self) -> int:
        """Number of unfinished requests."""

    @property
    @abstractmethod
    def _has_begun(self) -> bool:
        """Whether any pending request has been sampled from."""

    @abstractmethod
    def _step(self) -> None:
        """Advance all requests that have begun, and begin others, unless `_is_draining`."""

    @abstractmethod
    def _copy_weights(self) -> None:
        """Copy the trainer's tensors to those of an engine that does not share them."""

    def _drop_stale(self) -> None:  # noqa: B027
        """Drop what was computed with earlier weights and must not be used with new ones."""

    @abstractmethod
    def _abandon(self, reason: str, cause: Exception | None = None) -> None:
        """Fail all pending requests with EngineError."""

    @property
    def _is_draining(self) -> bool:
        """Whether new requests have to wait for new weights."""
        return bool(self._switches)

    async def set_weights(
        self, version: int, when: NewWeights = "drain", load: Callable[[], object] | None = None
    ) -> None:
        """See Engine. Raises EngineError if requests run on the trainer's own tensors, since they have seen
        the new weights already."""
        self._check_usable()
        if load is None and self.shares_weights and self.num_pending:
            raise EngineError(
                f"cannot sync version {version} while {self.num_pending} requests run on the trainer's own "
                "tensors; await them first, or create the engine with owns_weights=True"
            )
        switch = _Switch(version, when, load, asyncio.get_running_loop().create_future())
        self._switches.append(switch)
        self._start_stepping()
        await switch.future

    def _check_usable(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed; create a new one")

    def _current_version(self) -> int:
        if self._version is None:
            raise EngineError("the engine has no weights: the last sync failed")
        return self._version

    def _start_stepping(self) -> None:
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._run())

    def _stop_stepping(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()

    async def _run(self) -> None:
        """Step until nothing is pending. An error fails all pending requests; the engine remains usable."""
        try:
            while self.num_pending or self._switches:
                await asyncio.sleep(0)
                if self._switches and self._switches[0].future.cancelled():
                    self._switches.popleft()
                elif self._switches and (self._switches[0].when == "interrupt" or not self._has_begun):
                    await self._switch(self._switches[0])
                    self._switches.popleft()
                else:
                    self._try_step()
        finally:
            self._abandon("the engine's task was cancelled")
            for switch in self._switches:
                if not switch.future.done():
                    switch.future.set_exception(EngineError("the engine's task was cancelled"))
            self._switches.clear()

    async def _switch(self, switch: _Switch) -> None:
        """Replace the weights."""
        self._version = None
        try:
            if switch.load is not None:
                await asyncio.to_thread(switch.load)
            if not self.shares_weights:
                self._copy_weights()
        except Exception as error:  # raised by `set_weights`
            self._abandon(f"version {switch.version} of the weights could not be loaded: {error}", error)
            if not switch.future.done():
                switch.future.set_exception(error)
            return
        self._version = switch.version
        self._drop_stale()
        if not switch.future.done():
            switch.future.set_result(None)

    def _try_step(self) -> None:
        try:
            self._step()
        except Exception as error:  # any error of the model must reach the waiting callers
            self._abandon(f"the engine failed with {self.num_pending} pending requests: {error!r}", error)
