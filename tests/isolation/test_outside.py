"""A program in a sandbox changes nothing outside, and does not run as root."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from braid.errors import ConfigError
from braid.isolation.sandbox import Confined, Deadline, Isolation, Limits, find_isolation
from braid.rewards.programs import _job

from .probes import OF_ALL_PROCESSES, PRELUDE, PROBES

SANDBOXES: tuple[Isolation, ...] = ("bubblewrap", "bubblewrap, user namespace", "sandlock")
READABLE = os.path.join(sys.prefix, "pyvenv.cfg")
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass
class Outside:
    """What probes try to reach, all of the user who runs the tests."""

    file: Path
    victim: subprocess.Popen[bytes]
    queue: str
    key: int

    def filled(self, code: str) -> str:
        names: dict[str, object] = {
            "FILE": str(self.file),
            "FOLDER": str(self.file.parent),
            "VICTIM": self.victim.pid,
            "READABLE": READABLE,
            "QUEUE": self.queue.encode(),
            "KEY": self.key,
        }
        return PRELUDE + "".join(f"{name} = {value!r}\n" for name, value in names.items()) + code

    def state(self) -> dict[str, object]:
        pid, state = self.victim.pid, {}
        for path in (self.file, self.file.parent):
            stat = path.stat()
            state[str(path)] = (stat.st_mode, stat.st_uid, stat.st_gid, stat.st_mtime_ns)
            state[f"{path}: attributes"] = os.listxattr(path)
        state["ended"] = self.victim.poll()
        if state["ended"] is None:
            limits = (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)
            state["limits"] = [resource.prlimit(pid, kind) for kind in limits]
            state["affinity"] = os.sched_getaffinity(pid)
            state["priority"] = os.getpriority(os.PRIO_PROCESS, pid)
            state["policy"] = os.sched_getscheduler(pid)
            state["I/O"] = _LIBC.syscall(252 if platform.machine() == "x86_64" else 31, 1, pid)
            state["out of memory"] = Path(f"/proc/{pid}/oom_score_adj").read_text()
        for name in (self.queue, f"{self.queue}-new"):
            state[name] = _has_queue(name)
        state["System V"] = _LIBC.msgget(self.key, 0) >= 0
        return state

    def remove_queues(self) -> None:
        for name in (self.queue, f"{self.queue}-new"):
            _LIBC.mq_unlink(name.encode())
        if (number := _LIBC.msgget(self.key, 0)) >= 0:
            _LIBC.msgctl(number, 0, None)


def _has_queue(name: str) -> bool:
    number = _LIBC.mq_open(name.encode(), os.O_RDONLY)
    if number >= 0:
        os.close(number)
    return number >= 0


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    file = tmp_path / "file"
    file.write_text("x")
    file.chmod(0o600)
    os.setxattr(file, "user.there", b"x")
    queue = f"/braid-test-{secrets.token_hex(8)}"
    os.close(_LIBC.mq_open(queue.encode(), os.O_RDWR | os.O_CREAT, 0o600, None))
    victim = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    resources = Outside(file, victim, queue, 1 + secrets.randbelow(2**31 - 2))
    try:
        yield resources
    finally:
        victim.kill()
        victim.wait()
        resources.remove_queues()


@pytest.fixture(
    params=[
        # what an ordinary user has, for whom these tests run too
        pytest.param(name, marks=[pytest.mark.slow] * ("namespace" in name and os.geteuid() == 0))
        for name in SANDBOXES
    ]
)
def sandbox(request: pytest.FixtureRequest) -> Isolation:
    isolation: Isolation = request.param
    if isolation == "bubblewrap" and os.geteuid() != 0:
        pytest.skip("as an ordinary user bubblewrap needs a user namespace")
    try:
        find_isolation(isolation.partition(",")[0])
        Confined("program", isolation, Limits(10.0, 1 << 29)).__exit__()
    except ConfigError as error:
        pytest.skip(str(error))
    return isolation


def _run(isolation: Isolation, code: str) -> str:
    """What a program prints, whether it fails or not."""
    guarded = f"try:\n    exec({code!r})\nexcept OSError as error:\n    print(error)\n"
    with Confined("program", isolation, Limits(30.0, 1 << 29)) as program:
        program.send(_job(guarded), is_last=True)
        output = program.read_all(Deadline(30.0), 1 << 20)
    return (output or b"").decode()


@pytest.mark.parametrize("name", PROBES)
def test_a_program_changes_nothing_outside(outside: Outside, sandbox: Isolation, name: str) -> None:
    before = outside.state()
    output = _run(sandbox, outside.filled(PROBES[name]))
    assert "reached" not in output
    assert outside.state() == before


@pytest.mark.parametrize("name", [name for name in PROBES if name not in OF_ALL_PROCESSES])
def test_a_probe_reaches_out_where_there_is_no_sandbox(outside: Outside, name: str) -> None:
    if "READABLE" in PROBES[name] and os.stat(READABLE).st_uid != os.geteuid():
        pytest.skip(f"{READABLE} belongs to another user, whom it protects without a sandbox")
    if os.getpriority(os.PRIO_PROCESS, 0) == 19 and "priority" in name:
        pytest.skip("the tests run at the lowest priority, which cannot be lowered")
    before = outside.state()
    code = outside.filled(PROBES[name])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    end_s = time.monotonic() + 20  # a signal takes a moment
    while (
        not (has_reached := "reached" in done.stdout or outside.state() != before)
        and time.monotonic() < end_s
    ):
        time.sleep(0.05)
    assert has_reached, done.stderr


@pytest.mark.parametrize("isolation", [*SANDBOXES, "process"])
def test_no_program_runs_as_root_or_with_capabilities(isolation: Isolation, tmp_path: Path) -> None:
    try:
        find_isolation(isolation.partition(",")[0])
    except ConfigError as error:
        pytest.skip(str(error))
    if isolation == "bubblewrap" and os.geteuid() != 0:
        pytest.skip("as an ordinary user bubblewrap needs a user namespace")
    code = (
        "import ctypes, os\ndata = (ctypes.c_uint32 * 6)()\n"
        "ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)\n"
        "print(*os.getresuid(), *os.getresgid(), *os.getgroups())\nprint(data[0] & ~4, data[1] & ~4, data[3], data[4])"
    )
    ids, capabilities = _run(isolation, code).splitlines()
    assert "0" not in ids.split()
    assert capabilities == "0 0 0 0"
