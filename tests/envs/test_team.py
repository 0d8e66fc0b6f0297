"""The planner and workers: who reads what, limits, and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from braid.envs.agents.adapters.team import LAST, PLANNER, WORKER
from braid.envs.agents.base import EpisodeOver, Outcome, ToolSchema
from braid.envs.agents.build import AgentEnvs
from braid.errors import ConfigError, EnvError
from braid.types import Action, Message, Prompt, ToolCall

TASK = Prompt("test:0", "test", (1,), ({"role": "user", "content": "sum?"},))
TOOLS = '''
def double(number: int) -> int:
    """Double a number.

    Args:
        number: Any.
    """
    if number == 13:
        raise ValueError("unlucky")
    return 2 * number
'''


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, f"{name}{arguments}")


def says(text: str, *calls: ToolCall) -> Action:
    return Action(text, tool_calls=calls)


def delegates(*subtasks: str) -> Action:
    return says("", *(call("delegate", subtask=subtask) for subtask in subtasks))


@dataclass
class Scripted:
    """An agent whose turns are given; an EpisodeOver among them is raised."""

    turns: Iterator[Action | EpisodeOver]
    heard: list[list[Message]] = field(default_factory=list)
    tools: Sequence[ToolSchema] = ()
    total: float = 0.0

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Action:
        self.heard.append(list(messages))
        self.tools = tools
        await asyncio.sleep(0)
        if isinstance(turn := next(self.turns), EpisodeOver):
            raise turn
        return turn

    def reward(self, value: float) -> None:
        self.total += value


class Seats(dict[str, Any]):
    def __init__(
        self, planner: Sequence[Action], *workers: Sequence[Action | EpisodeOver], max_turns: int | None = 9
    ) -> None:
        super().__init__(planner=Scripted(iter(planner)))
        self.max_turns, self.workers, self._next = max_turns, list[Scripted](), iter(workers)

    def open(self, agent: str) -> Scripted:
        assert agent == "worker"
        self.workers.append(Scripted(iter(next(self._next))))
        return self.workers[-1]


Play = Callable[..., Outcome]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    (tmp_path / "tools.py").write_text(TOOLS)
    made: list[AgentEnvs] = []

    def run(seats: Seats, **kwargs: Any) -> Outcome:
        made.append(AgentEnvs("team", {"tools": ["tools.py:double"], **kwargs}, tmp_path))
        return asyncio.run(made[-1]().run(TASK, 3, seats))

    yield run
    for envs in made:
        asyncio.run(envs.close())


def contents(messages: Sequence[Message]) -> list[str]:
    return [message["content"] for message in messages]


def test_workers_read_their_subtask_alone_and_the_planner_their_answers(play: Play) -> None:
    seats = Seats(
        [delegates("twice 3", "twice 4"), says("14")],
        [says("", call("double", number=3)), says("6")],
        [says("", call("double", number=4)), says("8")],
    )
    outcome = play(seats)
    assert outcome == Outcome(metrics={"workers": 2, "planner_turns": 2})
    planner, (one, other) = seats["planner"], seats.workers
    assert contents(planner.heard[0]) == [PLANNER, "sum?"]
    assert planner.heard[1] == [
        {"role": "tool", "tool_call_id": c.id, "name": "delegate", "content": text}
        for c, text in zip(delegates("twice 3", "twice 4").tool_calls, ("6", "8"), strict=True)
    ]
    assert [contents(heard) for heard in one.heard] == [[WORKER, "twice 3"], ["6"]]
    assert [contents(heard) for heard in other.heard] == [[WORKER, "twice 4"], ["8"]]
    assert [tool["function"]["name"] for tool in one.tools] == ["double"]


def test_workers_and_calls_of_a_turn_are_limited_and_the_others_answered(play: Play) -> None:
    calls = says("", call("double", number=1), call("double", number=2))
    seats = Seats([delegates("a", "b"), says("done")], [calls, says("found")])
    outcome = play(seats, max_workers_per_planner=1, max_toolcall_per_worker=1)
    assert outcome.metrics["workers"] == 1
    assert contents(seats["planner"].heard[1]) == [
        "found",
        "Not done: at most 1 subtasks are allowed in a turn.",
    ]
    assert contents(seats.workers[0].heard[1]) == ["2", "Not done: at most 1 calls are allowed in a turn."]


@pytest.mark.parametrize("limits", [{"max_planner_turns": 2, "max_worker_turns": 2}, {"max_turns": 2}])
def test_the_last_turn_is_announced_and_its_calls_are_not_made(play: Play, limits: dict[str, int]) -> None:
    more = [says("so far", call("double", number=1))] * 2
    seats = Seats([delegates("a")] * 2, more, max_turns=limits.pop("max_turns", 9))
    assert play(seats, **limits).metrics == {"workers": 1, "planner_turns": 2}
    assert contents(seats["planner"].heard[1]) == [f"so far\n\n{LAST}"]
    assert contents(seats.workers[0].heard[1]) == [f"2\n\n{LAST}"]


def test_a_malformed_call_and_a_worker_without_tokens_are_answered_with_text(play: Play) -> None:
    wrong = ToolCall("delegate", {}, "1", "bad_arguments", "`subtask` is missing")
    seats = Seats([says("", wrong, call("delegate", subtask="a")), says("done")], [EpisodeOver()])
    assert play(seats).metrics["workers"] == 1
    heard = contents(seats["planner"].heard[1])
    assert heard == ["`subtask` is missing", "The worker ran out of tokens before it had an answer."]


def test_a_tool_that_fails_is_no_answer(play: Play) -> None:
    seats = Seats([delegates("a")], [says("", call("double", number=13))])
    with pytest.raises(EnvError, match=r"tool 'double' .* raised ValueError: unlucky"):
        play(seats)


def test_prompts_can_be_ones_own_or_left_out(play: Play) -> None:
    seats = Seats([delegates("a"), says("done")], [says("found")])
    play(seats, planner_prompt="", worker_prompt="Help.", tools=[])
    assert contents(seats["planner"].heard[0]) == ["sum?"]
    assert contents(seats.workers[0].heard[0]) == ["Help.", "a"]
    assert not seats.workers[0].tools


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"tools": ["clock"]}, "unknown tool 'clock'"),
        ({"tools": 3}, r"env.kwargs: tools: .* tuple"),
        ({"max_turns": 3}, "unexpected keyword argument 'max_turns'"),
    ],
)
def test_mistakes_in_arguments_are_refused(tmp_path: Path, kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        AgentEnvs("team", kwargs, tmp_path)
