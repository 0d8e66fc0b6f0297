"""Which of a round's groups are trained on.

Owns what `rollout.filter` asks for, and what makes a group useless whatever the config says. Groups are judged by the
rewards that training sees. A dropped group is as if it had not been sampled: it is in no statistic, loss or denominator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from braid.config.rollout import FilterConfig
from braid.types import Group

Reason = Literal["invalid", "baseline", "min_std", "min_mean", "max_mean", "surplus"]
"""Why a group was dropped. invalid: no valid trajectory. baseline: its greedy answer is invalid. surplus: the round was
full. The others are keys of the filter."""


def reason_to_drop(group: Group, config: FilterConfig) -> Reason | None:
    """None for a group worth training on. The standard deviation is the unbiased one; a single trajectory has none, so that
    min_std does not judge it, as in ROLL and SkyRL.

    RLinf keeps a mean that is exactly at a bound.
    """
    rewards = np.array([t.training_reward for t in group.valid])
    if not len(rewards):
        return "invalid"
    if group.greedy is not None and not group.greedy.is_valid:
        return "baseline"
    above = rewards - rewards.min()  # so that equal rewards are exactly 0 apart
    if config.min_std is not None and len(above) > 1 and above.std(ddof=1) <= config.min_std:
        return "min_std"
    if config.min_mean is not None and rewards.mean() <= config.min_mean:
        return "min_mean"
    if config.max_mean is not None and rewards.mean() >= config.max_mean:
        return "max_mean"
    return None


@dataclass(slots=True)
class Selection:
    """The groups of one round, batch after batch. `size` is what a round has: prompts_per_round.

    `kept` are in the order in which their prompts were drawn; `num_replaced` of them are copies.
    """

    config: FilterConfig
    size: int
    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    reasons: Counter[Reason] = field(default_factory=Counter)
    num_batches: int = 0
    num_replaced: int = 0

    @property
    def is_done(self) -> bool:
        """Whether no further batch is to be drawn."""
        if self.config.then != "resample":
            return self.num_batches > 0
        return len(self.kept) >= self.size or self.num_batches >= self.config.max_batches

    def add(self, groups: Sequence[Group]) -> None:
        """Take in a batch of scored groups. What is over when the round is full is dropped: it could wait for the next round
        only as answers of old weights."""
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
        """replace: put copies of kept groups in place of the missing ones, where enough are kept. Which ones follows from
        `seed`; each is taken once before any is taken again.

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
        """Why groups were dropped, for a person."""
        config = self.config
        words: dict[Reason, str] = {
            "invalid": "have no valid trajectory",
            "baseline": "have an invalid greedy answer",
            "min_std": f"have rewards with a standard deviation of at most rollout.filter.min_std={config.min_std}",
            "min_mean": f"have a mean reward of at most rollout.filter.min_mean={config.min_mean}",
            "max_mean": f"have a mean reward of at least rollout.filter.max_mean={config.max_mean}",
            "surplus": "came after the round was full",
        }
        told = [f"{count} {words[reason]}" for reason, count in self.reasons.most_common()]
        return f"of {len(self.kept) - self.num_replaced + len(self.dropped)} groups " + ", ".join(told)
