"""Tokens of conversations compared with those of the package renderers, which writes the formats of published
models in Python, without their templates."""

from __future__ import annotations

import string
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.test_chat import _ENDS, _format
from tests.models.test_tool_calls import TOOL
from tests.needs import needs

from braid.models.chat import ChatFormat
from braid.types import Message

pytestmark = needs("renderers")

_OF_QWEN = ("<|endoftext|>", "<tool_response>", "</tool_response>")
_ORACLES = {
    "qwen3": ("Qwen3", _OF_QWEN),
    "qwen3_instruct_2507": ("Qwen3", _OF_QWEN),
    "qwen3_vl": ("Qwen3VL", _OF_QWEN),
    "qwen3_5_think": ("Qwen35", _OF_QWEN),
    "nemotron_3_nano": ("Nemotron3", _OF_QWEN),
    "glm4moe": ("GLM45", ("[gMASK]", "<sop>", "<|endoftext|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
}  # fmt: skip
"""Template -> its renderer, and the control tokens that this needs beside those of the template."""
_WORDS = st.text(string.ascii_letters + string.digits + " \n.,:?", min_size=1, max_size=20)
_OPENS_THINKING = ("qwen3_5_think", "nemotron_3_nano")
_THOUGHT = "<think>\nHm.\n</think>\n\n"


@cache
def _pair(name: str) -> tuple[ChatFormat, Any]:
    import renderers  # takes long, so it is not imported where tests are only collected

    kind, control = _ORACLES[name]
    chat = _format(name, control=control)
    config = getattr(renderers, f"{kind}RendererConfig")(thinking_retention="all")
    return chat, getattr(renderers, f"{kind}Renderer")(chat.tokenizer, config)


@pytest.mark.parametrize("name", _ORACLES)
@settings(max_examples=30, deadline=None)
@given(system=st.none() | _WORDS, asked=_WORDS, has_tools=st.booleans())
def test_an_opening_has_the_tokens_of_the_oracle(
    name: str, system: str | None, asked: str, has_tools: bool
) -> None:
    chat, oracle = _pair(name)
    messages: list[Message] = [{"role": "user", "content": asked}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    tools = [TOOL] if has_tools else []
    expected = oracle.render_ids(messages, tools=tools or None, add_generation_prompt=True)
    assert chat.opening(messages, tools) == expected


@pytest.mark.parametrize("name", _ORACLES)
@settings(max_examples=60, deadline=None)
@given(
    is_thought=st.booleans(),
    said=_WORDS,
    replies=st.lists(_WORDS, min_size=1, max_size=3),
    is_tool=st.booleans(),
    ends=st.lists(st.sampled_from(["end", "other", "cut"]), min_size=1, max_size=3),
)
def test_a_conversation_goes_on_with_the_tokens_of_the_oracle(
    name: str, is_thought: bool, said: str, replies: list[str], is_tool: bool, ends: list[str]
) -> None:
    """Over several turns, each ended by the template's token, by <|endoftext|>, or by a limit."""
    chat, oracle = _pair(name)
    if (
        name == "glm4moe"
    ):  # the package ends other turns of GLM with <|endoftext|>, which the template never writes
        is_thought, ends = True, ["end"] * len(ends)
    if name in _OPENS_THINKING:
        said = _THOUGHT.removeprefix("<think>\n") + said
    elif is_thought:
        said = _THOUGHT + said
    tools = [TOOL] if is_tool else []
    history = chat.opening([{"role": "user", "content": "How much?"}], tools)
    end_of_turn = "<|observation|>" if is_tool and name == "glm4moe" else _ENDS[name]
    messages: list[Message] = [{"role": "user", "content": replies[0]}]
    if is_tool:
        messages = [
            {"role": "tool", "content": text, "name": "add", "tool_call_id": f"call0000{i}"}
            for i, text in enumerate(replies)
        ]
    for end in ends:
        token = {"end": end_of_turn, "other": "<|endoftext|>", "cut": ""}[end]
        sampled = chat.tokenizer.encode(said + token, add_special_tokens=False)
        expected = oracle.bridge_to_next_turn(history, sampled, messages, tools=tools or None)
        assert expected is not None
        history = [*history, *sampled, *chat.delta(messages, tools, sampled)]
        assert history == expected.token_ids
