"""Calls that may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from tests.leftovers import LIMIT_S

from braid.cluster.loops import call_until


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
