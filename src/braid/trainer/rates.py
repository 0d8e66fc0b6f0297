"""Measures what a round's time depends on: steps, passes and sampling of the run's model, on this machine.

Models of more than four layers are measured with two and four layers of random weights, and extended in a
straight line to all. What is measured is the code that a run takes, at the run's lengths.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from braid.cluster.memory import keep_freed_memory
from braid.config.schema import RunConfig
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.models.cpu_kernels import cpu_kernels
from braid.models.loading import TORCH_DTYPES
from braid.models.roles import make_policy
from braid.plan import Plan
from braid.plan.disk import existing_folder
from braid.plan.memory import micro_batch
from braid.plan.repair import with_values
from braid.plan.sizes import is_worth_compiling
from braid.plan.times import Lengths, Rates
from braid.rollout.engine import Request, Sampling
from braid.training.backend import Diagnostics, Loss
from braid.training.backends.single.backend import SingleBackend
from braid.training.worker import device_of
from braid.types import Row

from .collectors import native_engine

_REPEATS = 3
_MOST_TOKENS = 4096
"""Tokens of a measured micro-batch: larger ones have the same rate."""
_FEW_STEPS, _MORE_STEPS = 4, 20
"""Decode steps of two measurements, whose difference is that of the steps between."""
_FILE_BYTES = 64 * 2**20
_DEPTHS = (2, 4)


def measure(config: RunConfig, plan: Plan, lengths: Lengths) -> Rates:
    """The rates of the config's model at these lengths. Raises ModelError if it cannot be built."""
    assert plan.model_size is not None, "the plan knows the model's size"
    keep_freed_memory()
    if config.run.num_threads != "auto":
        torch.set_num_threads(config.run.num_threads)
    full = plan.model_size.num_layers
    depths = (full,) if full <= max(_DEPTHS) else _DEPTHS
    probes: list[Rates] = []
    for depth in depths:
        with _of_depth(config, plan, depth) as shallow:
            probes.append(_probe(shallow, plan, lengths))
    return probes[0] if len(probes) == 1 else _extended(probes[0], probes[1], full)


def _extended(few: Rates, more: Rates, depth: int) -> Rates:
    """The rates of `depth` layers, on the line through those of two depths."""
    factor = (depth - _DEPTHS[0]) / (_DEPTHS[1] - _DEPTHS[0])
    values = {}
    for field in fields(Rates):
        low, high = getattr(few, field.name), getattr(more, field.name)
        is_of_layers = field.name.endswith("_s") and "bytes" not in field.name and low is not None
        values[field.name] = low + factor * (high - low) if is_of_layers else high
    return Rates(**values)


@contextmanager
def _of_depth(config: RunConfig, plan: Plan, depth: int) -> Iterator[RunConfig]:
    """The config with a model of as many layers, with random weights, and with the attention of the
    whole model, which depends on its size."""
    values: dict[str, str] = {}
    if config.model.attention == "auto" and plan.num_parameters is not None:
        is_compiled = device_of(config).type == "cpu" and is_worth_compiling(config, plan.num_parameters)
        values["model.attention"] = "compiled" if is_compiled and not cpu_kernels().why_not else "auto"
    if config.model.build is not None:
        yield with_values(config, {**values, "model.build.num_layers": depth})
        return
    model = config.model
    assert model.source is not None, "its size is known"
    with TemporaryDirectory() as folder:
        described = AutoConfig.from_pretrained(model.source, trust_remote_code=model.trust_remote_code)
        text = described.get_text_config(decoder=True)
        text.num_hidden_layers = depth
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:depth]
        AutoModelForCausalLM.from_config(
            described, dtype=TORCH_DTYPES[model.dtype], trust_remote_code=model.trust_remote_code
        ).save_pretrained(folder)
        yield with_values(config, {**values, "model.path": folder, "model.gguf": None})


def _probe(config: RunConfig, plan: Plan, lengths: Lengths) -> Rates:
    device = device_of(config)
    lm = make_policy(config, device)
    rows = _rows(config, plan, lengths, lm.vocab_size)
    half = rows[: len(rows) // 2]
    tokens = _tokens(half, lengths)
    train = config.train.model_copy(update={"micro_batch_tokens": tokens, "micro_batch_rows": None})
    backend = SingleBackend(lm, train, total_steps=100, device=device)
    loss = Loss(frozenset({"logprobs", "entropy"}), _loss)
    one = _seconds(lambda: backend.train(half, [1e-3] * len(half), loss))
    two = _seconds(lambda: backend.train(rows, [1e-3] * len(rows), loss))
    infer = _seconds(lambda: backend.infer(half, frozenset({"logprobs"})))
    del backend
    running = min(plan.max_concurrent or 1, plan.trajectories_per_round)
    sampling = _sampling_times(config, lengths, lm, running, plan.num_parameters)
    return Rates(
        train_token_s=(two - one) / tokens,
        step_s=max(0.0, 2 * one - two),
        infer_token_s=infer / tokens,
        running=running,
        prefill_s=sampling[0] if sampling else None,
        decode_step_s=sampling[1] if sampling else None,
        copy_bytes_per_s=_FILE_BYTES / _seconds(_copier()),
        disk_bytes_per_s=_disk_rate(existing_folder(config)),
    )


def _rows(config: RunConfig, plan: Plan, lengths: Lengths, vocab_size: int) -> list[Row]:
    """The rows of two micro-batches, in groups with a common prompt."""
    batch = micro_batch(config, plan, config.train)
    most = min(_MOST_TOKENS, batch.tokens if batch else _MOST_TOKENS)
    group = max(1, min(config.rollout.group_size, (most - lengths.prompt) // lengths.answer))
    num_groups = max(1, most // (lengths.prompt + group * lengths.answer))
    generator = np.random.default_rng(0)
    mask = np.arange(lengths.prompt + lengths.answer) >= lengths.prompt
    rows: list[Row] = []
    for number in range(2 * num_groups):
        prompt = generator.integers(vocab_size, size=lengths.prompt)
        for _ in range(group):
            ids = np.concatenate([prompt, generator.integers(vocab_size, size=lengths.answer)])
            rows.append(Row({"input_ids": ids}, mask, group=number, trajectory=len(rows)))
    return rows


def _tokens(rows: list[Row], lengths: Lengths) -> int:
    """Packed positions of rows, whose groups store their prompt once."""
    return len(rows) * lengths.answer + len({row.group for row in rows}) * lengths.prompt


def _loss(outputs: dict[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Diagnostics]:
    assert batch.weights is not None, "training batches have weights"
    return -((outputs["logprobs"] + 1e-3 * outputs["entropy"]) * batch.weights).sum(), Diagnostics({})


def _seconds(action: Callable[[], object]) -> float:
    """The median of several runs, after one that does not count."""
    taken: list[float] = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[1:]))


def _sampling_times(
    config: RunConfig, lengths: Lengths, lm: CausalLM, running: int, num_parameters: int | None
) -> tuple[float, float] | None:
    """Seconds of the prompts of `running` sequences, and of a decode step of them with half an answer in the
    cache; None if the engine runs in other processes."""
    if config.rollout.engine.is_served:
        return None
    lm.module.requires_grad_(False)
    engine, group = native_engine(config, str, lm, num_parameters=num_parameters), config.rollout.group_size
    generator = np.random.default_rng(1)

    def sample(prompt: int, new: int) -> float:
        prompts = [
            tuple(generator.integers(lm.vocab_size, size=prompt).tolist())
            for _ in range(-(-running // group))
        ]
        sampling = Sampling(max_new_tokens=new)
        requests = [Request(prompts[i // group], sampling, (0, i)) for i in range(running)]

        async def gather() -> None:
            await asyncio.gather(*(engine.generate(request) for request in requests))

        return _seconds(lambda: asyncio.run(gather()))

    few, more = min(_FEW_STEPS, lengths.answer), min(_MORE_STEPS, lengths.answer)
    with closing(engine):
        start = sample(lengths.prompt, few)
        if more == few:
            return 0.0, start / few
        middle = lengths.prompt + max(0, (lengths.answer - more) // 2)
        step = max(0.0, sample(middle, more) - sample(middle, few)) / (more - few)
    return max(0.0, start - few * step), step


def _copier() -> Callable[[], object]:
    source = torch.ones(_FILE_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _disk_rate(folder: Path) -> float:
    """Bytes per second of writing a file to the disk of a folder."""
    data = bytes(_FILE_BYTES)
    with TemporaryDirectory(dir=folder) as scratch:
        start = time.perf_counter()
        with open(Path(scratch, "file"), "wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        return _FILE_BYTES / (time.perf_counter() - start)
