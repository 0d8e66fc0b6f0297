"""An index of the trajectories in a run's `samples/`, in SQLite: what lists and filters need, and where each
line begins, so that no list has to read the texts.

The index is a cache, `.index.sqlite` in the run folder (in memory where that cannot be written). Files that
are new or have changed are read again, and those that are gone are forgotten, so a resumed run needs no care.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braid.inspection.folder import Stage
from braid.json_text import parse_json

logger = logging.getLogger(__name__)

_LAYOUT = 1
"""Number of the tables' layout; an index of another one is built again."""
_HEAD = 120
"""Characters of prompt and answer that a list shows."""
_TABLES = """
CREATE TABLE files (
  stage TEXT, round INTEGER, size INTEGER, mtime INTEGER, unreadable INTEGER, PRIMARY KEY (stage, round)
) WITHOUT ROWID;
CREATE TABLE trajectories (
  stage TEXT, round INTEGER, line INTEGER, start INTEGER, bytes INTEGER, group_number INTEGER, uid TEXT,
  source TEXT, sample INTEGER, status TEXT, reason TEXT, reward REAL, parts TEXT, length INTEGER,
  turns INTEGER, advantage REAL, version INTEGER, prompt TEXT, answer TEXT, PRIMARY KEY (stage, round, line)
) WITHOUT ROWID;
"""
_LISTED = (
    "stage", "round", "line", "group_number", "uid", "source", "sample", "status", "reason", "reward",
    "parts", "length", "turns", "advantage", "version", "prompt", "answer",
)  # fmt: skip
ORDERS = {
    "file": "stage, round, line",
    "best": "reward DESC, stage, round, line",
    "worst": "reward IS NULL, reward, stage, round, line",
    "longest": "length DESC, stage, round, line",
    "shortest": "length, stage, round, line",
}
"""Order of a list -> its SQL."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which trajectories a list has; None matches all. `length` counts the policy's tokens (of simulators env
    steps); `text` is looked for in prompts, contexts and outputs, in any case."""

    stage: Stage | None = None
    round: int | None = None
    status: str | None = None
    source: str | None = None
    uid: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    text: str | None = None

    def where(self) -> tuple[str, list[Any]]:
        """The condition in SQL but for `text`, and its values."""
        rules = {
            "stage = ?": self.stage,
            "round = ?": self.round,
            "status = ?": self.status,
            "source = ?": self.source,
            "uid = ?": self.uid,
            "reward >= ?": self.min_reward,
            "reward <= ?": self.max_reward,
            "length >= ?": self.min_length,
            "length <= ?": self.max_length,
        }
        chosen = {rule: value for rule, value in rules.items() if value is not None}
        return " AND ".join(chosen) or "1", [*chosen.values()]


class Index:
    """The index of one run folder. Safe to use from several threads."""

    def __init__(self, run: Path) -> None:
        self._samples = run / "samples"
        self._lock, self._refreshing = threading.Lock(), threading.Lock()
        self._database = _open(run / ".index.sqlite")

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    def refresh(self, only: tuple[Stage, int] | None = None, *, within_s: float = math.inf) -> int:
        """Bring the index up to date with `samples/`, or with the file of one (stage, round) alone, and
        return how many files are left after about `within_s` seconds. The last rounds come first."""
        end = time.monotonic() + within_s
        with self._refreshing if only is None else nullcontext():  # a second one would read the same files
            files = self._files()
            with self._lock:
                rows = self._database.execute("SELECT stage, round, size, mtime FROM files")
                known = {(stage, number): (size, mtime) for stage, number, size, mtime in rows}
            stale = [
                key
                for key in sorted(known.keys() | files.keys(), key=lambda key: -key[1])
                if only in (None, key) and known.get(key) != files.get(key, (None,))[1:]
            ]
            for i, key in enumerate(stale):
                if time.monotonic() > end:
                    return len(stale) - i
                self._read(key, *files.get(key, (None, 0, 0)))
        return 0

    def rounds(self) -> list[dict[str, Any]]:
        """Each file of samples: stage, round, its number of trajectories, of invalid and truncated ones and
        of unreadable lines, and the mean reward of the valid ones; in order of rounds."""
        return self._rows(
            "SELECT stage, round, unreadable, COUNT(line) AS num, AVG(reward) AS reward, "
            "TOTAL(status = 'invalid') AS invalid, TOTAL(status = 'truncated') AS truncated "
            "FROM files LEFT JOIN trajectories USING (stage, round) GROUP BY stage, round "
            "ORDER BY stage, round"
        )

    def sources(self) -> list[str]:
        """The sources of prompts."""
        query = "SELECT DISTINCT source FROM trajectories ORDER BY source"
        return [row["source"] for row in self._rows(query)]

    def select(
        self, choice: Filter, *, order: str = "file", limit: int = 200, offset: int = 0
    ) -> dict[str, Any]:
        """`num`, how many trajectories match, and `rows`, a page of them in one of ORDERS. With a text, `num`
        counts those up to the end of the page, and `has_more` says whether there may be others."""
        where, values = choice.where()
        query = f"FROM trajectories WHERE {where}"
        columns = ", ".join((*_LISTED, "start", "bytes"))
        if choice.text:
            rows = self._rows(f"SELECT {columns} {query} ORDER BY {ORDERS[order]}", values)
            matching: list[dict[str, Any]] = []
            for row in self._containing(rows, choice.text):
                matching.append(row)
                if len(matching) > offset + limit:
                    break
            num, has_more = len(matching[: offset + limit]), len(matching) > offset + limit
            rows = matching[offset : offset + limit]
        else:
            num = self._rows(f"SELECT COUNT(*) AS num {query}", values)[0]["num"]
            rows = self._rows(
                f"SELECT {columns} {query} ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?",
                [*values, limit, offset],
            )
            has_more = num > offset + len(rows)
        listed = [{name: row[name] for name in _LISTED} | {"parts": json.loads(row["parts"])} for row in rows]
        return {"num": num, "has_more": has_more, "rows": listed}

    def record(self, stage: Stage, number: int, line: int) -> dict[str, Any]:
        """A trajectory as its file has it. Raises KeyError if there is none, OSError or ValueError if it
        cannot be read."""
        query = "SELECT start, bytes FROM trajectories WHERE stage = ? AND round = ? AND line = ?"
        rows = self._rows(query, [stage, number, line])
        if not rows:
            raise KeyError((stage, number, line))
        with self._file(stage, number).open("rb") as file:
            file.seek(rows[0]["start"])
            return parse_json(file.read(rows[0]["bytes"]))

    def _rows(self, query: str, values: list[Any] | None = None) -> list[dict[str, Any]]:
        with self._lock:
            cursor = self._database.execute(query, values or [])
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def _containing(self, rows: list[dict[str, Any]], text: str) -> Iterator[dict[str, Any]]:
        """Filter `rows` by a text that their trajectories have, in any case."""
        needle = text.lower()
        raw = json.dumps(text, ensure_ascii=False)[1:-1].lower().encode()
        files: dict[tuple[str, int], Any] = {}
        try:
            for row in rows:
                key = row["stage"], row["round"]
                if key not in files:
                    for file in files.values():
                        file.close()
                    files = {key: self._file(*key).open("rb")}
                files[key].seek(row["start"])
                line = files[key].read(row["bytes"])
                is_possible = not text.isascii() or raw in line.lower()
                if is_possible and needle in _whole_text(parse_json(line)).lower():
                    yield row
        except (OSError, ValueError):  # rewound or rewritten meanwhile; the next refresh sees it
            return
        finally:
            for file in files.values():
                file.close()

    def _file(self, stage: str, number: int) -> Path:
        return self._samples / f"{stage}_{number:06d}.jsonl"

    def _files(self) -> dict[tuple[str, int], tuple[Path, int, int]]:
        """(stage, round) -> path, size in bytes and time of change in ns."""
        files: dict[tuple[str, int], tuple[Path, int, int]] = {}
        with suppress(OSError), os.scandir(self._samples) as entries:
            for entry in entries:
                if match := re.fullmatch(r"(round|eval)_(\d+)\.jsonl", entry.name):
                    about = entry.stat()
                    key = match[1], int(match[2])
                    files[key] = Path(entry.path), about.st_size, about.st_mtime_ns
        return files

    def _read(self, key: tuple[str, int], path: Path | None, size: int, mtime: int) -> None:
        """Replace what is known of a file; forget it if `path` is None."""
        rows: list[tuple[Any, ...]] = []
        num_unreadable = 0
        try:
            lines = [] if path is None else path.read_bytes().splitlines(keepends=True)
        except OSError:
            return
        start, group, previous = 0, -1, (None, -1)
        for number, line in enumerate(lines):
            try:
                record = json.loads(line)
                this = record["uid"], record["sample"]
                if this[0] != previous[0] or this[1] <= previous[1]:
                    group += 1
                rows.append((*key, number, start, len(line), group, *_columns(record)))
                previous = this
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                num_unreadable += 1
                logger.warning("line %d of %s is not a trajectory: %s", number + 1, path, error)
            start += len(line)
        with self._lock, self._database as database:
            for table in ("files", "trajectories"):
                database.execute(f"DELETE FROM {table} WHERE stage = ? AND round = ?", key)
            if path is not None:
                database.execute(
                    "INSERT INTO files VALUES (?, ?, ?, ?, ?)", (*key, size, mtime, num_unreadable)
                )
                database.executemany(f"INSERT INTO trajectories VALUES ({', '.join('?' * 19)})", rows)


def _open(file: Path) -> sqlite3.Connection:
    """The database in a file, with its tables; one in memory if the file cannot be written."""
    for name in (str(file), str(file), ":memory:"):
        try:
            database = sqlite3.connect(name, check_same_thread=False)
            database.execute("PRAGMA synchronous = OFF")
            if database.execute("PRAGMA user_version").fetchone()[0] != _LAYOUT:
                for table in ("files", "trajectories"):
                    database.execute(f"DROP TABLE IF EXISTS {table}")
                database.executescript(f"BEGIN;{_TABLES}PRAGMA user_version = {_LAYOUT};COMMIT;")
            database.execute("DELETE FROM files WHERE round IS NULL")  # fails where nothing can be written
            database.commit()
            return database
        except sqlite3.DatabaseError as error:
            if "malformed" in str(error) or "not a database" in str(error):
                with suppress(OSError):
                    file.unlink()
    raise AssertionError("SQLite opens no database in memory")


def _columns(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The columns of a trajectory from `uid` on."""
    turns, steps = record["turns"], record.get("env_steps")
    length = sum(len(turn["output_ids"]) for turn in turns) if steps is None else len(steps["rewards"])
    advantages = [one for one in record["training"].get("advantages", ()) if one is not None]
    version = (turns[-1] if turns else steps or {}).get("policy_version")
    if isinstance(version, list):
        version = version[-1][0] if version else None
    return (
        record["uid"],
        record["source"],
        record["sample"],
        record["status"],
        record["reason"],
        record["reward"],
        json.dumps(record["reward_parts"]),
        length,
        len(turns),
        sum(advantages) / len(advantages) if advantages else None,
        version,
        _head(record["prompt"]["text"], last=True),
        _head(record.get("answer_text") or record.get("text") or ""),
    )


def _head(text: str, *, last: bool = False) -> str:
    """The first or last characters of a text, on one line."""
    part = " ".join((text[-4 * _HEAD :] if last else text[: 4 * _HEAD]).split())
    return part[-_HEAD:] if last else part[:_HEAD]


def _whole_text(record: Mapping[str, Any]) -> str:
    turns = (turn[name] for turn in record["turns"] for name in ("context_text", "output_text"))
    return "\n".join((record["prompt"]["text"], *turns))
