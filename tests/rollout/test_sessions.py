"""Programs that call the policy through OpenAI's own client: what they are answered, and what is recorded."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import torch
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from tests.driven import drive
from tests.rows import rows_of

from braid.config.model import BuildSpec, ModelConfig
from braid.errors import ConfigError, EngineError
from braid.models.chat import ChatFormat
from braid.models.loading import load_policy
from braid.models.tokenizer import character_tokenizer, whole_text
from braid.rollout.drivers.programs import ProgramDriver
from braid.rollout.engine import Completion, Request, Sampling
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.native.kind import Native
from braid.rollout.sessions import server as server_module
from braid.rollout.sessions.chat_api import message_of
from braid.rollout.sessions.server import SessionServer
from braid.types import Action, Group, Prompt, Status, StopReason, ToolCall, Trajectory

pytestmark = pytest.mark.slow

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 |\n:{}[]()<>/\"'!?,._-@"
TOKENIZER = character_tokenizer(CHARACTERS)
TOKENIZER.chat_template = (
    "{% if tools %}tools|{{ tools | length }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant|{% endif %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
EOS = 1
CHAT = ChatFormat(TOKENIZER, end_token_ids=(EOS,), tool_format="hermes")
TASK = Prompt("test:0", "test", (5, 6), ({"role": "user", "content": "hello"},), {"answer": "yes"})
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USER: Any = {"role": "user", "content": "hello"}


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


Script = Callable[[str], str | BaseException]


@dataclass
class ScriptedEngine:
    """Answers what the script says to the text of a prompt, once `gate` is open. An answer that ends with `~`
    was cut by the limit."""

    script: Script = lambda _: "ok"
    requests: list[Request] = field(default_factory=list)
    gate: asyncio.Event | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    num_cancelled: int = 0

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        self.began.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        said = self.script(whole_text(TOKENIZER, request.prompt_ids))
        if isinstance(said, BaseException):
            raise said
        reason: StopReason = "length" if said.endswith("~") else "stop"
        ids = _ids(said.rstrip("~")) + ([EOS] if reason == "stop" else [])
        now = float(len(self.requests))
        return Completion(ids, [-0.5] * len(ids), reason, 3, now, now)


Played = Callable[[AsyncOpenAI], Awaitable[Any]]


def _driver(engine: Any, program: Any, **more: Any) -> ProgramDriver:
    options: dict[str, Any] = {
        "retries": 0,
        "max_context_tokens": 400,
        "max_turns": 50,
        "timeout_s": 60.0,
        "needs_reward": True,
    }
    sampling = more.pop("sampling", Sampling(max_new_tokens=50, stop_token_ids=(EOS,)))
    server = more.pop("server", None) or SessionServer("127.0.0.1", 0, max_episodes=100)
    chat = more.pop("chat", CHAT)
    return ProgramDriver(server, program, engine, chat, sampling, seed=7, **{**options, **more})


def _client(base_url: str, api_key: str, **options: Any) -> AsyncOpenAI:
    """OpenAI's client, without the certificates that it would take long to read."""
    http = DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http, **options)


def _with_client(played: Played, **client: Any) -> Any:
    """A program that plays with OpenAI's client."""

    async def program(task: Prompt, base_url: str, api_key: str, seed: int) -> Any:
        async with _client(base_url, api_key, **client) as openai_client:
            return await played(openai_client)

    return program


def _play(played: Played, engine: Any = None, *, client: Any = None, **more: Any) -> Trajectory:
    """The trajectory of one episode."""
    driver = _driver(engine or ScriptedEngine(), _with_client(played, **(client or {})), **more)
    (group,) = drive(driver, [TASK])
    (trajectory,) = group.trajectories
    assert "AssertionError" not in trajectory.reason, trajectory.reason
    return trajectory


async def _ask(client: AsyncOpenAI, *messages: Any, **options: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=list(messages), **options)


async def _say(client: AsyncOpenAI, *messages: Any, **options: Any) -> Any:
    """The message that answers, as a program sends it back."""
    answer = await _ask(client, *messages, **options)
    return answer.choices[0].message


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def _texts(trajectory: Trajectory) -> list[list[tuple[str, str]]]:
    """What each segment's turns read and wrote."""
    return [
        [(whole_text(TOKENIZER, t.context_ids), whole_text(TOKENIZER, t.output_ids)) for t in s.turns]
        for s in trajectory.segments
    ]


def test_a_call_is_answered_in_openais_form_and_recorded_exactly() -> None:
    async def played(client: AsyncOpenAI) -> float:
        answer = await _ask(client, USER)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == (
            "assistant",
            "ok",
            "stop",
        )
        assert answer.usage.prompt_tokens == len("user|hello\nassistant|") + 1
        assert answer.usage.completion_tokens == 3
        assert answer.model == "any"
        (model,) = (await client.models.list()).data
        assert model.id == "policy"
        return 0.5

    trajectory = _play(played)
    assert _texts(trajectory) == [[("user|hello<eos>\nassistant|", "ok<eos>")]]
    (turn,) = trajectory.turns
    assert (turn.logprobs, turn.policy_version, turn.stop_reason, turn.reward) == ([-0.5] * 3, 3, "stop", 0.5)
    assert (trajectory.status, trajectory.answer_text, trajectory.text) == (Status.FINISHED, "ok", "ok<eos>")


def test_a_conversation_is_one_segment_whatever_keys_the_client_drops() -> None:
    engine = ScriptedEngine(lambda prompt: f" a{prompt.count('assistant')}\n")

    async def played(client: AsyncOpenAI) -> float:
        first = await _say(client, USER)
        assert first.content == " a1\n"
        history = [
            USER,
            {"role": "assistant", "content": "a1"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
        ]
        second = await _say(client, *history)
        await _say(client, *history, second, {"role": "user", "content": "c"})
        return 1.0

    trajectory = _play(played, engine)
    assert _texts(trajectory) == [
        [
            ("user|hello<eos>\nassistant|", " a1\n<eos>"),
            ("\nuser|b<eos>\nassistant|", " a2\n<eos>"),
            ("\nuser|c<eos>\nassistant|", " a3\n<eos>"),
        ]
    ]
    assert [t.reward for t in trajectory.turns] == [0.0, 0.0, 1.0]
    trajectory.reward = 1.0
    (row,) = rows_of([Group(TASK, [trajectory])])
    for turn, request in zip(trajectory.turns, engine.requests, strict=True):
        ids = list(request.prompt_ids)
        assert row.inputs["input_ids"].tolist()[: len(ids)] == ids
        assert row.mask[len(ids) : len(ids) + len(turn.output_ids)].all()


def test_reasoning_of_earlier_turns_stays_or_goes_as_the_run_wants() -> None:
    engine = ScriptedEngine(lambda prompt: f"<think>hm</think>{prompt.count('user')}")

    async def played(client: AsyncOpenAI) -> float:
        messages: list[Any] = []
        for _ in range(3):
            messages += [USER, await _say(client, *messages, USER)]
        return 1.0

    asked, turn = "user|hello<eos>\nassistant|", "<think>hm</think>{}<eos>"
    trajectory = _play(played, engine)
    assert (trajectory.sampled_text, trajectory.answer_text) == ("<think>hm</think>3", "3")
    (kept,) = _texts(trajectory)
    assert kept == [(asked, turn.format(1)), *(("\n" + asked, turn.format(i)) for i in (2, 3))]
    forgets = ChatFormat(TOKENIZER, end_token_ids=(EOS,), tool_format="hermes", thinking="as_template")
    first, second, third = _texts(_play(played, engine, chat=forgets))
    assert (first, second) == ([kept[0]], [(f"{asked}1<eos>\n{asked}", turn.format(2))])
    assert third == [(f"{asked}1<eos>\n{asked}2<eos>\n{asked}", turn.format(3))]
    engine.script = lambda prompt: str(prompt.count("user"))
    (without,) = _texts(_play(played, engine, chat=forgets))
    assert len(without) == 3, "nothing was dropped"


def test_branches_and_compacted_histories_are_segments_that_read_all_of_their_context() -> None:
    engine = ScriptedEngine(lambda prompt: f"a{prompt.count('assistant')}")
    more, other = {"role": "user", "content": "more"}, {"role": "user", "content": "other"}

    async def played(client: AsyncOpenAI) -> float:
        first = await _say(client, USER)
        await _say(client, USER, first, more)
        await _say(client, USER, first, other)
        await _say(client, {"role": "developer", "content": "short"}, USER)
        await _say(client, USER, {"role": "assistant", "content": "forged"}, more)
        await _say(client, USER, first, more, tools=[TOOL])
        return 1.0

    trajectory = _play(played, engine)
    start = "user|hello<eos>\nassistant|"
    assert _texts(trajectory) == [
        [(start, "a1<eos>"), ("\nuser|more<eos>\nassistant|", "a2<eos>")],
        [(f"{start}a1<eos>\nuser|other<eos>\nassistant|", "a2<eos>")],
        [("system|short<eos>\nuser|hello<eos>\nassistant|", "a1<eos>")],
        [(f"{start}forged<eos>\nuser|more<eos>\nassistant|", "a2<eos>")],
        [(f"tools|1\n{start}a1<eos>\nuser|more<eos>\nassistant|", "a2<eos>")],
    ]
    trajectory.reward = 1.0
    rows = rows_of([Group(TASK, [trajectory])])
    assert [row.num_decisions for row in rows] == [2, 1, 1, 1, 1]
    assert sum(row.fields["rewards"].sum() for row in rows) == 1.0
    prompts = [list(request.prompt_ids) for request in engine.requests[1:]]
    assert [
        row.inputs["input_ids"].tolist()[: len(ids)] for row, ids in zip(rows, prompts, strict=True)
    ] == prompts


def test_tool_calls_are_answered_in_openais_form_and_malformed_ones_as_text() -> None:
    def script(prompt: str) -> str:
        if "tool|5" in prompt:
            return "<tool_call>{oops</tool_call>"
        return f"so {CALL}"

    async def played(client: AsyncOpenAI) -> float:
        asked = await _ask(client, USER, tools=[TOOL])
        (choice,) = asked.choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "so")
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2})
        arguments = '{ "a":2 }'  # a client that writes the arguments anew
        said = {
            **choice.message.model_dump(),
            "tool_calls": [{**call.model_dump(), "function": {"name": "add", "arguments": arguments}}],
        }
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        (choice,) = (await _ask(client, USER, said, result, tools=[TOOL])).choices
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert choice.message.content == "<tool_call>{oops</tool_call>"
        return 1.0

    trajectory = _play(played, ScriptedEngine(script))
    assert _texts(trajectory) == [
        [
            ("tools|1\nuser|hello<eos>\nassistant|", f"so {CALL}<eos>"),
            ("\ntool|5<eos>\nassistant|", "<tool_call>{oops</tool_call><eos>"),
        ]
    ]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_the_program_demands_is_not_forced_but_counted_where_it_lacks(choice: Any) -> None:
    other: Any = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    answers = iter([CALL, CALL.replace("add", "other"), "no call", "<tool_call>{oops</tool_call>"])
    is_named = choice != "required"

    async def played(client: AsyncOpenAI) -> float:
        reasons = [
            (await _ask(client, USER, tools=[TOOL, other], tool_choice=choice)).choices[0].finish_reason
            for _ in range(4)
        ]
        assert reasons == ["tool_calls", "tool_calls", "stop", "stop"]
        return 1.0

    trajectory = _play(played, ScriptedEngine(lambda _: next(answers)))
    assert trajectory.metrics["calls/missing"] == (3 if is_named else 2)


@pytest.mark.parametrize("is_slow", [False, True])
def test_streams_are_replayed(monkeypatch: pytest.MonkeyPatch, is_slow: bool) -> None:
    engine = ScriptedEngine(lambda _: f"so {CALL}")
    if is_slow:
        monkeypatch.setattr(server_module, "_KEEP_ALIVE_S", 0.001)
        engine.gate = asyncio.Event()

    async def played(client: AsyncOpenAI) -> float:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await _ask(client, USER, tools=[TOOL], **options)
        if engine.gate is not None:
            engine.gate.set()
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.content == "so"
        assert chunks[0].choices[0].delta.tool_calls[0].function.arguments == '{"a": 2}'
        assert chunks[1].choices[0].finish_reason == "tool_calls"
        assert chunks[2].usage.completion_tokens == len(f"so {CALL}") + 1
        return 1.0

    assert len(_play(played, engine).turns) == 1


def test_a_failure_after_a_stream_has_begun_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_KEEP_ALIVE_S", 0.001)
    engine = ScriptedEngine(lambda _: EngineError("out of memory"), gate=asyncio.Event())

    async def played(client: AsyncOpenAI) -> float:
        stream = await _ask(client, USER, stream=True)
        engine.gate.set()  # type: ignore[union-attr]
        return 1.0 if [chunk async for chunk in stream] else 0.0

    trajectory = _play(played, engine)
    assert trajectory.status is Status.INVALID
    assert trajectory.reason.startswith(
        "program: APIError: the engine failed: out of memory (test_sessions.py:"
    )
    assert trajectory.reason.endswith(" (engine: out of memory)")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n=2 is not supported here: Input should be 1"),
    ({"logprobs": True}, "logprobs=true is not supported"),
    ({"seed": 1}, "seed=1 is not supported"),
    ({"response_format": {"type": "json_object"}}, 'response_format.type="json_object" is not supported'),
    ({"tool_choice": "required"}, "tool_choice=required needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "names 'sub', which is none of the tools"),
    ({"tools": [TOOL], "tool_choice": "any"}, 'tool_choice.literal'),
    ({"max_tokens": 0}, "Input should be greater than 0"),
    ({"stop": [""]}, "stop."),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"messages": []}, "at least 1 item"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role="),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is supported"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages.0.tool_calls.0=1"),
]  # fmt: skip


def test_what_is_not_supported_is_refused() -> None:
    async def played(client: AsyncOpenAI) -> float:
        for options, message in REFUSED:
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(**{"model": "any", "messages": [USER], **options})
            assert message in error.value.message
            assert error.value.type == "invalid_request_error"
        await _ask(client, USER)
        return 1.0

    assert len(_play(played).turns) == 1


def test_the_run_decides_how_tokens_are_sampled_and_the_program_where_a_turn_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = ScriptedEngine(lambda _: "yes. no")
    sampling = Sampling(max_new_tokens=50, min_new_tokens=8, temperature=0.5, stop_token_ids=(EOS,))

    async def played(client: AsyncOpenAI) -> float:
        said = await _say(client, USER, temperature=0.5, top_p=0.9, max_tokens=6, stop=".")
        assert said.content == "yes"
        await _ask(client, USER, said, USER, top_p=0.9, max_completion_tokens=1000)
        return 1.0

    trajectory = _play(played, engine, sampling=sampling)
    first, second = (request.sampling for request in engine.requests)
    assert (first.max_new_tokens, first.min_new_tokens, first.stop_strings) == (6, 6, (".",))
    assert (second.max_new_tokens, second.temperature, second.top_p) == (50, 0.5, 1.0)
    assert len(trajectory.segments) == 1
    (warning,) = caplog.messages
    assert "'top_p'" in warning


def test_without_the_key_of_an_episode_nothing_is_read() -> None:
    async def program(task: Prompt, base_url: str, api_key: str, seed: int) -> float:
        number, other = api_key.split("-")[1], "0" * 64
        async with httpx2.AsyncClient(verify=False) as client:
            for key in (
                "x",
                "braid",
                f"braid-{number}-{other}",
                f"braid-{'9' * 30}-{other}",
                b"braid-\xb2-" + other.encode(),
            ):
                value = key if isinstance(key, bytes) else key.encode()
                answer = await client.post(
                    f"{base_url}/chat/completions",
                    content=b"{",
                    headers={b"authorization": b"Bearer " + value},
                )
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            headers = {"authorization": f"Bearer {api_key}"}
            assert (
                await client.post(f"{base_url}/chat/completions", content=b"{", headers=headers)
            ).status_code == 400
            answer = await client.post(f"{base_url}/completions", json={}, headers=headers)
            assert answer.status_code == 404
            assert "POST /v1/chat/completions" in answer.json()["error"]["message"]
        return 1.0

    driver = _driver(ScriptedEngine(), program)
    (group,) = drive(driver, [TASK])
    assert group.trajectories[0].reason == "program: ended without an answer of the policy"


@pytest.mark.parametrize("is_chunked", [False, True])
def test_large_bodies_are_refused(monkeypatch: pytest.MonkeyPatch, is_chunked: bool) -> None:
    monkeypatch.setattr(server_module, "MAX_BODY_BYTES", 1000)

    async def program(task: Prompt, base_url: str, api_key: str, seed: int) -> float:
        async def parts() -> Any:
            for _ in range(100):
                yield b" " * 100_000

        async with httpx2.AsyncClient(verify=False, headers={"authorization": f"Bearer {api_key}"}) as client:
            body: Any = parts() if is_chunked else b" " * 10_000_000
            answer = await client.post(f"{base_url}/chat/completions", content=body)
            assert answer.status_code == 413
        async with _client(base_url, api_key) as openai_client:
            await _ask(openai_client, USER)
        return 1.0

    (group,) = drive(_driver(ScriptedEngine(), program), [TASK])
    assert group.trajectories[0].reason == ""


def test_calls_after_the_end_are_refused() -> None:
    late: list[AsyncOpenAI] = []

    async def program(task: Prompt, base_url: str, api_key: str, seed: int) -> float:
        client = _client(base_url, api_key, max_retries=0)
        late.append(client)
        await _ask(client, USER)
        return 1.0

    async def run() -> None:
        group = await _driver(ScriptedEngine(), program).group(TASK, 1, (0, 0))
        (client,) = late
        async with client:
            with pytest.raises(openai.ConflictError, match="the episode is over"):
                await _ask(client, USER)
        assert len(group.trajectories[0].turns) == 1

    asyncio.run(run())


def test_a_call_that_runs_at_the_end_is_cancelled_and_refused() -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    asked: list[asyncio.Task[Any]] = []

    async def program(task: Prompt, base_url: str, api_key: str, seed: int) -> float:
        asked.append(asyncio.create_task(call(_client(base_url, api_key, max_retries=0))))
        await engine.began.wait()
        return 1.0

    async def call(client: AsyncOpenAI) -> None:
        async with client:
            await _ask(client, USER)

    async def run() -> None:
        group = await _driver(engine, program).group(TASK, 1, (0, 0))
        with pytest.raises(openai.ConflictError):
            await asked[0]
        assert group.trajectories[0].status is Status.INVALID, "no answer was recorded"
        assert engine.num_cancelled == 1

    asyncio.run(run())


def test_a_retry_shares_the_answer_and_a_new_call_with_the_same_messages_gets_its_own() -> None:
    """OpenAI's clients say which is which; without that, a repetition of a running call or of the last one is
    a retry."""
    engine = ScriptedEngine(gate=asyncio.Event())
    gate, turns = engine.gate, Sampling(max_new_tokens=50, stop_token_ids=(EOS,))
    assert gate is not None

    async def program(task: Prompt, base_url: str, api_key: str, seed: int) -> float:
        url, headers = f"{base_url}/chat/completions", {"authorization": f"Bearer {api_key}"}

        async def call(retries: str | None, text: str = "a") -> str:
            say = headers if retries is None else {**headers, "x-stainless-retry-count": retries}
            body = {"messages": [{"role": "user", "content": text}]}
            return (await client.post(url, json=body, headers=say)).json()["id"]

        async with httpx2.AsyncClient(verify=False) as client:
            running = [asyncio.create_task(call(retries)) for retries in ("0", "0", None, "1")]
            await _until(lambda: len(engine.requests) == 2)
            gate.set()
            first, second, *joined = await asyncio.gather(*running)
            assert first != second
            assert set(joined) <= {first, second}
            other = await call("0", "b")
            assert await call(None, "b") == await call("2", "b") == other, "the last call again"
            assert await call("1") in (first, second)
            assert len(engine.requests) == 3
            assert await call(None) not in (first, second), "not the last call"
            assert await call("0") not in (first, second)
        return 1.0

    (group,) = drive(_driver(engine, program, sampling=turns), [TASK])
    (trajectory,) = group.trajectories
    assert trajectory.reason == ""
    assert len(trajectory.segments) == len(engine.requests) == 5
    assert len({request.key for request in engine.requests}) == 5


def test_random_numbers_depend_on_a_calls_prompt_and_not_on_the_order_of_calls() -> None:
    def keys(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
        engine = ScriptedEngine()

        async def played(client: AsyncOpenAI) -> float:
            for text in texts:
                await _ask(client, {"role": "user", "content": text})
            return 1.0

        _play(played, engine)
        return {whole_text(TOKENIZER, request.prompt_ids): request.key for request in engine.requests}

    assert keys(["a", "b", "c"]) == keys(["c", "a", "b"])
    assert len(set(keys(["a", "b", "c"]).values())) == 3


def test_a_client_that_goes_away_cancels_its_call_unless_a_retry_waits() -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    gate = engine.gate
    assert gate is not None

    async def program(task: Prompt, base_url: str, api_key: str, seed: int) -> float:
        url, headers = f"{base_url}/chat/completions", {"authorization": f"Bearer {api_key}"}

        async def call(text: str) -> str:
            body = {"messages": [{"role": "user", "content": text}]}
            return (await client.post(url, json=body, headers=headers)).json()["id"]

        async def begun(text: str) -> asyncio.Task[str]:
            engine.began.clear()
            task = asyncio.create_task(call(text))
            await engine.began.wait()
            return task

        async with httpx2.AsyncClient(verify=False) as client:
            gone = await begun("a")
            gone.cancel()
            await _until(lambda: engine.num_cancelled == 1)
            gone = await begun("b")
            retried = asyncio.create_task(call("b"))
            (session,) = driver.server._sessions.values()
            await _until(lambda: session._calls[-1].num_waiting == 2)
            gone.cancel()
            await _until(lambda: session._calls[-1].num_waiting == 1)
            gate.set()
            await retried
        return 1.0

    driver = _driver(engine, program)
    (group,) = drive(driver, [TASK])
    assert _texts(group.trajectories[0]) == [[("user|b<eos>\nassistant|", "ok<eos>")]]
    assert (len(engine.requests), engine.num_cancelled) == (2, 1)


def test_failures_of_the_engine_are_retried_by_the_client() -> None:
    answers = iter([EngineError("out of memory"), EngineError("out of memory"), "ok"])
    engine = ScriptedEngine(lambda _: next(answers))

    async def played(client: AsyncOpenAI) -> float:
        await _ask(client, USER)
        return 1.0

    trajectory = _play(played, engine)
    assert trajectory.status is Status.FINISHED
    assert len(trajectory.turns) == 1
    assert len({request.key for request in engine.requests}) == 1


def test_a_program_that_fails_is_played_again_and_then_invalid() -> None:
    engine = ScriptedEngine()

    async def played(client: AsyncOpenAI) -> float:
        await _ask(client, USER)
        raise KeyError("board")

    trajectory = _play(played, engine, retries=2)
    assert trajectory.status is Status.INVALID
    assert trajectory.reward is None
    assert trajectory.reason.startswith("program: KeyError: 'board' (test_sessions.py:")
    assert trajectory.attempts == 3
    assert len({request.key for request in engine.requests}) == 3


def test_a_call_beyond_a_limit_truncates_the_trajectory() -> None:
    long = {"role": "user", "content": "x" * 100}

    async def fails(client: AsyncOpenAI) -> float:
        first = await _say(client, USER)
        await _ask(client, USER, first, long)
        return 1.0

    async def copes(client: AsyncOpenAI) -> float:
        first = await _say(client, USER)
        with pytest.raises(openai.BadRequestError) as error:
            await _ask(client, USER, first, long)
        assert error.value.code == "context_length_exceeded"
        return 0.5

    async def calls_too_often(client: AsyncOpenAI) -> float:
        for _ in range(3):
            await _ask(client, USER)
        return 1.0

    async def compacts(client: AsyncOpenAI) -> float:
        await copes(client)
        await _ask(client, USER)
        return 0.5

    for played, reward, status, limit in (
        (fails, 0.0, Status.TRUNCATED, ["truncated/context"]),
        (copes, 0.5, Status.TRUNCATED, ["truncated/context"]),
        (calls_too_often, 0.0, Status.TRUNCATED, ["truncated/turns"]),
        (compacts, 0.5, Status.FINISHED, []),
    ):
        trajectory = _play(played, max_context_tokens=100, max_turns=2)
        assert (trajectory.status, trajectory.reason) == (status, "")
        assert sum(turn.reward for turn in trajectory.turns) == reward
        assert [n for n in trajectory.metrics if n.startswith("truncated/")] == limit


def test_an_answer_that_is_cut_truncates_the_trajectory_if_it_is_the_last() -> None:
    engine = ScriptedEngine(lambda prompt: "yes" if "again" in prompt else "ye~")

    async def cut(client: AsyncOpenAI) -> float:
        assert (await _ask(client, USER)).choices[0].finish_reason == "length"
        return 1.0

    async def continued(client: AsyncOpenAI) -> float:
        said = await _say(client, USER)
        await _ask(client, USER, said, {"role": "user", "content": "again"})
        return 1.0

    assert _play(cut, engine).status is Status.TRUNCATED
    trajectory = _play(continued, engine)
    assert trajectory.status is Status.FINISHED
    assert _texts(trajectory) == [
        [("user|hello<eos>\nassistant|", "ye"), ("<eos>\nuser|again<eos>\nassistant|", "yes<eos>")]
    ]


@pytest.mark.parametrize(
    ("returned", "posted", "needs", "reward", "reason"),
    [
        (np.float32(0.5), None, True, 0.5, ""),
        ({"right": 1, "form": 0.25}, None, True, 1.25, ""),
        (None, 0.75, True, 0.75, ""),
        (None, {"right": 0.5}, True, 0.5, ""),
        (None, None, False, 0.0, ""),
        (None, None, True, 0.0, "program: gave no reward; return or post one, or add a part to reward.parts"),
        (float("nan"), None, True, 0.0, "program: reward: returned nan, not a finite number"),
        ("1", None, True, 0.0, "program: reward: returned '1' (str), not a number"),
    ],
)  # fmt: skip
def test_rewards_are_returned_or_posted(
    returned: Any, posted: Any, needs: bool, reward: float, reason: str
) -> None:
    async def played(client: AsyncOpenAI) -> Any:
        await _ask(client, USER)
        if posted is not None:
            with pytest.raises(openai.BadRequestError):
                await client.post("/reward", body={"reward": "much"}, cast_to=object)
            assert await client.post("/reward", body={"reward": posted}, cast_to=object) == {"reward": posted}
        return returned

    trajectory = _play(played, needs_reward=needs)
    assert (sum(turn.reward for turn in trajectory.turns), trajectory.reason) == (reward, reason)
    if isinstance(returned, dict):
        assert trajectory.metrics == {"reward/right": 1.0, "reward/form": 0.25}


def test_a_port_in_use_is_an_error_of_the_config() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        driver = _driver(ScriptedEngine(), None, server=SessionServer("127.0.0.1", port, max_episodes=1))
        with pytest.raises(ConfigError, match=f"env.port: 127.0.0.1:{port} cannot be used"):
            drive(driver, [TASK])


def test_only_so_many_episodes_run_at_a_time() -> None:
    running, most = 0, 0

    async def played(client: AsyncOpenAI) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await _ask(client, USER)
        running -= 1
        return 1.0

    server = SessionServer("127.0.0.1", 0, max_episodes=3)
    drive(_driver(ScriptedEngine(), _with_client(played), server=server), [TASK] * 4, 2)
    assert most == 3


def test_64_clients_that_disconnect_and_retry_lose_nothing_and_record_nothing_twice() -> None:
    """With a real model: each answer that a program kept is one turn, with the tokens and log-probs that the
    engine sampled; conversations whose answers all arrived are one segment."""
    model = ModelConfig(
        build=BuildSpec(
            hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
            characters=CHARACTERS,
        )
    )  # fmt: skip
    lm = load_policy(model, temperature=1.0, seed=0, device=torch.device("cpu"))
    sampled: dict[tuple[int, ...], Completion] = {}
    kept: dict[str, list[str]] = {}
    num_disconnected = num_cancelled = 0

    class Recorded(NativeEngine):
        async def generate(self, request: Request) -> Completion:
            nonlocal num_cancelled
            try:
                sampled[request.prompt_ids] = completion = await super().generate(request)
            except asyncio.CancelledError:
                num_cancelled += 1
                raise
            return completion

    async def program(task: Prompt, base_url: str, api_key: str, seed: int) -> float:
        nonlocal num_disconnected
        luck, history = random.Random(task.uid), list[Any](task.messages)
        async with _client(base_url, api_key, max_retries=0) as client:
            for turn in range(3):
                while True:
                    again = {"x-stainless-retry-count": "1"}
                    call = asyncio.create_task(_say(client, *history, extra_headers=again))
                    if luck.random() < 0.6:
                        for _ in range(luck.randrange(60)):
                            await asyncio.sleep(0)
                        call.cancel()
                    try:
                        said = await call
                        break
                    except asyncio.CancelledError:
                        num_disconnected += 1
                kept.setdefault(task.uid, []).append(said.content)
                history += [said, {"role": "user", "content": str(turn)}]
        return 1.0

    tasks = [Prompt(f"test:{i}", "test", (), ({"role": "user", "content": str(i)},)) for i in range(64)]
    engine = Recorded(lm, Native(), InProcess(lambda ids: whole_text(TOKENIZER, ids)))
    sampling = Sampling(max_new_tokens=12, stop_token_ids=(EOS,))
    with closing(engine):
        groups = drive(_driver(engine, program, sampling=sampling), tasks)
    assert num_disconnected > 64, "more than one for each client"
    assert 0 < num_cancelled < num_disconnected, "some calls end with their client, and retries join others"
    for task, group in zip(tasks, groups, strict=True):
        (trajectory,) = group.trajectories
        assert (trajectory.reason, trajectory.attempts) == ("", 1)
        assert [CHAT.parse(t.output_ids).text for t in trajectory.turns] == kept[task.uid]
        assert len(trajectory.segments) == 1
        trajectory.reward = 1.0
        (row,) = rows_of([group])
        ids, logprobs = row.inputs["input_ids"].tolist(), row.fields["behavior_logprobs"]
        for turn in range(3):
            (place,) = np.flatnonzero(np.diff(row.decision, prepend=-1) * (row.decision == turn))[:1]
            completion = sampled[tuple(ids[:place])]
            end = place + len(completion.token_ids)
            assert ids[place:end] == completion.token_ids
            np.testing.assert_array_equal(logprobs[place:end], np.float32(completion.logprobs))


def test_a_malformed_tool_call_does_not_hide_valid_ones() -> None:
    calls = (ToolCall("add", {"a": 1}, "x"), ToolCall("", {}, "y", "bad_json", "not JSON"))
    message = message_of(Action("hm", tool_calls=calls, raw_text="raw"))
    assert message["content"] == "hm"
    assert [call["id"] for call in message["tool_calls"]] == ["x"]
    assert message_of(Action("hm", tool_calls=calls[1:], raw_text="raw"))["content"] == "raw"


RESPONSES_TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def test_a_conversation_through_responses_is_one_segment_with_the_tokens_of_chat_completions() -> None:
    def script(prompt: str) -> str:
        return "<think>hm</think>done" if "tool|5" in prompt else f"<think>add</think>so {CALL}"

    async def played(client: AsyncOpenAI) -> float:
        asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
        options: Any = {"model": "any", "instructions": "be good", "tools": [RESPONSES_TOOL]}
        first = await client.responses.create(input=asked, tool_choice="required", **options)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        call: Any = first.output[2]
        assert (first.output_text, call.name, json.loads(call.arguments)) == ("so", "add", {"a": 2})
        read, written = first.usage.input_tokens, first.usage.output_tokens  # type: ignore[union-attr]
        assert (read, written) == (46, len(f"<think>add</think>so {CALL}") + 1)
        asked += [item.model_dump() for item in first.output]
        asked.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
        second = await client.responses.create(input=asked, **options)
        assert (second.status, second.output_text) == ("completed", "done")
        return 1.0

    trajectory = _play(played, ScriptedEngine(script))
    assert _texts(trajectory) == [
        [
            (
                "tools|1\nsystem|be good<eos>\nuser|hello<eos>\nassistant|",
                f"<think>add</think>so {CALL}<eos>",
            ),
            ("\ntool|5<eos>\nassistant|", "<think>hm</think>done<eos>"),
        ]
    ]


def test_a_streamed_response_is_that_of_the_whole_one() -> None:
    async def played(client: AsyncOpenAI) -> float:
        texts, calls = "", ""
        async with client.responses.stream(model="any", input="hello", tools=[RESPONSES_TOOL]) as stream:
            async for event in stream:
                texts += event.delta if event.type == "response.output_text.delta" else ""
                calls += event.delta if event.type == "response.function_call_arguments.delta" else ""
            final = await stream.get_final_response()
        assert (texts, calls) == ("so", '{"a": 2}')
        assert (final.output_text, final.output[1].type, final.status) == ("so", "function_call", "completed")
        cut = await client.responses.create(model="any", input="cut", max_output_tokens=7)
        assert (cut.status, cut.output_text) == ("incomplete", "so")
        assert cut.incomplete_details is not None
        return 1.0

    engine = ScriptedEngine(lambda prompt: "so~" if "cut" in prompt else f"so {CALL}")
    trajectory = _play(played, engine)
    assert len(trajectory.segments) == 2
    assert engine.requests[-1].sampling.max_new_tokens == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"previous_response_id": "resp_1"}, 'previous_response_id="resp_1" is not supported here'),
        ({"background": True}, "background=true is not supported"),
        (
            {"input": [{"type": "item_reference", "id": "1"}]},
            "input of the type 'item_reference' is not supported",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text is supported"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "tool_calls.0.function.name"),
        ({"input": []}, "at least 1 item"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"text": {"format": {"type": "json_object"}}}, 'response_format.type="json_object"'),
        ({"tool_choice": {"type": "function", "name": "sub"}}, "'sub', which is none of the tools"),
    ],
)
def test_what_responses_do_not_support_is_refused(options: dict[str, Any], message: str) -> None:
    async def played(client: AsyncOpenAI) -> float:
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.create(**{"model": "any", "input": "hello", **options})
        assert message in error.value.message
        await _ask(client, USER)
        return 1.0

    assert len(_play(played).turns) == 1
