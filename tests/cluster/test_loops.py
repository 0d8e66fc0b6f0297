"""Coroutines run from synchronous code, and calls that may never return."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from tests.leftovers import LIMIT_S

from braid.cluster.interrupts import RoundCut
from braid.cluster.loops import Loop, call_until, task_group


@pytest.fixture
def never() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_call_that_blocks_is_abandoned_at_the_deadline(never: threading.Event) -> None:
    with pytest.raises(TimeoutError):
        call_until(never.wait, time.monotonic())


def test_what_is_watched_ends_the_wait_for_a_call(never: threading.Event) -> None:
    def watch() -> None:
        raise KeyError("a peer is gone")

    with pytest.raises(KeyError, match="a peer is gone"):
        call_until(never.wait, time.monotonic() + LIMIT_S, watch)


def test_the_exception_of_a_call_is_raised() -> None:
    def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        call_until(fail, time.monotonic() + LIMIT_S)
    call_until(lambda: None, time.monotonic() + LIMIT_S)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RoundCut, SystemExit])
@pytest.mark.parametrize("awaits", ["group", "gather", "await"])
def test_an_interrupt_in_a_task_is_raised_once(awaits: str, interrupt: type[BaseException]) -> None:
    """Those who await the task end with it, without disturbing later calls of the loop."""
    ended: list[str] = []

    async def sample() -> None:
        raise interrupt

    async def outer() -> None:
        try:
            if awaits == "group":
                async with task_group() as tasks:
                    tasks.create_task(sample())
            elif awaits == "gather":
                await asyncio.gather(sample(), asyncio.sleep(LIMIT_S))
            else:
                await asyncio.create_task(sample())
        finally:
            ended.append("ended")

    async def begin() -> asyncio.Task[None]:
        return asyncio.create_task(outer())

    async def stop(task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        ended.append("stopped")

    loop = Loop()
    task = loop.run(begin())
    with pytest.raises(interrupt):
        loop.run(asyncio.sleep(LIMIT_S))
    loop.run(stop(task))
    loop.close()
    assert ended == ["ended", "stopped"]


def test_a_task_that_nobody_asks_for_its_interrupt_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def sample() -> None:
        raise KeyboardInterrupt

    async def begin() -> None:
        tasks.append(asyncio.create_task(sample()))
        await asyncio.sleep(LIMIT_S)

    tasks: list[asyncio.Task[None]] = []
    loop = Loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run(begin())
    tasks.clear()
    gc.collect()
    loop.close()
    assert not caplog.records


def test_an_interrupt_ends_the_call_that_waits_and_the_loop_goes_on() -> None:
    async def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)

    async def value() -> int:
        return 3

    loop = Loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run(interrupted())
    assert loop.run(value()) == 3
    loop.close()
