"""The verbs of the loops. Each takes the parts, does one thing, and leaves its metrics in `parts.metrics`."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

from braid.algorithms.aggregate import row_weights
from braid.config.train import TrainConfig
from braid.errors import RolloutError, TrainingError
from braid.models.base import Output
from braid.report.metrics import Metrics
from braid.report.outputs import log_outputs
from braid.rollout.rows import rows_of
from braid.training.backend import StepReport, TrainingBackend
from braid.training.credit import assign_credit
from braid.training.losses import policy_loss, value_loss_of
from braid.training.step_fields import write_step_fields
from braid.types import Group, Row, Status

from . import costs
from .parts import Parts

TRAIN_KEY, EVAL_KEY, BATCH_KEY, CHOICE_KEY = 0, 1, 2, 3
"""First number of every random key, so that no two uses draw the same."""


@contextmanager
def _timed(parts: Parts, verb: str) -> Iterator[None]:
    start = time.perf_counter()
    with parts.reporter.phase(verb), parts.memory.phase(verb) if parts.memory else nullcontext():
        yield
    parts.metrics.add(f"time/{verb}_s", time.perf_counter() - start)


def warm_up(parts: Parts) -> None:
    """Supervised learning before the first round, where the config has it; then the reference is taken."""
    if parts.supervised is not None:
        with _timed(parts, "warm_up"):
            for step in range(parts.supervised.num_steps):
                parts.reporter.progress("warm_up", step, parts.supervised.num_steps)
                parts.metrics = Metrics()
                parts.supervised.learn(parts.metrics)
        parts.supervised = None
    parts.follow_policy()
    parts.progress.is_warm = True
    publish(parts)


def collect(parts: Parts) -> list[Group]:
    """Sample this round's groups."""
    rollout = parts.config.rollout
    prompts = [parts.train_prompts[i] for i in parts.sampler.take(rollout.prompts_per_round)]
    with costs.device_freed(parts), _timed(parts, "collect"):
        key = (TRAIN_KEY, parts.progress.round)
        groups = parts.loop.run(parts.driver.run(prompts, rollout.group_size, key=key))
    trajectories = [t for group in groups for t in group.trajectories]
    tokens = [t.num_output_tokens for t in trajectories]
    metrics = parts.metrics
    metrics.add("rollout/trajectories", len(trajectories))
    metrics.add("rollout/tokens", sum(tokens))
    metrics.mean("rollout/output_length_mean", sum(tokens), len(tokens))
    metrics.max("rollout/output_length_max", max(tokens))
    metrics.mean("rollout/tokens_per_s", sum(tokens) / metrics.value("time/collect_s"))
    for trajectory in trajectories:
        if trajectory.turns:
            metrics.mean("rollout/turns_mean", len(trajectory.turns))
    costs.count_sampling(parts, groups)
    return groups


def score(parts: Parts, groups: Sequence[Group]) -> None:
    """Give every valid trajectory its reward; end the run when too many are invalid."""
    trajectories = [t for group in groups for t in group.trajectories]
    with _timed(parts, "score"):
        parts.loop.run(parts.scorer.score(trajectories))
    if parts.config.rollout.print_outputs:
        log_outputs(parts.progress.round, groups)
    metrics = parts.metrics
    for status in Status:
        metrics.add(f"status/{status}", sum(t.status is status for t in trajectories))
    reasons = Counter(t.reason for t in trajectories if not t.is_valid)
    invalid = sum(reasons.values())
    for boundary, count in Counter(reason.split(":")[0] for reason in reasons.elements()).items():
        metrics.add(f"invalid/{boundary.split()[0]}", count)
    limit = parts.config.rollout.max_invalid_fraction
    if invalid > limit * len(trajectories):
        common = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
        raise RolloutError(
            f"{invalid} of {len(trajectories)} trajectories of round {parts.progress.round} are invalid, more than "
            f"rollout.max_invalid_fraction={limit:g} allows. Most common: {common}"
        )
    for trajectory in trajectories:
        if trajectory.reward is not None:
            metrics.mean("reward/mean", trajectory.reward)
            metrics.mean(f"reward/source/{trajectory.prompt.source}", trajectory.reward)
            for part, value in trajectory.reward_parts.items():
                metrics.mean(f"reward/part/{part}", value)
    rewards = [[t.reward or 0.0 for t in g.valid] for g in groups if g.valid]
    metrics.mean("reward/std", float(np.std(np.concatenate(rewards))) if rewards else 0.0)
    metrics.mean("reward/same_in_group_fraction", sum(min(r) == max(r) for r in rewards), len(rewards))


def credit(parts: Parts, groups: Sequence[Group]) -> list[Row]:
    """Turn the valid trajectories into rows with everything that the losses need."""
    plan = parts.plan
    with _timed(parts, "credit"):
        rows = rows_of(groups)
        if not rows:
            raise TrainingError(
                f"round {parts.progress.round} has no trajectory to train on: every answer of every group is invalid"
            )
        if plan.old_logprobs == "recompute":
            _infer(parts.policy, rows, "logprobs", "old_logprobs")
        elif plan.old_logprobs == "behavior":
            for row in rows:
                row.fields["old_logprobs"] = row.fields["behavior_logprobs"]
        if parts.reference is not None:
            _infer(parts.reference, rows, "logprobs", "ref_logprobs")
        if parts.critic is not None:
            _infer(parts.critic, rows, "values", "values")
        for name, value in assign_credit(rows, plan.recipe).items():
            parts.metrics.mean(name, value)
    return rows


def _infer(backend: TrainingBackend, rows: Sequence[Row], output: Output, field: str) -> None:
    for row, result in zip(rows, backend.infer(rows, frozenset({output})), strict=True):
        row.fields[field] = result[output]


def improve(parts: Parts, rows: Sequence[Row]) -> None:
    """The round's optimizer steps: the critic's, then the policy's, each on mini-batches of its own."""
    with _timed(parts, "improve"):
        if parts.critic is not None:
            _improve_critic(parts, parts.critic, rows)
        if parts.critic is None or parts.progress.round > parts.config.critic.warmup_rounds:
            _improve_policy(parts, rows)
    tokens = sum(len(row) for row in rows) * parts.config.train.passes_per_round
    parts.metrics.mean("train/tokens_per_s", tokens / parts.metrics.value("time/improve_s"))


def _improve_critic(parts: Parts, critic: TrainingBackend, rows: Sequence[Row]) -> None:
    loss = value_loss_of(parts.plan.recipe)
    for batch, weights in _batches(parts, rows, parts.config.critic.train or parts.config.train):
        record(parts.metrics, "critic", critic.train(batch, weights, loss))


def _improve_policy(parts: Parts, rows: Sequence[Row]) -> None:
    recipe = parts.plan.recipe
    for batch, weights in _batches(parts, rows, parts.config.train):
        key = (parts.config.run.seed, CHOICE_KEY, parts.progress.step)
        write_step_fields(batch, recipe, constant=parts.plan.aggregation_constant, key=key)
        report = parts.policy.train(batch, weights, policy_loss(recipe))
        record(parts.metrics, "policy", report)
        if recipe.early_stop_ratio is not None:
            parts.metrics.add("policy/early_stopped_steps", int(report.is_stopped))
        parts.progress.step += 1


def _batches(
    parts: Parts, rows: Sequence[Row], train: TrainConfig
) -> Iterator[tuple[list[Row], list[float]]]:
    """Mini-batches of whole prompts, each pass in a new order, with what each position of a row counts in the loss."""
    groups = sorted({row.group for row in rows})
    for pass_ in range(train.passes_per_round):
        order = np.array(groups)
        if train.shuffle:
            seed = (parts.config.run.seed, BATCH_KEY, parts.progress.round, pass_)
            np.random.default_rng(seed).shuffle(order)
        for chosen in np.array_split(order, min(train.steps_per_pass, len(order))):
            members = set(chosen.tolist())
            batch = [row for row in rows if row.group in members]
            yield (
                batch,
                row_weights(
                    [row.num_tokens for row in batch],
                    [row.group for row in batch],
                    mode=parts.plan.recipe.aggregation,
                    constant=parts.plan.aggregation_constant,
                ),
            )


def record(metrics: Metrics, role: str, report: StepReport) -> None:
    """Keep what an optimizer step did, under the name of the role that took it."""
    metrics.mean(f"{role}/loss", report.loss)
    if report.loss_scale is not None:
        metrics.mean(f"{role}/loss_scale", report.loss_scale)
        metrics.add(f"{role}/overflow_steps", int(report.is_overflow))
    if not report.is_overflow:
        metrics.mean(f"{role}/grad_norm", report.grad_norm)
    metrics.mean(f"{role}/lr", report.lr)
    metrics.add(f"{role}/skipped_steps", int(report.is_skipped and not report.is_overflow))
    for name, (total, count) in report.metrics.items():
        metrics.mean(name, total, count)
    for name, value in report.maxima.items():
        metrics.max(name, value)


def update_reference(parts: Parts) -> None:
    """After every so many passes over the prompts, the reference takes over the policy's weights."""
    every = parts.config.reference.update_every_epochs
    if every and parts.sampler.epoch // every > parts.progress.reference_updates:
        parts.progress.reference_updates = parts.sampler.epoch // every
        parts.update_reference()


def publish(parts: Parts) -> None:
    """Hand the new weights to the samplers."""
    with _timed(parts, "publish"):
        parts.driver.publish(parts.progress.round)
        parts.eval_driver.publish(parts.progress.round)
        if parts.check_weights is not None:
            parts.check_weights(parts.progress.round)


def store(parts: Parts, groups: Sequence[Group], rows: Sequence[Row]) -> None:
    """Keep every trajectory of chosen rounds for reading, and every array of the rows for machines."""
    report, name = parts.config.report, f"round_{parts.progress.round:06d}"
    if parts.is_due(report.samples_every_rounds):
        parts.reporter.store_samples(name, groups, rows)
    if parts.is_due(report.batches_every_rounds):
        parts.reporter.store_batch(name, groups, rows)


def evaluate(parts: Parts, *, is_due: bool) -> None:
    """mean@n and pass@k on each evaluation source; the same random numbers each time."""
    if not is_due or not parts.eval_prompts:
        return
    with _timed(parts, "evaluate"):
        results, groups = _evaluate(parts)
    if parts.config.report.eval_samples:
        parts.reporter.store_samples(f"eval_{parts.progress.round:06d}", groups, ())
    for source, values in results.items():
        for name, value in values.items():
            parts.metrics.mean(f"eval/{source}/{name}", value)


def _evaluate(parts: Parts) -> tuple[dict[str, dict[str, float]], list[Group]]:
    """Results by source, and the groups in the order in which they were sampled. The order changes no result."""
    config = parts.config.eval
    prompts = [p for source in parts.eval_prompts.values() for p in source]
    order = np.arange(len(prompts))
    if config.shuffle:
        np.random.default_rng((parts.config.run.seed, EVAL_KEY)).shuffle(order)
    with costs.device_freed(parts):
        groups = parts.loop.run(
            parts.eval_driver.run(
                [prompts[i] for i in order],
                config.samples_per_prompt,
                key=(EVAL_KEY, 0),
                numbers=order.tolist(),
            )
        )
    parts.loop.run(parts.scorer.score([t for g in groups for t in g.trajectories]))
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
    """mean@n: mean reward of valid trajectories. pass@k: chance that one of k of a prompt's n samples succeeds,
    1 - C(n - c, k) / C(n, k) for c successes (Chen et al. 2021), over prompts with at least k valid samples."""
    rewards = [[t.reward for t in g.valid if t.reward is not None] for g in groups]
    n = max((len(g.trajectories) for g in groups), default=0)
    flat = [r for of in rewards for r in of]
    out = {f"mean@{n}": float(np.mean(flat)) if flat else float("nan")}
    for k in pass_at:
        chances = [_pass_at(k, len(of), sum(r >= success for r in of)) for of in rewards if len(of) >= k]
        out[f"pass@{k}"] = float(np.mean(chances)) if chances else float("nan")
    out["num"] = float(len(groups))
    out["invalid"] = float(sum(len(g.trajectories) - len(g.valid) for g in groups))
    return out


def _pass_at(k: int, n: int, successes: int) -> float:
    if n - successes < k:
        return 1.0
    return 1.0 - float(np.prod([1.0 - k / i for i in range(n - successes + 1, n + 1)]))


def report(parts: Parts) -> None:
    """Write the round's line everywhere, and start a new one."""
    metrics, progress = parts.metrics, parts.progress
    metrics.mean("rollout/epoch", parts.sampler.epoch)
    metrics.max("memory/peak_rss_bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    costs.count_training(parts)
    if parts.memory is not None:
        parts.memory.write(progress.round)
    parts.reporter.log(progress.round, progress.step, metrics)
    parts.metrics = Metrics()


def save(parts: Parts, *, is_due: bool) -> None:
    """Write a checkpoint of the whole state."""
    if not is_due:
        return
    with _timed(parts, "save"):
        parts.store.save(parts.progress.step, state_of(parts))


def export(parts: Parts) -> None:
    """Write the policy of chosen rounds as a Hugging Face folder."""
    config = parts.config.checkpoint
    if parts.export is None or not parts.is_due(config.export_every_rounds):
        return
    home = parts.reporter.run_dir.exports if config.export_dir is None else Path(config.export_dir)
    with _timed(parts, "export"):
        parts.export(home / f"step_{parts.progress.step}")


def state_of(parts: Parts) -> dict[str, object]:
    """All that `restore` needs to go on to the bit."""
    return {
        "progress": parts.progress.state(),
        "sampler": parts.sampler.state(),
        "policy": parts.policy.state(),
        "critic": parts.critic.state() if parts.critic else None,
        "reference": parts.reference.state() if parts.reference and _reference_changes(parts) else None,
        "reporter": parts.reporter.state(),
    }


def _reference_changes(parts: Parts) -> bool:
    """Whether the reference is ever other than what its folder holds."""
    config = parts.config.reference
    return config.path is None or config.update_every_epochs > 0


def restore(parts: Parts, state: dict[str, object]) -> None:
    """Put the parts where the checkpoint left them."""
    loaders = {
        "progress": parts.progress,
        "sampler": parts.sampler,
        "policy": parts.policy,
        "critic": parts.critic,
        "reference": parts.reference,
        "reporter": parts.reporter,
    }
    for name, part in loaders.items():
        if part is not None and state.get(name) is not None:
            part.load(state[name])  # pyright: ignore[reportArgumentType]
    publish(parts)
