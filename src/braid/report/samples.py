"""Trajectories on disk as JSON Lines, for inspection by people and tools.

`read_samples` is the inverse of `write_samples`; docs/run_directory.md describes the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from braid.images import extension_of
from braid.types import (
    EnvSteps,
    Group,
    Image,
    Placed,
    PolicyVersion,
    Prompt,
    Row,
    Segment,
    Status,
    Trajectory,
    Turn,
)

from .files import to_json, write_atomically

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""

_STORED = (
    "sample",
    "status",
    "reason",
    "attempts",
    "reward",
    "reward_parts",
    "metrics",
    "text",
    "answer_text",
    "sampled_text",
    "prefill",
    "reasoning_text",
)
"""Fields of Trajectory that are stored as they are."""


@dataclass(slots=True)
class Sample:
    """A stored trajectory. `prompt_text` is the prompt as the model read it; `context_texts` and
    `output_texts` have the text of each turn (all empty without a tokenizer).

    `training` has its training values: name -> one number per position that the policy wrote, over all turns
    (advantages, old_logprobs, rewards, ...); empty for a trajectory that was not trained on.
    """

    trajectory: Trajectory
    prompt_text: str = ""
    context_texts: list[str] = field(default_factory=list)
    output_texts: list[str] = field(default_factory=list)
    training: dict[str, list[float]] = field(default_factory=dict)


def write_samples(
    path: Path, groups: Sequence[Group], rows: Iterable[Row] = (), *, decode: Decode | None = None
) -> None:
    """Write every trajectory of `groups`, with the training values from its rows in `rows`. The write is
    atomic. Images are files in the folder `images` beside `path`, one each however often they are read.

    Raises OSError.
    """
    rows_of: dict[int, list[Row]] = {}
    for row in rows:
        rows_of.setdefault(row.trajectory, []).append(row)
    trajectories = [t for group in groups for t in group.trajectories]
    text_of: Decode = decode or (lambda _: "")
    token_text = cache(lambda token: text_of([token]))  # a round has few distinct tokens
    images: dict[str, Image] = {}
    lines = (
        to_json(_storable(_record(trajectory, rows_of.get(place, ()), text_of, token_text), images)) + "\n"
        for place, trajectory in enumerate(trajectories)
    )
    write_atomically(path, lines)
    for name, image in images.items():
        file = path.parent / name
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, [image.data])


def _storable(value: Any, images: dict[str, Image]) -> Any:
    """A record with the names of files in place of images, which are added to `images`, and the size of
    bytes in place of their content."""
    if isinstance(value, Image):
        name = f"images/{value.key}{extension_of(value)}"
        images[name] = value
        return name
    if isinstance(value, Placed):
        return {"start": value.start, "num": value.num, "image": _storable(value.image, images)}
    if isinstance(value, Mapping):
        return {key: _storable(one, images) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(one, images) for one in value]
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    return value


def read_samples(path: Path) -> Iterator[Sample]:
    """Read the samples of a file, in order. Non-finite numbers come back as nan, and values of prompt fields
    that JSON does not support as strings. Images are read from their files."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield _sample(json.loads(line), path.parent)


def _record(
    trajectory: Trajectory, rows: Sequence[Row], text_of: Decode, token_text: Callable[[int], str]
) -> dict[str, Any]:
    prompt, steps = trajectory.prompt, trajectory.env_steps
    training: dict[str, list[float]] = {}
    for row in rows:
        for name, values in row.fields.items():
            training.setdefault(name, []).extend(values[row.mask].tolist())
    segments = [
        {"agent": s.agent, "num_turns": len(s.turns), "is_trained": s.is_trained} for s in trajectory.segments
    ]
    is_plain = segments in ([], [_only_segment(len(trajectory.turns))])
    return {
        "uid": prompt.uid,
        "source": prompt.source,
        **{name: getattr(trajectory, name) for name in _STORED},
        "prompt": {
            "text": text_of(prompt.token_ids) if prompt.token_ids else "",
            "messages": prompt.messages,
            "fields": dict(prompt.fields),
            "token_ids": prompt.token_ids,
            **({"images": prompt.images} if prompt.images else {}),
        },
        "turns": [
            {
                "context_text": text_of(turn.context_ids),
                "output_text": text_of(turn.output_ids),
                "token_texts": [token_text(token) for token in turn.output_ids],
            }
            | {
                f.name: getattr(turn, f.name)
                for f in fields(Turn)
                if f.name != "experts" and (turn.images or f.name != "images")
            }
            for turn in trajectory.turns
        ],
        **({} if is_plain else {"segments": segments}),
        "env_steps": steps and _without_images(steps),
        "training": training,
    }


def _sample(record: dict[str, Any], folder: Path) -> Sample:
    prompt, turns = record["prompt"], record["turns"]
    sample = Sample(
        Trajectory(
            prompt=Prompt(
                uid=record["uid"],
                source=record["source"],
                token_ids=tuple(prompt["token_ids"]),
                messages=tuple(_with_images(message, folder) for message in prompt["messages"]),
                fields=prompt["fields"],
                images=_placed(prompt.get("images", ()), folder),
            ),
            **{name: record[name] for name in _STORED if name in record},
            env_steps=record["env_steps"] and _env_steps(record["env_steps"]),
        ),
        prompt_text=prompt["text"],
        context_texts=[turn.pop("context_text") for turn in turns],
        output_texts=[turn.pop("output_text") for turn in turns],
        training={name: _numbers(values) for name, values in record["training"].items()},
    )
    trajectory, left = sample.trajectory, (_turn(turn, folder) for turn in turns)
    segments = record.get("segments", [_only_segment(len(turns))] if turns else [])
    trajectory.segments = [
        Segment(list(islice(left, s["num_turns"])), s["agent"], s.get("is_trained", True)) for s in segments
    ]
    trajectory.status = Status(trajectory.status)
    for values in (trajectory.reward_parts, trajectory.metrics):
        values |= dict(zip(values, _numbers(values.values()), strict=True))
    return sample


def _only_segment(num_turns: int) -> dict[str, Any]:
    return {"agent": Segment().agent, "num_turns": num_turns, "is_trained": True}


def _turn(record: dict[str, Any], folder: Path) -> Turn:
    record.pop("token_texts", None)  # files of earlier versions have none
    turn = Turn(**record)
    turn.images = _placed(turn.images, folder)
    turn.logprobs = _numbers(turn.logprobs)
    turn.policy_version = _version(record["policy_version"])
    return turn


def _placed(records: Iterable[Any], folder: Path) -> tuple[Placed, ...]:
    return tuple(Placed(one["start"], one["num"], _image(one["image"], folder)) for one in records)


def _image(name: str, folder: Path) -> Image:
    """A stored image; without data if its file is gone."""
    file = folder / name
    return Image(file.stem, file.read_bytes() if file.exists() else b"")


def _with_images(message: Any, folder: Path) -> Any:
    if isinstance(message["content"], str):
        return message
    parts = [
        {**part, "image": _image(part["image"], folder)} if part["type"] == "image" else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _version(value: int | list[list[int]]) -> PolicyVersion:
    return value if isinstance(value, int) else tuple((version, num) for version, num in value)


def _without_images(steps: EnvSteps) -> dict[str, Any]:
    def lists(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: lists(array) for name, array in value.items() if array.dtype != np.uint8}
        return np.asarray(value).tolist()

    return {f.name: lists(getattr(steps, f.name)) for f in fields(EnvSteps)}


def _env_steps(record: dict[str, Any]) -> EnvSteps:
    """Restore env steps, without images: integers as int64, everything else as float32, null as nan."""

    def array(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: array(part) for name, part in value.items()}
        values = np.array(value)
        return values if values.dtype.kind == "i" else np.array(value, np.float32)

    version = _version(record.pop("policy_version"))
    return EnvSteps(**{name: array(value) for name, value in record.items()}, policy_version=version)


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
