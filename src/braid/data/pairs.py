"""Preference pairs: a prompt with a preferred and a rejected response, as text or as messages.

Owns the layouts of columns: with a prompt, or with the prompt as the common beginning of both; and how a pair
is tokenized, as two examples for a policy or two whole conversations for a reward model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from braid.config.data import DataConfig, Source
from braid.errors import DataError
from braid.functions import load_function
from braid.images import PlacesImages
from braid.types import Message
from braid.users import described, encodable, is_the_users, shown

from .columns import parse_json
from .messages import without_nulls
from .prompts import TOKENIZER_BATCH, Encoder, SourceCounts, is_chat, render
from .rows import Chained, DataRow, Lazy
from .sources import SourceRows, read_sources, said_if_slow
from .worked import Conversation, ConversationMaker, Example, ResponseMaker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONVERSATION_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ eos_token }}"
"""The chat template of reward models whose pairs have none: contents one after the other, and the end
token."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A tokenized pair. For a policy the examples are those of supervised learning; for a reward model their
    prompt is the common beginning of two whole conversations, and the last token, at which the score is read,
    follows the conversation. `margin` and `target` are of the columns of these names, if they are set."""

    chosen: Example
    rejected: Example
    margin: float | None = None
    target: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the longer of prompt with preferred and prompt with rejected response."""
        return max(len(side.prompt_ids) + len(side.response_ids) for side in (self.chosen, self.rejected))


@dataclass(frozen=True, slots=True)
class PairCounts(SourceCounts):
    """Row counts of one source of pairs; `dropped_equal` have two equal responses, which teach nothing."""

    dropped_equal: int = 0


@dataclass(frozen=True, slots=True)
class PairSet:
    """The pairs of each source by its name, and row counts."""

    by_source: Mapping[str, Sequence[Pair]]
    counts: dict[str, PairCounts]

    @property
    def pairs(self) -> Sequence[Pair]:
        """The pairs of all sources, one source after the other."""
        return Chained(list(self.by_source.values()))


NO_PAIRS = PairSet({}, {})


@dataclass(frozen=True, slots=True)
class PairFormat:
    """What tokenizing a pair depends on. With `is_scored` pairs are of a reward model, else of a policy;
    `conversation` gives the examples of whole conversations. A side of a pair has at most `max_tokens`."""

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    base_dir: Path
    end_token_ids: Sequence[int]
    conversation: Conversation
    vision: PlacesImages | None
    max_tokens: int | None
    is_scored: bool


def load_pairs(sources: Sequence[Source], pair_format: PairFormat, *, key: str) -> PairSet:
    """Check all rows of `sources`, the config's list at `key`. Those that fit become a Pair when they are
    drawn.

    Pairs with a side that is too long are dropped and counted, or an error under data.overlong=error; so are
    those whose responses are equal. Raises DataError for rows of another layout, and if no pair is left.
    """
    if pair_format.tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end token, which responses must end with; set model.tokenizer to one "
            "with an eos_token"
        )
    by_source, counts = dict[str, Sequence[Pair]](), dict[str, PairCounts]()
    with said_if_slow(key):
        for source in read_sources(sources, base_dir=pair_format.base_dir, key=key):
            split = SplitRows(source, pair_format.base_dir)
            maker = (_Scored if pair_format.is_scored else _Imitated)(split, pair_format)
            kept, counts[source.name] = _checked(split, maker, pair_format)
            by_source[source.name] = _SourcePairs(maker, kept)
    return PairSet(by_source, counts)


class _SourcePairs(Lazy[Pair]):
    """The pairs of the rows `kept` of one source."""

    def __init__(self, maker: _Scored | _Imitated, kept: Sequence[int]) -> None:
        self._maker, self._kept = maker, kept

    def __len__(self) -> int:
        return len(self._kept)

    def item(self, index: int) -> Pair:
        """The pair at an index, tokenized now."""
        (pair,) = self._maker.pairs([self._kept[index]])
        return pair


def _checked(
    rows: SplitRows, maker: _Scored | _Imitated, pair_format: PairFormat
) -> tuple[list[int], PairCounts]:
    """The rows whose pairs are kept, and the counts."""
    source, limit, num = rows.source, pair_format.max_tokens, len(rows)
    differ = [index for index in range(num) if rows.differ(index)]
    num_equal, (fitting, num_truncated) = num - len(differ), maker.fitting(differ)
    num_overlong = len(differ) - len(fitting)
    kept, longest = list[int](), 0
    for start in range(0, len(fitting), TOKENIZER_BATCH):
        batch = fitting[start : start + TOKENIZER_BATCH]
        for index, pair in zip(batch, maker.pairs(batch), strict=True):
            if pair.chosen == pair.rejected:  # texts that differ in what the tokenizer drops
                num_equal += 1
            elif limit is None or pair.num_tokens <= limit:
                kept.append(index)
            else:
                num_overlong, longest = num_overlong + 1, max(longest, pair.num_tokens)
    if longest and pair_format.config.overlong == "error":
        raise DataError(
            f"{source.key} ({source.name}): a pair has {longest} tokens (prompt and longer response), and "
            f"the limit is {limit} (prefer.max_tokens, or the model's positions); raise it, or set "
            "data.overlong=drop"
        )
    if not kept:
        raise DataError(
            f"{source.key} ({source.name}): none of the {num} pairs is left: {num_overlong} have more than "
            f"{limit} tokens (prefer.max_tokens, or the model's positions) or a prompt of more than "
            f"data.max_prompt_tokens={pair_format.config.max_prompt_tokens}, and {num_equal} two equal "
            "responses"
        )
    return kept, PairCounts(num, num_overlong, num_truncated, num_equal)


class _Split(NamedTuple):
    """A row's prompt, and its responses: two texts, or two lists of messages."""

    prompt: Any
    chosen: Any
    rejected: Any


class SplitRows(Lazy[DataRow]):
    """The rows of a source with columns prompt, chosen and rejected, whatever layout they had."""

    def __init__(self, source: SourceRows, base_dir: Path) -> None:
        path, key = source.config.pair_function, f"{source.key}.pair_function"
        self.source = source
        self._write = load_function(path, base_dir=base_dir, key=key) if path else None

    def __len__(self) -> int:
        return len(self.source.rows)

    def item(self, index: int) -> DataRow:
        """The row at an index with all columns; those of the pair are `_Split`."""
        return {**self.source.rows[index], **self.split(index)._asdict()}

    def __iter__(self) -> Iterator[DataRow]:
        return (self.item(index) for index in range(len(self)))

    def differ(self, index: int) -> bool:
        """Whether a row's responses differ."""
        _, chosen, rejected = self.split(index)
        return chosen != rejected

    def split(self, index: int) -> _Split:
        """The prompt and the responses of a row. Raises DataError."""
        source, config = self.source, self.source.config
        if self._write is not None:
            chosen, rejected = self._written(index)
        else:
            chosen, rejected = (
                _read(source.cell(index, key, getattr(config, key))) for key in ("chosen_key", "rejected_key")
            )
        are_chats = [isinstance(side, list) for side in (chosen, rejected)]
        if are_chats[0] != are_chats[1] or not all(
            isinstance(side, str | list) for side in (chosen, rejected)
        ):
            raise DataError(
                f"{source.where(index)}: columns {config.chosen_key!r} and {config.rejected_key!r} contain "
                f"{shown(chosen)} and {shown(rejected)}; both must be text, or both a list of messages "
                "{role, content}"
            )
        row, prompt = source.rows[index], None
        is_made = config.template != "{prompt}" and "{prompt}" not in config.template  # of other columns
        if is_made:
            prompt = ""
        elif config.prompt_key in row or config.prompt_key != "prompt":
            prompt = _read(source.cell(index, "prompt_key", config.prompt_key))
        if prompt is None:
            return self._without_prompt(index, chosen, rejected)
        if are_chats[0]:  # whole conversations begin with the prompt
            opening = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            if all(_starts_with(side, opening) for side in (chosen, rejected)):
                num = _num_common(chosen, rejected)
                return _Split(chosen[:num], chosen[num:], rejected[num:])
        return _Split(prompt, chosen, rejected)

    def _written(self, index: int) -> tuple[str, str]:
        """The responses that the user's function returns for a row. Raises DataError."""
        assert self._write is not None, "asked for with a function only"
        where, path = self.source.where(index), self.source.config.pair_function
        try:
            returned = self._write(self.source.rows[index])
        except BaseException as error:
            if not is_the_users(error):
                raise
            raise DataError(f"{where}: {path} raised {described(error)}") from error
        match returned:
            case (str() as chosen, str() as rejected):
                return chosen, rejected
        raise DataError(f"{where}: {path} returned {shown(returned)}, but it must return two texts")

    def _without_prompt(self, index: int, chosen: Any, rejected: Any) -> _Split:
        """The common beginning of two texts or conversations as their prompt. Of texts a space before the
        first difference belongs to the responses."""
        if isinstance(chosen, list):
            num = _num_common(chosen, rejected)
        else:
            num = _num_equal(chosen, rejected)
            num -= chosen[:num].endswith(" ") and num < max(len(chosen), len(rejected))
        if not num:
            config = self.source.config
            raise DataError(
                f"{self.source.where(index)}: there is no column {config.prompt_key!r}, and "
                f"{config.chosen_key!r} and {config.rejected_key!r} have no common beginning that could be "
                f"the prompt; set {self.source.key}.prompt_key to the column of the prompt"
            )
        return _Split(chosen[:num], chosen[num:], rejected[num:])


def _read(value: Any) -> Any:
    """A cell: text, or messages, which may be JSON text."""
    if isinstance(value, str) and is_chat(parsed := parse_json(value)):
        value = parsed
    return without_nulls(value) if isinstance(value, list) else value


def _starts_with(messages: Sequence[Any], opening: Sequence[Any]) -> bool:
    begin = messages[: len(opening)]
    return len(messages) > len(opening) and [_said(m) for m in begin] == [_said(m) for m in opening]


def _said(message: Any) -> Any:
    return (message.get("role"), message.get("content")) if isinstance(message, Mapping) else message


def _num_common(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Number of messages that two conversations begin with and that are a prompt of both: it does not end
    with an answer, and at least one message of each is left."""
    num = min(_num_equal(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    while num and _is_answer(chosen[num - 1]):
        num -= 1
    return num


def _num_equal(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Length of the common beginning of two texts or lists."""
    both = enumerate(zip(chosen, rejected, strict=False))
    return next((i for i, (one, other) in both if one != other), min(len(chosen), len(rejected)))


class _Maker:
    """Makes pairs of the rows of a source."""

    def __init__(self, rows: SplitRows, pair_format: PairFormat) -> None:
        self.rows, self.format = rows, pair_format
        config = rows.source.config.model_copy(
            update={"prompt_key": "prompt", "response_function": None, "messages_key": None}
        )
        self.split_source = replace(rows.source, config=config, rows=rows)
        self.encoder = self._encoder(self.split_source)

    def _encoder(self, source: SourceRows) -> Encoder:
        how = self.format
        return Encoder(source, how.config, how.tokenizer, base_dir=how.base_dir, vision=how.vision)

    def opening(self, index: int) -> tuple[tuple[Message, ...], bool]:
        """A row's prompt as messages, and whether the chat template applies."""
        return self.encoder.messages(index)

    def number(self, index: int, key: str, least: float, most: float) -> float | None:
        """The number in the column that the source's `key` names, None without one."""
        source = self.rows.source
        if (column := getattr(source.config, key)) is None:
            return None
        value = source.cell(index, key, column)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            between = f" from {least:g} to {most:g}" if most < float("inf") else ""
            raise DataError(
                f"{source.where(index)}: column {column!r} ({source.key}.{key}) contains {shown(value)}, but "
                f"it must be a finite number{between}"
            )
        return float(value)


class _Imitated(_Maker):
    """Pairs of a policy: two examples, as supervised learning has them."""

    def __init__(self, rows: SplitRows, pair_format: PairFormat) -> None:
        super().__init__(rows, pair_format)
        self._of_texts = {side: self._texts(side) for side in ("chosen", "rejected")}
        config = self.split_source.config.model_copy(update={"messages_key": "messages"})
        self._chats = {
            side: ConversationMaker(
                replace(self.split_source, config=config, rows=_Conversations(self, side)),
                pair_format.conversation,
                pair_format.base_dir,
            )
            for side in ("chosen", "rejected")
        }

    def _texts(self, side: str) -> ResponseMaker:
        config = self.split_source.config.model_copy(update={"response_key": side})
        encoder, how = self._encoder(replace(self.split_source, config=config)), self.format
        return ResponseMaker(encoder, how.config, how.tokenizer, how.end_token_ids, how.base_dir)

    def fitting(self, indices: Sequence[int]) -> tuple[list[int], int]:
        """The rows among these whose prompts fit, and the number of truncated prompts."""
        are_texts = {index for index in indices if isinstance(self.rows.split(index).chosen, str)}
        if not are_texts:
            return list(indices), 0
        fits, counts = self.encoder.fitting(lambda *_: None)
        too_long = are_texts.difference(fits.tolist())
        return [index for index in indices if index not in too_long], counts.truncated

    def pairs(self, indices: Sequence[int]) -> list[Pair]:
        """The pairs of rows."""
        are_texts = [isinstance(self.rows.split(index).chosen, str) for index in indices]
        texts = [index for index, is_text in zip(indices, are_texts, strict=True) if is_text]
        made = {side: iter(maker.examples(texts) if texts else ()) for side, maker in self._of_texts.items()}
        return [
            Pair(
                next(made["chosen"]) if is_text else self._chat("chosen", index),
                next(made["rejected"]) if is_text else self._chat("rejected", index),
            )
            for index, is_text in zip(indices, are_texts, strict=True)
        ]

    def _chat(self, side: str, index: int) -> Example:
        examples = self._chats[side].of_row(index)
        if len(examples) == 1:
            return examples[0]
        source = self.rows.source
        raise DataError(
            f"{source.where(index)}: the {side} response has {len(examples)} contexts, since the chat "
            "template drops earlier reasoning; remove reasoning_content from all answers but the last, or "
            "use a template that keeps it"
        )


class _Conversations(Lazy[DataRow]):
    """Rows with a column `messages`: the prompt, whose answers are not imitated, and one side's response."""

    def __init__(self, maker: _Imitated, side: str) -> None:
        self._maker, self._side = maker, side

    def __len__(self) -> int:
        return len(self._maker.rows)

    def item(self, index: int) -> DataRow:
        """The row at an index."""
        row = self._maker.rows[index]
        opening = row["prompt"]
        if not isinstance(opening, list):
            opening = self._maker.opening(index)[0]
        elif system := self._maker.rows.source.config.system:
            opening = [{"role": "system", "content": system}, *opening]
        read = [{**message, "weight": 0} if _is_answer(message) else message for message in opening]
        return {**row, "messages": [*read, *row[self._side]]}


def _is_answer(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


class _Scored(_Maker):
    """Pairs of a reward model: two whole conversations, as the model reads them when it scores."""

    def fitting(self, indices: Sequence[int]) -> tuple[list[int], int]:
        """All rows: only whole conversations have a limit."""
        return list(indices), 0

    def pairs(self, indices: Sequence[int]) -> list[Pair]:
        """The pairs of rows."""
        texts = [self._text(index, side) for index in indices for side in ("chosen", "rejected")]
        ids: Any = self.format.tokenizer(
            list(map(encodable, texts)), add_special_tokens=False, verbose=False
        )["input_ids"]
        pad: Any = self.format.tokenizer.pad_token_id
        ids = [_without_padding(some, pad) for some in ids]
        sides, infinity = zip(ids[::2], ids[1::2], strict=True), float("inf")
        return [
            _pair_of_conversations(
                *both,
                self.number(index, "margin_key", -infinity, infinity),
                self.number(index, "target_key", 0.0, 1.0),
            )
            for index, both in zip(indices, sides, strict=True)
        ]

    def _text(self, index: int, side: str) -> str:
        messages, is_templated = self.opening(index)
        response = getattr(self.rows.split(index), side)
        if isinstance(response, str):
            response = [{"role": "assistant", "content": response}]
        whole: tuple[Any, ...] = (*messages, *response)
        if is_templated:
            how = self.format
            return render(self.split_source, index, whole, how.config, how.tokenizer, asks=False)
        return "".join(message["content"] for message in whole) + str(self.format.tokenizer.eos_token)


def _without_padding(ids: list[int], pad: int | None) -> list[int]:
    """The tokens up to the last that is not padding, at which transformers' classifiers read the score."""
    last = next((i for i in reversed(range(len(ids))) if ids[i] != pad), 0)
    return ids[: last + 1]


def _pair_of_conversations(
    chosen: list[int], rejected: list[int], margin: float | None, target: float | None
) -> Pair:
    """The pair of two tokenized conversations. The score is read at a position after the last token, since a
    position's value is that of the state before it; which token is there does not matter."""
    num = max(1, _num_equal(chosen, rejected))
    better, worse = (
        Example(tuple(ids[:num]), (*ids[num:], ids[-1]), (True,) * (len(ids) - num + 1))
        for ids in (chosen, rejected)
    )
    return Pair(better, worse, margin, target)
