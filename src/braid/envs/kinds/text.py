"""Environments of text: what they share, and conversations of several turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveFloat, PositiveInt

from braid.sections import Section, Unused

from .base import Environment

if TYPE_CHECKING:
    from braid.config.schema import RunConfig
    from braid.envs.agents.base import AgentEnv
    from braid.models.chat import ChatFormat
    from braid.plan.plan import Plan
    from braid.rollout.drivers.agents import Limits
    from braid.rollout.drivers.base import Driver
    from braid.rollout.engine import RolloutEngine, Sampling

Close = Callable[[], Awaitable[None]]
NewDriver = Callable[..., "Driver"]
"""(engine, chat format, sampling, maximum tokens of a context, *, seed, retries, opponent) -> driver."""


class Timeouts(Section):
    """Time limits of an episode, in seconds. A call that takes longer is a failure of the environment."""

    start_s: PositiveFloat = 300.0
    """Time limit of an environment's start."""
    step_s: PositiveFloat = 300.0
    """Time limit of an environment's reply to a turn."""
    close_s: PositiveFloat = 30.0
    """Time limit of closing an environment."""
    episode_s: PositiveFloat | None = None
    """Time limit of an episode, sampling included, after which it is truncated; null for none."""


class TextEnv(Environment):
    """An environment of messages. Its methods may import what the config does not."""

    def chat_options(self) -> dict[str, Any]:
        """Settings of the conversation's format (models.chat.ChatFormat)."""
        return {}

    def check_chat(self, chat: ChatFormat) -> None:
        """Raise ModelError if the chat template cannot continue a conversation as the environment needs."""

    def environments(self, base_dir: Path) -> tuple[Callable[[], AgentEnv], Close | None]:
        """What makes the environment of an episode, and what closes that they share. Raises ConfigError."""
        raise NotImplementedError

    def check(self, base_dir: Path) -> None:
        """Raise ConfigError if there is no such environment."""
        self.environments(base_dir)

    def limits(self, context: int) -> Limits:
        """Limits of an episode whose context has at most `context` tokens."""
        from braid.rollout.drivers.agents import Limits

        return Limits(context, None, Timeouts())

    def own_tasks(self, use: Literal["train", "eval"]) -> dict[str, int]:
        """Number of the tasks that each environment of the mixture makes itself, by its name."""
        return {}

    def drivers(self, base_dir: Path, *, needs_reward: bool) -> tuple[NewDriver, Close | None]:
        """What makes drivers of its episodes, and what closes that these share. With `needs_reward` there are
        no reward parts. Raises ConfigError."""
        from braid.rollout.drivers.agents import AgentDriver

        del needs_reward  # an environment without rewards has reward parts
        new_env, close = self.environments(base_dir)

        def new_driver(
            engine: RolloutEngine, chat: ChatFormat, sampling: Sampling, context: int, **options: Any
        ) -> Driver:
            return AgentDriver(engine, new_env, chat, sampling, self.limits(context), **options)

        return new_driver, close

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        yield "env.timeouts limits the calls of text environments", "rollout.env_timeout_s"


class ChatEnv(TextEnv):
    """Settings of conversations of several turns."""

    max_turns: PositiveInt = 4
    """Maximum turns of the policy, after which the trajectory is truncated."""
    max_context_tokens: PositiveInt = 1024
    """Maximum tokens of prompt, turns and replies, after which the trajectory is truncated."""
    tool_format: (
        Literal["hermes", "qwen_xml", "glm", "llama", "mistral", "deepseek", "pythonic", "harmony", "tag"]
        | None
    ) = None
    """Format of the policy's tool calls; null: that of the chat template, or `tag`
    (`<calculator>6*7</calculator>`) without one."""
    thinking: Literal["keep", "as_template"] = "keep"
    """The policy's reasoning in earlier turns: keep it, so that a conversation is one training row, or drop
    it where the chat template does, which begins a new segment and row."""

    @property
    def turn_limit(self) -> int:
        return self.max_turns

    @property
    def context_limit(self) -> int:
        return self.max_context_tokens

    def chat_options(self) -> dict[str, Any]:
        return {"tool_format": self.tool_format, "thinking": self.thinking}


class SteppedEnv(ChatEnv):
    """An environment that replies to each turn of the policy."""

    cut_turns: Literal["end", "continue"] = "end"
    """A turn cut at sampling.max_new_tokens ends the episode as truncated, or the environment replies to
    it."""
    replies: Literal["messages", "text"] = "messages"
    """The environment's replies: messages of the chat template; or text without roles, after which the policy
    goes on with the same answer. An end token is then dropped from the context, which begins a new segment
    and row."""
    timeouts: Timeouts = Timeouts()
    """Time limits."""
    rewards_at: Literal["turn", "end"] = "turn"
    """Position of the environment's rewards: at the end of the turn that earned them, or their sum at the end
    of the episode. Matters to estimators of returns: gae, reinforce, gigpo, and advantage_level=turn."""

    @property
    def uses_tools(self) -> bool:
        """Whether the policy calls tools in its turns."""
        return False

    @property
    def ends_cut_turns(self) -> bool:
        return self.cut_turns == "end"

    def chat_options(self) -> dict[str, Any]:
        return super().chat_options() | {"replies": self.replies}

    def check_chat(self, chat: ChatFormat) -> None:
        if self.max_turns > 1 and self.replies == "messages":
            chat.check(uses_tools=self.uses_tools)

    def limits(self, context: int) -> Limits:
        from braid.rollout.drivers.agents import Limits

        cut, at_end = self.cut_turns == "continue", self.rewards_at == "end"
        return Limits(context, self.max_turns, self.timeouts, cut, at_end)

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if self.replies == "text":
            yield "replies are text within the policy's answer", "env.thinking"
        yield from super().unused(config, plan)
