# ruff: noqa: RUF001  # DeepSeek's tokens contain wide signs
"""Whatever a policy, a judge or a tool writes is read: a status or a score, in time proportional to the
text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.config.test_hostile_files import no_longer_than
from tests.models.test_chat import _format
from tests.models.test_tool_calls import TOOL
from tests.rewards.conftest import answered, build, isolation  # noqa: F401  # fixtures

from braid.config.reward import RewardConfig
from braid.errors import RewardError
from braid.models.tool_calls import ToolFormat, parse_calls
from braid.reasoning import without_reasoning
from braid.rewards.answers import last_boxes, tagged_answer
from braid.rewards.isolated import MARKED_NUMBER
from braid.rewards.judge import fill_template, score_reader
from braid.rewards.kinds import JudgeReward
from braid.rewards.scorer import Scorer, build_scorer
from braid.types import CallStatus, Message, Trajectory

MAX_CPU_S = 20.0
"""Limit per text, to detect time that grows with the square of its length; a megabyte takes up to two
seconds."""
PIECES = (
    "<tool_call>", "</tool_call>", "<function=add>", "<function=", "</function>", "<parameter=a>", "<parameter=", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "add\n", "add", "<add>", "</add>",
    "<|python_tag|>", '{"name"', '{"name": "add", "parameters": ', '{"name": "add", "arguments": ', "[TOOL_CALLS]", "[CALL_ID]",
    "[ARGS]", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>", "```json", "```", "```python",
    "<|tool_call_start|>", "<|tool_call_end|>", "to=functions.", "to=functions.add", "<|message|>", "<|call|>", "<|channel|>",
    "add(a=", "add(", "**{'q': 1}", "{[1]: 2}", "lambda: ", "not ", "-", "1+", ".a", "f'{", "'", '"', "\\", "\\\"", "\\ud800", "\\N{", "\\x",
    "[", "]", "{", "}", "(", ")", ",", ":", "=", " ", "\n", "\t", "1", "9" * 400, "1e999", "NaN", "-Infinity", "null", "true", "0x", "#", "####",
    "#### ", "\\boxed{", "$", "\\frac{", "\\sqrt", "^", "_", "\\left(", "answer", "answer is", "answer:", "A", "score", "<think>", "</think>",
    "<|im_start|>", "<|im_end|>", "<eos>", "{response}", "{0.__class__}", "%s", "\ud800", "\udfff\ud800", "\x00", "\u202e", "é", "日本", "😀", "Ⅷ", "١",
)  # fmt: skip
CALL = '{"name": "add", "arguments": {"a": 1, "note": "x"}}'
VALID = (
    f"<tool_call>{CALL}</tool_call>",
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    CALL.replace("arguments", "parameters"),
    '[TOOL_CALLS]add[CALL_ID]aB3dE5gH9[ARGS]{"a": 1}',
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>",
    "<|tool_call_start|>[add(a=1, note='x')]<|tool_call_end|>",
    'to=functions.add <|message|>{"a": 1}<|call|>',
    "<add>{}</add>",
    "so the answer is \\boxed{12}\n#### 1,200.5\n```python\nprint(1)\n```",
)


def text_of(draw: random.Random) -> str:
    """A few pieces, some of them repeated or nested, or a valid text that is damaged."""
    if draw.random() < 0.4:
        text = draw.choice(VALID)
        for _ in range(draw.randint(1, 3)):
            start = draw.randrange(len(text) + 1)
            text = text[:start] + _repeated(draw) + text[start + draw.choice((0, 0, 1, 5)) :]
        return text
    return "".join(_repeated(draw) for _ in range(draw.randint(1, 8)))


def _repeated(draw: random.Random) -> str:
    piece = "".join(draw.choice(PIECES) for _ in range(draw.choice((1, 1, 2, 3))))
    count = draw.choice((1, 1, 1, 1, 1, 1, 2, 3, 150, 2_000 // len(piece)))
    return piece * count + draw.choice(("", "", draw.choice("]})>") * count))


def long_text(draw: random.Random) -> str:
    """A megabyte of one repeated sequence, within a start and an end."""
    piece = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 3)))
    start, end = draw.choice((*PIECES, *VALID, "")), draw.choice((*PIECES, *VALID, ""))
    return start + piece * (1_000_000 // len(piece)) + end


def parse(text: str) -> None:
    """Read the calls of a text in all formats, and check what the environment and the policy get."""
    for name in get_args(ToolFormat):
        tool_format: ToolFormat = name
        rest, calls = parse_calls(text, [TOOL], tool_format, lambda: "id")
        assert len(rest) <= len(text)
        for call in calls:
            assert call.status in get_args(CallStatus)
            assert (call.status == "ok") == (not call.error)
            assert len(call.error) < 3_000
            assert call.name.encode() or call.status != "ok"


@pytest.fixture
def read(tmp_path: Path, answered: Callable[..., Trajectory]) -> Callable[[str], None]:  # noqa: F811
    """Reads a text with everything that scores texts in the run's own process."""
    parts: list[dict[str, Any]] = [
        {"kind": "exact", "pattern": r"\\boxed\{([^}]*)\}", "ignore_case": True, "ignore": ", "},
        {"kind": "pattern", "pattern": r"<think>.*</think>"},
        {"kind": "choice"},
        {"kind": "length", "unit": "characters", "start": 1, "end": 9},
        {"kind": "repetition"},
    ]
    scorer: Scorer = build_scorer(
        RewardConfig.model_validate({"parts": parts, "timeout_s": 2.0}), base_dir=tmp_path
    )
    judges = [
        JudgeReward.model_validate({"kind": "judge", "url": "policy", "prompt": "{response}", **more})
        for more in ({}, {"range": (0, 10)}, {"scores": {"good": 1.0, "a": 0.0}}, {"pattern": "score: (.*)"})
    ]
    readers = [score_reader(judge, 2.0, key="judge") for judge in judges]

    def read(text: str) -> None:
        trajectory = answered(text, answer="A")
        asyncio.run(scorer.score([trajectory]))
        assert trajectory.reward is not None or "took longer" in trajectory.reason
        fill_template("{prompt} {response}", trajectory, key="prompt")
        for reader in readers:
            try:
                assert isinstance(reader(text), float)
            except RewardError:
                continue

    return read


def _numbers(everyday: int, slow: int, nightly: int) -> list[Any]:
    """Sizes of a test for three tiers."""
    return [
        everyday,
        pytest.param(slow, marks=pytest.mark.slow),
        pytest.param(nightly, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ]


@pytest.mark.parametrize("num_texts", _numbers(500, 2_000, 100_000))
def test_any_text_is_parsed_and_scored(num_texts: int, read: Callable[[str], None]) -> None:
    draw = random.Random(num_texts)
    for _ in range(num_texts):
        text = text_of(draw)
        with no_longer_than(MAX_CPU_S):
            parse(text)
            read(text)


@pytest.mark.parametrize("num_texts", _numbers(20, 60, 2_000))
@pytest.mark.parametrize("template", ["qwen3", "llama3_1", "glm4moe"])
def test_any_text_is_rendered_and_its_control_tokens_are_plain_text(template: str, num_texts: int) -> None:
    chat, draw = _format(template), random.Random(num_texts)
    tokenizer = chat.tokenizer
    control = {
        token: tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<think>", "<tool_call>")
    }
    for _ in range(num_texts):
        text = text_of(draw).encode(errors="ignore").decode()
        message: Message = {"role": "user", "content": text}
        with no_longer_than(MAX_CPU_S):
            plain = chat.opening([{"role": "user", "content": "x"}])
            ids = chat.opening([message])
            reply = chat.delta([message], [TOOL], plain[-1:])
            action = chat.parse([*ids, *reply], [TOOL])
        assert all(call.status in get_args(CallStatus) for call in action.tool_calls)
        for number in control.values():
            if number != tokenizer.unk_token_id:
                assert ids.count(number) == plain.count(number)


@pytest.mark.parametrize("num_texts", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_any_text_is_scored_as_mathematics(
    num_texts: int,
    build: Callable[..., Scorer],  # noqa: F811
    answered: Callable[..., Trajectory],  # noqa: F811
) -> None:
    draw = random.Random(num_texts)
    texts = [text_of(draw) for _ in range(num_texts)] + [
        "#### " + "1" * 1_000_000 + "x",
        "#### " + "1," * 500_000,
    ]
    scored = [answered(text, answer="12") for text in texts]
    asyncio.run(build({"kind": "math"}, timeout_s=5.0, retries=0).score(scored))
    assert all((trajectory.reward is None) == bool(trajectory.reason) for trajectory in scored)


@pytest.mark.parametrize("digits", ["1" * 1_000_000, "1," * 500_000], ids=["plain", "grouped"])
def test_a_megabyte_of_digits_is_no_marked_number_at_once(digits: str) -> None:
    with no_longer_than(MAX_CPU_S):
        assert MARKED_NUMBER.findall(f"#### {digits}x") == []
    assert MARKED_NUMBER.findall("#### -1,234.5/6.\n#### $.5 \n#### 7.\n#### 1. Idea\n#### 1,\n#### x") == [
        "-1,234.5/6",
        ".5",
        "7",
    ]


@pytest.mark.parametrize(
    "text",
    ["\\boxed{" * 100_000, "{" * 700_000, "<answer>" * 90_000, "<think>" * 100_000, "\\boxed{1}," * 70_000],
    ids=["boxes", "braces", "answers", "thoughts", "connected boxes"],
)
def test_answers_are_found_in_a_megabyte_at_once(text: str) -> None:
    with no_longer_than(MAX_CPU_S):
        last_boxes(text)
        tagged_answer(text)
        without_reasoning(text)


@pytest.mark.parametrize("num_texts", _numbers(4, 12, 200))
def test_a_megabyte_is_parsed_and_scored_in_time(num_texts: int, read: Callable[[str], None]) -> None:
    draw = random.Random(num_texts)
    for _ in range(num_texts):
        text = long_text(draw)
        with no_longer_than(MAX_CPU_S):
            parse(text)
            read(text)
