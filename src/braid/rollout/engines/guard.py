"""Runs a command that knows nothing of braid, and ends it with the process that asked for it, whatever becomes of that.

    python -m braid.rollout.engines.guard COMMAND...

The asking process holds the other end of this one's standard input. When that closes, the whole process group is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


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
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
