"""An engine of each kind over one tiny model, and a server that speaks SGLang's interface."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import load_file

from braid.config.model import ModelConfig
from braid.config.rollout import VllmConfig
from braid.models.base import copy_weights
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy, load_tokenizer
from braid.rollout.engine import Request, RolloutEngine, Sampling
from braid.rollout.engines.native import NativeEngine
from braid.rollout.engines.sglang import SglangServer
from braid.rollout.engines.vllm.engine import VllmEngine
from braid.rollout.engines.vllm.options import EXTENSION, engine_arguments, environment
from braid.rollout.engines.vllm.server import VllmServer
from braid.weights.sender import SendOptions

MODEL = ModelConfig.model_validate(
    {
        "build": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 32,
            "max_positions": 128,
        }
    }
)
MAX_TOKENS = 128
SENDING = SendOptions(transport="shared_memory", bucket_bytes=2**14, timeout_s=60.0)


@contextmanager
def native(lm: CausalLM, folder: Path) -> Iterator[RolloutEngine]:
    yield native_engine(lm)


def native_engine(lm: CausalLM) -> NativeEngine:
    decode: Any = load_tokenizer(MODEL).decode
    return NativeEngine(lm, decode=decode, max_running=8, max_length=MAX_TOKENS)


@contextmanager
def vllm(lm: CausalLM, folder: Path) -> Iterator[RolloutEngine]:
    config = VllmConfig(max_running=8, log_stats=False)
    model = write_folder(lm, folder)
    engine = VllmEngine(
        engine_arguments(
            config,
            model=str(model),
            tokenizer=str(model),
            dtype="fp32",
            longest=MAX_TOKENS,
            trust_remote_code=False,
            on_gpu=False,
            seed=0,
        ),
        name="vLLM engine 0",
        log=folder / "engine.log",
        environment=environment(config),
        sending=SENDING,
        start_timeout_s=100.0,
        timeout_s=60.0,
    )
    with closing(engine):
        yield engine


@contextmanager
def vllm_server(lm: CausalLM, folder: Path) -> Iterator[RolloutEngine]:
    port = free_port()
    options = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--load-format": "dummy",
        "--max-model-len": str(MAX_TOKENS),
        "--max-num-seqs": "8",
        "--kv-cache-memory-bytes": str(2**24),
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--worker-extension-cls": EXTENSION,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(write_folder(lm, folder)), "--enforce-eager"]
    command += [word for pair in options.items() for word in pair]
    env = {**os.environ, **environment(VllmConfig()), "VLLM_SERVER_DEV_MODE": "1"}
    log = folder / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, server, log)
        engine = VllmServer(url, max_tokens=MAX_TOKENS, sending=SENDING, timeout_s=60.0)
        with closing(engine):
            yield engine
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)


@contextmanager
def sglang_server(lm: CausalLM, folder: Path) -> Iterator[RolloutEngine]:
    with SglangLike() as server:
        sending = SendOptions(transport="files", bucket_bytes=2**14, timeout_s=60.0, folder=str(folder))
        engine = SglangServer(server.url, max_tokens=MAX_TOKENS, sending=sending, timeout_s=60.0)
        with closing(engine):
            yield engine


class SglangLike:
    """A server with the part of SGLang's interface that the adapter uses, over a native engine of its own.

    `faults` says how the next requests to /generate fail: "500", "cut", "hang"."""

    def __init__(self) -> None:
        self._lm = load_policy(MODEL, temperature=1.0, seed=7, device=torch.device("cpu"))
        self._engine = native_engine(self._lm)
        self._loop = asyncio.new_event_loop()
        self._version = "default"
        self.faults: list[str] = []
        self.num_asked = 0
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
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

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
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

    def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            return {"success": False, "message": f"no weights in {body['model_path']}"}
        for file in files:
            copy_weights(load_file(file), self._lm.named_weights())
        self._version = body["weight_version"]
        return {"success": True, "message": "ok"}


class _Handler(BaseHTTPRequestHandler):
    owner: SglangLike
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({} if self.path == "/health" else None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        owner = self.owner
        if self.path == "/update_weights_from_disk":
            self._answer(owner.update_weights_from_disk(body))
        elif self.path == "/generate":
            owner.num_asked += 1
            fault = owner.faults.pop(0) if owner.faults else None
            if fault == "hang":
                time.sleep(3.0)
            if fault == "500":
                self.send_error(500, "out of memory")
            elif fault == "cut":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"text": ')
                self.close_connection = True
            else:
                self._answer(owner.generate(body))
        else:
            self._answer({"success": True} if "generation" in self.path else None)

    def _answer(self, body: dict[str, Any] | None) -> None:
        data = json.dumps(body).encode() if body is not None else b""
        try:
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


ENGINES: dict[str, Callable[[CausalLM, Path], AbstractContextManager[RolloutEngine]]] = {
    "native": native,
    "vllm": vllm,
    "vllm_server": vllm_server,
    "sglang_server": sglang_server,
}
"""Makers from the trainer's model, whose weights publications bring, and a folder to write to."""


def engine_params() -> list[Any]:
    """Each kind of engine as a parameter of tests; those that take long to start stay in one process of pytest."""
    has_vllm = find_spec("vllm") is not None
    slow = [
        pytest.mark.slow,
        pytest.mark.timeout(240),
        pytest.mark.skipif(not has_vllm, reason="vLLM is not installed: make vllm"),
    ]
    return [
        pytest.param(name, marks=[*slow, pytest.mark.xdist_group(name)] if name.startswith("vllm") else [])
        for name in ENGINES
    ]


def write_folder(lm: CausalLM, folder: Path) -> Path:
    """A model folder without weights."""
    model = folder / "model"
    lm.model.config.architectures = [type(lm.model).__name__]
    lm.model.config.save_pretrained(model)
    load_tokenizer(MODEL).save_pretrained(model)
    return model


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 150.0
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx2.HTTPError:
            time.sleep(0.3)
    raise AssertionError(f"the server did not come up: {log.read_text()[-3000:]}")
