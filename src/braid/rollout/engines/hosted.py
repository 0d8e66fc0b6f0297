"""Engines in workers of other roles, such as those of judges on devices of their own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

from braid.cluster.loops import Loop
from braid.envs.simulators.remote import Peer
from braid.errors import EngineError
from braid.rollout.engine import Completion, NoEngine, Request, RolloutEngine


class EngineHost:
    """A worker with engines for workers of other groups, by number."""

    def __init__(self, engines: Mapping[int, RolloutEngine]) -> None:
        self._engines, self._loop = engines, Loop()

    def generate(self, number: int, requests: Sequence[Request]) -> list[Completion | EngineError]:
        """Sample these requests together on the engine `number`."""

        async def ask(request: Request) -> Completion | EngineError:
            try:
                return await self._engines[number].generate(request)
            except EngineError as error:
                return error

        async def ask_all() -> list[Completion | EngineError]:
            return list(await asyncio.gather(*map(ask, requests)))

        return self._loop.run(ask_all())

    def sleep(self) -> None:
        """Put the engines to sleep, while no requests run."""
        for engine in self._engines.values():
            engine.sleep()

    def wake(self) -> None:
        """Wake the engines."""
        for engine in self._engines.values():
            engine.wake()

    def close(self) -> None:
        """Stop the engines."""
        for engine in self._engines.values():
            engine.close()
        self._loop.close()


class HostedEngine(NoEngine, RolloutEngine):
    """The engine `number` of several EngineHosts, which the driver puts to sleep and closes. Requests that
    wait while a host is busy go to it together."""

    def __init__(self, hosts: Sequence[Peer], number: int) -> None:
        self._free, self._number = list(hosts), number
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._asking: set[asyncio.Task[None]] = set()

    async def generate(self, request: Request) -> Completion:
        """See RolloutEngine. A request that has been sent is answered even if it is cancelled."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((request, future))
        loop.call_soon(self._send)  # after the other tasks of this turn of the loop have asked too
        return await future

    def _send(self) -> None:
        """Share the waiting requests out among the free hosts."""
        self._waiting = [(request, future) for request, future in self._waiting if not future.done()]
        while self._waiting and self._free:
            share = math.ceil(len(self._waiting) / len(self._free))
            batch, self._waiting = self._waiting[:share], self._waiting[share:]
            task = asyncio.create_task(self._ask(self._free.pop(0), batch))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, host: Peer, batch: Sequence[tuple[Request, asyncio.Future[Completion]]]) -> None:
        requests, futures = zip(*batch, strict=True)
        wait = host.start(EngineHost.generate, self._number, list(requests))
        try:
            answers: Sequence[Completion | EngineError] = await asyncio.to_thread(wait)
        except EngineError as error:
            answers = [error] * len(futures)
        finally:
            self._free.append(host)
        for answer, future in zip(answers, futures, strict=True):
            if future.done():
                continue
            if isinstance(answer, EngineError):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self._send()
