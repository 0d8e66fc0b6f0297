"""HTTP client and base class of engines that are servers: retries, timeouts, and errors that name the
server."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal

import httpx2

from braid.errors import EngineError
from braid.rollout.engine import Completion, Request, check_request
from braid.types import StopReason
from braid.weights.sending import SendOptions

from .published import RemoteEngine

_RETRIED = frozenset({408, 425, 429})
"""HTTP status codes that are retried, in addition to those from 500 on."""
_TRIES, _BACKOFF_S = 4, 0.5
_CONNECT_S = 10.0
_GREET_S = 60.0
"""Time limit for a server's answers to the requests at connection."""
_SHOWN_CHARACTERS = 300
"""Length to which a server's answer is cut in messages."""

Method = Literal["GET", "POST"]
Params = Mapping[str, str | tuple[str, ...]]
Answer = tuple[list[int], list[float], StopReason]
"""Tokens, their log-probs, and the stop reason."""


class Client:
    """Requests to one server, on a separate event loop, so that connections stay open across the caller's
    loops."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """`timeout_s` is the default time limit of a request, including its retries."""
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        timeout = httpx2.Timeout(None, connect=_CONNECT_S)

        def connections(keepalive: int) -> httpx2.AsyncClient:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=keepalive)
            return httpx2.AsyncClient(
                base_url=self.url, limits=limits, timeout=timeout, trust_env=False, verify=_trusted()
            )

        # Requests without retries use a new connection: the server may close a reused one just as the request
        # is sent.
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
        timeout_s: float | None = None,
    ) -> Future[Any]:
        """Send a request; the future's result is the server's answer as JSON (None for an empty one).
        Cancelling it closes the connection. The future fails with EngineError: after `tries` attempts if the
        failure may be transient, at once if the server rejects the request, and in any case on timeout. Use
        `tries=1` for requests that are not idempotent."""
        work = self._ask(method, path, body, params, tries, timeout_s or self._timeout_s)
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

    async def _ask(
        self,
        method: Method,
        path: str,
        body: Any,
        params: Params | None,
        tries: int,
        timeout_s: float,
    ) -> Any:
        failures: list[str] = []
        try:
            async with asyncio.timeout(timeout_s):
                for attempt in range(tries):
                    if attempt:
                        await asyncio.sleep(_BACKOFF_S * 2 ** (attempt - 1))
                    try:
                        http = self._kept if tries > 1 else self._new
                        return _json(await http.request(method, path, json=body, params=params))
                    except _Failure as failure:
                        failures.append(str(failure))
                        if not failure.may_pass:
                            break
                    except httpx2.HTTPError as error:
                        failures.append(f"{type(error).__name__}: {error}".rstrip(": "))
        except TimeoutError:
            failures.append(f"no answer within {timeout_s:g} s")
        # Earlier failures may explain the last one.
        why = "; before: ".join(dict.fromkeys(reversed(failures)))
        again = f" ({len(failures)} attempts)" if len(failures) > 1 else ""
        raise EngineError(f"the server {self.url} failed on {method} {path}{again}: {why}")

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


class _Failure(Exception):
    """An error answer of the server. `may_pass`: a retry may succeed."""

    def __init__(self, why: str, *, may_pass: bool) -> None:
        super().__init__(why)
        self.may_pass = may_pass


def _json(answer: httpx2.Response) -> Any:
    """The answer's JSON; None for an empty one. Raises _Failure for an error status or invalid JSON."""
    if answer.status_code >= 300:
        text = answer.text[:_SHOWN_CHARACTERS]
        may_pass = answer.status_code >= 500 or answer.status_code in _RETRIED
        raise _Failure(f"answered {answer.status_code}: {text}", may_pass=may_pass)
    try:
        return answer.json() if answer.content else None
    except ValueError as error:  # invalid JSON or undecodable text
        raise _Failure(f"the answer is not JSON ({error})", may_pass=True) from error


class ServerEngine(RemoteEngine):
    """Base class of engines that are HTTP servers."""

    def __init__(
        self,
        url: str,
        *,
        max_tokens: int,
        sending: SendOptions,
        timeout_s: float,
        name: str | None = None,
    ) -> None:
        """`max_tokens` is the longest sequence that is requested; `timeout_s` is the time limit of an answer;
        `sending` as in RemoteEngine. `name` is used in messages; default: the URL. Raises EngineError, naming
        the URL, if no server answers there or if it is configured incorrectly."""
        super().__init__(name or f"the server {url}", sending)
        self._max_tokens, self._timeout_s = max_tokens, timeout_s
        self._num_pending = 0
        self._is_closed = False
        self._client = Client(url, timeout_s=timeout_s)
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    @property
    def num_pending(self) -> int:
        """See RemoteEngine."""
        return self._num_pending

    async def generate(self, request: Request) -> Completion:
        """See RolloutEngine. Retries use the same random numbers."""
        if self._is_closed:
            raise EngineError(f"the client of {self.name} is closed; create a new one")
        check_request(request, longest=self._max_tokens, key=self._limit_key)
        version, start = self._published(), time.time()
        path, body = self._question(request)
        self._num_pending += 1
        try:
            answer = await asyncio.wrap_future(self._client.start("POST", path, body))
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            raise EngineError(f"the client of {self.name} was closed") from None
        finally:
            self._num_pending -= 1
        try:
            token_ids, logprobs, reason = self._read(answer)
            _check_form(token_ids, logprobs, request.sampling.max_new_tokens)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            shown = json.dumps(answer)[:_SHOWN_CHARACTERS]
            raise EngineError(
                f"{self.name} answered POST {path} in an unknown format ({error!r}): {shown}"
            ) from error
        self._check_finite(logprobs, version)
        return Completion(token_ids, logprobs, reason, version, start, time.time())

    def close(self) -> None:
        """See RolloutEngine. Leaves the server running."""
        if not self._is_closed:
            self._is_closed = True
            super().close()
            self._client.close()

    def _about(self, path: str, params: Params | None = None) -> Any:
        """GET information about the server, with a shorter time limit than for generation."""
        limit_s = min(_GREET_S, self._timeout_s)
        return self._client.call("GET", path, params=params, timeout_s=limit_s)

    @property
    @abstractmethod
    def _limit_key(self) -> str:
        """The config key of the longest sequence, for messages."""

    @abstractmethod
    def _greet(self) -> None:
        """Check that the server is reachable and configured correctly."""

    @abstractmethod
    def _question(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Path and body of the HTTP request."""

    @abstractmethod
    def _read(self, answer: Any) -> Answer:
        """Parse the server's answer. May raise KeyError, TypeError, IndexError and ValueError for an unknown
        format."""


def _check_form(token_ids: list[int], logprobs: list[float], most: int) -> None:
    """Raise ValueError unless the answer is a valid completion of at most `most` tokens."""
    if len(token_ids) != len(logprobs):
        raise ValueError(f"{len(token_ids)} tokens, but {len(logprobs)} log-probs")
    if not 0 < len(token_ids) <= most:
        raise ValueError(f"{len(token_ids)} tokens, outside 1 to {most}")
    if not all(type(token) is int and token >= 0 for token in token_ids):
        raise ValueError("invalid token id")
    if not all(isinstance(logprob, int | float) for logprob in logprobs):
        raise ValueError("a log-prob is not a number")
