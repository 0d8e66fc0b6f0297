"""Sampling one token per row from the logits of a vocabulary of 151,936, as a share of the product that makes
them.

Logits are those of random hidden states (256 features), nearly flat: the worst case for top-p. Times are CPU
time of one thread, the least of some repetitions; product and sampler take turns.

    python benchmarks/sampling.py [--rows 64] [--repeats 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from braid.cluster.memory import keep_freed_memory
from braid.models.linear import linear
from braid.rollout.engine import Sampling
from braid.rollout.engines.native.sampler import Sampler

VOCAB, HIDDEN = 151_936, 256
HOWS = {
    "plain": Sampling(max_new_tokens=1),
    "temperature 0.7": Sampling(max_new_tokens=1, temperature=0.7),
    "greedy": Sampling(max_new_tokens=1, greedy=True),
    "top-k 50": Sampling(max_new_tokens=1, top_k=50),
    "top-k 20, top-p 0.95": Sampling(max_new_tokens=1, top_k=20, top_p=0.95),
    "top-p 0.95": Sampling(max_new_tokens=1, top_p=0.95),
    "min-p 0.1": Sampling(max_new_tokens=1, min_p=0.1),
    "repetition penalty 1.1": Sampling(max_new_tokens=1, repetition_penalty=1.1),
}


def seconds(call: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    hidden, weight = torch.randn(args.rows, HIDDEN), torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5
    logits = linear(hidden, weight)
    samplers = {}
    for name, how in HOWS.items():
        samplers[name] = Sampler(args.rows, VOCAB, torch.device("cpu"))
        for slot in range(args.rows):
            samplers[name].put(slot, how, (0, slot), (1, 2, 3))
    best = dict.fromkeys(["product", *HOWS], float("inf"))
    for _ in range(args.repeats + 1):
        best["product"] = min(best["product"], seconds(lambda: linear(hidden, weight)))
        for name, sampler in samplers.items():
            best[name] = min(best[name], seconds(lambda one=sampler: one.sample(logits, 0)))
    print(f"{args.rows} rows, {VOCAB} tokens: product {best['product'] * 1e3:.1f} ms of CPU")
    for name in HOWS:
        print(f"  {name:24} {best[name] * 1e3:7.1f} ms, {best[name] / best['product']:6.2f} of the product")


if __name__ == "__main__":
    main()
