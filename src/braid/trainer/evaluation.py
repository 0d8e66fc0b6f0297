"""Evaluation of the policy between rounds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from braid.config.env import SimulatorEnv
from braid.report.video import write_video
from braid.rollout.collector import Use
from braid.types import Group, Trajectory, is_at_least

from . import costs
from .keys import EVAL_KEY
from .parts import Parts
from .validity import check_valid

_log = logging.getLogger(__name__)


def evaluate(parts: Parts, *, is_due: bool) -> None:
    """Record mean@n and pass@k of each evaluation source, and reward parts; every evaluation uses the same random
    numbers. Raises RolloutError, once the samples are stored, if too many trajectories of a source are invalid."""
    if not is_due or not parts.eval_prompts:
        return
    with parts.timed("evaluate"):
        results, groups = _evaluate(parts)
    name = f"eval_{parts.progress.round:06d}"
    if parts.config.report.eval_samples:
        parts.reporter.store_samples(name, parts.rollouts.whole("eval", groups), ())
    if isinstance(parts.config.env, SimulatorEnv) and parts.config.env.video.save:
        show_films(parts, parts.config.env, "eval", groups)
    for source in parts.eval_prompts:
        of_source = [t for group in groups if group.prompt.source == source for t in group.trajectories]
        check_valid(parts, of_source, f"the evaluation on {source!r} after round {parts.progress.round}")
    for source, values in results.items():
        for name, value in values.items():
            parts.metrics.mean(f"eval/{source}/{name}", value)
    if "part" not in parts.eval_prompts:  # the results of a source of this name would be mixed up with them
        for trajectory in (t for group in groups for t in group.valid):
            for part, value in trajectory.reward_parts.items():
                parts.metrics.mean(f"eval/part/{part}", value)


def show_films(parts: Parts, env: SimulatorEnv, use: Use, groups: Sequence[Group]) -> None:
    """Write a video of the episodes that were filmed (see SimulatorDriver); warn if they are all invalid."""
    video, every = env.video, env.video.train_every_rounds or 1
    filmed = [group for group in groups if group.key[-1] < video.num_episodes and group.key[-2] % every == 0]
    whole = parts.rollouts.whole(use, filmed)
    films = [t.recording for group in whole for t in group.trajectories if t.recording is not None]
    folder = parts.reporter.run_dir.videos if video.dir is None else Path(video.dir)
    if whole and not films:
        reasons = {t.reason for group in whole for t in group.trajectories}
        _log.warning(
            "no video: the episodes that were filmed are all invalid (%s)", "; ".join(sorted(reasons))
        )
    if films:
        file = folder / f"{use}_{parts.progress.round:06d}.mp4"
        write_video(file, films, overlay=video.overlay, frames_per_s=video.frames_per_s)


def _evaluate(parts: Parts) -> tuple[dict[str, dict[str, float]], list[Group]]:
    """Results by source, and the groups in sampling order, on which the results do not depend."""
    config = parts.config.eval
    order = np.arange(sum(map(len, parts.eval_prompts.values())))
    if config.shuffle:
        np.random.default_rng((parts.config.run.seed, EVAL_KEY)).shuffle(order)
    numbers = order.tolist()
    with parts.stop.cuttable():
        parts.rollouts.forget("eval")
        costs.start_sampling(parts)
        keys = [(EVAL_KEY, 0, number) for number in numbers]
        groups, _ = parts.rollouts.collect("eval", numbers, config.samples_per_prompt, keys)
        costs.end_sampling(parts)
    in_order = [groups[place] for place in np.argsort(order)]
    by_source: dict[str, list[Group]] = {name: [] for name in parts.eval_prompts}
    for group in in_order:
        by_source[group.prompt.source].append(group)
    results = {
        name: summarize_eval(of, config.pass_at, config.success_reward) for name, of in by_source.items()
    }
    results["all"] = summarize_eval(in_order, config.pass_at, config.success_reward)
    return results, groups


def summarize_eval(groups: Sequence[Group], pass_at: Sequence[int], success: float) -> dict[str, float]:
    """Compute mean@n, its range and pass@k. mean@n: mean reward of valid trajectories. pass@k: probability that at least
    one of k of a prompt's n samples succeeds, 1 - C(n - c, k) / C(n, k) for c successes (Chen et al. 2021),
    averaged over prompts with at least k valid samples. A trajectory succeeds if its reward is at least `success`, or as
    the simulator says."""
    rewards = [[t.reward for t in g.valid if t.reward is not None] for g in groups]
    n = max((len(g.trajectories) for g in groups), default=0)
    passed = [[_is_success(t, success) for t in g.valid] for g in groups]
    flat = [r for of in rewards for r in of]
    out = {f"mean@{n}": float(np.mean(flat)) if flat else float("nan")}
    for k in pass_at:
        chances = [_pass_at(k, len(of), sum(of)) for of in passed if len(of) >= k]
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
