"""Connections of the session server: how many there may be, and how long one may take to say what it wants.

A client without a key can hold a connection no longer than HEADERS_S: then it has sent no request, or one
that was refused, after which the server closes it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

HEADERS_S = 20.0
"""A new connection whose first request has not arrived by then, up to the end of its headers, is closed."""
LOG_EVERY_S = 60.0
_last_log_s: dict[str, float] = {}


class Connection(H11Protocol):
    """A connection of at most `max_connections`. Beyond them the oldest that has sent no request is closed,
    or the new one if all have."""

    def __init__(self, *args: Any, max_connections: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._max_connections = max_connections
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADERS_S, self._close, "silent")
        if len(self.connections) > self._max_connections:
            silent = [one for one in self.connections if isinstance(one, Connection) and one._deadline]
            oldest = min(silent, key=Connection._opened_s)
            oldest._close("many")

    def _opened_s(self) -> float:
        return self._deadline.when() if self._deadline else float("inf")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self._wait_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self, why: str) -> None:
        self._wait_no_more()
        self.connections.discard(self)
        self.transport.abort()
        if self.loop.time() - _last_log_s.get(why, float("-inf")) < LOG_EVERY_S:
            return
        _last_log_s[why] = self.loop.time()
        if why == "silent":
            problem = f"has sent no request within {HEADERS_S:g} s"
        else:
            problem = (
                f"is one more than {self._max_connections}; raise the limit of open files (ulimit -n) for "
                "more"
            )
        logger.warning(
            "a connection of %s was closed: it %s", (self.client or ("an unknown client",))[0], problem
        )
