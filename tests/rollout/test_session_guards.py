"""Clients of the session server that send nothing, nonsense, or too many connections."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from tests.driven import drive
from tests.rollout.test_sessions import TASK, ScriptedEngine, _driver

from braid.rollout.sessions import connections, server
from braid.types import Prompt

GOOD = b'{"messages": [{"role": "user", "content": "hello"}]}'
TOOL = '{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": %s}]}'
BAD = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"messages": "\xff"}',
    "nested": b"[" * 100_000,
    "nested content": b'{"messages": [{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}",
    "a list": b"[]",
    "huge number": b'{"max_tokens": ' + b"9" * 5000 + b"}",
    "no messages": b"{}",
    "empty stop": GOOD[:-1] + b', "stop": ""}',
    "tool without a name": (TOOL % "{}").encode(),
    "tool with odd parameters": (TOOL % '{"name": "f", "parameters": {"properties": 3}}').encode(),
    "tool with a list of parameters": (TOOL % '{"name": "f", "parameters": []}').encode(),
}


def _program(played: Any) -> Any:
    async def program(task: Prompt, base_url: str, api_key: str, seed: int) -> float:
        async with httpx2.AsyncClient(
            base_url=base_url, verify=False, trust_env=False, headers={"authorization": f"Bearer {api_key}"}
        ) as client:
            await played(client)
        return 1.0

    return program


def _play(played: Any) -> None:
    ((trajectory,),) = [
        group.trajectories for group in drive(_driver(ScriptedEngine(), _program(played)), [TASK])
    ]
    assert trajectory.is_valid, trajectory.reason


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_the_clients_mistake(name: str, path: str) -> None:
    async def played(client: Any) -> None:
        answer = await client.post(path, content=BAD[name])
        assert answer.status_code == 400, answer.text
        assert (await client.post("/chat/completions", content=GOOD)).status_code == 200

    _play(played)


def test_a_lone_surrogate_of_a_program_is_replaced() -> None:
    async def played(client: Any) -> None:
        body = b'{"messages": [{"role": "user", "content": "a\\ud800"}]}'
        assert (await client.post("/chat/completions", content=body)).status_code == 200

    _play(played)


def test_silent_connections_are_bounded_and_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_max_connections", lambda: 8)
    monkeypatch.setattr(connections, "HEADERS_S", 1.0)
    monkeypatch.setattr(connections, "_last_log_s", {})

    async def played(client: Any) -> None:
        url = client.base_url
        opened = [await asyncio.open_connection(url.host, url.port) for _ in range(60)]
        assert (await client.post("/chat/completions", content=GOOD)).status_code == 200
        ended = await asyncio.gather(*(reader.read() for reader, _ in opened), return_exceptions=True)
        assert all(isinstance(end, ConnectionError) or end == b"" for end in ended)
        assert (await client.post("/chat/completions", content=GOOD)).status_code == 200
        for _, writer in opened:
            writer.close()

    _play(played)
    records = [record for record in caplog.records if record.name == connections.__name__]
    assert 1 <= len(records) <= 2, "once for each reason"


def test_a_client_without_a_key_is_sent_away() -> None:
    async def played(client: Any) -> None:
        answer = await client.post("/chat/completions", content=GOOD, headers={"authorization": "Bearer no"})
        assert (answer.status_code, answer.headers["connection"]) == (401, "close")
        assert (await client.post("/chat/completions", content=GOOD)).status_code == 200

    _play(played)
