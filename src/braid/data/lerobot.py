"""Demonstrations in LeRobot's format: parquet files with states, actions and PNG images, and JSON about them.

    meta/info.json      features, frames per second
    meta/tasks.jsonl    instructions by number (tasks.parquet in version 3)
    data/**/*.parquet   a row per frame: observation.state, observation.images.NAME, action, episode_index,
                        task_index, and of some next.reward and next.done
    videos/**/*.mp4     images that are not in the parquet files, of an episode, or of several in version 3
    meta/episodes/**    the place of each episode in the videos of version 3

Of version 2 and 3.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from braid.errors import DataError
from braid.json_text import parse_json, read_json
from braid.report.video import read_video

_STATE, _IMAGES = "observation.state", "observation.images."
_REWARD, _DONE = "next.reward", "next.done"


@dataclass(slots=True)
class Demonstration:
    """An episode of S frames: observations [S, ...] by name (`state`, and images [S, h, w, 3]), `actions`
    [S, A], and the instruction. `rewards` [S] of these actions are None where they are not recorded;
    `is_done` tells whether the task ended with the last of them."""

    observations: dict[str, NDArray[Any]]
    actions: NDArray[np.float32]
    instruction: str
    rewards: NDArray[np.float32] | None = None
    is_done: bool = False


def read_demonstrations(folder: Path, key: str) -> Iterator[Demonstration]:
    """The episodes of a folder, in order. Raises DataError, naming config key `key`, also for numbers that
    are not finite and for episodes that differ in their shapes."""
    first: Demonstration | None = None
    for number, episode in _episodes(folder, key):
        first = first or episode
        if _shapes(episode) != _shapes(first):
            raise DataError(
                f"{key}={folder}: the frames of episode {number} have the shapes {_shapes(episode)}, those "
                f"before it {_shapes(first)}; a policy needs equal ones"
            )
        for name, values in _values(episode).items():
            if not np.isfinite(values).all():
                frame = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))[0]
                raise DataError(
                    f"{key}={folder}: {name} is not finite in frame {frame} of episode {number}; remove the "
                    "episode"
                )
        yield episode


def _values(episode: Demonstration) -> dict[str, NDArray[Any]]:
    rewards = {} if episode.rewards is None else {_REWARD: episode.rewards}
    return {"action": episode.actions, **episode.observations, **rewards}


def _shapes(episode: Demonstration) -> dict[str, tuple[int, ...]]:
    return {name: values.shape[1:] for name, values in _values(episode).items()}


def _episodes(folder: Path, key: str) -> Iterator[tuple[int, Demonstration]]:
    """The episodes and their numbers. Raises DataError if they cannot be read."""
    read = folder / "meta" / "info.json"
    files = sorted((folder / "data").glob("**/*.parquet"))
    if not read.is_file() or not files:
        raise DataError(
            f"{key}={folder} is not a LeRobot data set: it lacks "
            f"{'data' if read.is_file() else 'meta/info.json'}"
        )
    try:
        info = read_json(read)
        features = info["features"]
        images = {
            name: feature["dtype"]
            for name, feature in features.items()
            if feature["dtype"] in ("image", "video")
        }
        videos = _Videos(folder, info) if "video" in images.values() else None
        tasks = _tasks(folder, key)
        columns = ["action", "episode_index", "task_index", *([_STATE] if _STATE in features else [])]
        columns += [name for name, dtype in images.items() if dtype == "image"]
        columns += [name for name in (_REWARD, _DONE) if name in features]
        for read in files:
            table = pq.read_table(read, columns=columns)
            episodes = table["episode_index"].to_numpy()
            starts = np.flatnonzero(np.append(True, episodes[1:] != episodes[:-1]))
            for start, end in zip(starts, [*starts[1:], len(episodes)], strict=True):
                part, number = table.slice(start, end - start), int(episodes[start])
                observations: dict[str, NDArray[Any]] = {}
                for name, dtype in images.items():
                    if videos is not None and dtype == "video":
                        values = videos.read(name, number, len(part))
                    else:
                        values = _decoded(part[name])
                    observations[name.removeprefix(_IMAGES).removeprefix("observation.")] = values
                if _STATE in features:
                    observations["state"] = _matrix(part[_STATE])
                task = part["task_index"][0].as_py()
                if task not in tasks:
                    raise DataError(
                        f"{key}={folder}: the task {task} of episode {number} is not in meta/tasks"
                    )
                yield (
                    number,
                    Demonstration(
                        observations,
                        _matrix(part["action"]),
                        tasks[task],
                        _matrix(part[_REWARD]).reshape(-1) if _REWARD in features else None,
                        bool(np.ravel(part[_DONE][-1].as_py()).any()) if _DONE in features else False,
                    ),
                )
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        if isinstance(error, DataError):
            raise
        reason = str(error).split("\n")[0]
        raise DataError(f"{key}={folder}: {read} cannot be read: {type(error).__name__}: {reason}") from error


class _Videos:
    """The videos of a data set."""

    def __init__(self, folder: Path, info: Mapping[str, Any]) -> None:
        self._folder, self._path, self._per_s = folder, info["video_path"], float(info["fps"])
        self._chunk_size = info.get("chunks_size", 1000)
        self._places: dict[int, dict[str, Any]] = {}  # of version 3
        for file in sorted((folder / "meta" / "episodes").glob("**/*.parquet")):
            named = [
                column
                for column in pq.read_schema(file).names
                if column == "episode_index" or column.startswith("videos/")
            ]
            self._places |= {
                row["episode_index"]: row for row in pq.read_table(file, columns=named).to_pylist()
            }

    def read(self, name: str, episode: int, count: int) -> NDArray[np.uint8]:
        """The frames [count, h, w, 3] of an episode."""
        start_s, place = 0.0, {"episode_chunk": episode // self._chunk_size, "episode_index": episode}
        if self._places:
            location = {part: self._places[episode][f"videos/{name}/{part}"] for part in _IN_VIDEO}
            start_s, place = location.pop("from_timestamp"), location
        file = self._folder / self._path.format(video_key=name, **place)
        frames = read_video(file, count, start_s=start_s - 0.5 / self._per_s)
        if len(frames) < count:
            raise ValueError(f"{file} has {len(frames)} frames of episode {episode}, which has {count}")
        return frames


_IN_VIDEO = ("chunk_index", "file_index", "from_timestamp")


def _tasks(folder: Path, key: str) -> dict[int, str]:
    lines, table = folder / "meta" / "tasks.jsonl", folder / "meta" / "tasks.parquet"
    if lines.is_file():
        rows = [parse_json(line) for line in lines.read_text().splitlines() if line]
    elif table.is_file():
        rows = pq.read_table(table).to_pylist()
    else:
        raise DataError(f"{key}={folder} has no instructions: it lacks meta/tasks.jsonl")
    # In version 3 the instruction is the index of a pandas table.
    return {row["task_index"]: row.get("task", row.get("__index_level_0__")) for row in rows}


def _matrix(column: pa.ChunkedArray) -> NDArray[np.float32]:
    return np.array(column.to_pylist(), np.float32)


def _decoded(column: pa.ChunkedArray) -> NDArray[np.uint8]:
    from PIL import Image

    return np.stack(
        [np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("RGB")) for image in column.to_pylist()]
    )


def write_demonstrations(folder: Path, episodes: Sequence[Demonstration], *, fps: int = 10) -> None:
    """Write a data set of version 2.1, with a file per episode, in place of one that was written to the
    folder before."""
    from PIL import Image

    def png(image: NDArray[np.uint8]) -> Mapping[str, Any]:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    tasks = list(dict.fromkeys(episode.instruction for episode in episodes))
    chunk = folder / "data" / "chunk-000"
    for part in (chunk, folder / "meta"):
        part.mkdir(parents=True, exist_ok=True)
    for old in chunk.glob("episode_*.parquet"):
        old.unlink()
    total = 0
    for number, episode in enumerate(episodes):
        size = len(episode.actions)
        columns: dict[str, Any] = {"action": pa.array(episode.actions.tolist(), pa.list_(pa.float32()))}
        for name, values in episode.observations.items():
            if name == "state":
                columns[_STATE] = pa.array(values.tolist(), pa.list_(pa.float32()))
            else:
                columns[_IMAGES + name] = [png(image) for image in values]
        if episode.rewards is not None:
            columns[_REWARD] = episode.rewards.astype(np.float32)
            columns[_DONE] = np.arange(size) + 1 == (size if episode.is_done else 0)
        columns |= {
            "timestamp": (np.arange(size) / fps).astype(np.float32),
            "frame_index": np.arange(size),
            "episode_index": np.full(size, number),
            "index": np.arange(total, total + size),
            "task_index": np.full(size, tasks.index(episode.instruction)),
        }
        pq.write_table(pa.table(columns), chunk / f"episode_{number:06d}.parquet")
        total += size
    features: dict[str, Any] = {"action": {"dtype": "float32", "shape": [episodes[0].actions.shape[1]]}}
    for name, values in episodes[0].observations.items():
        column, dtype = (_STATE, "float32") if name == "state" else (_IMAGES + name, "image")
        features[column] = {"dtype": dtype, "shape": list(values.shape[1:])}
    if episodes[0].rewards is not None:
        features |= {_REWARD: {"dtype": "float32", "shape": [1]}, _DONE: {"dtype": "bool", "shape": [1]}}
    info = {
        "codebase_version": "v2.1", "fps": fps, "total_episodes": len(episodes), "total_frames": total,
        "total_tasks": len(tasks), "chunks_size": 1000, "features": features,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    }  # fmt: skip
    (folder / "meta" / "info.json").write_text(json.dumps(info, indent=2))
    lines = [json.dumps({"task_index": n, "task": task}) for n, task in enumerate(tasks)]
    (folder / "meta" / "tasks.jsonl").write_text("\n".join(lines))
