"""Demonstrations in LeRobot's format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from braid.data.lerobot import Demonstration, read_demonstrations, write_demonstrations
from braid.errors import DataError


def episodes() -> list[Demonstration]:
    rng = np.random.default_rng(0)
    return [
        Demonstration(
            {
                "image": rng.integers(0, 256, (size, 5, 4, 3), np.uint8),
                "wrist": rng.integers(0, 256, (size, 3, 3, 3), np.uint8),
                "state": rng.normal(size=(size, 2)).astype(np.float32),
            },
            rng.normal(size=(size, 3)).astype(np.float32),
            task,
        )
        for size, task in ((3, "push"), (2, "pull"), (4, "push"))
    ]


def assert_equal(found: list[Demonstration], expected: list[Demonstration]) -> None:
    assert [of.instruction for of in found] == [of.instruction for of in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.observations.keys() == other.observations.keys()
        for name, values in other.observations.items():
            np.testing.assert_array_equal(one.observations[name], values)
        np.testing.assert_array_equal(one.actions, other.actions)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_demonstrations(tmp_path, episodes())
    assert_equal(list(read_demonstrations(tmp_path, "key")), episodes())


def test_version_3_has_several_episodes_in_a_file_and_tasks_in_a_table(tmp_path: Path) -> None:
    write_demonstrations(tmp_path, episodes())
    files = sorted((tmp_path / "data" / "chunk-000").iterdir())
    tables = [pq.read_table(file) for file in files]
    for file in files:
        file.unlink()
    pq.write_table(pa.concat_tables(tables), tmp_path / "data" / "chunk-000" / "file-000.parquet")
    (tmp_path / "meta" / "tasks.jsonl").unlink()
    tasks = pa.table({"task_index": [0, 1], "__index_level_0__": ["push", "pull"]})
    pq.write_table(tasks, tmp_path / "meta" / "tasks.parquet")
    assert_equal(list(read_demonstrations(tmp_path, "key")), episodes())


def test_folders_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"sft\.demonstrations=.*not a LeRobot data set: it lacks meta/info\.json"
    ):
        next(read_demonstrations(tmp_path, "sft.demonstrations"))
    write_demonstrations(tmp_path, episodes())
    info = tmp_path / "meta" / "info.json"
    content = json.loads(info.read_text())
    content["features"]["observation.images.image"]["dtype"] = "video"
    info.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"observation\.images\.image as video.*convert it"):
        next(read_demonstrations(tmp_path, "key"))
