"""The program driver: a user's program plays each episode, and calls the policy through the session
server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from braid.cluster.loops import task_group
from braid.errors import EnvError
from braid.models.chat import ChatFormat
from braid.rollout.engine import RolloutEngine, Sampling, seed_of
from braid.rollout.sessions.chat_api import RequestError, read_reward
from braid.rollout.sessions.programs import Program
from braid.rollout.sessions.recorder import Session
from braid.rollout.sessions.server import SessionServer
from braid.types import Group, Prompt, Status, Trajectory, exact_sum
from braid.users import described, is_the_users


@dataclass(frozen=True, slots=True)
class ProgramDriver:
    """Turns prompts into groups of trajectories, each of which `program` plays.

    `max_context_tokens` bounds each context, `max_turns` the calls of an episode. A trajectory whose program
    fails or takes longer than `timeout_s` is sampled anew up to `retries` times, then left invalid with the
    reason of its last failure. If it fails because a limit refused its last call, it is truncated instead.
    With `needs_reward` the program has to give a reward.
    """

    server: SessionServer
    program: Program
    engine: RolloutEngine
    chat: ChatFormat
    sampling: Sampling
    _: KW_ONLY
    seed: int
    retries: int
    max_context_tokens: int
    max_turns: int
    timeout_s: float
    needs_reward: bool

    async def group(self, prompt: Prompt, group_size: int, key: tuple[int, ...]) -> Group:
        """See Driver. All programs of a group have the same seed."""
        samples = range(group_size)
        async with task_group() as tasks:
            sampled = [tasks.create_task(self._trajectory(prompt, i, (self.seed, *key, i))) for i in samples]
        return Group(prompt, [task.result() for task in sampled])

    async def _trajectory(self, prompt: Prompt, sample: int, key: tuple[int, ...]) -> Trajectory:
        trajectory = Trajectory(prompt, sample)
        for attempt in range(self.retries + 1):
            trajectory = Trajectory(prompt, sample, attempts=attempt + 1)
            session = Session(
                self.engine,
                self.chat,
                self.sampling,
                max_context_tokens=self.max_context_tokens,
                max_turns=self.max_turns,
                key=(*key, attempt),
            )
            try:
                reward = await self._play(prompt, session, seed_of(key[:-1]) >> 31)
                session.write_to(trajectory)
                self._give(trajectory, session.posted if reward is None else reward)
            except (EnvError, RequestError) as failure:
                because = f" (engine: {session.engine_failure})" if session.engine_failure else ""
                trajectory.invalidate(f"program: {failure}{because}")
            else:
                break
        return trajectory

    async def _play(self, prompt: Prompt, session: Session, seed: int) -> object:
        """Run the program; returns its reward. Raises EnvError if it fails, unless a limit has refused its
        last call."""
        async with self.server.open(session) as (base_url, api_key):
            deadline = asyncio.timeout(self.timeout_s)
            try:
                async with deadline:
                    return await self.program(prompt, base_url, api_key, seed)
            except BaseException as error:
                if not deadline.expired() and not is_the_users(error):
                    raise
                if session.over:
                    return None
                if deadline.expired():
                    raise EnvError(f"took longer than env.episode_timeout_s={self.timeout_s:g}") from error
                raise EnvError(str(error) if isinstance(error, EnvError) else described(error)) from error

    def _give(self, trajectory: Trajectory, reward: object) -> None:
        """Add the program's reward to the last turn."""
        if not trajectory.turns:
            raise EnvError("ended without an answer of the policy")
        if reward is None:
            if self.needs_reward and trajectory.status is not Status.TRUNCATED:
                raise EnvError("gave no reward; return or post one, or add a part to reward.parts")
            return
        parsed = read_reward(reward)
        if isinstance(parsed, Mapping):
            trajectory.metrics.update({f"reward/{name}": value for name, value in parsed.items()})
            parsed = exact_sum(parsed.values())
        trajectory.turns[-1].reward = parsed
