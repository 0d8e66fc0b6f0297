"""From data rows to prompts: templates, chat templates, tokenization, and handling of overlong prompts.

Owns everything between a row's columns and a Prompt's token ids; sources.py reads the rows.
Every error is a DataError that names the source, the row, and the config key to change.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braid.config.data import DataConfig, Source, covers
from braid.errors import DataError, ModelError, suggest
from braid.images import (
    PlacesImages,
    content_of,
    images_of,
    marked_content,
    placed_in_messages,
    plain_content,
    shown_content,
)
from braid.types import Image, Message, Placed, Prompt, images_in, text_of
from braid.users import encodable

from . import checked
from .chat_templates import searched_texts
from .columns import parse_json
from .messages import without_nulls
from .rows import DataRow, Lazy
from .sources import SourceRows, read_sources, said_if_slow
from .token_bounds import token_bound

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
LONG_CHARACTERS = 5_000_000
"""Length of a text from which tokenizing it is announced."""
TOKENIZER_BATCH = 1024
"""Texts tokenized per call: enough to use all cores, few enough to bound memory."""
RECENT_PROMPTS = 4096
"""Prompts that are kept after they were read."""
NOTHING = np.empty(0, np.int64)
_IMAGE_COLUMNS = ("images", "image")
"""Columns of images where `images_key` is null."""


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """Row counts of one source. Dropped rows give no prompt, truncated ones a shortened prompt."""

    rows: int
    dropped_overlong: int = 0
    truncated: int = 0


class Prompts(Lazy[Prompt]):
    """The prompts of several sources, each made when it is read."""

    def __init__(
        self,
        parts: Sequence[SourcePrompts | Sequence[Prompt]],
        part_of: NDArray[np.int32] | None = None,
        place_of: NDArray[np.int64] | None = None,
    ) -> None:
        """All prompts of `parts`, or those at `place_of` within `part_of`, both of shape [num_prompts]."""
        sizes = [len(part) for part in parts]
        self._parts = parts
        self._part_of = (
            np.repeat(np.arange(len(parts), dtype=np.int32), sizes) if part_of is None else part_of
        )
        self._place_of = np.concatenate([*map(np.arange, sizes), NOTHING]) if place_of is None else place_of
        self._recent: dict[int, Prompt] = {}

    def __len__(self) -> int:
        return len(self._part_of)

    def item(self, index: int) -> Prompt:
        """The prompt at an index; recent ones are kept."""
        if (prompt := self._recent.get(index)) is None:
            if len(self._recent) >= RECENT_PROMPTS:
                self._recent.clear()
            part, place = int(self._part_of[index]), int(self._place_of[index])
            prompt = self._recent[index] = self._parts[part][place]
        return prompt

    def __add__(self, other: Prompts) -> Prompts:
        part_of = np.concatenate([self._part_of, other._part_of + len(self._parts)])
        return Prompts(
            [*self._parts, *other._parts], part_of, np.concatenate([self._place_of, other._place_of])
        )

    @property
    def sources(self) -> NDArray[np.object_]:
        """`Prompt.source` of each."""
        out = np.empty(len(self), object)
        for i, part in enumerate(self._parts):
            of_part = self._part_of == i
            names = part.sources if isinstance(part, SourcePrompts) else [prompt.source for prompt in part]
            out[of_part] = np.array(names, object)[self._place_of[of_part]]
        return out

    def are_covered(self, sources: Sequence[str], named: Collection[str]) -> NDArray[np.bool_]:
        """Whether a list `sources` includes the source of each, of shape [num_prompts]; see
        braid.config.data.covers."""
        row_sources = self.sources
        of_name = {name: covers(sources, named, name) for name in set(row_sources)}
        return np.fromiter(map(of_name.__getitem__, row_sources), bool, len(row_sources))

    def chosen(self, places: NDArray[np.bool_] | NDArray[np.int64]) -> Prompts:
        """Those at an array of places, or for which an array of shape [num_prompts] is true."""
        return Prompts(self._parts, self._part_of[places], self._place_of[places])

    def places_by_source(self) -> dict[str, NDArray[np.int64]]:
        """The places of the prompts of each `Prompt.source`, in the order of their first ones."""
        if not len(self):
            return {}
        codes = dict[str, int]()
        of_each = np.fromiter(
            (codes.setdefault(name, len(codes)) for name in self.sources), np.int64, len(self)
        )
        ends = np.cumsum(np.bincount(of_each, minlength=len(codes)))
        return dict(zip(codes, np.split(np.argsort(of_each, kind="stable"), ends[:-1]), strict=True))

    def untokenized(self, *, messages: bool) -> Iterator[Prompt]:
        """All prompts without tokens, and without messages unless they are asked for, which is quick for many
        rows."""
        for i, part in enumerate(self._parts):
            places = self._place_of[self._part_of == i]
            if isinstance(part, SourcePrompts):
                yield from part.untokenized(places, messages=messages)
            else:
                yield from (part[place] for place in places.tolist())

    @property
    def fingerprint(self) -> str:
        """Identifies the content; empty where that is unknown."""
        parts = [part.fingerprint if isinstance(part, SourcePrompts) else "" for part in self._parts]
        chosen = hashlib.blake2b(
            self._part_of.tobytes() + self._place_of.tobytes(), digest_size=16
        ).hexdigest()
        return " ".join([*parts, chosen]) if all(parts) else ""


@dataclass(frozen=True)
class SourcePrompts(Lazy[Prompt]):
    """The prompts of one source: its rows `kept`, with the names `names[codes]` of their sources."""

    encoder: Encoder
    kept: NDArray[np.int64]
    codes: NDArray[np.int32]
    names: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.kept)

    def item(self, index: int) -> Prompt:
        """The prompt at an index, tokenized now."""
        (encoded,) = self.encoder([int(self.kept[index])])
        source, number = self.encoder.source, encoded.index
        fields = _fields(source, number, source.rows[number])
        name = str(self.names[self.codes[index]])
        uid = f"{source.name}:{number}"
        return Prompt(uid, name, encoded.token_ids, encoded.messages, fields, encoded.images)

    def untokenized(self, places: NDArray[np.int64], *, messages: bool) -> Iterator[Prompt]:
        """The prompts at ascending `places`, without tokens."""
        source, names = self.encoder.source, self.names.tolist()
        numbers = self.kept[places].tolist()
        wanted = zip(numbers, self.codes[places].tolist(), strict=True)
        are_all = len(numbers) == len(source.rows)
        rows = source.rows if are_all else (source.rows[number] for number in numbers)
        for (number, code), row in zip(wanted, rows, strict=True):
            said = self.encoder.messages(number)[0] if messages else ()
            yield Prompt(f"{source.name}:{number}", names[code], (), said, _fields(source, number, row))

    @property
    def sources(self) -> NDArray[np.object_]:
        """`Prompt.source` of each."""
        return self.names.astype(object)[self.codes]

    @property
    def fingerprint(self) -> str:
        """Identifies the rows and the settings of the source; empty where the rows are unknown."""
        return self.encoder.source.fingerprint


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of several sources, in the order of the sources, and row counts by source name in the
    config."""

    prompts: Prompts
    counts: dict[str, SourceCounts]

    def by_source(self) -> dict[str, Prompts]:
        """The prompts grouped by `Prompt.source`."""
        return {name: self.prompts.chosen(places) for name, places in self.prompts.places_by_source().items()}


def load_prompts(
    sources: Sequence[Source],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    base_dir: Path,
    role: Literal["train", "eval"],
    vision: PlacesImages | None = None,
) -> PromptSet:
    """Check all rows of `sources` (the config's `data.train` or `data.eval`). Those that fit become a Prompt
    when they are drawn.

    `Prompt.uid` contains the source's name in the config; `Prompt.source` is the value of the `source_key`
    column, or that name if there is no `source_key`; `Prompt.fields` is the row, with the reference answer
    under `answer`, which is absent if `answer_key` is null. Relative paths start from `base_dir`. `vision`
    places images.
    """
    parts: list[SourcePrompts] = []
    counts: dict[str, SourceCounts] = {}
    key = f"data.{role}"
    with said_if_slow(key):
        for source in read_sources(sources, base_dir=base_dir, key=key):
            encoder = Encoder(source, config, tokenizer, base_dir=base_dir, vision=vision)
            unread = [name for name in _IMAGE_COLUMNS if source.rows[0].get(name) is not None]
            if unread and vision is None and source.config.images_key is None:
                logger.warning(
                    "%s (%s): the column %r is not read, since the model reads only text; set model.vision "
                    "if it has images",
                    source.key,
                    source.name,
                    unread[0],
                )
            kept_as = checked.key_of(len(source.rows), role, source.fingerprint, encoder.fingerprint)
            if (checked_rows := checked.recall(kept_as)) is None:
                checked_rows = _checked(encoder, role)
                checked.keep(kept_as, checked_rows)
            kept, codes, names, of_rows = (
                checked_rows["kept"],
                checked_rows["codes"],
                checked_rows["names"],
                checked_rows["counts"].tolist(),
            )
            counts[source.name] = SourceCounts(*of_rows)
            parts.append(SourcePrompts(encoder, kept, codes, names))
    return PromptSet(Prompts(parts), counts)


def _checked(encoder: Encoder, role: str) -> dict[str, NDArray[Any]]:
    """The rows that fit, the names of their sources, and the counts."""
    source = encoder.source
    key, names = source.config.answer_key, dict[str, int]()
    codes = np.zeros(len(source.rows), np.int32)

    def check(index: int, row: DataRow, _: int) -> None:
        if key is not None and key not in row:
            _fields(source, index, row)
        codes[index] = names.setdefault(_source_name(source, index), len(names))
        if role == "eval" and "all" in names:
            option = f"{source.key}.{'source_key' if source.config.source_key else 'name'}"
            why = "the name 'all' is reserved for the result over all sources"
            raise DataError(f"{source.key}: {why}; change {option}")

    kept, counts = encoder.fitting(check)
    numbers = np.array([counts.rows, counts.dropped_overlong, counts.truncated])
    return {"kept": kept, "codes": codes[kept], "names": np.array(list(names)), "counts": numbers}


def _fields(source: SourceRows, index: int, row: DataRow) -> DataRow:
    key = source.config.answer_key
    if key is None:
        return {column: value for column, value in row.items() if column != "answer"}
    if key in row:
        return {**row, "answer": row[key]}
    no_answer = "set it to null if there is no answer"
    return {**row, "answer": source.cell(index, "answer_key", key, or_else=no_answer)}


def _source_name(source: SourceRows, index: int) -> str:
    key = source.config.source_key
    if key is None:
        return source.name
    name = source.cell(index, "source_key", key)
    if not isinstance(name, str) or not name:
        raise DataError(
            f"{source.where(index)}: column {key!r} ({source.key}.source_key) contains {name!r}, but the "
            "name of a source must be a string; set source_key to null to use one name for all rows"
        )
    return name


@dataclass(frozen=True, slots=True)
class Encoded:
    """The prompt of one row: its index in the source, messages, tokens, whether these come from the chat
    template, and its images."""

    index: int
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    is_templated: bool
    images: tuple[Placed, ...] = ()


class _Unmeasured(NamedTuple):
    """A prompt's text before it is tokenized, whether it comes from the chat template, the number of its
    images, and of the tokens that these have beyond their placeholders."""

    text: str
    is_templated: bool
    num_images: int
    num_more: int


class Encoder:
    """From a source's rows to tokenized prompts: applies templates, and handles overlong prompts as
    `config.overlong` says."""

    def __init__(
        self,
        source: SourceRows,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        base_dir: Path = Path(),
        vision: PlacesImages | None = None,
    ) -> None:
        self.source, self._config, self._tokenizer = source, config, tokenizer
        self._base_dir, self._vision = base_dir, vision
        self._used = _template_columns(source)
        self._drop_end = _appends_end(tokenizer)
        self.bound = token_bound(tokenizer)
        self._templated_plain: bool | None = None
        template = tokenizer.chat_template
        self._searched = searched_texts(template) if isinstance(template, str) and self.bound else None
        self._written: dict[tuple[str, ...], tuple[int, int] | None] = {}
        """By the roles of messages: how often the chat template writes a content, and a bound of the rest."""

    @property
    def fingerprint(self) -> str:
        """Identifies the settings and the tokenizer; empty for a tokenizer in Python, and where rows may name
        images, whose files may change."""
        if self._vision is not None or not hasattr(self._tokenizer, "backend_tokenizer"):
            return ""
        config = self._config.model_dump_json(include={"max_prompt_tokens", "overlong", "use_chat_template"})
        kwargs, template = self._config.chat_template_kwargs, self._tokenizer.chat_template
        backend: Any = self._tokenizer.backend_tokenizer
        special = self._tokenizer.special_tokens_map  # templates write them
        libraries = [version(name) for name in ("transformers", "tokenizers", "jinja2")]
        return f"{config} {kwargs} {template} {special} {libraries} {backend.to_str()}"

    def messages(self, index: int) -> tuple[tuple[Message, ...], bool]:
        """A row's prompt as chat messages, and whether the chat template applies."""
        messages, is_chat = _messages(self.source, index, self._used, self._images(index), self._base_dir)
        if self._vision is None and images_in(messages):
            raise DataError(
                f"{self.source.where(index)}: the prompt has an image, but the model reads only text; set "
                "model.vision"
            )
        return messages, _use_chat_template(self.source, index, is_chat, self._config, self._tokenizer)

    def _images(self, index: int) -> list[Image]:
        """The images in a row's columns."""
        source, key = self.source, self.source.config.images_key
        if key is None:
            row = source.rows[index] if self._vision is not None else {}
            value = next((row[name] for name in _IMAGE_COLUMNS if row.get(name) is not None), None)
        else:
            value = source.cell(index, "images_key", key)
        try:
            return images_of(value, self._base_dir)
        except ValueError as error:
            raise DataError(f"{source.where(index)}: {error}") from error

    def __call__(self, indices: Sequence[int]) -> list[Encoded]:
        """The prompts of rows that fit."""
        limit, rule = self._config.max_prompt_tokens, self._config.overlong
        messages, are_templated = zip(*map(self.messages, indices), strict=True)
        texts = list(map(self._text, indices, messages, are_templated))
        out = []
        for i, token_ids in enumerate(self._tokenize(texts, are_templated)):
            token_ids, placed = self._expanded(indices[i], token_ids, messages[i])
            if len(token_ids) > limit and rule in ("drop", "error"):
                raise DataError(
                    f"{self.source.where(indices[i])}: the prompt has {len(token_ids)} tokens, but fitted "
                    f"into data.max_prompt_tokens ({limit}) when the data was checked; if the chat template "
                    "writes the date, raise data.max_prompt_tokens, or set data.overlong to truncate_left "
                    "or truncate_right"
                )
            if len(token_ids) > limit:
                token_ids = self._cut(indices[i], messages[i], texts[i], token_ids, are_templated[i])
            out.append(Encoded(indices[i], messages[i], token_ids, are_templated[i], placed))
        return out

    def _expanded(
        self, index: int, token_ids: tuple[int, ...], messages: Sequence[Message]
    ) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """Tokens with those that stand for the images of a row, and where these are."""
        if self._vision is None:
            return token_ids, ()
        try:
            expanded, placed = self._vision.expand(token_ids, images_in(messages))
        except (ModelError, ValueError) as error:
            raise DataError(f"{self.source.where(index)}: {error}") from error
        return tuple(expanded), placed

    def _check_places(self, index: int, token_ids: Sequence[int], num_images: int) -> None:
        """Raise DataError if a row's tokens do not have a placeholder for each of its images."""
        try:
            if self._vision is not None:
                self._vision.places(token_ids, num_images)
        except ModelError as error:
            raise DataError(f"{self.source.where(index)}: {error}") from error

    def _cut(
        self,
        index: int,
        messages: Sequence[Message],
        text: str,
        token_ids: tuple[int, ...],
        is_templated: bool,
    ) -> tuple[int, ...]:
        """The first or last data.max_prompt_tokens tokens of a prompt that has more. What the chat template
        writes after the last message, such as the beginning of the answer, is kept: without it the policy
        would continue the question. Raises DataError if it cannot be told apart or does not fit."""
        limit = self._config.max_prompt_tokens
        if images_in(messages):
            raise DataError(
                f"{self.source.where(index)}: with its images the prompt has more than "
                f"data.max_prompt_tokens={limit} tokens, and it cannot be cut; raise it, or set "
                "data.overlong to drop"
            )
        if self._config.overlong == "truncate_left":
            return token_ids[-limit:]
        if not is_templated:
            return token_ids[:limit]
        content = text_of(messages[-1]["content"]).strip()
        _, separator, end = text.rpartition(content) if content else ("", "", "")
        if not separator:
            raise DataError(
                f"{self.source.where(index)}: the chat template changes the last message, so where its end "
                "begins is unknown and data.overlong=truncate_right might cut it off; set it to "
                "truncate_left or drop"
            )
        (end_ids,) = self._tokenize([end], [True]) if end else ((),)
        if len(end_ids) >= limit:
            raise DataError(
                f"{self.source.where(index)}: the chat template writes {len(end_ids)} tokens after the "
                f"message, and data.max_prompt_tokens={limit} leaves no others; raise it"
            )
        return token_ids[: limit - len(end_ids)] + end_ids

    def fitting(self, check: Callable[[int, DataRow, int], None]) -> tuple[NDArray[np.int64], SourceCounts]:
        """Check all rows, and return the indices of those that give a prompt, of shape [num_prompts]; `check`
        is called with the index of each of these, its row, and how many tokens its prompt has at most.
        Prompts that are certainly short enough are not tokenized."""
        source, limit, rule = self.source, self._config.max_prompt_tokens, self._config.overlong
        is_kept = np.ones(len(source.rows), bool)
        lengths: list[tuple[int, int]] = []  # of the overlong prompts, with their indices
        waiting: list[tuple[int, DataRow, _Unmeasured]] = []

        def measure() -> None:
            texts, flags = ([getattr(one, name) for *_, one in waiting] for name in ("text", "is_templated"))
            for (index, row, one), token_ids in zip(waiting, self._tokenize(texts, flags), strict=True):
                self._check_places(index, token_ids, one.num_images)
                length = len(token_ids) + one.num_more
                if not length:
                    raise DataError(f"{source.where(index)}: the prompt has no tokens")
                if length > limit:
                    lengths.append((length, index))
                    if rule in ("truncate_left", "truncate_right"):
                        self._cut(index, self.messages(index)[0], one.text, token_ids, one.is_templated)
                    is_kept[index] = rule != "drop"
                if is_kept[index]:
                    check(index, row, min(length, limit))
            waiting.clear()

        for index, row in enumerate(source.rows):
            measured = self._bounded_or_text(index, row)
            if isinstance(measured, int):
                check(index, row, measured)
                continue
            if len(measured.text) > LONG_CHARACTERS:
                logger.warning(
                    "%s: the prompt has %s characters; tokenizing them may take a minute",
                    source.where(index),
                    f"{len(measured.text):,}",
                )
            waiting.append((index, row, measured))
            if len(waiting) == TOKENIZER_BATCH:
                measure()
        measure()
        self._refuse(lengths, len(source.rows))
        kept = np.flatnonzero(is_kept)
        if rule == "drop":
            return kept, SourceCounts(len(source.rows), dropped_overlong=len(lengths))
        return kept, SourceCounts(len(source.rows), truncated=len(lengths))

    def _refuse(self, lengths: Sequence[tuple[int, int]], num_rows: int) -> None:
        """Raise DataError if prompts of these (length, index) must not be too long."""
        limit, rule = self._config.max_prompt_tokens, self._config.overlong
        if not lengths:
            return
        longest = max(lengths)[0]
        if rule == "error":
            first, index = min(lengths, key=itemgetter(1))
            raise DataError(
                f"{self.source.where(index)}: the prompt has {first} tokens, but data.max_prompt_tokens is "
                f"{limit} ({len(lengths)} of {num_rows} prompts are too long; the longest has {longest}); "
                "raise it, or set data.overlong to drop, truncate_left or truncate_right"
            )
        if rule == "drop" and len(lengths) == num_rows:
            raise DataError(
                f"{self.source.key} ({self.source.name}): all prompts are too long: the shortest has "
                f"{min(lengths)[0]} tokens, the longest {longest}, but data.max_prompt_tokens is {limit}; "
                "raise it, or set data.overlong to truncate_left or truncate_right"
            )

    def _bounded_or_text(self, index: int, row: DataRow) -> int | _Unmeasured:
        """An upper bound of the tokens of a row's prompt, if they certainly fit; else what to measure."""
        limit = self._config.max_prompt_tokens
        most = None if self._vision is not None else self.most_tokens(index, row)
        if most is not None and most <= limit:
            return most
        messages, is_templated = self.messages(index)
        text = self._text(index, messages, is_templated)
        if self.bound and text and self._vision is None and (most := self.bound.most(text)) <= limit:
            return most
        images = images_in(messages) if self._vision is not None else ()
        try:
            num_more = sum(self._vision.num_tokens(image) - 1 for image in images) if self._vision else 0
        except ValueError as error:
            raise DataError(f"{self.source.where(index)}: {error}") from error
        return _Unmeasured(text, is_templated, len(images), num_more)

    def most_tokens(self, index: int, row: DataRow) -> int | None:
        """An upper bound of the tokens of a row's prompt, which then has at least one; None if none is known
        without applying the chat template."""
        config = self.source.config
        if self.bound is None:
            return None
        value = row.get(config.prompt_key)
        if type(value) is str and value and config.template == "{prompt}" and value.lstrip()[:1] != "[":
            if self._templated_plain is None:
                self._templated_plain = self.messages(index)[1]
            if not self._templated_plain:
                return self.bound.most(value)
            contents, roles = (value,), ("user",)
            if config.system:
                contents, roles = (config.system, value), ("system", "user")
        else:
            messages, is_templated = self.messages(index)
            contents = tuple(text_of(message["content"]) for message in messages)
            roles = tuple(message["role"] for message in messages)
            if not is_templated:
                return self.bound.most(contents[-1])
        if self._searched is None:
            return None
        for content in contents:
            if not content or content.isspace() or any(text in content for text in self._searched):
                return None
        if roles not in self._written:
            self._text(index, *self.messages(index))  # its error, if the template refuses these messages
            self._written[roles] = self._template_adds(index, roles, self._searched)
        if (template := self._written[roles]) is None:
            return None
        times, added = template
        return times * sum(map(self.bound.most, contents)) + added

    def _template_adds(
        self, index: int, roles: Sequence[str], searched: Collection[str]
    ) -> tuple[int, int] | None:
        """How often the chat template at most writes a content of messages with these roles, and an upper
        bound of the tokens of the rest; None if it does not write contents as they are."""
        assert self.bound is not None, "only bounds need it"
        contents = [f'content {number} \\"<é>' for number in range(len(roles))]
        messages = tuple(
            Message(role=role, content=content) for role, content in zip(roles, contents, strict=True)
        )
        if any(text in content for text in searched for content in contents):
            return None
        try:
            text = self._text(index, messages, True)
        except DataError:
            return None
        times = [text.count(content) for content in contents]
        for content in contents:
            text = text.replace(content, "")
        return (max(times), self.bound.most(text)) if min(times) else None

    def _text(self, index: int, messages: tuple[Message, ...], is_templated: bool) -> str:
        if is_templated:
            return render(self.source, index, messages, self._config, self._tokenizer)
        return plain_content(messages[-1]["content"], "" if self._vision is None else self._vision.mark)

    def _tokenize(self, texts: Sequence[str], are_templated: Sequence[bool]) -> list[tuple[int, ...]]:
        """Tokenize texts. Plain ones get the tokenizer's leading special tokens, but no end token, because
        the policy continues them; templated ones already contain their special tokens."""
        out: list[tuple[int, ...]] = [()] * len(texts)
        for templated in (False, True):
            chosen = [i for i, flag in enumerate(are_templated) if flag is templated]
            if not chosen:
                continue
            ids = self._tokenizer(
                [encodable(texts[i]) for i in chosen],
                add_special_tokens=not templated,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
            for i, of_text in zip(chosen, ids, strict=True):  # pyright: ignore[reportArgumentType]
                out[i] = tuple(of_text[:-1] if self._drop_end and not templated else of_text)
        return out


def _messages(
    source: SourceRows, index: int, used: Sequence[str], images: Sequence[Image], base_dir: Path
) -> tuple[tuple[Message, ...], bool]:
    """A row's prompt as chat messages, and whether the row itself holds chat messages. `used` are the columns
    in the template, `images` the images in columns."""
    config, where, column = source.config, source.where(index), source.config.prompt_key
    value = source.cell(index, "prompt_key", column) if "prompt" in used else source.rows[index].get(column)
    if isinstance(value, str) and is_chat(parsed := parse_json(value)):
        value = parsed
    system: tuple[Message, ...] = ({"role": "system", "content": config.system},) if config.system else ()
    if not isinstance(value, list):
        content = _fill_template(source, index, value, used)
        return (*system, {"role": "user", "content": _with_images(content, images, where)}), False
    if config.template != "{prompt}":
        raise DataError(f"{where}: {source.key}.template does not apply to chat messages; remove it")
    for message in value:
        match message:
            case {"role": str(), "content": str() | list()}:
                pass
            case _:
                shape = "which is not a chat message {role: string, content: string or list of parts}"
                raise DataError(f"{where}: column {column!r} contains {message!r:.200}, {shape}")
    if not value or value[-1]["role"] == "assistant":
        fault = "must not end with an assistant message" if value else "are empty"
        raise DataError(
            f"{where}: the messages in column {column!r} {fault}; end them with a message for the policy"
        )
    if system and value[0]["role"] == "system":
        raise DataError(f"{where}: already has a system message; remove {source.key}.system")
    try:
        contents = [content_of(without_nulls(message["content"]), base_dir) for message in value]
        contents = placed_in_messages(contents, [message["role"] for message in value], images)
    except ValueError as error:
        raise DataError(f"{where}: column {column!r}: {error}") from error
    chat: list[Message] = [
        {"role": message["role"], "content": content}
        for message, content in zip(value, contents, strict=True)
    ]
    return (*system, *chat), True


def _with_images(text: str, images: Sequence[Image], where: str) -> Any:
    """Text, or parts with the images of a row in place of its marks."""
    try:
        return marked_content(text, images) if images else text
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def is_chat(value: Any) -> bool:
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
        raise DataError(f"{where}: {column} contains {value!r:.200}, {rule}")
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
            f"{source.where(index)}: {needs}, but the tokenizer has no chat template; set "
            "model.chat_template to a Jinja template or the path of a .jinja file, or use plain-text "
            "prompts"
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
        conversation: Any = [
            {**message, "content": shown_content(message["content"])} for message in messages
        ]
        return str(
            tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=asks, **config.chat_template_kwargs
            )
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"{source.where(index)}: the chat template rejects the messages (roles "
            f"{', '.join(m['role'] for m in messages)}): {error}; change the messages, {source.key}.system "
            "or model.chat_template"
        ) from error


def _appends_end(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer appends an end token to every text."""
    ends = [tokenizer("1", add_special_tokens=special)["input_ids"][-1:] for special in (True, False)]
    return ends[0] == [tokenizer.eos_token_id] != ends[1]
