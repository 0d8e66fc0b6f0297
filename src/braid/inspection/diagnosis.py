"""What is wrong with a run, from its metrics alone: since which round, the likeliest causes, and the key to
change.

Each rule of RULES looks at the whole run and yields what it finds. A rule compares the first rounds
with the last ones (`_ends`: a fifth of the rounds, 3 to 20 of them), so that one odd round is no finding, and
asks for an effect that matters in the metric's own unit. The causes and thresholds are from the papers named
beside the rules and from docs/troubleshooting.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from .folder import Run

Severity = Literal["problem", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with a run. `since` is the first round that shows it; `fix` names keys of the
    config."""

    title: str
    since: int | None
    evidence: str
    causes: str
    fix: str
    severity: Severity = "problem"


Series = list[tuple[int, float]]


def diagnose(run: Run) -> list[Finding]:
    """What is wrong with the run, problems before warnings; empty if nothing was found."""
    findings = [finding for rule in RULES for finding in rule(run)]
    return sorted(findings, key=lambda finding: finding.severity != "problem")


def _training(run: Run, name: str) -> Series:
    """A metric in the rounds of training: round 0 is before the first."""
    return [(number, value) for number, value in run.values(name) if number > 0]


def _window(series: Series) -> int:
    """Number of the rounds that are averaged at either end: a fifth, 3 to 20."""
    return min(max(3, len(series) // 5), 20)


def _ends(series: Series) -> tuple[float, float] | None:
    """Means of the first and the last fifth of the rounds, 3 to 20 each; None if there are fewer than 6."""
    if len(series) < 6:
        return None
    size, values = _window(series), [value for _, value in series]
    return statistics.fmean(values[:size]), statistics.fmean(values[-size:])


def _lasts(series: Series, is_bad: Callable[[float], bool], rounds: int = 3) -> int | None:
    """The first of the rounds at the end that are all bad; None if they are fewer than `rounds`."""
    bad = [number for number, _ in takewhile(lambda point: is_bad(point[1]), reversed(series))]
    return bad[-1] if len(bad) >= rounds else None


def _rise(series: Series) -> float:
    """How far the mean of the last rounds is above that of the first; 0 for short runs."""
    ends = _ends(series)
    return 0.0 if ends is None else ends[1] - ends[0]


def _spread(run: Run) -> float:
    """The standard deviation of a trajectory's reward at the start of the run, in which changes of the mean
    are judged; 1 where it is unknown."""
    first = [value for _, value in _training(run, "reward/std")[:20]]
    return max(statistics.fmean(first), 1e-3) if first else 1.0


def _evaluation_is_flat(run: Run) -> bool:
    """Whether the last evaluation is no better than the first; True without two evaluations."""
    series = run.evaluations
    return len(series) < 2 or series[-1][1] - series[0][1] <= 0.02


# The rules


def _ended(run: Run) -> Iterator[Finding]:
    error = run.summary.get("error")
    number = run.summary.get("round")
    if run.status == "failed":
        fix = "mend it, then run.resume=latest"
        yield Finding("the run failed", number, str(error), "the message names it", fix)
    if run.status == "killed":
        yield Finding(
            "the run's process ended without a word",
            number,
            "summary.json says running, and no process holds the folder",
            "SIGKILL: out of memory (dmesg), or the machine or scheduler stopped it",
            "run.resume=latest; train.micro_batch_tokens if it was memory",
        )


def _tripped(run: Run) -> Iterator[Finding]:
    for trip in run.summary.get("checks", {}).get("tripped", ()):
        yield Finding(
            f"check {trip['check']} tripped",
            trip["since"],
            f"{trip['evidence']}; in {trip['rounds']} rounds, the last of them {trip['last']}",
            trip["causes"],
            f"{trip['look_at']} (docs/checks.md)",
            "warning" if trip["sort"] == "heuristic" else "problem",
        )


def _no_signal(run: Run) -> Iterator[Finding]:
    same = _training(run, "reward/same_in_group_fraction")
    since = _lasts(same, lambda share: share >= 0.9)
    rewards = dict(_training(run, "reward/mean"))
    lowest, highest = _reward_range(run)
    if since is None:
        return
    last = rewards.get(same[-1][0], float("nan"))
    if highest is not None and last >= highest - 0.05 * max(highest - (lowest or 0.0), 1e-9):
        if len(rewards) > 2 * sum(number >= since for number in rewards):
            return  # it has learned its prompts
        causes = "the prompts are too easy: every answer is right"
        fix = "harder data, rollout.filter.max_mean"
    else:
        causes = "the prompts are too hard, or the reward cannot be reached: no answer of a group is better"
        fix = "easier data, sft, rollout.group_size, rollout.sampling.temperature; read braid samples RUN"
    yield Finding(
        "most groups give no gradient",
        since,
        f"reward/same_in_group_fraction {same[-1][1]:.2f}, reward/mean {last:.3g}",
        causes,
        fix,
    )


def _reward_range(run: Run) -> tuple[float | None, float | None]:
    """The lowest and highest reward of evaluations and rounds; None where there is none."""
    lows = [value for _, value in (*run.values("eval/all/reward_min"), *_training(run, "reward/mean"))]
    highs = [value for _, value in (*run.values("eval/all/reward_max"), *_training(run, "reward/mean"))]
    return min(lows, default=None), max(highs, default=None)


def _no_gradient(run: Run) -> Iterator[Finding]:
    since = _lasts(_training(run, "policy/grad_norm"), lambda norm: norm == 0, rounds=2)
    if since is not None:
        yield Finding(
            "the policy gets no gradient",
            since,
            "policy/grad_norm 0",
            "equal rewards in all groups, or all trajectories masked",
            "rollout.group_size, data; algorithm.mask_truncated with rollout.sampling.max_new_tokens",
        )
    since = _lasts(_training(run, "policy/lr"), lambda rate: rate == 0, rounds=2)
    if since is not None and not _is_at_end(run):
        yield Finding(
            "the learning rate is 0",
            since,
            "policy/lr 0",
            "a schedule that has ended before the run has",
            "train.optimizer.schedule, train.optimizer.lr",
        )


def _is_at_end(run: Run) -> bool:
    return run.summary.get("round") == run.summary.get("num_rounds")


def _skipped(run: Run) -> Iterator[Finding]:
    for role in ("policy", "critic"):
        series = _training(run, f"{role}/skipped_steps")
        bad = [number for number, value in series if value > 0]
        if bad:
            yield Finding(
                f"steps of the {role} were skipped",
                bad[0],
                f"{role}/skipped_steps above 0 in {len(bad)} of {len(series)} rounds",
                "a loss or gradient that was not finite: the learning rate, or fp16 without a scaler",
                "train.optimizer.lr, model.dtype=bf16, train.grad_scaler",
                "problem" if len(bad) > 1 else "warning",
            )


def _invalid(run: Run) -> Iterator[Finding]:
    series = _training(run, "rollout/invalid_fraction")
    since = _lasts(series, lambda share: share >= 0.02, rounds=2)
    if since is None:
        return
    counts = {
        name: sum(value for number, value in _training(run, f"invalid/{name}") if number >= since)
        for name in ("environment", "engine", "reward")
    }
    where = max(counts, key=lambda name: counts[name])
    yield Finding(
        "trajectories are invalid",
        since,
        f"rollout/invalid_fraction {series[-1][1]:.1%}"
        + f", most of them at the {where}" * bool(counts[where]),
        "the first warning of the log names what failed: these trajectories are in no mean and no baseline",
        "mend it; rollout.max_invalid_fraction stops a run",
        "problem" if series[-1][1] >= 0.2 else "warning",
    )


def _truncated(run: Run) -> Iterator[Finding]:
    series, rewards = _training(run, "rollout/truncated_fraction"), _training(run, "reward/mean")
    since = _lasts(series, lambda share: share >= 0.5)
    if since is not None:
        yield Finding(
            "most answers are cut",
            since,
            f"rollout/truncated_fraction {series[-1][1]:.0%}",
            "max_new_tokens (or the limit of turns) is too low, or the model does not end its answers",
            "rollout.sampling.max_new_tokens; end tokens in braid show; algorithm.mask_truncated",
        )
    elif _rise(series) > 0.1 and _rise(rewards) < -0.1 * _spread(run):
        yield Finding(
            "rewards fall as answers are cut",
            _first_above(series, 0.1),
            f"rollout/truncated_fraction {_moved(series)}, reward/mean {_moved(rewards)}",
            "cut answers score 0, although their beginning may be right",
            "rollout.sampling.max_new_tokens, reward.overlong, algorithm.mask_truncated",
        )


def _entropy(run: Run) -> Iterator[Finding]:
    # Yu et al. 2025 (DAPO, arXiv:2503.14476) and Cui et al. 2025 (arXiv:2505.22617)
    series, rewards = _training(run, "policy/entropy"), _training(run, "reward/mean")
    ends = _ends(series)
    if ends is None:
        return
    first, last = ends
    is_flat = _evaluation_is_flat(run) and _rise(rewards) <= 0.1 * _spread(run)
    if last < 0.2 * first and first > 0.05 and is_flat:
        yield Finding(
            "entropy has collapsed, and nothing improves",
            _first_below(series, 0.2 * first),
            f"policy/entropy {_moved(series)} nats, reward/mean {_moved(rewards)}",
            "the clip is symmetric, or the learning rate too high: the policy repeats what it already does",
            "algorithm.policy_loss.clip_high=0.28, algorithm.policy_loss=clip_cov, train.optimizer.lr",
        )
    if last > 2 * first and last - first > 0.5 and _rise(rewards) <= 0:
        yield Finding(
            "entropy rises, and rewards do not",
            _first_above(series, 2 * first),
            f"policy/entropy {_moved(series)} nats, reward/mean {_moved(rewards)}",
            "clip_high is too large, the learning rate too high, or cut answers are trained on",
            "algorithm.policy_loss.clip_high, train.optimizer.lr, algorithm.mask_truncated",
        )


def _collapse(run: Run) -> Iterator[Finding]:
    rewards = _training(run, "reward/mean")
    ends = _ends(rewards)
    if ends is None:
        return
    size = _window(rewards)
    means = [
        (rewards[i + size - 1][0], statistics.fmean(value for _, value in rewards[i : i + size]))
        for i in range(len(rewards) - size + 1)
    ]
    best_round, best = max(means, key=lambda mean: mean[1])
    last = means[-1][1]
    if best - last > max(0.3 * _spread(run), 0.3 * abs(best - means[0][1])):
        yield Finding(
            "rewards were higher before",
            best_round,
            f"reward/mean {best:.3g} around round {best_round}, {last:.3g} at the end",
            "updates have damaged the policy: too large a learning rate, too many steps on the same rollouts",
            "train.optimizer.lr, algorithm.kl_coef, train.steps_per_pass; resume from a checkpoint before",
        )


def _length(run: Run) -> Iterator[Finding]:
    # Liu et al. 2025 (Dr. GRPO, arXiv:2503.20783)
    series, rewards = _training(run, "rollout/output_length_mean"), _training(run, "reward/mean")
    ends = _ends(series)
    if ends is not None and ends[1] > 1.5 * ends[0] and _rise(rewards) <= 0.05 * _spread(run):
        yield Finding(
            "answers grow, and rewards do not",
            _first_above(series, 1.5 * ends[0]),
            f"rollout/output_length_mean {_moved(series)}, reward/mean {_moved(rewards)}",
            "a mean within each answer and division by the group's deviation favour long wrong answers",
            "algorithm.aggregation=token_mean, algorithm.advantage.normalize_by_std=false",
        )


def _hacked(run: Run) -> Iterator[Finding]:
    # Gao et al. 2023 (arXiv:2210.10760)
    rewards, evaluated = _training(run, "reward/mean"), run.evaluations
    is_worse = len(evaluated) >= 2 and evaluated[-1][1] < evaluated[0][1] - 0.02
    if is_worse and _rise(rewards) > 0.3 * _spread(run):
        yield Finding(
            "rewards rise, and the evaluation falls",
            evaluated[-1][0],
            f"reward/mean {_moved(rewards)}, {_evaluations(run)}",
            "a reward is exploited, or the evaluation asks for something else",
            "read braid samples RUN --best 5; weights of reward.parts, algorithm.kl_coef",
        )


def _mismatch(run: Run) -> Iterator[Finding]:
    series = _training(run, "policy/logprob_mismatch_kl")
    ends = _ends(series)
    if ends is not None and ends[1] > 1e-3 and ends[1] > 10 * max(ends[0], 1e-6):
        yield Finding(
            "engine and trainer disagree more and more",
            _first_above(series, max(1e-3, 10 * ends[0])),
            f"policy/logprob_mismatch_kl {_moved(series)} nats",
            "half precision (head, experts, cache), or weights that are not those of the trainer",
            "rollout.engine.dtype, model.dtype=fp32, algorithm.corrections, rollout.check_weights=true",
        )
    elif ends is not None and ends[1] > 0.05:
        yield Finding(
            "engine and trainer disagree",
            series[0][0],
            f"policy/logprob_mismatch_kl {_moved(series)} nats",
            "they do not compute the same distribution: dtype, temperature, template or weights",
            "rollout.check_weights=true, rollout.engine.dtype",
        )


def _kl(run: Run) -> Iterator[Finding]:
    series = _training(run, "policy/kl")
    if series and series[0][1] > 0.05:
        yield Finding(
            "the policy is far from its reference at the start",
            series[0][0],
            f"policy/kl {series[0][1]:.3g} nats in the first round",
            "the reference is another model, or not what the policy started from",
            "reference.path",
        )
    ends = _ends(series)
    if ends is not None and ends[1] > 1 and _rise(_training(run, "reward/mean")) <= 0:
        yield Finding(
            "the policy has left its reference without gain",
            _first_above(series, 1.0),
            f"policy/kl {_moved(series)} nats",
            "updates are too large",
            "train.optimizer.lr, algorithm.kl_coef",
        )


def _clipped(run: Run) -> Iterator[Finding]:
    series = _training(run, "policy/clip_fraction")
    since = _lasts(series, lambda share: share > 0.5)
    if since is not None:
        yield Finding(
            "most tokens are clipped",
            since,
            f"policy/clip_fraction {series[-1][1]:.0%}",
            "the policy moves too far within a round",
            "train.optimizer.lr, train.steps_per_pass, train.passes_per_round",
            "warning",
        )


def _critic(run: Run) -> Iterator[Finding]:
    series = _training(run, "critic/explained_variance")
    since = _lasts(series, lambda share: share < 0, rounds=10)
    if since is not None:
        yield Finding(
            "the critic explains nothing",
            since,
            f"critic/explained_variance {series[-1][1]:.2f}",
            "values start far from the returns (Yuan et al. 2025, arXiv:2503.01491), or learn too slowly",
            "critic.warmup_rounds, critic.train.optimizer.lr, algorithm.advantage.gae_lambda",
        )


def _empty(run: Run) -> Iterator[Finding]:
    bad = [number for number, value in _training(run, "rollout/empty_rounds") if value > 0]
    if len(bad) >= 2:
        yield Finding(
            "rounds had nothing to train on",
            bad[0],
            f"rollout/empty_rounds in {len(bad)} rounds",
            "the filter drops every group, or all are invalid",
            "rollout.filter, data",
        )


def _nothing_learned(run: Run) -> Iterator[Finding]:
    rewards, evaluated = _training(run, "reward/mean"), run.evaluations
    spread = _spread(run)
    is_long = len(rewards) >= 20
    if not is_long or _rise(rewards) > 0.1 * spread or (evaluated and not _evaluation_is_flat(run)):
        return
    lowest, highest = _reward_range(run)
    if highest is not None and lowest is not None and rewards[-1][1] >= highest - 0.1 * (highest - lowest):
        return  # good from the start; `_no_signal` looks at rewards that are all equal
    yield Finding(
        "nothing was learned",
        rewards[0][0],
        f"reward/mean {_moved(rewards)} in {len(rewards)} rounds, {_evaluations(run)}",
        "too small a learning rate, too few trajectories in a step for the noise of the reward, or a reward "
        "that answers cannot influence",
        "train.optimizer.lr, rollout.prompts_per_round, rollout.group_size; read braid samples RUN",
    )


RULES: tuple[Callable[[Run], Iterator[Finding]], ...] = (
    _ended, _tripped, _no_signal, _no_gradient, _skipped, _invalid, _empty, _truncated, _collapse, _entropy,
    _length, _hacked, _mismatch, _kl, _clipped, _critic, _nothing_learned,
)  # fmt: skip


def _first_above(series: Series, limit: float) -> int | None:
    return next((number for number, value in series if value > limit), None)


def _first_below(series: Series, limit: float) -> int | None:
    return next((number for number, value in series if value < limit), None)


def _evaluations(run: Run) -> str:
    """The first and the last evaluation, as "eval/all/mean@1 0.31 to 0.02"."""
    series = run.evaluations
    return f"{run.target_name} {series[0][1]:.3g} to {series[-1][1]:.3g}" if series else "no evaluation"


def _moved(series: Series) -> str:
    """The means of the first and the last rounds, as "0.31 to 0.02"."""
    ends = _ends(series)
    return "unknown" if ends is None else f"{ends[0]:.3g} to {ends[1]:.3g}"
