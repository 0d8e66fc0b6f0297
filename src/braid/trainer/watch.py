"""Detects signs that a run does not learn, and logs each as a one-line warning with a remedy."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from braid.config.env import SimulatorEnv
from braid.config.schema import RunConfig
from braid.plan import Plan

logger = logging.getLogger(__name__)

PATIENCE = 3
"""Consecutive rounds that must show a sign before it is logged."""
MOST_TRUNCATED = 0.9
"""Fraction of truncated answers from which it is a sign."""
WINDOW = 10
"""Length, in rounds, of the windows whose mean rewards are compared."""
NUM_ERRORS = 5.0
"""Standard errors by which the mean reward must have fallen: with pure noise, the best of several hundred
windows and the newest differ by up to about 3.5."""
_GROUP_BASELINES = frozenset({"grpo", "rloo", "maxrl"})
"""Advantages that are 0 if all rewards of a group are equal."""


@dataclass(slots=True)
class LearningWatch:
    """Watches the metrics of each round. A sign is logged after PATIENCE consecutive rounds, and again only
    after it has disappeared in between."""

    config: RunConfig
    plan: Plan
    _in_a_row: dict[str, int] = field(default_factory=dict)
    _rewards: list[float] = field(default_factory=list)

    def see(self, round_: int, metrics: Mapping[str, float]) -> None:
        """Process the metrics of a round; log a warning for each sign that is due."""
        signs = dict(self._signs(metrics))
        self._in_a_row = {name: self._in_a_row.get(name, 0) + 1 for name in signs}
        for name, count in self._in_a_row.items():
            if count == PATIENCE:
                logger.warning("%d consecutive rounds, up to %d: %s", PATIENCE, round_, signs[name])
        if (reward := metrics.get("reward/mean")) is not None and math.isfinite(reward):
            self._rewards.append(reward)
            if fall := self._fall(round_):
                logger.warning("%s", fall)
                self._rewards.clear()

    def _signs(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Name and message of each sign in the round's metrics. Signs that follow from another sign are
        omitted."""
        reads_groups = self.plan.recipe.advantage in _GROUP_BASELINES and self.config.rollout.group_size > 1
        has_equal_rewards = reads_groups and metrics.get("reward/same_in_group_fraction") == 1.0
        if has_equal_rewards:
            yield (
                "equal rewards",
                f"all answers of every group have the same reward (mean {metrics.get('reward/mean', math.nan):g}), so every advantage is 0. "
                "Read some answers in samples/: if all are wrong, check the reward and the prompt, or use easier data or "
                "supervised fine-tuning first (sft); if all are right, use harder data",
            )
        limit = self.config.rollout.sampling.max_new_tokens
        is_text = not isinstance(self.config.env, SimulatorEnv)
        if is_text and metrics.get("rollout/truncated_fraction", 0.0) >= MOST_TRUNCATED:
            yield (
                "truncated answers",
                f"{metrics['rollout/truncated_fraction']:.0%} of the answers are truncated; raise "
                f"rollout.sampling.max_new_tokens={limit}, or check the model's end tokens with `braid show`",
            )
        for role in ("policy", "sft"):
            if metrics.get(f"{role}/grad_norm") == 0.0 and not has_equal_rewards:
                yield (
                    f"{role} gradient",
                    f"{role}/grad_norm is exactly 0, so the weights do not change. Check samples/ for advantages that are all 0, "
                    "whether algorithm.mask_truncated or corrections mask everything, and whether weights are frozen",
                )

    def _fall(self, round_: int) -> str:
        """Message on the fall of the mean reward from its best window; empty if it is within noise."""
        if len(self._rewards) < 3 * WINDOW:
            return ""
        windows = np.lib.stride_tricks.sliding_window_view(np.array(self._rewards), WINDOW)
        best = int(windows[:-WINDOW].mean(1).argmax())
        then, now = windows[best], windows[-1]
        noise = float(np.square(np.diff(self._rewards)).mean() / 2)  # variance of a round around the trend
        error = math.sqrt(2 * noise / WINDOW)
        drop = float(then.mean() - now.mean())
        if drop <= max(NUM_ERRORS * error, 1e-9):
            return ""
        first = round_ - len(self._rewards) + 1 + best
        return (
            f"the mean reward has fallen from {then.mean():.3g} in rounds {first} to {first + WINDOW - 1} to {now.mean():.3g} in "
            f"the last {WINDOW} (up to {round_}); lower train.optimizer.lr={self.config.train.optimizer.lr:g}, raise "
            "algorithm.kl_coef, or resume from an earlier checkpoint"
        )
