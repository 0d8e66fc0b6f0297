from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import PreTrainedTokenizerFast

from braid.config.data import DataConfig, FileSource, ProceduralSource
from braid.data.prompts import PromptSet, SourceCounts, load_prompts
from braid.errors import DataError

ROWS = [{"prompt": "1+2", "answer": "3"}, {"prompt": "40+50", "answer": "90"}]
CHAT = [{"prompt": [{"role": "user", "content": "hi"}], "answer": ""}]


class Loader:
    """Writes rows to a file and loads them as prompts."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self.folder = folder
        self.tokenizer = tokenizer

    def __call__(
        self, rows: list[dict[str, Any]], role: Literal["train", "eval"] = "train", **settings: Any
    ) -> PromptSet:
        (self.folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
        of_data = {k: settings.pop(k) for k in list(settings) if k in DataConfig.model_fields}
        source = FileSource(**{"path": "a.jsonl", **settings})
        return load_prompts([source], DataConfig(**of_data), self.tokenizer, base_dir=self.folder, role=role)

    def error(self, rows: list[dict[str, Any]], **settings: Any) -> str:
        with pytest.raises(DataError) as caught:
            self(rows, **settings)
        return str(caught.value)

    def texts(self, prompts: PromptSet) -> list[str]:
        return [self.tokenizer.decode(p.token_ids) for p in prompts.prompts]


@pytest.fixture
def load(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Loader:
    return Loader(tmp_path, tokenizer)


@pytest.fixture
def load_chat(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> Loader:
    return Loader(tmp_path, chat_tokenizer)


def test_a_prompt_has_its_tokens_messages_row_and_a_stable_uid(load: Loader) -> None:
    prompts = load(ROWS)
    assert [p.uid for p in prompts.prompts] == ["a:0", "a:1"]
    first = prompts.prompts[0]
    assert (first.source, first.fields, first.messages) == (
        "a",
        ROWS[0],
        ({"role": "user", "content": "1+2"},),
    )
    assert load.texts(prompts) == ["1+2", "40+50"]
    assert prompts.counts == {"a": SourceCounts(rows=2)}


def test_a_prompt_that_takes_long_to_tokenize_is_announced(
    load: Loader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("braid.data.prompts.LONG_CHARACTERS", 100)
    load([*ROWS, {"prompt": "1" * 101, "answer": ""}], max_prompt_tokens=90)
    assert "data.train[0] (a), row 2: the prompt has 101 characters; tokenizing them may take" in caplog.text
    assert "row 1:" not in caplog.text


def test_a_long_value_that_is_no_prompt_is_shown_in_part(load: Loader) -> None:
    assert len(load.error([{"prompt": ["x" * 100_000], "answer": ""}])) < 1_000


def test_the_answer_is_under_answer_for_any_column(load: Loader) -> None:
    rows = [{"prompt": "x", "solution": 7, "answer": "unrelated"}]
    assert load(rows, answer_key="solution").prompts[0].fields["answer"] == 7
    for row in ({"prompt": "x"}, {"prompt": "x", "answer": "y"}):
        assert "answer" not in load([row], answer_key=None).prompts[0].fields


def test_a_path_goes_into_nested_columns_and_into_json_text(load: Loader) -> None:
    nested = {"ground_truth": "3", "tries": [{"n": 5}]}
    for spec in (nested, json.dumps(nested)):
        rows = [{"task": {"text": "1+2"}, "reward_spec": spec}]
        (prompt,) = load(rows, prompt_key="task.text", answer_key="reward_spec.ground_truth").prompts
        assert prompt.fields["answer"] == "3"
        assert prompt.messages[-1]["content"] == "1+2"
        (prompt,) = load(rows, prompt_key="task.text", answer_key="reward_spec.tries.0.n").prompts
        assert prompt.fields["answer"] == 5


def test_a_column_whose_name_has_a_dot_is_itself(load: Loader) -> None:
    rows = [{"prompt": "x", "a.b": "right", "a": {"b": "wrong"}}]
    assert load(rows, answer_key="a.b").prompts[0].fields["answer"] == "right"


def test_a_missing_nested_column_is_named_with_what_is_there(load: Loader) -> None:
    rows = [{"prompt": "x", "spec": {"truth": "3"}, "plain": "text"}]
    assert load.error(rows, answer_key="spec.trut").startswith(
        "data.train[0] (a), row 0: no column 'trut' inside 'spec', did you mean 'truth'?; the columns "
        "inside 'spec' are truth; set data.train[0].answer_key to one of them"
    )
    assert "no column 'b' inside 'plain'; there are no columns inside 'plain'" in load.error(
        rows, answer_key="plain.b"
    )


def test_chat_messages_may_be_json_text(load_chat: Loader) -> None:
    (prompt,) = load_chat([{"prompt": json.dumps(CHAT[0]["prompt"]), "answer": ""}]).prompts
    assert prompt.messages == ({"role": "user", "content": "hi"},)
    for text in ("[1, 2] has which sum?", "[1, 2]", "[]", '["role", "content"]', '{"role": "user"}'):
        (prompt,) = load_chat([{"prompt": text, "answer": ""}]).prompts
        assert prompt.messages == ({"role": "user", "content": text},)


def test_a_column_may_name_the_source_of_each_row(load: Loader) -> None:
    rows = [{**row, "extra": {"domain": name}} for row, name in zip(ROWS, ("math", "code"), strict=True)]
    loaded = load(rows, role="eval", source_key="extra.domain")
    assert [(p.uid, p.source) for p in loaded.prompts] == [("a:0", "math"), ("a:1", "code")]
    assert {name: len(prompts) for name, prompts in loaded.by_source().items()} == {"math": 1, "code": 1}
    assert loaded.counts == {"a": SourceCounts(rows=2)}


@pytest.mark.parametrize("value", ["", 3, None])
def test_the_name_of_a_source_must_be_text(load: Loader, value: object) -> None:
    problem = load.error([{"prompt": "x", "answer": "", "domain": value}], source_key="domain")
    assert f"column 'domain' (data.train[0].source_key) contains {value!r}" in problem


def test_no_row_of_an_evaluation_may_name_its_source_all(load: Loader) -> None:
    rows = [{"prompt": "x", "answer": "", "domain": "all"}]
    assert "change data.eval[0].source_key" in load.error(rows, role="eval", source_key="domain")


def test_a_template_is_filled_from_any_column(load: Loader) -> None:
    rows = [{"question": "1+2", "answer": "3", "meta": {"unit": "cm"}}]
    prompts = load(rows, prompt_key="question", template="{prompt} in {meta[unit]}? {{n}}=")
    assert load.texts(prompts) == ["1+2 in cm? {n}="]
    assert load.texts(load(rows, template="{meta[unit]}")) == ["cm"]


def test_a_chat_template_writes_the_only_start_token(load_chat: Loader) -> None:
    prompts = load_chat(ROWS, system="Add.")
    assert load_chat.texts(prompts)[0] == "<s><system>Add.<user>1+2<assistant>"
    start = load_chat.tokenizer.bos_token_id
    assert [ids.count(start) for ids in (p.token_ids for p in prompts.prompts)] == [1, 1]
    assert prompts.prompts[0].messages[0] == {"role": "system", "content": "Add."}


def test_further_variables_reach_the_chat_template(load_chat: Loader) -> None:
    load_chat.tokenizer.chat_template += "{% if not thinking | default(true) %}<no>{% endif %}"
    assert load_chat.texts(load_chat(ROWS))[0] == "<s><user>1+2<assistant>"
    loaded = load_chat(ROWS, chat_template_kwargs={"thinking": False})
    assert load_chat.texts(loaded)[0] == "<s><user>1+2<assistant><no>"


def test_chat_messages_go_through_the_template_as_they_are(load_chat: Loader) -> None:
    chat = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    prompts = load_chat([{"prompt": chat, "answer": "", "more": 1}])
    assert load_chat.texts(prompts) == ["<s><system>s<user>u<assistant>a<user>u<assistant>"]
    assert prompts.prompts[0].messages == tuple(chat)


def test_without_the_chat_template_the_tokenizer_puts_its_start_token(load_chat: Loader) -> None:
    prompts = load_chat(ROWS, use_chat_template="never")
    assert load_chat.texts(prompts) == ["<s>1+2", "<s>40+50"]


def test_an_end_token_that_the_tokenizer_appends_is_left_out(
    tmp_path: Path, enclosing_tokenizer: PreTrainedTokenizerFast
) -> None:
    load = Loader(tmp_path, enclosing_tokenizer)
    assert load.texts(load(ROWS)) == ["<s>1+2", "<s>40+50"]


@pytest.mark.parametrize(
    ("rows", "settings", "needs"),
    [
        (CHAT, {}, "the prompt is a list of chat messages"),
        (ROWS, {"system": "Add."}, "data.train[0].system is set"),
        (ROWS, {"use_chat_template": "always"}, "data.use_chat_template is 'always'"),
    ],
)
def test_without_a_chat_template_the_error_names_the_key_to_set(
    load: Loader, rows: list[dict[str, Any]], settings: dict[str, Any], needs: str
) -> None:
    message = load.error(rows, **settings)
    assert message.startswith(
        f"data.train[0] (a), row 0: {needs}, but the tokenizer has no chat template; set model.chat_template"
    )


def test_never_contradicts_prompts_that_need_the_chat_template(load_chat: Loader) -> None:
    assert (
        "the prompt is a list of chat messages, but data.use_chat_template is 'never'; set it to 'auto'"
        in (load_chat.error(CHAT, use_chat_template="never"))
    )


def test_a_chat_template_that_refuses_is_quoted(load_chat: Loader) -> None:
    load_chat.tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    assert "the chat template rejects the messages (roles system, user): System role not supported" in (
        load_chat.error(ROWS, system="x")
    )


def test_overlong_prompts_are_dropped_and_counted(load: Loader) -> None:
    prompts = load(ROWS, max_prompt_tokens=4)
    assert [p.uid for p in prompts.prompts] == ["a:0"]
    assert prompts.counts == {"a": SourceCounts(rows=2, dropped_overlong=1)}
    assert load(ROWS[::-1], max_prompt_tokens=4).prompts[0].uid == "a:1"


@pytest.mark.parametrize(("overlong", "kept"), [("truncate_left", "+50"), ("truncate_right", "40+")])
def test_overlong_prompts_are_cut_and_counted(load: Loader, overlong: str, kept: str) -> None:
    prompts = load(ROWS, max_prompt_tokens=3, overlong=overlong)
    assert load.texts(prompts) == ["1+2", kept]
    assert prompts.counts == {"a": SourceCounts(rows=2, truncated=1)}


def test_what_a_chat_template_writes_after_the_message_is_not_cut_off(load_chat: Loader) -> None:
    whole = load_chat(ROWS[1:])
    (text,) = load_chat.texts(whole)
    question = ROWS[1]["prompt"]
    _, _, end = text.partition(question)
    assert end, "the template writes the beginning of the answer"
    limit = len(whole.prompts[0].token_ids) - 2
    prompts = load_chat(ROWS[1:], max_prompt_tokens=limit, overlong="truncate_right")
    assert len(prompts.prompts[0].token_ids) == limit
    assert load_chat.texts(prompts) == [text.replace(question + end, question[:-2] + end)]
    left = load_chat(ROWS[1:], max_prompt_tokens=limit, overlong="truncate_left")
    assert load_chat.texts(left)[0].endswith(question + end)


def test_a_template_whose_end_does_not_fit_or_is_unknown_cannot_be_cut_right(load_chat: Loader) -> None:
    assert "tokens after the message, and data.max_prompt_tokens=1 leaves no others; raise it" in (
        load_chat.error(ROWS, max_prompt_tokens=1, overlong="truncate_right")
    )
    load_chat.tokenizer.chat_template = "{% for m in messages %}{{ m.content | reverse | join }}{% endfor %}="
    assert "set it to truncate_left or drop" in (
        load_chat.error(ROWS, max_prompt_tokens=2, overlong="truncate_right")
    )


def test_overlong_prompts_are_an_error_where_so_configured(load: Loader) -> None:
    assert load.error(ROWS, max_prompt_tokens=4, overlong="error").startswith(
        "data.train[0] (a), row 1: the prompt has 5 tokens, but data.max_prompt_tokens is 4 (1 of 2 "
        "prompts are too long; the longest has 5); raise it"
    )


def test_if_every_prompt_is_too_long_the_limit_is_reported(load: Loader) -> None:
    assert load.error(ROWS, max_prompt_tokens=2).startswith(
        "data.train[0] (a): all prompts are too long: the shortest has 3 tokens, the longest 5, but "
        "data.max_prompt_tokens is 2; raise it, or set data.overlong to truncate_left or truncate_right"
    )


def test_a_missing_column_is_named_with_those_present_and_the_key(load: Loader) -> None:
    assert load.error([{"promt": "x", "answer": "1"}]) == (
        "data.train[0] (a), row 0: no column 'prompt', did you mean 'promt'?; the columns are promt, answer; "
        "set data.train[0].prompt_key to one of them"
    )
    assert load.error([*ROWS, {"prompt": "x"}]) == (
        "data.train[0] (a), row 2: no column 'answer'; the columns are prompt; "
        "set data.train[0].answer_key to one of them, or set it to null if there is no answer"
    )


@pytest.mark.parametrize("value", [5, None, {"role": "user"}])
def test_a_prompt_of_another_type_is_refused(load: Loader, value: object) -> None:
    assert load.error([{"prompt": value, "answer": ""}]).endswith(
        f"column 'prompt' (data.train[0].prompt_key) contains {value!r}, but a prompt must be a string or a "
        "list of chat messages"
    )


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        (
            ["hi"],
            "contains 'hi', which is not a chat message {role: string, content: string or list of parts}",
        ),
        ([{"role": "user", "content": None}], "which is not a chat message"),
        ([], "are empty; end them with a message for the policy"),
        ([{"role": "assistant", "content": "a"}], "must not end with an assistant message"),
    ],
)
def test_invalid_chat_messages_are_refused(load_chat: Loader, messages: list[object], fault: str) -> None:
    assert fault in load_chat.error([{"prompt": messages, "answer": ""}])


def test_settings_that_do_not_apply_to_chat_messages_are_refused(load_chat: Loader) -> None:
    assert "data.train[0].template does not apply to chat messages" in load_chat.error(
        CHAT, template="Q: {prompt}"
    )
    with_system = [{"prompt": [{"role": "system", "content": "s"}, *CHAT[0]["prompt"]], "answer": ""}]
    assert "already has a system message; remove data.train[0].system" in load_chat.error(
        with_system, system="x"
    )


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{promt}", "no column 'promt', did you mean 'prompt'?; the columns are prompt, answer"),
        (r"\boxed{} {prompt}", "no column ''"),
        (
            "{prompt",
            ": expected '}' before end of string; write literal braces as {{ and }}",
        ),
        ("{prompt[x]}", "cannot fill "),
    ],
)
def test_a_template_that_cannot_be_filled_is_reported(load: Loader, template: str, fault: str) -> None:
    message = load.error(ROWS, template=template)
    assert fault in message
    assert "data.train[0].template" in message


def test_an_empty_prompt_is_refused(load: Loader) -> None:
    assert load.error([*ROWS, {"prompt": "", "answer": ""}]) == (
        "data.train[0] (a), row 2: the prompt is empty"
    )


def test_several_sources_are_kept_apart_by_name(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    sources = [ProceduralSource(generator=name, size=4) for name in ("chain_sum", "gcd")]
    prompts = load_prompts(sources, DataConfig(), tokenizer, base_dir=tmp_path, role="eval")
    assert {name: len(source_prompts) for name, source_prompts in prompts.by_source().items()} == {
        "chain_sum": 4,
        "gcd": 4,
    }
    assert [p.uid for p in prompts.prompts[3:5]] == ["chain_sum:3", "gcd:0"]
    assert prompts.prompts[4].fields["reasoning_gym"]["generator"] == "gcd"


def test_no_evaluation_source_may_be_named_all(load: Loader) -> None:
    assert load(ROWS, name="all").prompts
    assert "the name 'all' is reserved for the result over all sources" in load.error(
        ROWS, name="all", role="eval"
    )
