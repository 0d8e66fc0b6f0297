"""Evaluation of the policy between rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from braid.config.schema import RunConfig
from braid.report.metrics import Metrics
from braid.types import Group, Prompt, Trajectory, is_at_least

from .keys import EVAL_KEY
from .reports import is_due
from .sampling import Sampling


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Evaluates the policy on `prompts`, by source."""

    config: RunConfig
    prompts: Mapping[str, Sequence[Prompt]]
    sampling: Sampling

    def is_due(self, round_: int, *, is_last: bool) -> bool:
        """Whether the policy is evaluated after a round; after round 0, before training."""
        config = self.config.eval
        return (
            is_due(round_, config.every_rounds, is_end=is_last and config.at_end) if round_ else config.before
        )

    def evaluate(self, round_: int) -> Metrics:
        """Measure mean@n and pass@k of each evaluation source, and reward parts; every evaluation uses the
        same random numbers. Raises RolloutError, once the samples are stored, if too many trajectories of a
        source are invalid."""
        metrics, sampling, reports = Metrics(), self.sampling, self.sampling.reports
        with reports.timed("evaluate", metrics):
            results, groups = self._sample()
        if self.config.report.eval_samples:
            whole = sampling.rollouts.whole("eval", groups)
            reports.reporter.store_samples(f"eval_{round_:06d}", whole, ())
        if (video := self.config.env.video_of("eval")) is not None:
            sampling.show_films(video, "eval", round_, groups)
        for source in self.prompts:
            of_source = [t for group in groups if group.prompt.source == source for t in group.trajectories]
            sampling.validity.check(of_source, f"the evaluation on {source!r} after round {round_}")
        for source, values in results.items():
            for name, value in values.items():
                metrics.mean(f"eval/{source}/{name}", value)
        if "part" not in self.prompts:  # the results of a source of this name would be mixed up with them
            for trajectory in (t for group in groups for t in group.valid):
                for part, value in trajectory.reward_parts.items():
                    metrics.mean(f"eval/part/{part}", value)
        return metrics

    def _sample(self) -> tuple[dict[str, dict[str, float]], list[Group]]:
        """Results by source, and the groups in sampling order, on which the results do not depend."""
        config = self.config.eval
        order = np.arange(sum(map(len, self.prompts.values())))
        if config.shuffle:
            np.random.default_rng((self.config.run.seed, EVAL_KEY)).shuffle(order)
        groups = self.sampling.collect_eval(order.tolist(), config.samples_per_prompt)
        in_order = [groups[place] for place in np.argsort(order)]
        by_source: dict[str, list[Group]] = {name: [] for name in self.prompts}
        for group in in_order:
            by_source[group.prompt.source].append(group)
        results = {
            name: summarize_eval(groups, config.pass_at, config.success_reward)
            for name, groups in by_source.items()
        }
        results["all"] = summarize_eval(in_order, config.pass_at, config.success_reward)
        return results, groups


def summarize_eval(groups: Sequence[Group], pass_at: Sequence[int], success: float) -> dict[str, float]:
    """Compute mean@n, its range and pass@k. mean@n: mean reward of valid trajectories. pass@k: probability
    that at least one of k of a prompt's n samples succeeds, 1 - C(n - c, k) / C(n, k) for c successes (Chen
    et al. 2021), averaged over prompts with at least k valid samples. A trajectory succeeds if its reward is
    at least `success`, or as the simulator says."""
    rewards = [[t.reward for t in g.valid if t.reward is not None] for g in groups]
    n = max((len(g.trajectories) for g in groups), default=0)
    passed = [[_is_success(t, success) for t in g.valid] for g in groups]
    flat = [r for group_rewards in rewards for r in group_rewards]
    out = {f"mean@{n}": float(np.mean(flat)) if flat else float("nan")}
    for k in pass_at:
        chances = [_pass_at(k, len(successes), sum(successes)) for successes in passed if len(successes) >= k]
        out[f"pass@{k}"] = float(np.mean(chances)) if chances else float("nan")
    out["reward_min"], out["reward_max"] = (min(flat), max(flat)) if flat else (float("nan"),) * 2
    out["num"] = float(len(groups))
    out["invalid"] = float(sum(len(g.trajectories) - len(g.valid) for g in groups))
    out["invalid_fraction"] = out["invalid"] / max(1, sum(len(g.trajectories) for g in groups))
    return out


def _is_success(trajectory: Trajectory, least: float) -> bool:
    reported = trajectory.metrics.get("success_once")
    return is_at_least(trajectory.reward or 0.0, least) if reported is None else reported > 0


def _pass_at(k: int, n: int, successes: int) -> float:
    if n - successes < k:
        return 1.0
    return 1.0 - float(np.prod([1.0 - k / i for i in range(n - successes + 1, n + 1)]))
