"""Every metric that braid reports: name, unit and meaning, in one table. What is not declared here cannot be logged.

A name may hold places: `<k>` and `<n>` are whole numbers, any other `<word>` is a name the user or the code gives (a
source, a reward part, a verb). The first line that fits a name describes it, so that plain names go before patterns.
docs/metrics.md is `as_markdown()`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property

from braid.errors import suggest


@dataclass(frozen=True)
class Metric:
    """One line of the table. An empty unit is a plain number (a ratio, a score, a count)."""

    name: str
    unit: str
    meaning: str

    @property
    def is_reproducible(self) -> bool:
        """Whether the same run gives the same value on another day: false for times, rates and memory."""
        return self.unit not in ("s", "tokens/s", "FLOP/s", "bytes")

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """What the names of this line look like."""
        parts = re.split(r"(<\w+>)", self.name)
        return re.compile("".join(_place(p) if p.startswith("<") else re.escape(p) for p in parts))


def _place(text: str) -> str:
    return r"\d+" if text in ("<k>", "<n>") else ".+"


METRICS: tuple[Metric, ...] = (
    Metric("round", "", "Rollout rounds so far; 0 is the state before the first."),
    Metric("step", "", "Optimizer steps of the policy so far."),
    # what was rewarded
    Metric("reward/mean", "", "Mean reward of the round's valid trajectories."),
    Metric("reward/std", "", "Standard deviation of the same rewards."),
    Metric("reward/shaped_mean", "", "Mean of the same rewards as training sees them (reward.truncated, overlong, scale, shift, clip)."),
    Metric("reward/greedy_mean", "", "Mean reward of the greedy answers that are the baseline (remax)."),
    Metric("reward/same_in_group_fraction", "", "Share of groups whose valid trajectories all have one reward in training: they teach nothing."),
    Metric("reward/kl", "nats", "Mean KL of policy from reference per token where it is taken off the reward, before the coefficient."),
    Metric("algorithm/kl_coef", "", "KL coefficient of the round, where kl_target steers it."),
    Metric("reward/source/<source>", "", "Mean reward on one source."),
    Metric("reward/part/<part>", "", "Mean score of one reward part, before its weight."),
    Metric("reward/time/<part>_s", "s", "Mean time of one call of a reward part, without waiting for its turn; of a reward model per answer."),
    Metric("reward/retries/<part>", "", "Further tries of a reward part's failed calls."),
    Metric("reward/truncated/<part>", "", "Answers that a reward model read cut to its longest input."),
    # what was sampled
    Metric("rollout/epoch", "", "Complete passes over the training prompts."),
    Metric("rollout/trajectories", "", "Trajectories sampled, invalid ones counted."),
    Metric("rollout/tokens", "tokens", "Tokens (or env steps) that the policy wrote, in dropped groups and greedy answers too."),
    Metric("rollout/tokens_per_s", "tokens/s", "The same per second of collecting."),
    Metric("rollout/output_length_mean", "tokens", "Mean tokens that the policy wrote in a trajectory."),
    Metric("rollout/output_length_max", "tokens", "Most tokens that the policy wrote in a trajectory."),
    Metric("rollout/truncated_fraction", "", "Share of valid trajectories that a limit of length, turns or time ended."),
    Metric("rollout/turns_mean", "", "Mean turns of the policy in a trajectory."),
    Metric("rollout/batches", "", "Batches of prompts drawn (rollout.filter.then=resample)."),
    Metric("rollout/dropped_groups/<reason>", "", "Groups kept out of training: by min_std, min_mean or max_mean of rollout.filter; surplus in a full round; baseline (remax) or every answer invalid."),
    Metric("rollout/replaced_groups", "", "Copies of kept groups in place of dropped ones (rollout.filter.then=replace)."),
    Metric("rollout/masked_trajectories", "", "Trajectories kept out of the loss by algorithm.mask_truncated or mask_long_failures."),
    Metric("rollout/empty_rounds", "", "1 for a round with nothing to train on."),
    Metric("status/<status>", "", "Trajectories that ended finished, truncated or invalid."),
    Metric("invalid/<boundary>", "", "Invalid trajectories by what failed: environment, engine or reward."),
    # the policy
    Metric("policy/loss", "", "The policy's loss, KL and entropy terms included."),
    Metric("policy/entropy", "nats", "Mean entropy of the distribution sampled from, per token."),
    Metric("policy/kl", "nats", "Mean KL of the policy from the reference, per token, by the config's estimator."),
    Metric("policy/approx_kl", "nats", "Mean KL of the policy from itself before the round's first step (k3)."),
    Metric("policy/ratio_mean", "", "Mean probability ratio of the policy to itself before the round's first step."),
    Metric("policy/ratio_max", "", "Greatest such ratio."),
    Metric("policy/clip_fraction", "", "Share of tokens where the bound of the policy loss binds (a clipped ratio; dppo: a token left out)."),
    Metric("policy/dual_clip_fraction", "", "Share of tokens where the dual clip binds."),
    Metric("policy/chosen_fraction", "", "Share of tokens that clip_cov or kl_cov acts upon."),
    Metric("policy/penalty", "", "Mean penalty of the policy loss kimi, per token."),
    Metric("policy/correction_mean", "", "Mean factor by which corrections for the sampler multiply a token's loss."),
    Metric("policy/correction_truncated_fraction", "", "Share of tokens whose weight a correction truncated."),
    Metric("policy/correction_masked_fraction", "", "Share of tokens that a correction left out."),
    Metric("policy/supervised_loss", "nats", "Mean cross-entropy of the tokens of successful trajectories (supervised_coef)."),
    Metric("policy/logprob_mismatch_kl", "nats", "KL between the sampling engine's and the trainer's log-probs (k3)."),
    Metric("policy/logprob_mismatch_max", "nats", "Greatest difference between the two."),
    Metric("policy/grad_norm", "", "Norm of the policy's gradient before clipping."),
    Metric("policy/lr", "", "Learning rate of the policy."),
    Metric("policy/skipped_steps", "", "Policy steps of the round left out for a loss or gradient that was not finite."),
    Metric("policy/early_stopped_steps", "", "Policy steps of the round left out for a mean ratio above early_stop_ratio."),
    # the critic
    Metric("critic/loss", "", "The value loss."),
    Metric("critic/value_mean", "", "Mean value given by the critic."),
    Metric("critic/return_mean", "", "Mean return that the critic learns from."),
    Metric("critic/explained_variance", "", "1 - var(return - value) / var(return): 1 is perfect, 0 knows nothing."),
    Metric("critic/clip_fraction", "", "Share of positions where the clip of the value binds."),
    Metric("critic/grad_norm", "", "Norm of the critic's gradient before clipping."),
    Metric("critic/lr", "", "Learning rate of the critic."),
    Metric("critic/skipped_steps", "", "Critic steps of the round left out for a loss or gradient that was not finite."),
    # loss scaling, of every role
    Metric("<role>/loss_scale", "", "Mean factor on the loss before the backward pass (train.grad_scaler)."),
    Metric("<role>/overflow_steps", "", "Steps of the role left out since its scaled gradients overflowed; the scale is halved."),
    # supervised learning
    Metric("sft/loss", "nats", "Cross-entropy per token of what is to be imitated."),
    Metric("sft/token_probability", "", "Mean probability that the model gives to the tokens to imitate."),
    Metric("sft/grad_norm", "", "Norm of the gradient before clipping."),
    Metric("sft/lr", "", "Learning rate."),
    Metric("sft/skipped_steps", "", "Steps left out for a loss or gradient that was not finite."),
    # evaluation; the source `all` is every source together
    Metric("eval/<source>/mean@<n>", "", "Mean reward of a source's valid answers, n per prompt; `all` for every source together."),
    Metric("eval/<source>/pass@<k>", "", "Chance that at least one of k answers to a prompt passes (unbiased estimate)."),
    Metric("eval/<source>/num", "", "Prompts evaluated."),
    Metric("eval/<source>/invalid", "", "Trajectories of the evaluation that are invalid."),
    # what it cost
    Metric("train/tokens_per_s", "tokens/s", "Tokens trained on per second of improving, prompts and repeated passes counted."),
    Metric("flops/rollout_per_s", "FLOP/s", "Model operations of sampling per second of collecting (train.count_flops; formula in braid/models/flops.py)."),
    Metric("flops/infer_per_s", "FLOP/s", "Model operations of log-probs and values before the update, per second of computing them."),
    Metric("flops/train_per_s", "FLOP/s", "Model operations of optimizer steps, per second of taking them."),
    Metric("time/round_s", "s", "Since the line before, all included."),
    Metric("time/<verb>_s", "s", "Time in one verb: warm_up, collect, score, credit, improve, publish, evaluate, export, save."),
    Metric("memory/peak_rss_bytes", "bytes", "Most memory that the process has held."),
)  # fmt: skip


@cache
def position(name: str) -> int:
    """The line of the table that describes `name`. Undeclared names are a bug."""
    for i, metric in enumerate(METRICS):
        if metric.pattern.fullmatch(name):
            return i
    near = suggest(name, [m.name for m in METRICS])
    raise AssertionError(f"metric {name!r} is not declared{near}; add a line for it to braid/report/names.py")


def describe(name: str) -> Metric:
    """Unit and meaning of a metric."""
    return METRICS[position(name)]


def as_markdown() -> str:
    """The table as docs/metrics.md."""
    head = (
        "# Metrics\n\n"
        "Every name in `metrics.jsonl`, TensorBoard and the trackers. This page is made from `braid/report/names.py`;\n"
        "a test holds it to that. `null` stands for a value that is not finite. Means are over the whole round, however\n"
        "it was cut into batches.\n\n"
        "| name | unit | meaning |\n|---|---|---|\n"
    )
    return head + "".join(f"| `{m.name}` | {m.unit} | {m.meaning} |\n" for m in METRICS)
