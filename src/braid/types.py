"""The records that flow through a run: prompts, turns, trajectories, groups, rows.

Defines the vocabulary of the system and imports neither torch nor any other heavy package.
A *trajectory* is one episode. A *row* is its training sequence: flat arrays over positions, the same for a
language model's tokens and a simulator's env steps.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

Groups = dict[str, tuple[tuple[int, ...], ...]]
"""Parallel dimension of a role -> the ranks of each of its groups."""

# Choices of an algorithm's parts; the kinds of advantages and policy losses and the names of recipes are in
# algorithms/.
AdvantageLevel = Literal["trajectory", "turn"]
Bootstrap = Literal["truncated", "always"]
RewardStatistics = Literal["none", "group", "source", "batch", "running"]
RatioLevel = Literal["token", "turn", "sequence", "turn_product", "sequence_product"]
DecisionLevel = Literal["token", "action", "chunk"]
TurnWeighting = Literal["tokens", "turns"]
CorrectionLevel = Literal["token", "turn", "sequence", "turn_geometric", "geometric"]
CorrectionMode = Literal["truncate", "mask", "mask_sequence"]
CorrectionMeasure = Literal["ratio", "difference"]
CorrectionTokens = Literal["all", "kept"]
KlRest = Literal["tail", "renormalize", "drop"]
KlEstimator = Literal["k1", "k2", "k3", "abs", "full", "full_forward", "full_jensen_shannon"]
TiledDivergence = Literal["kl", "forward_kl", "jensen_shannon"]
"""Those that models.logprobs computes over a vocabulary."""
Divergence = TiledDivergence | Literal["skewed_kl", "skewed_forward_kl", "adaptive_kl", "mixed_kl"]
KlPlace = Literal["loss", "reward", "advantage"]
Aggregation = Literal[
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "token_sum_constant",
    "prompt_mean",
    "agent_mean_token_mean",
]

CheckName = Literal[
    "sampler_logprobs",
    "sampler_weights",
    "sampler_entropy",
    "first_ratio",
    "later_ratios",
    "policy_versions",
    "group_advantages",
    "gae_replay",
    "trained_tokens",
    "stop_reasons",
    "prompt_opening",
    "repeated_answers",
    "repeated_scores",
    "repeated_prompts",
    "loss_weights",
    "weight_updates",
    "reference_start",
    "kl_formula",
    "reference_kl",
    "packing",
    "explained_variance",
]
"""The checks of the loop (checks/)."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image as the bytes of its file. `key` identifies them: images with equal keys are equal."""

    key: str
    data: bytes = field(repr=False, compare=False)

    @classmethod
    def of(cls, data: bytes) -> Image:
        return cls(hashlib.blake2b(data, digest_size=16).hexdigest(), data)


class Placed(NamedTuple):
    """An image, and the positions of a sequence that stand for it: `num` from `start` on."""

    start: int
    num: int
    image: Image


class Encoded(NamedTuple):
    """A conversation as a reward model reads it: its tokens, and the images that some of them stand for."""

    ids: list[int]
    images: tuple[Placed, ...] = ()


def identity(ids: Sequence[int], images: Iterable[Placed]) -> tuple[int, ...]:
    """Equal for sequences with equal tokens and images: `ids` with a negative number of the image in
    place of the tokens that stand for it."""
    out = list(ids)
    for start, num, image in images:
        out[start : start + num] = [-1 - int(image.key[:12], 16)] * num
    return tuple(out)


class Message(TypedDict):
    """A chat message in the form that chat templates take. One with role `tool` answers the tool call with
    its `tool_call_id`, of the tool `name`. A content with images is a list of parts,
    `{"type": "text", "text": str}` and `{"type": "image", "image": Image}`."""

    role: str
    content: Any
    name: NotRequired[str]
    tool_call_id: NotRequired[str]


def text_of(content: Any) -> str:
    """The text of a message's content, without its images."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or () if part["type"] == "text")


def images_in(messages: Iterable[Mapping[str, Any]]) -> list[Image]:
    """The images of messages, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return [part["image"] for part in parts if part["type"] == "image"]


CallStatus = Literal["ok", "bad_json", "not_an_object", "unknown_tool", "bad_arguments"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the policy wrote. `arguments` fit the tool's schema where `status` is "ok"; otherwise
    `error` is the reason, for the policy to read. `id` is unique within the episode."""

    name: str
    arguments: Mapping[str, Any]
    id: str
    status: CallStatus = "ok"
    error: str = ""


StopReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Action:
    """A turn of the policy, parsed by its model's format. `text` is the answer: without reasoning, tool
    calls, other channels than the final one, and end tokens. `raw_text` is all that was sampled, with special
    tokens but for the end tokens. `prefill` is how the context begins the turn: `<think>` where the chat
    template writes it."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: StopReason = "stop"
    raw_text: str = ""
    prefill: str = ""

    def call_counts(self) -> list[tuple[str, float]]:
        """Metrics of the tool calls: by status; of tools that exist also by tool and status."""
        known = [call for call in self.tool_calls if call.status in ("ok", "bad_arguments")]
        names = [
            *(call.status for call in self.tool_calls),
            *(f"{call.name}/{call.status}" for call in known),
        ]
        return [(f"calls/{name}", 1.0) for name in names]


class Status(StrEnum):
    """How a trajectory ended. INVALID: environment, reward or engine failed; it has no reward and is never
    trained on."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task input, ready to sample from.

    `uid` is stable across runs and resumes ("source:index"); `fields` holds the columns of the data row
    (the answer among them) for rewards and environments. `images` are those that tokens stand for.
    """

    uid: str
    source: str
    token_ids: tuple[int, ...]
    messages: tuple[Message, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Placed, ...] = ()


Key = tuple[int, ...]
"""The seed of random numbers: equal keys give equal numbers."""
UNKNOWN_EXPERT = -1
"""In place of the index of an expert that a token was routed to: the router of the model chooses."""
PolicyVersion = int | tuple[tuple[int, int], ...]
"""The policy version that wrote a turn's tokens; or runs of (version, number of tokens), in order, if the
weights changed while it was written."""


@dataclass(slots=True)
class Turn:
    """The environment's message and the policy's answer.

    `context_ids` are the tokens read since the previous turn (in the first turn the whole prompt); they are
    never trained on. `logprobs` are natural logs under the distribution sampled from, one per output token.
    `reward` is the environment's reward for this turn. Sampling began at `start_s` and ended at `end_s`, as
    time.time() gives it. The environment then took `env_s` seconds to reply, `tool_s` of them in tools.
    `experts` [n, L, K] are those that the engine chose in each of L layers for the n tokens before the last
    one, back to the last of the previous turn; None unless they are replayed. `images` are placed in
    `context_ids`.
    """

    context_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    policy_version: PolicyVersion
    reward: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    env_s: float = 0.0
    tool_s: float = 0.0
    experts: NDArray[np.signedinteger] | None = None
    images: tuple[Placed, ...] = ()


@dataclass(slots=True)
class Segment:
    """One context of one agent, which was only ever appended to; it becomes one row.

    An agent that compacts its context or calls another one starts a segment, whose first turn reads all of
    the new context.
    """

    turns: list[Turn] = field(default_factory=list)
    agent: str = "main"
    is_trained: bool = True


@dataclass(frozen=True, slots=True)
class ActionSpace:
    """Actions in a simulator: one of `size` choices, numbered from 0, or a vector of `size` floats."""

    kind: Literal["discrete", "continuous"]
    size: int


@dataclass(frozen=True, slots=True)
class Spaces:
    """What the policy of a simulator reads and writes: a state of `state_size` floats, `images` by name with
    their (height, width, channels), and actions."""

    state_size: int
    actions: ActionSpace
    images: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class EnvSteps:
    """One simulator episode, of D decisions: chunks of H actions, of which the simulator executed the first
    `num_executed` [D] (all, unless the episode ended).

    `observations` are arrays [D + 1, ...] by name (the last entry is final): `state` in float32, images in
    uint8. A decision is P positions of a row. `inputs` has what the policy's model reads at them, [D, P,
    ...]: a perceptron's `actions` as drawn, before any clipping to bounds. `logprobs` are [D, P], `rewards`
    [D, H].
    """

    observations: dict[str, NDArray[Any]]
    inputs: dict[str, NDArray[Any]]
    logprobs: NDArray[np.float32]
    rewards: NDArray[np.float32]
    num_executed: NDArray[np.int32]
    policy_version: PolicyVersion

    @property
    def num_positions(self) -> NDArray[np.int32]:
        """Positions of each decision whose actions were executed [D]."""
        return np.maximum(self.num_executed * self.logprobs.shape[1] // self.rewards.shape[1], 1)


@dataclass(frozen=True, slots=True)
class Recording:
    """Film of an episode: S + 1 frames [h, w, 3], the first after the reset, and rewards and successes of the
    S env steps."""

    frames: Sequence[NDArray[np.uint8]]
    rewards: Sequence[float]
    successes: Sequence[bool] | NDArray[np.bool_] = ()
    title: str = ""


@dataclass(frozen=True, slots=True)
class ShapedReward:
    """The reward used for training: `total` for the trajectory. Rewards that the environment gave during the
    episode are scaled by `factor`; the rest of the total is placed at the policy's last position."""

    total: float
    factor: float = 1.0


class Lengths(NamedTuple):
    """Sizes of an episode: `outputs` positions written by the policy (tokens, or parts of decisions), `total`
    including those that it read, in `turns` turns (0 for simulators). `versions` are the policy versions that
    wrote the outputs that are trained on, each with the number of positions, the oldest first. Sampling took
    `sample_s` seconds, and the environment `env_s` for each of its replies. A simulator executed
    `env_steps`."""

    outputs: int
    total: int
    turns: int
    versions: tuple[tuple[int, int], ...] = ()
    sample_s: float = 0.0
    env_s: tuple[float, ...] = ()
    env_steps: int = 0


def exact_sum(values: Iterable[float]) -> float:
    """Sum of numbers, rounded once, so that it does not depend on their order; inf or nan if it overflows."""
    numbers = list(values)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # of numbers so large, or of inf and -inf
        return sum(numbers)


def is_at_least(value: float, bound: float) -> bool:
    """Whether `value` reaches `bound` up to rounding: weights 0.7, 0.2 and 0.1 may sum to a little less than
    1."""
    return value >= bound or math.isclose(value, bound, rel_tol=1e-9, abs_tol=1e-12)


TruncatedBy = Literal["turns", "context", "turn_tokens", "time", "environment", "rollout"]
"""The limit that ended an episode: of turns, of tokens of the context, of tokens of one turn, of time, the
environment's own, or the env steps of a rollout."""


@dataclass(slots=True)
class Trajectory:
    """One episode: a text episode has `segments`, in order, a simulator's has `env_steps`.

    `sample` is its index within the group. `reward` is None until scored, and stays None when invalid;
    `shaped` is the reward used for training, None if it is `reward` itself. `agent_rewards` are the
    environment's rewards of each agent, if agents have rewards of their own: `reward` has their sum.
    `reward_parts` are the unweighted scores by part. `text` is everything after the prompt as the model reads
    it, with special tokens.

    Of the policy's last turn, which rewards read: `sampled_text` is all that was sampled, with special tokens
    but for the end tokens (`answer_text` unless given), `prefill` how the context begins it, such as
    `<think>`, and `answer_text` and `reasoning_text` are parsed from both by the model's format.

    Where only metadata is available, segments, env steps and texts are empty and `known_lengths` has their
    sizes.
    """

    prompt: Prompt
    sample: int
    status: Status = Status.FINISHED
    reason: str = ""
    segments: list[Segment] = field(default_factory=list)
    env_steps: EnvSteps | None = None
    recording: Recording | None = None
    text: str = ""
    answer_text: str = ""
    sampled_text: str = ""
    prefill: str = ""
    reasoning_text: str = ""
    reward: float | None = None
    shaped: ShapedReward | None = None
    agent_rewards: dict[str, float] = field(default_factory=dict)
    reward_parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    attempts: int = 1
    known_lengths: Lengths | None = None

    def __post_init__(self) -> None:
        self.sampled_text = self.sampled_text or self.answer_text

    @property
    def turns(self) -> list[Turn]:
        """The turns of all segments."""
        return [turn for segment in self.segments for turn in segment.turns]

    @property
    def is_valid(self) -> bool:
        return self.status is not Status.INVALID

    @property
    def training_reward(self) -> float:
        """The reward used for training: the shaped reward, or the reward itself. Only of valid, scored
        trajectories."""
        assert self.reward is not None, f"trajectory {self.prompt.uid}/{self.sample} is not scored"
        return self.reward if self.shaped is None else self.shaped.total

    @property
    def training_rewards(self) -> dict[str, float]:
        """The training reward of each agent with rewards of its own, otherwise of all together as "". Reward
        parts and what shaping adds count for each of them."""
        if not self.agent_rewards:
            return {"": self.training_reward}
        factor = 1.0 if self.shaped is None else self.shaped.factor
        rest = exact_sum(
            [self.training_reward, *(-factor * reward for reward in self.agent_rewards.values())]
        )
        return {agent: factor * reward + rest for agent, reward in self.agent_rewards.items()}

    @property
    def num_output_tokens(self) -> int:
        """Positions that the policy wrote: tokens, or parts of decisions."""
        return self.lengths.outputs

    @property
    def lengths(self) -> Lengths:
        """Sizes of the episode, also where only its metadata is available."""
        if self.known_lengths is not None:
            return self.known_lengths
        if self.env_steps is not None:
            counts, version = self.env_steps.num_positions, self.env_steps.policy_version
            runs = [(version, len(counts))] if isinstance(version, int) else version
            ends = np.cumsum([0, *(num for _, num in runs)])
            written = [
                (version, int(counts[a:b].sum()))
                for (version, _), a, b in zip(runs, ends, ends[1:], strict=False)
            ]
            total = int(counts.sum())
            executed = int(self.env_steps.num_executed.sum())
            return Lengths(total, total, 0, _by_version(written), env_steps=executed)
        turns = self.turns
        outputs = sum(len(turn.output_ids) for turn in turns)
        context = sum(len(turn.context_ids) for turn in turns)
        trained = [turn for segment in self.segments if segment.is_trained for turn in segment.turns]
        versions = _by_version([(turn.policy_version, len(turn.output_ids)) for turn in trained])
        sample_s = sum(turn.end_s - turn.start_s for turn in turns)
        env_s = tuple(turn.env_s for turn in turns if turn.env_s)
        return Lengths(outputs, outputs + context, len(turns), versions, sample_s, env_s)

    def set_last_turn(self, action: Action) -> None:
        """Set the texts of the policy's last turn."""
        self.sampled_text, self.prefill = action.raw_text, action.prefill
        self.answer_text, self.reasoning_text = action.text, action.reasoning

    def truncate(self, by: TruncatedBy) -> None:
        """Mark as truncated, with the limit in the metrics."""
        self.status = Status.TRUNCATED
        self.metrics[f"truncated/{by}"] = 1.0

    def count(self, metrics: Iterable[tuple[str, float]]) -> None:
        """Add to the metrics."""
        for name, value in metrics:
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    def invalidate(self, reason: str) -> None:
        """Mark as invalid, with the reason; removes the reward."""
        self.status, self.reason, self.reward, self.shaped = Status.INVALID, reason, None, None


def _by_version(written: Sequence[tuple[PolicyVersion, int]]) -> tuple[tuple[int, int], ...]:
    counts = Counter[int]()
    for version, num in written:
        for policy_version, part in ((version, num),) if isinstance(version, int) else version:
            counts[policy_version] += part
    return tuple(sorted(counts.items()))


@dataclass(slots=True)
class Group:
    """Trajectories that share a prompt (or a reset state). Baselines are taken within it.

    `key` identifies it, and seeds its random numbers. `greedy` is the greedy answer, for recipes whose
    baseline is its reward; it is never trained on. Trajectories are left out of the repr: asyncio.Runner
    takes the repr of each result, which took seconds for long episodes.
    """

    prompt: Prompt
    trajectories: list[Trajectory] = field(repr=False)
    greedy: Trajectory | None = field(default=None, repr=False)
    key: Key = ()

    @property
    def valid(self) -> list[Trajectory]:
        return [t for t in self.trajectories if t.is_valid]

    @property
    def compared_rewards(self) -> list[list[float]]:
        """The training rewards of valid trajectories that are compared with each other: of all, or of each
        agent."""
        rewards: dict[str, list[float]] = {}
        for trajectory in self.valid:
            for agent, reward in trajectory.training_rewards.items():
                rewards.setdefault(agent, []).append(reward)
        return list(rewards.values())

    @property
    def sampled(self) -> list[Trajectory]:
        """All sampled trajectories, the greedy answer last."""
        return [*self.trajectories, *([] if self.greedy is None else [self.greedy])]


@dataclass(slots=True)  # frozen ones are slow to send, and there is one for each row
class RowMetadata:
    """What the driver knows of a row, which has no arrays: `index` is its place in the RolloutBuffer of
    process `shard`; the others as in Row."""

    shard: int
    index: int
    length: int
    num_tokens: int
    num_decisions: int
    num_actions: int
    group: int
    trajectory: int
    agent: int
    is_truncated: bool
    score: float
    source: str

    def __len__(self) -> int:
        return self.length


@dataclass(slots=True)
class Row:
    """One training sequence of T positions: a segment of a trajectory, or a simulator's episode. Lists of
    rows hold all rows of a trajectory, one after the other in the order of its segments.

    `inputs` are the model's inputs, each array with T along its first axis: `input_ids` for text, `actions`
    for perceptrons. `experts` [T, L, K] are those to choose in each layer, UNKNOWN_EXPERT where the router
    does (train.router_replay). In every per-position array index t belongs to the token (or action) at t: its
    log-prob given everything before it, its reward, its advantage, and the value of the state just before it.
    `mask` is True exactly where the policy wrote; elsewhere arrays hold 0.

    `decision` numbers the decisions from 0 and is -1 outside the mask: a decision is a turn of text, a chunk
    of actions, or an env step of a simulator. By default the row is one. `policy_versions` are the versions
    of the weights that wrote each position, 0 outside the mask.

    `action_size` is the number of positions of a robot's action, 1 unless these are its components. `images`
    are the images that a language model reads.

    `observations` are what the decisions observed, such as states or images: arrays of any dtype with one
    entry per decision, and a last one where the row goes on after its last decision. `observed` refers to
    them.

    `fields` starts with behavior_logprobs and rewards (float64 until advantages are computed); old_logprobs,
    ref_logprobs, kl, values, advantages and returns are added as the algorithm needs them. `is_terminal` is
    False when a time limit cut the episode, so that the value after the last position is bootstrapped rather
    than zero; `is_truncated` is True when any limit cut it. `group` is the prompt's index in the round,
    `baseline` the reward of its greedy answer, if there is one. `agent` is the index of the row's agent
    within its trajectory, `source` the prompt's source. `score` is the trajectory's reward before shaping.
    `reward_parts` are the unweighted scores of its trajectory by part.
    `player` is the name of the row's agent if agents have rewards of their own: `score`, `baseline`, returns
    and comparisons within the group are then those of this agent.
    """

    inputs: dict[str, NDArray[Any]]
    mask: NDArray[np.bool_]
    group: int
    trajectory: int
    is_terminal: bool = True
    is_truncated: bool = False
    score: float = 0.0
    baseline: float | None = None
    fields: dict[str, NDArray[np.floating]] = field(default_factory=dict)
    observations: dict[str, NDArray[Any]] = field(default_factory=dict)
    decision: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    policy_versions: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    agent: int = 0
    source: str = ""
    reward_parts: dict[str, float] = field(default_factory=dict)
    player: str = ""
    action_size: int = 1
    images: tuple[Placed, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.decision):
            self.decision = np.where(self.mask, np.int32(0), np.int32(-1))
        if not len(self.policy_versions):
            self.policy_versions = np.zeros(len(self.mask), np.int32)

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def num_tokens(self) -> int:
        """Positions that the policy wrote."""
        return int(self.mask.sum())

    @property
    def num_decisions(self) -> int:
        return int(self.decision.max(initial=-1)) + 1

    @property
    def num_actions(self) -> int:
        return self.num_tokens // self.action_size

    def metadata(self, shard: int, index: int) -> RowMetadata:
        """The row without its arrays, as the one at this place of a rollout buffer."""
        return RowMetadata(
            shard=shard,
            index=index,
            length=len(self),
            num_tokens=self.num_tokens,
            num_decisions=self.num_decisions,
            num_actions=self.num_actions,
            group=self.group,
            trajectory=self.trajectory,
            agent=self.agent,
            is_truncated=self.is_truncated,
            score=self.score,
            source=self.source,
        )

    @property
    def observed(self) -> NDArray[np.int32]:
        """The index of each position's observation: that of its decision, or of the next one outside the
        mask."""
        return np.maximum.accumulate(self.decision) + ~self.mask
