"""Worked examples for supervised learning: prompts with the response to imitate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from braid.config.data import DataConfig, Source
from braid.errors import DataError, ModelError
from braid.functions import load_function
from braid.types import Message

from .columns import parse_json
from .prompts import Encoded, SourceCounts, encode, render
from .sources import SourceRows, read_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Conversation = Callable[
    [Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], tuple[list[int], list[int], list[bool]]
]
"""From messages and tool schemas to the tokens of the prompt, those after it, and which of these the policy writes."""

Piece = tuple[str, bool]
"""Part of a response, and whether the policy writes it (True) or reads it (False, an environment's reply)."""


@dataclass(frozen=True, slots=True)
class Example:
    """A tokenized prompt and response; `response_ids` ends with an end token.

    `response_mask` is True at tokens that the policy writes, False at replies of an environment.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ExampleSet:
    """The examples of several sources, in the order of the sources, and row counts by source name in the
    config."""

    examples: list[Example]
    counts: dict[str, SourceCounts]


def load_examples(
    sources: Sequence[Source],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    base_dir: Path,
    conversation: Conversation | None = None,
    max_positions: int | None = None,
    end_token_ids: Sequence[int] = (),
) -> ExampleSet:
    """Read `sources` (the config's `sft.data`) and make an Example of every row that fits.

    Prompts are processed as in reinforcement learning. Each response, or each piece of a response that
    contains replies, is tokenized separately, as in sampling. Prompt and response together must fit into the
    model's `max_positions`; longer examples are dropped and counted, or an error under data.overlong=error.
    Raises DataError for rows without a response and for tokenizers without an end token.
    """
    end_id: Any = tokenizer.eos_token_id
    if end_id is None:
        raise DataError(
            "the tokenizer has no end token, which responses must end with; set model.tokenizer to one with an eos_token"
        )
    examples: list[Example] = []
    counts: dict[str, SourceCounts] = {}
    for source in read_sources(sources, base_dir=base_dir, key="sft.data"):
        if source.config.messages_key is not None:
            made = [_conversation(source, index, conversation) for index in range(len(source.rows))]
            fitting = _fitting(source, made, config, max_positions)
            counts[source.name] = SourceCounts(len(made), dropped_overlong=len(made) - len(fitting))
            examples += fitting
            continue
        encoded, of_prompts = encode(source, config, tokenizer)
        responses = _responses(source, [item.index for item in encoded], base_dir)
        texts = [text for pieces in responses for text, _ in pieces]
        tokenized: Any = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        ids = iter(tokenized)
        chat_end = _chat_end(source, encoded, config, tokenizer, end_token_ids)
        made: list[Example] = []
        for item, pieces in zip(encoded, responses, strict=True):
            response = [(token, is_policy) for _, is_policy in pieces for token in next(ids)]
            end = chat_end if item.is_templated and chat_end is not None else end_id
            response_ids, mask = zip(*response, (end, True), strict=True)
            made.append(Example(item.token_ids, response_ids, mask))
        fitting = _fitting(source, made, config, max_positions)
        dropped = of_prompts.dropped_overlong + len(made) - len(fitting)
        counts[source.name] = replace(of_prompts, dropped_overlong=dropped)
        examples += fitting
    return ExampleSet(examples, counts)


def _conversation(source: SourceRows, index: int, conversation: Conversation | None) -> Example:
    """The example in a row's columns of messages and tools."""
    assert conversation is not None, "messages_key needs the model's chat format"
    where, columns = source.where(index), source.config
    messages, tools = (
        [] if name is None else source.cell(index, key, name)
        for key, name in (("messages_key", columns.messages_key), ("tools_key", columns.tools_key))
    )
    messages, tools = (parse_json(of) if isinstance(of, str) else of for of in (messages, tools))
    if not (isinstance(messages, list) and any(m.get("role") == "assistant" for m in messages[1:])):
        rule = "a conversation must be a list of messages {role, content}, with an answer of role assistant after the first"
        raise DataError(f"{where}: column {columns.messages_key!r} contains {messages!r}; {rule}")
    try:
        prompt_ids, ids, mask = conversation(messages, tools or [])
    except ModelError as error:
        raise DataError(f"{where}: {error}") from error
    return Example(tuple(prompt_ids), tuple(ids), tuple(mask))


def _chat_end(
    source: SourceRows,
    encoded: Sequence[Encoded],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    end_token_ids: Sequence[int],
) -> int | None:
    """The first of `end_token_ids` that the chat template writes after a response; None if it writes none."""
    first = next((item for item in encoded if item.is_templated), None)
    if first is None:
        return None
    response = "a response"
    try:
        messages: tuple[Message, ...] = (*first.messages, {"role": "assistant", "content": response})
        text = render(source, first.index, messages, config, tokenizer, asks=False)
    except DataError:  # a template of prompts alone
        return None
    _, found, after = text.rpartition(response)
    ids: Any = tokenizer(after if found else "", add_special_tokens=False)["input_ids"]
    return next((token for token in ids if token in end_token_ids), None)


def _fitting(
    source: SourceRows, examples: list[Example], config: DataConfig, limit: int | None
) -> list[Example]:
    """The examples that fit into the model's context of `limit` tokens. Raises DataError if none fits, or,
    under data.overlong=error, if any does not."""
    lengths = [len(example.prompt_ids) + len(example.response_ids) for example in examples]
    num_overlong = 0 if limit is None else sum(length > limit for length in lengths)
    if num_overlong and (config.overlong == "error" or num_overlong == len(examples)):
        raise DataError(
            f"{source.key} ({source.name}): {num_overlong} of {len(examples)} examples exceed the model's {limit} positions; "
            f"the longest has {max(lengths)} tokens (prompt and response); remove them, or use a model with a longer context"
            + ("; data.overlong=drop drops them" if num_overlong < len(examples) else "")
        )
    return [e for e, n in zip(examples, lengths, strict=True) if limit is None or n <= limit]


def _responses(source: SourceRows, indices: Sequence[int], base_dir: Path) -> list[Sequence[Piece]]:
    """The response of each row, from its column or its function; the plan ensures that one of them is set."""
    column, path = source.config.response_key, source.config.response_function
    write = load_function(path, base_dir=base_dir, key=f"{source.key}.response_function") if path else None
    responses: list[Sequence[Piece]] = []
    for index in indices:
        where = source.where(index)
        if write is None:
            response = source.cell(index, "response_key", str(column))
        else:
            try:
                response = write(source.rows[index])
            except Exception as error:
                raise DataError(f"{where}: {path} raised {type(error).__name__}: {error}") from error
        if isinstance(response, str):
            responses.append([(response, True)])
        elif write and _are_pieces(response):
            responses.append(response)
        else:
            origin = f"{path} returned" if write else f"column {column!r} contains"
            or_pieces = " or a list of (text, is_policy)" if write else ""
            raise DataError(f"{where}: {origin} {response!r}, but a response must be a string{or_pieces}")
    return responses


def _are_pieces(response: Any) -> bool:
    return isinstance(response, list) and all(
        isinstance(piece, tuple) and list(map(type, piece)) == [str, bool] for piece in response
    )
