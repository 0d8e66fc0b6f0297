"""Worked examples for supervised learning: prompts with the response to imitate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    def cut(self, num_tokens: int) -> Example | None:
        """The first `num_tokens` tokens of the example; None if the response has no token to learn in them,
        or if an image goes on beyond."""
        num = max(0, num_tokens - len(self.prompt_ids))
        if not any(self.response_mask[:num]):
            return None
        if any(image.start + image.num > num_tokens for image in self.images):
            return None
        return replace(self, response_ids=self.response_ids[:num], response_mask=self.response_mask[:num])


@dataclass(frozen=True, slots=True)
class ExampleCounts(SourceCounts):
    """Row counts of one source of examples, of which `truncated` have a shortened prompt or response. In
    `dropped_untrained` nothing is left to learn: their only answers to imitate have the weight 0, or begin
    beyond the limit of tokens."""

    dropped_untrained: int = 0


@dataclass(frozen=True, slots=True)
class ExampleSet:
    """The examples of each source by its name in the config, and row counts."""

    by_source: Mapping[str, Sequence[Example]]
    counts: dict[str, ExampleCounts]

    @property
    def examples(self) -> Sequence[Example]:
        """The examples of all sources, one source after the other."""
        return Chained(list(self.by_source.values()))


NO_EXAMPLES = ExampleSet({}, {})


@dataclass(frozen=True, slots=True)
class ExampleRules:
    """Which examples are trained, and what of them: the config's keys of the same names in `sft`. `key` is
    the config's list of sources, and `max_tokens` at most the model's positions."""

    key: str = "sft.data"
    max_tokens: int | None = None
    overlong: Literal["drop", "truncate_right"] = "drop"
    train_on: Literal["all_turns", "last_turn"] = "all_turns"

    @property
    def limit_text(self) -> str:
        """The limit of tokens in error messages."""
        return f"{self.max_tokens} tokens ({self.key.partition('.')[0]}.max_tokens, or the model's positions)"


def load_examples(
    sources: Sequence[Source],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    base_dir: Path,
    rules: ExampleRules = ExampleRules(),
    conversation: Conversation | None = None,
    end_token_ids: Sequence[int] = (),
    vision: PlacesImages | None = None,
) -> ExampleSet:
    """Check all rows of `sources`, the config's list at `rules.key`. Those that fit become an Example when
    they are drawn.

    Prompts are processed as in reinforcement learning. Each response, or each piece of a response that
    contains replies, is tokenized separately, as in sampling. Examples that are too long, or have no token to
    learn, are counted. Raises DataError for rows without a response, for tokenizers without an end token, and
    if no example of a source is left.
    """
    end_id: Any = tokenizer.eos_token_id
    if end_id is None:
        raise DataError(
            "the tokenizer has no end token, which responses must end with; set model.tokenizer to one "
            "with an eos_token"
        )
    by_source, counts = dict[str, Sequence[Example]](), dict[str, ExampleCounts]()
    with said_if_slow(rules.key):
        for source in read_sources(sources, base_dir=base_dir, key=rules.key):
            maker: ConversationMaker | ResponseMaker
            if source.config.messages_key is not None:
                maker = ConversationMaker(source, conversation, base_dir, rules.train_on)
            else:
                encoder = Encoder(source, config, tokenizer, base_dir=base_dir, vision=vision)
                maker = ResponseMaker(encoder, config, tokenizer, end_token_ids, base_dir, rules.train_on)
            settings = f"{rules.max_tokens} {rules.overlong}"
            key = checked.key_of(len(source.rows), "sft", source.fingerprint, maker.fingerprint, settings)
            if (checked_rows := checked.recall(key)) is None:
                checked_rows = _checked(source, maker, config, rules)
                checked.keep(key, checked_rows)
            counts[source.name] = ExampleCounts(*checked_rows["counts"].tolist())
            by_source[source.name] = SourceExamples(maker, checked_rows["kept"], rules.max_tokens)
    return ExampleSet(by_source, counts)


class SourceExamples(Lazy[Example]):
    """The examples of the rows `kept` of one source, cut to `limit` tokens where they are longer."""

    def __init__(
        self, maker: ConversationMaker | ResponseMaker, kept: NDArray[np.int64], limit: int | None
    ) -> None:
        self._maker, self._kept, self._limit = maker, kept, limit

    def __len__(self) -> int:
        return len(self._kept)

    def item(self, index: int) -> Example:
        """The example at an index, tokenized now."""
        (example,) = self._maker.examples([int(self._kept[index])])
        if self._limit is None or example.num_tokens <= self._limit:
            return example
        cut = example.cut(self._limit)
        assert cut is not None, "examples without anything to learn are not kept"
        return cut


def _checked(
    source: SourceRows, maker: ConversationMaker | ResponseMaker, config: DataConfig, rules: ExampleRules
) -> dict[str, NDArray[Any]]:
    """The rows whose examples are trained, and the counts. Raises DataError if there are none, or if some are
    too long and that is an error."""
    kept, unsure, counts = maker.fitting(rules.max_tokens)
    limit, where = rules.max_tokens, f"{source.key} ({source.name})"
    num, num_untrained = len(kept) + len(unsure), counts.dropped_untrained
    overlong, num_cut = list[int](), 0
    for start in range(0, len(unsure), TOKENIZER_BATCH):
        batch = unsure[start : start + TOKENIZER_BATCH]
        for index, example in zip(batch, maker.examples(batch), strict=True):
            if limit is None or example.num_tokens <= limit:
                kept.append(index)
            elif rules.overlong == "drop":
                overlong.append(example.num_tokens)
            elif example.cut(limit) is None:
                num_untrained += 1
            else:
                kept.append(index)
                num_cut += 1
    if overlong and (config.overlong == "error" or len(overlong) == num):
        raise DataError(
            f"{where}: {len(overlong)} of {num} examples exceed the limit of {rules.limit_text}; the longest "
            f"has {max(overlong)} tokens (prompt and response); raise the limit, use a model with a longer "
            "context, or cut them with sft.overlong=truncate_right"
            + ("; data.overlong=drop drops them" if len(overlong) < num else "")
        )
    if not kept:
        raise DataError(
            f"{where}: none of the {counts.rows} rows has a token to learn: {num_untrained} have none within "
            f"the limit of {rules.limit_text}, or imitate an answer of weight 0, and "
            f"{counts.dropped_overlong + len(overlong)} are too long; raise the limit, or correct the data"
        )
    numbers = (
        counts.rows, counts.dropped_overlong + len(overlong), counts.truncated + num_cut, num_untrained
    )  # fmt: skip
    return {"kept": np.array(sorted(kept), np.int64), "counts": np.array(numbers)}


class ConversationMaker:
    """Examples of whole conversations; one of several examples where the chat template drops earlier
    reasoning. Example j of row i has the index i * MAX_EXAMPLES + j."""

    fingerprint = ""
    MAX_EXAMPLES = 1 << 20

    def __init__(
        self,
        source: SourceRows,
        conversation: Conversation | None,
        base_dir: Path,
        train_on: str = "all_turns",
    ) -> None:
        self._source, self._conversation, self._base_dir = source, conversation, base_dir
        self._train_on = train_on

    def fitting(self, limit: int | None) -> tuple[list[int], Sequence[int], ExampleCounts]:
        """Check all rows. Return the examples that fit into `limit` tokens, and the others."""
        fits, num, num_untrained = ([], []), len(self._source.rows), 0
        for row in range(num):
            examples = self.of_row(row)
            num_untrained += not examples
            for number, example in enumerate(examples):
                is_longer = limit is not None and example.num_tokens > limit
                fits[is_longer].append(row * self.MAX_EXAMPLES + number)
        return fits[False], fits[True], ExampleCounts(num, dropped_untrained=num_untrained)

    def examples(self, indices: Sequence[int]) -> list[Example]:
        """The examples of these indices."""
        places = (divmod(index, self.MAX_EXAMPLES) for index in indices)
        return [self.of_row(row)[number] for row, number in places]

    def of_row(self, row: int) -> list[Example]:
        """The examples of a row."""
        return _conversation(self._source, row, self._conversation, self._base_dir, self._train_on)


class ResponseMaker:
    """Examples of prompts and responses in columns, or with responses from a function."""

    def __init__(
        self,
        encoder: Encoder,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        base_dir: Path,
        train_on: str = "all_turns",
    ) -> None:
        source = encoder.source
        path, key = source.config.response_function, f"{source.key}.response_function"
        self._encoder, self._config, self._tokenizer = encoder, config, tokenizer
        self._write = load_function(path, base_dir=base_dir, key=key) if path else None
        self._end_token_ids, self._train_on = end_token_ids, train_on
        self.fingerprint = "" if path else encoder.fingerprint

    def fitting(self, limit: int | None) -> tuple[list[int], Sequence[int], ExampleCounts]:
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
        return fitting, unsure, ExampleCounts(counts.rows, counts.dropped_overlong, counts.truncated)

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
            return response if self._train_on == "all_turns" else _last_turn(response)
        origin = f"{path} returned" if write else f"column {column!r} contains"
        or_pieces = " or a list of (text, is_policy)" if write else ""
        why = f"{origin} {response!r}, but a response must be a string{or_pieces}"
        raise DataError(f"{source.where(index)}: {why}")


def _conversation(
    source: SourceRows,
    index: int,
    conversation: Conversation | None,
    base_dir: Path,
    train_on: str,
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
    if train_on == "last_turn":
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        messages = [{**message, "weight": 0} if i < last else message for i, message in enumerate(messages)]
    try:
        spans = conversation(messages, tools)
    except ModelError as error:
        raise DataError(f"{where}: {error}") from error
    return [
        Example(tuple(prompt_ids), tuple(ids), tuple(mask), images) for prompt_ids, ids, mask, images in spans
    ]


def _last_turn(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with only the last of the policy's turns as written by it."""
    last = max((i for i, (_, is_policy) in enumerate(pieces) if is_policy), default=0)
    first = last
    while first and pieces[first - 1][1]:
        first -= 1
    return [(text, is_policy and i >= first) for i, (text, is_policy) in enumerate(pieces)]


def _are_pieces(response: Any) -> bool:
    return isinstance(response, list) and all(
        isinstance(piece, tuple) and list(map(type, piece)) == [str, bool] for piece in response
    )
