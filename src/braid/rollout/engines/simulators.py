"""Plays episodes of a simulator with the policy.

Whole episodes, as many at a time as the simulator has slots, in lock step; a free slot starts the next waiting
episode, whichever group it belongs to. The slots may be split into stages, each in lock step: while one is stepped, the
actions of another are computed. An episode's reset state depends only on its prompt's number, and the
random numbers of an action only on episode and decision, so results depend neither on the number of slots nor
on which episodes ran side by side.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from braid.envs.simulators.base import Overlapping, Simulator, Tick, as_array
from braid.errors import BraidError, EngineError
from braid.models.base import Acted
from braid.rollout.engine import version_runs
from braid.rollout.random import absorb, stream, unit_interval
from braid.types import EnvSteps, Prompt, Recording, Status, Trajectory

from .stepped import SteppedEngine


class ActingPolicy(Protocol):
    """A policy as the engine needs it (such as models.mlp.MlpPolicy).

    `observe` returns the part of an observation of one environment that `act` and the model's forward pass read;
    a text policy adds the tokens of the instruction. `act` takes observations [E, ...] by name, and uniform random
    numbers [E, num_uniforms] in [0, 1), or None for the likeliest actions. Observations are arrays, or tensors on the
    simulator's device.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def num_uniforms(self) -> int: ...

    def observe(self, observation: dict[str, Any], instruction: str) -> dict[str, Any]: ...

    def act(self, observations: dict[str, Any], uniforms: NDArray[np.float64] | None) -> Acted: ...


class SimulatorEngine(SteppedEngine):
    """See rollout.engine.Engine for the contract."""

    def __init__(
        self,
        simulator: Simulator,
        policy: ActingPolicy,
        *,
        retries: int,
        owns_weights: bool = False,
        num_stages: int = 1,
        offloads: bool = False,
    ) -> None:
        """An episode whose environment fails is restarted up to `retries` times, with other actions, then left
        invalid. With `owns_weights` the engine keeps a copy of the policy, updated by `set_weights`. Several stages
        only gain time with an Overlapping simulator. With `offloads`, `sleep` closes the simulator, which a reset has to
        open again."""
        super().__init__()
        self._offloads = offloads
        self._simulator = simulator
        self._begin_reset: Callable[..., Callable[[], Tick]] = partial(partial, simulator.reset)
        self._begin_step: Callable[..., Callable[[], Tick]] = partial(partial, simulator.step)
        if isinstance(simulator, Overlapping):
            self._begin_reset, self._begin_step = simulator.begin_reset, simulator.begin_step
        self._stages = [_Stage(range(first, simulator.num_envs, num_stages)) for first in range(num_stages)]
        self._source = policy
        self._policy = copy.deepcopy(policy) if owns_weights else policy
        self._retries = retries
        self._waiting: deque[Episode] = deque()
        self._running: dict[int, Episode] = {}

    async def play(self, episode: Episode) -> Trajectory:
        """Play an episode to its end. Cancelling the task that awaits this frees its slot. Raises EngineError
        if the policy fails."""
        self._check_usable()
        self._current_version()
        episode.future = asyncio.get_running_loop().create_future()
        self._waiting.append(episode)
        self._start_stepping()
        try:
            await episode.future
        except asyncio.CancelledError:
            self._waiting = deque(e for e in self._waiting if e is not episode)
            self._running = {slot: e for slot, e in self._running.items() if e is not episode}
            raise
        return episode.trajectory()

    @property
    def shares_weights(self) -> bool:
        """See SteppedEngine."""
        return self._policy is self._source

    @property
    def num_pending(self) -> int:
        """See SteppedEngine."""
        return len(self._waiting) + len(self._running)

    @property
    def cache_bytes(self) -> int:
        """A simulator's policy has no cache."""
        return 0

    def sleep(self) -> None:
        """A simulator's policy has no memory to free, but its environments may have."""
        if self._offloads:
            self._simulator.close()

    def wake(self) -> None:
        """The next episode opens a simulator that `sleep` has closed."""

    def close(self) -> None:
        """Fail all pending episodes and close the simulator."""
        if not self._is_closed:
            self._is_closed = True
            self._stop_stepping()
            self._abandon("the engine was closed")
            self._simulator.close()

    @property
    def _has_begun(self) -> bool:
        """See SteppedEngine. An episode that starts over has begun."""
        return bool(self._running or (self._waiting and self._waiting[0].attempt))

    def _step(self) -> None:
        """In each stage: finish its call of the simulator; then begin the next, which starts an episode in each free
        slot, or else is a decision of every running episode."""
        for stage in self._stages:
            if stage.finish is not None:
                finish, stage.finish = stage.finish, None
                self._record(stage, finish())
            if not self._start(stage):
                self._act(stage)

    def _copy_weights(self) -> None:
        self._policy.module.load_state_dict(self._source.module.state_dict())

    def _abandon(self, reason: str, cause: Exception | None = None) -> None:
        """See SteppedEngine. A BraidError is raised as it is."""
        pending = [*self._running.values(), *self._waiting]
        self._running.clear()
        self._waiting.clear()
        for stage in self._stages:
            stage.finish = None
        for episode in pending:
            if not episode.future.done():
                error = cause if isinstance(cause, BraidError) else EngineError(reason)
                if error is not cause:
                    error.__cause__ = cause
                episode.future.set_exception(error)

    def _start(self, stage: _Stage) -> bool:
        """Begin to reset the stage's free slots for waiting episodes, if there are any."""
        if self._running and self._simulator.resets_together:
            return False
        started: dict[int, Episode] = {}
        for slot in stage.slots:
            is_next = self._waiting and (self._waiting[0].attempt or not self._is_draining)
            if slot not in self._running and is_next:
                started[slot] = self._running[slot] = self._waiting.popleft()
        if started:
            filmed = [slot for slot, episode in started.items() if episode.is_filmed]
            seeds = {slot: e.reset_seed for slot, e in started.items()}
            stage.episodes, stage.acts = started, {}
            stage.finish = self._begin_reset(seeds, filmed)
        return bool(started)

    def _record(self, stage: _Stage, tick: Tick) -> None:
        """Record the result of the stage's call. Episodes that were cancelled since are not running any more."""
        going = {slot: e for slot, e in stage.episodes.items() if self._running.get(slot) is e}
        for slot, episode in going.items():
            if slot in tick.failures:
                self._fail(slot, tick.failures[slot])
                continue
            if stage.acts:
                episode.record(stage.acts[slot], stage.version, tick, slot)
            else:
                episode.instruction = tick.instructions.get(slot, "")
            episode.frames += tick.frames.get(slot, [])
            own = {name: values[slot] for name, values in tick.observations.items()}
            episode.observations.append(self._policy.observe(own, episode.instruction))
            if episode.status is not None:
                self._end(slot)

    def _act(self, stage: _Stage) -> None:
        """Begin a decision of the stage's running episodes, if there are any."""
        stage.acts, stage.version = {}, self._current_version()
        stage.episodes = {slot: self._running[slot] for slot in stage.slots if slot in self._running}
        for is_greedy in (False, True):
            running = {slot: e for slot, e in stage.episodes.items() if e.is_greedy is is_greedy}
            if not running:
                continue
            drawn = None if is_greedy else self._uniforms(list(running.values()))
            acted = self._policy.act(_stacked([e.observations[-1] for e in running.values()]), drawn)
            if not np.isfinite(acted.logprobs).all():
                raise EngineError(
                    f"the policy (version {self._version}) gave an action log-prob that is not finite"
                )
            for index, slot in enumerate(running):
                inputs = {name: values[index] for name, values in acted.inputs.items()}
                stage.acts[slot] = Acted(acted.actions[index], inputs, acted.logprobs[index])
        if not stage.acts:
            return
        actions = {slot: acted.actions for slot, acted in stage.acts.items()}
        stage.finish = self._begin_step(actions)

    def _uniforms(self, episodes: Sequence[Episode]) -> NDArray[np.float64]:
        """[running, num_uniforms]"""
        states = absorb(
            np.array([e.random_state() for e in episodes]), np.array([len(e.acts) for e in episodes])
        )
        return unit_interval(absorb(states[:, None], np.arange(self._policy.num_uniforms)))

    def _fail(self, slot: int, reason: str) -> None:
        episode = self._running[slot]
        if episode.attempt < self._retries:
            episode.restart()
            self._waiting.appendleft(self._running.pop(slot))
        else:
            episode.status, episode.reason = Status.INVALID, f"environment: {reason}"
            self._end(slot)

    def _end(self, slot: int) -> None:
        episode = self._running.pop(slot)
        if not episode.future.done():
            episode.future.set_result(None)


@dataclass(slots=True, eq=False)
class _Stage:
    """Slots that are stepped together. `finish` waits for the result of the call that has begun, of `episodes`: a
    decision, with its `acts` and the policy's `version`, or without acts a reset."""

    slots: range
    finish: Callable[[], Tick] | None = None
    episodes: dict[int, Episode] = field(default_factory=dict)
    acts: dict[int, Acted] = field(default_factory=dict)
    version: int = 0


@dataclass(slots=True, eq=False)
class Episode:
    """An episode and its record so far. `key` is (seed, *key of the call, number of the prompt). With
    `is_greedy` the policy takes its most probable action; with `is_filmed` the trajectory has a recording. After
    `max_decisions` it is truncated. `first_attempt` is the number of attempts at earlier episodes of the same
    sample, and `own_reset` its number among them if it does not begin in the group's reset state."""

    prompt: Prompt
    sample: int
    key: tuple[int, ...]
    is_greedy: bool
    is_filmed: bool = False
    max_decisions: int | None = None
    first_attempt: int = 0
    own_reset: int | None = None
    attempt: int = 0
    status: Status | None = None
    reason: str = ""
    is_cut: bool = False
    instruction: str = ""
    observations: list[dict[str, Any]] = field(default_factory=list)
    acts: list[Acted] = field(default_factory=list)
    rewards: list[NDArray[np.float32]] = field(default_factory=list)
    num_executed: list[int] = field(default_factory=list)
    success: list[NDArray[np.float32]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    frames: list[NDArray[np.uint8]] = field(default_factory=list)
    future: asyncio.Future[None] = field(init=False)
    _random_state: np.uint64 | None = None

    @property
    def reset_seed(self) -> int:
        """In [0, 2^32); the prompt's if it has one."""
        if (given := self.prompt.fields.get("reset_seed")) is not None:
            return given
        own = () if self.own_reset is None else (self.sample, self.own_reset)
        return int(np.random.SeedSequence((*self.key, *own)).generate_state(1)[0])

    def random_state(self) -> np.uint64:
        """Base of the random numbers of this attempt's decisions."""
        if self._random_state is None:
            self._random_state = stream((*self.key, self.sample, self.first_attempt + self.attempt))
        return self._random_state

    def restart(self) -> None:
        """Start over; the next attempt samples other actions."""
        self.attempt += 1
        self._random_state = None
        for record in (
            self.observations, self.acts, self.rewards, self.num_executed, self.success, self.versions, self.frames
        ):  # fmt: skip
            record.clear()

    def record(self, acted: Acted, version: int, tick: Tick, slot: int) -> None:
        """Record the decision of `slot`, and what the simulator made of it."""
        self.acts.append(acted)
        self.versions.append(version)
        self.rewards.append(tick.rewards[slot])
        self.num_executed.append(tick.num_executed[slot])
        self.success.append(tick.success[slot, : tick.num_executed[slot]])
        if tick.is_terminated[slot]:
            self.status = Status.FINISHED
        elif tick.is_truncated[slot]:
            self.status = Status.TRUNCATED
        elif len(self.acts) == self.max_decisions:
            self.status, self.is_cut = Status.TRUNCATED, True

    def trajectory(self) -> Trajectory:
        assert self.status is not None, "the episode is over"
        trajectory = Trajectory(self.prompt, self.sample, self.status, attempts=self.attempt + 1)
        if self.status is Status.INVALID:
            trajectory.invalidate(self.reason)
            return trajectory
        trajectory.env_steps = EnvSteps(
            observations={name: as_array(of) for name, of in _stacked(self.observations).items()},
            inputs=_stacked([acted.inputs for acted in self.acts]),
            logprobs=np.stack([acted.logprobs for acted in self.acts]),
            rewards=np.stack(self.rewards),
            num_executed=np.array(self.num_executed, np.int32),
            policy_version=version_runs(self.versions),
        )
        success = np.concatenate(self.success)
        if self.is_cut:
            trajectory.truncate("rollout")
        elif not np.isnan(success).any():
            at_end, once = float(success[-1]), float(success.max())
            trajectory.metrics |= {"success_once": once, "success_at_end": at_end}
        trajectory.reward = float(np.sum(self.rewards, dtype=np.float64))
        if self.is_filmed:
            executed = zip(self.rewards, self.num_executed, strict=True)
            rewards = [float(reward) for of, count in executed for reward in of[:count]]
            trajectory.recording = Recording(self.frames, rewards, success > 0, self.instruction)
        return trajectory


def _stacked(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Arrays, or tensors on their device."""
    return {
        name: (torch.stack if isinstance(first, Tensor) else np.stack)([part[name] for part in parts])
        for name, first in parts[0].items()
    }
