"""Engines that are servers: the client's side of HTTP, with tries, limits, and errors that name the server."""

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
"""Statuses of HTTP that may be better later, beside those from 500 on."""
_TRIES, _BACKOFF_S = 4, 0.5
_CONNECT_S = 10.0
_GREET_S = 60.0
"""The longest that a running server may take to say what it is."""
_SHOWN_CHARACTERS = 300
"""Of a server's answer, in messages."""

Method = Literal["GET", "POST"]
Params = Mapping[str, str | tuple[str, ...]]
Answer = tuple[list[int], list[float], StopReason]
"""Tokens, their log-probs, and why there are no more."""


class Client:
    """Requests to one server, on an event loop of its own: connections stay open whichever loop the caller runs."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """`timeout_s` bounds one answer, with all tries that it takes, unless a call has a limit of its own."""
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        timeout = httpx2.Timeout(None, connect=_CONNECT_S)

        def connections(keepalive: int) -> httpx2.AsyncClient:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=keepalive)
            return httpx2.AsyncClient(
                base_url=self.url, limits=limits, timeout=timeout, trust_env=False, verify=_trusted()
            )

        # What has one try gets a new connection: an old one may end as it is used, when it was idle or after an error.
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
        """The server's answer, as JSON (None for an empty one). Cancelling it ends the connection. Its exception is an
        EngineError: after `tries` tries where another might have helped, at once where the server refuses, and in any case when
        the time is up. What may not be done twice has one try."""
        work = self._ask(method, path, body, params, tries, timeout_s or self._timeout_s)
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
            failures.append(f"did not answer in time (limit {timeout_s:g} s)")
        # What came before the last failure may say why.
        why = "; before: ".join(dict.fromkeys(reversed(failures)))
        again = f" ({len(failures)} tries)" if len(failures) > 1 else ""
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
    """Whose certificates count; it takes a while to read them."""
    return httpx2.create_ssl_context()


class _Failure(Exception):
    """The server answered, and not with what was asked for. `may_pass`: another try may help."""

    def __init__(self, why: str, *, may_pass: bool) -> None:
        super().__init__(why)
        self.may_pass = may_pass


def _json(answer: httpx2.Response) -> Any:
    """What an answer says; None for an empty one. Raises _Failure for anything else than an answer."""
    if answer.status_code >= 300:
        text = answer.text[:_SHOWN_CHARACTERS]
        may_pass = answer.status_code >= 500 or answer.status_code in _RETRIED
        raise _Failure(f"answered {answer.status_code}: {text}", may_pass=may_pass)
    try:
        return answer.json() if answer.content else None
    except ValueError as error:  # no JSON, or no text at all
        raise _Failure(f"answered what is no JSON ({error})", may_pass=True) from error


class ServerEngine(RemoteEngine):
    """An engine that is a server, whatever its protocol."""

    def __init__(
        self,
        url: str,
        *,
        max_tokens: int,
        sending: SendOptions,
        timeout_s: float,
        name: str | None = None,
    ) -> None:
        """`max_tokens` is the longest sequence that is asked for; `timeout_s` bounds one answer; `sending` is RemoteEngine's.
        `name` is what messages call it, by its URL unless given. Raises EngineError, naming the URL, when no server answers
        there or it is not set up as it has to be."""
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
            _check_form(token_ids, logprobs, request.sampling.max_new_tokens)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            shown = json.dumps(answer)[:_SHOWN_CHARACTERS]
            raise EngineError(
                f"{self.name} answered POST {path} in another form than known ({error!r}): {shown}"
            ) from error
        self._check_finite(logprobs, version)
        return Completion(token_ids, logprobs, reason, version, start, time.perf_counter())

    def close(self) -> None:
        """See RolloutEngine. The server goes on running."""
        if not self._is_closed:
            self._is_closed = True
            super().close()
            self._client.close()

    def _about(self, path: str, params: Params | None = None) -> Any:
        """What the server says of itself; sooner than it has to answer requests."""
        limit_s = min(_GREET_S, self._timeout_s)
        return self._client.call("GET", path, params=params, timeout_s=limit_s)

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


def _check_form(token_ids: list[int], logprobs: list[float], most: int) -> None:
    """Raise ValueError for what is no completion of `most` tokens at most."""
    if len(token_ids) != len(logprobs):
        raise ValueError(f"{len(token_ids)} tokens with {len(logprobs)} log-probs")
    if not 0 < len(token_ids) <= most:
        raise ValueError(f"{len(token_ids)} tokens, and {most} were asked for at most")
    if not all(type(token) is int and token >= 0 for token in token_ids):
        raise ValueError("a token id that is none")
    if not all(isinstance(logprob, int | float) for logprob in logprobs):
        raise ValueError("a log-prob that is no number")
