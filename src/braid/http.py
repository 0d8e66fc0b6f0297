"""HTTP client of engines and judges: retries, timeouts, and errors that name the server."""

from __future__ import annotations

import asyncio
import functools
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx2

from braid.errors import ServerError
from braid.json_text import parse_json
from braid.redaction import redacted

_RETRIED = frozenset({408, 409, 425, 429})
"""HTTP status codes after which a retry may succeed, in addition to those from 500 on."""
_TRIES, _BACKOFF_S = 4, 0.5
_CONNECT_S = 10.0
SHOWN_CHARACTERS = 300
"""Length to which a server's answer is cut in messages."""

Method = Literal["GET", "POST"]
Params = Mapping[str, str | tuple[str, ...]]


class Client:
    """Requests to one server, on a separate event loop, so that connections stay open across the caller's
    loops."""

    def __init__(
        self, url: str, *, timeout_s: float | None, secret: str | None = None, uses_proxies: bool = False
    ) -> None:
        """`timeout_s` is the default time limit of a request, including its retries. `secret` is sent as
        bearer token and redacted in errors. `uses_proxies`: follow the environment's proxy settings."""
        self.url, self._timeout_s, self._secret = url.rstrip("/"), timeout_s, secret
        timeout = httpx2.Timeout(None, connect=_CONNECT_S)
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}

        def connections(keepalive: int) -> httpx2.AsyncClient:
            return httpx2.AsyncClient(
                base_url=self.url,
                headers=headers,
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=keepalive),
                timeout=timeout,
                trust_env=uses_proxies,
                verify=_trusted(),
            )

        self._kept, self._new = connections(256), connections(0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"client of {url}", daemon=True)
        self._thread.start()

    def start(
        self,
        method: Method,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Params | None = None,
        tries: int = _TRIES,
        is_new: bool | None = None,
        timeout_s: float | None = None,
    ) -> Future[Any]:
        """Send a request; the future's result is the server's answer as JSON (None for an empty one).
        Cancelling it closes the connection. The future fails with ServerError: after `tries` attempts if the
        failure may be transient, at once if the server rejects the request, and in any case on timeout. Use
        `tries=1` for requests that are not idempotent. By default they use a new connection (`is_new`): the
        server may close a kept one just as the request is sent."""
        http = self._new if (tries == 1 if is_new is None else is_new) else self._kept
        send = functools.partial(http.request, method, path, json=body, params=params)
        work = self._ask(send, f"{method} {path}", tries, timeout_s or self._timeout_s)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, method: Method, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Send a request and wait for the answer; see `start`."""
        return self.start(method, path, body, **options).result()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_CONNECT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CONNECT_S)
        self._loop.close()

    def redacted(self, text: str) -> str:
        """The text without the secret, in any encoding."""
        return text if self._secret is None else redacted(text, self._secret)

    async def _ask(self, send: Callable[[], Any], request: str, tries: int, timeout_s: float | None) -> Any:
        failures: list[str] = []
        may_pass, wait_s = True, 0.0
        try:
            async with asyncio.timeout(timeout_s):
                while may_pass and len(failures) < tries:
                    if failures:
                        await asyncio.sleep(max(wait_s, _BACKOFF_S * 2 ** (len(failures) - 1)))
                    try:
                        answer = await send()
                    except httpx2.HTTPError as error:
                        failures.append(self.redacted(f"{type(error).__name__}: {error}".rstrip(": ")))
                        continue
                    if answer.status_code >= 300:
                        failures.append(f"answered {answer.status_code}: {self._shown(answer)}")
                        may_pass = answer.status_code >= 500 or answer.status_code in _RETRIED
                        wait_s = retry_after_s(answer.headers)
                        continue
                    try:
                        return parse_json(answer.content) if answer.content else None
                    except ValueError:  # invalid JSON or undecodable text
                        failures.append(f"the answer is not JSON: {self._shown(answer)}")
        except TimeoutError:
            failures.append(f"no answer within {timeout_s:g} s")
        # Earlier failures may explain the last one.
        why = "; before: ".join(dict.fromkeys(reversed(failures)))
        again = f" ({len(failures)} attempts)" if len(failures) > 1 else ""
        message = f"the server {self.url} failed on {request}{again}: {why}"
        raise ServerError(message, why, wait_s=wait_s, is_final=not may_pass)

    def _shown(self, answer: httpx2.Response) -> str:
        return repr(self.redacted(answer.text)[:SHOWN_CHARACTERS])

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kept.aclose()
        await self._new.aclose()


@functools.cache
def _trusted() -> ssl.SSLContext:
    """The SSL context with the trusted certificates; cached, since loading them is slow."""
    return httpx2.create_ssl_context()


def retry_after_s(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float:
    """Seconds to wait from a Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3); 0 without
    one."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.replace(".", "", 1).isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now())
    except (ValueError, OverflowError):
        return 0.0
