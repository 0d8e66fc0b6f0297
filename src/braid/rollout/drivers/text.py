"""The text driver: an engine and a text environment make trajectories.

In a later turn the policy reads exactly the tokens that it read and wrote before, followed by the environment's
reply; sampled text is never re-tokenised. Random numbers depend only on a trajectory's key, not on the batch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from braid.cluster.loops import all_of
from braid.envs.text.base import Reply, TextEnv
from braid.errors import EngineError, EnvError
from braid.models.tokenizer import plain_text, whole_text
from braid.rollout.engine import Request, RolloutEngine, Sampling
from braid.types import Group, Prompt, Segment, Status, Trajectory, Turn

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextDriver:
    """Turns prompts into groups of trajectories with an engine and one fresh environment per trajectory.

    `max_context_tokens` bounds prompt, turns and replies together: a turn gets no more tokens than are left,
    and a trajectory that runs out is truncated. A trajectory whose environment or engine fails is sampled
    anew up to `retries` times, with other random numbers, then left invalid with the reason of its last
    failure.
    """

    engine: RolloutEngine
    new_env: Callable[[], TextEnv]
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    _: KW_ONLY
    seed: int
    retries: int
    max_context_tokens: int
    env_timeout_s: float

    async def group(self, prompt: Prompt, group_size: int, key: tuple[int, ...]) -> Group:
        """See Driver."""
        samples = range(group_size)
        return Group(prompt, await all_of(self._trajectory(prompt, i, (self.seed, *key, i)) for i in samples))

    async def _trajectory(self, prompt: Prompt, sample: int, key: tuple[int, ...]) -> Trajectory:
        trajectory = Trajectory(prompt, sample)
        room = self.max_context_tokens - len(prompt.token_ids)
        if room < 1:
            trajectory.invalidate(
                f"prompt: {len(prompt.token_ids)} tokens leave no room for an answer in a context of "
                f"{self.max_context_tokens} tokens; lower data.max_prompt_tokens, or raise the context limit"
            )
            return trajectory
        for attempt in range(self.retries + 1):
            trajectory = Trajectory(prompt, sample, attempts=attempt + 1)
            try:
                env = _Guarded(self.new_env, self.env_timeout_s)
                try:
                    await env.start(prompt)
                    await self._turns(trajectory, env, (*key, attempt))
                finally:
                    await env.close()
            except _EnvFailure as failure:
                trajectory.invalidate(f"environment: {failure}")
            except EngineError as error:
                trajectory.invalidate(f"engine: {error}")
            else:
                break
        return trajectory

    async def _turns(self, trajectory: Trajectory, env: _Guarded, key: tuple[int, ...]) -> None:
        """Run turns until the conversation is over or a limit is reached."""
        sampling = replace(self.sampling, stop_strings=(*self.sampling.stop_strings, *env.stop_strings))
        segment = Segment()
        trajectory.segments.append(segment)
        history: list[int] = []
        context = list(trajectory.prompt.token_ids)
        while True:
            history += context
            room = self.max_context_tokens - len(history)
            if room < 1:
                trajectory.status = Status.TRUNCATED
                return
            completion = await self.engine.generate(
                Request(tuple(history), _within(sampling, room), (*key, len(segment.turns)))
            )
            if completion.stop_reason == "cancelled":
                raise EngineError("the request was cancelled")
            if not (ids := completion.token_ids):
                raise EngineError("the completion has no tokens")
            turn = Turn(
                context_ids=context,
                output_ids=ids,
                logprobs=completion.logprobs,
                stop_reason=completion.stop_reason,
                policy_version=completion.policy_version,
                start_s=completion.start_s,
                end_s=completion.end_s,
            )
            segment.turns.append(turn)
            trajectory.facts["turns"] = float(len(segment.turns))
            has_end = ids[-1] in sampling.stop_token_ids
            trajectory.answer_text = plain_text(self.tokenizer, ids[:-1] if has_end else ids)
            trajectory.text += whole_text(self.tokenizer, ids)
            if completion.stop_reason == "length":
                trajectory.status = Status.TRUNCATED
                return
            start_s = time.perf_counter()
            reply = await env.reply(trajectory.answer_text)
            turn.reward, turn.env_s, turn.tool_s = reply.reward, time.perf_counter() - start_s, reply.tool_s
            trajectory.text += reply.text
            if reply.is_done or reply.is_truncated:
                trajectory.status = Status.FINISHED if reply.is_done else Status.TRUNCATED
                return
            history += turn.output_ids
            context = self.tokenizer.encode(reply.text, add_special_tokens=False)


class _EnvFailure(Exception):
    """An environment raised, was late, or returned an invalid reply."""


class _Guarded:
    """An environment whose calls have a deadline, and whose exceptions are raised as _EnvFailure."""

    def __init__(self, new_env: Callable[[], TextEnv], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        try:
            self._env = new_env()
            self.stop_strings = tuple(self._env.stop_strings)
        except Exception as error:
            raise _failure(error) from error

    async def start(self, prompt: Prompt) -> None:
        await self._in_time(lambda: self._env.start(prompt), "start")

    async def reply(self, text: str) -> Reply:
        reply = await self._in_time(lambda: self._env.reply(text), "reply")
        if not isinstance(reply, Reply):
            raise _EnvFailure(f"{type(reply).__name__} is not a Reply")
        if not math.isfinite(reply.reward):
            raise _EnvFailure(f"reward {reply.reward} is not finite")
        return reply

    async def close(self) -> None:
        """Close the environment. A failure is logged: the conversation is over."""
        close: Callable[[], Awaitable[None]] | None = getattr(self._env, "close", None)
        if close is not None:
            try:
                await self._in_time(close, "close")
            except _EnvFailure as failure:
                logger.warning("an environment could not be closed: %s", failure)

    async def _in_time(self, call: Callable[[], Awaitable[T]], name: str) -> T:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await call()
        except Exception as error:
            if deadline.expired():
                raise _EnvFailure(
                    f"{name}() took longer than rollout.env_timeout_s={self._timeout_s:g}"
                ) from error
            raise _failure(error) from error


def _failure(error: Exception) -> _EnvFailure:
    return _EnvFailure(str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}")


def _within(sampling: Sampling, room: int) -> Sampling:
    if room >= sampling.max_new_tokens:
        return sampling
    return replace(sampling, max_new_tokens=room, min_new_tokens=min(sampling.min_new_tokens, room))
