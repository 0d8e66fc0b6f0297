from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from examples.solutions import chain_sum, chain_sum_or_guess
from transformers import PreTrainedTokenizerFast

from braid.config.data import DataConfig, FileSource, ProceduralSource
from braid.data.worked import Example, ExampleRules, ExampleSet, load_examples
from braid.errors import ConfigError, DataError
from braid.models.chat import ChatFormat
from braid.types import Image, Placed

END_OF_TURN = 3 + ord("~") - 32
"""A token that the chat template below writes after a turn."""
EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = [{"prompt": "1+2=", "solution": "3"}, {"prompt": "40+50=", "solution": "90"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


def test_a_response_column_is_imitated_with_the_end_token(
    folder: Path, enclosing_tokenizer: PreTrainedTokenizerFast
) -> None:
    source = FileSource(path="a.jsonl", response_key="solution")
    examples = load_examples([source], DataConfig(), enclosing_tokenizer, base_dir=folder).examples
    decoded = [tuple(map(enclosing_tokenizer.decode, (e.prompt_ids, e.response_ids))) for e in examples]
    assert decoded == [("<s>1+2=", "3</s>"), ("<s>40+50=", "90</s>")]


@pytest.mark.parametrize(
    ("after_response", "end_token_ids", "taught"),
    [
        ("~\n", (2, END_OF_TURN), "~"),
        ("~\n", (2,), "</s>"),  # sampling would not stop there
        ("", (2, END_OF_TURN), "</s>"),
        ("{{ raise_exception('prompts only') }}", (2, END_OF_TURN), "</s>"),
    ],
)
def test_a_response_ends_with_the_end_token_that_the_chat_template_writes(
    folder: Path,
    chat_tokenizer: PreTrainedTokenizerFast,
    after_response: str,
    end_token_ids: tuple[int, ...],
    taught: str,
) -> None:
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}"
        f"{{% if m.role == 'user' %}}~{{% else %}}{after_response}{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    source = FileSource(path="a.jsonl", response_key="solution")
    for use_template, end in (("auto", taught), ("never", "</s>")):
        config = DataConfig(use_chat_template=use_template)
        loaded = load_examples([source], config, chat_tokenizer, base_dir=folder, end_token_ids=end_token_ids)
        assert [chat_tokenizer.decode(e.response_ids) for e in loaded.examples] == [f"3{end}", f"90{end}"]
        assert all(all(e.response_mask) for e in loaded.examples)


def test_overlong_prompts_are_dropped_with_their_responses_and_counted(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    source = FileSource(path="a.jsonl", response_key="solution")
    loaded = load_examples([source], DataConfig(max_prompt_tokens=4), tokenizer, base_dir=folder)
    assert [tokenizer.decode(e.response_ids) for e in loaded.examples] == ["3</s>"]
    (counts,) = loaded.counts.values()
    assert (counts.rows, counts.dropped_overlong) == (2, 1)


def test_prompt_and_response_must_fit_the_models_positions(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """4 + 2 and 6 + 3 tokens with the end."""
    source = FileSource(path="a.jsonl", response_key="solution")

    def load(max_positions: int, **settings: Any) -> ExampleSet:
        config = DataConfig(**settings)
        return load_examples(
            [source], config, tokenizer, base_dir=folder, rules=ExampleRules(max_tokens=max_positions)
        )

    assert len(load(9).examples) == 2
    loaded = load(8)
    assert [len(e.prompt_ids) + len(e.response_ids) for e in loaded.examples] == [6]
    (counts,) = loaded.counts.values()
    assert (counts.rows, counts.dropped_overlong) == (2, 1)
    with pytest.raises(
        DataError, match=r"1 of 2 examples exceed the limit of 8 tokens .*; the longest has 9 tokens"
    ):
        load(8, overlong="error")
    with pytest.raises(DataError, match="2 of 2 examples"):
        load(5)


def test_a_function_next_to_the_config_writes_responses(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (folder / "teach.py").write_text("def write(row):\n    return row['prompt'] + row['solution']\n")
    source = FileSource(path="a.jsonl", response_function="teach.py:write")
    examples = load_examples([source], DataConfig(), tokenizer, base_dir=folder).examples
    assert tokenizer.decode(examples[1].response_ids) == "40+50=90</s>"


def test_replies_of_an_environment_are_read_but_not_learned(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (folder / "teach.py").write_text(
        "def write(row):\n    return [('ask', True), ('told', False), ('3', True)]\n"
    )
    source = FileSource(path="a.jsonl", response_function="teach.py:write")
    example, _ = load_examples([source], DataConfig(), tokenizer, base_dir=folder).examples
    assert tokenizer.decode(example.response_ids) == "asktold3</s>"
    assert example.response_mask == (True,) * 3 + (False,) * 4 + (True,) * 2


def test_a_response_in_segments_has_a_mask_for_each(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (folder / "teach.py").write_text("def write(row):\n    return [('ask', True), 'told']\n")
    source = FileSource(path="a.jsonl", response_function="teach.py:write")
    with pytest.raises(
        DataError, match=r"'told'\], but a response must be a string or a list of \(text, is_policy\)"
    ):
        load_examples([source], DataConfig(), tokenizer, base_dir=folder)


def test_the_examples_solutions_of_chain_sum_end_with_its_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    source = ProceduralSource(
        generator="chain_sum",
        size=20,
        template="{metadata[expression]} =",
        response_function="solutions.py:chain_sum",
    )
    examples = load_examples([source], DataConfig(), tokenizer, base_dir=EXAMPLES).examples
    for example in examples:
        prompt, response = map(tokenizer.decode, (example.prompt_ids, example.response_ids))
        assert response.endswith(f"A:{eval(prompt.removesuffix('='))}</s>")


@pytest.mark.parametrize(
    ("expression", "written"),
    [
        ("12 + 34 - 5", "12+34=46 46-5=41 A:41"),
        ("4 - 7 - 1", "4-7=-3 -3-1=-4 A:-4"),
        ("3 + -5", "3+-5=-2 A:-2"),
        ("-3 - -5", "-3--5=2 A:2"),
        ("8", "A:8"),
    ],
)
def test_chain_sums_are_worked_from_left_to_right(expression: str, written: str) -> None:
    assert chain_sum({"metadata": {"expression": expression}}) == written


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"response_key": "solutions"}, "row 0: no column 'solutions', did you mean 'solution'?; the columns"),
        ({"response_function": "teach.py:number"}, "row 0: teach.py:number returned 7, but a response must be a string"),
        ({"response_function": "teach.py:fail"}, "row 0: teach.py:fail raised KeyError: 'no'"),
    ],
)  # fmt: skip
def test_rows_without_a_response_are_reported(
    folder: Path, tokenizer: PreTrainedTokenizerFast, settings: dict[str, str], fault: str
) -> None:
    (folder / "teach.py").write_text("def number(row): return 7\ndef fail(row): return row['no']\n")
    with pytest.raises(DataError) as caught:
        load_examples([FileSource(path="a.jsonl", **settings)], DataConfig(), tokenizer, base_dir=folder)
    assert fault in str(caught.value)


def test_an_unknown_response_function_is_a_problem_of_the_config(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    source = FileSource(path="a.jsonl", response_function=f"{EXAMPLES}/solutions.py:chain_sums")
    with pytest.raises(ConfigError, match=r"sft.data\[0\].response_function: .* did you mean 'chain_sum'\?"):
        load_examples([source], DataConfig(), tokenizer, base_dir=folder)


def test_a_tokenizer_without_an_end_token_is_refused(
    folder: Path, bare_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(
        DataError,
        match=r"the tokenizer has no end token, which responses must end with; set model\.tokenizer",
    ):
        load_examples(
            [FileSource(path="a.jsonl", response_key="solution")],
            DataConfig(),
            bare_tokenizer,
            base_dir=folder,
        )


def test_two_sums_of_five_are_worked_out_and_the_others_guessed() -> None:
    rows = [{"metadata": {"expression": "12 - 5 + 1", "source_index": i}} for i in range(1000)]
    answers = [chain_sum_or_guess(row) for row in rows]
    assert [answer == "12-5=7 7+1=8 A:8" for answer in answers] == ([True] * 2 + [False] * 3) * 200
    guesses = [int(answer.removeprefix("A:")) for i, answer in enumerate(answers) if i % 5 >= 2]
    assert set(guesses) == set(range(-10, 20))
    assert guesses.count(8) < 40  # so that guessing is right one time in about thirty
    assert answers == [chain_sum_or_guess(row) for row in rows]


def _two_turns(
    row: dict[str, Any],
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    thinking: Literal["keep", "as_template"] = "keep",
    limit: int | None = None,
    overlong: Literal["drop", "truncate_right"] = "drop",
    train_on: Literal["all_turns", "last_turn"] = "all_turns",
) -> ExampleSet:
    (folder / "talks.jsonl").write_text(json.dumps(row))
    source = FileSource(
        path="talks.jsonl", messages_key="messages", tools_key="tools" if "tools" in row else None
    )
    chat = ChatFormat(tokenizer, end_token_ids=[END_OF_TURN], thinking=thinking)
    return load_examples(
        [source],
        DataConfig(),
        tokenizer,
        base_dir=folder,
        conversation=chat.examples,
        rules=ExampleRules(max_tokens=limit, overlong=overlong, train_on=train_on),
    )


def test_a_conversation_is_imitated_where_the_policy_writes(
    folder: Path, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    chat_tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}~{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    said = [("user", "1+2="), ("assistant", "3"), ("user", "+4="), ("assistant", "7")]
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    (example,) = _two_turns(row, folder, chat_tokenizer).examples
    decode = chat_tokenizer.decode
    assert decode(example.prompt_ids) == "u1+2=~a"
    assert decode(example.response_ids) == "3~u+4=~a7~"
    assert example.response_mask == (True, True, *[False] * 6, True, True)


def _counts(loaded: ExampleSet) -> tuple[int, int, int, int]:
    (counts,) = loaded.counts.values()
    return counts.rows, counts.dropped_overlong, counts.truncated, counts.dropped_untrained


_PLAIN = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}~{% endfor %}{% if add_generation_prompt %}a{% endif %}"
_TALK = [("user", "1+2="), ("assistant", "3"), ("user", "+4="), ("assistant", "7")]


def test_the_last_turn_alone_may_be_learned(folder: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    chat_tokenizer.chat_template = _PLAIN
    row: dict[str, Any] = {"messages": [{"role": role, "content": content} for role, content in _TALK]}
    every = _two_turns(row, folder, chat_tokenizer)
    last = _two_turns(row, folder, chat_tokenizer, train_on="last_turn")
    assert last.examples[0].response_ids == every.examples[0].response_ids
    assert last.examples[0].response_mask == (*[False] * 8, True, True)
    row["messages"][-1]["weight"] = 0
    with pytest.raises(DataError, match=r"none of the 1 rows has a token to learn: 1 have none within"):
        _two_turns(row, folder, chat_tokenizer, train_on="last_turn")


def test_the_last_turn_of_a_function_s_pieces_may_be_learned_alone(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (folder / "teach.py").write_text(
        "def write(row):\n    return [('ask', True), ('told', False), ('3', True), ('4', True)]\n"
    )
    source = FileSource(path="a.jsonl", response_function="teach.py:write", limit=1)
    rules = ExampleRules(train_on="last_turn")
    (example,) = load_examples([source], DataConfig(), tokenizer, base_dir=folder, rules=rules).examples
    assert tokenizer.decode(example.response_ids) == "asktold34</s>"
    assert example.response_mask == (False,) * 7 + (True,) * 3


def test_a_conversation_is_cut_at_the_limit_and_left_out_if_nothing_to_learn_remains(
    folder: Path, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Seven tokens of the prompt, `3~`, six that are read, `7~`."""
    chat_tokenizer.chat_template = _PLAIN
    row = {"messages": [{"role": role, "content": content} for role, content in _TALK]}
    (whole,) = _two_turns(row, folder, chat_tokenizer).examples
    for limit in (15, 10, 8):
        cut = _two_turns(row, folder, chat_tokenizer, limit=limit, overlong="truncate_right")
        assert _counts(cut) == (1, 0, 1, 0)
        (example,) = cut.examples
        assert example.prompt_ids == whole.prompt_ids
        assert (*example.prompt_ids, *example.response_ids) == (*whole.prompt_ids, *whole.response_ids)[
            :limit
        ]
        assert example.response_mask == whole.response_mask[: limit - len(whole.prompt_ids)]
    for limit, train_on in ((7, "all_turns"), (15, "last_turn")):
        with pytest.raises(DataError, match="none of the 1 rows has a token to learn"):
            _two_turns(row, folder, chat_tokenizer, limit=limit, overlong="truncate_right", train_on=train_on)


def test_an_example_without_a_learned_token_within_the_limit_is_counted(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Prompts of 4 and 6 tokens."""
    source = FileSource(path="a.jsonl", response_key="solution")
    rules = ExampleRules(max_tokens=5, overlong="truncate_right")
    loaded = load_examples([source], DataConfig(), tokenizer, base_dir=folder, rules=rules)
    assert [tokenizer.decode(example.response_ids) for example in loaded.examples] == ["3"]
    assert _counts(loaded) == (2, 0, 1, 1)


def test_an_example_is_not_cut_within_or_before_an_image() -> None:
    image = Placed(2, 3, Image.of(b"a"))
    example = Example((5, 6, 7), (7, 7, 8, 9), (False, False, True, True), (image,))
    assert example.cut(4) is None
    assert example.cut(5) is None, "the tokens of the image alone are not learned"
    assert example.cut(6) == Example((5, 6, 7), (7, 7, 8), (False, False, True), (image,))


def test_a_conversation_whose_history_changes_is_several_examples(
    folder: Path, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last and m.reasoning_content %}{{ 'a<think>' + m.reasoning_content + '</think>' }}"
        "{% else %}{{ m.role[0] }}{% endif %}{{ m.content }}~{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    chat_tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})  # pyright: ignore[reportArgumentType]
    row = {
        "messages": [
            {"role": "user", "content": "1+2="},
            {"role": "assistant", "content": "3", "reasoning_content": "1+1+1"},
            {"role": "user", "content": "+4="},
            {"role": "assistant", "content": "7", "reasoning_content": "3+4"},
        ]
    }
    loaded = _two_turns(row, folder, chat_tokenizer, thinking="as_template")
    texts = [
        [chat_tokenizer.decode(list(ids)) for ids in (e.prompt_ids, e.response_ids)] for e in loaded.examples
    ]
    assert texts == [["u1+2=~a", "<think>1+1+1</think>3~"], ["u1+2=~a3~u+4=~a", "<think>3+4</think>7~"]]
    longest = max(len(e.prompt_ids) + len(e.response_ids) for e in loaded.examples)
    shorter = _two_turns(row, folder, chat_tokenizer, thinking="as_template", limit=longest - 1)
    assert [*shorter.examples] == [loaded.examples[0]]
    assert [count.dropped_overlong for count in shorter.counts.values()] == [1]


@pytest.mark.parametrize("messages", ["hello", [{"role": "user", "content": "1"}], 3])
def test_a_conversation_without_an_answer_is_refused(
    folder: Path, chat_tokenizer: PreTrainedTokenizerFast, messages: Any
) -> None:
    with pytest.raises(DataError, match=r"row 0: column 'messages'.* with an answer of role assistant"):
        _two_turns({"messages": messages}, folder, chat_tokenizer)


def test_lone_surrogates_in_a_response_are_replaced_as_in_prompts(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """They were found only when the example was drawn, where no tokenizer accepts them."""
    rows = [{"prompt": text, "solution": text} for text in ("a\ud800", "a\ufffd")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = FileSource(path="a.jsonl", response_key="solution")
    for max_positions in (None, 5, 500):
        loaded = load_examples(
            [source], DataConfig(), tokenizer, base_dir=tmp_path, rules=ExampleRules(max_tokens=max_positions)
        )
        one, other = loaded.examples
        assert one == other
