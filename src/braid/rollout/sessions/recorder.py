"""The recorder of one episode: answers a program's calls with the policy, and keeps the exact tokens of each.

A call whose messages extend a conversation that was answered before continues its segment: the policy reads
the tokens that it read and wrote, then those of the new messages. Any other call starts a segment: another
agent, a compacted history, or a second continuation of the same turn; with `env.thinking=as_template` also a
call in which the template drops the reasoning of earlier turns.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np

from braid.errors import EngineError, ModelError
from braid.models.chat import Answer, ChatFormat, ToolSchema
from braid.models.tokenizer import whole_text
from braid.rollout.engine import Completion, Request, RolloutEngine, Sampling
from braid.types import Action, Message, Segment, Trajectory, TruncatedBy, Turn
from braid.users import described

from .chat_api import ChatRequest, RequestError, answered, fingerprints, message_of

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Call:
    """A request and its answer, which its retries share. `digest` is that of the body; `num_waiting` clients
    wait."""

    digest: bytes
    key: tuple[int, int]
    task: asyncio.Task[dict[str, Any]] = field(init=False)
    num_waiting: int = 1
    turn: Turn | None = None
    action: Action = field(default_factory=lambda: Action(""))
    is_delivered: bool = False


@dataclass(slots=True)
class _Context:
    """What a call reads: all of its tokens, of which `new` follow the turn `after`. `said` is the fingerprint
    of its messages, `start` that of the first two."""

    tools: Sequence[ToolSchema]
    said: bytes
    start: bytes
    ids: list[int]
    new: list[int]
    after: tuple[Segment, int] | None = None


@dataclass(slots=True, eq=False)
class Session:
    """An episode while its program runs. `key` seeds the random numbers: those of a call depend on its
    prompt, and on how many calls with the same prompt were before it."""

    engine: RolloutEngine
    chat: ChatFormat
    sampling: Sampling
    _: KW_ONLY
    max_context_tokens: int
    max_turns: int
    key: tuple[int, ...]
    is_open: bool = True
    over: TruncatedBy | None = None
    """The limit that has refused the last call."""
    engine_failure: str = ""
    """Why the last call failed, if it did."""
    posted: object = None
    """The reward that the program has posted."""
    _calls: list[Call] = field(default_factory=list)
    _counts: list[tuple[str, float]] = field(default_factory=list)
    _segments: list[Segment] = field(default_factory=list)
    _turns: dict[bytes, tuple[Segment, int]] = field(default_factory=dict)
    """Where each conversation that ends with a recorded turn is, by its fingerprint."""

    def call(self, request: ChatRequest, digest: bytes, *, is_retry: bool | None) -> Call:
        """Begin to answer a request, or join the call that it repeats; `leave` it in the end. `is_retry` is
        None if the client does not say: then a repetition of a call that runs, or of the last one, is taken
        for a retry. Raises RequestError."""
        for name, value in (request.model_extra or {}).items():
            if value is not None and getattr(self.sampling, name, None) != value:
                _warn_once(
                    f"the option {name!r} of programs' requests has no effect: the run's config decides"
                )
        if is_retry is not False:
            for call in reversed(self._calls):
                is_last = call is self._calls[-1]
                if call.digest == digest and (is_retry or is_last or not call.task.done()):
                    call.num_waiting += 1
                    return call
        self.over = "turns" if len(self._calls) >= self.max_turns else None
        if self.over:
            raise RequestError(
                400, f"the episode has had {self.max_turns} calls, its limit", code="max_turns_exceeded"
            )
        try:
            context = self._context(request)
        except Exception as error:  # the template meets the program's messages and tools
            why = str(error) if isinstance(error, ModelError) else described(error)
            raise RequestError(400, f"the conversation cannot be read: {why}") from error
        room = self.max_context_tokens - len(context.ids)
        if room < 1:
            self.over = "context"
            raise RequestError(
                400,
                f"the conversation has {len(context.ids)} tokens; the maximum context length is "
                f"{self.max_context_tokens} tokens, including the answer",
                code="context_length_exceeded",
                param="messages",
            )
        prompt = int.from_bytes(sha256(np.array(context.ids, np.int64).tobytes()).digest()[:7])
        used = {call.key for call in self._calls}
        key = next((prompt, i) for i in itertools.count() if (prompt, i) not in used)
        call = Call(digest, key)
        call.task = asyncio.create_task(self._answer(call, request, context, room))
        self._calls.append(call)
        return call

    def leave(self, call: Call) -> None:
        """A client does not wait any more. A call without an answer is forgotten with its last client, and
        cancelled if it runs."""
        call.num_waiting -= 1
        if not call.num_waiting and (not call.task.done() or call.turn is None) and call in self._calls:
            call.task.cancel()
            self._calls.remove(call)

    def _context(self, request: ChatRequest) -> _Context:
        messages, tools = request.conversation()
        said = fingerprints(messages, tools)
        for num in range(len(messages) - 1, 0, -1):
            if messages[num]["role"] == "assistant":
                break  # not written by the policy, so it cannot follow one of its turns
            if (place := self._turns.get(said[num])) is not None:
                segment, number = place
                before = [i for t in segment.turns[: number + 1] for i in (*t.context_ids, *t.output_ids)]
                try:
                    ids = self._extended(before, messages, said, num, tools)
                except ModelError as error:
                    _warn_once(f"conversations of programs are not continued but rendered anew: {error}")
                    break
                if ids[: len(before)] != before:
                    return _Context(tools, said[-1], said[:3][-1], ids, ids)
                return _Context(tools, said[-1], said[:3][-1], ids, ids[len(before) :], place)
        ids = self.chat.opening(messages, tools)
        return _Context(tools, said[-1], said[:3][-1], ids, ids)

    def _extended(
        self, before: list[int], messages: list[Message], said: list[bytes], num: int, tools: list[ToolSchema]
    ) -> list[int]:
        """Tokens of a conversation whose first `num` messages end with a recorded turn, the last of `before`;
        `said` are its fingerprints. Raises ModelError."""
        places = {i: self._turns[said[i + 1]] for i in range(num) if said[i + 1] in self._turns}
        sampled = {i: segment.turns[number].output_ids for i, (segment, number) in places.items()}
        if self.chat.thinking == "keep":
            return [*before, *self.chat.delta(messages[num:], tools, sampled[num - 1])]
        ends = [*list(sampled)[1:], len(messages)]
        answers = [Answer(sampled[i], messages[i + 1 : end]) for i, end in zip(sampled, ends, strict=True)]
        return self.chat.conversation(messages[: min(sampled)], answers, tools)

    async def _answer(self, call: Call, request: ChatRequest, context: _Context, room: int) -> dict[str, Any]:
        """Sample and record a turn; returns OpenAI's answer."""
        asked = request.max_completion_tokens or request.max_tokens or room
        sampling = replace(
            self.sampling.within(min(asked, room)),
            stop_strings=(
                *self.sampling.stop_strings,
                *self.chat.stop_strings(context.tools),
                *request.stops,
            ),
        )
        try:
            completion = await self.engine.generate(
                Request(tuple(context.ids), sampling, (*self.key, *call.key), (*self.key, *context.start))
            )
            if completion.stop_reason == "cancelled" or not completion.token_ids:
                raise EngineError("the request was cancelled, or its completion is empty")
        except EngineError as error:
            self.engine_failure = str(error)
            raise
        self.engine_failure = ""
        ids = completion.token_ids
        number = sum(len(segment.turns) for segment in self._segments)
        calls = (f"call{number:03}{i:02}" for i in range(100))
        action = self.chat.parse(ids, context.tools, context_ids=context.ids, new_id=lambda: next(calls))
        self._counts += action.call_counts()
        if request.lacks_call(action):
            self._counts.append(("calls/missing", 1.0))
        message = message_of(action, request.stops)
        segment, number = self._record(context, completion)
        call.turn, call.action = segment.turns[number], action
        self._turns[answered(context.said, message)] = segment, number
        reason = "tool_calls" if "tool_calls" in message else completion.stop_reason
        read, written = len(context.ids), len(ids)
        return {
            "id": f"chatcmpl-{call.key[0]:x}-{call.key[1]}",
            "object": "chat.completion",
            "created": int(completion.end_s),
            "model": request.model,
            "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
            "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
        }

    def _record(self, context: _Context, completion: Completion) -> tuple[Segment, int]:
        """Append a turn to the segment that it continues, unless this has gone on; returns its place."""
        segment, new = Segment(), context.ids
        if context.after is not None:
            before, number = context.after
            last = before.turns[number]
            last.env_s = max(0.0, completion.start_s - last.end_s)
            if last is before.turns[-1]:
                segment, new = before, context.new
        turn = completion.turn(new)
        if not segment.turns:
            self._segments.append(segment)
        segment.turns.append(turn)
        return segment, len(segment.turns) - 1

    async def close(self) -> None:
        """End the episode: running calls are cancelled, further ones refused."""
        self.is_open = False
        tasks = [call.task for call in self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def write_to(self, trajectory: Trajectory) -> None:
        """Set the trajectory's segments, in the order of their last turns, its texts and its status. Turns
        whose answers reached no client are left out."""
        lost = {id(call.turn) for call in self._calls if not call.is_delivered}
        for segment in self._segments:
            while segment.turns and id(segment.turns[-1]) in lost:
                segment.turns.pop()
        trajectory.segments = sorted((s for s in self._segments if s.turns), key=lambda s: s.turns[-1].end_s)
        ids = [i for t in trajectory.turns for i in (*t.context_ids, *t.output_ids)]
        trajectory.count(self._counts)
        if self.over:
            trajectory.truncate(self.over)
        if trajectory.segments:
            last = trajectory.segments[-1].turns[-1]
            if last.stop_reason == "length":
                trajectory.truncate("turn_tokens")
            trajectory.text = whole_text(self.chat.tokenizer, ids[len(trajectory.turns[0].context_ids) :])
            trajectory.set_last_turn(next(call.action for call in self._calls if call.turn is last))


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
