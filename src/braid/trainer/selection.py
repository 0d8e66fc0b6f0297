"""Selects the groups of a round to train on.

Implements `rollout.filter`, and drops groups that cannot be trained on whatever the config says. The criteria
use the shaped rewards, as training does. A dropped group enters no statistic, loss or denominator, as if it
had never been sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from braid.algorithms.advantages.groups import reward_std
from braid.config.rollout import FilterConfig
from braid.report.metrics import Metrics
from braid.types import Group, exact_sum, is_at_least

Reason = Literal["invalid", "baseline", "min_std", "min_mean", "max_mean", "surplus"]
"""Why a group was dropped. invalid: no valid trajectory. baseline: its greedy answer is invalid. surplus: the
round was already full. The others are keys of the filter."""


def reason_to_drop(group: Group, config: FilterConfig) -> Reason | None:
    """Reason to drop a group; None to keep it. Uses the unbiased standard deviation; a single trajectory has
    none, so min_std does not apply to it, as in ROLL and SkyRL; if agents have rewards of their own, the
    largest of their standard deviations counts.

    Unlike here, RLinf keeps a group whose mean is exactly at a bound.
    """
    if not group.valid:
        return "invalid"
    if group.greedy is not None and not group.greedy.is_valid:
        return "baseline"
    stds = [reward_std(rewards) for rewards in group.compared_rewards if len(rewards) > 1]
    if config.min_std is not None and stds and is_at_least(config.min_std, max(stds)):
        return "min_std"
    mean = exact_sum(t.training_reward for t in group.valid) / len(group.valid)
    if config.min_mean is not None and is_at_least(config.min_mean, mean):
        return "min_mean"
    if config.max_mean is not None and is_at_least(mean, config.max_mean):
        return "max_mean"
    return None


@dataclass(slots=True)
class Selection:
    """The groups of one round, added batch by batch. `size` is the target: prompts_per_round.

    `kept` is in the order in which the prompts were drawn; `num_replaced` of them are copies. `metrics` are
    those of all that was sampled for the round.
    """

    config: FilterConfig
    size: int
    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    num_batches: int = 0
    num_replaced: int = 0
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def is_done(self) -> bool:
        """Whether no further batch is needed."""
        if self.config.then != "resample":
            return self.num_batches > 0
        return len(self.kept) >= self.size or self.num_batches >= self.config.max_batches

    def add(self, groups: Sequence[Group]) -> None:
        """Add a batch of scored groups. Groups beyond a full round are dropped: in the next round they would
        be off-policy."""
        self.num_batches += 1
        for group in groups:
            reason = reason_to_drop(group, self.config)
            if reason is None and len(self.kept) == self.size:
                reason = "surplus"
            if reason is None:
                self.kept.append(group)
            else:
                self.dropped.append(group)
                self.reasons[reason] += 1

    def fill(self, seed: tuple[int, ...]) -> None:
        """With `then=replace`, fill up the round with copies of kept groups if enough are kept. They are
        drawn without replacement, from `seed`; groups repeat only when all have been copied equally often.

        POLARIS (github.com/ChenxinAn-fdu/POLARIS) and SkyRL draw the copies with replacement.
        """
        missing = self.size - len(self.kept)
        if self.config.then != "replace" or not self.kept or missing <= 0:
            return
        if len(self.kept) < self.config.min_kept_fraction * self.size:
            return
        order = np.random.default_rng(seed).permutation(len(self.kept))
        self.kept += [self.kept[i] for i in np.resize(order, missing)]
        self.num_replaced = missing

    def describe(self) -> str:
        """Human-readable summary of why groups were dropped."""
        config = self.config
        words: dict[str, str] = {
            "invalid": "have no valid trajectory",
            "baseline": "have an invalid greedy answer",
            "min_std": f"have a reward standard deviation <= rollout.filter.min_std={config.min_std}",
            "min_mean": f"have a mean reward <= rollout.filter.min_mean={config.min_mean}",
            "max_mean": f"have a mean reward >= rollout.filter.max_mean={config.max_mean}",
            "surplus": "were surplus in a full round",
        }
        reasons = [f"{count} {words[reason]}" for reason, count in self.reasons.most_common()]
        return f"of {len(self.kept) - self.num_replaced + len(self.dropped)} groups " + ", ".join(reasons)
