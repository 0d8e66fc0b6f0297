"""Programs of a model's making, run against tests: each test in a process of its own, with limits.

Runs inside the scoring process of isolated.py. A test's process has no environment variables, may write no file, and ends
with all that it started when its time is up. That bounds what a wild program does; it is no sandbox against a hostile one,
which can read files, use the network, and look for the word that proves a test passed.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Thread, Timer
from typing import Any

MAX_OUTPUT_BYTES = 1 << 20
"""A program that prints more has failed."""
_DIE_WITH_PARENT = 1
"""prctl's PR_SET_PDEATHSIG."""

Test = tuple[str, str, str]
"""Assertions to run after the program, or else (empty) what it reads and what it must print."""


def read_tests(value: Any) -> list[Test]:
    """The tests in a column: text with assertions, a list of such texts or of {input, output}, {inputs, outputs} with two
    lists, or any of these as JSON text. Raises ValueError for anything else."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        value = json.loads(value)
    match value:
        case str() if value.strip():
            return [(value, "", "")]
        case {"inputs": inputs, "outputs": outputs} if len(inputs) == len(outputs) > 0:
            return [_of_program(*pair) for pair in zip(inputs, outputs, strict=True)]
        case [_, *_]:
            return [_one(item) for item in value]
    raise ValueError(
        f"{str(value)[:80]!r} are no tests; write text with assertions, a list of such texts, a list of "
        "{input, output}, or {inputs, outputs} with two lists of one length"
    )


def _one(item: Any) -> Test:
    match item:
        case str():
            return item, "", ""
        case {"input": given, "output": expected}:
            return _of_program(given, expected)
    raise ValueError(f"{str(item)[:80]!r} is no test; write text with assertions, or {{input, output}}")


def _of_program(given: Any, expected: Any) -> Test:
    """Lines may come as a list."""
    given, expected = ("\n".join(x) if isinstance(x, list) else x for x in (given, expected))
    if not isinstance(given, str) or not isinstance(expected, str):
        raise ValueError(f"a test from {given!r} to {expected!r}: a program reads and prints text")
    return "", given, expected


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one test."""

    timeout_s: float
    memory_bytes: int


def load_code() -> Callable[[str, Sequence[Test], float, int, bool], float]:
    """`score(code, tests, timeout_s, memory_bytes, needs_all)`: the share of tests passed; with `needs_all` 1.0 or 0.0,
    and nothing runs after a failed one."""

    def score(
        code: str, tests: Sequence[Test], timeout_s: float, memory_bytes: int, needs_all: bool
    ) -> float:
        limits, passed = Limits(timeout_s, memory_bytes), 0
        for test in tests:
            is_passed = passes(code, test, limits)
            if needs_all and not is_passed:
                return 0.0
            passed += is_passed
        return passed / len(tests)

    return score


def passes(code: str, test: Test, limits: Limits) -> bool:
    """Whether the program passes one test. Assertions run in its own namespace, where `__name__` is not `__main__`; they
    have held when a word that only they could reach is the last that was printed."""
    assertions, given, expected = test
    if not assertions:
        output = _output_of(code, given, limits)
        return output is not None and _lines(output) == _lines(expected)
    word = secrets.token_hex(16)
    program = (
        f"n = {{'__name__': 'answer'}}\nexec({code!r}, n)\nexec({assertions!r}, n)\n"
        f"import os, sys\nsys.stdout.flush()\nos.write(1, b{word!r})\n"
    )
    output = _output_of(program, "", limits)
    return output is not None and output.endswith(word)


def _lines(text: str) -> list[str]:
    """Lines without blanks at their ends and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _output_of(program: str, given: str, limits: Limits) -> str | None:
    """What the program prints; None when it fails, prints too much, or takes too long."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-B", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                "PYTHONHASHSEED": "0",
                "PYTHONUTF8": "1",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            cwd="/",
            start_new_session=True,
            preexec_fn=partial(_limit, limits),  # noqa: PLW1509  # this process has one thread when it forks
        )
    except (OSError, ValueError):  # longer than an argument may be, or with a null character
        return None
    assert process.stdin, "it is a pipe"
    assert process.stdout, "it is a pipe"
    timer = Timer(limits.timeout_s, _kill, [process])
    feeder = Thread(target=_feed, args=(process, given.encode(errors="replace")))
    timer.start()
    feeder.start()
    try:
        output = process.stdout.read(MAX_OUTPUT_BYTES + 1)
        is_whole = len(output) <= MAX_OUTPUT_BYTES and process.wait() == 0
    finally:
        timer.cancel()
        _kill(process)
        process.wait()
        for thread in (timer, feeder):
            thread.join()
        process.stdout.close()
    return output.decode(errors="replace") if is_whole else None


def _limit(limits: Limits) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    seconds = math.ceil(limits.timeout_s) + 1  # of computing: for what the program may leave behind
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))


def _feed(process: subprocess.Popen[bytes], given: bytes) -> None:
    """Write the input; a program need not read it."""
    assert process.stdin, "it is a pipe"
    try:
        with process.stdin as stream:
            stream.write(given)
    except OSError:
        return


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The program and whatever it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
