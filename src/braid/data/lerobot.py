"""Demonstrations in LeRobot's format: parquet files with states, actions and PNG images, and JSON about them.

    meta/info.json      features, frames per second
    meta/tasks.jsonl    instructions by number (tasks.parquet in version 3)
    data/**/*.parquet   a row per frame: observation.state, observation.images.NAME, action, episode_index, task_index

Of version 2 and 3, with images in the parquet files; videos are not read.
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

_STATE, _IMAGES = "observation.state", "observation.images."


@dataclass(slots=True)
class Demonstration:
    """An episode of S frames: observations [S, ...] by name (`state`, and images [S, h, w, 3]), `actions` [S, A], and
    the instruction."""

    observations: dict[str, NDArray[Any]]
    actions: NDArray[np.float32]
    instruction: str


def read_demonstrations(folder: Path, key: str) -> Iterator[Demonstration]:
    """The episodes of a folder, in order. Raises DataError, naming config key `key`."""
    info = folder / "meta" / "info.json"
    files = sorted((folder / "data").glob("**/*.parquet"))
    if not info.is_file() or not files:
        raise DataError(
            f"{key}={folder} is not a LeRobot data set: it lacks {'data' if info.is_file() else 'meta/info.json'}"
        )
    features = json.loads(info.read_text())["features"]
    if videos := [name for name, of in features.items() if of["dtype"] == "video"]:
        raise DataError(
            f"{key}={folder} stores {videos[0]} as video, which braid does not read; convert it to images"
        )
    tasks = _tasks(folder, key)
    images = [name for name, of in features.items() if of["dtype"] == "image"]
    columns = ["action", "episode_index", "task_index", *images, *([_STATE] if _STATE in features else [])]
    for file in files:
        table = pq.read_table(file, columns=columns)
        episodes = table["episode_index"].to_numpy()
        starts = np.flatnonzero(np.append(True, episodes[1:] != episodes[:-1]))
        for start, end in zip(starts, [*starts[1:], len(episodes)], strict=True):
            part = table.slice(start, end - start)
            seen: dict[str, NDArray[Any]] = {
                name.removeprefix(_IMAGES): _decoded(part[name]) for name in images
            }
            if _STATE in features:
                seen["state"] = _matrix(part[_STATE])
            yield Demonstration(seen, _matrix(part["action"]), tasks[part["task_index"][0].as_py()])


def _tasks(folder: Path, key: str) -> dict[int, str]:
    lines, table = folder / "meta" / "tasks.jsonl", folder / "meta" / "tasks.parquet"
    if lines.is_file():
        rows = [json.loads(line) for line in lines.read_text().splitlines() if line]
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
        [np.asarray(Image.open(io.BytesIO(of["bytes"])).convert("RGB")) for of in column.to_pylist()]
    )


def write_demonstrations(folder: Path, episodes: Sequence[Demonstration], *, fps: int = 10) -> None:
    """Write a data set of version 2.1, with a file per episode."""
    from PIL import Image

    def png(image: NDArray[np.uint8]) -> Mapping[str, Any]:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    tasks = list(dict.fromkeys(episode.instruction for episode in episodes))
    chunk = folder / "data" / "chunk-000"
    for part in (chunk, folder / "meta"):
        part.mkdir(parents=True, exist_ok=True)
    total = 0
    for number, episode in enumerate(episodes):
        size = len(episode.actions)
        columns: dict[str, Any] = {"action": pa.array(episode.actions.tolist(), pa.list_(pa.float32()))}
        for name, values in episode.observations.items():
            if name == "state":
                columns[_STATE] = pa.array(values.tolist(), pa.list_(pa.float32()))
            else:
                columns[_IMAGES + name] = [png(image) for image in values]
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
    info = {
        "codebase_version": "v2.1", "fps": fps, "total_episodes": len(episodes), "total_frames": total,
        "total_tasks": len(tasks), "chunks_size": 1000, "features": features,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    }  # fmt: skip
    (folder / "meta" / "info.json").write_text(json.dumps(info, indent=2))
    lines = [json.dumps({"task_index": n, "task": task}) for n, task in enumerate(tasks)]
    (folder / "meta" / "tasks.jsonl").write_text("\n".join(lines))
