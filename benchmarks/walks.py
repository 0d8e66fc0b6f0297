"""The calls between two places of braid, as one reads them: a run of one round, in which each call is watched.

    python benchmarks/walks.py

For each walk it prints braid's functions from the first to the last, and compares their number, and that of
their files, with the bars. Exits with 1 if a bar is missed. A task of asyncio continues the walk of the call
that created it. Frames of Python and its libraries, and of comprehensions, do not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from braid.algorithms.policy_losses.ppo_clip import PpoClip
from braid.cli.main import main as braid
from braid.rollout.engines.native.engine import NativeEngine
from braid.trainer.on_policy import OnPolicy

_ROOT = Path(__file__).resolve().parents[1]
_SOURCE = str(_ROOT / "src" / "braid")
_STEP = "Guess.step"
"""The step of the example's environment, which is a file that the run imports."""
_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
_CONFIG = _ROOT / "examples" / "own_env.yaml"
_SETTINGS = (
    "run.max_rounds=1",
    "rollout.prompts_per_round=1",
    "rollout.group_size=2",
    "model.build.hidden_size=16",
    "model.build.intermediate_size=16",
    "eval.before=false",
    "eval.at_end=false",
    "eval.target=null",
)


@dataclass(frozen=True, slots=True)
class Walk:
    """From the function `first` to `last`, by their qualified names."""

    title: str
    first: str
    last: str
    most_frames: int
    most_files: int | None = None


_LOOP, _FORMULA = OnPolicy.run.__qualname__, PpoClip.per_token.__qualname__
WALKS = (
    Walk("the loop to the formula", _LOOP, _FORMULA, 9, 6),
    Walk("the command line to the formula", braid.__qualname__, _FORMULA, 15),
    Walk("a prompt to the native engine", _LOOP, NativeEngine.generate.__qualname__, 14),
    Walk("an agent to its environment's step", _LOOP, _STEP, 14),
)


@dataclass(frozen=True, slots=True)
class Place:
    """A function of braid, or of the run's environment."""

    name: str
    file: str

    def __str__(self) -> str:
        return f"{self.name:<45} {self.file}"


class Watch:
    """The stack of braid's functions at the first call of each of the functions `names`."""

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self.stacks: dict[str, list[Place]] = {}
        self._creators: dict[int, tuple[Any, list[Place]]] = {}
        """The stack at the creation of each task, with the task, so that its id stays its own."""

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_qualname in self._names and code.co_qualname not in self.stacks:
            self.stacks[code.co_qualname] = self._stack(frame)
        elif event == "return" and code.co_name == "create_task" and isinstance(value, asyncio.Task):
            self._creators[id(value)] = value, self._stack(frame)

    def _stack(self, frame: FrameType | None) -> list[Place]:
        """The functions from the outermost to that of `frame`."""
        places: list[Place] = []
        while frame is not None:
            if (place := _place_of(frame.f_code)) is not None:
                places.append(place)
            if frame.f_code is asyncio.Handle._run.__code__:
                break  # what follows is where the loop runs, not what the task belongs to
            frame = frame.f_back
        places.reverse()
        with contextlib.suppress(RuntimeError):
            task = asyncio.current_task()
            if id(task) in self._creators:
                return [*self._creators[id(task)][1], *places]
        return places


def _place_of(code: CodeType) -> Place | None:
    is_counted = code.co_filename.startswith(_SOURCE) or code.co_qualname == _STEP
    if not is_counted or code.co_name in _COMPREHENSIONS:
        return None
    return Place(code.co_qualname, code.co_filename.removeprefix(_SOURCE).removeprefix(str(_ROOT)))


def walked() -> dict[str, list[Place]]:
    """The stack at the end of each walk, in a run of one round."""
    watch = Watch({walk.last for walk in WALKS})
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            code = braid(["train", str(_CONFIG), *_SETTINGS, f"run.output_dir={folder}"])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    if code:
        sys.exit(f"the run ended with exit code {code}")
    return watch.stacks


def main() -> int:
    """Print the walks, and return whether a bar is missed."""
    stacks, is_missed = walked(), False
    for walk in WALKS:
        stack = stacks[walk.last]
        names = [place.name for place in stack]
        steps = stack[names.index(walk.first) :]
        files = len({place.file for place in steps})
        is_over = len(steps) > walk.most_frames or (walk.most_files or files) < files
        is_missed |= is_over
        bar = f"at most {walk.most_frames}" + (f" in {walk.most_files}" if walk.most_files else "")
        print(f"{walk.title}: {len(steps)} frames in {files} files ({bar}){': MISSED' if is_over else ''}")
        for number, place in enumerate(steps, start=1):
            print(f"  {number:>2} {place}")
        print()
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
