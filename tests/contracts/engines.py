"""An engine of each kind over one tiny model."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx2
import pytest
import torch
from tests.leftovers import LIMIT_S
from tests.native_engines import make_engine
from tests.needs import WITH_VLLM

from braid.config.model import ModelConfig
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy, load_tokenizer
from braid.rollout.engine import RolloutEngine
from braid.rollout.engines.base import InProcess, Model, Process
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.sglang.server import SglangServer
from braid.rollout.engines.vllm.engine import VllmEngine
from braid.rollout.engines.vllm.kind import Vllm
from braid.rollout.engines.vllm.options import EXTENSION, engine_arguments, environment
from braid.rollout.engines.vllm.server import VllmServer
from braid.weights.sending import SendOptions

from .sglang_like import SglangLike

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
TORCHVISION: dict[str, str] = (
    {} if find_spec("torchvision") else {"PYTHONPATH": str(Path(__file__).parent / "torchvision_package")}
)
"""Where vLLM finds what it imports of torchvision, if that is not installed."""
SENDING = SendOptions(transport="shared_memory", bucket_bytes=2**14, timeout_s=LIMIT_S)


@contextmanager
def native(lm: CausalLM, folder: Path) -> Iterator[RolloutEngine]:
    yield native_engine(lm)


def native_engine(lm: CausalLM) -> NativeEngine:
    decode: Any = load_tokenizer(MODEL).decode
    return make_engine(lm, InProcess(decode), max_running=8)


def process_in(folder: Path, sending: SendOptions) -> Process:
    """A process on the CPU that logs to the folder."""
    return Process(
        folder / "engine.log",
        sending,
        start_timeout_s=LIMIT_S,
        timeout_s=LIMIT_S,
        folder=Path(mkdtemp(prefix=f"braid_engine_{os.getpid()}_")),
        on_gpu=False,
    )


@contextmanager
def vllm(lm: CausalLM, folder: Path, **options: Any) -> Iterator[VllmEngine]:
    config = Vllm.model_validate({"max_running": 8, "log_stats": False, **options})
    path = str(write_folder(lm, folder))
    model = Model(
        path,
        tokenizer=path,
        dtype="fp32",
        longest=MAX_TOKENS,
        trust_remote_code=False,
        sleeps=False,
        seed=0,
        vision=lm.vision,
    )
    engine = VllmEngine(
        engine_arguments(config, model, on_gpu=False),
        process_in(folder, SENDING),
        name=f"vLLM engine in {folder.name}",
        environment={**environment(config), **({} if lm.vision is None else TORCHVISION)},
        vision=lm.vision,
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
    log = folder / "server.log"
    temporary = mkdtemp(prefix=f"braid_engine_{os.getpid()}_")
    env = {**os.environ, **environment(Vllm()), "VLLM_SERVER_DEV_MODE": "1", "TMPDIR": temporary}
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, server, log)
        engine = VllmServer(url, max_tokens=MAX_TOKENS, sending=SENDING, timeout_s=LIMIT_S)
        with closing(engine):
            yield engine
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(LIMIT_S)
        shutil.rmtree(temporary)


@contextmanager
def sglang_server(lm: CausalLM, folder: Path) -> Iterator[RolloutEngine]:
    server_lm = load_policy(MODEL, temperature=1.0, seed=7, device=torch.device("cpu"))
    decode: Any = load_tokenizer(MODEL).decode
    with SglangLike(server_lm, decode) as server:
        sending = SendOptions(transport="files", bucket_bytes=2**14, timeout_s=LIMIT_S, folder=str(folder))
        engine = SglangServer(server.url, max_tokens=MAX_TOKENS, sending=sending, timeout_s=LIMIT_S)
        with closing(engine):
            yield engine


ENGINES: dict[str, Callable[[CausalLM, Path], AbstractContextManager[RolloutEngine]]] = {
    "native": native,
    "vllm": vllm,
    "vllm_server": vllm_server,
    "sglang_server": sglang_server,
}
"""Factories; they take the trainer's model, whose weights are synced later, and a folder to write to."""


def engine_params() -> list[Any]:
    """Each kind of engine as a parameter of tests; those that take long to start stay in one process of
    pytest."""
    marks = {
        name: [pytest.mark.slow, WITH_VLLM, pytest.mark.xdist_group(name)]
        for name in ENGINES
        if name.startswith("vllm")
    }
    marks["vllm_server"].append(pytest.mark.nightly)
    return [pytest.param(name, marks=marks.get(name, [])) for name in ENGINES]


def write_folder(lm: CausalLM, folder: Path) -> Path:
    """A model folder without weights."""
    model = folder / "model"
    lm.model.config.architectures = [type(lm.model).__name__]
    lm.model.config.save_pretrained(model)
    tokenizer = load_tokenizer(MODEL) if lm.vision is None else lm.vision.tokenizer
    tokenizer.save_pretrained(model)
    return model


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx2.HTTPError:
            time.sleep(0.3)
    raise AssertionError(f"the server did not come up: {log.read_text()[-3000:]}")
