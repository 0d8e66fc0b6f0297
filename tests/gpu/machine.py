"""Proves a machine with a CUDA GPU: ten steps, each in a separate process, and one JSON with the result or
the traceback of each, in less than nine minutes. Steps that measure run first and by themselves, others side
by side.

    PYTHONPATH=src:. python tests/gpu/machine.py --output gpu.json
    PYTHONPATH=src:. python tests/gpu/machine.py --device cpu --tiny      # the same code, small, without a GPU

Runs from a checkout with the packages of one process alone: requirements/gpu.lock lists those that a machine
with PyTorch and transformers lacks. Ray, datasets, gymnasium and the scorers' libraries are not needed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import multiprocessing
import os
import pkgutil
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from tests.native_engines import PLAIN, make_engine
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import braid
from braid.algorithms.aggregate import row_weights
from braid.algorithms.recipes import RECIPES
from braid.config.load import load_config
from braid.config.model import MlpSpec
from braid.config.train import TrainConfig
from braid.errors import EngineError
from braid.models.causal_lm import CausalLM
from braid.models.fused import fuse
from braid.models.mlp import MlpPolicy
from braid.plan.machine import count_gpus
from braid.rollout.drivers.simulators import SimulatorDriver
from braid.rollout.engine import Request, Sampling
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.simulators import SimulatorEngine
from braid.trainer import commands
from braid.training.backends.fsdp.backend import FsdpBackend
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss
from braid.types import Row, Status
from braid.weights.receiver import open_receiver
from braid.weights.sender import LinkedSender
from braid.weights.sending import SendOptions
from braid.weights.wire import Ticket

ROOT = Path(__file__).parents[2]
OPTIONAL = {
    "ray",
    "vllm",
    "sglang",
    "megatron",
    "mbridge",
    "deepspeed",
    "gymnasium",
    "liger_kernel",
    "httpx2",
    "jsonschema",
    "uvicorn",
    "mcp",
    "gem",
    "websockets",
    "reasoning_gym",
    "textarena",
    "textworld",
    "triton",
}
"""Packages that modules of some backend, engine or environment need."""
LIMIT_S = {"updates": 110, "decoding": 120, "offloading": 40, "tests": 140}
"""Time limit of a step; 120 s for those that run side by side."""
SIDE_BY_SIDE = ("imports", "transfers", "fsdp", "learning", "engines", "simulators")
"""Steps that measure neither time nor the device's memory."""


@dataclass(frozen=True)
class Machine:
    """`is_tiny`: models of a few thousand parameters, for a dry run."""

    device: torch.device
    is_tiny: bool
    output: Path | None = None

    def keep(self, result: dict[str, Any]) -> None:
        """Store what a step has found so far: an error or its time limit may end it."""
        if self.output is not None:
            self.output.write_text(json.dumps({"result": result}))

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of one call, after one to warm up."""
        call()
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def profile(self, call: Callable[[], object]) -> dict[str, Any]:
        """Share of a call's time in which the GPU computes, and its kernels by their share of the GPU's
        time."""
        if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
            return {}
        call()
        self.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            start = time.perf_counter()
            call()
            self.synchronize()
            seconds = time.perf_counter() - start
        kernels = [event for event in profiler.key_averages() if event.self_device_time_total]
        kernels.sort(key=lambda kernel: -kernel.self_device_time_total)
        busy = sum(kernel.self_device_time_total for kernel in kernels)
        return {
            "busy_share": round(busy / 1e6 / seconds, 3),
            "kernels": {
                kernel.key[:90]: [round(kernel.self_device_time_total / busy, 4), kernel.count]
                for kernel in kernels[:14]
            },
        }


SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 151_936},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151_936},
}  # fmt: skip
"""Of Qwen3 models with the sizes of Qwen2.5's, random weights and a real vocabulary."""


def language_model(machine: Machine, shape: str, dtype: torch.dtype) -> CausalLM:
    config = AutoConfig.for_model(
        "qwen3", **SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=8192
    )
    torch.manual_seed(0)
    with machine.device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    fuse(model)
    return CausalLM(model)


MICRO_BATCHES = {"tiny": (80,), "0.5B": (8192, 32_768), "1.5B": (8192, 16_384)}
"""Tokens of a micro-batch in an update."""


def ragged_rows(vocab_size: int, num_tokens: int, longest: int) -> list[Row]:
    """Rows of `longest` / 8 to `longest` tokens, `num_tokens` or a little less in all; a quarter of each is
    its prompt."""
    rng, rows, left = np.random.default_rng(0), list[Row](), num_tokens
    while left > longest:
        length = int(rng.integers(longest // 8, longest + 1))
        mask = np.arange(length) >= length // 4
        advantages = np.where(mask, rng.normal(), 0.0).astype(np.float32)
        ids = rng.integers(0, vocab_size, length)
        rows.append(
            Row({"input_ids": ids}, mask, len(rows) // 8, len(rows), fields={"advantages": advantages})
        )
        left -= length
    return rows


def token_weights(rows: list[Row]) -> list[float]:
    return row_weights(
        [row.num_tokens for row in rows], [row.group for row in rows], mode="token_mean", constant=None
    )


# -- the steps


def imports(machine: Machine) -> dict[str, Any]:
    """Import every module, and count GPUs by NVML and by torch."""
    missing: dict[str, list[str]] = {}
    for module in pkgutil.walk_packages(braid.__path__, "braid."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            package = (error.name or "").split(".")[0]
            if package not in OPTIONAL:
                raise
            missing.setdefault(package, []).append(module.name)
    gpus = {"nvml": count_gpus(), "torch": torch.cuda.device_count()}
    assert len(set(gpus.values())) == 1, gpus
    assert not machine.is_cuda or gpus["torch"], "no GPU"
    return {"missing": missing, "gpus": gpus}


def tests(machine: Machine) -> dict[str, Any]:
    """The tests of this folder; without a GPU all are skipped."""
    folder = Path(__file__).parent
    options = ["-q", "-rf", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    # warnings of other versions of torch are no errors
    command = [sys.executable, "-m", "pytest", *options, "-W", "default", str(folder)]
    done = subprocess.run(
        command, check=False, cwd=ROOT, text=True, capture_output=True, timeout=LIMIT_S["tests"] - 10
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    return {"summary": done.stdout.splitlines()[-1]}


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"embed": (900, 401), "norm": (64,), "head": (3000, 700)}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


_ANSWER_S = 180.0
"""Longest wait for the other process, whose imports take long on a loaded machine."""


def _send(machine: Machine, ticket_to: Any, versions: int) -> None:
    """Send the tensors some times, the last time damaged."""
    transport = "cuda_ipc" if machine.is_cuda else "shared_memory"
    options = SendOptions(transport, bucket_bytes=2**20, timeout_s=_ANSWER_S, device=machine.device)
    sender = LinkedSender(["a"], options)
    ticket_to.put(sender.ticket.as_dict())
    weights = {name: tensor.to(machine.device) for name, tensor in _tensors().items()}
    for version in range(versions):
        if version == versions - 1:
            assert sender._link is not None
            transfer = sender._link.transfer

            def transfer_damaged(parts: Any, deadline: float, transfer: Any = transfer) -> None:
                parts = [part.clone() for part in parts]
                parts[0][0] ^= 4
                transfer(parts, deadline)

            sender._link.transfer = transfer_damaged  # type: ignore[method-assign]
        try:
            sender.send(version, weights.items())
        except EngineError:
            assert version == versions - 1, "only the damaged version is refused"
            break
    else:
        raise AssertionError("the damaged version was accepted")
    sender.close()


def _receive(machine: Machine, ticket_from: Any, versions: int) -> str:
    """Receive what `_send` sends; returns the error of the damaged version."""
    ticket = Ticket(**ticket_from.get(timeout=_ANSWER_S))
    receiver = open_receiver(ticket, engine="a", timeout_s=_ANSWER_S, device=machine.device)
    expected = _tensors()
    for version in range(versions - 1):
        for name, tensor in receiver.receive(version):
            assert tensor.device.type == machine.device.type, name
            assert torch.equal(tensor.cpu(), expected[name]), name
    try:
        for _ in receiver.receive(versions - 1):
            pass
    except EngineError as error:
        receiver.close()
        return str(error)
    raise AssertionError("the damaged version was accepted")


def _other_process(machine: Machine, out: Any, back: Any, errors: Any) -> None:
    errors.put(_receive(machine, out, 3))
    _send(machine, back, 3)


def transfers(machine: Machine) -> dict[str, Any]:
    """Weights between two processes on one device, in both directions, damage noticed; a group of one
    rank."""
    context = multiprocessing.get_context("spawn")
    out, back, errors = context.Queue(), context.Queue(), context.Queue()
    other = context.Process(target=_other_process, args=(machine, out, back, errors))
    other.start()
    _send(machine, out, 3)
    damage = [errors.get(timeout=_ANSWER_S), _receive(machine, back, 3)]
    other.join(_ANSWER_S)
    assert other.exitcode == 0, other.exitcode
    with one_rank(machine):
        total = torch.ones(4, device=machine.device)
        dist.all_reduce(total)
        assert total.sum().item() == 4
    return {"damage": damage, "group": "nccl" if machine.is_cuda else "gloo"}


@contextmanager
def one_rank(machine: Machine) -> Iterator[None]:
    backend = "nccl" if machine.is_cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


FSDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "cpu_offload": {"backend": {"cpu_offload": True}},
    "bf16": {"backend": {"param_dtype": "bf16"}},
    "autocast": {"autocast": "bf16"},
}


def fsdp(machine: Machine) -> dict[str, Any]:
    """Both versions of FSDP on one rank: train, offload and back, save and restore; losses against one
    process."""
    shape, results = "tiny", {}
    rows = ragged_rows(SHAPES[shape]["vocab_size"], 600, 80)
    weights, loss = token_weights(rows), policy_loss(RECIPES["grpo"])
    offload = {"weights": True, "optimizer": True}

    def config(kind: str, **keys: Any) -> TrainConfig:
        return TrainConfig.model_validate(
            {"autocast": "none", "optimizer": {"lr": 1e-3}, "offload": offload}
            | keys
            | {"backend": {"kind": kind, **keys.get("backend", {})}}
        )

    def losses(backend: Any, *spare: Row, is_offloaded: bool = False) -> list[float]:
        is_pinned = machine.is_cuda and not is_offloaded
        made = []
        for _ in range(3):
            backend.to_host()
            held = [tensor for _, tensor in getattr(backend, "_own_tensors", backend.named_weights)()]
            held = [t.to_local() if isinstance(t, DTensor) else t for t in held]
            # FSDP's own offload leaves buffers on the device
            kept = [t for t in held if t.device.type != "cpu" or t.is_pinned() < is_pinned]
            assert not kept or (is_offloaded and sum(t.nbytes for t in kept) < 1024), [t.shape for t in kept]
            backend.to_device()
            made.append(backend.train(rows, weights, loss, *spare).grad_norm)
        return made

    single = SingleBackend(
        language_model(machine, shape, torch.float32), config("single"), total_steps=9, device=machine.device
    )
    expected = losses(single)
    with one_rank(machine), tempfile.TemporaryDirectory() as folder:
        for kind in ("fsdp2", "fsdp"):
            for name, keys in FSDP.items():
                if (kind, name) == ("fsdp", "cpu_offload") and not machine.is_cuda:
                    continue  # PyTorch pins the memory, which needs a GPU
                model = language_model(machine, shape, torch.float32)
                backend = FsdpBackend(model, config(kind, **keys), total_steps=9, device=machine.device)
                norms = losses(backend, rows[0], is_offloaded=name == "cpu_offload")
                np.testing.assert_allclose(
                    norms, expected, rtol=0.05 if name in ("bf16", "autocast") else 1e-3
                )
                place = f"{folder}/{kind} {name}"
                Path(place).mkdir()
                saved = backend.save(place)
                after = backend.train(rows, weights, loss, rows[0]).loss
                backend.restore(saved.state, place)
                assert backend.train(rows, weights, loss, rows[0]).loss == after or machine.is_cuda
                results[f"{kind} {name}"] = norms
                machine.keep(results)
    return {"single": expected, **results}


def learning(machine: Machine) -> dict[str, Any]:
    """Thirty GRPO rounds of a small model in fp32 and bf16: the reward rises, and sampler and trainer
    agree."""
    rounds = 3 if machine.is_tiny else 30
    return {dtype: _train(machine, {"model": {"dtype": dtype}}, rounds) for dtype in ("fp32", "bf16")}


LETTERS = "abcdefgh"


def _train(machine: Machine, changes: dict[str, dict[str, Any]], rounds: int) -> dict[str, Any]:
    """A run that learns to repeat a letter; returns its first and last rewards and the largest gap."""
    build = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1,
             "head_dim": 32, "characters": LETTERS}  # fmt: skip
    config: dict[str, dict[str, Any]] = {
        "run": {"max_rounds": rounds, "device": machine.device.type, "output_dir": "runs"},
        "model": {"build": build},
        "data": {"train": [{"kind": "file", "name": "letters", "path": "letters.jsonl"}]},
        "reward": {"parts": [{"kind": "exact"}]},
        "rollout": {"prompts_per_round": 8, "group_size": 16, "sampling": {"max_new_tokens": 2}},
        "train": {"optimizer": {"lr": 5e-3}},
        "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 0},
    }
    for section, keys in changes.items():
        config[section] = {**config.get(section, {}), **keys}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        lines = [json.dumps({"prompt": letter, "answer": letter}) + "\n" for letter in LETTERS]
        (place / "letters.jsonl").write_text("".join(lines))
        (place / "run.yaml").write_text(yaml.safe_dump(config))
        outcome = commands.train(load_config(place / "run.yaml"))
        text = (outcome.run_dir / "metrics.jsonl").read_text()
    done = [line for line in map(json.loads, text.splitlines()) if "reward/mean" in line]
    rewards = [line["reward/mean"] for line in done]
    gap = max(line.get("policy/logprob_mismatch_max", 0.0) for line in done)
    first, last = float(np.mean(rewards[:3])), float(np.mean(rewards[-3:]))
    assert rounds < 30 or last > first + 0.2, f"the reward went from {first:.2f} to {last:.2f}"
    assert gap < 0.5, f"log-probs of sampler and trainer differ by {gap:.2f} nats"
    return {"first_reward": first, "last_reward": last, "logprob_gap_nats": gap}


def updates(machine: Machine) -> dict[str, Any]:
    """Rate of an update as a share of a matrix product's, and its peak memory, with each attention kernel."""
    num_tokens, longest = (600, 80) if machine.is_tiny else (65_536, 4096)
    dtype, results = torch.bfloat16, dict[str, Any]()
    side = 256 if machine.is_tiny else 8192
    left, right = (torch.randn(side, side, dtype=dtype, device=machine.device) for _ in range(2))
    ceiling = 2 * side**3 / machine.seconds(lambda: left @ right)
    for shape in ("tiny",) if machine.is_tiny else ("0.5B", "1.5B"):
        lm = language_model(machine, shape, torch.float32)
        rows = ragged_rows(lm.vocab_size, num_tokens, longest)
        weights = token_weights(rows)
        flops = lm.flops([len(row) for row in rows], sum(row.num_tokens for row in rows)).training
        for kernel, size in product(("auto", "sdpa"), MICRO_BATCHES[shape]):
            if kernel != "auto" and not machine.is_cuda:
                continue
            lm.attention = "auto" if kernel == "auto" else "sdpa"
            keys = {"autocast": "bf16", "optimizer": {"lr": 1e-5}, "micro_batch_tokens": size}
            config = TrainConfig.model_validate(keys)
            backend = SingleBackend(lm, config, total_steps=99, device=machine.device)
            if machine.is_cuda:
                torch.cuda.reset_peak_memory_stats()

            def step(b: Any = backend, r: Any = rows, w: Any = weights) -> object:
                return b.train(r, w, policy_loss(RECIPES["grpo"]))

            seconds = machine.seconds(step)
            results[f"{shape} {kernel} {size}"] = {
                "seconds": seconds,
                "tokens": sum(map(len, rows)),
                "share_of_product": flops / seconds / ceiling,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if machine.is_cuda else None,
                **(machine.profile(step) if kernel == "auto" else {}),
            }
            machine.keep({"product_tflops": ceiling / 1e12, **results})
            del step, backend
        del lm
    return {"product_tflops": ceiling / 1e12, **results}


ARITHMETICS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}
"""Dtype of the weights, and of autocast. The last is the default on GPUs."""


def decoding(machine: Machine) -> dict[str, Any]:
    """Tokens per second of the native engine as a share of what the memory's bandwidth allows."""
    lengths = (8, 8) if machine.is_tiny else (128, 256)  # of prompts and answers
    size = 2**20 if machine.is_tiny else 2**31
    source, target = (torch.empty(size, dtype=torch.uint8, device=machine.device) for _ in range(2))
    bandwidth = 2 * size / machine.seconds(lambda: target.copy_(source))
    results: dict[str, Any] = {"bandwidth_gb_per_s": bandwidth / 1e9}
    for shape in ("tiny",) if machine.is_tiny else ("0.5B", "1.5B"):
        for kind, (dtype, autocast) in ARITHMETICS.items():
            lm, width = language_model(machine, shape, dtype), (autocast or dtype).itemsize
            sizes = SHAPES[shape]
            per_token = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
            held = sum(p.numel() for p in lm.module.parameters()) * width
            for num in (2, 4) if machine.is_tiny else (32, 256):
                cache = num * per_token * width * (lengths[0] + lengths[1] / 2)
                bound = num * bandwidth / (held + cache)
                for graphs in (True, False) if machine.is_cuda and kind == "bfloat16" else (machine.is_cuda,):
                    rate = _decode(machine, lm, num, lengths, graphs=graphs, autocast=autocast)
                    name = f"{shape} {kind} {num}{' graphs' if graphs else ''}"
                    results[name] = {"tokens_per_s": rate, "share_of_bound": rate / bound}
                    machine.keep(results)
                if machine.is_cuda and kind == "bfloat16":
                    results[f"{shape} {kind} {num} profile"] = _profile(machine, lm, num, lengths)
                    machine.keep(results)
    return results


def _decode(
    machine: Machine,
    lm: CausalLM,
    num: int,
    lengths: tuple[int, int],
    *,
    graphs: bool,
    autocast: torch.dtype | None,
) -> float:
    """Tokens per second of `num` sequences."""
    if not graphs:
        lengths = lengths[0], lengths[1] // 4  # several times slower
    engine = _engine(machine, lm, num, InProcess(str, autocast), cuda_graphs=graphs)
    rate = num * lengths[1] / machine.seconds(lambda: _sample(engine, lm, num, lengths))
    engine.close()
    return rate


def _engine(
    machine: Machine, lm: CausalLM, num: int, run: InProcess = PLAIN, **settings: Any
) -> NativeEngine:
    """Of `num` sequences, compiled on GPUs."""
    compile = "always" if machine.is_cuda else "never"
    return make_engine(lm, run, max_running=num, compile=compile, prefix_caching=False, **settings)


def _sample(engine: NativeEngine, lm: CausalLM, num: int, lengths: tuple[int, int]) -> None:
    rng, (prompt, answer) = np.random.default_rng(0), lengths
    requests = [
        Request(tuple(rng.integers(0, lm.vocab_size, prompt).tolist()), Sampling(max_new_tokens=answer), (i,))
        for i in range(num)
    ]

    async def gather() -> None:
        await asyncio.gather(*(engine.generate(request) for request in requests))

    asyncio.run(gather())


def _profile(machine: Machine, lm: CausalLM, num: int, lengths: tuple[int, int]) -> dict[str, Any]:
    """Profile of the prefill and 32 decode steps, as Machine.profile returns it."""
    engine = _engine(machine, lm, num)
    profile = machine.profile(lambda: _sample(engine, lm, num, (lengths[0], 32)))
    engine.close()
    return profile


_FREE = "import torch; print(torch.cuda.mem_get_info()[0])"


def offloading(machine: Machine) -> dict[str, Any]:
    """After `to_host` a second process finds the memory of the weights and the optimizer free."""
    lm = language_model(machine, "tiny" if machine.is_tiny else "1.5B", torch.float32)
    config = TrainConfig.model_validate({"offload": {"weights": True, "optimizer": True}})
    backend = SingleBackend(lm, config, total_steps=9, device=machine.device)
    rows = ragged_rows(lm.vocab_size, 600, 80)
    backend.train(rows, token_weights(rows), policy_loss(RECIPES["grpo"]))

    def free() -> int:
        if not machine.is_cuda:
            return 0
        return int(subprocess.check_output([sys.executable, "-c", _FREE], text=True))

    before, weights = free(), backend.held_bytes().weights
    backend.to_host()
    freed = free() - before
    assert not machine.is_cuda or freed >= 0.95 * weights, f"{freed} bytes freed of {weights}"
    backend.to_device()
    return {"weights_bytes": weights, "freed_bytes": freed}


def engines(machine: Machine) -> dict[str, Any]:
    """Two rounds with each installed engine beside the trainer on its device: weight sync, sleep and wake."""
    results: dict[str, Any] = {}
    for engine in ("vllm", "sglang"):
        if find_spec(engine) is None:
            results[engine] = "not installed"
            continue
        rollout = {
            "engine": engine,
            "prompts_per_round": 4,
            "group_size": 4,
            "sampling": {"max_new_tokens": 2},
        }
        results[engine] = _train(
            machine, {"rollout": rollout, "train": {"offload": {"weights": True}}}, rounds=2
        )
    return results


def simulators(machine: Machine) -> dict[str, Any]:
    """Episodes of a batched simulator on the device: the policy gets tensors there, and acts as for one on
    the host."""
    try:
        vector = importlib.import_module("braid.envs.simulators.vector")
        base = importlib.import_module("braid.envs.simulators.base")
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        return {"gymnasium": "not installed"}
    places, played = set[str](), list[Any]()

    class Watched(MlpPolicy):
        def act(self, observations: dict[str, Any], uniforms: Any, temperature: Any = None) -> Any:
            places.update(values.device.type for values in observations.values())
            return super().act(observations, uniforms, temperature)

    for device in ("cpu", machine.device.type):
        places.clear()
        simulator = vector.VectorSimulator(
            str(ROOT / "tests/envs/on_device.py") + ":Drifting", 4, {"device": device}
        )
        policy = Watched(MlpSpec(channels=(4,), num_action_chunks=2), simulator.spaces, seed=0)
        policy.module.to(device)
        driver = SimulatorDriver(SimulatorEngine(simulator, policy, retries=0), seed=1)
        (prompt,) = base.reset_prompts("drifting", 1)
        played.append(asyncio.run(driver.group(prompt, 6, (0,))).trajectories)
        simulator.close()
        assert places == {device}, places
    for one, other in zip(*played, strict=True):
        assert (one.status, other.status) == (Status.FINISHED, Status.FINISHED)
        np.testing.assert_allclose(one.reward, other.reward, rtol=1e-3, atol=1e-3)
        assert all(isinstance(values, np.ndarray) for values in other.env_steps.observations.values())
    return {"episodes": len(played[1])}


STEPS = (updates, decoding, learning, imports, transfers, fsdp, engines, simulators, offloading, tests)


# -- running them


def run_step(step: Callable[[Machine], dict[str, Any]], arguments: list[str]) -> dict[str, Any]:
    """The result of a step in a separate process, or its traceback; a CUDA error ends no other step."""
    start = time.monotonic()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, *arguments, "--step", step.__name__, "--output", file.name]
        try:
            done = subprocess.run(
                command, check=False, text=True, capture_output=True, timeout=LIMIT_S.get(step.__name__, 120)
            )
            problem = {"error": f"exit {done.returncode}: {done.stderr[-4000:]}"} if done.returncode else {}
        except subprocess.TimeoutExpired as error:
            problem = {"error": f"not done after {error.timeout:g} s: {str(error.stderr or '')[-4000:]}"}
        text = Path(file.name).read_text()
    return {
        "seconds": round(time.monotonic() - start, 1),
        **(json.loads(text) if text else {}),
        **problem,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of a few thousand parameters")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    names = [step.__name__ for step in STEPS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="STEP", help=", ".join(names)
    )
    parser.add_argument("--step", choices=names, help="this step alone, in this process")
    args = parser.parse_args()
    if args.step is not None:
        warnings.simplefilter("default")
        (step,) = (step for step in STEPS if step.__name__ == args.step)
        machine = Machine(torch.device(args.device), args.tiny, args.output)
        try:
            result: dict[str, Any] = {"result": step(machine)}
        except BaseException:
            text = args.output.read_text() if args.output.exists() else ""
            result = {**(json.loads(text) if text else {}), "error": traceback.format_exc()}
        args.output.write_text(json.dumps(result))
        return 0
    arguments = ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    report: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "steps": {},
    }
    chosen = [step for step in STEPS if step.__name__ in args.only]
    alone, together = ([s for s in chosen if (s.__name__ in SIDE_BY_SIDE) == kind] for kind in (False, True))
    num_together = max(1, min(len(together), (os.cpu_count() or 1) // 2))
    for steps, num in ((alone, 1), (together, num_together)):
        with ThreadPoolExecutor(num) as pool:
            for step, outcome in zip(steps, pool.map(lambda s: run_step(s, arguments), steps), strict=True):
                report["steps"][step.__name__] = outcome
                args.output.write_text(json.dumps(report, indent=1))
                last = outcome["error"].strip().splitlines()[-1] if "error" in outcome else "ok"
                sys.stdout.write(f"{step.__name__:12} {outcome['seconds']:6.1f} s  {last}\n")
                sys.stdout.flush()
    return int(any("error" in outcome for outcome in report["steps"].values()))


if __name__ == "__main__":
    sys.exit(main())
