"""The native engine against transformers `generate`, on CPU.

Both sides have the same weights, dtype, threads, prompts (20 to 40 tokens) and numbers of new tokens, and
sample at temperature 1. Lengths are forced: end tokens are off, and each sequence gets a limit of its own
("ragged": uniform in 8..128; "equal": 128). `generate` gets its best: transformers' own layers, one
left-padded batch, its cache, its own sdpa attention, and as many steps as the longest sequence takes; tokens
beyond a sequence's limit are not counted, since nobody wants them. The sides take turns, and the ratio is the
median over the turns, so that a machine that slows down slows both. With one thread times are CPU times,
which other work on the machine changes less.

    python benchmarks/engine_vs_generate.py [--sizes 3m 30m] [--sequences 64 128 256] [--dtype fp32]
    [--repeats 5]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import time
from collections.abc import Callable

import torch
from sizes import SIZES
from transformers import AutoModelForCausalLM, PreTrainedModel

from braid.cluster.memory import keep_freed_memory
from braid.config.model import ModelConfig
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy
from braid.rollout.engine import Request, Sampling
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.native.kind import Native

LONGEST = 128


def now() -> float:
    """CPU seconds if there is one thread, since those of several wait actively; else wall seconds."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def make_requests(num: int, vocab_size: int, *, is_ragged: bool) -> list[Request]:
    """Random prompts; the seed is fixed, so that runs can be compared."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high + 1, (size,), generator=generator).tolist()

    lengths = draw(8, LONGEST, num) if is_ragged else [LONGEST] * num
    prompts = [tuple(draw(0, vocab_size - 1, size)) for size in draw(20, 40, num)]
    return [
        Request(prompt, Sampling(max_new_tokens=length), key=(0, i))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def run_engine(engine: NativeEngine, requests: list[Request]) -> float:
    """Seconds for all requests."""

    async def gather() -> None:
        await asyncio.gather(*(engine.generate(request) for request in requests))

    start = now()
    asyncio.run(gather())
    return now() - start


def run_generate(model: PreTrainedModel, requests: list[Request]) -> float:
    """Seconds for all requests, padding the prompts included."""
    start = now()
    width = max(len(r.prompt_ids) for r in requests)
    padded = [[0] * (width - len(r.prompt_ids)) + list(r.prompt_ids) for r in requests]
    mask = [[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in requests]
    longest = max(r.sampling.max_new_tokens for r in requests)
    with torch.inference_mode():
        out = model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            use_cache=True,
        )
    assert out.shape[1] == width + longest, "generate stopped early"
    return now() - start


def compare(
    lm: CausalLM, plain: PreTrainedModel, requests: list[Request], repeats: int
) -> tuple[float, float, float]:
    """Median tokens/s of the engine and of generate, and the median ratio over the turns (the first, a
    warm-up, left out)."""
    tokens = sum(r.sampling.max_new_tokens for r in requests)
    engine = NativeEngine(lm, Native(max_running=len(requests), compile="always"), InProcess(str))
    sides: list[Callable[[], float]] = [
        lambda: run_engine(engine, requests),
        lambda: run_generate(plain, requests),
    ]
    turns = [[tokens / side() for side in sides] for _ in range(repeats + 1)][1:]
    engine.close()
    ours, theirs = (statistics.median(side) for side in zip(*turns, strict=True))
    return ours, theirs, statistics.median(a / b for a, b in turns)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--sequences", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as runs do; it serves both sides
    for name in args.sizes:
        config = ModelConfig.model_validate({"build": SIZES[name], "dtype": args.dtype})
        lm = load_policy(config, temperature=1.0, seed=0, device=torch.device("cpu"))
        # a copy, since from_config changes the attention of all models that share the config
        config = copy.deepcopy(lm.model.config)
        plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        plain.load_state_dict(lm.model.state_dict())
        plain.generation_config.eos_token_id = None  # pyright: ignore[reportOptionalMemberAccess]
        plain.generation_config.pad_token_id = 0  # pyright: ignore[reportOptionalMemberAccess]
        parameters = sum(p.numel() for p in lm.model.parameters()) / 1e6
        print(f"{name}: {parameters:.1f}M parameters, {args.dtype}, {args.threads} threads; tokens/s")
        for num in args.sequences:
            for kind in ("ragged", "equal"):
                requests = make_requests(num, lm.vocab_size, is_ragged=kind == "ragged")
                ours, theirs, ratio = compare(lm, plain, requests, args.repeats)
                print(
                    f"  {num:4} sequences, {kind:6}: engine {ours:8,.0f}  generate {theirs:8,.0f}  ratio "
                    f"{ratio:.2f}"
                )


if __name__ == "__main__":
    main()
