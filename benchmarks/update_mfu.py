"""The update's model FLOPs per second, as a share of what matrix products reach on the same machine.

A Qwen3 model of about 30M parameters takes GRPO steps on 8,192 packed tokens of ragged rows, through the
backend that a run uses. Counted are the matrix products of the model alone: 6 FLOPs per weight and token (2
forward, 4 backward; of the output head only at trained tokens), and 12 * L^2 * heads * head_dim / 2 per layer
and row of length L for causal attention. Embedding lookups, norms, rotary positions, activations, softmax,
the loss and AdamW count as nothing, but their time does.

The ceiling is the best rate of any of several matrix products of the same type in the same process: square
ones, and the model's own shapes forward and backward. Products and updates take turns, so that a machine that
slows down slows both; the fastest of each counts.

    python benchmarks/update_mfu.py [--dtypes fp32 bf16] [--repeats 5] [--profile]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from braid.algorithms.aggregate import row_weights
from braid.algorithms.recipes import RECIPES
from braid.cluster.memory import keep_freed_memory
from braid.config.model import BuildSpec, ModelConfig
from braid.config.train import OptimizerConfig, TrainConfig
from braid.models.causal_lm import CausalLM
from braid.models.linear import linear
from braid.models.loading import load_policy
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss
from braid.types import Row

SPEC = BuildSpec(
    architecture="qwen3",
    hidden_size=512,
    intermediate_size=1536,
    num_layers=10,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
)
TOKENS, SHORTEST, LONGEST, PROMPT = 8192, 64, 512, 32
AUTOCAST: dict[str, Literal["none", "bf16"]] = {"fp32": "none", "bf16": "bf16"}
DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def ragged_lengths() -> list[int]:
    """Lengths from SHORTEST to LONGEST that add up to TOKENS."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while (room := TOKENS - sum(lengths)) > LONGEST:
        lengths.append(int(rng.integers(SHORTEST, min(LONGEST, room - SHORTEST) + 1)))
    return [*lengths, room]


def make_rows(vocab_size: int) -> list[Row]:
    """Rows whose first PROMPT tokens are context."""
    rng = np.random.default_rng(1)
    rows = []
    for number, length in enumerate(ragged_lengths()):
        mask = np.arange(length) >= PROMPT
        advantages = np.where(mask, rng.normal(), 0.0).astype(np.float32)
        inputs = {"input_ids": rng.integers(0, vocab_size, length)}
        rows.append(Row(inputs, mask, number // 8, number, fields={"advantages": advantages}))
    return rows


def update_flops(lm: CausalLM, rows: list[Row]) -> float:
    """FLOPs of the matrix products of one update (braid.models.flops)."""
    return lm.flops([len(row) for row in rows], sum(row.num_tokens for row in rows)).training


def products() -> list[tuple[int, int, int]]:
    """(M, K, N) of the matrix products that the ceiling is taken from."""
    d, f = SPEC.hidden_size, SPEC.intermediate_size
    return [
        (2048, 2048, 2048),
        (4096, 4096, 4096),
        (TOKENS, d, f),
        (TOKENS, f, d),
        (TOKENS, d, d),
        (d, TOKENS, f),
    ]


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(dtype: str, micro_batch_tokens: int, repeats: int, profile: bool) -> None:
    """Print what one dtype reaches."""
    config = ModelConfig(build=SPEC, attention="compiled")  # as in a run of this size
    lm = load_policy(config, temperature=1.0, seed=0, device=torch.device("cpu"))
    train = TrainConfig(
        optimizer=OptimizerConfig(lr=1e-5), micro_batch_tokens=micro_batch_tokens, autocast=AUTOCAST[dtype]
    )
    backend = SingleBackend(lm, train, total_steps=1000, device=torch.device("cpu"))
    rows = make_rows(lm.vocab_size)
    weights = row_weights(
        [r.num_tokens for r in rows], [r.group for r in rows], mode="token_mean", constant=None
    )

    def update() -> None:
        backend.train(rows, weights, policy_loss(RECIPES["grpo"]))

    operands = {
        (m, k, n): (torch.randn(m, k, dtype=DTYPE[dtype]), torch.randn(n, k, dtype=DTYPE[dtype]))
        for m, k, n in products()
    }
    update()
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            update()
        print(
            trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=48)
        )
        return
    rates: dict[tuple[int, int, int], float] = dict.fromkeys(operands, 0.0)
    times = []
    for _ in range(repeats):
        for (m, k, n), (left, right) in operands.items():
            best = min(seconds(lambda a=left, b=right: linear(a, b)) for _ in range(3))
            rates[m, k, n] = max(rates[m, k, n], 2 * m * k * n / best)
        times.append(seconds(update))
    flops, (shape, ceiling) = update_flops(lm, rows), max(rates.items(), key=lambda item: item[1])
    numel = sum(p.numel() for p in lm.module.parameters())
    print(
        f"{dtype}: {numel / 1e6:.1f}M parameters, {TOKENS} tokens in {len(rows)} rows, "
        f"{torch.get_num_threads()} threads,"
    )
    print(f"  micro-batches of {micro_batch_tokens} tokens, {flops / 1e12:.2f} TFLOP an update")
    print(
        "  products, GFLOP/s: "
        + ", ".join(f"{'x'.join(map(str, s))} {r / 1e9:,.0f}" for s, r in rates.items())
    )
    rate = flops / min(times)
    print(f"  update {min(times):.2f} s (median {statistics.median(times):.2f}): {rate / 1e9:,.0f} GFLOP/s,")
    print(f"  {rate / ceiling:.0%} of the {ceiling / 1e9:,.0f} that {'x'.join(map(str, shape))} reaches")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=list(DTYPE))
    parser.add_argument("--micro-batch-tokens", type=int, default=TrainConfig().micro_batch_tokens)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(2)
    keep_freed_memory()
    for dtype in args.dtypes:
        measure(dtype, args.micro_batch_tokens, args.repeats, args.profile)


if __name__ == "__main__":
    main()
