"""The records that flow through a run: prompts, turns, trajectories, groups, rows.

Owns the words of the system and nothing else; imports neither torch nor any other heavy package.
A *trajectory* is one episode. A *row* is what training sees of it: flat arrays over positions, the same
for a language model's tokens and a simulator's env steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

# The names of an algorithm's parts, as a config writes them. algorithms/ gives each its function and recipes.
RecipeName = Literal[
    "grpo",
    "ppo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "topr",
    "clip_cov",
    "kl_cov",
    "dppo",
    "decoupled_ppo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "lite_ppo",
    "rloo",
    "remax",
    "raft",
    "maxrl",
    "gigpo",
]
Advantage = Literal["grpo", "gae", "reinforce", "rloo", "remax", "raft", "maxrl", "gigpo"]
AdvantageLevel = Literal["trajectory", "turn"]
RewardStatistics = Literal["none", "group", "batch", "running"]
PolicyLoss = Literal[
    "ppo_clip", "policy_gradient", "cispo", "sapo", "topr", "clip_cov", "kl_cov", "dppo", "cross_entropy"
]
RatioLevel = Literal["token", "turn", "sequence"]
Divergence = Literal["tv", "kl"]
CorrectionLevel = Literal["token", "turn", "sequence", "turn_geometric", "geometric"]
CorrectionMode = Literal["truncate", "mask"]
KlEstimator = Literal["k1", "k2", "k3", "abs"]
KlPlace = Literal["loss", "reward"]
Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant", "prompt_mean"
]


class Message(TypedDict):
    """A chat message in the form that chat templates take."""

    role: str
    content: str


class Status(StrEnum):
    """How a trajectory ended. INVALID means the machinery failed: it has no reward and is never trained on."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task input, ready to sample from.

    `uid` is stable across runs and resumes ("source:index"); `fields` holds the columns of the data row
    (the answer among them) for rewards and environments.
    """

    uid: str
    source: str
    token_ids: tuple[int, ...]
    messages: tuple[Message, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)


StopReason = Literal["stop", "length", "cancelled"]


@dataclass(slots=True)
class Turn:
    """What the environment said, then what the policy answered.

    `context_ids` are the tokens put before the policy's tokens since the turn before (the whole prompt in the
    first turn); they are never trained on. `logprobs` are natural logs under the distribution sampled from, one
    per output token. `reward` is what the environment gave for this turn.
    """

    context_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    policy_version: int
    reward: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ActionSpace:
    """What a policy may do in a simulator: one of `size` choices, numbered from 0, or a vector of `size` floats."""

    kind: Literal["discrete", "continuous"]
    size: int


@dataclass(slots=True)
class EnvSteps:
    """The env steps of one simulator episode. S env steps; `observations` has S + 1 entries (the last is final).

    `actions` are [S] int64 for choices, [S, A] float32 for vectors (as drawn, before any clipping to bounds).
    `logprobs` are of the whole action, [S]. `values` are left to the critic.
    """

    observations: NDArray[np.float32]
    actions: NDArray[Any]
    logprobs: NDArray[np.float32]
    rewards: NDArray[np.float32]
    policy_version: int


@dataclass(frozen=True, slots=True)
class ShapedReward:
    """The reward that training sees: `total` for the trajectory. Each reward that the environment gave on the way counts
    `factor` times; what is left of the total comes with the policy's last position."""

    total: float
    factor: float = 1.0


class Lengths(NamedTuple):
    """Sizes of an episode: `outputs` positions that the policy wrote (tokens, or env steps), `total` with what it read, in
    `turns` turns (0 for simulators)."""

    outputs: int
    total: int
    turns: int


@dataclass(slots=True)
class Trajectory:
    """One episode: a text episode has `turns`, a simulator's has `env_steps`.

    `sample` is its index within the group. `reward` is None until scored, and for ever when invalid; `shaped` is what
    training makes of it, None where nothing is made. `reward_parts` are the unweighted scores by part. `answer_text` is the
    text of the policy's last turn; `text` that of all policy turns and replies after the prompt. Where only the facts are at
    hand, turns, env steps and texts are empty and `known_lengths` has their sizes.
    """

    prompt: Prompt
    sample: int
    status: Status = Status.FINISHED
    reason: str = ""
    turns: list[Turn] = field(default_factory=list)
    env_steps: EnvSteps | None = None
    text: str = ""
    answer_text: str = ""
    reward: float | None = None
    shaped: ShapedReward | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    attempts: int = 1
    known_lengths: Lengths | None = None

    @property
    def is_valid(self) -> bool:
        return self.status is not Status.INVALID

    @property
    def training_reward(self) -> float:
        """What training sees: the shaped reward, or the reward itself. Of valid, scored trajectories only."""
        assert self.reward is not None, f"trajectory {self.prompt.uid}/{self.sample} is not scored"
        return self.reward if self.shaped is None else self.shaped.total

    @property
    def num_output_tokens(self) -> int:
        """Positions that the policy wrote: tokens, or env steps."""
        return self.lengths.outputs

    @property
    def lengths(self) -> Lengths:
        """Sizes of the episode, wherever it lies."""
        if self.known_lengths is not None:
            return self.known_lengths
        if self.env_steps is not None:
            num_steps = len(self.env_steps.rewards)
            return Lengths(num_steps, num_steps, 0)
        outputs = sum(len(turn.output_ids) for turn in self.turns)
        context = sum(len(turn.context_ids) for turn in self.turns)
        return Lengths(outputs, outputs + context, len(self.turns))

    def invalidate(self, reason: str) -> None:
        """Mark as failed by the machinery: the reward goes, the reason stays."""
        self.status, self.reason, self.reward, self.shaped = Status.INVALID, reason, None, None


@dataclass(slots=True)
class Group:
    """Trajectories that share a prompt (or a reset state). Baselines are taken within it.

    `number` tells it from the other groups of its round. `greedy` is the likeliest answer, where its reward is the baseline; it is never trained on. Trajectories are left out of
    the repr: asyncio.Runner takes the repr of each result, which took seconds for long episodes.
    """

    prompt: Prompt
    trajectories: list[Trajectory] = field(repr=False)
    greedy: Trajectory | None = field(default=None, repr=False)
    number: int = 0

    @property
    def valid(self) -> list[Trajectory]:
        return [t for t in self.trajectories if t.is_valid]

    @property
    def sampled(self) -> list[Trajectory]:
        """All that the policy wrote for it, the greedy answer last."""
        return [*self.trajectories, *([] if self.greedy is None else [self.greedy])]


@dataclass(slots=True)
class Row:
    """One training sequence of T positions.

    `inputs` is what the model reads, each array with T along its first axis: `input_ids` for text;
    `observations` and `actions` for simulators. Every per-position array is aligned so that index t speaks of
    the token (or action) at t: its log-prob given everything before it, its reward, its advantage, and the value of
    the state just before it. `mask` is True exactly where the policy wrote; elsewhere arrays hold 0.

    `fields` grows on the way: behavior_logprobs, rewards, then old_logprobs, ref_logprobs, values, advantages,
    returns as the algorithm needs them. `is_terminal` is False when the episode was cut by a limit of time, so that
    the value after the last position is bootstrapped rather than zero; `is_truncated` is True when any limit cut it.
    `group` numbers the prompt within the round, `baseline` is the reward of its greedy answer, where there is one.
    """

    inputs: dict[str, NDArray[Any]]
    mask: NDArray[np.bool_]
    group: int
    trajectory: int
    is_terminal: bool = True
    is_truncated: bool = False
    baseline: float | None = None
    fields: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def num_tokens(self) -> int:
        """Positions that the policy wrote."""
        return int(self.mask.sum())
