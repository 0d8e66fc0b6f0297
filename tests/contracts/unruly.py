"""A server that starts like vLLM or SGLang, accepts every weight sync, and answers requests with configured
faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from braid.rollout.engines.vllm.options import EXTENSION

Protocol = Literal["vllm", "sglang"]
TOKENS, LOGPROBS = [7, 8], [-0.5, -0.25]
GREETINGS: dict[str, Any] = {
    "/health": {},
    "/v1/models": {"data": [{"id": "m", "max_model_len": 128}]},
    "/get_world_size": {"world_size": 1},
    "/server_info": {
        "vllm_config": {
            "model_config": {"logprobs_mode": "processed_logprobs"},
            "parallel_config": {"worker_extension_cls": EXTENSION},
        }
    },
}
ANSWERS: dict[Protocol, Any] = {
    "vllm": {
        "choices": [
            {"finish_reason": "length", "token_ids": TOKENS, "logprobs": {"token_logprobs": LOGPROBS}},
        ]
    },
    "sglang": {
        "meta_info": {
            "finish_reason": {"type": "length"},
            "weight_version": "1",
            "output_token_logprobs": [[p, token, None] for p, token in zip(LOGPROBS, TOKENS, strict=True)],
        }
    },
}
_PATHS = ("/v1/completions", "/generate")


class UnrulyServer:
    """`faults` says how the next requests for tokens fail, `greeting` how everything else does: names of
    _Handler's methods, or statuses of HTTP. `answer` is changed for answers of another form."""

    def __init__(self, protocol: Protocol, port: int = 0) -> None:
        self.answer: Any = ANSWERS[protocol]
        self.faults: list[str] = []
        self.greeting: str | None = None
        self.num_asked = 0
        self.is_over = threading.Event()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._http.daemon_threads = True
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> UnrulyServer:
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: UnrulyServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve(self.owner.greeting, GREETINGS[self.path.partition("?")[0]])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        owner = self.owner
        if self.path.startswith(_PATHS):
            owner.num_asked += 1
            self._serve(owner.faults.pop(0) if owner.faults else None, owner.answer)
        else:
            self._serve(owner.greeting, {"success": True})

    def _serve(self, fault: str | None, answer: Any) -> None:
        act: Callable[[], None] | None = None if fault is None else getattr(self, f"_{fault}", None)
        try:
            if act is not None:
                self.close_connection = True
                act()
            elif fault is not None:
                self.send_error(int(fault), "not now")
            else:
                self._send(json.dumps(answer).encode())
        except OSError:  # the client has gone
            self.close_connection = True

    def _send(self, data: bytes, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)

    def _hang(self) -> None:
        self.owner.is_over.wait()

    def _drip(self) -> None:
        self._send(b" ", 10_000)
        while not self.owner.is_over.wait(0.05):
            self.wfile.write(b" ")

    def _cut(self) -> None:
        self._send(b'{"text": ', 1000)

    def _silent(self) -> None:
        """Close the connection without an answer."""

    def _noise(self) -> None:
        self.wfile.write(b"\x00\xff no HTTP at all\r\n\r\n")

    def _garbage(self) -> None:
        self._send(b"\xff\xfe{")

    def log_message(self, format: str, *args: Any) -> None:
        pass
