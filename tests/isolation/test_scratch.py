"""Folders of programs whose process was killed are removed by another process; others stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from braid.isolation import scratch

HOLD = """
import sys, time
from braid.isolation.scratch import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_a_folder_is_removed_once_its_process_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "other").mkdir()
    (tmp_path / "braid-code-link").symlink_to(tmp_path / "other")
    command, environment = [sys.executable, "-c", HOLD], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == tmp_path
        (folder / "file").write_text("x")
        os.utime(folder, (0, time.time() - 3600))
        scratch.remove_abandoned.__wrapped__()
        assert folder.is_dir(), "in use"
        process.send_signal(signal.SIGKILL)
    assert folder.is_dir()
    scratch.remove_abandoned.__wrapped__()
    assert not folder.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["braid-code-link", "other"]


def test_a_young_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "braid-code-young").mkdir()
    scratch.remove_abandoned.__wrapped__()
    assert (tmp_path / "braid-code-young").is_dir()
