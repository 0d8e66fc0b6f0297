"""A server with the part of SGLang's documented API that braid uses, on a native engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tests.native_engines import make_engine

from braid.models.base import copy_weights
from braid.models.causal_lm import CausalLM
from braid.rollout.engine import Request, Sampling
from braid.rollout.engines.base import InProcess


class SglangLike:
    """`asked` are the paths of all requests, in order."""

    def __init__(
        self,
        lm: CausalLM,
        decode: Callable[..., str],
        *,
        port: int = 0,
        max_running: int = 8,
    ) -> None:
        self._lm = lm
        self._engine = make_engine(lm, InProcess(decode), max_running=max_running)
        self._loop = asyncio.new_event_loop()
        self._version = "default"
        self._here, self._gone = {"weights", "kv_cache"}, set[str]()
        self.asked: list[str] = []
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> SglangLike:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def num_answers(self) -> int:
        return self.asked.count("/generate")

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        assert not self._gone, "asleep"
        p = body["sampling_params"]
        sampling = Sampling(
            max_new_tokens=p["max_new_tokens"],
            min_new_tokens=p["min_new_tokens"],
            temperature=p["temperature"] or 1.0,
            greedy=p["temperature"] == 0.0,
            repetition_penalty=p["repetition_penalty"],
            stop_strings=tuple(p["stop"]),
            stop_token_ids=tuple(p["stop_token_ids"]),
        )
        request = Request(tuple(body["input_ids"]), sampling, (p["sampling_seed"],))
        done = asyncio.run_coroutine_threadsafe(self._engine.generate(request), self._loop).result()
        pairs = zip(done.logprobs, done.token_ids, strict=True)
        return {
            "text": "",
            "meta_info": {
                "finish_reason": {"type": done.stop_reason},
                "weight_version": self._version,
                "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            },
        }

    def abort_request(self, body: dict[str, Any]) -> None:
        """End what runs with its tokens so far."""
        assert body == {"abort_all": True}

        async def abort() -> None:
            engine = self._engine
            for sequence in list(engine._running):
                engine._finish(sequence, "abort")  # type: ignore[arg-type]
                engine._release(sequence)
            while engine._waiting:
                engine._finish(engine._waiting.popleft(), "abort")  # type: ignore[arg-type]

        asyncio.run_coroutine_threadsafe(abort(), self._loop).result()

    def move(self, path: str, parts: list[str]) -> bool:
        """Whether these parts were where they are to be moved from; otherwise SGLang fails."""
        is_release = path == "/release_memory_occupation"
        source, target = (self._here, self._gone) if is_release else (self._gone, self._here)
        is_right = source.issuperset(parts)
        source.difference_update(parts)
        target.update(parts)
        return is_right

    def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        if "weights" in self._gone:
            return {"success": False, "message": "the weights have no memory"}
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files or body["load_format"] != "auto":
            return {"success": False, "message": f"no weights in {body['model_path']}"}
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        copy_weights(weights, self._lm.named_weights())
        self._version = body["weight_version"]
        return {"success": True, "message": "ok"}


class _Handler(BaseHTTPRequestHandler):
    owner: SglangLike
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.owner.asked.append(self.path)
        if self.path == "/update_weights_from_disk":
            self._answer(200, self.owner.update_weights_from_disk(body))
        elif self.path == "/generate":
            self._answer(200, self.owner.generate(body))
        elif self.path == "/abort_request":
            self._answer(200, self.owner.abort_request(body))
        elif self.path in ("/release_memory_occupation", "/resume_memory_occupation"):
            self._answer(200 if self.owner.move(self.path, body["tags"]) else 500)
        else:
            self._answer(404)

    def _answer(self, status: int, body: dict[str, Any] | None = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass
