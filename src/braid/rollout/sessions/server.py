"""An OpenAI-compatible server, through which programs play episodes. Each episode has its own API key.

An answer is complete before its first byte is sent, and is then streamed if the client asked for that;
comments keep the connection open meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import logging
import re
import resource
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

from braid.errors import ConfigError, EngineError, Problem
from braid.types import Prompt
from braid.users import described as why

from .chat_api import ChatRequest, PostedReward, RequestError, as_chunks, read, read_reward
from .programs import described
from .recorder import Session
from .responses_api import as_events, as_response, read_response

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
_KEEP_ALIVE_S = 5.0
_IDLE_S = 3600
"""Time after which idle connections are closed: longer than a program thinks, so that none is as it is
used."""
_PATHS = (
    "POST /v1/chat/completions, POST /v1/responses, GET /v1/models, POST /v1/reward and, for external "
    "programs, POST /v1/end"
)
_MOST_CONNECTIONS = 16_384
_BACKLOG = 64
"""Connections that the event loop accepts at once, before the limit on them is looked at."""
_ASK_S = 20.0
"""A program that asks for an episode is told to ask again after this time without one."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class SessionServer:
    """Listens from the first episode on until its event loop ends. `max_episodes` bounds those that run at a
    time. `external_key` is that of programs elsewhere, which ask for episodes (see `offer`)."""

    def __init__(self, host: str, port: int, *, max_episodes: int, external_key: str | None = None) -> None:
        self._host, self._port, self._max_episodes = host, port, max_episodes
        self._secret = secrets.token_bytes(32)
        self._numbers = itertools.count()
        self._sessions: dict[int, Session] = {}
        self._serving: asyncio.Task[None] | None = None
        self._base_url = ""
        self._places = asyncio.Semaphore(max_episodes)
        self._external_key = external_key
        self._offers: asyncio.Queue[str] = asyncio.Queue()
        self._external: dict[str, tuple[dict[str, Any], asyncio.Event]] = {}

    async def offer(self, task: Prompt, base_url: str, api_key: str, seed: int) -> None:
        """A Program that is played elsewhere: the episode is given to the next one that asks (POST
        /v1/episodes), which ends it (POST /v1/end)."""
        known = {"task": json.loads(described(task)), "seed": seed, "base_url": base_url, "api_key": api_key}
        self._external[api_key] = known, (ended := asyncio.Event())
        self._offers.put_nowait(api_key)
        try:
            await ended.wait()
        finally:
            del self._external[api_key]

    async def _asked(self, receive: Receive) -> dict[str, Any] | None:
        """The next episode that is offered; None if the client disconnects, or there is none for a while."""
        gone, offered = asyncio.create_task(_disconnected(receive)), asyncio.create_task(self._offers.get())
        try:
            while True:
                await asyncio.wait({gone, offered}, timeout=_ASK_S, return_when=asyncio.FIRST_COMPLETED)
                if not offered.done():
                    return None
                if (episode := self._external.get(offered.result())) is None:  # cancelled meanwhile
                    offered = asyncio.create_task(self._offers.get())
                    continue
                if gone.done():
                    self._offers.put_nowait(offered.result())
                    return None
                return episode[0]
        except asyncio.CancelledError:  # the run ends
            return None
        finally:
            gone.cancel()
            offered.cancel()

    @asynccontextmanager
    async def open(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """Answer calls of the session's program until the block ends; gives the base URL and API key. Raises
        ConfigError if the port cannot be used."""
        if self._serving is None or self._serving.done():
            self._listen()
        async with self._places:
            number = next(self._numbers)
            self._sessions[number] = session
            try:
                yield self._base_url, self._key(number)
            finally:
                del self._sessions[number]
                await session.close()

    def _key(self, number: int) -> str:
        return f"braid-{number}-{hmac.digest(self._secret, str(number).encode(), 'sha256').hex()}"

    def _listen(self) -> None:
        try:
            listener = socket.create_server((self._host, self._port))
        except OSError as error:
            problem = (
                f"{self._host}:{self._port} cannot be used: {error}; choose another, or port 0 for any free "
                "one"
            )
            raise ConfigError([Problem("env.port", problem)]) from error
        self._base_url = f"http://{self._host}:{listener.getsockname()[1]}/v1"
        self._places, self._offers = asyncio.Semaphore(self._max_episodes), asyncio.Queue()
        self._serving = asyncio.create_task(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        import uvicorn  # imported here, because most runs have no sessions

        from .connections import Connection

        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            proxy_headers=False,
            http=partial(Connection, max_connections=_max_connections()),  # pyright: ignore[reportArgumentType]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # no line for each malformed request
            backlog=_BACKLOG,
            access_log=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        setattr(server, "capture_signals", contextlib.nullcontext)  # noqa: B010  # leaves signals to the run
        try:
            await server.serve([listener])
        finally:
            if server.started:
                await server.shutdown([listener])
            listener.close()

    async def _app(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        reply = _Reply(send)
        try:
            await self._handle(scope, receive, reply)
        except RequestError as error:
            await reply.json(error.body, error.status)
        except EngineError as error:
            failed = RequestError(503, f"the engine failed: {error}")
            await reply.json(failed.body, 503)
        except _ClientGoneError:
            pass
        except Exception as error:
            logger.exception("a call of a program failed")
            await reply.json(RequestError(500, f"{type(error).__name__}: {error}").body, 500)

    async def _handle(self, scope: MutableMapping[str, Any], receive: Receive, reply: _Reply) -> None:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        token = headers.get(b"authorization", "").removeprefix("Bearer ")
        if (scope["method"], scope["path"]) == ("POST", "/v1/episodes"):
            if not (self._external_key and hmac.compare_digest(token.encode(), self._external_key.encode())):
                raise RequestError(
                    401, "the API key is not that of external programs", code="invalid_api_key"
                )
            await _body(receive)
            episode = await self._asked(receive)
            await reply.json(episode or {"task": None})
            return
        session = self._session(headers)
        body = await _body(receive)
        if not session.is_open:
            raise RequestError(409, "the episode is over")
        match scope["method"], scope["path"]:
            case "POST", path if path in _FORMS:
                await _complete(session, _FORMS[path], body, headers, receive, reply)
            case "POST", "/v1/reward":
                session.posted = read_reward(read(PostedReward, body).reward)
                await reply.json({"reward": session.posted})
            case "POST", "/v1/end" if token in self._external:
                self._external[token][1].set()
                await reply.json({})
            case "GET", "/v1/models":
                model = {"id": "policy", "object": "model", "created": 0, "owned_by": "braid"}
                await reply.json({"object": "list", "data": [model]})
            case method, path:
                raise RequestError(404, f"{method} {path} does not exist; this server has {_PATHS}")

    def _session(self, headers: Mapping[bytes, str]) -> Session:
        bearer = re.fullmatch(r"Bearer (braid-([0-9]{1,18})-[0-9a-f]{64})", headers.get(b"authorization", ""))
        if bearer is None or not hmac.compare_digest(self._key(number := int(bearer[2])), bearer[1]):
            raise RequestError(401, "the API key is not that of an episode", code="invalid_api_key")
        if (session := self._sessions.get(number)) is None:
            raise RequestError(409, "the episode is over")
        return session


def _max_connections() -> int:
    """Half of the files that the process may open: the others are the run's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(max(soft // 2, 16), _MOST_CONNECTIONS)


class _Form(NamedTuple):
    """How requests and answers of a path are written: the request of chat completions that a body is, and
    their answer as one object and as the events of a stream."""

    read: Callable[[bytes], ChatRequest]
    whole: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    events: Callable[[Mapping[str, Any], ChatRequest], Iterator[Mapping[str, Any]]]


_FORMS = {
    "/v1/chat/completions": _Form(lambda body: read(ChatRequest, body), lambda answer: answer, as_chunks),
    "/v1/responses": _Form(read_response, as_response, as_events),
}


async def _complete(
    session: Session, form: _Form, body: bytes, headers: Mapping[bytes, str], receive: Receive, reply: _Reply
) -> None:
    """Answer a request. Ends the call if the client disconnects, unless another one waits for it."""
    try:
        request = form.read(body)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise RequestError(400, f"the body cannot be read: {why(error)}") from error
    retries = headers.get(b"x-stainless-retry-count")  # sent by OpenAI's clients
    call = session.call(request, sha256(body).digest(), is_retry=None if retries is None else retries != "0")
    gone = asyncio.create_task(_disconnected(receive))
    try:
        while not call.task.done():
            either = {call.task, gone}
            await asyncio.wait(either, timeout=_KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return
            if request.stream and not call.task.done():
                await reply.keep_alive()
        if call.task.cancelled():
            raise RequestError(409, "the episode is over")
        answer = call.task.result()
        call.is_delivered = True
        if request.stream:
            await reply.stream(form.events(answer, request))
        else:
            await reply.json(form.whole(answer))
    finally:
        gone.cancel()
        session.leave(call)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        part = await receive()
        if part["type"] == "http.disconnect":
            raise _ClientGoneError
        body += part.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        if not part.get("more_body"):
            return bytes(body)


class _Reply:
    """The answer to a request; once a stream has begun, an error is one of its events."""

    def __init__(self, send: Send) -> None:
        self._send, self._is_stream = send, False

    async def json(self, body: Mapping[str, Any], status: int = 200) -> None:
        if self._is_stream:
            await self._write(_event(body), is_last=True)
            return
        await self._start(status, b"application/json", closes=status == 401)
        await self._write(json.dumps(body).encode(), is_last=True)

    async def stream(self, chunks: Iterator[Mapping[str, Any]]) -> None:
        await self._open_stream()
        await self._write(b"".join(map(_event, chunks)) + b"data: [DONE]\n\n", is_last=True)

    async def keep_alive(self) -> None:
        await self._open_stream()
        await self._write(b": keep-alive\n\n")

    async def _open_stream(self) -> None:
        if not self._is_stream:
            self._is_stream = True
            await self._start(200, b"text/event-stream")

    async def _start(self, status: int, kind: bytes, *, closes: bool = False) -> None:
        headers = [(b"content-type", kind), *([(b"connection", b"close")] if closes else [])]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


def _event(body: Mapping[str, Any]) -> bytes:
    named = f"event: {body['type']}\n".encode() if "type" in body else b""
    return named + b"data: " + json.dumps(body).encode() + b"\n\n"


class _ClientGoneError(Exception):
    """The client has disconnected."""
