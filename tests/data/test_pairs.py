from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from braid.config.data import DataConfig, FileSource
from braid.data.pairs import CONVERSATION_TEMPLATE, Pair, PairFormat, PairSet, load_pairs
from braid.errors import DataError
from braid.models.chat import ChatFormat

Row = dict[str, Any]
Load = Callable[..., PairSet]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`load(rows, tokenizer, key=value, ...)` loads rows with these settings of their source."""

    def load(
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerFast,
        *,
        is_scored: bool = False,
        max_tokens: int | None = None,
        config: DataConfig | None = None,
        **source: Any,
    ) -> PairSet:
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
        chat = ChatFormat(tokenizer, end_token_ids=[2])
        pair_format = PairFormat(
            config or DataConfig(), tokenizer, tmp_path, [2], chat.examples, None, max_tokens, is_scored
        )
        return load_pairs([FileSource(path="pairs.jsonl", **source)], pair_format, key="prefer.data")

    return load


def _texts(pair: Pair, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, str]]:
    return [
        (tokenizer.decode(side.prompt_ids), tokenizer.decode(side.response_ids))
        for side in (pair.chosen, pair.rejected)
    ]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


TEXT_LAYOUTS: dict[str, tuple[Row, dict[str, str]]] = {
    "columns": ({"prompt": "1+2=", "chosen": "3", "rejected": "4"}, {}),
    "other names": (
        {"q": "1+2=", "good": "3", "bad": "4"},
        {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad"},
    ),
    "no prompt": ({"chosen": "1+2=3", "rejected": "1+2=4"}, {}),
}


@pytest.mark.parametrize("layout", TEXT_LAYOUTS)
def test_texts_are_tokenized_after_their_prompt(
    load: Load, tokenizer: PreTrainedTokenizerFast, layout: str
) -> None:
    row, keys = TEXT_LAYOUTS[layout]
    (pair,) = load([row], tokenizer, **keys).pairs
    assert _texts(pair, tokenizer) == [("1+2=", "3</s>"), ("1+2=", "4</s>")]
    assert all(all(side.response_mask) for side in (pair.chosen, pair.rejected))


def test_a_space_before_the_first_difference_belongs_to_the_responses(
    load: Load, tokenizer: PreTrainedTokenizerFast
) -> None:
    (pair,) = load([{"chosen": "a b", "rejected": "a c"}], tokenizer).pairs
    assert _texts(pair, tokenizer) == [("a", " b</s>"), ("a", " c</s>")]


CHAT_LAYOUTS: dict[str, Row] = {
    "messages after a prompt of messages": {
        "prompt": [user("1+2=")], "chosen": [assistant("3")], "rejected": [assistant("4")]},
    "messages after a text": {"prompt": "1+2=", "chosen": [assistant("3")], "rejected": [assistant("4")]},
    "texts after messages": {"prompt": [user("1+2=")], "chosen": "3", "rejected": "4"},
    "conversations without a prompt": {
        "chosen": [user("1+2="), assistant("3")], "rejected": [user("1+2="), assistant("4")]},
    "conversations beside their prompt": {
        "prompt": "1+2=", "chosen": [user("1+2="), assistant("3")], "rejected": [user("1+2="), assistant("4")]},
    "JSON text": {
        "chosen": json.dumps([user("1+2="), assistant("3")]), "rejected": json.dumps([user("1+2="), assistant("4")])},
    "with null keys": {
        "chosen": [user("1+2=") | {"name": None}, assistant("3")], "rejected": [user("1+2="), assistant("4")]},
}  # fmt: skip


@pytest.mark.parametrize("layout", CHAT_LAYOUTS)
def test_every_layout_of_messages_gives_the_same_pair(
    load: Load, chat_tokenizer: PreTrainedTokenizerFast, layout: str
) -> None:
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}"
    )
    (pair,) = load([CHAT_LAYOUTS[layout]], chat_tokenizer).pairs
    prompt = "<s><user>1+2=<assistant>"
    assert _texts(pair, chat_tokenizer) == [(prompt, "3</s>"), (prompt, "4</s>")]


def test_answers_of_the_prompt_are_not_learned(load: Load, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    opening = [user("a"), assistant("b"), user("c")]
    row = {"prompt": opening, "chosen": [assistant("d")], "rejected": [assistant("e")]}
    (pair,) = load([row], chat_tokenizer).pairs
    side = pair.chosen
    learned = [i for i, is_learned in zip(side.response_ids, side.response_mask, strict=True) if is_learned]
    assert chat_tokenizer.decode(learned) == "d</s>"
    assert chat_tokenizer.decode(side.prompt_ids + side.response_ids).startswith("<s><user>a<assistant>b")


def test_long_and_equal_pairs_are_dropped_and_counted(load: Load, tokenizer: PreTrainedTokenizerFast) -> None:
    """4 tokens of the prompt, and 2, 3 or 4 of the responses with their end."""
    rows = [
        {"prompt": "1+2=", "chosen": chosen, "rejected": rejected}
        for chosen, rejected in (("3", "4"), ("3", "3"), ("3", "444"), ("33", "4"))
    ]
    loaded = load(rows, tokenizer, max_tokens=7)
    assert len(loaded.pairs) == 2
    (counts,) = loaded.counts.values()
    assert (counts.rows, counts.dropped_overlong, counts.dropped_equal) == (4, 1, 1)
    with pytest.raises(DataError, match=r"has 8 tokens .* the limit is 7 \(prefer\.max_tokens"):
        load(rows, tokenizer, max_tokens=7, config=DataConfig(overlong="error"))
    with pytest.raises(DataError, match=r"none of the 1 pairs is left.* 1 two equal responses"):
        load(rows[1:2], tokenizer)
    (counts,) = load(rows, tokenizer, config=DataConfig(max_prompt_tokens=4)).counts.values()
    assert counts.dropped_overlong == 0
    with pytest.raises(DataError, match="all prompts are too long"):
        load(rows, tokenizer, config=DataConfig(max_prompt_tokens=3))


BAD: dict[str, tuple[Row, dict[str, str], str]] = {
    "no column": ({"prompt": "a", "chosen": "b"}, {}, r"row 0: no column 'rejected'.*set .*rejected_key"),
    "no prompt column of that name": (
        {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt_key": "q"}, "no column 'q'.*prompt_key"),
    "no common beginning": ({"chosen": "b", "rejected": "c"}, {}, r"no common beginning.*prompt_key"),
    "a text and messages": (
        {"prompt": "a", "chosen": "b", "rejected": [assistant("c")]}, {}, "both must be text, or both a list"),
    "a number": ({"prompt": "a", "chosen": "b", "rejected": 3}, {}, "3 .int.; both must be text"),
    "no message": ({"prompt": "a", "chosen": [3], "rejected": [4]}, {}, "message"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_rows_of_another_layout_are_refused_with_the_row_and_the_key(
    load: Load, chat_tokenizer: PreTrainedTokenizerFast, case: str
) -> None:
    row, keys, message = BAD[case]
    with pytest.raises(DataError, match=message):
        load([row], chat_tokenizer, **keys)


def test_a_function_writes_the_pair_of_a_row(
    load: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def pair(row):\n    return row['sum'], row['sum'] + '!'\n\ndef one(row):\n    return row['sum']\n"
    )
    row = {"a": "1", "sum": "3"}
    (pair,) = load([row], tokenizer, pair_function="mine.py:pair", template="{a}+2=").pairs
    assert _texts(pair, tokenizer) == [("1+2=", "3</s>"), ("1+2=", "3!</s>")]
    with pytest.raises(DataError, match=r"mine.py:one returned '3' \(str\), but it must return two texts"):
        load([row], tokenizer, pair_function="mine.py:one", template="{a}+2=")


def test_a_reward_model_reads_whole_conversations(
    load: Load, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    """As the template writes them without a start of an answer; the last token only marks the position after
    them."""
    row = {"prompt": "1+2=", "chosen": "3", "rejected": [assistant("45")][0]["content"], "by": 0.5, "sure": 1}
    loaded = load([row], chat_tokenizer, is_scored=True, margin_key="by", target_key="sure")
    (pair,) = loaded.pairs
    whole = [
        chat_tokenizer.decode((*side.prompt_ids, *side.response_ids[:-1]))
        for side in (pair.chosen, pair.rejected)
    ]
    assert whole == [f"<s><user>1+2=<assistant>{answer}" for answer in ("3", "45")]
    assert (pair.margin, pair.target) == (0.5, 1.0)
    assert pair.chosen.prompt_ids == pair.rejected.prompt_ids
    for key, value in (("margin_key", "text"), ("target_key", 1.5)):
        with pytest.raises(DataError, match=rf"{key}.* contains .*, but it must be a finite number"):
            load([{**row, "x": value}], chat_tokenizer, is_scored=True, **{key: "x"})


def test_without_a_template_a_reward_model_reads_the_texts_and_an_end_token(
    load: Load, tokenizer: PreTrainedTokenizerFast
) -> None:
    row = {"prompt": "1+2=", "chosen": "3", "rejected": "4"}
    (pair,) = load([row], tokenizer, is_scored=True).pairs
    ids = [*pair.chosen.prompt_ids, *pair.chosen.response_ids[:-1]]
    assert tokenizer.decode(ids) == "1+2=3</s>"
    messages = [user("1+2="), assistant("3")]
    as_read = tokenizer.apply_chat_template(messages, chat_template=CONVERSATION_TEMPLATE, tokenize=False)
    assert tokenizer(as_read, add_special_tokens=False)["input_ids"] == ids
