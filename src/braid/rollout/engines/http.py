"""Engines that are servers: the client's side of HTTP, with tries, limits, and errors that name the server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from abc import abstractmethod
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Literal

import httpx2

from braid.errors import EngineError
from braid.rollout.engine import Completion, Request, check_request
from braid.types import StopReason
from braid.weights.sender import SendOptions

from .published import RemoteEngine

_RETRIED = frozenset({408, 425, 429})
"""Statuses of HTTP that may be better later, beside those from 500 on."""
_TRIES, _BACKOFF_S = 4, 0.5
_CONNECT_S = 10.0
_SHOWN_CHARACTERS = 300
"""Of a server's answer, in messages."""

Method = Literal["GET", "POST"]
Answer = tuple[list[int], list[float], StopReason]
"""Tokens, their log-probs, and why there are no more."""


class Client:
    """Requests to one server, on an event loop of its own: connections stay open whichever loop the caller runs."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """`timeout_s` bounds one answer."""
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
        timeout = httpx2.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s), pool=None)
        self._http = httpx2.AsyncClient(base_url=self.url, limits=limits, timeout=timeout, trust_env=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"client of {url}", daemon=True)
        self._thread.start()

    def start(
        self,
        method: Method,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        tries: int = _TRIES,
    ) -> Future[Any]:
        """The server's answer, as JSON (None for an empty one). Cancelling it ends the connection. Its exception is an
        EngineError: after `tries` tries where another might have helped, at once where the server refuses."""
        work: Coroutine[Any, Any, Any] = self._ask(method, path, body, params, tries)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, method: Method, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """The same, waited for."""
        return self.start(method, path, body, **options).result()

    def close(self) -> None:
        """End all connections. Can be called twice."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_CONNECT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CONNECT_S)
        self._loop.close()

    async def _ask(
        self, method: Method, path: str, body: Any, params: Mapping[str, str] | None, tries: int
    ) -> Any:
        why, attempt = "", 0
        for attempt in range(tries):
            if attempt:
                await asyncio.sleep(_BACKOFF_S * 2 ** (attempt - 1))
            try:
                answer = await self._http.request(method, path, json=body, params=params)
                if answer.status_code < 400:
                    return answer.json() if answer.content else None
            except httpx2.TimeoutException as error:
                why = f"did not answer in time ({type(error).__name__}, limit {self._timeout_s:g} s)"
                continue
            except httpx2.HTTPError as error:
                why = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            except json.JSONDecodeError as error:
                why = f"answered what is no JSON ({error})"
                continue
            why = f"answered {answer.status_code}: {answer.text[:_SHOWN_CHARACTERS]}"
            if answer.status_code < 500 and answer.status_code not in _RETRIED:
                break
        again = f" ({attempt + 1} tries)" if attempt else ""
        raise EngineError(f"the server {self.url} failed on {method} {path}{again}: {why}")

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()


class ServerEngine(RemoteEngine):
    """An engine that is a server, whatever its protocol."""

    def __init__(
        self,
        url: str,
        *,
        max_tokens: int,
        sending: SendOptions,
        timeout_s: float,
    ) -> None:
        """`max_tokens` is the longest sequence that is asked for; `timeout_s` bounds one answer; `sending` is RemoteEngine's.
        Raises EngineError, naming the URL, when no server answers there or it is not set up as it has to be."""
        super().__init__(f"the server {url}", sending)
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
        """See RolloutEngine. A try that fails is made again with the same random numbers."""
        if self._is_closed:
            raise EngineError(f"the client of {self.name} is closed; make a new one")
        check_request(request, longest=self._max_tokens, key=self._limit_key)
        version, start = self._published(), time.perf_counter()
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
        except (KeyError, TypeError, IndexError, ValueError) as error:
            shown = json.dumps(answer)[:_SHOWN_CHARACTERS]
            raise EngineError(
                f"{self.name} answered POST {path} in another form than known: {shown}"
            ) from error
        self._check_finite(logprobs, version)
        return Completion(token_ids, logprobs, reason, version, start, time.perf_counter())

    def close(self) -> None:
        """See RolloutEngine. The server goes on running."""
        if not self._is_closed:
            self._is_closed = True
            super().close()
            self._client.close()

    @property
    @abstractmethod
    def _limit_key(self) -> str:
        """The config key that bounds sequences."""

    @abstractmethod
    def _greet(self) -> None:
        """Check that the server is there, and that it is set up as it has to be."""

    @abstractmethod
    def _question(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Path and body of a request."""

    @abstractmethod
    def _read(self, answer: Any) -> Answer:
        """What the server's answer says. May raise KeyError, TypeError, IndexError and ValueError for one of another form."""
