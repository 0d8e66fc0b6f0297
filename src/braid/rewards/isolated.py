"""Scorers that read a model's answer as mathematics or run it as code, run as `python -m braid.rewards.isolated SCORER`.

They get a process of their own, because such an answer can keep sympy busy for hours or fill the memory, and because
some of reasoning-gym's scorers `eval` it. The process has limits on time, memory and files. It reads pickled requests
from the socket that is its standard input and answers each with JSON, so that nothing it sends can run anything
in the trainer. processes.py is the other end.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .programs import load_code

MEMORY_BYTES = 4 * 2**30
"""Address space that one such process may have."""
GRACE_S = 1.0
"""The process ends itself this long after a call's time limit, should nobody else have done so."""

MARKED_NUMBER = re.compile(r"####[ \t]*\$?([-+]?[\d,]*\.?\d+(?:/\d+)?)\.?[ \t]*$", re.MULTILINE)
"""An answer in the form of GSM8K, which ends its line; a heading such as `#### 1. Idea` is none."""
HEADER = struct.Struct("!I")
"""Before each message: its length in bytes."""


def load_math() -> Callable[[str, Sequence[str]], float]:
    """`score(text, references)`: 1.0 when the answer that math-verify finds in `text` equals one of the references. Of an
    answer with numbers marked by `####` the last one counts.

    Its own time limits are off: they work in a main thread only, and take a slow comparison for a wrong answer.
    """
    from math_verify import parse, verify

    parse = partial(parse, parsing_timeout=0, raise_on_error=True)

    def score(text: str, references: Sequence[str]) -> float:
        golds = [gold for reference in references for gold in _readings(reference, parse)]
        failure, marked = None, MARKED_NUMBER.findall(text)
        for answer in parse(f"${marked[-1]}$" if marked else text):
            for gold in golds:
                try:
                    if verify(gold, answer, timeout_seconds=0, raise_on_error=True):
                        return 1.0
                except Exception as error:  # another reading of the same answer may still compare
                    failure = error
        if failure is not None:
            raise failure
        return 0.0

    return score


def _readings(reference: str, parse: Callable[..., list[Any]]) -> list[Any]:
    """The reference as mathematics. What follows the last `####` counts (as in GSM8K); text without mark-up is
    read as one formula."""
    text = reference.rpartition("####")[2].strip()
    is_marked = any(mark in text for mark in ("$", r"\boxed", r"\(", r"\["))
    found = parse(text if is_marked else f"${text}$") or parse(text)
    if not found:
        raise ValueError(f"the reference answer {reference!r} is no mathematical expression")
    return found


def load_reasoning_gym() -> Callable[[str, dict[str, Any], str | None, Mapping[str, Any]], float]:
    """`score(generator, params, answer, entry)`: what the generator's scorer gives."""
    from reasoning_gym.factory import create_dataset

    cache: dict[tuple[str, str], Any] = {}

    def score(generator: str, params: dict[str, Any], answer: str | None, entry: Mapping[str, Any]) -> float:
        key = (generator, repr(params))
        if key not in cache:
            cache[key] = create_dataset(generator, size=1, seed=0, **params)
        return float(cache[key].score_answer(answer, entry))

    return score


SCORERS: dict[str, Callable[[], Callable[..., float]]] = {
    "math": load_math,
    "reasoning_gym": load_reasoning_gym,
    "code": load_code,
}


def main() -> None:
    """Serve requests until the other end closes the socket."""
    logging.disable()
    connection = socket.socket(fileno=0)
    try:
        score = SCORERS[sys.argv[1]]()
    except Exception as error:
        _send(connection, {"error": f"{type(error).__name__}: {error}"})
        return
    _limit_resources(may_write=sys.argv[1] == "code")
    _send(connection, {"ready": True})
    while (request := _receive(connection)) is not None:
        timeout_s, arguments = pickle.loads(request)
        signal.setitimer(
            signal.ITIMER_REAL, timeout_s + GRACE_S
        )  # the signal's default action ends the process
        try:
            reply: dict[str, Any] = {"value": score(*arguments)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, reply)


def _limit_resources(*, may_write: bool) -> None:
    """A process that only starts sandboxes may write: what runs in these has limits of its own."""
    limits = {resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_CORE: 0}
    if not may_write:
        limits[resource.RLIMIT_FSIZE] = 0
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _send(connection: socket.socket, reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode()
    connection.sendall(HEADER.pack(len(data)) + data)


def _receive(connection: socket.socket) -> bytes | None:
    header = _read(connection, HEADER.size)
    return None if header is None else _read(connection, HEADER.unpack(header)[0])


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    main()
