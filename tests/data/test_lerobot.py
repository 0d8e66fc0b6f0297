"""Demonstrations in LeRobot's format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from braid.data.lerobot import Demonstration, read_demonstrations, write_demonstrations
from braid.errors import DataError
from braid.report.video import write_video
from braid.types import Recording


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


def assert_equal(actual: list[Demonstration], expected: list[Demonstration]) -> None:
    assert [demonstration.instruction for demonstration in actual] == [
        demonstration.instruction for demonstration in expected
    ]
    for one, other in zip(actual, expected, strict=True):
        assert one.observations.keys() == other.observations.keys()
        for name, values in other.observations.items():
            np.testing.assert_array_equal(one.observations[name], values)
        np.testing.assert_array_equal(one.actions, other.actions)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_demonstrations(tmp_path, episodes())
    assert_equal(list(read_demonstrations(tmp_path, "key")), episodes())


def test_a_shorter_data_set_replaces_a_longer_one(tmp_path: Path) -> None:
    write_demonstrations(tmp_path, episodes())
    write_demonstrations(tmp_path, episodes()[:1])
    assert_equal(list(read_demonstrations(tmp_path, "key")), episodes()[:1])


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


def _edit(folder: Path, changes: dict[str, Any]) -> None:
    info = folder / "meta" / "info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | changes))


def _as_videos(folder: Path, of_version_3: bool) -> list[Demonstration]:
    """Write demonstrations whose images are videos, of slowly brightening frames."""
    demonstrations = [
        Demonstration(
            {"image": np.full((size, 32, 48, 3), 10 * number, np.uint8) + 20 * np.arange(size, dtype=np.uint8)[:, None, None, None]},
            np.zeros((size, 3), np.float32),
            "push",
        )
        for number, size in enumerate((5, 3, 4))
    ]  # fmt: skip
    write_demonstrations(folder, demonstrations)
    path = "videos/{video_key}/{episode_index}.mp4"
    if of_version_3:
        path = "videos/{video_key}/{chunk_index}-{file_index}.mp4"
    features = {"observation.images.image": {"dtype": "video"}, "action": {"dtype": "float32"}}
    _edit(folder, {"features": features, "video_path": path, "fps": 10})
    films = {str(number): episode.observations["image"] for number, episode in enumerate(demonstrations)}
    if of_version_3:
        name, starts = "videos/observation.images.image", [0.0, 0.5, 0.0]
        places = {
            f"{name}/chunk_index": [0, 0, 0],
            f"{name}/file_index": [0, 0, 1],
            f"{name}/from_timestamp": starts,
        }
        (folder / "meta" / "episodes").mkdir()
        pq.write_table(
            pa.table({"episode_index": [0, 1, 2], **places}), folder / "meta" / "episodes" / "0.parquet"
        )
        films = {"0-0": np.concatenate([films["0"], films["1"]]), "0-1": films["2"]}
    for name, frames in films.items():
        file = folder / "videos" / "observation.images.image" / f"{name}.mp4"
        write_video(file, [Recording(list(frames), [], [], "")], overlay=False, frames_per_s=10)
    return demonstrations


@pytest.mark.parametrize("of_version_3", [False, True])
def test_videos_are_read_frame_by_frame(tmp_path: Path, of_version_3: bool) -> None:
    """write_video enlarges a frame of 32 x 48 fourfold. H.264 with colours at half the resolution changes
    values of such frames by a few levels; neighbouring frames differ by 20."""
    written = _as_videos(tmp_path, of_version_3)
    read = list(read_demonstrations(tmp_path, "key"))
    for one, other in zip(read, written, strict=True):
        frames = one.observations["image"]
        assert frames.shape == (len(other.actions), 128, 192, 3)
        np.testing.assert_allclose(
            frames[:, ::4, ::4].astype(int), other.observations["image"], atol=9, rtol=0
        )


def test_videos_that_are_missing_or_too_short_are_refused(tmp_path: Path) -> None:
    _as_videos(tmp_path, False)
    folder = tmp_path / "videos" / "observation.images.image"
    shutil.copy(folder / "1.mp4", folder / "0.mp4")
    with pytest.raises(DataError, match=r"0\.mp4 has 3 frames of episode 0, which has 5"):
        list(read_demonstrations(tmp_path, "key"))
    (folder / "0.mp4").write_text("no video")
    with pytest.raises(DataError, match=r"cannot be read: InvalidDataError: .*0\.mp4"):
        list(read_demonstrations(tmp_path, "key"))
    (folder / "0.mp4").unlink()
    with pytest.raises(DataError, match=r"cannot be read: FileNotFoundError: .*0\.mp4"):
        list(read_demonstrations(tmp_path, "key"))


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"sft\.demonstrations=.*not a LeRobot data set: it lacks meta/info\.json"
    ):
        next(read_demonstrations(tmp_path, "sft.demonstrations"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda episode: episode.actions.__setitem__((1, 0), np.nan),
         "action is not finite in frame 1 of episode 1"),
        (lambda episode: episode.observations["state"].__setitem__((0, 1), np.inf),
         "state is not finite in frame 0 of"),
        (lambda episode: setattr(episode, "actions", np.zeros((2, 4), np.float32)),
         r"episode 1 have the shapes \{'action': \(4,\)"),
        (lambda episode: episode.observations.__setitem__("wrist", np.zeros((2, 9, 3, 3), np.uint8)),
         r"'wrist': \(9, 3, 3\)"),
    ],
)  # fmt: skip
def test_episodes_that_would_train_a_wrong_policy_are_refused(
    tmp_path: Path, change: Callable[[Demonstration], Any], words: str
) -> None:
    demonstrations = episodes()
    change(demonstrations[1])
    write_demonstrations(tmp_path, demonstrations)
    with pytest.raises(DataError, match=words):
        list(read_demonstrations(tmp_path, "key"))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("meta/info.json", "{", r"info\.json cannot be read: JSONDecodeError"),
        ("meta/info.json", "{}", r"info\.json cannot be read: KeyError: 'features'"),
        ("meta/tasks.jsonl", "", "the task 0 of episode 0 is not in meta/tasks"),
        (
            "data/chunk-000/episode_000001.parquet",
            "short",
            r"episode_000001\.parquet cannot be read: ArrowInvalid",
        ),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, file: str, content: str, words: str) -> None:
    write_demonstrations(tmp_path, episodes())
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match=words):
        list(read_demonstrations(tmp_path, "key"))


def test_a_column_that_info_names_and_no_file_has_is_named(tmp_path: Path) -> None:
    write_demonstrations(tmp_path, episodes())
    info = json.loads((tmp_path / "meta" / "info.json").read_text())
    _edit(tmp_path, {"features": info["features"] | {"observation.images.front": {"dtype": "image"}}})
    with pytest.raises(DataError, match=r"episode_000000\.parquet cannot be read: ArrowInvalid.*front"):
        list(read_demonstrations(tmp_path, "key"))
