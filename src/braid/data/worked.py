"""Worked examples for supervised learning: prompts with the response to imitate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from braid.config.data import DataConfig, Source
from braid.errors import DataError, ModelError
from braid.functions import load_function
from braid.images import PlacesImages, content_of, images_of, placed_in_messages
from braid.types import Message, Placed
from braid.users import described, encodable, is_the_users

from . import checked
from .columns import parse_json
from .messages import RULE, read_messages, read_tools
from .prompts import TOKENIZER_BATCH, Encoder, SourceCounts, render
from .rows import Chained, DataRow, Lazy
from .sources import SourceRows, read_sources, said_if_slow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Conversation = Callable[
    [Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    list[tuple[list[int], list[int], list[bool], tuple[Placed, ...]]],
]
"""From messages and tool schemas to examples: the tokens of the prompt, those after it, which of these the
policy writes, and the images."""

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
    images: tuple[Placed, ...] = ()


@dataclass(frozen=True, slots=True)
class ExampleSet:
    """The examples of several sources, in the order of the sources, and row counts by source name in the
    config."""

    examples: Sequence[Example]
    counts: dict[str, SourceCounts]


NO_EXAMPLES = ExampleSet((), {})


def load_examples(
    sources: Sequence[Source],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    base_dir: Path,
    conversation: Conversation | None = None,
    max_positions: int | None = None,
    end_token_ids: Sequence[int] = (),
    vision: PlacesImages | None = None,
) -> ExampleSet:
    """Check all rows of `sources` (the config's `sft.data`). Those that fit become an Example when they are
    drawn.

    Prompts are processed as in reinforcement learning. Each response, or each piece of a response that
    contains replies, is tokenized separately, as in sampling. Prompt and response together must fit into the
    model's `max_positions`; longer examples are dropped and counted, or an error under data.overlong=error.
    Raises DataError for rows without a response and for tokenizers without an end token.
    """
    end_id: Any = tokenizer.eos_token_id
    if end_id is None:
        raise DataError(
            "the tokenizer has no end token, which responses must end with; set model.tokenizer to one "
            "with an eos_token"
        )
    parts: list[SourceExamples] = []
    counts: dict[str, SourceCounts] = {}
    with said_if_slow("sft.data"):
        for source in read_sources(sources, base_dir=base_dir, key="sft.data"):
            maker: ConversationMaker | ResponseMaker
            if source.config.messages_key is not None:
                maker = ConversationMaker(source, conversation, base_dir)
            else:
                encoder = Encoder(source, config, tokenizer, base_dir=base_dir, vision=vision)
                maker = ResponseMaker(encoder, config, tokenizer, end_token_ids, base_dir)
            key = checked.key_of(
                len(source.rows), "sft", source.fingerprint, maker.fingerprint, f"{max_positions}"
            )
            if (checked_rows := checked.recall(key)) is None:
                checked_rows = _checked(source, maker, config, max_positions)
                checked.keep(key, checked_rows)
            counts[source.name] = SourceCounts(*checked_rows["counts"].tolist())
            parts.append(SourceExamples(maker, checked_rows["kept"]))
    return ExampleSet(Chained(parts), counts)


class SourceExamples(Lazy[Example]):
    """The examples of the rows `kept` of one source."""

    def __init__(self, maker: ConversationMaker | ResponseMaker, kept: NDArray[np.int64]) -> None:
        self._maker, self._kept = maker, kept

    def __len__(self) -> int:
        return len(self._kept)

    def item(self, index: int) -> Example:
        """The example at an index, tokenized now."""
        (example,) = self._maker.examples([int(self._kept[index])])
        return example


def _checked(
    source: SourceRows, maker: ConversationMaker | ResponseMaker, config: DataConfig, limit: int | None
) -> dict[str, NDArray[Any]]:
    """The rows whose examples fit into the model's context of `limit` tokens, and the counts. Raises
    DataError if none fits, or, under data.overlong=error, if any does not."""
    fitting, unsure, counts = maker.fitting(limit)
    num, overlong = len(fitting) + len(unsure), list[int]()
    for start in range(0, len(unsure), TOKENIZER_BATCH):
        batch = unsure[start : start + TOKENIZER_BATCH]
        for index, example in zip(batch, maker.examples(batch), strict=True):
            length = len(example.prompt_ids) + len(example.response_ids)
            if limit is None or length <= limit:
                fitting.append(index)
            else:
                overlong.append(length)
    if overlong and (config.overlong == "error" or len(overlong) == num):
        raise DataError(
            f"{source.key} ({source.name}): {len(overlong)} of {num} examples exceed the model's {limit} "
            f"positions; the longest has {max(overlong)} tokens (prompt and response); remove them, or use "
            "a model with a longer context"
            + ("; data.overlong=drop drops them" if len(overlong) < num else "")
        )
    numbers = np.array([counts.rows, counts.dropped_overlong + len(overlong), counts.truncated])
    return {"kept": np.array(sorted(fitting), np.int64), "counts": numbers}


class ConversationMaker:
    """Examples of whole conversations; one of several examples where the chat template drops earlier
    reasoning. Example j of row i has the index i * MAX_EXAMPLES + j."""

    fingerprint = ""
    MAX_EXAMPLES = 1 << 20

    def __init__(self, source: SourceRows, conversation: Conversation | None, base_dir: Path) -> None:
        self._source, self._conversation, self._base_dir = source, conversation, base_dir

    def fitting(self, limit: int | None) -> tuple[list[int], Sequence[int], SourceCounts]:
        """Check all rows. Return the examples that fit into `limit` tokens, and the others."""
        fits, num = ([], []), len(self._source.rows)
        for row in range(num):
            for number, example in enumerate(self.of_row(row)):
                length = len(example.prompt_ids) + len(example.response_ids)
                fits[limit is not None and length > limit].append(row * self.MAX_EXAMPLES + number)
        return fits[False], fits[True], SourceCounts(num)

    def examples(self, indices: Sequence[int]) -> list[Example]:
        """The examples of these indices."""
        places = (divmod(index, self.MAX_EXAMPLES) for index in indices)
        return [self.of_row(row)[number] for row, number in places]

    def of_row(self, row: int) -> list[Example]:
        """The examples of a row."""
        return _conversation(self._source, row, self._conversation, self._base_dir)


class ResponseMaker:
    """Examples of prompts and responses in columns, or with responses from a function."""

    def __init__(
        self,
        encoder: Encoder,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        base_dir: Path,
    ) -> None:
        source = encoder.source
        path, key = source.config.response_function, f"{source.key}.response_function"
        self._encoder, self._config, self._tokenizer = encoder, config, tokenizer
        self._write = load_function(path, base_dir=base_dir, key=key) if path else None
        self._end_token_ids = end_token_ids
        self.fingerprint = "" if path else encoder.fingerprint

    def fitting(self, limit: int | None) -> tuple[list[int], Sequence[int], SourceCounts]:
        """Check all rows. Of those whose prompts fit, return the ones whose examples certainly fit into
        `limit` tokens, and the others."""
        fitting, unsure, bound = list[int](), list[int](), self._encoder.bound

        def check(index: int, row: DataRow, most: int) -> None:
            pieces = self._pieces(index, row)
            if limit is None or (bound and most + sum(bound.most(text) for text, _ in pieces) < limit):
                fitting.append(index)
            else:
                unsure.append(index)

        _, counts = self._encoder.fitting(check)
        return fitting, unsure, counts

    def examples(self, indices: Sequence[int]) -> list[Example]:
        """The examples of rows."""
        responses = [self._pieces(index, self._encoder.source.rows[index]) for index in indices]
        texts = [encodable(text) for pieces in responses for text, _ in pieces]
        tokenized: Any = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        ids = iter(tokenized)
        made = []
        for item, pieces in zip(self._encoder(indices), responses, strict=True):
            response = [(token, is_policy) for _, is_policy in pieces for token in next(ids)]
            end = (
                self._chat_end
                if item.is_templated and self._chat_end is not None
                else self._tokenizer.eos_token_id
            )
            response_ids, mask = zip(*response, (end, True), strict=True)
            made.append(Example(item.token_ids, response_ids, mask, item.images))
        return made

    @cached_property
    def _chat_end(self) -> int | None:
        """The first of the end tokens that the chat template writes after a response; None if it writes
        none."""
        encoder, source = self._encoder, self._encoder.source
        of_rows = (encoder.messages(index) for index in range(len(source.rows)))
        first = next((messages for messages, is_templated in of_rows if is_templated), None)
        if first is None:
            return None
        response = "a response"
        try:
            messages: tuple[Message, ...] = (*first, {"role": "assistant", "content": response})
            text = render(source, 0, messages, self._config, self._tokenizer, asks=False)
        except DataError:  # a template of prompts alone
            return None
        _, separator, after = text.rpartition(response)
        ids: Any = self._tokenizer(after if separator else "", add_special_tokens=False)["input_ids"]
        return next((token for token in ids if token in self._end_token_ids), None)

    def _pieces(self, index: int, row: DataRow) -> Sequence[Piece]:
        """The response of a row, from its column or the function; the plan ensures that one of them is
        set."""
        source, write = self._encoder.source, self._write
        column, path = source.config.response_key, source.config.response_function
        if write is None:
            response = row[column] if column in row else source.cell(index, "response_key", str(column))
        else:
            try:
                response = write(row)
            except BaseException as error:
                if not is_the_users(error):
                    raise
                why = f"{path} raised {described(error)}"
                raise DataError(f"{source.where(index)}: {why}") from error
        if isinstance(response, str):
            return [(response, True)]
        if write and _are_pieces(response):
            return response
        origin = f"{path} returned" if write else f"column {column!r} contains"
        or_pieces = " or a list of (text, is_policy)" if write else ""
        why = f"{origin} {response!r}, but a response must be a string{or_pieces}"
        raise DataError(f"{source.where(index)}: {why}")


def _conversation(
    source: SourceRows, index: int, conversation: Conversation | None, base_dir: Path
) -> list[Example]:
    """The examples in a row's columns of messages and tools."""
    assert conversation is not None, "messages_key needs the model's chat format"
    where, columns = source.where(index), source.config
    messages, tools = (
        [] if name is None else source.cell(index, key, name)
        for key, name in (("messages_key", columns.messages_key), ("tools_key", columns.tools_key))
    )
    messages, tools = (parse_json(value) if isinstance(value, str) else value for value in (messages, tools))
    try:
        tools = read_tools(tools)
        messages = read_messages(messages, tools)
        images = images_of(source.rows[index].get(columns.images_key or ""), base_dir)
        contents = [content_of(message["content"], base_dir) for message in messages]
        roles = [message["role"] for message in messages]
        contents = placed_in_messages(contents, roles, images)
        messages = [
            {**message, "content": content} for message, content in zip(messages, contents, strict=True)
        ]
    except ValueError as error:
        raise DataError(f"{where}: column {columns.messages_key!r}: {error}") from error
    if not any(message["role"] == "assistant" and message.get("weight") != 0 for message in messages[1:]):
        raise DataError(f"{where}: column {columns.messages_key!r}: {messages!r:.200}; {RULE}")
    try:
        spans = conversation(messages, tools)
    except ModelError as error:
        raise DataError(f"{where}: {error}") from error
    return [
        Example(tuple(prompt_ids), tuple(ids), tuple(mask), images) for prompt_ids, ids, mask, images in spans
    ]


def _are_pieces(response: Any) -> bool:
    return isinstance(response, list) and all(
        isinstance(piece, tuple) and list(map(type, piece)) == [str, bool] for piece in response
    )
