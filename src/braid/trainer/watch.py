"""Detects signs that a run does not learn, and logs each as a one-line warning with a remedy."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from braid.config.schema import RunConfig
from braid.plan import Plan
from braid.types import is_at_least

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
SEEN = (
    ("policy/entropy", "entropy", "nats"),
    ("policy/kl", "KL from the reference", "nats"),
    ("policy/approx_kl", "KL within the round", "nats"),
    ("policy/grad_norm", "gradient norm", ""),
    ("rollout/output_length_mean", "length", "tokens"),
)
"""Metrics from which a diagnosis follows: name, its words and unit."""
ENTROPY_LEFT = 0.05
"""Fraction of the first entropy at or below which the policy has collapsed to one answer."""
ENTROPY_GAINED = 1.0
"""Nats per token by which entropy must have risen, and at least doubled, for the policy to have dissolved."""
FAR_KL = 1.0
"""Nats per token from which the policy is far from the reference, or from itself before the round."""


@dataclass(slots=True)
class LearningWatch:
    """Watches the metrics of each round. A sign is logged after PATIENCE consecutive rounds, and again only
    after it has disappeared in between. Its advice follows from the metrics of SEEN, at first (since the run
    began or was resumed) and now."""

    config: RunConfig
    plan: Plan
    _in_a_row: dict[str, int] = field(default_factory=dict)
    _rewards: list[float] = field(default_factory=list)
    _first: dict[str, float] = field(default_factory=dict)
    _latest: dict[str, float] = field(default_factory=dict)

    def see(self, round_: int, metrics: Mapping[str, float]) -> None:
        """Process the metrics of a round; log a warning for each sign that is due."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._latest |= finite
        self._first = finite | self._first
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
        recipe = self.plan.recipe
        compares = recipe.advantage.compares_group or recipe.reward_mean == "group"
        is_compared = compares and self.config.rollout.group_size > 1
        has_equal_rewards = is_compared and metrics.get("reward/same_in_group_fraction") == 1.0
        damage = self._damage()
        if has_equal_rewards and (mean := metrics.get("reward/mean")) is not None:
            yield (
                "equal rewards",
                f"all answers of every group have the same reward (mean {mean:g}), so comparing them "
                "teaches nothing. " + (damage or self._on_equal_rewards(mean)),
            )
        elif damage:
            yield "damage", damage
        truncated = metrics.get("rollout/truncated_fraction", 0.0)
        if self._is_text and truncated >= MOST_TRUNCATED and not damage:
            if (first := self._first["rollout/truncated_fraction"]) < MOST_TRUNCATED / 2:
                advice = (
                    f"{first:.0%} were at first: check whether the reward pays for length, or set "
                    f"reward.overlong. Seen: {self._changes()}"
                )
            else:
                advice = (
                    f"raise rollout.sampling.max_new_tokens={self.config.rollout.sampling.max_new_tokens}, "
                    "or check the model's end tokens with `braid show`"
                )
            yield "truncated answers", f"{truncated:.0%} of the answers are truncated; {advice}"
        for role in ("policy", "sft", "prefer"):
            is_explained = role == "policy" and (has_equal_rewards or damage)
            if metrics.get(f"{role}/grad_norm") == 0.0 and not is_explained:
                yield (
                    f"{role} gradient",
                    f"{role}/grad_norm is exactly 0, so the weights do not change. Check samples/ for "
                    "advantages that are all 0, whether algorithm.mask_truncated or corrections mask "
                    "everything, and whether weights are frozen",
                )

    def _on_equal_rewards(self, mean: float) -> str:
        """What to do about equal rewards of a policy that training has not damaged."""
        entropy = self._latest.get("policy/entropy")
        if entropy is not None and entropy < 1e-3 and self._is_text:
            advice = (
                "The policy gives the same answer each time: raise rollout.sampling.temperature="
                f"{self.config.rollout.sampling.temperature:g}, or begin from a model that is less certain"
            )
        elif is_at_least(mean, self.config.eval.success_reward):
            advice = "All are right: use harder data"
        else:
            advice = (
                "Read some answers in samples/: if all are wrong, check the reward and the prompt, or use "
                "easier data or supervised fine-tuning first (sft); if all are right, use harder data"
            )
        return f"{advice}. Seen: {self._changes()}" if self._changes() else advice

    @property
    def _is_text(self) -> bool:
        return not self.config.env.is_simulator

    def _damage(self) -> str:
        """That updates have damaged the policy, by its entropy and KL, and the remedy; empty if they have
        not, or if the reward has risen meanwhile."""
        first, now = self._first, self._latest
        if now.get("reward/mean", 0.0) > first.get("reward/mean", 0.0):
            return ""
        before, after = first.get("policy/entropy", 0.0), now.get("policy/entropy", 0.0)
        what = ""
        if self._is_text and before > 0 and after <= ENTROPY_LEFT * before:
            what = "has collapsed to one answer"
        elif self._is_text and after >= max(2 * before, before + ENTROPY_GAINED):
            what = "writes nearly at random"
        elif (kl := max(now.get("policy/kl", 0.0), now.get("policy/approx_kl", 0.0))) >= FAR_KL:
            what = f"has moved by {kl:.3g} nats per token"
        if not what:
            return ""
        lr = f"train.optimizer.lr={self.config.train.optimizer.lr:g}"
        return (
            f"The policy {what}, and the mean reward has not risen: the updates are too large. Lower {lr}, "
            "raise algorithm.kl_coef, and start again or resume from a checkpoint before. Seen: "
            f"{self._changes()}"
        )

    def _changes(self) -> str:
        """First and latest values of SEEN: `entropy 1.2 -> 0.01 nats, length 24 -> 3 tokens`."""
        return ", ".join(
            f"{words} {self._first[name]:.3g} -> {self._latest[name]:.3g} {unit}".rstrip()
            for name, words, unit in SEEN
            if name in self._latest
        )

    def diagnosis(self) -> str:
        """Why there may be nothing to train on, and what to do about it."""
        return self._damage() or (
            "The task may be too easy or too hard for the policy: change the data or the reward, or relax "
            "the filter" + (f". Seen: {self._changes()}" if self._changes() else "")
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
            f"the mean reward has fallen from {then.mean():.3g} in rounds {first} to {first + WINDOW - 1} "
            f"to {now.mean():.3g} in the last {WINDOW} (up to {round_}); lower "
            f"train.optimizer.lr={self.config.train.optimizer.lr:g}, raise algorithm.kl_coef, or resume "
            f"from an earlier checkpoint. Seen: {self._changes()}"
        )
