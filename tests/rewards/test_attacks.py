"""No attack of a generated program on its reward, the trainer or the machine succeeds, in either sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from braid.config.reward import RewardConfig
from braid.errors import ConfigError
from braid.isolation.sandbox import find_isolation
from braid.rewards.scorer import build_scorer
from braid.types import Prompt, Trajectory

from .attacks import CALLS, FILES, PRINTS, attacks

NAMES = [*PRINTS, *CALLS, *FILES]


@dataclass
class Outcome:
    """What became of all attacks in one sandbox."""

    answers: dict[str, Trajectory]
    honest: list[Trajectory]
    files: list[str]
    scratch: list[str]
    secret: str
    processes: list[str]
    reached: list[str]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.xdist_group(name))  # all attacks are made once
        for name in ("bubblewrap", "sandlock")
    ],
)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    try:
        find_isolation(request.param)
    except ConfigError as error:
        pytest.skip(f"no {request.param} here: {error}")
    folder, scratch = tmp_path_factory.mktemp("outside"), tmp_path_factory.mktemp("scratch")
    folder.chmod(0o777)
    secret, mark = f"braid-secret-{secrets.token_hex(16)}", f"braid-mark-{secrets.token_hex(8)}"
    file = folder / "secret.txt"
    file.write_text(secret)
    file.chmod(0o666)
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    unix, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    unix_path = tempfile.mkdtemp() + "/s"
    unix.bind(unix_path)
    abstract.bind(f"\0{mark}")
    for listener in (unix, abstract):
        listener.listen()
    values = {
        "SECRET": secret,
        "MARK": mark,
        "FILE": str(file),
        "FOLDER": str(folder),
        "TCP": tcp.getsockname()[1],
        "UDP": udp.getsockname()[1],
        "UNIX": unix_path,
        "ABSTRACT": mark,
        "OF_FILES": {path: Path(path).read_text() for path in FILES},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRAID_SECRET", secret)
        patch.setenv("TMPDIR", str(scratch))
        answers, honest = _score(request.param, attacks(values))
    reached = []
    for name, listener in (("TCP", tcp), ("UDP", udp), ("Unix", unix), ("abstract", abstract)):
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            reached.append(f"{name}: {listener.recv(10) if name == 'UDP' else listener.accept()}")
        listener.close()
    left = [
        str(p) for d in ("/tmp", "/var/tmp", "/dev/shm", "/", "/usr", "/root") for p in Path(d).glob(mark)
    ]
    left += [str(p) for p in folder.iterdir() if p != file]
    kept = file.read_text() if file.exists() else ""
    return Outcome(
        answers, honest, left, [p.name for p in scratch.iterdir()], kept, _processes(mark), reached
    )


def _score(
    isolation: str, programs: dict[str, tuple[str, object]]
) -> tuple[dict[str, Trajectory], list[Trajectory]]:
    def answered(number: int, code: str, tests: object) -> Trajectory:
        prompt = Prompt(f"a:{number}", "a", (1,), ({"role": "user", "content": "task"},), {"tests": tests})
        return Trajectory(prompt, sample=0, text="", answer_text=f"```python\n{code}\n```")

    honest = [answered(i, "def f(x): return x", "assert f(3) == 3") for i in range(2)]
    answers = {
        name: answered(10 + i, code, tests) for i, (name, (code, tests)) in enumerate(programs.items())
    }
    part = {"kind": "code", "test_timeout_s": 1.0, "memory_bytes": 2**28}
    config = RewardConfig.model_validate({"parts": [part], "code": {"isolation": isolation}})
    scorer = build_scorer(config, base_dir=Path.cwd())
    try:
        asyncio.run(scorer.score([honest[0], *answers.values()]))
        slow = RewardConfig.model_validate(
            {"parts": [{"kind": "code", "test_timeout_s": 30}], "code": {"isolation": isolation}}
        )
        after = build_scorer(slow, base_dir=Path.cwd())
        asyncio.run(after.score([honest[1]]))
        after.close()
    finally:
        scorer.close()
    return answers, honest


def _processes(mark: str) -> list[str]:
    """The processes with the mark, after killed ones have exited."""
    for _ in range(100):
        paths = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if mark.encode() in file.read_bytes():
                    paths.append(str(file))
            except OSError:
                continue
        if not paths:
            return []
        time.sleep(0.05)
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_attack_is_a_failed_answer(outcome: Outcome, name: str) -> None:
    answer = outcome.answers[name]
    assert (answer.reason, answer.reward) == ("", 0.0)


@pytest.mark.slow
def test_attacks_leave_no_trace(outcome: Outcome) -> None:
    assert outcome.reached == []
    assert outcome.processes == []
    assert outcome.files == []
    assert outcome.scratch == []
    assert outcome.secret.startswith("braid-secret-")


@pytest.mark.slow
def test_an_honest_program_passes_after_them(outcome: Outcome) -> None:
    assert (outcome.honest[1].reason, outcome.honest[1].reward) == ("", 1.0)
