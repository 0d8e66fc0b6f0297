"""Plays episodes of a simulator with the policy.

Whole episodes, as many at a time as the simulator has slots, in lock step; a free slot starts the next
waiting episode, whichever group it belongs to. The slots may be split into stages, each in lock step: while
one is stepped, the actions of another are computed. An episode's reset state depends only on its prompt's
number, and the random numbers of an action only on episode and decision, so results depend neither on the
number of slots nor on which episodes ran side by side.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from braid.envs.simulators.base import Overlapping, Simulator, Tick, as_array
from braid.errors import BraidError, EngineError
from braid.models.base import Acted
from braid.rollout.engine import version_runs
from braid.rollout.random import absorb, stream, unit_interval
from braid.types import EnvSteps, Prompt, Recording, Status, Trajectory, exact_sum

from .stepped import SteppedEngine

_BLOCK_DECISIONS, _BLOCK_BYTES = 64, 2**26
"""Most decisions, and most bytes unless it is a single decision, of a block of a log."""
_DRAWN_AHEAD = 32
"""Decisions of an episode whose random numbers are drawn at a time."""
Rows = slice | NDArray[np.int64]


class ActingPolicy(Protocol):
    """A policy as the engine needs it (such as models.mlp.MlpPolicy).

    `observe` returns the part of observations [E, ...] that `act` and the model's forward pass read; a text
    policy adds the tokens of the instructions. `act` takes its result, and uniform random numbers [E,
    num_uniforms] in [0, 1), or None for the likeliest actions. `temperature` is that of actions which are
    tokens; None: that of training. Observations are arrays, or tensors on the simulator's device.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def num_uniforms(self) -> int: ...

    def observe(self, observations: Mapping[str, Any], instructions: Sequence[str]) -> Mapping[str, Any]: ...

    def act(
        self,
        observations: Mapping[str, Any],
        uniforms: NDArray[np.float64] | None,
        temperature: float | None = None,
    ) -> Acted: ...


class SimulatorEngine(SteppedEngine):
    """Plays episodes of a simulator with a policy, several at a time: rollout.engine.Engine for robots."""

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
        """An episode whose environment fails is restarted up to `retries` times, with other actions, then
        left invalid. With `owns_weights` the engine keeps a copy of the policy, updated by `set_weights`.
        Several stages only gain time with an Overlapping simulator. With `offloads`, `sleep` closes the
        simulator, which a reset has to open again."""
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
        """Whether it acts with the trained module itself."""
        return self._policy is self._source

    @property
    def num_pending(self) -> int:
        """Episodes that wait or run."""
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
        """In each stage: finish its call of the simulator; then begin the next, which starts an episode in
        each free slot, or else is a decision of every running episode."""
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
                started[slot].first = stage.decision
        if started:
            stage.log.drop_before(
                min(self._running[slot].first for slot in stage.slots if slot in self._running)
            )
            filmed = [slot for slot, episode in started.items() if episode.is_filmed]
            seeds = {slot: e.reset_seed for slot, e in started.items()}
            stage.episodes, stage.acts = started, False
            stage.finish = self._begin_reset(seeds, filmed)
        return bool(started)

    def _record(self, stage: _Stage, tick: Tick) -> None:
        """Record the result of the stage's call. Episodes that were cancelled since are not running any
        more."""
        stage.decision += stage.acts
        going = {slot: e for slot, e in stage.episodes.items() if self._running.get(slot) is e}
        for slot, reason in tick.failures.items():
            if going.pop(slot, None) is not None:
                self._fail(slot, reason)
        for slot, frames in tick.frames.items():
            if slot in going:
                going[slot].frames += frames
        if not going:
            return
        slots = list(going)
        rows, chosen = stage.rows(slots), stage.chosen(slots)
        if stage.acts:
            names = ("rewards", "num_executed", "success")
            stage.log.put(stage.decision - 1, rows, {name: getattr(tick, name)[chosen] for name in names})
        else:
            for slot, episode in going.items():
                episode.instruction = tick.instructions.get(slot, "")
        chosen_only = {name: values[chosen] for name, values in tick.observations.items()}
        observed = self._policy.observe(chosen_only, [episode.instruction for episode in going.values()])
        stage.log.put(stage.decision, rows, _prefixed("observations", observed))
        if stage.acts:
            is_terminated, is_truncated = tick.is_terminated.tolist(), tick.is_truncated.tolist()
            for slot, episode in going.items():
                if episode.is_over(stage.decision, is_terminated[slot], is_truncated[slot]):
                    episode.keep(stage.log, stage.slots.index(slot), stage.decision)
                    self._end(slot)

    def _act(self, stage: _Stage) -> None:
        """Begin a decision of the stage's running episodes, if there are any."""
        stage.acts, version = True, self._current_version()
        stage.episodes = {slot: self._running[slot] for slot in stage.slots if slot in self._running}
        actions: dict[int, NDArray[Any]] = {}
        for temperature in dict.fromkeys(episode.temperature for episode in stage.episodes.values()):
            slots = [slot for slot, episode in stage.episodes.items() if episode.temperature == temperature]
            rows, count = stage.rows(slots), self._policy.num_uniforms
            drawn = None
            if temperature is not None:
                drawn = np.stack([self._running[slot].uniforms(stage.decision, count) for slot in slots])
            acted = self._policy.act(stage.log.at(stage.decision, rows, "observations"), drawn, temperature)
            if not np.isfinite(acted.logprobs).all():
                raise EngineError(
                    f"the policy (version {self._version}) gave an action log-prob that is not finite"
                )
            written = {"logprobs": acted.logprobs, "versions": np.full(len(slots), version)}
            stage.log.put(stage.decision, rows, written | _prefixed("inputs", acted.inputs))
            actions.update(zip(slots, acted.actions, strict=True))
        if actions:
            stage.finish = self._begin_step(actions)
        else:
            stage.log, stage.decision = _Log(len(stage.slots)), 0

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


class _Log:
    """The decisions of E environments, by number: arrays [E, ...] by name, or tensors on their device. They
    are kept in blocks of consecutive decisions."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs, self._blocks = num_envs, dict[tuple[str, int], Any]()
        self._lengths: dict[str, int] = {}

    def put(self, decision: int, rows: Rows, values: Mapping[str, Any]) -> None:
        """Values [n, ...] of some rows."""
        for name, array in values.items():
            length = self._lengths.get(name)
            if length is None:
                size = self._num_envs * array[0].nbytes
                length = self._lengths[name] = max(1, min(_BLOCK_DECISIONS, _BLOCK_BYTES // max(size, 1)))
            number, place = divmod(decision, length)
            block = self._blocks.get((name, number))
            if block is None:
                shape = (length, self._num_envs, *array.shape[1:])
                block = array.new_empty(shape) if isinstance(array, Tensor) else np.empty(shape, array.dtype)
                self._blocks[name, number] = block
            block[place, rows] = array

    def at(self, decision: int, rows: Rows, prefix: str) -> dict[str, Any]:
        """The values [n, ...] of a decision whose names begin with `prefix`, without it."""
        values: dict[str, Any] = {}
        for name, length in self._lengths.items():
            if name.startswith(prefix):
                number, place = divmod(decision, length)
                values[name.removeprefix(f"{prefix}/")] = self._blocks[name, number][place][rows]
        return values

    def column(self, name: str, row: int, first: int, stop: int) -> Any:
        """A row's values of the decisions from `first` to before `stop`, on the host."""
        length = self._lengths[name]
        numbers = range(first // length, (stop - 1) // length + 1)
        parts = [
            self._blocks[name, number][max(0, first - number * length) : stop - number * length, row]
            for number in numbers
        ]
        return np.concatenate([as_array(part) for part in parts])

    def columns(self, prefix: str, row: int, first: int, stop: int) -> dict[str, NDArray[Any]]:
        """`column` of all names that begin with `prefix`, without it."""
        names = [name for name in self._lengths if name.startswith(prefix)]
        return {name.removeprefix(f"{prefix}/"): self.column(name, row, first, stop) for name in names}

    def drop_before(self, decision: int) -> None:
        """Free the blocks in which all decisions are earlier."""
        lengths = self._lengths
        self._blocks = {
            (name, number): block
            for (name, number), block in self._blocks.items()
            if (number + 1) * lengths[name] > decision
        }


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}/{name}": array for name, array in values.items()}


class _Stage:
    """Slots that are stepped together. `decision` is the number of the next one, which `log` has by row.
    `finish` waits for the result of the call that has begun, of `episodes`: a decision if the stage `acts`,
    else a reset."""

    def __init__(self, slots: range) -> None:
        self.slots, self.log, self.decision = slots, _Log(len(slots)), 0
        self.finish: Callable[[], Tick] | None = None
        self.episodes: dict[int, Episode] = {}
        self.acts = False

    def rows(self, slots: Sequence[int]) -> Rows:
        """Rows of the log, of slots in order."""
        is_each = len(slots) == len(self.slots)
        return slice(None) if is_each else np.array([self.slots.index(slot) for slot in slots])

    def chosen(self, slots: Sequence[int]) -> Rows:
        """Index of slots, in order, in arrays of all."""
        is_each = len(slots) == len(self.slots)
        return slice(self.slots.start, None, self.slots.step) if is_each else np.array(slots)


@dataclass(slots=True, eq=False)
class Episode:
    """An episode and its record so far. `key` is (seed, *key of the call, number of the prompt). With a
    `temperature` of None the policy takes its most probable actions; with `is_filmed` the trajectory has a
    recording. After `max_decisions` it is truncated. `first_attempt` is the number of attempts at earlier
    episodes of the same sample, and `own_reset` its number among them if it does not begin in the group's
    reset state."""

    prompt: Prompt
    sample: int
    key: tuple[int, ...]
    temperature: float | None
    is_filmed: bool = False
    max_decisions: int | None = None
    first_attempt: int = 0
    own_reset: int | None = None
    attempt: int = 0
    status: Status | None = None
    reason: str = ""
    is_cut: bool = False
    instruction: str = ""
    frames: list[NDArray[np.uint8]] = field(default_factory=list)
    first: int = 0
    """Number of its first decision in the stage's log."""
    steps: EnvSteps | None = None
    success: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """After each executed action."""
    future: asyncio.Future[None] = field(init=False)
    _random_state: np.uint64 | None = None
    _drawn: tuple[int, NDArray[np.float64]] | None = None

    @property
    def reset_seed(self) -> int:
        """In [0, 2^32); the prompt's if it has one."""
        if (seed := self.prompt.fields.get("reset_seed")) is not None:
            return seed
        resets_alone = () if self.own_reset is None else (self.sample, self.own_reset)
        return int(np.random.SeedSequence((*self.key, *resets_alone)).generate_state(1)[0])

    def uniforms(self, decision: int, count: int) -> NDArray[np.float64]:
        """The random numbers [count] of a decision of this attempt."""
        block, place = divmod(decision - self.first, _DRAWN_AHEAD)
        if self._drawn is None or self._drawn[0] != block:
            if self._random_state is None:
                self._random_state = stream((*self.key, self.sample, self.first_attempt + self.attempt))
            decisions = np.arange(block * _DRAWN_AHEAD, (block + 1) * _DRAWN_AHEAD)
            states = absorb(np.broadcast_to(self._random_state, decisions.shape), decisions)
            self._drawn = block, unit_interval(absorb(states[:, None], np.arange(count)))
        return self._drawn[1][place]

    def restart(self) -> None:
        """Start over; the next attempt samples other actions."""
        self.attempt += 1
        self._random_state = self._drawn = None
        self.frames.clear()

    def is_over(self, next_decision: int, is_terminated: bool, is_truncated: bool) -> bool:
        """Whether the episode has ended before this decision; notes how."""
        if is_terminated:
            self.status = Status.FINISHED
        elif is_truncated:
            self.status = Status.TRUNCATED
        elif next_decision - self.first == self.max_decisions:
            self.status, self.is_cut = Status.TRUNCATED, True
        return self.status is not None

    def keep(self, log: _Log, row: int, stop: int) -> None:
        """Take the decisions from the log, up to the one before `stop`."""
        column = partial(log.column, row=row, first=self.first, stop=stop)
        self.steps = EnvSteps(
            observations=log.columns("observations", row, self.first, stop + 1),
            inputs=log.columns("inputs", row, self.first, stop),
            logprobs=column("logprobs"),
            rewards=column("rewards"),
            num_executed=column("num_executed"),
            policy_version=version_runs(column("versions").tolist()),
        )
        success = column("success")
        self.success = success[np.arange(success.shape[1]) < self.steps.num_executed[:, None]]

    def trajectory(self) -> Trajectory:
        assert self.status is not None, "the episode is over"
        trajectory = Trajectory(self.prompt, self.sample, self.status, attempts=self.attempt + 1)
        if self.status is Status.INVALID:
            trajectory.invalidate(self.reason)
            return trajectory
        assert self.steps is not None, "it has ended in the simulator"
        trajectory.env_steps, success, rewards = self.steps, self.success, self.steps.rewards
        if self.is_cut:
            trajectory.truncate("rollout")
        if not np.isnan(success).any():
            at_end, once = float(success[-1]), float(success.max())
            trajectory.metrics |= {"success_once": once, "success_at_end": at_end}
        trajectory.reward = exact_sum(rewards.ravel().tolist())
        if self.is_filmed:
            executed = zip(rewards.tolist(), self.steps.num_executed, strict=True)
            shown = [reward for chunk, count in executed for reward in chunk[:count]]
            trajectory.recording = Recording(self.frames, shown, success > 0, self.instruction)
        return trajectory
