"""A small HTTP server with the chat completions API; each test sets its answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """What the server does with one request: after `wait` is set, the body with the status; cut: half of the
    body."""

    body: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    wait: threading.Event | None = None


def completion(text: str | None, reason: str = "stop") -> Answer:
    message = {"role": "assistant", "content": text}
    return Answer(json.dumps({"choices": [{"message": message, "finish_reason": reason}]}))


@dataclass
class JudgeServer:
    """`url` to put into the config; `requests` are (path, headers, JSON body) in order of arrival."""

    url: str
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)


@contextmanager
def serving(answer: Callable[[int, dict[str, Any]], Answer]) -> Iterator[JudgeServer]:
    """A server on a free port of this machine; `answer(number of the request, its body)` decides."""
    lock, released = threading.Lock(), threading.Event()
    connections: list[socket.socket] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            connections.append(self.connection)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(served.requests)
                served.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            reply = answer(number, body)
            if reply.wait is not None:
                while not reply.wait.wait(0.05) and not released.is_set():
                    pass
            data = reply.body.encode()
            self.send_response(reply.status)
            for name, value in {"content-length": str(len(data)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if reply.cut else data)
            self.close_connection = reply.cut

        def log_message(self, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = False

        def handle_error(self, *args: Any) -> None:
            """Clients of these tests close connections on purpose."""

    server = Server(("127.0.0.1", 0), Handler)
    served = JudgeServer(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served
    finally:
        released.set()
        server.shutdown()
        thread.join()
        for connection in connections:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)
        server.server_close()
