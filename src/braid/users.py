"""What users' own code raises and returns: errors and values as text, and numbers and messages checked,
whatever they are.

Any of these may raise anything itself: an exception's `__str__`, a value's `__repr__`, `__float__` or
`__iter__`.
"""

from __future__ import annotations

import asyncio
import math
import re
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from braid.errors import BraidError, EnvError
from braid.images import content_of
from braid.types import Message

_OTHERS = [
    Path(__file__).parent,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
]
"""Folders of code that is not the user's: braid, Python's library, and installed packages."""
_LONGEST_SHOWN = 200
_MODULE_OF_FILE = re.compile(r"\bbraid_user_[0-9a-f]{12}_")
"""What the name of a module that functions.load_function makes of a file has before the file's name."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def described(error: BaseException) -> str:
    """Type, message, and the innermost file and line of the user's own code, if any was running."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")
    ]
    user_frames = [
        frame for frame in frames if not any(folder in Path(frame.filename).parents for folder in _OTHERS)
    ]
    where = f" ({Path(user_frames[-1].filename).name}:{user_frames[-1].lineno})" if user_frames else ""
    text = message_of(error)
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


def as_env_error(error: BaseException) -> BraidError:
    """The error itself if it is braid's, else an EnvError that names the line which raised it."""
    return error if isinstance(error, BraidError) else EnvError(described(error))


def message_of(error: BaseException) -> str:
    """Its text."""
    try:
        return _with_file_names(encodable(str(error)))
    except Exception as other:
        return f"its text cannot be shown: {type(other).__name__}"


def is_the_users(error: BaseException) -> bool:
    """Whether a coroutine of a user raised it, which runs in the current task: no cancellation or interrupt
    from outside."""
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no coroutine runs in this thread
            return True
        return task is not None and not task.cancelling()
    return not isinstance(error, KeyboardInterrupt) and (
        isinstance(error, Exception) or not type(error).__module__.startswith("braid.")
    )


def shown(value: object) -> str:
    """The value's `repr` and type, shortened."""
    try:
        text = _with_file_names(repr(value))
    except Exception as error:
        return f"a {type(value).__name__} without a readable form ({type(error).__name__})"
    text = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
    return f"{text} ({type(value).__name__})"


def _with_file_names(text: str) -> str:
    """The text with the modules of users' files named as the files."""
    return _MODULE_OF_FILE.sub("", text)


def finite_number(value: object, name: str = "") -> float:
    """A number, boolean, or NumPy or torch scalar as a float. Raises ValueError for all else, with `name` in
    front."""
    name = f"{name} " if name else ""
    try:
        number = float(value) if hasattr(value, "__float__") and not getattr(value, "ndim", 0) else None  # pyright: ignore[reportArgumentType]
    except Exception as error:
        raise ValueError(f"{name}{shown(value)}, which is not a number: {described(error)}") from error
    if number is None:
        raise ValueError(f"{name}{shown(value)}, not a number")
    if not math.isfinite(number):
        raise ValueError(f"{name}{number}, not a finite number")
    return number


def finite_numbers(values: object, name: str) -> dict[str, float]:
    """Numbers by name. Raises ValueError for all else."""
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{name} must be numbers by name, not {shown(values)}")
    return {key: finite_number(value, f"{name}[{key!r}] is") for key, value in values.items()}


def truth(value: object, name: str) -> bool:
    """True or False, also NumPy's. Raises ValueError for all else."""
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool", "bool_") and not getattr(value, "ndim", 0):
        return bool(value)
    raise ValueError(f"{name} must be True or False, not {shown(value)}")


def messages_of(values: object) -> Sequence[Message]:
    """Messages of users, with text that can be tokenized; a content may be a list of parts with images (see
    braid.images.content_of). Raises ValueError for all else."""
    form = 'messages must be a list of {"role": text, "content": text}'
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise ValueError(f"{form}, not {shown(values)}")
    out: list[Any] = []
    for value in values:
        if not isinstance(value, Mapping):
            raise ValueError(f"{form}; one is {shown(value)}")
        content = value.get("content")
        if not isinstance(value.get("role"), str):
            raise ValueError(f"{form}; the role of one is {shown(value.get('role'))}")
        if isinstance(content, list | tuple):
            content = [
                {**part, "text": encodable(part["text"])} if part["type"] == "text" else part
                for part in content_of(content, Path())
            ]
        elif not isinstance(content, str):
            raise ValueError(f"{form}; the content of one is {shown(content)}")
        out.append({**value, "content": encodable(content) if isinstance(content, str) else content})
    return out if isinstance(values, list) else tuple(out)


def encodable(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which no tokenizer and no UTF-8 can encode."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


def encodable_texts(value: Any) -> Any:
    """JSON data with `encodable` texts and names."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [encodable_texts(one) for one in value]
    if isinstance(value, dict):
        return {encodable(name): encodable_texts(one) for name, one in value.items()}
    return value
