"""The native engine with a bf16 copy of the weights (`rollout.engine.dtype=bf16`) against compiled and plain
fp32, on CPU.

Requests are those of engine_vs_generate.py, ragged; one thread, CPU time, all sides taking turns.

    python benchmarks/engine_dtype.py [--sizes 3m 30m] [--sequences 64 256] [--repeats 3]
"""

from __future__ import annotations

import argparse
import statistics

import torch
from engine_vs_generate import make_requests, run_engine
from sizes import SIZES

from braid.cluster.memory import keep_freed_memory
from braid.config.model import ModelConfig
from braid.models.loading import load_policy
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.native.kind import Native


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=["3m", "30m"], choices=list(SIZES))
    parser.add_argument("--sequences", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for size in args.sizes:
        config = ModelConfig.model_validate({"build": SIZES[size]})
        lm = load_policy(config, temperature=1.0, seed=0, device=torch.device("cpu"))
        for num in args.sequences:
            requests = make_requests(num, lm.vocab_size, is_ragged=True)
            tokens = sum(r.sampling.max_new_tokens for r in requests)
            engines = {
                name: NativeEngine(lm, settings, InProcess(str))
                for name, settings in {
                    "fp32, compiled": Native(max_running=num, compile="always"),
                    "fp32": Native(max_running=num),
                    "bf16": Native(max_running=num, dtype="bf16"),
                }.items()
            }
            turns = [
                [tokens / run_engine(engine, requests) for engine in engines.values()]
                for _ in range(args.repeats + 1)
            ]
            rates = [statistics.median(side) for side in zip(*turns[1:], strict=True)]
            shown = "  ".join(f"{side} {rate:,.0f}" for side, rate in zip(engines, rates, strict=True))
            print(f"{size}, {num} sequences, tokens/s: {shown}", flush=True)


if __name__ == "__main__":
    main()
