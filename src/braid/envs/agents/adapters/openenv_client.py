"""Environments on OpenEnv servers, over a WebSocket: OpenEnv's HTTP calls keep no state between reset and
step.

The protocol is spoken here, since OpenEnv's own client installs its server and a hundred packages.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from braid.envs.agents.base import Opening, Step
from braid.errors import EnvError
from braid.json_text import parse_json
from braid.types import Action, Message, Prompt

_MAX_BYTES = 100 * 2**20


class OpenEnv:
    """One session on the server at `url`.

    The action that is sent is {`action_key`: the answer}; without `action_key` the answer must be a JSON
    object. The policy reads the observation's `observation_key`, otherwise all of it as JSON. An action that
    the server calls invalid is a mistake of the policy, which reads why. `reset` holds further arguments of
    the reset. See base.AgentEnv.
    """

    def __init__(
        self,
        url: str,
        *,
        action_key: str | None = None,
        observation_key: str | None = None,
        reset: dict[str, Any] | None = None,
    ) -> None:
        scheme, _, address = url.rstrip("/").rpartition("://")
        self._url = f"{'wss' if scheme in ('https', 'wss') else 'ws'}://{address}/ws"
        self._action_key, self._observation_key, self._reset = action_key, observation_key, reset or {}
        self._socket: ClientConnection | None = None

    async def start(self, task: Prompt, seed: int) -> Opening:  # noqa: ARG002
        try:
            self._socket = await connect(self._url, max_size=_MAX_BYTES, open_timeout=None, proxy=None)
        except (OSError, InvalidHandshake, InvalidURI) as error:
            raise EnvError(f"cannot connect to {self._url}: {error}") from error
        return Opening(self._messages(await self._ask("reset", {**self._reset, "seed": seed % 2**32})))

    async def step(self, action: Action) -> Step:
        try:
            data = {self._action_key: action.text} if self._action_key else parse_json(action.text)
        except ValueError as error:
            return Step([{"role": "user", "content": f"Not JSON: {error}"}])
        if not isinstance(data, dict):
            return Step([{"role": "user", "content": "Answer with a JSON object."}])
        try:
            result = await self._ask("step", data)
        except _InvalidAction as error:
            return Step([{"role": "user", "content": f"Invalid action: {error}"}])
        is_done = bool(result.get("done"))
        return Step(() if is_done else self._messages(result), float(result.get("reward") or 0.0), is_done)

    async def close(self) -> None:
        if self._socket is not None:
            with suppress(ConnectionClosed):
                await self._socket.send(json.dumps({"type": "close"}))  # else the server logs an error
            await self._socket.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        assert self._socket is not None, "the session was not started"
        try:
            await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = parse_json(await self._socket.recv())
        except ConnectionClosed as error:
            raise EnvError(
                f"{self._url} closed the session at {kind}; it may serve fewer at a time "
                "(max_concurrent_envs)"
            ) from error
        if answer["type"] != "error":
            return answer["data"]
        reason = answer["data"]
        if kind == "step" and reason.get("code") == "VALIDATION_ERROR":
            details = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in reason.get("errors", [])]
            raise _InvalidAction("; ".join(details) or reason.get("message"))
        raise EnvError(f"{self._url} failed at {kind}: {reason.get('message')} ({reason.get('code')})")

    def _messages(self, result: dict[str, Any]) -> list[Message]:
        observation = result.get("observation", {})
        text = observation.get(self._observation_key) if self._observation_key else json.dumps(observation)
        return [{"role": "user", "content": str(text)}]


class _InvalidAction(Exception):
    pass
