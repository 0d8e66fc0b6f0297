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

from braid.cluster.reports import give_up
from braid.processes import FOLDER, guarded, kill_group

_END_S = 10.0
"""Time limit for a process to exit after it has been killed or has closed its pipe."""
_LAST_LINES = 12
LONGEST_FOLDER = 64
"""Longest path of the folder of an engine's sockets: a socket path may have at most 107 characters."""


class Child:
    """A child process that leads a separate process group, so that Ctrl-C reaches only the driver, and
    the whole group can be killed at once."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        folder: Path | None = None,
    ) -> None:
        """Start `command`. `environment` extends this process's environment. Output is appended to `log`. The
        child must not outlive this process: with `pass_fds` it is a module of braid that calls
        processes.connect, otherwise it is guarded. `folder` has the child's temporary files, and is removed
        when the child is stopped or this process has ended."""
        self.log, self._folder = log, folder
        if folder is not None:
            environment = {**environment, FOLDER: str(folder)}
            if len(str(folder)) < LONGEST_FOLDER:
                kept = os.environ.get(
                    "TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_{os.getuid()}"
                )
                environment = {"TORCHINDUCTOR_CACHE_DIR": kept, **environment, "TMPDIR": str(folder)}
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch(mode=0o600)  # an engine's log may contain secrets from its environment
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command if pass_fds else guarded(command),
                pass_fds=pass_fds,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._is_ended = False

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
        kill_group(self._process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
