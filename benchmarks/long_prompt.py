"""One long prompt among short ones, in the native engine: how much longer the same requests take with it.

64 requests (prompts of 20 to 40 tokens, limits uniform in 8 to 128 tokens) alone, and with one prompt of 4,096 tokens
beside them; the long one's prefill is timed by itself too. CPU time of one thread, the sides taking turns.

    python benchmarks/long_prompt.py [--size 3m] [--repeats 3] [--budget 524288]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import torch
from engine_vs_generate import make_requests
from sizes import SIZES

from braid.cluster.memory import keep_freed_memory
from braid.config.model import ModelConfig
from braid.models.loading import load_policy
from braid.rollout.engine import Request, Sampling
from braid.rollout.engines.native import NativeEngine


def seconds(engine: NativeEngine, requests: list[Request]) -> float:
    """CPU time of all requests."""

    async def gather() -> None:
        await asyncio.gather(*(engine.generate(request) for request in requests))

    start = time.thread_time()
    asyncio.run(gather())
    return time.thread_time() - start


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
        torch.randint(0, lm.vocab_size, (4096,), generator=torch.Generator().manual_seed(1)).tolist()
    )
    only_prefill, long = (Request(words, Sampling(max_new_tokens=n), (1, n)) for n in (1, 128))
    ratios = []
    for turn in range(args.repeats + 1):
        engines = [
            NativeEngine(lm, decode=str, max_running=65, kv_budget_tokens=args.budget) for _ in range(3)
        ]
        alone, prefill, both = (
            seconds(engine, requests)
            for engine, requests in zip(engines, (short, [only_prefill], [*short, long]), strict=True)
        )
        for engine in engines:
            engine.close()
        if turn:
            ratios.append((both / alone, (both - prefill) / alone))
    whole, decoding = (statistics.median(of) for of in zip(*ratios, strict=True))
    print(
        f"{args.size}: with the long prompt {whole:.2f} times the CPU time of the others alone, {decoding:.2f} without its prefill"
    )


if __name__ == "__main__":
    main()
