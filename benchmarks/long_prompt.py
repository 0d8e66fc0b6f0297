"""One long prompt among short ones, in the native engine: how much longer the same requests take with it.

64 requests (prompts of 20 to 40 tokens, limits uniform in 8 to 128 tokens) alone, and with one prompt of
4,096 tokens and 128 new ones beside them; the long one's prefill is timed by itself too. CPU time of one
thread, the sides taking turns. The limit is what the long prompt adds if its prefill had the best rate of
matrix products, its decoding only read its keys and values at the rate of memory, and nothing else were
added. 25 seconds of CPU.

    python benchmarks/long_prompt.py [--size 3m] [--repeats 3] [--budget 524288]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

import torch
from engine_vs_generate import make_requests
from sizes import SIZES

from braid.cluster.memory import keep_freed_memory
from braid.config.model import ModelConfig
from braid.models.linear import linear
from braid.models.loading import load_policy
from braid.rollout.engine import Request, Sampling
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.native.kind import Native

LENGTH, NEW = 4096, 128


def seconds(engine: NativeEngine, requests: list[Request]) -> float:
    """CPU time of all requests."""

    async def gather() -> None:
        await asyncio.gather(*(engine.generate(request) for request in requests))

    start = time.thread_time()
    asyncio.run(gather())
    return time.thread_time() - start


def rate(work: float, call: Callable[[], object]) -> float:
    """Best rate of a call that does `work`, of twenty."""
    times: list[float] = []
    for _ in range(20):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return work / min(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="3m", choices=list(SIZES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=int, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    build = {**SIZES[args.size], "max_positions": 8192}
    config = ModelConfig.model_validate({"build": build})
    lm = load_policy(config, temperature=1.0, seed=0, device=torch.device("cpu"))
    short = make_requests(64, lm.vocab_size, is_ragged=True)
    words = tuple(
        torch.randint(0, lm.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    )
    only_prefill, long = (Request(words, Sampling(max_new_tokens=n), (1, n)) for n in (1, NEW))
    settings = Native(max_running=65, kv_budget_tokens=args.budget, compile="always")
    turns: list[tuple[float, float, float]] = []
    for _ in range(args.repeats + 1):
        engines = [NativeEngine(lm, settings, InProcess(str)) for _ in range(3)]
        alone, prefill, both = (
            seconds(engine, requests)
            for engine, requests in zip(engines, (short, [only_prefill], [*short, long]), strict=True)
        )
        turns.append((alone, prefill, both))
        for engine in engines:
            engine.close()
    whole, prefill = (statistics.median(turn[i] / turn[0] for turn in turns[1:]) for i in (2, 1))
    print(
        f"{args.size}: with the long prompt {whole:.2f} times the CPU time of the others alone, of which "
        f"its prefill {prefill:.2f} and its decoding {whole - prefill - 1:.2f}"
    )
    alone = statistics.median(turn[0] for turn in turns[1:])
    x, weight, memory = torch.randn(LENGTH, 512), torch.randn(1536, 512), torch.ones(2**27)
    products = rate(2 * LENGTH * weight.numel(), lambda: linear(x, weight))
    reading = rate(memory.nbytes, memory.sum)
    config = lm.model.config
    of_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    limits = (lm.flops([LENGTH], 1).forward / products / alone, NEW * LENGTH * of_token / reading / alone)
    print(
        f"limit {1 + sum(limits):.2f}: prefill {limits[0]:.2f} at {products / 1e9:.0f} GFLOP/s, decoding "
        f"{limits[1]:.2f} at {reading / 1e9:.0f} GB/s"
    )


if __name__ == "__main__":
    main()
