"""The child process of an engine: started with a log file, killed together with its own children."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import IO

from braid.cluster.reports import give_up
from braid.processes import FOLDER, Channel, Child, end, guarded

_END_S = 10.0
"""Time limit for a process to exit after it has been killed or has closed its pipe."""
_LAST_LINES = 12
LONGEST_FOLDER = 64
"""Longest path of the folder of an engine's sockets: a socket path may have at most 107 characters."""


class LoggedProcess:
    """A child process that leads a separate process group, so that Ctrl-C reaches only the driver, and the
    whole group can be killed at once. Its output is in `log`; `folder`, which has its temporary files, is
    removed when it is stopped or this process has ended."""

    def __init__(
        self, process: subprocess.Popen[bytes], log: Path, folder: Path | None, child: Child | None = None
    ) -> None:
        """`child`, if the process is one of these, is kept until the end."""
        self.log, self._folder, self._process, self._child = log, folder, process, child
        self._is_ended = False

    @classmethod
    def of_module(
        cls, module: str, *, log: Path, environment: Mapping[str, str], folder: Path | None
    ) -> tuple[LoggedProcess, Channel]:
        """Start a module of braid, and return also the connection to it. `environment` extends this
        process's."""
        with _appended(log) as out:
            child = Child(module, stdout=out, stderr=subprocess.STDOUT, env=_with_folder(environment, folder))
        return cls(child.process, log, folder, child), child.channel

    @classmethod
    def of_command(
        cls, command: Sequence[str], *, log: Path, environment: Mapping[str, str], folder: Path | None = None
    ) -> LoggedProcess:
        """Start a command, guarded. `environment` extends this process's."""
        with _appended(log) as out:
            process = subprocess.Popen(
                guarded(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_with_folder(environment, folder)},
                start_new_session=True,
            )
        return cls(process, log, folder)

    def watch(self, name: str) -> None:
        """From now on, fail the run if the process exits unexpectedly, even while it is idle. `name` is the
        engine's."""

        def wait() -> None:
            self._process.wait()
            if not self._is_ended:
                give_up(f"{name} exited {self.how_it_ended()}")

        threading.Thread(target=wait, name=f"{name} watch", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether the process is still running."""
        return self._process.poll() is None

    def how_it_ended(self) -> str:
        """Wait for the process to exit, and describe how: "killed by SIGKILL" or "exit status 1", with the
        last log lines."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.returncode
        if code is None:
            how = "it closed its pipe"
        else:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"({how}). {self.last_words()}"

    def last_words(self) -> str:
        """The last log lines, formatted for an error message."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        except OSError:
            lines = []
        return f"Last lines of its log {self.log}:\n" + "\n".join(lines) if lines else f"Its log: {self.log}"

    def end(self) -> None:
        """Kill the process and its children. Idempotent."""
        if self._is_ended:  # the pid may have been reused
            return
        self._is_ended = True
        if self._folder is not None:  # first, since this process may be killed at any moment
            shutil.rmtree(self._folder, ignore_errors=True)
        end(self._process)
        if self._child is not None:  # now, while its number is known to be its own
            self._child.kill()


def _appended(log: Path) -> IO[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch(mode=0o600)  # an engine's log may contain secrets from its environment
    return log.open("ab")


def _with_folder(environment: Mapping[str, str], folder: Path | None) -> Mapping[str, str]:
    """The environment of a process whose temporary files are in `folder`."""
    if folder is None:
        return environment
    if len(str(folder)) < LONGEST_FOLDER:
        kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_{os.getuid()}")
        environment = {"TORCHINDUCTOR_CACHE_DIR": kept, **environment, "TMPDIR": str(folder)}
    return {**environment, FOLDER: str(folder)}
