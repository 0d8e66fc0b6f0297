"""Training rows on disk: they are read back as written, and files are complete or absent."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from braid.report.batches import Origin, read_batch, write_batch
from braid.types import Group, Row


@pytest.fixture
def full_rows() -> list[Row]:
    """Rows of the first and the third trajectory, with inputs and fields."""
    return [
        Row(
            {"input_ids": np.arange(length, dtype=np.int64)},
            np.arange(length) % 2 == 1,
            group=group,
            trajectory=trajectory,
            is_terminal=bool(group),
            policy_versions=np.full(length, 7 + group, np.int32),
            observations={"image": np.full((1 + group, 2), length, np.uint8)},
            fields={
                "advantages": np.linspace(-1, 1, length, dtype=np.float32),
                "values": np.full(length, np.nan, np.float32),
            },
        )
        for length, group, trajectory in ((5, 0, 0), (3, 1, 2))
    ]


def test_rows_come_back_to_the_bit_with_where_they_are_from(
    tmp_path: Path, groups: list[Group], full_rows: list[Row]
) -> None:
    write_batch(tmp_path / "round_000003", groups, full_rows)
    stored = read_batch(tmp_path / "round_000003")
    for (row, _), expected in zip(stored, full_rows, strict=True):
        assert (row.group, row.trajectory, row.is_terminal) == (
            expected.group,
            expected.trajectory,
            expected.is_terminal,
        )
        for ours, theirs in (
            (row.inputs, expected.inputs),
            (row.fields, expected.fields),
            (row.observations, expected.observations),
            ({"": row.mask}, {"": expected.mask}),
            ({"": row.decision}, {"": expected.decision}),
            ({"": row.policy_versions}, {"": expected.policy_versions}),
        ):
            assert ours.keys() == theirs.keys()
            for name, array in theirs.items():
                assert ours[name].dtype == array.dtype
                assert ours[name].tobytes() == array.tobytes()
    assert [origin for _, origin in stored] == [
        Origin("sums:7", "sums", 0, "truncated", 1.5),
        Origin("CartPole-v1:3", "CartPole-v1", 0, "finished", 2.0),
    ]


def test_other_tools_find_the_arrays_by_the_index(
    tmp_path: Path, groups: list[Group], full_rows: list[Row]
) -> None:
    write_batch(tmp_path / "b", groups, full_rows)
    index = json.loads((tmp_path / "b.json").read_text())
    arrays = load_file(tmp_path / "b.safetensors")
    assert index["arrays"] == sorted(arrays)
    second = index["rows"][1]
    ids = arrays["inputs/input_ids"][second["start"] : second["start"] + second["length"]]
    assert ids.tolist() == [0, 1, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_no_index(tmp_path: Path, groups: list[Group], full_rows: list[Row]) -> None:
    (tmp_path / ".b.safetensors.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_batch(tmp_path / "b", groups, full_rows)
    assert list(tmp_path.iterdir()) == []
