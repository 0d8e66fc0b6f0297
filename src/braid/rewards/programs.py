"""Runs model-written programs against tests, each test in new sandboxes (isolation.sandbox).

Runs inside a scoring process (isolated.py), the only one that knows the expected output. A program that reads
and prints receives its input, and its output is compared here. Assertions run in a second sandbox and access
the program through messages with plain values (isolation.confined), which are forwarded here: expected values
are never in the program's process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from braid.isolation.sandbox import Confined, Deadline, Isolation, Limits, adopt_orphans, kill_children
from braid.json_text import parse_json

from .function_calls import assertion_of, called_function, entry_to

MAX_OUTPUT_BYTES = 1 << 20
"""A program that prints more than this fails the test."""
MAX_MESSAGE_BYTES = 8 << 20
"""Maximum size of a message between a program and its tests."""


class ProgramTest(NamedTuple):
    """One test of a program."""

    assertions: str = ""
    input: str = ""
    """Standard input; used, as the output is, if the assertions are empty."""
    output: str = ""
    function: str | None = None
    """Function that the assertions call by function_calls.ENTRY."""


def read_tests(value: Any, metadata: Any = None) -> list[ProgramTest]:
    """Parse the tests in a column: text with assertions, a list of such texts or of {input, output}, a dict
    {inputs, outputs} of two lists, or any of these as JSON text; inputs and outputs are those of a program,
    or of a function: see function_calls, also for the row's `metadata`. Raises ValueError for anything
    else."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        value = parse_json(value)
    match value:
        case str() if value.strip():
            return [ProgramTest(value)]
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs) > 0:
            pairs = zip(inputs, outputs, strict=True)
            return [_test({**value, "input": i, "output": o}, metadata) for i, o in pairs]
        case [_, *_]:
            return [_test(item, metadata) for item in value]
    raise ValueError(
        f"{str(value)[:80]!r} are not tests; write a string with assertions, a list of such strings, a list "
        "of {input, output}, or {inputs, outputs} with two lists of equal length"
    )


def _test(item: Any, metadata: Any) -> ProgramTest:
    """One test: assertions; the input and output of a program, each text or a list of lines; or those of a
    function."""
    match item:
        case str():
            return ProgramTest(item)
        case {"input": stdin, "output": expected}:
            if (function := called_function(item, metadata)) is not None:
                return ProgramTest(assertion_of(stdin, expected), function=function)
            stdin, expected = (
                "\n".join(map(str, x)) if isinstance(x, list) else x for x in (stdin, expected)
            )
            if isinstance(stdin, str) and isinstance(expected, str):
                return ProgramTest(input=stdin, output=expected)
    raise ValueError(
        f"{str(item)[:80]!r} is not a test; write a string with assertions, or {{input, output}}, each a "
        "string or a list of lines"
    )


def load_code() -> Callable[[str, Sequence[ProgramTest], Isolation, float, int, bool], float]:
    """Return `score(code, tests, isolation, timeout_s, memory_bytes, needs_all)`: the fraction of tests
    passed. With `needs_all` it is 1.0 or 0.0, and scoring stops at the first failed test."""
    adopt_orphans()

    def score(
        code: str,
        tests: Sequence[ProgramTest],
        isolation: Isolation,
        timeout_s: float,
        memory_bytes: int,
        needs_all: bool,
    ) -> float:
        passed = 0
        for number, test in enumerate(tests, 1):
            try:
                passed += passes(code, test, isolation, Limits(timeout_s, memory_bytes))
            finally:
                kill_children()
            if needs_all and passed < number:
                return 0.0
        return passed / len(tests)

    return score


def passes(code: str, test: ProgramTest, isolation: Isolation, limits: Limits) -> bool:
    """Whether the program passes one test. Raises SandboxError if the sandbox fails, and ValueError for a
    test that cannot be run."""
    if test.assertions:
        code = code if test.function is None else entry_to(test.function, code)
        return _hold(test.assertions, code, isolation, limits)
    with Confined("program", isolation, limits) as program:
        program.send(_job(code) + test.input.encode(errors="replace"), is_last=True)
        output = program.read_all(Deadline(limits.timeout_s), MAX_OUTPUT_BYTES)
    return output is not None and _lines(output.decode(errors="replace")) == _lines(test.output)


def _hold(assertions: str, code: str, isolation: Isolation, limits: Limits) -> bool:
    with Confined("answer", isolation, limits) as program, Confined("tests", isolation, limits) as tests:
        deadline = Deadline(limits.timeout_s)
        program.send(_job(code))
        tests.send(_job(assertions))
        while (message := tests.read_line(deadline, MAX_MESSAGE_BYTES)) is not None:
            if not message.startswith(b"{"):
                break
            program.send(message + b"\n")
            reply = program.read_line(deadline, MAX_MESSAGE_BYTES)
            if reply is None:
                return False
            tests.send(reply + b"\n")
    if message is not None and message.startswith(b"unsupported "):
        raise ValueError(
            f"cannot run the tests: {message.removeprefix(b'unsupported ').decode(errors='replace')[:200]}"
        )
    return message == b"passed"


def _job(text: str) -> bytes:
    """Encode a job for isolation.confined: ten digits of length, then the text."""
    data = text.encode(errors="surrogatepass")
    return b"%010d" % len(data) + data


def _lines(text: str) -> list[str]:
    """The lines, without trailing whitespace and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
