"""Rewards: a weighted sum of parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, Union

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from braid.rewards.kinds import REWARDS, JudgeReward, ModelReward, RewardPart
from braid.sections import Section, Unused

if TYPE_CHECKING:
    from braid.plan.plan import Plan

    from .schema import RunConfig

    PartKind = RewardPart
else:
    PartKind = Annotated[Union[tuple(REWARDS.values())], Field(discriminator="kind")]  # noqa: UP007

P = TypeVar("P", bound=RewardPart)


class OverlongConfig(Section):
    """A penalty that grows linearly over the last tokens before the length limit (DAPO, arXiv 2503.14476)."""

    buffer_tokens: PositiveInt
    """Tokens before rollout.sampling.max_new_tokens over which the penalty grows, for the longest turn."""
    penalty: PositiveFloat = 1.0
    """Penalty at the limit."""


class CodeConfig(Section):
    """Sandbox of the programs that rewards run."""

    isolation: Literal["auto", "bubblewrap", "sandlock", "process"] = "auto"
    """Sandbox: bubblewrap, sandlock, or with auto the first of them that works on this machine; if none does,
    the run is refused. process: only limits on time, memory and files; the program can read files, use the
    network and kill processes."""


class RewardConfig(Section):
    """Scoring of trajectories. The weighted sum of the parts is added to the environment's reward. For
    training, this sum is zeroed (`truncated`), penalised (`overlong`), scaled, shifted and clipped, in this
    order; evaluation and `reward/mean` use it unchanged."""

    parts: tuple[PartKind, ...] = ()
    """Reward functions that score the final text."""
    truncated: Literal["keep", "zero"] = "keep"
    """zero: truncated trajectories get reward 0 in training."""
    overlong: OverlongConfig | None = None
    """Penalty for long responses, in training only; none when null."""
    scale: float = 1.0
    """Factor on the reward, in training only."""
    shift: float = 0.0
    """Constant added to the scaled reward, in training only."""
    clip: PositiveFloat | None = None
    """Bound on the absolute value of the reward, in training only; null for none."""
    timeout_s: PositiveFloat = 30.0
    """Timeout of one call of a part, in seconds."""
    retries: NonNegativeInt = 1
    """Retries after a failed call before the trajectory becomes invalid."""
    concurrency: PositiveInt = 16
    """Maximum concurrent calls of functions and processes."""
    code: CodeConfig = CodeConfig()
    """Sandbox of the programs that rewards run."""

    def models(self) -> Iterator[tuple[int, ModelReward]]:
        """(index, part) of each reward model."""
        return self._of_kind(ModelReward)

    def judges(self) -> Iterator[tuple[int, JudgeReward]]:
        """(index, part) of each judge with a model that the run loads."""
        return ((i, part) for i, part in self._of_kind(JudgeReward) if part.path is not None)

    def _of_kind(self, kind: type[P]) -> Iterator[tuple[int, P]]:
        return ((i, part) for i, part in enumerate(self.parts) if isinstance(part, kind))

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if not self.parts:
            yield "there are no reward parts", "reward.{timeout_s,retries,concurrency}"
        if all(part.has_own_limits for part in self.parts):
            yield "judges have their own retries", "reward.retries"
        if not any(part.runs_programs for part in self.parts):
            yield "no reward part runs programs", "reward.code"
        if all(part.is_on_engine for _, part in self._of_kind(JudgeReward)):
            yield "no judge is on a server", "reward.parts[].{backoff_s,max_backoff_s}"
        of_engine = "reward.parts[].engine"
        yield (
            "a judge loads its weights once, on every worker of its role",
            f"{of_engine}.{{load_weights,replicas,recompute_cache}}",
        )
        if not any(part.engine.is_served for _, part in self.judges()):
            yield "a judge's requests have a single turn", f"{of_engine}.prefix_caching"
