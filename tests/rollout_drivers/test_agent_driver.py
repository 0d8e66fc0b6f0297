from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.driven import drive, groups_of
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from braid.algorithms.recipes import RECIPES
from braid.envs.agents.base import AgentEnv, Opening, Outcome, Seats, Step
from braid.envs.agents.build import AgentEnvs
from braid.envs.agents.functions import class_toolbox
from braid.envs.agents.single_turn import SingleTurn
from braid.envs.agents.toolboxes import ToolEnvs
from braid.envs.agents.tools import ToolEnv
from braid.envs.kinds import Timeouts, ToolsEnv
from braid.errors import ConfigError, EngineError
from braid.models.chat import ChatFormat
from braid.rollout.drivers.agents import AgentDriver, Limits
from braid.rollout.engine import Completion, Request, Sampling
from braid.rollout.rows import group_rows
from braid.training.advantages import compute_advantages
from braid.types import Action, Group, Prompt, Status, StopReason, Trajectory

EOS = 1
SAMPLING = Sampling(max_new_tokens=64, stop_token_ids=(EOS,))
Script = Callable[[Request], tuple[str, StopReason]]


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    characters = " 0123456789+*/=:<>!?Aabcdefghijklmnopqrstuvwxyz"
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


TOKENIZER = _tokenizer()


def _text(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids)))


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@dataclass
class ScriptedEngine:
    """An engine whose model is a script: from a request to a text and a stop reason ("stop" adds the end
    token unless a stop string ends the text). Requests take a number of event loop iterations that depends on
    their key, so that they end in a different order."""

    script: Script
    requests: list[Request] = field(default_factory=list)
    num_cancelled: int = 0
    version: int = 0

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        try:
            for _ in range(hash(request.key) % 7):
                await asyncio.sleep(0)
            text, reason = self.script(request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        ids = _ids(text)
        if reason == "stop" and not text.endswith(request.sampling.stop_strings or ("\0",)):
            ids = [*ids, EOS]
        return Completion(ids, [-0.25 * i for i in range(len(ids))], reason, self.version, 1.0, 2.0)


class Env:
    """Replies or raises as configured."""

    def __init__(self, reply: Callable[[str], Any], start: Callable[[Prompt], None] = lambda _: None) -> None:
        self._reply, self._start = reply, start

    async def start(self, task: Prompt, seed: int) -> Opening:
        self._start(task)
        return Opening(stop_strings=("!",))

    async def step(self, action: Action) -> Step:
        return self._reply(action.text)

    async def close(self) -> None:
        """Do nothing."""


def _says(text: str = "", reward: float = 0.0, **rest: Any) -> Step:
    return Step([{"role": "user", "content": text}], reward, **rest)


def _prompt(text: str) -> Prompt:
    return Prompt(f"test:{text}", "test", tuple(_ids(text)), ())


def _driver(
    engine: Any,
    env: Callable[[], AgentEnv],
    sampling: Sampling = SAMPLING,
    retries: int = 1,
    max_context_tokens: int = 200,
    step_s: float = 60.0,
    max_turns: int = 4,
    rewards_at_end: bool = False,
) -> AgentDriver:
    return AgentDriver(
        engine,
        env,
        ChatFormat(TOKENIZER, end_token_ids=sampling.stop_token_ids),
        sampling,
        Limits(max_context_tokens, max_turns, Timeouts(step_s=step_s), rewards_at_end=rewards_at_end),
        seed=7,
        retries=retries,
    )


def _drive(
    script: Script,
    env: Callable[[], AgentEnv] = SingleTurn,
    *,
    prompts: tuple[str, ...] = ("2*3=",),
    group_size: int = 1,
    retries: int = 1,
    max_context_tokens: int = 200,
    step_s: float = 60.0,
    sampling: Sampling = SAMPLING,
    key: tuple[int, ...] = (0, 5),
    max_turns: int = 4,
) -> tuple[ScriptedEngine, list[Group]]:
    engine = ScriptedEngine(script, version=9)
    driver = _driver(engine, env, sampling, retries, max_context_tokens, step_s, max_turns)
    groups = drive(driver, [_prompt(p) for p in prompts], group_size, key)
    return engine, groups


def _tools() -> Callable[[], AgentEnv]:
    return ToolEnvs(ToolsEnv(kind="tools"), Path())


def _calls_then_answers(request: Request) -> tuple[str, StopReason]:
    text = _text(request.prompt_ids)
    return ("A:6", "stop") if "<out>" in text else ("<calculator>2*3</calculator>", "stop")


def _one(groups: list[Group]) -> Any:
    (group,) = groups
    (trajectory,) = group.trajectories
    return trajectory


def test_a_single_turn_is_prompt_and_answer() -> None:
    _, groups = _drive(lambda _: ("A:6", "stop"))
    trajectory = _one(groups)
    (turn,) = trajectory.turns
    assert trajectory.status is Status.FINISHED
    assert turn.context_ids == _ids("2*3=")
    assert turn.output_ids == [*_ids("A:6"), EOS]
    assert turn.logprobs == [0.0, -0.25, -0.5, -0.75]
    assert (turn.stop_reason, turn.policy_version, turn.start_s, turn.end_s) == ("stop", 9, 1.0, 2.0)
    assert (trajectory.text, trajectory.answer_text) == ("A:6<eos>", "A:6")
    assert trajectory.reward is None, "the scorer's business"


def test_rewards_read_the_last_turn_by_its_format_with_what_the_context_begins() -> None:
    _, groups = _drive(lambda _: ("6?</think>A:6", "stop"), prompts=("2*3=<think>",))
    trajectory = _one(groups)
    assert (trajectory.prefill, trajectory.sampled_text) == ("<think>", "6?</think>A:6")
    assert (trajectory.reasoning_text, trajectory.answer_text) == ("6?", "A:6")


def test_later_turns_read_exactly_the_tokens_before_and_then_the_reply() -> None:
    engine, groups = _drive(_calls_then_answers, _tools())
    trajectory = _one(groups)
    first, second = trajectory.turns
    assert second.context_ids == _ids("<out>6</out>")
    assert engine.requests[1].prompt_ids == (*first.context_ids, *first.output_ids, *second.context_ids)
    assert trajectory.text == "<calculator>2*3</calculator><out>6</out>A:6<eos>"
    assert trajectory.answer_text == "A:6"
    assert trajectory.status is Status.FINISHED
    calls = {name: value for name, value in trajectory.metrics.items() if name.startswith("calls/")}
    assert calls == {"calls/ok": 1, "calls/calculator/ok": 1}


def test_a_reply_that_forgets_begins_a_segment_with_nothing_before_it() -> None:
    def reply(text: str) -> Step:
        return _says("3*4=", forgets=True) if text == "6" else _says(is_done=True)

    engine, groups = _drive(
        lambda r: (str(len(r.prompt_ids) + 2), "stop"), lambda: Env(reply), prompts=("2*3=",)
    )
    trajectory = _one(groups)
    assert [len(segment.turns) for segment in trajectory.segments] == [1, 1, 1, 1]
    assert all(request.prompt_ids == tuple(_ids("3*4=")) for request in engine.requests[1:])


@pytest.mark.parametrize("stops_early", [False, True])
def test_rewards_at_the_end_are_those_of_all_turns(stops_early: bool) -> None:
    steps = iter([_says("a", 1.0), _says("b", 2.0), _says("c", 4.0, is_done=not stops_early)])

    def script(_: Request) -> tuple[str, StopReason]:
        return "7", "stop"

    engine = ScriptedEngine(script)
    driver = _driver(engine, lambda: Env(lambda _: next(steps)), max_turns=3, rewards_at_end=True)
    trajectory = _one(drive(driver, [_prompt("1")], 1, (0, 1)))
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 7.0]


def test_a_turn_knows_the_time_that_environment_and_tools_took_to_reply() -> None:
    _, groups = _drive(lambda _: ("hi", "stop"), lambda: Env(lambda _: Step(is_done=True, tool_s=0.5)))
    (turn,) = _one(groups).turns
    assert turn.env_s > 0
    assert turn.tool_s == 0.5


def test_sampled_tokens_are_never_tokenised_again() -> None:
    """An unknown token decodes to text that would tokenise otherwise; it stays the token it was."""
    unknown = TOKENIZER.unk_token_id
    engine, _ = _drive(
        lambda r: ("~<calculator>1</calculator>", "stop") if len(r.prompt_ids) < 10 else ("A:1", "stop"),
        _tools(),
    )
    assert unknown in engine.requests[1].prompt_ids
    assert (
        engine.requests[1].prompt_ids[: len(engine.requests[0].prompt_ids)] == engine.requests[0].prompt_ids
    )


def test_stop_strings_of_the_environment_join_those_of_the_config() -> None:
    sampling = Sampling(max_new_tokens=64, stop_token_ids=(EOS,), stop_strings=("?",))
    engine, _ = _drive(lambda _: ("A:6", "stop"), _tools(), sampling=sampling)
    assert engine.requests[0].sampling.stop_strings == ("?", "</calculator>")


def test_results_are_in_the_order_of_prompts() -> None:
    prompts = tuple(f"{i}+1=" for i in range(8))
    _, groups = _drive(lambda r: (_text(r.prompt_ids[:1]), "stop"), prompts=prompts, group_size=3)
    assert [g.prompt.uid for g in groups] == [f"test:{p}" for p in prompts]
    for number, group in enumerate(groups):
        assert [t.answer_text for t in group.trajectories] == [str(number)] * 3
        assert [t.sample for t in group.trajectories] == [0, 1, 2]


def test_every_request_has_a_unique_key_from_its_position() -> None:
    engine, _ = _drive(_calls_then_answers, _tools(), prompts=("2*3=", "3*2="), group_size=2)
    keys = {r.key for r in engine.requests}
    expected = {
        (7, 0, 5, number, sample, 0, turn) for number in (0, 1) for sample in (0, 1) for turn in (0, 1)
    }
    assert keys == expected
    assert len(engine.requests) == len(keys)


def _limit(trajectory: Trajectory) -> str:
    assert trajectory.status is Status.TRUNCATED
    (limit,) = (name for name in trajectory.metrics if name.startswith("truncated/"))
    return limit.removeprefix("truncated/")


def test_an_answer_cut_by_length_is_truncated_and_the_environment_is_not_asked() -> None:
    _, groups = _drive(lambda _: ("<calculator>1</calculator", "length"), _tools())
    trajectory = _one(groups)
    assert _limit(trajectory) == "turn_tokens"
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize("limits", [{"max_context_tokens": 40}, {"max_turns": 1}])
def test_no_limit_overrides_an_end_or_takes_a_reward_away(limits: Any) -> None:
    """The reply to the last turn fills the context, or the last turn is the last allowed."""
    for is_done, status in ((True, Status.FINISHED), (False, Status.TRUNCATED)):
        env = Env(lambda _, is_done=is_done: _says("b" * 50, 0.5, is_done=is_done))
        _, groups = _drive(lambda _: ("hi!", "stop"), lambda env=env: env, **limits)
        trajectory = _one(groups)
        assert trajectory.status is status
        assert [turn.reward for turn in trajectory.turns] == [0.5]


def test_a_call_cut_by_length_is_no_malformed_call() -> None:
    _, groups = _drive(lambda _: ("<calculator>1</calculator", "length"), _tools())
    assert not [name for name in _one(groups).metrics if name.startswith("calls/")]


def test_an_end_token_added_after_a_stop_string_is_not_trained_on() -> None:
    tokenizer = _tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    replies = iter([_says("ok"), _says(is_done=True)])
    driver = replace(
        _driver(ScriptedEngine(lambda _: ("hi!", "stop")), lambda: Env(lambda _: next(replies))),
        chat=ChatFormat(tokenizer, end_token_ids=(EOS,)),
    )
    task = Prompt("test:0", "test", (), ({"role": "user", "content": "a"},))
    (group,) = drive(driver, [task])
    first, second = group.trajectories[0].turns
    assert first.output_ids == second.output_ids == _ids("hi!")
    assert second.context_ids == [EOS, *_ids("ok"), EOS]
    group.trajectories[0].reward = 1.0
    (row,) = group_rows(group, 0, 0)
    assert [
        i for i, is_trained in zip(row.inputs["input_ids"].tolist(), row.mask, strict=True) if is_trained
    ] == [
        *first.output_ids,
        *second.output_ids,
    ]


def test_seeds_are_those_of_the_group_whatever_is_played_beside_it() -> None:
    def seeds(group_size: int, numbers: Sequence[int], fails: bool = False) -> dict[int, set[int]]:
        by_prompt: dict[int, set[int]] = {}

        class Seeded(Env):
            async def start(self, task: Prompt, seed: int) -> Opening:
                by_prompt.setdefault(int(task.uid), set()).add(seed)
                return await super().start(task, seed)

        def reply(_: str) -> Step:
            return _raise(OSError("no disk")) if fails else _says(is_done=True)

        driver = _driver(ScriptedEngine(lambda _: ("hi!", "stop")), lambda: Seeded(reply))

        async def play() -> None:
            tasks = ((Prompt(str(i), "test", tuple(_ids("a")), ()), i) for i in numbers)
            await asyncio.gather(*(driver.group(task, group_size, (0, i)) for task, i in tasks))

        asyncio.run(play())
        return by_prompt

    expected = seeds(4, range(8))
    assert all(len(group_seeds) == 1 for group_seeds in expected.values()), "equal in a group"
    assert len(set[int]().union(*expected.values())) == 8, "different across groups"
    assert seeds(2, [5, 3], fails=True) == {i: expected[i] for i in (3, 5)}, "also of retries"


def test_too_many_turns_truncate() -> None:
    _, groups = _drive(lambda _: ("<calculator>1</calculator>", "stop"), _tools(), max_turns=3)
    trajectory = _one(groups)
    assert _limit(trajectory) == "turns"
    assert len(trajectory.turns) == 3


def test_replies_may_be_text_within_the_answer_from_which_end_tokens_are_dropped() -> None:
    answers, replies = iter(["hi!", "a", "b"]), iter([_says("<eos>1"), _says("2"), _says(is_done=True)])
    engine = ScriptedEngine(lambda _: (next(answers), "stop"))
    driver = _driver(engine, lambda: Env(lambda _: next(replies)), replace(SAMPLING, stop_strings=("!",)))
    driver = replace(driver, chat=ChatFormat(TOKENIZER, end_token_ids=[EOS], replies="text"))
    first, second = _one(drive(driver, [_prompt("2*3=")])).segments
    forged = [i for character in "<eos>1" for i in _ids(character)]
    assert [turn.context_ids for turn in first.turns] == [_ids("2*3="), forged]
    assert [turn.output_ids for turn in first.turns] == [_ids("hi!"), [*_ids("a"), EOS]]
    assert [turn.context_ids for turn in second.turns] == [[*_ids("2*3=hi!"), *forged, *_ids("a2")]]


class Tally:
    def __init__(self) -> None:
        self.count = 0

    def add(self, by: str) -> int:
        """Count.

        Args:
            by: How much.
        """
        self.count += int(by)
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


@pytest.mark.parametrize(
    ("answer", "limits", "reward"),
    [
        (("<add>1</add>", "stop"), {"max_turns": 3}, 3.0),
        (("<add>1</add>", "stop"), {"max_context_tokens": 40}, 2.0),
        (("<add>1</add", "length"), {}, 0.0),
    ],
)
def test_an_object_of_tools_is_asked_for_its_reward_also_at_a_limit(
    answer: Any, limits: Any, reward: float
) -> None:
    _, toolbox = class_toolbox(Tally, key="env.tools")
    new_env = partial(ToolEnv, [toolbox], timeout_s=9.0, max_result_characters=99)
    _, groups = _drive(lambda _: answer, new_env, **limits)
    trajectory = _one(groups)
    assert trajectory.status is Status.TRUNCATED
    assert [turn.reward for turn in trajectory.turns][-1] == reward


def test_a_turn_gets_no_more_tokens_than_the_context_has_left() -> None:
    sampling = Sampling(max_new_tokens=64, min_new_tokens=40, stop_token_ids=(EOS,))
    engine, _ = _drive(lambda _: ("A:6", "stop"), max_context_tokens=14, sampling=sampling)
    requested = engine.requests[0].sampling
    assert (requested.max_new_tokens, requested.min_new_tokens) == (10, 10)


def test_a_reply_that_fills_the_context_truncates() -> None:
    _, groups = _drive(
        lambda _: ("hi!", "stop"), lambda: Env(lambda _: _says("b" * 50)), max_context_tokens=40
    )
    trajectory = _one(groups)
    assert _limit(trajectory) == "context"
    assert len(trajectory.turns) == 1
    assert trajectory.text == "hi!" + "b" * 50


def test_a_prompt_that_fills_the_context_is_invalid_and_not_retried() -> None:
    engine, groups = _drive(lambda _: ("A:6", "stop"), max_context_tokens=4)
    trajectory = _one(groups)
    assert trajectory.reason.startswith("prompt: 4 tokens leave no room for an answer in a context of 4")
    assert engine.requests == []


def test_rewards_of_the_environment_stay_with_their_turns() -> None:
    replies = iter([_says("ok", 0.5), Step(reward=2.0, is_done=True)])
    _, groups = _drive(lambda _: ("hi!", "stop"), lambda: Env(lambda _: next(replies)))
    assert [t.reward for t in _one(groups).turns] == [0.5, 2.0]


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (
            lambda: Env(lambda _: _raise(OSError("no disk"))),
            "environment: OSError: no disk (test_agent_driver.py)",
        ),
        (
            lambda: Env(lambda _: _says(), lambda _: _raise(KeyError("x"))),
            "environment: KeyError: 'x' (test_agent_driver.py)",
        ),
        (lambda: _raise(ValueError("no env")), "environment: ValueError: no env (test_agent_driver.py)"),
        (
            lambda: Env(lambda _: Step(reward=float("nan"))),
            "environment: ValueError: reward is nan, not a finite number (test_agent_driver.py)",
        ),
        (
            lambda: Env(lambda _: Step([{"role": "assistant", "content": "x"}])),
            "environment: step() returned a message of the role assistant, in which only the policy speaks",
        ),
        (lambda: Env(lambda _: None), "environment: step() returned NoneType, not a Step"),
    ],
)
def test_a_failing_environment_makes_the_trajectory_invalid_with_its_reason(
    env: Callable[[], AgentEnv], reason: str
) -> None:
    _, groups = _drive(lambda _: ("hi!", "stop"), env, retries=2)
    trajectory = _one(groups)
    without_line = re.sub(r":\d+\)$", ")", trajectory.reason)  # without the line
    assert (trajectory.status, without_line, trajectory.attempts) == (Status.INVALID, reason, 3)
    assert trajectory.reward is None


def test_a_failing_engine_makes_the_trajectory_invalid_and_its_siblings_continue() -> None:
    def script(request: Request) -> tuple[str, StopReason]:
        if request.key[4] == 1:
            raise EngineError("out of slots")
        return "A:6", "stop"

    _, groups = _drive(script, group_size=3)
    assert [t.status for t in groups[0].trajectories] == [Status.FINISHED, Status.INVALID, Status.FINISHED]
    assert groups[0].trajectories[1].reason == "engine: out of slots"


def test_a_cancelled_completion_is_a_failure_of_the_engine() -> None:
    _, groups = _drive(lambda _: ("A", "cancelled"))
    assert _one(groups).reason == "engine: the request was cancelled"


def test_a_retry_restarts_with_different_random_numbers() -> None:
    def script(request: Request) -> tuple[str, StopReason]:
        if request.key[5] == 0 and "<out>" in _text(request.prompt_ids):
            raise EngineError("lost")
        return _calls_then_answers(request)

    engine, groups = _drive(script, _tools())
    trajectory = _one(groups)
    assert (trajectory.status, trajectory.attempts, trajectory.reason) == (Status.FINISHED, 2, "")
    assert len(trajectory.turns) == 2
    assert [r.key[5:] for r in engine.requests] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_bug_is_raised_and_the_requests_that_still_run_are_cancelled() -> None:
    async def run() -> ScriptedEngine:
        def script(request: Request) -> tuple[str, StopReason]:
            raise ZeroDivisionError("a bug")

        engine = ScriptedEngine(script)
        driver = _driver(engine, SingleTurn, Sampling(max_new_tokens=8), retries=5)
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await groups_of(driver, [_prompt("1+1=")] * 20)
        return engine

    engine = asyncio.run(run())
    assert len(engine.requests) == 20, "no retries"
    assert engine.num_cancelled > 0


class Slow(Env):
    """Hangs in its first reply, or in that of all, and counts how many are open."""

    num_open = 0
    num_hanging: int

    def __init__(self) -> None:
        super().__init__(lambda _: Step(is_done=True))
        Slow.num_open += 1

    async def step(self, action: Action) -> Step:
        if Slow.num_hanging:
            Slow.num_hanging -= 1
            await asyncio.Event().wait()
        return await super().step(action)

    async def close(self) -> None:
        await asyncio.sleep(0)
        Slow.num_open -= 1


@pytest.mark.parametrize("num_hanging", [1, 2])
def test_a_late_environment_is_retried_with_its_time_limit_as_the_reason_and_closed(
    monkeypatch: pytest.MonkeyPatch, num_hanging: int
) -> None:
    monkeypatch.setattr(Slow, "num_open", 0)
    monkeypatch.setattr(Slow, "num_hanging", num_hanging, raising=False)
    _, groups = _drive(lambda _: ("A!", "stop"), Slow, step_s=0.02)
    trajectory = _one(groups)
    assert trajectory.attempts == 2
    if num_hanging == 1:
        assert trajectory.status is Status.FINISHED
    else:
        assert trajectory.reason == "environment: step() took longer than env.timeouts.step_s=0.02"
    assert Slow.num_open == 0


class Hangs(Env):
    """Never returns from one of its methods, and has replied once before in `step`."""

    def __init__(self, method: str) -> None:
        super().__init__(lambda _: _says("more", 0.5))
        self._method, self._num = method, 0

    async def start(self, task: Prompt, seed: int) -> Opening:
        await self._hang("start")
        return await super().start(task, seed)

    async def step(self, action: Action) -> Step:
        if self._num:
            await self._hang("step")
            return Step(is_done=True)
        self._num += 1
        return await super().step(action)

    async def close(self) -> None:
        await self._hang("close")

    async def _hang(self, method: str) -> None:
        if method == self._method:
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("method", "timeouts", "status", "reason", "rewards"),
    [
        (
            "start",
            {"start_s": 0.02},
            Status.INVALID,
            "start() took longer than env.timeouts.start_s=0.02",
            [],
        ),
        ("close", {"close_s": 0.02}, Status.FINISHED, "", [0.5, 0.0]),
        ("step", {"episode_s": 0.1}, Status.TRUNCATED, "", [0.5, 0.0]),
        (
            "start",
            {"episode_s": 0.02},
            Status.INVALID,
            "no turn ended within env.timeouts.episode_s=0.02",
            [],
        ),
    ],
)
def test_start_close_and_episode_have_deadlines_of_their_own(
    method: str, timeouts: dict[str, float], status: Status, reason: str, rewards: list[float]
) -> None:
    driver = _driver(ScriptedEngine(lambda _: ("A!", "stop")), lambda: Hangs(method), retries=0)
    trajectory = _one(drive(replace(driver, limits=Limits(200, 4, Timeouts(**timeouts))), [_prompt("1+1=")]))
    assert (trajectory.status, trajectory.reason.removeprefix("environment: ")) == (status, reason)
    assert [turn.reward for turn in trajectory.turns] == rewards
    assert trajectory.metrics.get("truncated/time", 0.0) == float(status is Status.TRUNCATED)


def test_a_row_has_all_turns_however_few_tokens_a_turn_may_have() -> None:
    replies = iter([_says("more"), _says("more"), Step(is_done=True)])
    sampling = replace(SAMPLING, max_new_tokens=3)
    _, (group,) = _drive(lambda _: ("A!", "stop"), lambda: Env(lambda _: next(replies)), sampling=sampling)
    group.trajectories[0].reward = 1.0
    (row,) = group_rows(group, 0, 0)
    turn = _ids("A!")
    assert row.inputs["input_ids"].tolist() == [
        *_ids("2*3="),
        *turn,
        *_ids("more"),
        *turn,
        *_ids("more"),
        *turn,
    ]
    assert row.num_decisions == 3


def test_environments_of_a_cancelled_group_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "num_open", 0)
    monkeypatch.setattr(Slow, "num_hanging", 4, raising=False)
    driver = _driver(ScriptedEngine(lambda _: ("A!", "stop")), Slow)

    async def scenario() -> None:
        group = asyncio.create_task(driver.group(_prompt("1+1="), 4, (0, 0)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert Slow.num_open == 4
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group

    asyncio.run(scenario())
    assert Slow.num_open == 0


def test_an_environment_that_fails_to_close_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Env):
        async def close(self) -> None:
            raise OSError("no such window")

    _, groups = _drive(lambda _: ("A!", "stop"), lambda: Broken(lambda _: Step(is_done=True)))
    assert _one(groups).status is Status.FINISHED
    assert "no such window" in caplog.text


def test_no_deadline_includes_the_wait_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_s = 0.0
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda _: time.monotonic() + ahead_s)

    class Queued(Env):
        async def ready(self, task: Prompt) -> None:
            nonlocal ahead_s
            ahead_s += 1e6
            await asyncio.sleep(0.001)

    driver = _driver(
        ScriptedEngine(lambda _: ("A!", "stop")), lambda: Queued(lambda _: Step(is_done=True)), retries=0
    )
    driver = replace(driver, limits=Limits(200, 4, Timeouts(episode_s=600.0)))
    assert _one(drive(driver, [_prompt("2*3=")], 1, (0, 5))).status is Status.FINISHED
    assert ahead_s == 1e6


def test_a_config_that_an_environment_refuses_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="no such game"):
        _drive(
            lambda _: ("A!", "stop"),
            lambda: Env(lambda _: _says(), lambda _: _raise(ConfigError("no such game"))),
        )


@pytest.mark.usefixtures("nothing_is_left")
def test_an_environment_that_hangs_in_the_only_process_costs_one_deadline() -> None:
    envs = AgentEnvs("tests.envs.scripted.Scripted", {}, Path(), "process", 1)

    def script(request: Request) -> tuple[str, StopReason]:
        sample, attempt, _ = request.key[-3:]
        return ("hang" if (sample, attempt) == (1, 0) else "end"), "stop"

    _, groups = _drive(script, envs, group_size=4, step_s=1.0)
    asyncio.run(envs.close())
    trajectories = groups[0].trajectories
    assert [t.status for t in trajectories] == [Status.FINISHED] * 4
    assert [t.attempts for t in trajectories] == [1, 2, 1, 1]


class Pair:
    """A sender and a receiver. The sender speaks first, or both at once."""

    agents = ("sender", "receiver")
    untrained: tuple[str, ...] = ()

    def __init__(self, *, at_once: bool = False, turns: int = 1) -> None:
        self.at_once, self.turns = at_once, turns

    async def run(self, task: Prompt, seed: int, seats: Seats) -> Outcome:
        async def said(agent: str, text: str) -> str:
            return (await seats[agent].reply([{"role": "user", "content": text}])).text

        if self.at_once:
            await asyncio.gather(said("receiver", "r"), said("sender", "s"))
            return Outcome()
        word = await said("sender", "s")
        for _ in range(self.turns):
            answer = await said("receiver", word)
        seats["sender"].reward(0.5)
        return Outcome(float(answer == word), {"words": 1.0})

    async def close(self) -> None:
        """Nothing to free."""


def _echo(request: Request) -> tuple[str, StopReason]:
    return _text(request.prompt_ids[-1:]), "stop"


def test_agents_have_conversations_of_their_own_and_a_reward_together() -> None:
    _, groups = _drive(_echo, Pair)
    trajectory = _one(groups)
    sender, receiver = trajectory.segments
    assert (sender.agent, receiver.agent) == ("sender", "receiver")
    assert [turn.context_ids for turn in (*sender.turns, *receiver.turns)] == [_ids("s"), _ids("s")]
    assert [turn.reward for turn in trajectory.turns] == [0.5, 1.0]
    assert (trajectory.status, trajectory.metrics["words"]) == (Status.FINISHED, 1.0)


def test_agents_may_have_rewards_of_their_own_and_those_of_untrained_ones_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Duel(Pair):
        async def run(self, task: Prompt, seed: int, seats: Seats) -> Outcome:
            await super().run(task, seed, seats)
            return Outcome(rewards={"sender": 1.0, "receiver": -1.0})

    for untrained, rewards in (((), {"sender": 1.5, "receiver": -1.0}), (("sender",), {"receiver": -1.0})):
        monkeypatch.setattr(Duel, "untrained", untrained)
        trajectory = _one(_drive(_echo, Duel)[1])
        assert trajectory.agent_rewards == rewards
        assert trajectory.metrics == {f"reward/{agent}": reward for agent, reward in rewards.items()}
        assert sum(turn.reward for turn in trajectory.turns) == sum(rewards.values())


@pytest.mark.parametrize("limit", ["time", "turns"])
def test_an_episode_ended_by_a_limit_is_compared_agent_by_agent_with_the_others_of_its_group(
    limit: str,
) -> None:
    """Each agent keeps the rewards of its own turns, since run() never returned a result."""

    class Duel(Pair):
        def __init__(self) -> None:
            self.is_long = next(number) == 1
            super().__init__(turns=3 if self.is_long and limit == "turns" else 1)

        async def run(self, task: Prompt, seed: int, seats: Seats) -> Outcome:
            await super().run(task, seed, seats)
            if self.is_long:
                await asyncio.sleep(60)
            return Outcome(rewards={"sender": 1.0, "receiver": -1.0})

    number = itertools.count()
    driver = _driver(ScriptedEngine(_echo), Duel, max_turns=2)
    driver = replace(driver, limits=replace(driver.limits, timeouts=Timeouts(episode_s=2.0)))
    (group,) = drive(driver, [_prompt("2*3=")], 2, (0, 5))
    assert [t.status for t in group.trajectories] == [Status.FINISHED, Status.TRUNCATED]
    of_sender = 0.5 if limit == "time" else 0.0
    assert [t.agent_rewards for t in group.trajectories] == [
        {"sender": 1.5, "receiver": -1.0},
        {"sender": of_sender, "receiver": 0.0},
    ]
    for trajectory in group.trajectories:
        trajectory.reward = sum(turn.reward for turn in trajectory.turns)
    players = {row.player for row in group_rows(group, 0, 0)}
    assert players == {"sender", "receiver"}


def test_the_segments_of_an_agent_stay_together_where_a_deadline_ends_the_episode() -> None:
    class Duel(Pair):
        def __init__(self) -> None:
            self.is_long = next(number) == 1
            super().__init__()

        async def run(self, task: Prompt, seed: int, seats: Seats) -> Outcome:
            await super().run(task, seed, seats)
            await seats.open("sender").reply([{"role": "user", "content": "again"}])
            if self.is_long:
                await asyncio.sleep(60)
            return Outcome(rewards={"sender": 1.0, "receiver": -1.0})

    number = itertools.count()
    driver = _driver(ScriptedEngine(_echo), Duel, max_turns=2)
    driver = replace(driver, limits=replace(driver.limits, timeouts=Timeouts(episode_s=0.3)))
    (group,) = drive(driver, [_prompt("2*3=")], 2, (0, 5))
    assert [t.status for t in group.trajectories] == [Status.FINISHED, Status.TRUNCATED]
    for trajectory in group.trajectories:
        assert [segment.agent for segment in trajectory.segments] == ["sender", "sender", "receiver"]
        trajectory.reward = sum(turn.reward for turn in trajectory.turns)
    compute_advantages(group_rows(group, 0, 0), RECIPES["grpo"])


def test_random_numbers_of_agents_do_not_depend_on_who_speaks_first() -> None:
    engine, groups = _drive(_echo, lambda: Pair(at_once=True))
    keys = {_text(r.prompt_ids): r.key for r in engine.requests}
    assert keys == {name[0]: (7, 0, 5, 0, 0, 0, 0, *name.encode()) for name in ("sender", "receiver")}
    assert [segment.agent for segment in _one(groups).segments] == ["sender", "receiver"]


def test_segments_of_untrained_agents_become_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "untrained", ("receiver",))
    _, (group,) = _drive(_echo, Pair)
    group.trajectories[0].reward = 1.5
    (row,) = group_rows(group, 0, 0)
    assert row.inputs["input_ids"].tolist() == [*_ids("s"), *_ids("s"), EOS]
    assert row.fields["rewards"].sum() == 1.5


def test_an_agent_without_turns_left_truncates_the_episode() -> None:
    _, groups = _drive(_echo, lambda: Pair(turns=3), max_turns=2)
    trajectory = _one(groups)
    assert trajectory.status is Status.TRUNCATED
    assert [len(segment.turns) for segment in trajectory.segments] == [1, 2]


def test_a_failing_engine_is_the_reason_for_an_episode_of_several_agents_too() -> None:
    def script(_: Request) -> tuple[str, StopReason]:
        raise EngineError("out of slots")

    _, groups = _drive(script, Pair)
    assert _one(groups).reason == "engine: out of slots"


def test_opponents_are_sampled_by_their_own_engine_and_never_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "opponents", ("receiver",), raising=False)
    other = ScriptedEngine(_echo, version=3)
    driver = replace(_driver(ScriptedEngine(_echo, version=5), Pair), opponent=other)
    (group,) = drive(driver, [_prompt("a")])
    sender, receiver = group.trajectories[0].segments
    assert (sender.is_trained, sender.turns[0].policy_version) == (True, 5)
    assert (receiver.is_trained, receiver.turns[0].policy_version) == (False, 3)
    assert len(other.requests) == 1
    assert group.trajectories[0].lengths.versions == ((5, len(sender.turns[0].output_ids)),)
    with pytest.raises(ConfigError, match=r"env.opponents: the environment has an opponent, 'receiver'"):
        drive(_driver(other, Pair), [_prompt("a")])


def test_an_agent_may_open_conversations_of_sub_agents() -> None:
    class Lead(Pair):
        agents = ("lead",)

        async def run(self, task: Prompt, seed: int, seats: Seats) -> Outcome:
            helpers = [seats.open("helper"), seats.open("helper")]
            asked = [helper.reply([{"role": "user", "content": "h"}]) for helper in helpers]
            answers = await asyncio.gather(*reversed(asked))
            await seats["lead"].reply([{"role": "user", "content": answers[0].text}])
            return Outcome(1.0)

    engine, groups = _drive(_echo, Lead)
    trajectory = _one(groups)
    assert [(s.agent, len(s.turns)) for s in trajectory.segments] == [
        ("lead", 1),
        ("helper", 1),
        ("helper", 1),
    ]
    names = ("helper/1", "helper", "lead")
    assert [r.key for r in engine.requests] == [(7, 0, 5, 0, 0, 0, 0, *name.encode()) for name in names]
    trajectory.reward = 1.0
    assert [row.agent for row in group_rows(groups[0], 0, 0)] == [0, 1, 1]
