"""Tests about rights and files pass for an ordinary user too: root's rights hide what a check leaves open."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="the tests run as an ordinary user already"),
]

USER = 54321
AS_USER = """
set -e
held=$(mktemp -d)
for path in $REACHED; do mkdir -p $held$path; mount --bind $path $held$path; done
for folder in $CLOSED; do mount -t tmpfs -o mode=755 tmpfs $folder; done
for path in $REACHED; do mkdir -p $path; mount --bind $held$path $path; done
exec setpriv --reuid $TESTER --regid $TESTER --clear-groups --inh-caps=-all "$@"
"""
"""Runs a command as a user who has $REACHED, but nothing else in the $CLOSED folders of root."""
TESTS = Path(__file__).parents[1]
_RIGHTS = ("data/test_checked.py", "checkpoint/test_store.py", "report/test_run_dir.py")
"""Tests beside those of sandboxes in which rights matter: of files, folders and caches."""


@pytest.mark.parametrize(
    "files",
    [
        [
            "isolation",
            "faults",
            "rewards/test_code.py",
            "envs/test_python_tool.py",
            *_RIGHTS,
            "-m",
            "not slow",
        ],
        ["rewards/test_attacks.py", "--at-most", "2"],
    ],
    ids=lambda files: files[0],
)
def test_tests_pass_for_an_ordinary_user(files: list[str], home: Path) -> None:
    reached = {str(path) for path in (TESTS.parent, Path(sys.prefix), Path(sys.base_prefix))}
    closed = {str(folder) for path in reached if (folder := _first_closed(Path(path)))}
    within = {"REACHED": " ".join(sorted(reached)), "CLOSED": " ".join(sorted(closed)), "TESTER": str(USER)}
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--basetemp={home}/tests"]
    tests = [sys.executable, "-m", "pytest", *options, *files]
    # Caches and reports of root's.
    of_root = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "PYTEST_ADDOPTS"}
    environment = {name: value for name, value in os.environ.items() if name not in of_root}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", AS_USER, "sh", *tests],
        cwd=TESTS,
        env=environment | within | {"HOME": str(home), "TMPDIR": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"root may not mount here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 0


@pytest.fixture
def home() -> Iterator[Path]:
    """A home and temporary folder of the user; pytest's are closed to others than root."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, USER, USER)
        yield Path(folder)


def _first_closed(path: Path) -> Path | None:
    """The outermost folder above `path` that other users cannot pass."""
    above = [folder for folder in reversed(path.parents) if not folder.stat().st_mode & stat.S_IXOTH]
    return above[0] if above else None
