"""How much faster two processes with FSDP2 take an update than one process, with a core each.

A Qwen3 model of about 30M parameters takes GRPO steps on 8,192 packed tokens of ragged rows (those of
update_mfu.py), through the backends that a run uses. Every process is bound to one core and runs one thread.
One process and two take turns, so that a machine that slows down slows both; told are the best pair and the
median of the pairs.

    python benchmarks/fsdp2_scaling.py [--repeats 5] [--backend fsdp2] [--set reshard_after_forward=false ...]
    [--profile]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from update_mfu import SPEC, TOKENS, make_rows

from braid.algorithms.aggregate import row_weights
from braid.algorithms.recipes import RECIPES
from braid.cluster.memory import keep_freed_memory
from braid.config.train import TrainConfig
from braid.models.build import build_model
from braid.models.causal_lm import CausalLM
from braid.models.tokenizer import character_tokenizer
from braid.training.backends.fsdp.backend import FsdpBackend
from braid.training.backends.single.backend import SingleBackend
from braid.training.group import share_rows
from braid.training.losses import policy_loss

CPU = torch.device("cpu")


def _model() -> CausalLM:
    return CausalLM(build_model(SPEC, character_tokenizer(SPEC.characters), dtype=torch.float32, seed=0))


def _work(rank: int, folder: Path, settings: dict[str, Any], repeats: int, profile: bool) -> None:
    """Rank 0 also takes the updates of one process, while rank 1 waits for it."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    config = TrainConfig.model_validate({"optimizer": {"lr": 1e-5}, **settings})
    group = FsdpBackend(_model(), config, total_steps=1000, device=CPU)
    alone = SingleBackend(_model(), config, total_steps=1000, device=CPU) if rank == 0 else None
    rows, loss = make_rows(_model().vocab_size), policy_loss(RECIPES["grpo"])
    weights = row_weights(
        [r.num_tokens for r in rows], [r.group for r in rows], mode="token_mean", constant=None
    )
    share = share_rows(rows, 2, balances=True)[rank]
    rank_rows, rank_weights = [rows[i] for i in share], [weights[i] for i in share]

    def update_together() -> tuple[float, float]:
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        group.train(rank_rows, rank_weights, loss, rows[0])
        slower = torch.tensor(time.process_time() - used)
        dist.all_reduce(slower, dist.ReduceOp.MAX)
        return time.perf_counter() - start, slower.item()

    def update_alone() -> tuple[float, float]:
        start, used = time.perf_counter(), time.process_time()
        if alone is not None:
            alone.train(rows, weights, loss)
        return time.perf_counter() - start, time.process_time() - used

    update_together()
    update_alone()
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            update_together()
        if rank == 0:
            print(
                trace.key_averages().table(
                    sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=48
                )
            )
        return
    pairs = [(update_alone(), update_together()) for _ in range(repeats)]
    if rank == 0:
        numel = sum(p.numel() for p in _model().module.parameters())
        print(f"{numel / 1e6:.1f}M parameters, {TOKENS} tokens, {settings}")
        for what, place in (("wall clock", 0), ("processor", 1)):
            times = [(one[place], two[place]) for one, two in pairs]
            ratios = [one / two for one, two in times]
            fastest = min(one for one, _ in times) / min(two for _, two in times)
            print(f"  {what}, s of one process / of two: " + ", ".join(f"{a:.2f}/{b:.2f}" for a, b in times))
            print(
                f"    best pair {max(ratios):.2f}x, median of the pairs {statistics.median(ratios):.2f}x, "
                f"fastest of each {fastest:.2f}x"
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", choices=["fsdp", "fsdp2"], default="fsdp2")
    parser.add_argument("--micro-batch-tokens", type=int, default=TrainConfig().micro_batch_tokens)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the backend")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    fsdp = {key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in args.set)}
    settings = {
        "backend": {"kind": args.backend, **fsdp},
        "micro_batch_tokens": args.micro_batch_tokens,
    }
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (Path(folder), settings, args.repeats, args.profile), 2)


if __name__ == "__main__":
    main()
