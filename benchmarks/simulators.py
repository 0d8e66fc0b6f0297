"""Simulators: where the time of a round goes, two stages against one, and env steps per second against the
bare environment.

    python benchmarks/simulators.py [shares | stages | overhead ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from braid.config.load import load_config
from braid.envs.simulators.adapters.metaworld import MetaWorld
from braid.envs.simulators.base import Simulator, reset_prompts
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.envs.simulators.processes import SimulatorProcesses
from braid.models.base import Acted
from braid.models.mlp import MlpPolicy
from braid.rollout.drivers.simulators import SimulatorDriver
from braid.rollout.engines.simulators import SimulatorEngine
from braid.trainer import commands
from braid.types import Group, Spaces

ROUND = """
run: {name: shares, max_rounds: 3, num_threads: 1, device: cpu, seed: 0}
model: {mlp: {hidden_sizes: [64, 64]}}
env: {kind: metaworld, task: button-press-v3, max_episode_steps: 50, num_envs: 10, processes: 0}
rollout: {prompts_per_round: 10, group_size: 1}
algorithm: {recipe: ppo, kl_coef: 0.0, advantage: {gamma: 0.97, gae_lambda: 0.95}}
train: {optimizer: {lr: 1.0e-3}, passes_per_round: 8, steps_per_pass: 5}
eval: {before: false, at_end: false}
checkpoint: {at_end: false}
report: {console: none}
"""


class Timers:
    """Seconds in methods, without those in methods that they call and that are timed too."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def on(self, owner: type, method: str, name: str) -> Iterator[None]:
        whole: Callable[..., Any] = getattr(owner, method)

        @wraps(whole)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return whole(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self.seconds[name] += spent - self._inner.pop()
                self._inner[-1] += spent

        with patch.object(owner, method, timed):
            yield


def shares() -> None:
    """Shares of a PPO round of MetaWorld, everything in one process."""
    for title, overrides in {
        "state": [],
        "64 x 64 image": [
            "env.cameras={image: corner4}",
            "model.mlp.channels=[16,32]",
            "train.passes_per_round=2",
        ],
    }.items():
        timers = Timers()
        with (
            tempfile.TemporaryDirectory() as folder,
            timers.on(MetaWorld, "step", "physics"),
            timers.on(MetaWorld, "reset", "physics"),
            timers.on(MetaWorld, "with_images", "rendering"),
            timers.on(MlpPolicy, "act", "policy"),
        ):
            path = Path(folder) / "run.yaml"
            path.write_text(ROUND)
            commands.train(load_config(path, [f"run.output_dir={folder}", *overrides]))
            (metrics,) = Path(folder).glob("*/metrics.jsonl")
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        rounds = [metrics for metrics in lines if "time/rollout_s" in metrics]  # the first line is the start
        names = ("time/update_s", "time/compute_advantages_s")
        updates = sum(metrics.get(name, 0.0) for metrics in rounds for name in names)
        whole = sum(metrics["time/round_s"] for metrics in rounds)
        parts = {**timers.seconds, "update": updates}
        parts["other"] = whole - sum(parts.values())
        shown = ", ".join(f"{name} {100 * part_s / whole:.0f} %" for name, part_s in parts.items())
        print(f"{title}: {whole:.1f} s: {shown}")


class Sleeper(gymnasium.Env):
    """An environment whose steps take `seconds`, without work."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seconds: float, length: int = 50) -> None:
        self._seconds, self._length = seconds, length
        self._zeros = np.zeros(4, np.float32)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        self._count = 0
        return self._zeros, {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self._count += 1
        time.sleep(self._seconds)
        return self._zeros, 0.0, False, self._count >= self._length, {}


class Trivial:
    """A policy that takes `seconds` per observation, and does nothing."""

    def __init__(self, spaces: Spaces, seconds: float = 0.0) -> None:
        self.module = nn.Linear(1, 1)
        self.num_uniforms = 1
        self._seconds = seconds
        action = 0 if spaces.actions.kind == "discrete" else np.zeros(spaces.actions.size, np.float32)
        self._action = np.array([action])

    def observe(self, observations: Mapping[str, Any], instructions: Sequence[str]) -> Mapping[str, Any]:
        return observations

    def act(
        self,
        observations: Mapping[str, Any],
        uniforms: NDArray[np.float64] | None,
        temperature: float | None = None,
    ) -> Acted:
        count = len(next(iter(observations.values())))
        if self._seconds:
            time.sleep(self._seconds * count)
        actions = np.repeat(self._action[None], count, 0)
        return Acted(actions, {"actions": actions}, np.zeros((count, 1), np.float32))


def play(
    simulator: Simulator,
    policy: Trivial,
    num_episodes: int,
    num_stages: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Env steps per second of whole episodes, by `clock`."""
    engine = SimulatorEngine(simulator, policy, retries=0, num_stages=num_stages)
    driver = SimulatorDriver(engine, seed=0)

    async def groups() -> list[Group]:
        await engine.set_weights(0)
        prompts = reset_prompts("bench", num_episodes)
        return list(await asyncio.gather(*(driver.group(p, 1, (0, i)) for i, p in enumerate(prompts))))

    start = clock()
    played = asyncio.run(groups())
    seconds = clock() - start
    steps = sum(
        t.env_steps.num_executed.sum() for g in played for t in g.trajectories if t.env_steps is not None
    )
    return float(steps) / seconds


def stages(repeats: int = 3) -> None:
    """8 environments in one process, whose steps take as long as the policy's actions."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(repeats):
        for num_stages, figures in rates.items():
            simulator = SimulatorProcesses(f"{__file__}:Sleeper", 8, {"seconds": 2e-3}, timeout_s=60)
            with closing(simulator):
                figures.append(play(simulator, Trivial(simulator.spaces, 2e-3), 16, num_stages))
    one, two = rates[1], rates[2]
    ratios = [b / a for a, b in zip(one, two, strict=True)]
    print(
        f"one stage {statistics.median(one):.0f}, two {statistics.median(two):.0f} env steps/s: "
        f"{show(ratios)}"
    )


BARE: Mapping[str, tuple[str, dict[str, Any], int]] = {
    "MetaWorld, state": (
        "braid.envs.simulators.adapters.metaworld.MetaWorld",
        {"task": "reach-v3", "max_episode_steps": 100},
        64,
    ),
    "MetaWorld, 64 x 64": (
        "braid.envs.simulators.adapters.metaworld.MetaWorld",
        {"task": "reach-v3", "max_episode_steps": 25, "cameras": {"image": "corner4"}},
        8,
    ),
    "HalfCheetah-v5": ("HalfCheetah-v5", {"max_episode_steps": 200}, 128),
}
"""Environment, its arguments, and episodes per measurement."""


def cpu_s() -> float:
    """CPU time of this process and of children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def bare(env_id: str, kwargs: Mapping[str, Any], num_episodes: int, num_envs: int = 8) -> float:
    """Env steps per CPU second of environments that are stepped in turn, with the same action, and rendered
    after each."""
    simulator = GymnasiumSimulator(env_id, num_envs, kwargs)
    envs, action, steps = simulator._envs, np.zeros(simulator.spaces.actions.size, np.float32), 0
    for env in envs:
        if hasattr(env.unwrapped, "images_on_demand"):
            env.unwrapped.images_on_demand = False  # pyright: ignore[reportAttributeAccessIssue]
    start = cpu_s()
    for episode in range(0, num_episodes, num_envs):
        for slot, env in enumerate(envs):
            env.reset(seed=episode + slot)
        is_over = False
        while not is_over:
            for env in envs:
                *_, is_truncated, _ = env.step(action)
                is_over = is_over or is_truncated
                steps += 1
    seconds = cpu_s() - start
    simulator.close()
    return steps / seconds


def overhead(repeats: int = 3) -> None:
    """Env steps per CPU second of the engine with a policy that does nothing, as shares of the bare
    environment's, in turn. Processes that compute at the same time count in full."""
    for title, (env_id, kwargs, num_episodes) in BARE.items():
        rates: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            rates["bare"].append(bare(env_id, kwargs, num_episodes))
            with closing(GymnasiumSimulator(env_id, 8, kwargs)) as here:
                rates["in this process"].append(play(here, Trivial(here.spaces), num_episodes, clock=cpu_s))
        print(f"{title}: bare {statistics.median(rates['bare']):.0f} env steps per CPU second")
        for name, figures in list(rates.items())[1:]:
            print(f"    {name}: {show([a / b for a, b in zip(figures, rates['bare'], strict=True)])}")


def show(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} (of {', '.join(f'{ratio:.2f}' for ratio in sorted(ratios))})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["shares", "stages", "overhead"])
    torch.set_num_threads(1)
    for part in parser.parse_args().parts:
        {"shares": shares, "stages": stages, "overhead": overhead}[part]()


if __name__ == "__main__":
    main()
