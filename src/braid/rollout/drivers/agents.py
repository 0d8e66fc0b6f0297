"""The agent driver: an engine and an environment make trajectories of text. Random numbers depend only on a
trajectory's key, not on the batch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from braid.cluster.loops import task_group
from braid.envs.agents.base import AgentEnv, EpisodeOver, Opening, Outcome, Seats, Step, ToolSchema
from braid.envs.kinds import Timeouts
from braid.errors import BraidError, ConfigError, EngineError, EnvError, Problem
from braid.models.chat import ChatFormat
from braid.models.tokenizer import whole_text
from braid.rollout.conversation import Conversation
from braid.rollout.engine import RolloutEngine, Sampling
from braid.types import Action, Group, Key, Message, Prompt, Trajectory, TruncatedBy, Turn, exact_sum, text_of
from braid.users import described, finite_number, is_the_users, message_of, shown

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an episode. `max_context_tokens` bounds prompt, turns and replies together: a turn gets no
    more tokens than are left, and an episode that runs out of tokens or turns is truncated. A turn cut by its
    own limit ends the episode too, unless `continues_cut_turns`."""

    max_context_tokens: int
    max_turns: int | None
    timeouts: Timeouts
    continues_cut_turns: bool = False
    rewards_at_end: bool = False


@dataclass(frozen=True, slots=True)
class AgentDriver:
    """Turns prompts into groups of trajectories with an engine and one fresh environment per trajectory.

    A trajectory whose environment or engine fails is sampled anew up to `retries` times, with other random
    numbers, then left invalid with the reason of its last failure.
    """

    engine: RolloutEngine
    new_env: Callable[[], AgentEnv]
    chat: ChatFormat
    sampling: Sampling
    limits: Limits
    _: KW_ONLY
    seed: int
    retries: int
    opponent: RolloutEngine | None = None
    """Plays the opponents, with other weights."""

    async def group(self, prompt: Prompt, group_size: int, key: Key) -> Group:
        """Sample a group: `group_size` concurrent episodes of all agents, with the same environment seed."""
        samples = range(group_size)
        env_seed = int(np.random.SeedSequence((self.seed, *key)).generate_state(1)[0])
        async with task_group() as tasks:
            sampled = [
                tasks.create_task(self._trajectory(prompt, i, (self.seed, *key, i), env_seed))
                for i in samples
            ]
        trajectories = [task.result() for task in sampled]
        if any(trajectory.agent_rewards for trajectory in trajectories):
            for trajectory in trajectories:
                if trajectory.is_valid and not trajectory.agent_rewards:  # a limit ended run()
                    _share_out(trajectory, dict.fromkeys((s.agent for s in trajectory.segments), 0.0))
        return Group(prompt, trajectories)

    async def _trajectory(self, prompt: Prompt, sample: int, key: Key, env_seed: int) -> Trajectory:
        trajectory = Trajectory(prompt, sample)
        for attempt in range(self.retries + 1):
            trajectory = Trajectory(prompt, sample, attempts=attempt + 1)
            conversation = Conversation(self.engine, self.chat, trajectory, key=(*key, attempt))
            limit_s = self.limits.timeouts.episode_s
            try:
                env = _Guarded(self.new_env, self.limits.timeouts)
                try:
                    await env.ready(prompt)
                    async with asyncio.timeout(limit_s):
                        if env.agents:
                            await self._run(trajectory, env, env_seed, (*key, attempt))
                        else:
                            await self._play(trajectory, env, env_seed, conversation)
                finally:
                    await env.close()
            except _NoRoom as problem:
                trajectory.invalidate(f"prompt: {problem}")
                break
            except _EnvFailure as failure:
                trajectory.invalidate(f"environment: {failure}")
            except EngineError as error:
                trajectory.invalidate(f"engine: {error}")
            except TimeoutError:
                if any(segment.is_trained for segment in trajectory.segments):
                    trajectory.truncate("time")
                else:
                    trajectory.invalidate(f"no turn ended within env.timeouts.episode_s={limit_s:g}")
            if trajectory.is_valid:
                break
        return trajectory

    async def _run(self, trajectory: Trajectory, env: _Guarded, env_seed: int, key: Key) -> None:
        """Play an episode of several agents."""
        seats = _Seats(self, trajectory, env, key)
        try:
            outcome = await env.run(trajectory.prompt, env_seed, seats)
        except _EnvFailure:
            failures = [seat.failure for seat in seats.opened if seat.failure is not None]
            if failures:
                raise failures[0] from None
            if not any(seat.over for seat in seats.opened):
                raise
            outcome = Outcome()
        finally:  # also where a deadline ends the episode
            agents = list(dict.fromkeys(seat.agent for seat in seats.opened))
            ordered = sorted(seats.opened, key=lambda seat: agents.index(seat.agent))
            trajectory.segments = [segment for seat in ordered for segment in seat.segments]
        for seat in seats.opened:
            if seat.over:
                trajectory.truncate(seat.over)
        if not any(segment.is_trained for segment in trajectory.segments):
            raise _EnvFailure("run() ended without a turn of an agent that is trained")
        trajectory.turns[-1].reward += outcome.reward
        if outcome.rewards:
            _share_out(trajectory, outcome.rewards)
        trajectory.count(outcome.metrics.items())

    def _open(self, conversation: Conversation, opening: Opening, trajectory: Trajectory) -> None:
        prompt = trajectory.prompt
        messages = opening.messages or prompt.messages
        is_ready = not opening.messages and (self.chat.is_plain or not opening.tools)
        try:
            conversation.open(messages, opening.tools, prompt if is_ready else None)
        except Exception as error:  # the template meets the environment's messages and tools
            raise _failure(error) from error
        if (num := conversation.num_tokens) >= (limit := self.limits.max_context_tokens):
            raise _NoRoom(
                f"{num} tokens leave no room for an answer in a context of {limit} tokens; lower "
                "data.max_prompt_tokens, or raise the context limit"
            )

    async def _play(
        self, trajectory: Trajectory, env: _Guarded, env_seed: int, conversation: Conversation
    ) -> None:
        """Play an episode of one agent: turns, until it is over or a limit is reached."""
        opening = await env.start(trajectory.prompt, env_seed)
        self._open(conversation, opening, trajectory)
        limits, tokenizer = self.limits, self.chat.tokenizer
        stops = (*self.sampling.stop_strings, *opening.stop_strings, *self.chat.stop_strings(opening.tools))
        sampling = replace(self.sampling, stop_strings=stops)
        with _rewards_at_end(trajectory) if limits.rewards_at_end else nullcontext():
            while sampled := await conversation.turn(sampling, limits.max_context_tokens):
                turn, action = sampled
                num_turns = len(trajectory.turns)
                trajectory.text += whole_text(tokenizer, turn.output_ids)
                has_room = conversation.num_tokens < limits.max_context_tokens
                if action.stop_reason == "length" and not (limits.continues_cut_turns and has_room):
                    await env.truncate(trajectory, "turn_tokens" if has_room else "context")
                    return
                start_s = time.perf_counter()
                async with env.called("step", limits.timeouts.step_s):
                    step = await env.env.step(action)
                _check(step)
                _count(step, action, turn, trajectory, time.perf_counter() - start_s)
                if step.is_done or step.is_truncated or num_turns == limits.max_turns:
                    trajectory.text += "".join(text_of(message["content"]) for message in step.messages)
                    if step.is_truncated and not step.is_done:
                        trajectory.truncate("environment")
                    elif not step.is_done:
                        await env.truncate(trajectory, "turns")
                    return
                try:
                    (conversation.restart if step.forgets else conversation.read)(step.messages)
                except Exception as error:
                    raise _failure(error) from error
                trajectory.text += whole_text(tokenizer, conversation.unread)
            await env.truncate(trajectory, "context")


@contextmanager
def _rewards_at_end(trajectory: Trajectory) -> Iterator[None]:
    """However the block ends, give the rewards of all turns to the last."""
    try:
        yield
    finally:
        if turns := trajectory.turns:
            total = exact_sum(turn.reward for turn in turns)
            for turn in turns:
                turn.reward = 0.0
            turns[-1].reward = total


def _share_out(trajectory: Trajectory, rewards: Mapping[str, float]) -> None:
    """Give each trained agent its own reward, in addition to that of its turns; others have none."""
    for agent in {segment.agent: None for segment in trajectory.segments}:
        segments = [segment for segment in trajectory.segments if segment.agent == agent]
        turns = [turn for segment in segments for turn in segment.turns]
        if not segments[0].is_trained:
            for turn in turns:
                turn.reward = 0.0
            continue
        if agent not in rewards:
            raise _EnvFailure(f"run() returned no reward of the agent {agent!r}")
        turns[-1].reward += rewards[agent]
        trajectory.agent_rewards[agent] = exact_sum(turn.reward for turn in turns)
    trajectory.count((f"reward/{agent}", value) for agent, value in trajectory.agent_rewards.items())


class _Seats(dict[str, "_Seat"]):
    """See envs.agents.base.Seats. `opened` are all seats, in the order in which they were opened."""

    def __init__(self, driver: AgentDriver, trajectory: Trajectory, env: _Guarded, key: Key) -> None:
        super().__init__()
        self._driver, self._trajectory, self._env, self._key = driver, trajectory, env, key
        self.opened: list[_Seat] = []
        self.max_turns = driver.limits.max_turns
        for agent in env.agents:
            self[agent] = self.open(agent)

    def open(self, agent: str) -> _Seat:
        engine = self._driver.engine
        if agent in self._env.opponents:
            if self._driver.opponent is None:
                why = (
                    f"the environment has an opponent, {agent!r}; set it, for example to {{every_rounds: 10}}"
                )
                raise ConfigError([Problem("env.opponents", why, "config")])
            engine = self._driver.opponent
        conversation = Conversation(
            engine,
            self._driver.chat,
            self._trajectory,
            key=self._key,
            agent=agent,
            number=sum(seat.agent == agent for seat in self.opened),
            is_trained=agent not in self._env.untrained,
        )
        self.opened.append(_Seat(self, agent, self._driver, self._trajectory, conversation))
        return self.opened[-1]


class _Seat:
    """See envs.agents.base.Seat. `failure` is the engine's error, which `run` may not handle; `over` is the
    limit that was reached."""

    def __init__(
        self,
        seats: _Seats,
        agent: str,
        driver: AgentDriver,
        trajectory: Trajectory,
        conversation: Conversation,
    ) -> None:
        self._seats, self.agent, self.segments = seats, agent, conversation.segments
        self._driver, self._trajectory, self._conversation = driver, trajectory, conversation
        self._turns: list[Turn] = []
        self._stops: tuple[str, ...] = ()
        self.failure: EngineError | None = None
        self.over: TruncatedBy | None = None

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Action:
        limits, chat, sampling = self._driver.limits, self._driver.chat, self._driver.sampling
        if len(self._turns) == self._seats.max_turns:
            raise self._end("turns")
        if self._turns:
            self._conversation.read(messages)
        else:
            self._conversation.open(messages, tools)
            self._stops = chat.stop_strings(tools)
        sampling = replace(sampling, stop_strings=(*sampling.stop_strings, *self._stops))
        try:
            sampled = await self._conversation.turn(sampling, limits.max_context_tokens)
        except EngineError as error:
            self.failure = error
            raise
        if sampled is None:
            raise self._end("context")
        turn, action = sampled
        self._turns.append(turn)
        self._trajectory.text += whole_text(chat.tokenizer, [*turn.context_ids, *turn.output_ids])
        self._trajectory.count(action.call_counts())
        if action.stop_reason == "length" and not limits.continues_cut_turns:
            raise self._end("turn_tokens")
        return action

    def reward(self, value: float) -> None:
        if not self._turns:
            raise EnvError("reward() of an agent that has not had a turn")
        self._turns[-1].reward += value

    def _end(self, by: TruncatedBy) -> EpisodeOver:
        self.over = by
        return EpisodeOver("an agent has no turns or tokens left")


def _check(step: object) -> None:
    """Raise _EnvFailure for a value of step() that cannot be one."""
    if not isinstance(step, Step):
        raise _EnvFailure(f"step() returned {type(step).__name__}, not a Step")
    if any(message["role"] == "assistant" for message in step.messages):
        raise _EnvFailure("step() returned a message of the role assistant, in which only the policy speaks")


def _count(step: Step, action: Action, turn: Turn, trajectory: Trajectory, seconds: float) -> None:
    """Record the reward, times and metrics of a turn and the `step` after it, which took `seconds`."""
    turn.reward, turn.env_s, turn.tool_s = step.reward, seconds, step.tool_s
    added = [("step_s", turn.env_s), ("tool_s", turn.tool_s), *step.metrics.items()]
    trajectory.count([*added, *action.call_counts()])


class _NoRoom(Exception):
    """The prompt fills the context."""


class _EnvFailure(Exception):
    """An environment raised, was late, or returned an invalid reply."""


class _Guarded:
    """An environment `env`, whose calls have deadlines and raise their exceptions as _EnvFailure, in blocks
    of `called`."""

    def __init__(self, new_env: Callable[[], AgentEnv], timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        try:
            self.env: Any = new_env()
        except BaseException as error:
            if not is_the_users(error):
                raise
            raise _failure(error) from error

    def _names(self, attribute: str) -> tuple[str, ...]:
        try:
            names = getattr(self.env, attribute, ())
            agents = () if isinstance(names, str) else tuple(names)
        except Exception as error:  # of a property
            raise _failure(error) from error
        if isinstance(names, str) or not all(isinstance(name, str) for name in agents):
            raise _EnvFailure(f"{attribute} is {shown(names)}, not names of agents")
        return agents

    @property
    def agents(self) -> tuple[str, ...]:
        return self._names("agents")

    @property
    def untrained(self) -> tuple[str, ...]:
        return (*self._names("untrained"), *self.opponents)

    @property
    def opponents(self) -> tuple[str, ...]:
        return self._names("opponents")

    async def run(self, task: Prompt, seed: int, seats: Seats) -> Outcome:
        async with self.called("run", None):
            outcome = await self.env.run(task, seed, seats)
        if not isinstance(outcome, Outcome):
            raise _EnvFailure(f"run() returned {type(outcome).__name__}, not an Outcome")
        if outcome.reward and outcome.rewards:
            raise _EnvFailure("run() returned both a reward and rewards of each agent")
        return outcome

    async def ready(self, task: Prompt) -> None:
        """Wait for what an environment shares with others, such as processes; no deadline includes this."""
        if ready := getattr(self.env, "ready", None):
            async with self.called("ready", None):
                await ready(task)

    async def start(self, task: Prompt, seed: int) -> Opening:
        async with self.called("start", self._timeouts.start_s):
            opening = await self.env.start(task, seed)
        if not isinstance(opening, Opening):
            raise _EnvFailure(f"start() returned {type(opening).__name__}, not an Opening")
        return opening

    async def truncate(self, trajectory: Trajectory, by: TruncatedBy) -> None:
        """End the trajectory by a limit, with the reward of the environment up to here, if it has one."""
        trajectory.truncate(by)
        if reward := getattr(self.env, "final_reward", None):
            async with self.called("step", self._timeouts.step_s):
                value = await reward()
            try:
                trajectory.turns[-1].reward += finite_number(value, "final_reward() returned")
            except ValueError as error:
                raise _failure(error) from error

    async def close(self) -> None:
        """Close the environment. A failure is logged: the episode is over."""
        try:
            async with self.called("close", self._timeouts.close_s):
                await self.env.close()
        except _EnvFailure as failure:
            logger.warning("an environment could not be closed: %s", failure)

    @asynccontextmanager
    async def called(self, name: str, limit_s: float | None) -> AsyncIterator[None]:
        """Wrap a call of the environment's method `name`, with this deadline. Raises its exceptions, and a
        missed deadline, as _EnvFailure."""
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                yield
        except ConfigError:
            raise
        except BaseException as error:
            if deadline.expired():
                raise _EnvFailure(f"{name}() took longer than env.timeouts.{name}_s={limit_s:g}") from error
            if not is_the_users(error):
                raise
            raise _failure(error) from error


def _failure(error: BaseException) -> _EnvFailure:
    return _EnvFailure(message_of(error) if isinstance(error, BraidError) else described(error))
