"""The agent environment protocol. Environments see messages, never tokens: the driver
(`rollout.drivers.agents`) owns these, random numbers, length limits and retries.

A mistake of the policy, such as a malformed tool call, is answered with a message. An exception is a failure
of the environment: the episode is invalid, sampled anew, then left out of training. It is never scored 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from braid.types import Action, Message, Prompt
from braid.users import finite_number, finite_numbers, messages_of, shown, truth

_set = object.__setattr__  # the records are frozen

ToolSchema = Mapping[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters": JSON schema}}."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The start of an episode. Without `messages` the policy reads those of its task. `tools` are shown to it
    by the chat template. `stop_strings` end a turn of the policy, in addition to those of the config."""

    messages: Sequence[Message] = ()
    tools: Sequence[ToolSchema] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for values of other types, in the line that made them."""
        _set(self, "messages", messages_of(self.messages))
        for name, kind in (("tools", Mapping), ("stop_strings", str)):
            values = getattr(self, name)
            is_list = isinstance(values, Sequence) and not isinstance(values, str)
            if not is_list or not all(isinstance(value, kind) for value in values):
                raise ValueError(f"{name} must be a list of {kind.__name__}, not {shown(values)}")


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's reply to a turn of the policy.

    `reward` is that of the turn. `is_done`: the episode is over. `is_truncated`: a limit of the environment
    ended it early. `metrics` are added to those of the episode. `tool_s` is the time spent in tools.
    `forgets`: the policy next reads only `messages`, without the conversation before them, in a new segment.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    is_done: bool = False
    is_truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    tool_s: float = field(default=0.0, compare=False)
    forgets: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for values of other types, in the line that made them."""
        _set(self, "messages", messages_of(self.messages))
        _set(self, "metrics", finite_numbers(self.metrics, "metrics"))
        for name in ("reward", "tool_s"):
            _set(self, name, finite_number(getattr(self, name), f"{name} is"))
        for name in ("is_done", "is_truncated", "forgets"):
            _set(self, name, truth(getattr(self, name), name))


class AgentEnv(Protocol):
    """One episode, for single use: `start`, then `step` until a step is done or truncated, then `close`.

    `close` is called whatever happens: when the episode is over, has failed or is cancelled. Each call has a
    deadline (`env.timeouts`). Methods may be plain functions, which are then called in a thread or process
    (`env.run_in`).
    """

    async def start(self, task: Prompt, seed: int) -> Opening:
        """Start an episode. Those of a group have the same task and seed, other groups other seeds."""
        ...

    async def step(self, action: Action) -> Step:
        """Reply to the policy's turn."""
        ...

    async def close(self) -> None:
        """Free what the episode holds."""
        ...


class Seat(Protocol):
    """One agent of an episode of several, played by the policy in a conversation of its own."""

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Action:
        """The agent's turn after `messages`; `tools` are those of its first turn. Raises EpisodeOver beyond
        the limits of turns and tokens."""
        ...

    def reward(self, value: float) -> None:
        """Add to the reward of the agent's last turn."""
        ...


class Seats(Protocol):
    """The agents of an episode, by name."""

    max_turns: int | None
    """Turns that each conversation may have."""

    def __getitem__(self, agent: str, /) -> Seat: ...

    def open(self, agent: str) -> Seat:
        """Start a further conversation of an agent, also of one that is not in `agents`: a sub-agent with a
        context of its own. Random numbers depend on how many conversations of the agent there were before."""
        ...


class EpisodeOver(Exception):
    """An agent has no turns or tokens left: the episode is truncated. `run` may return what it has until
    then."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an episode: the reward of all agents together, and metrics.

    `rewards` are those of each agent, as in zero-sum games; every one that is trained has one. Agents are
    then not credited with each other's rewards, and each is compared with the same agent in other episodes of
    the group. Where a limit ends an episode, each has the rewards of its turns.
    """

    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for values of other types, in the line that made them."""
        _set(self, "reward", finite_number(self.reward, "reward is"))
        for name in ("metrics", "rewards"):
            _set(self, name, finite_numbers(getattr(self, name), name))


class MultiAgentEnv(Protocol):
    """One episode of several agents, for single use. All are played by the policy, with prompts of their own,
    one after the other or concurrently; segments of those in `untrained` are left out of training."""

    agents: tuple[str, ...]
    """Names of the agents. `untrained` and `opponents`, if they exist, are names among them: opponents are
    played by earlier weights of the policy (`env.opponents`), and never trained."""

    async def run(self, task: Prompt, seed: int, seats: Seats) -> Outcome:
        """Play the episode. Those of a group have the same task and seed."""
        ...

    async def close(self) -> None:
        """Free what the episode holds."""
        ...
