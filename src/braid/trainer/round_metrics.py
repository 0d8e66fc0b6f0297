"""Metrics of a round's groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import get_args

import numpy as np

from braid.algorithms.advantages.groups import reward_std
from braid.config.schema import RunConfig
from braid.report.metrics import Metrics
from braid.types import Group, Status, Trajectory

from .selection import Reason, Selection


def status_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Numbers of trajectories by status, and of invalid ones by the boundary that failed."""
    metrics = Metrics()
    statuses = Counter(t.status for t in trajectories)
    for status in Status:
        metrics.add(f"status/{status}", statuses[status])
    metrics.mean("rollout/invalid_fraction", statuses[Status.INVALID], len(trajectories))
    for boundary, count in Counter(t.reason.split(":")[0] for t in trajectories if not t.is_valid).items():
        metrics.add(f"invalid/{boundary.split()[0]}", count)
    return metrics


def group_metrics(config: RunConfig, groups: Sequence[Group]) -> Metrics:
    """Lengths, rewards and environments of all groups that were sampled and scored."""
    trajectories = [t for group in groups for t in group.trajectories]
    lengths = [t.num_output_tokens for t in trajectories]
    metrics = Metrics()
    metrics.add("rollout/trajectories", len(trajectories))
    metrics.mean("rollout/output_length_mean", sum(lengths), len(lengths))
    metrics.max("rollout/output_length_max", max(lengths))
    valid = [t for t in trajectories if t.is_valid]
    metrics.mean(
        "rollout/truncated_fraction", sum(t.status is Status.TRUNCATED for t in valid), max(1, len(valid))
    )
    values_of: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if turns := trajectory.lengths.turns:
            values_of["rollout/turns_mean"].append(turns)
        if (reward := trajectory.reward) is not None:
            values_of["reward/mean"].append(reward)
            values_of[f"reward/source/{trajectory.prompt.source}"].append(reward)
            if trajectory.shaped is not None:
                values_of["reward/shaped_mean"].append(trajectory.shaped.total)
            for part, value in trajectory.reward_parts.items():
                values_of[f"reward/part/{part}"].append(value)
    for group in groups:
        if group.greedy is not None and group.greedy.reward is not None:
            values_of["reward/greedy_mean"].append(group.greedy.reward)
    for name, values in values_of.items():
        metrics.mean(name, sum(values), len(values))
    metrics.merge(_env_metrics(config, valid))
    rewards = [t.reward for t in trajectories if t.reward is not None]
    metrics.mean("reward/std", float(np.std(sorted(rewards))) if rewards else 0.0)
    compared = [group.compared_rewards for group in groups if group.valid]
    if config.rollout.group_size > 1:
        same = sum(all(reward_std(values) == 0 for values in agents) for agents in compared)
        metrics.mean("reward/same_in_group_fraction", same, len(compared))
    return metrics


def _env_metrics(config: RunConfig, trajectories: Sequence[Trajectory]) -> Metrics:
    metrics, env = Metrics(), config.env
    if env.has_step_metrics:
        metrics.merge(_one_env_metrics("env", trajectories))
    for kind in env.mixture:
        of_kind = [t for t in trajectories if env.kind_of_task(t.prompt) == kind]
        metrics.merge(_one_env_metrics(f"env/mix/{kind}", of_kind))
    return metrics


def _one_env_metrics(prefix: str, trajectories: Sequence[Trajectory]) -> Metrics:
    metrics = Metrics()
    for name in sorted({name for t in trajectories for name in t.metrics}):
        metrics.mean(
            f"{prefix}/{name}", sum(t.metrics.get(name, 0.0) for t in trajectories), len(trajectories)
        )
    lengths = [t.lengths for t in trajectories]
    if waits := [s for length in lengths for s in length.env_s]:
        metrics.mean(f"{prefix}/sample_s", sum(length.sample_s for length in lengths), len(lengths))
        for p in (50, 90, 99):
            metrics.mean(f"{prefix}/reply_p{p}_s", float(np.percentile(waits, p)))
    return metrics


def selection_metrics(selection: Selection) -> Metrics:
    """Metrics of the filter, if groups were dropped or could have been."""
    config, metrics = selection.config, Metrics()
    for reason in get_args(Reason):
        if selection.reasons[reason] or getattr(config, reason, None) is not None:
            metrics.add(f"rollout/dropped_groups/{reason}", selection.reasons[reason])
    if config.then == "resample":
        metrics.add("rollout/batches", selection.num_batches)
    if config.then == "replace":
        metrics.add("rollout/replaced_groups", selection.num_replaced)
    return metrics


def lag_metrics(selection: Selection, left_out: Sequence[Group], version: int) -> Metrics:
    """Lags of the tokens that a pipelined round trains on, from weights of `version`; and what it does not
    train on, with the groups `left_out` since the last round."""
    metrics, lags = Metrics(), Counter[int]()
    for trajectory in (t for group in selection.kept for t in group.valid):
        for written, num in trajectory.lengths.versions:
            lags[version - written] += num
    total = lags.total()
    metrics.mean("pipeline/lag_mean", sum(lag * num for lag, num in lags.items()), max(1, total))
    metrics.max("pipeline/lag_max", max(lags, default=0))
    for lag, num in lags.items():
        metrics.mean(f"pipeline/lag_share/{lag}", num, total)
    unused = (t for group in (*selection.dropped, *left_out) for t in group.sampled)
    metrics.add("pipeline/dropped_tokens", sum(t.num_output_tokens for t in unused))
    metrics.add("pipeline/left_out_groups", len(left_out))
    return metrics
