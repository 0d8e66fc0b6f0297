"""A planner that hands subtasks to workers with tools, and answers when it has heard enough."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from braid.envs.agents.base import EpisodeOver, Outcome, Seat, Seats, ToolSchema
from braid.envs.agents.toolboxes import ToolEnvs
from braid.envs.kinds import ToolsEnv
from braid.types import Message, Prompt, ToolCall

from . import refused

PLANNER = (
    "You solve a task with the help of workers. Call `delegate` once for each question that a worker "
    "should look into; calls of the same turn are worked on at the same time. Workers see only the subtask "
    "that you write, so state all that they need to know. When you know the answer, write it without a "
    "call."
)
WORKER = (
    "You work on one question for somebody else. Use your tools if they help, then write your findings in a "
    "few sentences."
)
LAST = "This is your last turn: answer now, without a call."
DELEGATE: ToolSchema = {
    "type": "function",
    "function": {
        "name": "delegate",
        "description": "Let a worker look into a question. Returns what the worker found.",
        "parameters": {
            "type": "object",
            "properties": {"subtask": {"type": "string", "description": "The question, with all it needs."}},
            "required": ["subtask"],
        },
    },
}


class Team:
    """`reward.parts` score the planner's last answer. Each subtask goes to a new worker, with its own
    conversation and its own `tools`. The limits on turns apply in addition to env.max_turns, those on workers
    and calls to each turn. An empty prompt is left out. `tools`, `tool_timeout_s` and `max_result_characters`
    are those of env.kind=tools. See base.MultiAgentEnv."""

    agents = ("planner",)
    shared: ToolEnvs

    def __init__(  # noqa: PLR0913  # keys of the config
        self,
        *,
        max_planner_turns: int | None = None,
        max_worker_turns: int | None = None,
        max_workers_per_planner: int = 10,
        max_toolcall_per_worker: int = 5,
        planner_prompt: str = PLANNER,
        worker_prompt: str = WORKER,
        tools: Sequence[Any] = (),
        tool_timeout_s: float = 30.0,
        max_result_characters: int = 10_000,
    ) -> None:
        del tools, tool_timeout_s, max_result_characters  # see `share`
        self._planner_turns, self._worker_turns = max_planner_turns, max_worker_turns
        self._num_workers, self._num_calls = max_workers_per_planner, max_toolcall_per_worker
        self._planner_prompt, self._worker_prompt = planner_prompt, worker_prompt

    @staticmethod
    def share(base_dir: Path, _num_processes: int, **kwargs: Any) -> ToolEnvs:
        """The workers' tools, which all episodes share. Raises ConfigError."""
        names = ("tool_timeout_s", "max_result_characters")
        settings = {
            "tools": kwargs.get("tools", ()),
            **{name: kwargs[name] for name in names if name in kwargs},
        }
        try:
            return ToolEnvs(ToolsEnv(kind="tools", **settings), base_dir)
        except ValidationError as error:
            raise refused(f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}") from None

    async def run(self, task: Prompt, seed: int, seats: Seats) -> Outcome:
        planner, num_workers, num_turns = seats["planner"], 0, 0
        messages = _with_prompt(self._planner_prompt, task.messages)
        most = _least(self._planner_turns, seats.max_turns)
        while True:
            num_turns += 1
            action = await planner.reply(messages, [DELEGATE])
            if not action.tool_calls or num_turns == most:
                return Outcome(metrics={"workers": num_workers, "planner_turns": num_turns})
            allowed, extra = _up_to(action.tool_calls, self._num_workers, "subtasks")
            workers = [seats.open("worker") if call.status == "ok" else None for call in allowed]
            num_workers += len(workers) - workers.count(None)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._answer(*assignment, task, seed, seats.max_turns))
                        for assignment in zip(allowed, workers, strict=True)
                    ]
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            messages = [*(each.result() for each in tasks), *extra]
            if num_turns + 1 == most:
                _say_last(messages)

    async def close(self) -> None:
        """Nothing to free: workers close their tools."""

    async def _answer(
        self, call: ToolCall, seat: Seat | None, task: Prompt, seed: int, max_turns: int | None
    ) -> Message:
        if seat is None:
            return _result(call, call.error)
        subtask = replace(
            task, messages=({"role": "user", "content": call.arguments["subtask"]},), token_ids=()
        )
        tools, text = self.shared(), ""
        try:
            opening = await tools.start(subtask, seed)
            messages = _with_prompt(self._worker_prompt, opening.messages or subtask.messages)
            most, num_turns = _least(self._worker_turns, max_turns), 0
            while True:
                num_turns += 1
                action = await seat.reply(messages, opening.tools)
                text = action.text
                allowed, extra = _up_to(action.tool_calls, self._num_calls, "calls")
                calls = () if num_turns == most else tuple(allowed)
                step = await tools.step(replace(action, tool_calls=calls))
                seat.reward(step.reward)
                if step.is_done:
                    break
                messages = [*step.messages, *extra]
                if num_turns + 1 == most:
                    _say_last(messages)
        except EpisodeOver:
            text = "The worker ran out of tokens before it had an answer."
        finally:
            await tools.close()
        return _result(call, text)


def _with_prompt(prompt: str, messages: Sequence[Message]) -> list[Message]:
    if not prompt:
        return list(messages)
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{prompt}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _up_to(calls: Sequence[ToolCall], most: int, what: str) -> tuple[Sequence[ToolCall], list[Message]]:
    """The first `most` calls, and answers to the others."""
    refusal = f"Not done: at most {most} {what} are allowed in a turn."
    return calls[:most], [_result(call, refusal) for call in calls[most:]]


def _result(call: ToolCall, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


def _say_last(messages: list[Message]) -> None:
    messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{LAST}"}
