"""The simulator driver: a policy and a simulator make trajectories.

Whole episodes, as many at a time as the simulator has slots; a free slot starts the next waiting episode. An
episode's reset state depends only on its prompt's number, and the random numbers of an action only on episode
and env step, so results depend neither on the number of slots nor on which episodes ran side by side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from braid.envs.simulators.base import Simulator, Tick
from braid.errors import EngineError
from braid.rollout.random import absorb, stream, unit_interval
from braid.types import EnvSteps, Group, Prompt, Status, Trajectory


class ActingPolicy(Protocol):
    """A policy as the driver needs it (such as models.mlp.MlpPolicy)."""

    @property
    def num_uniforms(self) -> int: ...

    def act(
        self, observations: NDArray[np.float32], uniforms: NDArray[np.float64] | None
    ) -> tuple[NDArray, NDArray[np.float32]]: ...


class SimulatorDriver:
    """Turns prompts (reset states) into groups of episodes.

    All episodes of a group start from the same reset seed, drawn from the run's seed, `key` and the prompt's
    number. An episode whose environment fails is restarted up to `retries` times, with other actions, then
    left invalid. With `greedy` the policy takes its most probable action.
    """

    def __init__(
        self, simulator: Simulator, policy: ActingPolicy, *, seed: int, retries: int, greedy: bool = False
    ) -> None:
        self._simulator = simulator
        self._policy = policy
        self._seed = seed
        self._retries = retries
        self._greedy = greedy
        self._version = 0

    async def run(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        *,
        key: tuple[int, ...],
        numbers: Sequence[int] | None = None,
    ) -> list[Group]:
        """See Driver; rewards are returns."""
        places = range(len(prompts)) if numbers is None else numbers
        episodes = [
            [_Episode(prompt, sample, (self._seed, *key, number)) for sample in range(group_size)]
            for number, prompt in zip(places, prompts, strict=True)
        ]
        waiting = deque(episode for group in episodes for episode in group)
        running: dict[int, _Episode] = {}
        while waiting or running:
            self._start(waiting, running)
            if running:
                self._step(waiting, running)
        return [
            Group(prompt, [episode.trajectory(self._version) for episode in group])
            for prompt, group in zip(prompts, episodes, strict=True)
        ]

    @property
    def cache_bytes(self) -> int:
        """A simulator's policy has no cache."""
        return 0

    def sleep(self) -> None:
        """A simulator's policy has no memory to free."""

    def wake(self) -> None:
        """See `sleep`."""

    def publish(self, version: int) -> None:
        """The policy shares the trainer's weights: only the version changes."""
        self._version = version

    def close(self) -> None:
        self._simulator.close()

    def _start(self, waiting: deque[_Episode], running: dict[int, _Episode]) -> None:
        """Start an episode in each free slot."""
        started = {}
        for slot in range(self._simulator.num_envs):
            if slot not in running and waiting:
                started[slot] = running[slot] = waiting.popleft()
        if not started:
            return
        tick = self._simulator.reset({slot: episode.reset_seed for slot, episode in started.items()})
        self._drop_failed(tick, waiting, running)
        for slot, episode in started.items():
            if slot not in tick.failures:
                episode.observations.append(tick.observations[slot])

    def _step(self, waiting: deque[_Episode], running: dict[int, _Episode]) -> None:
        """One action and one env step for every running episode."""
        drawn = None if self._greedy else self._uniforms(list(running.values()))
        observations = np.stack([episode.observations[-1] for episode in running.values()])
        actions, logprobs = self._policy.act(observations, drawn)
        if not np.isfinite(logprobs).all():
            raise EngineError(
                f"the policy (version {self._version}) gave an action log-prob that is not finite"
            )
        tick = self._simulator.step(dict(zip(running, actions, strict=True)))
        for (slot, episode), action, logprob in zip(running.items(), actions, logprobs, strict=True):
            if slot not in tick.failures:
                episode.record(action, logprob, tick, slot)
        self._drop_failed(tick, waiting, running)
        for slot in [slot for slot, episode in running.items() if episode.status is not None]:
            del running[slot]

    def _uniforms(self, episodes: Sequence[_Episode]) -> NDArray[np.float64]:
        """[running, num_uniforms]"""
        width = self._policy.num_uniforms
        states = absorb(
            np.array([e.random_state() for e in episodes]), np.array([len(e.actions) for e in episodes])
        )
        states = absorb(np.repeat(states, width), np.tile(np.arange(width), len(episodes)))
        return unit_interval(states).reshape(len(episodes), width)

    def _drop_failed(self, tick: Tick, waiting: deque[_Episode], running: dict[int, _Episode]) -> None:
        for slot, reason in tick.failures.items():
            episode = running.pop(slot)
            if episode.attempt < self._retries:
                episode.restart()
                waiting.appendleft(episode)
            else:
                episode.status, episode.reason = Status.INVALID, f"environment: {reason}"


@dataclass(slots=True)
class _Episode:
    """A running episode. `key` is (seed, *key of the call, number of the prompt)."""

    prompt: Prompt
    sample: int
    key: tuple[int, ...]
    attempt: int = 0
    status: Status | None = None
    reason: str = ""
    observations: list[NDArray[np.float32]] = field(default_factory=list)
    actions: list[NDArray] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    _random_state: np.uint64 | None = None

    @property
    def reset_seed(self) -> int:
        """The same for all episodes of a group, in [0, 2^32)."""
        return int(np.random.SeedSequence(self.key).generate_state(1)[0])

    def random_state(self) -> np.uint64:
        """Base of the random numbers of this attempt's env steps."""
        if self._random_state is None:
            self._random_state = stream((*self.key, self.sample, self.attempt))
        return self._random_state

    def restart(self) -> None:
        """Start over; the next attempt samples other actions."""
        self.attempt += 1
        self._random_state = None
        for record in (self.observations, self.actions, self.logprobs, self.rewards):
            record.clear()

    def record(self, action: NDArray, logprob: float, tick: Tick, slot: int) -> None:
        """Record the env step of `slot`."""
        self.actions.append(action)
        self.logprobs.append(logprob)
        self.rewards.append(tick.rewards[slot])
        self.observations.append(tick.observations[slot])
        if tick.is_terminated[slot]:
            self.status = Status.FINISHED
        elif tick.is_truncated[slot]:
            self.status = Status.TRUNCATED

    def trajectory(self, version: int) -> Trajectory:
        assert self.status is not None, "the episode is over"
        trajectory = Trajectory(self.prompt, self.sample, self.status, attempts=self.attempt + 1)
        if self.status is Status.INVALID:
            trajectory.invalidate(self.reason)
            return trajectory
        trajectory.env_steps = EnvSteps(
            observations=np.stack(self.observations),
            actions=np.stack(self.actions),
            logprobs=np.array(self.logprobs, np.float32),
            rewards=np.array(self.rewards, np.float32),
            policy_version=version,
        )
        trajectory.reward = float(np.sum(self.rewards, dtype=np.float64))
        return trajectory
