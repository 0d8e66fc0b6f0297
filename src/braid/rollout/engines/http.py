"""Base class of engines that are HTTP servers."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from typing import Any

from braid.errors import EngineError
from braid.http import SHOWN_CHARACTERS, Client, Params
from braid.rollout.engine import Request, check_request
from braid.weights.sending import SendOptions

from .remote import Answer, RemoteEngine

_GREET_S = 60.0
"""Time limit for a server's answers to the requests at connection."""


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
        self._is_closed = False
        self._client = Client(url, timeout_s=timeout_s)
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def _check(self, request: Request) -> None:
        if self._is_closed:
            raise EngineError(f"the client of {self.name} is closed; create a new one")
        check_request(request, longest=self._max_tokens, key=self._limit_key)

    async def _ask(self, request: Request, version: int) -> Answer:
        """See RemoteEngine. Retries use the same random numbers."""
        path, body = self._question(request)
        try:
            answer = await asyncio.wrap_future(self._client.start("POST", path, body))
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            raise EngineError(f"the client of {self.name} was closed") from None
        try:
            completion = self._read(answer, version)
            _check_form(completion, request.sampling.max_new_tokens)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            shown = json.dumps(answer)[:SHOWN_CHARACTERS]
            raise EngineError(
                f"{self.name} answered POST {path} in an unknown format ({error!r}): {shown}"
            ) from error
        return completion

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
    def _read(self, answer: Any, version: int) -> Answer:
        """Parse the server's answer, of weights `version`. May raise KeyError, TypeError, IndexError and
        ValueError for an unknown format."""


def _check_form(answer: Answer, most: int) -> None:
    """Raise ValueError unless the answer is a valid completion of at most `most` tokens."""
    token_ids, logprobs, reason = answer
    if len(token_ids) != len(logprobs):
        raise ValueError(f"{len(token_ids)} tokens, but {len(logprobs)} log-probs")
    if not (token_ids or reason == "abort") or len(token_ids) > most:
        raise ValueError(f"{len(token_ids)} tokens, outside 1 to {most}")
    if not all(type(token) is int and token >= 0 for token in token_ids):
        raise ValueError("invalid token id")
    if not all(isinstance(logprob, int | float) for logprob in logprobs):
        raise ValueError("a log-prob is not a number")
