"""A module for child processes: answers each request with what it asks for."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from braid.processes import connect, end_this_process

if __name__ == "__main__":
    channel, arguments = connect()
    for request in channel.messages():
        match request.decode().split(":"):
            case ["arguments"]:
                channel.reply(",".join(arguments).encode())
            case ["echo", text]:
                channel.reply(text.encode())
            case ["long", size]:
                channel.reply(bytes(int(size)))
            case ["start"]:  # a process that leaves the group and holds the connection
                code = f"import time; time.sleep(1000)  # {channel._socket.fileno()}"
                number = channel._socket.fileno()
                started = subprocess.Popen(
                    [sys.executable, "-c", code], pass_fds=[number], start_new_session=True
                )
                channel.reply(str(started.pid).encode())
            case ["hang"]:
                time.sleep(1000)
            case ["die"]:
                os._exit(3)
    end_this_process()
