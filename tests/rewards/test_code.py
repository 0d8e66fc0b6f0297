"""Programs in answers, run against tests in processes of their own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braid.rewards.programs import read_tests
from braid.types import Trajectory

Answered = Callable[..., Trajectory]
Score = Callable[..., list[Trajectory]]

DOUBLE = "def double(x):\n    return 2 * x"


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
def test_a_wild_program_has_failed_and_harms_no_other(
    answered: Answered, score: Score, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setenv("BRAID_SECRET", "1")
    wild, tame = score(
        [
            answered(fenced(code), tests="assert True"),
            answered(fenced(DOUBLE), tests="assert double(1) == 2"),
        ],
        {"kind": "code", "test_timeout_s": 1.0, "memory_bytes": 2**29},
    )
    assert (wild.reason, wild.reward) == ("", 0.0)
    assert (tame.reason, tame.reward) == ("", 1.0)


def test_a_program_writes_no_file(answered: Answered, score: Score, tmp_path: Path) -> None:
    code = f"with open({str(tmp_path / 'file')!r}, 'w') as file:\n    file.write('x' * 10)"
    (scored,) = score([answered(fenced(code), tests="assert True")], {"kind": "code"})
    assert scored.reward == 0.0
    assert (tmp_path / "file").stat().st_size == 0


def test_what_a_program_started_ends_with_it(answered: Answered, score: Score, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # no file may be written, so the child tells its number through a pipe
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        f"    os.write(os.open({str(fifo)!r}, os.O_WRONLY), str(os.getpid()).encode())\n"
        "    time.sleep(1000)\n"
        "time.sleep(0.3)"
    )
    score([answered(fenced(code), tests="assert True")], {"kind": "code", "test_timeout_s": 1.0})
    child = int(os.read(reader, 100))
    os.close(reader)
    for _ in range(200):  # until the system has taken note
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child still runs")


@pytest.mark.parametrize(
    "tests", [None, "", [], 3, [3], {"inputs": ["1"], "outputs": []}, "[1", [{"input": "1"}]]
)
def test_tests_that_are_none_are_no_wrong_answer(answered: Answered, score: Score, tests: Any) -> None:
    (scored,) = score([answered(fenced(DOUBLE), tests=tests)], {"kind": "code"})
    assert scored.reward is None
    assert scored.reason.startswith("reward code: column 'tests': ")


def test_a_missing_column_of_tests_is_no_wrong_answer(answered: Answered, score: Score) -> None:
    (scored,) = score([answered(fenced(DOUBLE), cases="")], {"kind": "code"})
    assert scored.reason == (
        "reward code: the prompt has no column 'tests'; set reward.parts[0].tests_key to one of cases"
    )


def test_tests_may_be_json_text() -> None:
    tests = {"inputs": ["1"], "outputs": ["2"]}
    assert read_tests(json.dumps(tests)) == read_tests(tests) == [("", "1", "2")]
