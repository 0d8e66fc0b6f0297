"""Peak memory of one optimizer step at a vocabulary of 151,936 and 8,192 packed tokens, on CPU.

A Qwen3 model with random weights takes a first step on a few tokens, so that weights and optimizer state are
there and touched. Then the kernel's peak of the process's resident memory is read over a whole step (forward,
loss with an entropy bonus, backward, clipping, AdamW) of 32 rows of 256 tokens; the figure is that peak less
the memory before the step and less the gradients, which the backend frees between steps. Each case has a
process of its own. The figure to reach is 1 GiB; the full logits alone would take 4.6 GiB, and as much again
for their gradient.

    python benchmarks/update_memory.py [--hidden 256 1024] [--layers 4] [--untied]

Linux only (reads /proc). Exits with 1 when a case misses the figure.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from braid.config.train import OptimizerConfig, TrainConfig
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.training.backend import Diagnostics, Loss
from braid.training.backends.single.backend import SingleBackend
from braid.types import Row

VOCAB, NUM_ROWS, ROW_TOKENS = 151_936, 32, 256
GOAL_BYTES = 2**30
CASES = ((8192, False), (2048, True))
"""Tokens of a micro-batch, and whether layers are recomputed in the backward pass."""


def measure(
    hidden: int, layers: int, tied: bool, micro_batch_tokens: int, checkpointing: bool
) -> tuple[int, int, float]:
    """Bytes of weights, gradients and optimizer state; bytes that the step takes above them at its peak;
    seconds."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        tie_word_embeddings=tied,
    )
    lm = CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    lm.set_gradient_checkpointing(checkpointing)
    train = TrainConfig(micro_batch_tokens=micro_batch_tokens, optimizer=OptimizerConfig(lr=1e-5))
    backend = SingleBackend(lm, train, total_steps=2, device=torch.device("cpu"))
    generator = np.random.default_rng(0)
    rows = [_row(generator) for _ in range(NUM_ROWS)]
    loss = Loss(frozenset({"logprobs", "entropy"}), _loss)
    backend.train(rows[:1], [1.0 / ROW_TOKENS], loss)
    num_bytes = sum(p.numel() * p.element_size() for p in lm.module.parameters())
    gc.collect()
    before = _reset_peak()
    start = time.perf_counter()
    backend.train(rows, [1.0 / (NUM_ROWS * ROW_TOKENS)] * NUM_ROWS, loss)
    above = _status("VmHWM") - before - num_bytes
    return 4 * num_bytes, above, time.perf_counter() - start


def _row(generator: np.random.Generator) -> Row:
    mask = np.ones(ROW_TOKENS, np.bool_)
    mask[0] = False
    return Row({"input_ids": generator.integers(VOCAB, size=ROW_TOKENS)}, mask, group=0, trajectory=0)


def _loss(outputs: dict[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Diagnostics]:
    assert batch.weights is not None
    return -((outputs["logprobs"] + 0.01 * outputs["entropy"]) * batch.weights).sum(), Diagnostics({})


def _reset_peak() -> int:
    """Set the process's peak of resident memory back to what it holds now, and return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--untied", action="store_true")
    args = parser.parse_args()
    print("hidden  micro-batch  recompute  weights+grads+optimizer  above them      time")
    best: dict[int, int] = {}
    for hidden in args.hidden:
        for micro_batch_tokens, checkpointing in CASES:
            case = (hidden, args.layers, not args.untied, micro_batch_tokens, checkpointing)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                held, above, seconds = process.submit(measure, *case).result()
            best[hidden] = min(above, best.get(hidden, above))
            print(
                f"{hidden:>6}  {micro_batch_tokens:>11}  {'yes' if checkpointing else 'no':>9}  "
                f"{held / 2**20:>19,.0f} MiB  {above / 2**20:>6,.0f} MiB  {seconds:>6.1f} s",
                flush=True,
            )
    sys.exit(any(above >= GOAL_BYTES for above in best.values()))


if __name__ == "__main__":
    main()
