"""Runs functions that may hang, each call in a separate daemon thread.

A thread cannot be killed, so a call that exceeds its time limit keeps its thread until it returns. Process
exit does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from braid.report.streams import REWARD_THREADS
from braid.users import described

T = TypeVar("T")

_idle: list[SimpleQueue[tuple[Callable[[], Any], Future[Any]]]] = []
"""Jobs of the threads that wait for one; starting a thread takes ten times as long as waking one."""


def start(function: Callable[[], T]) -> Future[T]:
    """Call the function in a separate thread."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = SimpleQueue()
        Thread(target=_serve, args=(jobs,), name=REWARD_THREADS, daemon=True).start()
    jobs.put((function, future))
    return future


def _serve(jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    while True:
        function, future = jobs.get()
        value, failure = None, None
        try:
            value = function()
        except StopIteration as error:  # which no future takes
            failure = RuntimeError(described(error))
            failure.__cause__ = error
        except BaseException as error:
            failure = error
        _idle.append(jobs)
        if failure is None:
            future.set_result(value)
        else:
            future.set_exception(failure)
        del function, future, value, failure  # a waiting thread holds no trajectory
