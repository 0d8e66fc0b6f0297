"""Runs a command that knows nothing of braid, and ends it with the process that asked for it, whatever becomes of that.

    python -m braid.rollout.engines.guard COMMAND...

The asking process holds the other end of this one's standard input. When that closes, the whole process group is ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

from braid.runtime.processes import kill_group

FOLDER = "BRAID_ENGINE_FOLDER"
"""The variable that names the folder of an engine's process, which goes with it."""


def end_group() -> None:
    """End this process with its process group, when nobody is left who would."""
    if folder := os.environ.get(FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
    kill_group(os.getpgrp())


def main(command: list[str]) -> None:
    """Ends as the command does."""
    threading.Thread(target=_watch, daemon=True).start()
    code = subprocess.Popen(command, stdin=subprocess.DEVNULL).wait()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)  # the thread that watches would be waited for


def _watch() -> None:
    while os.read(0, 1024):
        pass
    end_group()


if __name__ == "__main__":
    main(sys.argv[1:])
