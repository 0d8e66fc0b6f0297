"""How runs differ: their configs, their metrics, and their answers to the same prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from braid.json_text import parse_json

from .folder import Run, settings

NUM_RESAMPLES = 10_000
MIN_CHANGED = 6
_ABOUT_THE_START = ("run.name", "run.output_dir", "run.base_dir", "run.resume", "run.allow_changes")
"""Keys that two runs of the same experiment differ in."""
METRICS = (
    "reward/mean", "eval/all/mean@1", "eval/all/pass@1", "rollout/output_length_mean",
    "rollout/truncated_fraction", "rollout/invalid_fraction", "policy/entropy", "policy/kl",
    "policy/grad_norm", "policy/clip_fraction", "policy/logprob_mismatch_kl",
    "critic/explained_variance", "sft/loss", "rollout/tokens_per_s", "train/tokens_per_s", "time/round_s",
    "memory/peak_rss_bytes",
)  # fmt: skip
"""Metrics that a comparison shows, of those that the runs have."""


MISSING = object()
"""In place of the value of a key that a run does not have."""


def config_differences(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    """Key -> its value in each run, of the keys whose values differ, but for those of name, folder and
    resume."""
    trees = [settings(run.config) for run in runs]
    keys = dict.fromkeys(key for tree in trees for key in tree if key not in _ABOUT_THE_START)
    folders = [f"{tree.get('run.output_dir')}/{tree.get('run.name')}" for tree in trees]
    rows = ((key, tuple(tree.get(key, MISSING) for tree in trees)) for key in keys)
    return {
        key: values
        for key, values in rows
        if len({_below(value, folder) for value, folder in zip(values, folders, strict=True)}) > 1
    }


def _below(value: Any, folder: str) -> str:
    """A value as text, with paths below the run's folder as they are in it."""
    return repr(value).replace(folder, "RUN")


def metrics_at(
    runs: Sequence[Run], names: Sequence[str] = METRICS, window: int = 5
) -> tuple[int, dict[str, tuple[float, ...]]]:
    """(round, name -> value in each run): the last round that every run has reached, and the means of metrics
    over `window` rounds up to it. Evaluations are the last ones up to it. nan where a run does not have the
    metric; those that no run has are left out."""
    last = min((run.lines[-1]["round"] if run.lines else 0 for run in runs), default=0)
    rows: dict[str, tuple[float, ...]] = {}
    for name in names:
        values = []
        for run in runs:
            upto = [value for number, value in run.values(name) if number <= last]
            tail = upto[-1:] if name.startswith("eval/") else upto[-window:]
            values.append(sum(tail) / len(tail) if tail else math.nan)
        if not all(map(math.isnan, values)):
            rows[name] = tuple(values)
    return last, rows


@dataclass(frozen=True, slots=True)
class Wins:
    """The second of two evaluations against the first, by prompt. A prompt's score is the mean reward of its
    valid answers; prompts without any in one of the two are left out, and so are the `num_unlike` whose uid
    stands for another row of data in the other.

    `difference` is the mean over prompts of the second score minus the first, and `low` to `high` its 95 %
    interval: percentiles of the mean over NUM_RESAMPLES resamples of the prompts (a paired bootstrap).
    """

    num_prompts: int
    num_unlike: int
    first: float
    second: float
    wins: int
    ties: int
    losses: int
    difference: float
    low: float
    high: float
    most: tuple[tuple[str, float], ...]
    """(uid, difference) of the prompts that changed most, losses first."""

    @property
    def is_certain(self) -> bool:
        """Whether the interval leaves out 0, and at least MIN_CHANGED prompts changed: with fewer, resamples
        are too alike, and even a sign test in which all agree is not significant at 5 %."""
        return (self.low > 0 or self.high < 0) and self.wins + self.losses >= MIN_CHANGED


def compare_by_prompt(first: Path, second: Path, num_most: int = 5) -> Wins | None:
    """Compare two files of samples; None if they have no prompt in common."""
    one, two = scores_by_prompt(first), scores_by_prompt(second)
    shared = [uid for uid in one if uid in two]
    uids = [uid for uid in shared if one[uid].prompt == two[uid].prompt]
    if not uids:
        return None
    before, after = (np.array([scores[uid].mean for uid in uids]) for scores in (one, two))
    change = after - before
    draws = np.random.default_rng(0)
    means = np.empty(NUM_RESAMPLES)
    step = max(1, 5_000_000 // len(uids))
    for start in range(0, NUM_RESAMPLES, step):
        size = min(step, NUM_RESAMPLES - start)
        means[start : start + size] = change[draws.integers(len(uids), size=(size, len(uids)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    order = np.argsort(change, kind="stable")
    chosen = [*order[:num_most], *order[::-1][:num_most]]
    most = {uids[i]: float(change[i]) for i in chosen if change[i] != 0}
    return Wins(
        len(uids),
        len(shared) - len(uids),
        float(before.mean()),
        float(after.mean()),
        int((change > 0).sum()),
        int((change == 0).sum()),
        int((change < 0).sum()),
        float(change.mean()),
        float(low),
        float(high),
        tuple(most.items()),
    )


@dataclass(slots=True)
class Score:
    """The rewards of a prompt's valid answers. `prompt` is the row of data, or the messages where there is
    none."""

    prompt: Any
    rewards: list[float]

    @property
    def mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)


def scores_by_prompt(file: Path) -> dict[str, Score]:
    """uid -> score of each prompt with a valid answer, in the order of the file."""
    scores: dict[str, Score] = {}
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            record: Mapping[str, Any] = parse_json(line)
            if record["status"] != "invalid" and record["reward"] is not None:
                prompt = record["prompt"]["fields"] or record["prompt"]["messages"]
                scores.setdefault(record["uid"], Score(prompt, [])).rewards.append(record["reward"])
    return scores
