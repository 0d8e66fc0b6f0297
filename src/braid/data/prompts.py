"""From data rows to prompts: templates, chat templates, tokenization, and handling of overlong prompts.

Owns everything between a row's columns and a Prompt's token ids; sources.py reads the rows.
Every error is a DataError that names the source, the row, and the config key to change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

from braid.config.data import DataConfig, Source
from braid.errors import DataError, suggest
from braid.types import Message, Prompt

from .columns import parse_json
from .sources import DataRow, SourceRows, read_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_BATCH = 1024
"""Texts tokenized per call: enough to use all cores, few enough to bound memory."""


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """Row counts of one source. Dropped rows give no prompt, truncated ones a shortened prompt."""

    rows: int
    dropped_overlong: int = 0
    truncated: int = 0


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of several sources, in the order of the sources, and row counts by source name in the
    config."""

    prompts: list[Prompt]
    counts: dict[str, SourceCounts]

    def by_source(self) -> dict[str, list[Prompt]]:
        """The prompts grouped by `Prompt.source`."""
        out: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            out.setdefault(prompt.source, []).append(prompt)
        return out


def load_prompts(
    sources: Sequence[Source],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    base_dir: Path,
    role: Literal["train", "eval"],
) -> PromptSet:
    """Read `sources` (the config's `data.train` or `data.eval`) and make a Prompt of every row that fits.

    `Prompt.uid` contains the source's name in the config; `Prompt.source` is the value of the `source_key`
    column, or that name if there is no `source_key`; `Prompt.fields` is the row, with the reference answer
    under `answer`. Relative paths start from `base_dir`.
    """
    prompts: list[Prompt] = []
    counts: dict[str, SourceCounts] = {}
    for source in read_sources(sources, base_dir=base_dir, key=f"data.{role}"):
        encoded, counts[source.name] = encode(source, config, tokenizer)
        for item in encoded:
            name, fields = _source_name(source, item.index), _fields(source, item.index)
            if role == "eval" and name == "all":
                key = f"{source.key}.{'source_key' if source.config.source_key else 'name'}"
                why = "the name 'all' is reserved for the result over all sources"
                raise DataError(f"{source.key}: {why}; change {key}")
            prompts.append(Prompt(f"{source.name}:{item.index}", name, item.token_ids, item.messages, fields))
    return PromptSet(prompts, counts)


def _fields(source: SourceRows, index: int) -> DataRow:
    row, key = source.rows[index], source.config.answer_key
    if key is None:
        return row
    no_answer = "set it to null if there is no answer"
    return {**row, "answer": source.cell(index, "answer_key", key, or_else=no_answer)}


def _source_name(source: SourceRows, index: int) -> str:
    key = source.config.source_key
    if key is None:
        return source.name
    name = source.cell(index, "source_key", key)
    if not isinstance(name, str) or not name:
        raise DataError(
            f"{source.where(index)}: column {key!r} ({source.key}.source_key) contains {name!r}, but the name of a source "
            "must be a string; set source_key to null to use one name for all rows"
        )
    return name


@dataclass(frozen=True, slots=True)
class Encoded:
    """The prompt of one row: its index in the source, messages, tokens, and whether these come from the chat
    template."""

    index: int
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    is_templated: bool


def encode(
    source: SourceRows, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Encoded], SourceCounts]:
    """Apply templates to a source's rows and tokenize them; overlong prompts are handled as `config.overlong`
    says."""
    messages, texts, is_templated, used = [], [], [], _template_columns(source)
    for index in range(len(source.rows)):
        of_row, is_chat = _messages(source, index, used)
        use_template = _use_chat_template(source, index, is_chat, config, tokenizer)
        text = render(source, index, of_row, config, tokenizer) if use_template else of_row[-1]["content"]
        messages.append(of_row)
        texts.append(text)
        is_templated.append(use_template)
    token_ids = _tokenize(texts, is_templated, tokenizer)
    items = map(Encoded, range(len(messages)), messages, token_ids, is_templated)
    return _fit(source, config, list(items))


def _messages(source: SourceRows, index: int, used: Sequence[str]) -> tuple[tuple[Message, ...], bool]:
    """A row's prompt as chat messages, and whether the row itself holds chat messages. `used` are the columns in
    the template."""
    config, where, column = source.config, source.where(index), source.config.prompt_key
    value = source.cell(index, "prompt_key", column) if "prompt" in used else source.rows[index].get(column)
    if isinstance(value, str) and _is_chat(parsed := parse_json(value)):
        value = parsed
    system: tuple[Message, ...] = ({"role": "system", "content": config.system},) if config.system else ()
    if not isinstance(value, list):
        return (*system, {"role": "user", "content": _fill_template(source, index, value, used)}), False
    if config.template != "{prompt}":
        raise DataError(f"{where}: {source.key}.template does not apply to chat messages; remove it")
    for message in value:
        match message:
            case {"role": str(), "content": str()}:
                pass
            case _:
                shape = "which is not a chat message {role: string, content: string}"
                raise DataError(f"{where}: column {column!r} contains {message!r}, {shape}")
    if not value or value[-1]["role"] == "assistant":
        fault = "must not end with an assistant message" if value else "are empty"
        raise DataError(
            f"{where}: the messages in column {column!r} {fault}; end them with a message for the policy"
        )
    if system and value[0]["role"] == "system":
        raise DataError(f"{where}: already has a system message; remove {source.key}.system")
    chat: list[Message] = [{"role": message["role"], "content": message["content"]} for message in value]
    return (*system, *chat), True


def _is_chat(value: Any) -> bool:
    """Whether parsed JSON is a list of chat messages; any other JSON text is a plain-text prompt."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, dict) and {"role", "content"} <= item.keys() for item in value)


def _template_columns(source: SourceRows) -> list[str]:
    """The columns that a source's template refers to: `metadata` for `metadata[terms]`."""
    template = source.config.template
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError as error:
        why = f"invalid template {template!r}: {error}; write literal braces as {{{{ and }}}}"
        raise DataError(f"{source.key}.template: {why}") from error
    return [re.split(r"[.\[]", field)[0] for field in fields]


def _fill_template(source: SourceRows, index: int, value: Any, used: Sequence[str]) -> str:
    where, config = source.where(index), source.config
    if "prompt" in used and not isinstance(value, str):
        column = f"column {config.prompt_key!r} ({source.key}.prompt_key)"
        rule = "but a prompt must be a string or a list of chat messages"
        raise DataError(f"{where}: {column} contains {value!r}, {rule}")
    columns = {**source.rows[index], "prompt": value}
    try:
        text = config.template.format_map(columns)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        unknown = [name for name in used if name not in columns]
        problem = f"no column {unknown[0]!r}{suggest(unknown[0], columns)}" if unknown else str(error)
        raise DataError(
            f"{where}: cannot fill {source.key}.template {config.template!r}: {problem}; the columns are "
            f"{', '.join(map(str, source.rows[index]))}; write literal braces as {{{{ and }}}}"
        ) from error
    if not text:
        raise DataError(f"{where}: the prompt is empty")
    return text


def _use_chat_template(
    source: SourceRows, index: int, is_chat: bool, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> bool:
    mode, has_template, needs = config.use_chat_template, bool(tokenizer.chat_template), ""
    if is_chat:
        needs = "the prompt is a list of chat messages"
    elif source.config.system:
        needs = f"{source.key}.system is set"
    elif mode == "always":
        needs = "data.use_chat_template is 'always'"
    if needs and mode == "never":
        why = f"{needs}, but data.use_chat_template is 'never'; set it to 'auto'"
        raise DataError(f"{source.where(index)}: {why}")
    if needs and not has_template:
        raise DataError(
            f"{source.where(index)}: {needs}, but the tokenizer has no chat template; set model.chat_template to a "
            "Jinja template or the path of a .jinja file, or use plain-text prompts"
        )
    return mode != "never" and has_template


def render(
    source: SourceRows,
    index: int,
    messages: tuple[Message, ...],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    asks: bool = True,
) -> str:
    """Apply the chat template to the messages of a row; with `asks` they end with the start of a response.
    Raises DataError if the template refuses them."""
    import jinja2

    try:
        conversation: Any = [dict(message) for message in messages]
        return str(
            tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=asks, **config.chat_template_kwargs
            )
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"{source.where(index)}: the chat template rejects the messages (roles "
            f"{', '.join(m['role'] for m in messages)}): {error}; change the messages, {source.key}.system or "
            "model.chat_template"
        ) from error


def _tokenize(
    texts: Sequence[str], is_templated: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, ...]]:
    """Tokenize `texts`. Plain texts get the tokenizer's leading special tokens, but no end token, because the
    policy continues them; templated texts already contain their special tokens."""
    out: list[tuple[int, ...]] = [()] * len(texts)
    drop_end = _appends_end(tokenizer)
    for templated in (False, True):
        chosen = [i for i, flag in enumerate(is_templated) if flag is templated]
        for start in range(0, len(chosen), TOKENIZER_BATCH):
            part = chosen[start : start + TOKENIZER_BATCH]
            ids = tokenizer(
                [texts[i] for i in part],
                add_special_tokens=not templated,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
            for i, of_text in zip(part, ids, strict=True):  # pyright: ignore[reportArgumentType]
                out[i] = tuple(of_text[:-1] if drop_end and not templated else of_text)
    return out


def _appends_end(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer appends an end token to every text."""
    ends = [tokenizer("1", add_special_tokens=special)["input_ids"][-1:] for special in (True, False)]
    return ends[0] == [tokenizer.eos_token_id] != ends[1]


def _fit(source: SourceRows, config: DataConfig, items: list[Encoded]) -> tuple[list[Encoded], SourceCounts]:
    limit, rule = config.max_prompt_tokens, config.overlong
    lengths = [len(item.token_ids) for item in items]
    if min(lengths) == 0:
        raise DataError(f"{source.where(lengths.index(0))}: the prompt has no tokens")
    overlong = sum(length > limit for length in lengths)
    if overlong and rule == "error":
        first = next(i for i, length in enumerate(lengths) if length > limit)
        raise DataError(
            f"{source.where(first)}: the prompt has {lengths[first]} tokens, but data.max_prompt_tokens is {limit} "
            f"({overlong} of {len(items)} prompts are too long; the longest has {max(lengths)}); raise it, or set "
            "data.overlong to drop, truncate_left or truncate_right"
        )
    if rule == "drop":
        if overlong == len(items):
            raise DataError(
                f"{source.key} ({source.name}): all prompts are too long: the shortest has {min(lengths)} tokens, the "
                f"longest {max(lengths)}, but data.max_prompt_tokens is {limit}; raise it, or set data.overlong to "
                "truncate_left or truncate_right"
            )
        fitting = [item for item in items if len(item.token_ids) <= limit]
        return fitting, SourceCounts(rows=len(items), dropped_overlong=overlong)
    kept = slice(-limit, None) if rule == "truncate_left" else slice(limit)
    cut = [replace(item, token_ids=item.token_ids[kept]) for item in items]
    return cut, SourceCounts(rows=len(items), truncated=overlong)
