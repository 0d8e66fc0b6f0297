"""An SGLang server owned by the run: started on this machine, reached over loopback, stopped with the run."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence

import httpx2

from braid.errors import EngineError
from braid.rollout.engine import Request
from braid.rollout.engines.base import Process
from braid.rollout.engines.child import LoggedProcess
from braid.rollout.engines.remote import Answer

from .server import SglangServer

_HOST = "127.0.0.1"
_POLL_S = 0.25
_ASK_S = 5.0
"""Time limit of a health check."""


class SglangEngine(SglangServer):
    """See SyncedEngine for the contract. The constructor waits until the server is up."""

    def __init__(self, arguments: Sequence[str], process: Process, *, name: str, max_tokens: int) -> None:
        """`arguments` are those of sglang.launch_server (options.server_arguments); `name` and `max_tokens`
        as in ServerEngine. Raises EngineError with the last log lines if the server exits or is not up in
        time."""
        with socket.create_server((_HOST, 0)) as free:
            port = free.getsockname()[1]
        address = ["--host", _HOST, "--port", str(port)]
        command = [sys.executable, "-m", "sglang.launch_server", *arguments, *address]
        self._process = LoggedProcess.of_command(
            command, log=process.log, environment={}, folder=process.folder
        )
        url = f"http://{_HOST}:{port}"
        try:
            self._wait_until_up(name, url, process.start_timeout_s)
        except BaseException:
            self._process.end()
            raise
        super().__init__(
            url, name=name, max_tokens=max_tokens, sending=process.sending, timeout_s=process.timeout_s
        )
        self._process.watch(name)

    async def _ask(self, request: Request, version: int) -> Answer:
        """See RemoteEngine. If the server has exited, the error says how."""
        try:
            return await super()._ask(request, version)
        except EngineError as error:
            if self._is_closed or self._process.is_running:
                raise
            raise EngineError(f"{self.name} exited {self._process.how_it_ended()}") from error

    def close(self) -> None:
        """See RolloutEngine. Stops the server and its child processes."""
        super().close()
        self._process.end()

    def _wait_until_up(self, name: str, url: str, start_timeout_s: float) -> None:
        deadline = time.monotonic() + start_timeout_s
        with httpx2.Client(base_url=url, timeout=min(_ASK_S, start_timeout_s), trust_env=False) as client:
            while not _is_healthy(client):
                if not self._process.is_running:
                    raise EngineError(f"{name} exited during startup {self._process.how_it_ended()}")
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{name} did not start within {start_timeout_s:g} s; raise cluster.start_timeout_s "
                        f"if it needs more time. {self._process.last_words()}"
                    )
                time.sleep(_POLL_S)
        if not self._process.is_running:  # another process answers on its port
            raise EngineError(f"{name} exited during startup {self._process.how_it_ended()}")


def _is_healthy(client: httpx2.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx2.HTTPError:
        return False
