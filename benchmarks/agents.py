"""Agents: throughput with slow environments, prefix reuse across turns, and memory over many episodes.

Environments reply after a log-normal time (mean 50 ms, 99th percentile 500 ms), the same in each variant. The
bound is the time of their latencies alone: of the slowest episode, or with fewer processes than episodes, of
each process's episodes.

    python benchmarks/agents.py [--episodes 256] [--turns 3] [--memory-episodes 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import psutil
import torch
from sizes import SIZES
from slow import AsyncSlow, Slow, latency

from braid.cluster.loops import task_group
from braid.cluster.memory import keep_freed_memory
from braid.config.model import ModelConfig
from braid.envs.agents.hosts import HostedEnvs
from braid.envs.kinds import Timeouts
from braid.models.chat import ChatFormat
from braid.models.loading import load_policy, load_tokenizer
from braid.rollout.drivers.agents import AgentDriver, Limits
from braid.rollout.engine import Completion, Request, Sampling
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.native.kind import Native
from braid.types import Group, Prompt, Status

DEADLINE_S = 5.0
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
}


class Instant:
    """A policy that takes no time."""

    async def generate(self, request: Request) -> Completion:
        now = time.time()
        return Completion([5, 1], [-1.0, -1.0], "stop", 0, now, now)


class Counting(NativeEngine):
    """Counts the tokens that requests read, and those of them that are computed."""

    num_read = num_computed = 0

    def _known_prefix(self, sequence: Any) -> Any:
        known = super()._known_prefix(sequence)
        self.num_read += len(sequence.prefix)
        self.num_computed += len(sequence.prefix) - (len(known.ids) if known else 0)
        return known


class Bench:
    """A policy of a size, and the driver of its episodes."""

    def __init__(self, size: dict[str, int], max_new_tokens: int) -> None:
        build = {**size, "characters": " 0123456789abcdefghijklmnopqrstuvwxyz:?.", "max_positions": 2048}
        model = ModelConfig.model_validate({"build": build})
        self.tokenizer = load_tokenizer(model)
        self.lm = load_policy(model, temperature=1.0, seed=0, device=torch.device("cpu"))
        self.sampling = Sampling(max_new_tokens=max_new_tokens, stop_token_ids=(1,))

    def engine(self, **options: Any) -> Counting:
        return Counting(
            self.lm, Native(**options), InProcess(lambda ids: str(self.tokenizer.decode(list(ids))))
        )

    def play(
        self, engine: Any, envs: HostedEnvs, prompts: Sequence[Prompt], retries: int = 1
    ) -> tuple[float, list[Group]]:
        """Seconds of one episode of each prompt, and the episodes."""
        chat = ChatFormat(self.tokenizer, end_token_ids=(1,))
        limits = Limits(2048, None, Timeouts(step_s=DEADLINE_S), continues_cut_turns=True)
        driver = AgentDriver(engine, envs, chat, self.sampling, limits, seed=3, retries=retries)

        async def all_groups() -> list[Group]:
            async with task_group() as tasks:
                groups = [
                    tasks.create_task(driver.group(prompt, 1, (i,))) for i, prompt in enumerate(prompts)
                ]
            return [group.result() for group in groups]

        start = time.perf_counter()
        groups = asyncio.run(all_groups())
        return time.perf_counter() - start, groups

    def prompts(self, num: int, first: int = 0) -> list[Prompt]:
        texts = (f"{number}: " for number in range(first, first + num))
        return [
            Prompt(
                text.strip(": "), "bench", tuple(self.tokenizer.encode(text, add_special_tokens=False)), ()
            )
            for text in texts
        ]


def slow_environments(bench: Bench, num: int, turns: int) -> None:
    times = [sum(latency(number, turn) for turn in range(1, turns + 1)) for number in range(num)]
    prompts, processes = bench.prompts(num), 16
    places = [("inline", AsyncSlow, num), ("thread", Slow, num), ("process", Slow, processes)]
    for run_in, kind, size in places:
        ends = [0.0] * size
        for took in times:
            heapq.heapreplace(ends, ends[0] + took)
        bound = max(ends)
        envs = HostedEnvs(partial(kind, turns), run_in, size)  # pyright: ignore[reportArgumentType]
        bench.play(Instant(), envs, prompts)  # starts processes, and touches the memory of threads
        took, groups = bench.play(Instant(), envs, prompts)
        asyncio.run(envs.close())
        assert all(group.trajectories[0].status is Status.FINISHED for group in groups)
        print(
            f"{num} episodes, {size} {run_in}: {took:.2f} s, {num * turns / took:.0f} env steps/s; "
            f"bound {bound:.2f} s, {100 * bound / took:.0f} %"
        )
    hangs = HostedEnvs(partial(AsyncSlow, turns, num // 2), "inline", 1)
    took, groups = bench.play(Instant(), hangs, prompts, retries=0)
    invalid = [g for g in groups if g.trajectories[0].status is Status.INVALID]
    print(
        f"one hangs, deadline {DEADLINE_S:g} s: {took:.2f} s in all, {len(invalid)} episode of {num} invalid"
    )


def with_policy(bench: Bench, num: int, turns: int) -> None:
    for scale in (0.0, 1.0):
        with closing(bench.engine(prefix_caching=True)) as engine:
            bench.play(engine, HostedEnvs(partial(AsyncSlow, 1, scale=0.0), "inline", 1), bench.prompts(8))
            envs = HostedEnvs(partial(AsyncSlow, turns, scale=scale), "inline", 1)
            took, groups = bench.play(engine, envs, bench.prompts(num))
        played = [turn for group in groups for turn in group.trajectories[0].turns]
        waiting = sum(turn.env_s for turn in played)
        sampling = sum(turn.end_s - turn.start_s for turn in played)
        tokens = sum(len(turn.output_ids) for turn in played)
        print(
            f"with a policy, environments of {50 * scale:.0f} ms: {took:.2f} s, {len(played) / took:.0f} "
            f"env steps/s, {tokens / took:,.0f} tokens/s; an episode waits for its environment "
            f"{100 * waiting / (waiting + sampling):.0f} % of its time"
        )


def prefix_reuse(bench: Bench, num: int, turns: int) -> None:
    for caching in (False, True):
        with closing(bench.engine(prefix_caching=caching)) as engine:
            envs = HostedEnvs(partial(AsyncSlow, turns, scale=0.0), "inline", 1)
            took, groups = bench.play(engine, envs, bench.prompts(num))
        new = sum(len(turn.context_ids) for group in groups for turn in group.trajectories[0].turns)
        print(
            f"{num} episodes of {turns} turns, prefix_caching={str(caching).lower()}: {took:.1f} s, "
            f"{engine.num_read:,} tokens read, {engine.num_computed:,} of them computed; {new:,} are new to "
            "the episode"
        )


def memory(bench: Bench, num: int) -> None:
    process = psutil.Process()
    with closing(bench.engine(prefix_caching=True, kv_budget_tokens=16384)) as engine:
        for first in range(0, num, num // 10):
            envs = HostedEnvs(partial(AsyncSlow, 2, scale=0.0), "inline", 1)
            took, _ = bench.play(engine, envs, bench.prompts(num // 10, first))
            print(
                f"after {first + num // 10:,} episodes: {process.memory_info().rss / 2**20:.0f} MiB, "
                f"{num // 10 / took:.0f} episodes/s"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--memory-episodes", type=int, default=10_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    tiny, small = Bench(TINY, 2), Bench(SIZES["3m"], 16)
    slow_environments(tiny, args.episodes, args.turns)
    with_policy(small, args.episodes, args.turns)
    prefix_reuse(small, 64, 16)
    memory(tiny, args.memory_episodes)


if __name__ == "__main__":
    main()
