"""Groups that share a long prompt, in the native engine: the time of a decode step and the memory of the
cache.

8 prompts x 8 sequences of 64 new tokens, against 64 prompts of the same length with one sequence each. CPU
time of one thread, the sides taking turns; the prefill, timed by requests of one new token, is subtracted. A
minute of CPU.

    python benchmarks/group_prompts.py [--size 3m] [--lengths 64 256 1024] [--repeats 3]
"""

from __future__ import annotations

import argparse
import statistics

import torch
from long_prompt import seconds
from sizes import SIZES

from braid.cluster.memory import keep_freed_memory
from braid.config.model import ModelConfig
from braid.models.loading import load_policy
from braid.rollout.engine import Request, Sampling
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.native.kind import Native

NEW = 64


def step(engine: NativeEngine, prompts: list[tuple[int, ...]]) -> float:
    """CPU time of a decode step."""
    one, all_new = (
        seconds(engine, [Request(p, Sampling(max_new_tokens=new), (i,)) for i, p in enumerate(prompts)])
        for new in (1, NEW + 1)
    )
    return (all_new - one) / NEW


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="3m", choices=list(SIZES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    config = ModelConfig.model_validate({"build": {**SIZES[args.size], "max_positions": 4096}})
    lm = load_policy(config, temperature=1.0, seed=0, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for length in args.lengths:
        words = torch.randint(0, lm.vocab_size, (64, length), generator=generator).tolist()
        engine = NativeEngine(lm, Native(max_running=64, compile="always"), InProcess(str))

        prompts = {group: [tuple(words[i - i % group]) for i in range(64)] for group in (8, 1)}
        turns = [[step(engine, requests) for requests in prompts.values()] for _ in range(args.repeats + 1)]
        shared, separate = (statistics.median(side) * 1e3 for side in zip(*turns[1:], strict=True))
        print(
            f"{args.size}, prompts of {length}: {shared:.2f} ms per step in groups of 8, {separate:.2f} with "
            f"prompts of their own, ratio {separate / shared:.2f}; positions to keep {8 * length + 64 * NEW:,} "
            f"and {64 * (length + NEW):,}",
            flush=True,
        )
        engine.close()


if __name__ == "__main__":
    main()
