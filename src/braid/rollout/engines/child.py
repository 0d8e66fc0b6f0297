"""A process that an engine runs in: started with a log, ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from braid.runtime.lifeline import at_end, give_up
from braid.runtime.processes import kill_group

from .guard import FOLDER

_END_S = 10.0
"""How long an ended process may take to be gone."""
_LAST_LINES = 12


class Child:
    """It leads a process group of its own, so that Ctrl-C reaches only the controller, and so that all of it can be ended
    together."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        folder: Path | None = None,
    ) -> None:
        """`environment` is laid over this process's own. What the process writes is added to `log`. It has to end by itself when
        this one dies (guard.end_group); one that was made with `pass_fds` sees that by what it was given, others get a guard
        that does. `folder` is removed with it."""
        self.log, self._folder = log, folder
        if folder is not None:
            environment = {**environment, FOLDER: str(folder)}
        guard = [] if pass_fds else [sys.executable, "-m", "braid.rollout.engines.guard"]
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch(mode=0o600)  # what an engine says may hold what it was given
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [*guard, *command],
                pass_fds=pass_fds,
                stdin=subprocess.PIPE if guard else subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._is_ended = False
        self._forget = at_end(self.end)

    def watch(self, name: str) -> None:
        """From here on, have the run end when this does unasked, also while nothing is asked of it. `name` is the engine's."""

        def wait() -> None:
            self._process.wait()
            if not self._is_ended:
                give_up(f"{name} ended {self.how_it_ended()}")

        threading.Thread(target=wait, name=f"{name} watch", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def how_it_ended(self) -> str:
        """After a while for it to end: "killed by SIGKILL" or "exit status 1", with the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.returncode
        if code is None:
            how = "its pipe was closed"
        else:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"({how}). {self.last_words()}"

    def last_words(self) -> str:
        """The end of its log, as a sentence of an error."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        except OSError:
            lines = []
        return f"The end of its log {self.log}:\n" + "\n".join(lines) if lines else f"Its log is {self.log}"

    def end(self) -> None:
        """Kill it and all that it started. Can be called twice."""
        if self._is_ended:  # its number may be another's by now
            return
        self._is_ended = True
        self._forget()
        if self._folder is not None:  # first, since this process may be ended at any moment
            shutil.rmtree(self._folder, ignore_errors=True)
        kill_group(self._process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        if self._process.stdin is not None:
            self._process.stdin.close()
