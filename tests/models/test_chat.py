# ruff: noqa: RUF001  # DeepSeek's tokens contain wide signs
"""Chat formats over the templates of published models, which TRL's wheel contains. An independent oracle:
rendering the whole conversation at once. Tokens are characters here, but for control tokens, so that equal
texts are equal tokens."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.test_tool_calls import TOOL
from transformers import PreTrainedTokenizerFast

from braid.errors import ModelError
from braid.models.chat import Answer, ChatFormat
from braid.models.tokenizer import character_tokenizer
from braid.types import Message

_ENDS = {
    "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "qwen3_instruct_2507": "<|im_end|>", "qwen3_vl": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>", "llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>", "llama3_2": "<|eot_id|>",
    "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>", "phi3": "<|end|>", "glm4moe": "<|user|>",
    "deepseekv3": "<｜end▁of▁sentence｜>", "nemotron_3_nano": "<|im_end|>", "cohere": "<|END_OF_TURN_TOKEN|>",
    "lfm2": "<|im_end|>", "gptoss": "<|return|>",
}  # fmt: skip
"""The token that ends a turn of the policy, by template."""
_ENDS_OF_PARSED = {
    **_ENDS, "qwen3_5_nothink": "<|im_end|>", "deepseek_r1_distill": "<｜end▁of▁sentence｜>", "gemma4": "<turn|>",
    "cohere2": "<|END_OF_TURN_TOKEN|>",
}  # fmt: skip
"""With templates whose turns are only parsed here."""
_WITH_TOOLS = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "llama3_1", "llama3_2", "glm4moe",
               "nemotron_3_nano")  # fmt: skip
_CONTROL = re.compile(
    r"<\|[\w▁]+\|>|<｜[\w▁]+｜>|\[/?[A-Z_]{4,}\]|<(?:start|end)_of_turn>|</?tool_call>|</?think>"
)
ASK: Message = {"role": "user", "content": "How much?"}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _tokenizer(template: str, extra: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer(string.printable + "｜▁")
    control = sorted(
        {*_CONTROL.findall(template), *extra, "<think>", "</think>", "<tool_call>", "</tool_call>"}
    )
    tokenizer.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": control})  # pyright: ignore[reportArgumentType]
    tokenizer.chat_template = template
    return tokenizer


def _format(name: str, *, control: Sequence[str] = (), **settings: Any) -> ChatFormat:
    """`control` are further control tokens, of which <|endoftext|> ends a turn, too."""
    spec = find_spec("trl")
    assert spec is not None, "install requirements/agents.lock"
    assert spec.origin is not None
    template = (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
    tokenizer = _tokenizer(template, [_ENDS_OF_PARSED[name], *control])
    more = {"glm4moe": ["<|observation|>"], "gptoss": ["<|call|>"]}.get(name, [])
    more += [token for token in control if token == "<|endoftext|>"]
    ends = [_id(tokenizer, token) for token in (_ENDS_OF_PARSED[name], "<eos>", *more)]
    return ChatFormat(tokenizer, end_token_ids=ends, **settings)


def _id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    number = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(number, int)
    return number


def _whole(chat: ChatFormat, messages: Sequence[Any], tools: Sequence[Any] = (), *, asks: bool = True) -> str:
    """The oracle: the template's text of a whole conversation."""
    return str(
        chat.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=asks
        )
    )


def _text(chat: ChatFormat, ids: Sequence[int]) -> str:
    return str(chat.tokenizer.decode(list(ids)))


def _no_thinking(text: str) -> str:
    return re.sub(r"<think>\s*</think>\s*", "", text)


def _continued(
    chat: ChatFormat, end: str, answer: Any, replies: Sequence[Any], tools: Sequence[Any]
) -> tuple[str, str]:
    """A conversation with a sampled answer, in tokens, and as the template writes it at once."""
    start = chat.opening([ASK], tools)
    written = _whole(chat, [ASK, answer], tools, asks=False)
    said = _no_thinking(written)[len(_no_thinking(_whole(chat, [ASK], tools)).removesuffix("<think>\n")) :]
    said = said.split(end)[0] if end in said else said
    sampled = chat.tokenizer.encode(said + end, add_special_tokens=False)
    ids = [*start, *sampled, *chat.delta(replies, tools, sampled)]
    whole = _no_thinking(_whole(chat, [ASK, answer, *replies], tools))
    if end == "<|return|>":  # gpt-oss writes another end into the history; the policy's own stays
        before, closing, after = whole.rpartition("<|end|><|start|>user")
        whole = before + closing.replace("<|end|>", end) + after
    return _no_thinking(_text(chat, ids)), whole


_WORDS = st.text(string.ascii_letters + string.digits + " .,:?", min_size=1, max_size=20).map("a{}b".format)


@pytest.mark.parametrize("name", _ENDS)
@settings(max_examples=25, deadline=None)
@given(said=_WORDS, asked=_WORDS)
def test_a_continued_conversation_has_the_tokens_of_the_whole_one(name: str, said: str, asked: str) -> None:
    chat = _format(name)
    chat.check(uses_tools=False)
    continued, whole = _continued(
        chat, _ENDS[name], {"role": "assistant", "content": said}, [{"role": "user", "content": asked}], ()
    )
    opened = "<think>\n"  # a template may open the reasoning for the policy, and drop it afterwards
    assert continued.replace(opened, "") == whole.replace(opened, "").replace("</think>", "")


def _calls(*arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call0000{i}", "type": "function", "function": {"name": "add", "arguments": value}}
            for i, value in enumerate(arguments)
        ],
    }


def _result(text: str, number: int = 0) -> Message:
    return {"role": "tool", "content": text, "name": "add", "tool_call_id": f"call0000{number}"}


@pytest.mark.parametrize("name", _WITH_TOOLS)
@settings(max_examples=25, deadline=None)
@given(results=st.lists(_WORDS, min_size=1, max_size=3), asked=st.none() | _WORDS)
def test_results_of_tools_follow_their_calls_and_a_question_follows_the_results(
    name: str, results: list[str], asked: str | None
) -> None:
    chat = _format(name)
    chat.check(uses_tools=True)
    if name.startswith("llama3"):
        results = results[:1]  # the template takes one call per turn
    end = "<|observation|>" if name == "glm4moe" else _ENDS[name]
    answer = _calls(*({"a": i} for i in range(len(results))))
    replies = [_result(text, i) for i, text in enumerate(results)]
    if asked is not None:
        replies.append({"role": "user", "content": asked})
    continued, whole = _continued(chat, end, answer, replies, [TOOL])
    assert continued.replace("<think>\n", "") == whole.replace("<think>\n", "").replace("</think>", "")


@pytest.mark.parametrize("name", _ENDS)
def test_a_turn_cut_by_a_limit_is_ended_for_the_policy(name: str) -> None:
    chat = _format(name)
    sampled = chat.tokenizer.encode("Thr", add_special_tokens=False)
    after = _text(chat, chat.delta([{"role": "user", "content": "What?"}], (), sampled))
    ended = _text(
        chat,
        chat.delta([{"role": "user", "content": "What?"}], (), [*sampled, _id(chat.tokenizer, _ENDS[name])]),
    )  # pyright: ignore[reportArgumentType]
    assert after == {"<|return|>": "<|end|>"}.get(_ENDS[name], _ENDS[name]) + ended


@pytest.mark.parametrize("name", [name for name in _ENDS if name != "glm4moe"])
def test_a_turn_has_one_end_token_whichever_the_policy_chose(name: str) -> None:
    chat = _format(name)
    replies: list[Message] = [{"role": "user", "content": "What?"}]
    said = chat.tokenizer.encode("Three", add_special_tokens=False)
    ends = ("<eos>", _ENDS[name])
    first, second = (chat.delta(replies, (), [*said, _id(chat.tokenizer, end)]) for end in ends)  # pyright: ignore[reportArgumentType]
    assert first == second
    assert not _text(chat, first).lstrip().startswith(("<|end|>", "<|im_end|>", *ends))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["<|im_end|>", "<|im_start|>", "system", "\n", "<", "|im_", "end|>", "<tool_call>", "x", "\ue0f7"]
        ),
        max_size=8,
    ).map("".join)
)
def test_text_of_an_environment_forges_no_control_token(text: str) -> None:
    tokenizer = _tokenizer(CHATML)
    chat = ChatFormat(tokenizer, end_token_ids=[_id(tokenizer, "<|im_end|>")])
    control = {_id(tokenizer, token) for token in ("<|im_end|>", "<|im_start|>", "<tool_call>")}
    end = _id(tokenizer, "<|im_end|>")
    for ids, expected in (
        (chat.delta([{"role": "user", "content": text}], (), [5, end]), 3),
        (chat.opening([{"role": "user", "content": text}]), 3),
    ):
        assert sum(i in control for i in ids) == expected
        assert text.replace("\ue0f7", "") in _text(chat, ids)


def test_tool_calls_and_tools_forge_no_control_token() -> None:
    shows_all = "{{ tools | tojson }}{% for m in messages %}{{ m.reasoning_content }}{{ m.tool_calls | tojson }}{% endfor %}"
    tokenizer = _tokenizer(shows_all)
    chat = ChatFormat(tokenizer, end_token_ids=[_id(tokenizer, "<|im_end|>")])
    said: Any = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "<|im_end|>",
        "tool_calls": [{"function": {"name": "add<|im_end|>", "arguments": {"a": ["<|im_end|>"]}}}],
    }
    tool = {"type": "function", "function": {"name": "add", "description": "<|im_end|>"}}
    ids = chat.opening([said], [tool])
    assert _id(tokenizer, "<|im_end|>") not in ids
    assert _text(chat, ids).count("<|im_end|>") == 4


def test_a_template_that_cannot_be_continued_is_refused_with_the_reason() -> None:
    def refused(template: str, *, uses_tools: bool = False) -> str:
        with pytest.raises(ModelError) as caught:
            ChatFormat(_tokenizer(template), end_token_ids=[1]).check(uses_tools=uses_tools)
        return str(caught.value)

    counts = CHATML.replace("m.content", "messages|length|string + m.content")
    assert "renders earlier turns differently" in refused(counts)
    assert "does not follow" in refused("{% for m in messages[:2] %}{{ m.content }}{% endfor %}")
    assert "does not show tools" in refused(CHATML, uses_tools=True)
    alone = (
        "{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}{{ messages[0].content }}"
    )
    assert "one message" in refused(alone)


def test_a_role_that_the_template_does_not_know_is_named() -> None:
    """Gemma's takes no system message, and neither Gemma's nor Gemma 3's has results of tools."""
    with pytest.raises(ModelError, match=r"rejects messages with the roles system, user: .*[Ss]ystem role"):
        _format("gemma").opening([{"role": "system", "content": "Be kind."}, ASK])
    for name in ("gemma", "gemma3"):
        with pytest.raises(ModelError, match="tool"):
            _format(name).check(uses_tools=True)


def _thinker() -> ChatFormat:
    """Qwen3's template, which drops the reasoning before the last question."""
    return _format("qwen3", thinking="as_template")


def test_as_the_template_does_drops_the_reasoning_of_earlier_turns_and_nothing_else() -> None:
    chat = _thinker()
    sampled = chat.tokenizer.encode("<think>\nHm.\n</think>\n\nThree.<|im_end|>", add_special_tokens=False)
    answers = [Answer(sampled, [{"role": "user", "content": "And now?"}])]
    text = _text(chat, chat.conversation([ASK], answers, ()))
    assert text == _whole(
        chat, [ASK, {"role": "assistant", "content": "Three."}, {"role": "user", "content": "And now?"}]
    )
    inside = [Answer(sampled, [_result("3")])]
    kept = chat.conversation([ASK], inside, [TOOL])
    start = chat.opening([ASK], [TOOL])
    assert kept[: len(start) + len(sampled) - 1] == [*start, *sampled[:-1]], (
        "within a cycle of tool calls it is kept"
    )


def test_a_turn_is_split_into_reasoning_text_and_calls() -> None:
    chat = _thinker()
    said = (
        "<think>\nfirst add\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    )
    action = chat.parse(chat.tokenizer.encode(said, add_special_tokens=False), [TOOL], new_id=lambda: "x")
    assert (action.text, action.reasoning) == ("Let me see.", "first add")
    (call,) = action.tool_calls
    assert (call.name, dict(call.arguments), call.id, call.status) == ("add", {"a": 2}, "x", "ok")
    assert action.raw_text == said.removesuffix("<|im_end|>")
    assert chat.parse(chat.tokenizer.encode("plain", add_special_tokens=False)).text == "plain"


_CHANNELS = "<|channel|>analysis<|message|>41?<|end|><|start|>assistant"
_CALLING = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("name", "prefill", "said", "answer", "reasoning"),
    [
        ("qwen3", "", "<think>\n41?\n</think>\n\n42", "42", "41?"),
        ("qwen3", "", "42", "42", ""),
        ("qwen3", "", "<think>\n41?", "", "41?"),
        ("qwen3", "", "Well. <think>41?", "Well. ", "41?"),
        ("qwen3", "", "<think>40?</think>\n<think>41?</think>42", "42", "40?</think>\n<think>41?"),
        ("qwen3", "", "42<|endoftext|>", "42", ""),
        ("qwen3", "", "<answer>42</answer>", "<answer>42</answer>", ""),
        ("qwen3_5_think", "<think>\n", "41?\n</think>\n\n42", "42", "41?"),
        ("qwen3_5_think", "<think>\n", "41?", "", "41?"),
        ("qwen3_5_nothink", "<think>\n\n</think>\n\n", "42", "42", ""),
        ("deepseek_r1_distill", "<think>\n", "41?\n</think>\n\n42", "42", "41?"),
        ("gemma4", "", "<|channel>thought\n41?<channel|>42", "42", "41?"),
        ("cohere2", "", "42<|END_RESPONSE|>", "42", ""),
        ("gptoss", "", f"{_CHANNELS}<|channel|>final<|message|>42", "42", "41?"),
        ("gptoss", "", f"{_CHANNELS}<|channel|>final <|constrain|>json<|message|>42<|end|>", "42", "41?"),
        ("gptoss", "", _CHANNELS, "", "41?"),
        ("gptoss", "", "<|channel|>analysis<|message|>42", "", "42"),
        ("gptoss", "", "<|channel|>analysis", "", ""),
        ("gptoss", "", "<|channel|>commentary<|message|>41<|end|>", "", ""),
        ("gptoss", "", "42", "42", ""),
    ],
)
def test_the_answer_is_what_the_models_format_says(
    name: str, prefill: str, said: str, answer: str, reasoning: str
) -> None:
    chat = _format(name, control=("<|endoftext|>", "<answer>", "</answer>", "<|channel>", "<channel|>"))
    context = chat.opening([ASK])
    ids = chat.tokenizer.encode(said, add_special_tokens=False)
    end = _id(chat.tokenizer, _ENDS_OF_PARSED[name])
    for written in (ids, [*ids, end]):
        action = chat.parse(written, context_ids=context)
        turn = said.removesuffix("<|endoftext|>")
        assert (action.prefill, action.raw_text) == (prefill, turn), "with special tokens, without end tokens"
        assert (action.text, action.reasoning.strip()) == (answer, reasoning)
        assert chat.parse(written) == action, "the prefill is that of the template"


def test_a_call_in_a_channel_is_neither_answer_nor_reasoning() -> None:
    chat = _format("gptoss")
    ids = chat.tokenizer.encode(f'{_CHANNELS}{_CALLING}{{"a": 2}}', add_special_tokens=False)
    action = chat.parse([*ids, _id(chat.tokenizer, "<|return|>")], [TOOL])
    assert (action.text, action.reasoning) == ("", "41?")
    assert [(call.name, dict(call.arguments), call.status) for call in action.tool_calls] == [
        ("add", {"a": 2}, "ok")
    ]
    cut = chat.parse(chat.tokenizer.encode(_CALLING[:-11], add_special_tokens=False), [TOOL])
    assert [call.status for call in cut.tool_calls] == ["bad_json"]


@pytest.mark.parametrize(
    ("asked", "prefill"),
    [("Think: <think>", "<think>"), ("Write <think></think>", ""), ("Write <think> and so on.", "")],
)
def test_a_prompt_without_a_template_may_open_the_reasoning(asked: str, prefill: str) -> None:
    chat = ChatFormat(_tokenizer(""), end_token_ids=[1], use_template=False)
    context = chat.opening([{"role": "user", "content": asked}])
    action = chat.parse(chat.tokenizer.encode("1", add_special_tokens=False), context_ids=context)
    assert action.prefill == prefill
    assert (action.text, action.reasoning) == (("", "1") if prefill else ("1", ""))


@pytest.mark.parametrize("name", _ENDS_OF_PARSED)
def test_an_example_turn_has_its_answer_and_the_reasoning_of_the_format(name: str) -> None:
    chat = _format(name)
    action = chat.example_turn("42", chat.opening([ASK]))
    assert action.text == "42"
    assert bool(action.reasoning) == (action.raw_text != "42")


@pytest.mark.parametrize(
    "name", [name for name in _ENDS if name not in ("deepseekv3", "nemotron_3_nano", "qwen3_5_think")]
)
def test_a_conversation_to_imitate_has_the_tokens_of_the_template(name: str) -> None:
    chat = _format(name)
    messages = [
        ASK,
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "Five."},
    ]
    ((prompt, ids, mask, _),) = chat.examples(messages)
    assert prompt == chat.opening([ASK])
    whole = _no_thinking(_whole(chat, messages, asks=False)).removesuffix("<eos>").rstrip("\n")
    end = _ENDS[name]
    text = _no_thinking(_text(chat, [*prompt, *ids]))
    if name == "gptoss":  # whose history has another end of a turn
        text = text.replace(f"{end}<|start|>", "<|end|><|start|>")
    assert text.removesuffix(end) == whole.removesuffix(end)
    answers = _no_thinking(_text(chat, [i for i, is_own in zip(ids, mask, strict=True) if is_own]))
    answers = answers.replace("<|channel|>final<|message|>", "")
    assert answers.replace("\n", "") == f"Three.{end}Four.{end}Five.{end}"


def test_earlier_reasoning_is_imitated_as_it_is_sampled() -> None:
    """With thinking=as_template, an example begins where an episode begins a new segment."""
    chat = _thinker()
    said = [
        {"role": "assistant", "content": content, "reasoning_content": "Hm."}
        for content in ("Three.", "Four.", "Five.")
    ]
    asked = [{"role": "user", "content": content} for content in ("And now?", "And then?")]
    examples = chat.examples([ASK, said[0], asked[0], said[1], asked[1], said[2]])
    turns = ["Three.", "Four.", "Five."]
    answers: list[Answer] = []
    for i, (prompt, ids, mask, _) in enumerate(examples):
        assert prompt == (chat.conversation([ASK], answers, ()) if answers else chat.opening([ASK]))
        assert "Hm." not in _text(chat, prompt)
        assert _text(chat, ids) == f"<think>\nHm.\n</think>\n\n{turns[i]}<|im_end|>"
        assert all(mask)
        answers.append(Answer(ids, asked[i : i + 1]))  # pyright: ignore[reportArgumentType]
    assert len(examples) == 3
    kept = _format("qwen3").examples([ASK, said[0], asked[0], said[1], asked[1], said[2]])
    assert len(kept) == 1
    call, last = {**_calls({"a": 1}), "reasoning_content": "Add."}, said[0]
    assert len(chat.examples([ASK, call, _result("2"), last], [TOOL])) == 1, "calls keep their reasoning"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "nemotron_3_nano", "glm4moe"])
def test_calls_and_reasoning_to_imitate_are_those_of_the_policy(name: str) -> None:
    chat = _format(name)
    answer = {**_calls({"a": 1}), "reasoning_content": "Add one."}
    last = {"role": "assistant", "content": "Two.", "reasoning_content": "Done."}
    ((_, ids, mask, _),) = chat.examples([ASK, answer, _result("2"), last], [TOOL])
    starts = [i for i, is_own in enumerate(mask) if is_own and (i == 0 or not mask[i - 1])]
    first = ids[starts[0] : mask.index(False)]
    action = chat.parse(first, [TOOL])
    assert action.reasoning == "Add one."
    assert [(call.name, dict(call.arguments), call.status) for call in action.tool_calls] == [
        ("add", {"a": 1}, "ok")
    ]
    assert chat.parse(ids[starts[-1] :]).text.strip() == "Two."
    assert mask[-1]


def test_reasoning_to_imitate_is_shown_by_a_template_that_reads_it_under_another_key() -> None:
    chat = _format("gptoss")
    answer = {"role": "assistant", "content": "Two.", "reasoning_content": "One and one."}
    ((_, ids, mask, _),) = chat.examples([ASK, answer])
    assert all(mask)
    shown = "<|channel|>analysis<|message|>One and one.<|end|><|start|>assistant<|channel|>final<|message|>Two.<|return|>"
    assert _text(chat, ids) == shown
    action = chat.parse(ids)
    assert (action.reasoning, action.text) == ("One and one.", "Two.")
    own_key = {"role": "assistant", "content": "Two.", "thinking": "One and one."}
    assert chat.examples([ASK, own_key]) == [(chat.opening([ASK]), ids, mask, ())]


def test_an_answer_that_the_template_does_not_continue_is_refused() -> None:
    with pytest.raises(ModelError, match="reasoning_content"):
        _format("nemotron_3_nano").examples([ASK, {"role": "assistant", "content": "Three."}])


def test_words_of_a_built_model_are_one_token_in_messages_and_special_tokens_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = character_tokenizer("abc", special_tokens=["cab"], words=["a", "b bc", "higher"])
    chat = ChatFormat(tokenizer, end_token_ids=[1])

    def read(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(chat.delta([{"role": "user", "content": text}], (), [3]))

    assert read("higherab bc") == ["higher", "a", "b bc"]
    assert read("cab") == ["c", "a", "b"]
    assert tokenizer.convert_ids_to_tokens(chat.opening([{"role": "user", "content": "higher"}])) == [
        "higher"
    ]
    assert not caplog.records
    assert read("lower") == ["<unk>"] * 5
    assert "'lower'" in caplog.text
    assert "model.build.characters" in caplog.text
