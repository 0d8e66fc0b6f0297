"""Trajectories are read back from disk as written."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from braid.report.samples import read_samples, write_samples
from braid.types import Group, Row, Segment


def test_every_trajectory_comes_back_as_it_was(
    tmp_path: Path, groups: list[Group], rows: list[Row], decode: Callable[..., str]
) -> None:
    path = tmp_path / "round_000010.jsonl"
    write_samples(path, groups, rows, decode=decode)
    samples = list(read_samples(path))
    trajectories = [t for group in groups for t in group.trajectories]
    for sample, original in zip(samples, trajectories, strict=True):
        back = sample.trajectory
        assert back.prompt.uid == original.prompt.uid
        assert back.prompt.messages == original.prompt.messages
        for name in (
            "sample",
            "status",
            "reason",
            "text",
            "answer_text",
            "sampled_text",
            "prefill",
            "reasoning_text",
            "reward",
            "reward_parts",
            "metrics",
            "attempts",
        ):
            assert getattr(back, name) == getattr(original, name), name
        assert str([dataclasses.asdict(t) for t in back.turns]) == str(
            [dataclasses.asdict(t) for t in original.turns]
        )
    steps, original_steps = samples[2].trajectory.env_steps, trajectories[2].env_steps
    assert steps is not None
    assert original_steps is not None
    kept = {"state": original_steps.observations["state"]} | original_steps.inputs
    back = steps.observations | steps.inputs
    for name in ("logprobs", "rewards", "num_executed"):
        kept[name], back[name] = getattr(original_steps, name), getattr(steps, name)
    assert kept.keys() == back.keys(), "images are left out"
    for name, values in kept.items():
        np.testing.assert_array_equal(back[name], values)
        assert back[name].dtype.kind == values.dtype.kind
    assert math.isnan(samples[0].trajectory.turns[1].logprobs[1])


def test_samples_of_earlier_versions_are_read(tmp_path: Path, groups: list[Group]) -> None:
    path = tmp_path / "x.jsonl"
    write_samples(path, groups)
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for record in records:
        for name in ("sampled_text", "prefill", "reasoning_text"):
            del record[name]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert next(read_samples(path)).trajectory.sampled_text == groups[0].trajectories[0].answer_text


def test_the_text_of_prompt_and_turns_is_stored(
    tmp_path: Path, groups: list[Group], decode: Callable[..., str]
) -> None:
    path = tmp_path / "x.jsonl"
    write_samples(path, groups, decode=decode)
    first = next(read_samples(path))
    assert first.prompt_text == "one two"
    assert first.context_texts == ["one two", "five"]
    assert first.output_texts == ["three four", "six seven eight"]


def test_training_values_are_stored_with_the_tokens(
    tmp_path: Path, groups: list[Group], rows: list[Row]
) -> None:
    path = tmp_path / "x.jsonl"
    write_samples(path, groups, rows)
    text, invalid, env = read_samples(path)
    assert text.training == {
        "advantages": [float(np.float32(0.1))] * 5
    }  # one per token written, none for context
    assert invalid.training == {}
    assert env.training == {"advantages": [1.0, -1.0]}


def test_segments_come_back_with_their_agents_and_the_values_of_all_their_rows(
    tmp_path: Path, groups: list[Group]
) -> None:
    (first, second), trajectory = groups[0].trajectories[0].turns, groups[0].trajectories[0]
    trajectory.segments = [
        Segment([first], "lead"),
        Segment([], "lead"),
        Segment([second], "helper", is_trained=False),
    ]
    rows = [
        Row({}, np.ones(num, np.bool_), 0, 0, fields={"values": np.full(num, value, np.float32)})
        for num, value in ((2, 1.0), (3, 2.0))
    ]
    path = tmp_path / "x.jsonl"
    write_samples(path, groups, rows)
    sample = next(read_samples(path))
    assert [s.is_trained for s in sample.trajectory.segments] == [True, True, False]
    assert [(s.agent, len(s.turns)) for s in sample.trajectory.segments] == [
        ("lead", 1),
        ("lead", 0),
        ("helper", 1),
    ]
    assert sample.trajectory.segments[0].turns == [first]
    assert sample.training == {"values": [1.0, 1.0, 2.0, 2.0, 2.0]}


def test_values_without_a_json_form_are_stored_as_text(tmp_path: Path, groups: list[Group]) -> None:
    path = tmp_path / "x.jsonl"
    write_samples(path, groups)
    fields = next(read_samples(path)).trajectory.prompt.fields
    assert fields == {"answer": "3", "tags": [1, None], "when": "{1, 2}"}


def test_each_line_is_strict_json(tmp_path: Path, groups: list[Group], rows: list[Row]) -> None:
    path = tmp_path / "x.jsonl"
    write_samples(path, groups, rows)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for line in path.read_text("utf-8").splitlines():
        json.loads(line, parse_constant=refuse)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_no_half_file(tmp_path: Path, groups: list[Group]) -> None:
    (tmp_path / ".x.jsonl.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_samples(tmp_path / "x.jsonl", groups)
    assert os.listdir(tmp_path) == []
