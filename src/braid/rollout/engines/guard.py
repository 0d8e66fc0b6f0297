"""Runs an external command, and kills it when the parent process exits for any reason.

    python -m braid.rollout.engines.guard COMMAND...

The parent holds the other end of this process's standard input. When it closes, the whole process group is
killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

from braid.processes import kill_group

FOLDER = "BRAID_ENGINE_FOLDER"
"""Environment variable with the folder of an engine's process, which is removed with the process."""


def end_group() -> None:
    """Remove the engine's folder and kill this process with its process group. For use after the parent has
    died."""
    if folder := os.environ.get(FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
    kill_group(os.getpgrp())


def main(command: list[str]) -> None:
    """Run the command, and exit with its exit status or signal."""
    threading.Thread(target=_watch, daemon=True).start()
    code = subprocess.Popen(command, stdin=subprocess.DEVNULL).wait()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)  # sys.exit would wait for the watching thread


def _watch() -> None:
    while os.read(0, 1024):
        pass
    end_group()


if __name__ == "__main__":
    main(sys.argv[1:])
