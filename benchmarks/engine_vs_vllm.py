"""The native engine against vLLM's CPU build with compiled graphs, on one thread.

Both sides have the same weights, float32, prompts and numbers of new tokens as in engine_vs_generate.py,
sample at temperature 1 in this process, and take turns; the figures are tokens per second of CPU time. vLLM
gets all requests at once, and may run them all together.

    python benchmarks/engine_vs_vllm.py [--size 3m|30m|120m] [--sequences 64 256] [--repeats 3]
    python benchmarks/engine_vs_vllm.py --model smollm2 ...      (a pretrained model; after: make smollm2)
"""

from __future__ import annotations

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}  # read when vLLM is imported

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from engine_vs_generate import LONGEST, make_requests, run_engine
from grpo_round_vs_trl import SMOLLM2, make_model, pretrained
from sizes import SIZES
from vllm import LLM, SamplingParams  # noqa: TID251  # it is the other side

from braid.cluster.memory import keep_freed_memory
from braid.config.model import ModelConfig
from braid.models.loading import load_policy
from braid.rollout.engine import Request
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.native.kind import Native


def run_vllm(llm: LLM, requests: list[Request]) -> float:
    """Seconds of CPU time for all requests."""
    prompts = [{"prompt_token_ids": list(r.prompt_ids)} for r in requests]
    settings = [
        SamplingParams(
            temperature=1.0,
            max_tokens=r.sampling.max_new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        for r in requests
    ]
    start = time.process_time()
    done = llm.generate(prompts, settings, use_tqdm=False)  # pyright: ignore[reportArgumentType]
    seconds = time.process_time() - start
    assert [len(output.outputs[0].token_ids) for output in done] == [
        r.sampling.max_new_tokens for r in requests
    ]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="3m", choices=list(SIZES))
    parser.add_argument("--model", choices=["smollm2"], help="a pretrained model in place of --size")
    parser.add_argument("--sequences", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # it serves both sides
    with tempfile.TemporaryDirectory() as folder:
        if args.model:
            folder = pretrained(SMOLLM2)
        else:
            make_model(Path(folder), SIZES[args.size])
        llm = LLM(
            folder, dtype="float32", max_model_len=2 * LONGEST, max_num_seqs=max(args.sequences), seed=0, disable_log_stats=True,
            enable_prefix_caching=False,
        )  # fmt: skip
        lm = load_policy(ModelConfig(path=folder), temperature=1.0, seed=0, device=torch.device("cpu"))
    parameters = sum(weight.numel() for weight in lm.module.parameters())
    print(
        f"{args.model or args.size}: {parameters / 1e6:.1f}M parameters, fp32, one thread; tokens per "
        "second of CPU time"
    )
    for num in args.sequences:
        requests = make_requests(num, lm.vocab_size, is_ragged=True)
        tokens = sum(r.sampling.max_new_tokens for r in requests)
        engine = NativeEngine(lm, Native(max_running=num, compile="always"), InProcess(str))
        turns = [
            (tokens / run_engine(engine, requests), tokens / run_vllm(llm, requests))
            for _ in range(args.repeats + 1)
        ][1:]
        engine.close()
        ours, theirs = (statistics.median(side) for side in zip(*turns, strict=True))
        ratio = statistics.median(a / b for a, b in turns)
        print(
            f"  {num:4} sequences: engine {ours:8,.0f}  vLLM {theirs:8,.0f}  ratio {ratio:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
