"""What a check of the training loop is, and what it is judged by.

A check states what holds in every correct loop, and is judged once a round. Workers measure it and return
sums, which add up over processes; tokens never leave them. Whatever a check measures changes no number of the
run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from braid.plan.sizes import training_dtype
from braid.types import CheckName, Group

if TYPE_CHECKING:
    from braid.config.schema import RunConfig
    from braid.plan import Plan

Sort = Literal["identity", "statistic", "heuristic"]
"""identity: holds exactly, up to rounding. statistic: holds on average over tokens that the policy sampled.
heuristic: holds in runs that go well."""
Sums = dict[str, float]
"""Numbers by name that add up over micro-batches, rows and processes."""
MIN_Z = 6.0
"""Standard errors by which a statistic must differ from its expectation."""


def add_sums(total: Sums, sums: Mapping[str, float]) -> None:
    """Add `sums` to those of `total`."""
    for name, value in sums.items():
        total[name] = total.get(name, 0.0) + value


class StepReport(Protocol):
    """What a check reads of training.backend.StepReport."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def lr(self) -> float: ...
    @property
    def is_skipped(self) -> bool: ...
    @property
    def is_stopped(self) -> bool: ...
    @property
    def metrics(self) -> Mapping[str, tuple[float, float]]: ...
    @property
    def maxima(self) -> Mapping[str, float]: ...
    @property
    def checks(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step of the round. `weight` is what the weights of its loss must sum to."""

    role: Literal["policy", "critic"]
    report: StepReport
    weight: float


@dataclass(slots=True)
class Evidence:
    """What was measured in a round. `sums` are those of rows and groups, `groups` the ones that are trained
    on, without tokens. `metrics` are the round's so far."""

    round: int
    sums: Sums = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    groups: Sequence[Group] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    def steps_of(self, role: str) -> list[Step]:
        return [step for step in self.steps if step.role == role]

    @property
    def first(self) -> Mapping[str, float]:
        """Sums over the tokens of the policy's first step, whose weights are those that sampled; empty
        without one."""
        steps = self.steps_of("policy")
        return steps[0].report.checks if steps else {}


class Check:
    """One check. `rounds` is the number of consecutive judged rounds that must violate it. `holds` is what
    holds in a correct loop, `causes` the likeliest bugs where it does not, and `look_at` the key or part to
    look at."""

    name: ClassVar[CheckName]
    sort: ClassVar[Sort]
    rounds: ClassVar[int] = 1
    holds: ClassVar[str]
    threshold: ClassVar[str]
    is_off: ClassVar[str] = ""
    """When it is off, for the documentation; `why_off` decides."""
    causes: ClassVar[str]
    look_at: ClassVar[str]

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        self.config, self.plan = config, plan

    def why_off(self) -> str:
        """Why it does not hold in correct runs of this config; empty if it does."""
        return ""

    def judge(self, evidence: Evidence) -> str | None:
        """How the round violates it, with numbers; empty if it does not, None if nothing was measured."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Trip:
    """A check that tripped: `since` is the first of the consecutive rounds that violated it, `rounds` the
    number of rounds in which it tripped so far."""

    check: CheckName
    sort: Sort
    since: int
    last: int
    rounds: int
    evidence: str
    causes: str
    look_at: str

    def __str__(self) -> str:
        return (
            f"check {self.check} ({self.sort}) has tripped: {self.evidence}, since round {self.since}. "
            f"Likeliest cause: {self.causes}. Look at: {self.look_at}"
        )


def is_exact(config: RunConfig, plan: Plan) -> bool:
    """Whether engine and trainer both compute in float32."""
    has_gpus = plan.layout.has_gpus
    trains_in = training_dtype(config, has_gpus=has_gpus)
    samples_in = config.rollout.engine.dtype_in(config, plan.num_parameters, has_gpus=has_gpus)
    return trains_in == "fp32" and samples_in in ("fp32", "float32", "auto")


def most_k3(config: RunConfig, plan: Plan) -> float:
    """Largest mean k3, in nats per token, between two computations of the same log-probs: rounding leaves
    about 1e-13 in float32 and 1e-6 in bfloat16; GPUs may multiply in TF32."""
    if not is_exact(config, plan):
        return 1e-2
    return 1e-4 if plan.layout.has_gpus else 1e-6


def why_not_the_trainers(config: RunConfig) -> str:
    """Why tokens are not sampled from the distribution that the trainer computes; empty if they are."""
    sampling = config.rollout.sampling
    if config.train.router_replay != "none":
        return "train.router_replay changes the trainer's experts"
    if sampling.greedy:
        return "rollout.sampling.greedy is set"
    if sampling.top_p < 1 or sampling.top_k or sampling.min_p:
        return "rollout.sampling.{top_p,top_k,min_p} restrict the tokens that are sampled"
    if sampling.repetition_penalty != 1 or sampling.min_new_tokens:
        return "rollout.sampling.{repetition_penalty,min_new_tokens} change the distribution sampled from"
    if config.max_lag:
        return "pipeline.max_lag allows tokens of earlier weights"
    return ""


def is_selected(config: RunConfig, plan: Plan) -> str:
    """Why the tokens that are trained on are selected by how their trajectory ended; empty if they are
    not."""
    rules = config.rollout.filter
    if not (rules.min_std is None and rules.min_mean is None and rules.max_mean is None):
        return "rollout.filter selects groups by their rewards"
    if plan.recipe.mask_truncated or plan.recipe.mask_long_failures is not None:
        return "algorithm.mask_truncated or mask_long_failures selects answers by their length"
    return ""


def z_score(total: float, squares: float, count: float) -> float:
    """Standard errors by which the mean of `count` values with these sums differs from 0."""
    mean = total / count
    variance = max(squares / count - mean * mean, 0.0)
    return mean / max((variance / count) ** 0.5, 1e-12)
