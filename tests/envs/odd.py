"""Values and exceptions that users' code may come up with where a number, a truth value, messages or a record
is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.pictures import picture

from braid.envs.agents.base import Opening, Step
from braid.types import Action, Prompt

PICTURE = picture(0)


class Unreadable:
    """Raises whatever is asked of it."""

    def __repr__(self) -> str:
        raise ValueError("no repr")

    def __float__(self) -> float:
        raise KeyError("no number")


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class OwnBase(BaseException):
    """Not an Exception."""


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


NUMBERS: dict[str, Any] = {
    "none": None,
    "text": "1",
    "bytes": b"1",
    "array": np.zeros(3),
    "huge": 10**400,
    "unprintable": 10**6000,
    "nan": float("nan"),
    "inf": np.float32("inf"),
    "complex": 1j,
    "list": [1.0],
    "dict": {},
    "unreadable": Unreadable(),
    "class": Unreadable,
    "nested": nested(5000),
}
"""No finite numbers."""
TRUTHS: dict[str, Any] = {
    "none": None,
    "text": "false",
    "array": np.array([True]),
    "number": 0.5,
    "unreadable": Unreadable(),
}
MESSAGES: dict[str, Any] = {
    "none": None,
    "text": "hello",
    "dict": {"role": "user", "content": "x"},
    "number": 3,
    "texts": ["hello"],
    "nothing in it": [{}],
    "no role": [{"content": "x"}],
    "role none": [{"role": None, "content": "x"}],
    "content none": [{"role": "user", "content": None}],
    "content number": [{"role": "user", "content": 5}],
    "content bytes": [{"role": "user", "content": b"x"}],
    "content parts": [{"role": "user", "content": [{"type": "audio", "audio": "x"}]}],
    "content part without text": [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    "no picture": [{"role": "user", "content": [{"type": "image", "image": "nowhere.png"}]}],
    "broken picture": [{"role": "user", "content": [{"type": "image", "image": b"x"}]}],
    "picture for a model of text": [{"role": "user", "content": [{"type": "image", "image": PICTURE}]}],
    "content unreadable": [{"role": "user", "content": Unreadable()}],
    "of the policy": [{"role": "assistant", "content": "x"}],
    "nested": nested(5000),
    "generator": (message for message in ()),
}
METRICS: dict[str, Any] = {"none": None, "list": [1.0], "text": {"a": "1"}, "number as name": {1: 1.0}, "nan": {"a": np.nan},
                           "unreadable": {"a": Unreadable()}}  # fmt: skip
RECORDS: dict[str, Any] = {"none": None, "tuple": ("x", 1.0, True, {}), "text": "x", "dict": {"reward": 1.0}, "class": Step,
                           "unreadable": Unreadable(), "module": asyncio}  # fmt: skip
RAISED: dict[str, type[BaseException]] = {
    error.__name__: error
    for error in (ValueError, StopIteration, StopAsyncIteration, GeneratorExit, SystemExit, asyncio.CancelledError, TimeoutError,
               RecursionError, MemoryError, UnreadableError, OwnBase)
}  # fmt: skip

ODD: dict[str, Callable[[], Any]] = {
    **{f"reward {name}": lambda v=v: Step(reward=v) for name, v in NUMBERS.items()},
    **{f"tool_s {name}": lambda v=v: Step(tool_s=v) for name, v in NUMBERS.items()},
    **{f"is_done {name}": lambda v=v: Step(is_done=v) for name, v in TRUTHS.items()},
    **{f"is_truncated {name}": lambda v=v: Step(is_truncated=v) for name, v in TRUTHS.items()},
    **{f"forgets {name}": lambda v=v: Step(forgets=v) for name, v in TRUTHS.items()},
    **{f"messages {name}": lambda v=v: Step(v) for name, v in MESSAGES.items()},
    **{f"metrics {name}": lambda v=v: Step(metrics=v) for name, v in METRICS.items()},
    **{f"step {name}": lambda v=v: v for name, v in RECORDS.items()},
}
"""What `step` does, by name."""
OPENINGS: dict[str, Callable[[], Any]] = {
    **{f"messages {name}": lambda v=v: Opening(v) for name, v in MESSAGES.items() if name != "of the policy"},
    **{
        f"tools {name}": lambda v=v: Opening(tools=v)
        for name, v in MESSAGES.items()
        if name in ("none", "text", "texts", "number")
    },
    **{
        f"stop_strings {name}": lambda v=v: Opening(stop_strings=v)
        for name, v in MESSAGES.items()
        if name in ("none", "text", "number")
    },
    **{f"start {name}": lambda v=v: v for name, v in RECORDS.items()},
}
"""What `start` does, by name."""


def _throw(kind: type[BaseException]) -> Any:
    raise kind("from the user")


class OddEnv:
    """An environment of which `at` ("start" or "step") returns or raises what `what` names; `is_async` as its
    methods."""

    def __init__(self, at: str, what: str) -> None:
        self._at, self._what = at, what

    def start(self, task: Prompt, seed: int) -> Any:
        return self._odd(OPENINGS) if self._at == "start" else Opening()

    def step(self, action: Action) -> Any:
        return self._odd(ODD) if self._at == "step" else Step(is_done=True)

    def close(self) -> None:
        if self._at == "close":
            self._odd({})

    def _odd(self, table: dict[str, Callable[[], Any]]) -> Any:
        if self._what in RAISED:
            _throw(RAISED[self._what])
        return table[self._what]()


class OddAsyncEnv:
    """The same with coroutines."""

    def __init__(self, at: str, what: str) -> None:
        self._env = OddEnv(at, what)

    async def start(self, task: Prompt, seed: int) -> Any:
        return self._env.start(task, seed)

    async def step(self, action: Action) -> Any:
        return self._env.step(action)

    async def close(self) -> None:
        self._env.close()
