"""What the page asks about runs, and the answers: plain data for JSON, from run folders as they are now.

The server answers over HTTP; the report file carries the answers to what can be asked of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from braid.config.explain import show_value
from braid.inspection.comparison import METRICS, MISSING, compare_by_prompt, config_differences
from braid.inspection.folder import Run, Stage, settings
from braid.report.names import describe

from .index import ORDERS, Filter, Index
from .tokens import turns_of

MOST_LISTED = 1000
"""Trajectories in one answer."""
INDEXING_S = 0.4
"""Seconds of reading files into the index in one answer."""
MOST_DRAWN = 200
"""Trajectories in a timeline."""
FILES = {
    "video": ("video", (".mp4", ".gif")),
    "images": ("samples/images", (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")),
}
"""Files that the page shows: name in its addresses -> folder in the run, and suffixes."""


class BadQuestion(ValueError):
    """A question that has no answer: an unknown name, or a value that is not allowed."""


class Missing(LookupError):
    """There is no such run, round, trajectory or file."""


class Answers:
    """Answers questions about some runs, which are named by their place in `folders`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._names = _short_names(self._folders)
        self._indexes = [Index(folder) for folder in self._folders]
        self._metrics: dict[Path, tuple[Any, dict[str, Any]]] = {}
        self._questions: dict[str, Callable[..., Any]] = {
            "runs": self.runs,
            "metrics": self.metrics,
            "rounds": self.rounds,
            "list": self.matching,
            "trajectory": self.trajectory,
            "timeline": self.timeline,
            "change": self.change,
            "config": self.config,
        }

    def __call__(self, question: str, values: Mapping[str, str]) -> Any:
        """The answer to a question with its values as text. Raises BadQuestion or Missing."""
        if question not in self._questions:
            raise Missing(f"there is no question {question!r}; there are {', '.join(self._questions)}")
        return self._questions[question](_Values(values))

    def close(self) -> None:
        """Close the indexes."""
        for index in self._indexes:
            index.close()

    def refresh(self) -> None:
        """Bring all indexes up to date."""
        for index in self._indexes:
            index.refresh()

    def runs(self, values: _Values) -> list[dict[str, Any]]:
        """Each run with its state. `changed` has texts that change with its files."""
        values.done()
        return [self._run(number) for number in range(len(self._folders))]

    def _run(self, number: int) -> dict[str, Any]:
        run = Run(self._folders[number])
        summary = run.summary
        return {
            "name": self._names[number],
            "path": str(run.path),
            "status": run.status,
            "num_rounds": summary.get("num_rounds"),
            "error": summary.get("error"),
            "changed": {
                "metrics": _state(run.path / "metrics.jsonl"),
                "samples": _state(run.path / "samples"),
                "video": _state(run.path / "video"),
            },
        } | {name: summary.get(name) for name in ("round", "steps", "wall_s")}

    def metrics(self, values: _Values) -> dict[str, Any]:
        """Columns of a run's metrics.jsonl by name, `round` among them; what each metric means; and the names
        of those to show at first."""
        number = self._number(values)
        values.done()
        run = Run(self._folders[number])
        state = _state(run.path / "metrics.jsonl")
        kept = self._metrics.get(run.path)
        if kept is None or kept[0] != state:
            names = sorted({name for line in run.lines for name in line} - {"round"})
            columns = {name: [line.get(name) for line in run.lines] for name in ("round", *names)}
            about = {name: _meaning(name) for name in names}
            first = [name for name in dict.fromkeys([run.target_name, *METRICS]) if name in columns]
            first = [name for name in first if any(columns[name])]
            kept = state, {"columns": columns, "about": about, "first": first}
            self._metrics[run.path] = kept
        return kept[1]

    def rounds(self, values: _Values) -> dict[str, Any]:
        """The rounds and evaluations with samples, the sources of prompts, and the videos. `left` counts the
        files that are not in the index yet: each time this is asked, it reads some of them."""
        number = self._number(values)
        values.done()
        index, videos = self._indexes[number], self._folders[number] / FILES["video"][0]
        left = index.refresh(within_s=INDEXING_S)
        names = sorted(path.name for path in videos.glob("*") if path.suffix in FILES["video"][1])
        return {"rounds": index.rounds(), "left": left, "sources": index.sources(), "videos": names}

    def matching(self, values: _Values) -> dict[str, Any]:
        """Trajectories that match a Filter, without their texts."""
        index = self._indexes[self._number(values)]
        order = values.text("order", "file", choices=tuple(ORDERS))
        limit, offset = values.whole("limit", 200), values.whole("offset", 0)
        kinds = {field.name: str(field.type).partition(" ")[0] for field in fields(Filter)}
        read = {"int": values.whole, "float": values.number, "str": values.text, "Stage": values.stage}
        choice = Filter(**{name: read[kind](name, None) for name, kind in kinds.items()})
        values.done()
        if limit > MOST_LISTED:
            raise BadQuestion(f"limit={limit}: at most {MOST_LISTED}; ask for more with offset")
        if choice.stage and choice.round is not None:
            index.refresh((choice.stage, choice.round))
        return index.select(choice, order=order, limit=limit, offset=offset)

    def trajectory(self, values: _Values) -> dict[str, Any]:
        """One trajectory with its texts, and its numbers by token."""
        index = self._indexes[self._number(values)]
        stage, number, line = values.stage("stage"), values.whole("round"), values.whole("line")
        values.done()
        index.refresh((stage, number))
        try:
            record = index.record(stage, number, line)
        except (KeyError, OSError, ValueError):
            raise Missing(f"line {line} of {stage} {number} cannot be read") from None
        prompt = {name: record["prompt"].get(name) for name in ("text", "messages", "images")}
        kept = (
            "uid",
            "source",
            "sample",
            "status",
            "reason",
            "attempts",
            "reward",
            "reward_parts",
            "metrics",
        )
        steps = record.get("env_steps")
        return {name: record.get(name) for name in kept} | {
            "prompt": prompt,
            "turns": turns_of(record),
            "env_rewards": None if steps is None else steps["rewards"],
        }

    def timeline(self, values: _Values) -> dict[str, Any]:
        """The turns of a round's trajectories, of the first MOST_DRAWN: start and end of sampling (wall-clock
        seconds), then seconds of the environment's reply, and those of them in tools."""
        index, number = self._indexes[self._number(values)], values.whole("round")
        values.done()
        index.refresh(("round", number))
        listed = index.select(Filter("round", number), limit=MOST_DRAWN)
        drawn = []
        for row in listed["rows"]:
            turns = index.record("round", number, row["line"])["turns"]
            times = [[turn["start_s"], turn["end_s"], turn["env_s"], turn["tool_s"]] for turn in turns]
            drawn.append({name: row[name] for name in ("line", "uid", "sample")} | {"turns": times})
        return {"num": listed["num"], "trajectories": drawn}

    def change(self, values: _Values) -> dict[str, Any]:
        """Two evaluations (or rounds) by prompt, as a Wins with all prompts whose score changed. `run` and
        `round` name the first, `other_run` and `other_round` the second."""
        stage = values.stage("stage")
        pairs = [
            (self._number(values, f"{which}run"), values.whole(f"{which}round")) for which in ("", "other_")
        ]
        values.done()
        files = []
        for place, number in pairs:
            stored = Run(self._folders[place]).samples(stage)
            if number not in stored:
                raise Missing(f"{self._names[place]} has no samples of {stage} {number}")
            files.append(stored[number])
        wins = compare_by_prompt(files[0], files[1], num_most=10**9)
        return {"wins": None if wins is None else asdict(wins) | {"is_certain": wins.is_certain}}

    def config(self, values: _Values) -> dict[str, Any]:
        """The settings of each run by key, and the keys that differ, but for those of name and folder."""
        values.done()
        runs = [Run(folder) for folder in self._folders]
        trees = [settings(run.config) for run in runs]
        keys = sorted({key for tree in trees for key in tree})
        rows = {key: [_plain(tree.get(key, MISSING)) for tree in trees] for key in keys}
        return {"rows": rows, "differing": sorted(config_differences(runs))}

    def file(self, run: str, kind: str, name: str) -> Path:
        """The path of an image or video of a run. Raises Missing for anything else."""
        folder, suffixes = FILES.get(kind, ("", ()))
        number = int(run) if run.isdecimal() else -1
        if 0 <= number < len(self._folders) and "/" not in name and name.endswith(tuple(suffixes)):
            path = self._folders[number] / folder / name
            if name[0] != "." and path.is_file() and not path.is_symlink():
                return path
        raise Missing("there is no such image or video")

    def _number(self, values: _Values, name: str = "run") -> int:
        number = values.whole(name)
        if number >= len(self._folders):
            raise Missing(f"there is no run {number}")
        return number


class _Values:
    """The values of a question, each read once; `done` refuses those that nothing has read."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._left = dict(texts)

    def text(self, name: str, *default: Any, choices: tuple[str, ...] = ()) -> Any:
        if name not in self._left:
            if not default:
                raise BadQuestion(f"the question lacks {name}")
            return default[0]
        text = self._left.pop(name)
        if choices and text not in choices:
            raise BadQuestion(f"{name}={text}: must be one of {', '.join(choices)}")
        return text

    def stage(self, name: str, *default: Any) -> Any:
        return self.text(name, *default, choices=get_args(Stage))

    def whole(self, name: str, *default: Any) -> Any:
        text = self.text(name, *default)
        if not isinstance(text, str):
            return text
        if not (text.isascii() and text.isdecimal() and len(text) < 16):
            raise BadQuestion(f"{name}={text}: must be a whole number")
        return int(text)

    def number(self, name: str, *default: Any) -> Any:
        text = self.text(name, *default)
        try:
            value = float(text) if isinstance(text, str) else text
        except ValueError:
            value = math.nan
        if isinstance(value, float) and not math.isfinite(value):
            raise BadQuestion(f"{name}={text}: must be a number")
        return value

    def done(self) -> None:
        if self._left:
            raise BadQuestion(f"the question does not have {', '.join(self._left)}")


def _state(path: Path) -> str:
    """Text that changes when the file or folder does."""
    try:
        about = path.stat()
    except OSError:
        return ""
    return f"{about.st_ino}-{about.st_size}-{about.st_mtime_ns}"


def _meaning(name: str) -> dict[str, str]:
    try:
        metric = describe(name)
    except AssertionError:  # a metric of a user's own kind, which is declared where it runs only
        return {"unit": "", "meaning": ""}
    return {"unit": metric.unit, "meaning": metric.meaning}


def _plain(value: Any) -> Any:
    return None if value is MISSING else show_value(value)


def _short_names(folders: Sequence[Path]) -> list[str]:
    """A name of each run, with as many of its folders as make it unlike the others."""
    for depth in range(1, max((len(path.parts) for path in folders), default=0) + 1):
        names = ["/".join(path.parts[-depth:]) for path in folders]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in folders]
