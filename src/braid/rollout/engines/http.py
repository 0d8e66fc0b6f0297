"""Base class of engines that are HTTP servers."""

from __future__ import annotations

import asyncio
import json
import time
from abc import abstractmethod
from typing import Any

from braid.errors import EngineError
from braid.http import SHOWN_CHARACTERS, Client, Params
from braid.rollout.engine import Completion, Request, check_request
from braid.types import StopReason
from braid.weights.sending import SendOptions

from .published import RemoteEngine

_GREET_S = 60.0
"""Time limit for a server's answers to the requests at connection."""

Answer = tuple[list[int], list[float], StopReason]
"""Tokens, their log-probs, and the stop reason."""


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
            shown = json.dumps(answer)[:SHOWN_CHARACTERS]
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
