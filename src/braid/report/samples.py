"""Trajectories on disk as JSON Lines, for inspection by people and tools.

`read_samples` is the inverse of `write_samples`; docs/run_directory.md describes the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from braid.types import EnvSteps, Group, PolicyVersion, Prompt, Row, Segment, Status, Trajectory, Turn

from .files import to_json, write_atomically

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


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
    atomic.

    Raises OSError.
    """
    rows_of: dict[int, list[Row]] = {}
    for row in rows:
        rows_of.setdefault(row.trajectory, []).append(row)
    trajectories = [t for group in groups for t in group.trajectories]
    lines = (
        to_json(_record(trajectory, rows_of.get(place, ()), decode)) + "\n"
        for place, trajectory in enumerate(trajectories)
    )
    write_atomically(path, lines)


def read_samples(path: Path) -> Iterator[Sample]:
    """Read the samples of a file, in order. Non-finite numbers come back as nan, and values of prompt fields
    that JSON does not support as strings."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield _sample(json.loads(line))


def _record(trajectory: Trajectory, rows: Sequence[Row], decode: Decode | None) -> dict[str, Any]:
    prompt = trajectory.prompt
    training: dict[str, list[float]] = {}
    for row in rows:
        for name, values in row.fields.items():
            training.setdefault(name, []).extend(values[row.mask].tolist())
    segments = [{"agent": s.agent, "num_turns": len(s.turns)} for s in trajectory.segments]
    is_plain = segments in ([], [{"agent": Segment().agent, "num_turns": len(trajectory.turns)}])
    return {
        "uid": prompt.uid,
        "source": prompt.source,
        "sample": trajectory.sample,
        "status": str(trajectory.status),
        "reason": trajectory.reason,
        "attempts": trajectory.attempts,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "facts": trajectory.facts,
        "prompt": {
            "text": decode(prompt.token_ids) if decode and prompt.token_ids else "",
            "messages": prompt.messages,
            "fields": dict(prompt.fields),
            "token_ids": prompt.token_ids,
        },
        "text": trajectory.text,
        "answer_text": trajectory.answer_text,
        "turns": [_turn_record(turn, decode) for turn in trajectory.turns],
        **({} if is_plain else {"segments": segments}),
        "env_steps": None if trajectory.env_steps is None else _env_steps_record(trajectory.env_steps),
        "training": training,
    }


def _turn_record(turn: Turn, decode: Decode | None) -> dict[str, Any]:
    return {
        "context_text": decode(turn.context_ids) if decode else "",
        "output_text": decode(turn.output_ids) if decode else "",
        "stop_reason": turn.stop_reason,
        "reward": turn.reward,
        "policy_version": turn.policy_version,
        "start_s": turn.start_s,
        "end_s": turn.end_s,
        "env_s": turn.env_s,
        "tool_s": turn.tool_s,
        "context_ids": turn.context_ids,
        "output_ids": turn.output_ids,
        "logprobs": turn.logprobs,
    }


def _env_steps_record(steps: EnvSteps) -> dict[str, Any]:
    return {
        "policy_version": steps.policy_version,
        "rewards": steps.rewards.tolist(),
        "logprobs": steps.logprobs.tolist(),
        "actions": steps.actions.tolist(),
        "observations": steps.observations.tolist(),
    }


def _sample(record: dict[str, Any]) -> Sample:
    prompt = record["prompt"]
    trajectory = Trajectory(
        prompt=Prompt(
            uid=record["uid"],
            source=record["source"],
            token_ids=tuple(prompt["token_ids"]),
            messages=tuple(prompt["messages"]),
            fields=prompt["fields"],
        ),
        sample=record["sample"],
        status=Status(record["status"]),
        reason=record["reason"],
        segments=_segments(record),
        env_steps=None if record["env_steps"] is None else _env_steps(record["env_steps"]),
        text=record["text"],
        answer_text=record["answer_text"],
        reward=record["reward"],
        reward_parts={name: _number(value) for name, value in record["reward_parts"].items()},
        facts={name: _number(value) for name, value in record["facts"].items()},
        attempts=record["attempts"],
    )
    return Sample(
        trajectory,
        prompt_text=prompt["text"],
        context_texts=[turn["context_text"] for turn in record["turns"]],
        output_texts=[turn["output_text"] for turn in record["turns"]],
        training={name: [_number(x) for x in values] for name, values in record["training"].items()},
    )


def _segments(record: dict[str, Any]) -> list[Segment]:
    turns = [_turn(turn) for turn in record["turns"]]
    if "segments" not in record:
        return [Segment(turns)] if turns else []
    left = iter(turns)
    return [Segment(list(islice(left, s["num_turns"])), s["agent"]) for s in record["segments"]]


def _turn(record: dict[str, Any]) -> Turn:
    texts = ("context_text", "output_text")
    turn = Turn(**{name: value for name, value in record.items() if name not in texts})
    turn.logprobs = [_number(x) for x in turn.logprobs]
    turn.policy_version = _version(record["policy_version"])
    return turn


def _version(value: int | list[list[int]]) -> PolicyVersion:
    return value if isinstance(value, int) else tuple((version, num) for version, num in value)


def _env_steps(record: dict[str, Any]) -> EnvSteps:
    """Restore env steps: discrete actions as int64, everything else as float32, null as nan."""
    actions = np.array(record["actions"])
    return EnvSteps(
        observations=np.array(record["observations"], np.float32),
        actions=actions if actions.dtype.kind == "i" else np.array(record["actions"], np.float32),
        logprobs=np.array(record["logprobs"], np.float32),
        rewards=np.array(record["rewards"], np.float32),
        policy_version=_version(record["policy_version"]),
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
