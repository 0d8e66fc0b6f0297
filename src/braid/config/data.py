"""Prompts: where they come from and how they become tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from .base import Section


class _Source(Section):
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """Names the source in metrics; the file, data set or generator name when empty."""
    limit: PositiveInt | None = None
    """Use only the first so many rows."""
    prompt_key: str = "prompt"
    """Column of the prompt: plain text, or a list of chat messages, or such a list as JSON text. `a.b` is b inside column a."""
    answer_key: str | None = "answer"
    """Column of the reference answer, passed to rewards as `answer`; null when there is none. Any item of a list is right."""
    source_key: str | None = None
    """Column that names the source of each row, in metrics and for the `sources` of rewards; this source's name when null."""
    system: str | None = None
    """System message put before each prompt."""
    template: str = "{prompt}"
    """Text put around a plain-text prompt; `{column}` names any column."""
    response_key: str | None = None
    """Column of the response to imitate, for supervised learning."""
    response_function: str | None = None
    """Dotted path of a function from a data row (a mapping) to the response to imitate: text, or a list of
    (text, is_policy) whose parts with False are an environment's replies, not learned."""


class FileSource(_Source):
    """Rows of local files."""

    kind: Literal["file"] = "file"
    """Local files."""
    path: str | tuple[str, ...]
    """One or more .jsonl, .json, .csv or .parquet files (globs allowed)."""


class HubSource(_Source):
    """A Hugging Face data set."""

    kind: Literal["hub"] = "hub"
    """A data set of the Hugging Face hub or of a local folder in its layout."""
    path: str
    """Name of the data set."""
    subset: str | None = None
    """Its configuration name."""
    split: str = "train"
    """Its split."""


class ProceduralSource(_Source):
    """Tasks made by reasoning-gym; rewards get the whole entry."""

    kind: Literal["procedural"] = "procedural"
    """A reasoning-gym generator."""
    generator: str
    """Name of the reasoning-gym data set, for example chain_sum."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its parameters."""
    size: PositiveInt = 10_000
    """How many tasks."""
    seed: NonNegativeInt = 0
    """Its seed; entry i is drawn from seed + i, so keep the seeds of train and eval `size` apart."""
    prompt_key: str = "question"
    """Column of the prompt."""


Source = Annotated[FileSource | HubSource | ProceduralSource, Field(discriminator="kind")]


def source_name(source: Source) -> str:
    """What metrics and the `sources` of rewards call a source: its own name, else that of its file, data set or generator."""
    if source.name:
        return source.name
    match source:
        case ProceduralSource():
            return source.generator
        case HubSource():
            return _clean(Path(source.path).name)
        case FileSource():
            paths = (source.path,) if isinstance(source.path, str) else source.path
            path = Path(paths[0] if paths else "")
            return _clean(path.stem) or _clean(path.parent.name) or "files"


def _clean(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "", name)


class MixShare(Section):
    """Sources that have a share of the training prompts together."""

    sources: tuple[str, ...] = Field(min_length=1)
    """Their names, as in metrics; within them prompts come in proportion to their numbers."""
    share: NonNegativeFloat
    """Their part of all shares; 0 leaves them out."""


class DataConfig(Section):
    """Training and evaluation prompts."""

    train: tuple[Source, ...] = ()
    """Sources of training prompts, mixed in proportion to their sizes, or as `mix` says."""
    mix: tuple[MixShare, ...] = ()
    """Shares of sources in every stretch of the training prompts, whatever their sizes; each source once. The prompts of a
    source that has had all its rows start over."""
    eval: tuple[Source, ...] = ()
    """Sources of evaluation prompts, each with metrics of its own."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt after templating."""
    overlong: Literal["drop", "truncate_left", "truncate_right", "error"] = "drop"
    """What to do with longer ones (always counted)."""
    use_chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: apply the tokenizer's template when it has one, or when the prompt is chat messages."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as {enable_thinking: false}."""
    shuffle: bool = True
    """Draw training prompts in an order given by the seed, a new one in each epoch."""
    seed: NonNegativeInt | None = None
    """Seed of that order; run.seed when null."""
