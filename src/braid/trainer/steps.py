"""The stages of the training loops. Each operates on the parts and records its metrics in `parts.metrics`."""

from __future__ import annotations

import itertools
import logging
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import numpy as np

from braid.algorithms.advantages.formulas import reward_std
from braid.algorithms.aggregate import row_weights
from braid.algorithms.kl import steered_coefficient
from braid.config.env import AgentEnvConfig, ChatEnv, SimulatorEnv
from braid.config.train import TrainConfig
from braid.envs.agents.build import kind_of
from braid.errors import TrainingError
from braid.models.base import Output
from braid.report.metrics import Metrics
from braid.report.outputs import log_outputs
from braid.training.advantages import are_trained
from braid.training.backend import StepReport
from braid.training.group import ModelGroup
from braid.training.losses import policy_loss, value_loss_of, with_value_loss
from braid.training.rollout_buffer import RowMetadata
from braid.types import Group, Status, Trajectory, is_at_least

from . import costs, roles
from .evaluation import evaluate, show_films
from .keys import BATCH_KEY, CHOICE_KEY, COPY_KEY, TRAIN_KEY
from .parts import Parts
from .saving import given_up_when_late, save, stop_if_asked, sync_weights
from .selection import Reason, Selection
from .validity import check_valid, most_common

logger = logging.getLogger(__name__)

MAX_EMPTY_ROUNDS = 10
"""Number of consecutive rounds without anything to train on after which the run fails."""


def warm_up(parts: Parts) -> None:
    """Run the supervised warm-up if the config has one; then copy the policy's weights to the reference and
    the critic."""
    progress = parts.progress
    if parts.supervised is not None:
        parts.rollouts.sleep()
        num_steps = parts.supervised.num_steps
        with parts.timed("warm_up"):
            while progress.warm_steps < num_steps:
                parts.reporter.progress("warm_up", progress.warm_steps, num_steps)
                parts.metrics = Metrics()
                with parts.stop.finishing():
                    record(parts.metrics, "sft", parts.supervised.learn())
                progress.warm_steps += 1
                save(parts, is_due=False)
                stop_if_asked(parts)
        roles.follow_warm_up(parts)
        parts.supervised = None
    progress.is_warm, progress.is_reported = True, False
    sync_weights(parts)


def rollout(parts: Parts) -> Selection:
    """Sample and score this round's groups: batches of prompts are drawn until rollout.filter is
    satisfied."""
    rollout = parts.config.rollout
    selection = Selection(rollout.filter, rollout.prompts_per_round)
    sampled: list[Group] = []
    with parts.stop.cuttable():
        parts.rollouts.forget("train")
        costs.start_sampling(parts)
    while not selection.is_done:
        groups = _rollout_batch(parts, selection.num_batches)
        selection.add(groups)
        sampled += groups
    with parts.stop.cuttable():
        costs.end_sampling(parts)
    report_sampling(parts, selection, sampled)
    return selection


def _rollout_batch(parts: Parts, batch: int) -> list[Group]:
    """Sample and score the groups of one batch of prompts, and shape the rewards of valid trajectories. Returns
    the groups without tokens, which stay on the workers. Raises RolloutError if too many trajectories are
    invalid."""
    config = parts.config
    prompts = parts.sampler.take(config.rollout.prompts_per_round)
    numbers = range(batch * len(prompts), (batch + 1) * len(prompts))
    keys = [(TRAIN_KEY, parts.progress.round, number) for number in numbers]
    with parts.timed("rollout"), parts.stop.cuttable():
        groups, cost = parts.rollouts.collect("train", prompts, config.rollout.group_size, keys)
    parts.metrics.merge(cost)
    show_outputs(parts, groups)
    check_round(parts, groups)
    return groups


def show_outputs(parts: Parts, groups: Sequence[Group]) -> None:
    """Log the outputs of groups, with rollout.print_outputs, and write their video, with env.video."""
    env = parts.config.env
    if isinstance(env, SimulatorEnv) and env.video.train_every_rounds is not None:
        show_films(parts, env, "train", groups)
    if parts.config.rollout.print_outputs:
        log_outputs(parts.progress.round, parts.rollouts.whole("train", groups))


def check_round(parts: Parts, groups: Sequence[Group]) -> None:
    """Count the trajectories of a round by status. Raises RolloutError if too many are invalid."""
    metrics = parts.metrics
    trajectories = [t for group in groups for t in group.trajectories]
    statuses = Counter(t.status for t in trajectories)
    for status in Status:
        metrics.add(f"status/{status}", statuses[status])
    metrics.mean("rollout/invalid_fraction", statuses[Status.INVALID], len(trajectories))
    for boundary, count in Counter(t.reason.split(":")[0] for t in trajectories if not t.is_valid).items():
        metrics.add(f"invalid/{boundary.split()[0]}", count)
    check_valid(parts, trajectories, f"round {parts.progress.round}")


def report_sampling(parts: Parts, selection: Selection, groups: Sequence[Group]) -> None:
    """Complete the selection of a round, and record metrics of it and of the `groups` sampled and scored, including
    dropped ones. Raises TrainingError if all of them are invalid."""
    selection.fill((parts.config.run.seed, COPY_KEY, parts.progress.round))
    _report_groups(parts, groups)
    _report_selection(parts, selection)
    if selection.reasons["invalid"] == len(groups):
        raise TrainingError(
            f"round {parts.progress.round} has nothing to train on: all its trajectories are invalid; most common: "
            f"{most_common(t for group in groups for t in group.trajectories)}"
        )


def _report_groups(parts: Parts, groups: Sequence[Group]) -> None:
    trajectories = [t for group in groups for t in group.trajectories]
    lengths = [t.num_output_tokens for t in trajectories]
    metrics = parts.metrics
    metrics.add("rollout/trajectories", len(trajectories))
    metrics.mean("rollout/output_length_mean", sum(lengths), len(lengths))
    metrics.max("rollout/output_length_max", max(lengths))
    valid = [t for t in trajectories if t.is_valid]
    metrics.mean(
        "rollout/truncated_fraction", sum(t.status is Status.TRUNCATED for t in valid), max(1, len(valid))
    )
    costs.count_sampling(parts, groups)
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
    _report_envs(parts, valid)
    rewards = [t.reward for t in trajectories if t.reward is not None]
    metrics.mean("reward/std", float(np.std(sorted(rewards))) if rewards else 0.0)
    seen = [group.compared_rewards for group in groups if group.valid]
    if parts.config.rollout.group_size > 1:
        same = sum(all(reward_std(of) == 0 for of in rewards) for rewards in seen)
        metrics.mean("reward/same_in_group_fraction", same, len(seen))


def _report_envs(parts: Parts, trajectories: Sequence[Trajectory]) -> None:
    env = parts.config.env
    if isinstance(env, ChatEnv | SimulatorEnv):
        _report_env(parts.metrics, "env", trajectories)
    if isinstance(env, AgentEnvConfig):
        for kind in env.mix:
            of_kind = [t for t in trajectories if kind_of(t.prompt, env.mix_key) == kind]
            _report_env(parts.metrics, f"env/mix/{kind}", of_kind)


def _report_env(metrics: Metrics, prefix: str, trajectories: Sequence[Trajectory]) -> None:
    for name in sorted({name for t in trajectories for name in t.metrics}):
        metrics.mean(
            f"{prefix}/{name}", sum(t.metrics.get(name, 0.0) for t in trajectories), len(trajectories)
        )
    lengths = [t.lengths for t in trajectories]
    if waits := [s for of in lengths for s in of.env_s]:
        metrics.mean(f"{prefix}/sample_s", sum(of.sample_s for of in lengths), len(lengths))
        for p in (50, 90, 99):
            metrics.mean(f"{prefix}/reply_p{p}_s", float(np.percentile(waits, p)))


def _report_selection(parts: Parts, selection: Selection) -> None:
    """Record metrics of the filter, if groups were dropped or could have been."""
    config, metrics = selection.config, parts.metrics
    for reason in get_args(Reason):
        if selection.reasons[reason] or getattr(config, reason, None) is not None:
            metrics.add(f"rollout/dropped_groups/{reason}", selection.reasons[reason])
    if config.then == "resample":
        metrics.add("rollout/batches", selection.num_batches)
        if len(selection.kept) < selection.size:
            logger.warning(
                "round %d continues with %d of %d groups after rollout.filter.max_batches=%d batches: %s",
                parts.progress.round, len(selection.kept), selection.size, selection.num_batches, selection.describe(),
            )  # fmt: skip
    if config.then == "replace":
        metrics.add("rollout/replaced_groups", selection.num_replaced)


def fetch_rows(parts: Parts, selection: Selection) -> list[RowMetadata]:
    """Have the trainer's ranks fetch the round's rows from the workers that sampled them."""
    with parts.timed("compute_advantages"):
        return parts.buffer.open(parts.rollouts.start_rows(selection.kept))


def train(parts: Parts, selection: Selection, rows: list[RowMetadata]) -> None:
    """Train on the groups of a round, whose `rows` were fetched."""
    rows = compute_advantages(parts, selection, rows)
    update(parts, rows)
    steer_kl(parts, rows)
    update_reference(parts)
    store(parts, selection, rows)
    parts.progress.is_reported = False


def compute_advantages(parts: Parts, selection: Selection, rows: list[RowMetadata]) -> list[RowMetadata]:
    """Compute log-probs, values and advantages of the round's rows. Returns the rows to train on; an
    empty list if there is nothing to learn from, which is logged, and raises TrainingError after
    MAX_EMPTY_ROUNDS in a row."""
    with parts.timed("compute_advantages"):
        if rows:
            _infer_fields(parts, rows)
            computed, parts.reward_moments = parts.buffer.compute_advantages(
                parts.kl_coef, parts.reward_moments
            )
            for name, value in computed.items():
                parts.metrics.mean(name, value)
            if parts.plan.recipe.supervised_coef > 0:
                success = parts.config.eval.success_reward
                parts.buffer.mark_successes(rows, [is_at_least(row.score, success) for row in rows])
        is_trained = are_trained(rows, parts.plan.recipe)
        trained = [row for row, is_so in zip(rows, is_trained, strict=True) if is_so]
        if parts.plan.recipe.mask_truncated or parts.plan.recipe.mask_long_failures is not None:
            num_masked = _num_trajectories(rows) - _num_trajectories(trained)
            parts.metrics.add("rollout/masked_trajectories", num_masked)
    _count_empty_rounds(parts, selection, trained)
    return trained


def _num_trajectories(rows: Sequence[RowMetadata]) -> int:
    return len({row.trajectory for row in rows})


def _infer_fields(parts: Parts, rows: Sequence[RowMetadata]) -> None:
    """Compute log-probs and values before the update; models on separate workers run in parallel."""
    asked: list[tuple[ModelGroup, Output, str]] = []
    if parts.plan.old_logprobs == "recompute":
        asked.append((parts.inference or parts.policy, "logprobs", "old_logprobs"))
    elif parts.plan.old_logprobs == "behavior":
        parts.buffer.copy_field("behavior_logprobs", "old_logprobs")
    elif parts.plan.old_logprobs == "interpolated":
        parts.buffer.write_policy_versions()
    if parts.plan.recipe.full_kl_in in ("reward", "advantage"):
        asked.append((parts.policy, "kl", "kl"))
    elif parts.reference is not None and parts.plan.recipe.full_kl_in is None:
        asked.append((parts.reference, "logprobs", "ref_logprobs"))
    if parts.plan.learns_values:
        asked.append((parts.critic or parts.policy, "values", "values"))
    started = [parts.buffer.start_infer(model, rows, output, field) for model, output, field in asked]
    for call in itertools.chain.from_iterable(started):
        call.wait()


def _count_empty_rounds(parts: Parts, selection: Selection, rows: Sequence[RowMetadata]) -> None:
    progress = parts.progress
    parts.metrics.add("rollout/empty_rounds", int(not rows))
    progress.empty_rounds = 0 if rows else progress.empty_rounds + 1
    if rows:
        return
    why = selection.describe() if selection.reasons else ""
    if selection.kept:
        why += (
            " and " if why else ""
        ) + "algorithm.mask_truncated or mask_long_failures masks all remaining trajectories"
    if progress.empty_rounds >= MAX_EMPTY_ROUNDS:
        raise TrainingError(
            f"{progress.empty_rounds} consecutive rounds, up to round {progress.round}, had nothing to train on. In the last "
            f"one: {why}. {parts.watch.diagnosis()}"
        )
    logger.warning("round %d has nothing to train on: %s", progress.round, why)


def update(parts: Parts, rows: Sequence[RowMetadata]) -> None:
    """Take the round's optimizer steps: the critic's, then the policy's, each on separate mini-batches; or those of a policy
    with a value head. Does nothing without rows."""
    if not rows:
        return
    with parts.timed("update"):
        is_warm_up = parts.plan.learns_values and parts.progress.round <= parts.config.critic.warmup_rounds
        if parts.critic is not None or is_warm_up:
            update_critic(parts, parts.critic or parts.policy, rows)
        if not is_warm_up:
            update_policy(parts, rows)
    tokens = sum(len(row) for row in rows) * parts.config.train.passes_per_round
    parts.metrics.mean("train/tokens_per_s", tokens / parts.metrics.value("time/update_s"))


def update_critic(parts: Parts, critic: ModelGroup, rows: Sequence[RowMetadata]) -> None:
    recipe = parts.plan.recipe
    loss, level = value_loss_of(recipe), recipe.value_level
    for batch in _batches(parts, rows, parts.config.critic.train or parts.config.train):
        counts = [
            {"token": row.num_tokens, "action": row.num_actions, "turn": row.num_decisions}[level]
            for row in batch
        ]
        weights = _weights(parts, batch, counts)
        record(parts.metrics, "critic", parts.buffer.train(critic, batch, weights, loss))


def update_policy(parts: Parts, rows: Sequence[RowMetadata]) -> None:
    recipe = parts.plan.recipe
    for batch in _batches(parts, rows, parts.config.train):
        counts = [row.num_decisions if recipe.counts_decisions else row.num_tokens for row in batch]
        weights = _weights(parts, batch, counts)
        key = (parts.config.run.seed, CHOICE_KEY, parts.progress.step)
        parts.buffer.write_step_fields(batch, key)
        loss = policy_loss(recipe, kl_coef=parts.kl_coef, version=parts.progress.round)
        if parts.plan.learns_values and parts.critic is None:
            loss = with_value_loss(loss, recipe)
        report = parts.buffer.train(parts.policy, batch, weights, loss)
        record(parts.metrics, "policy", report)
        if recipe.early_stop_ratio is not None:
            parts.metrics.add("policy/early_stopped_steps", int(report.is_stopped))
        parts.progress.step += 1


def _batches(parts: Parts, rows: Sequence[RowMetadata], train: TrainConfig) -> Iterator[list[RowMetadata]]:
    """Mini-batches of whole groups, reshuffled in each pass."""
    groups = sorted({row.group for row in rows})
    for pass_ in range(train.passes_per_round):
        order = np.array(groups)
        if train.shuffle:
            seed = (parts.config.run.seed, BATCH_KEY, parts.progress.round, pass_)
            np.random.default_rng(seed).shuffle(order)
        for chosen in np.array_split(order, min(train.steps_per_pass, len(order))):
            members = set(chosen.tolist())
            yield [row for row in rows if row.group in members]


def _weights(parts: Parts, batch: Sequence[RowMetadata], counts: Sequence[int]) -> list[float]:
    """Each row's loss weight, of one of its tokens or decisions, of which it has `counts`."""
    plan = parts.plan
    return row_weights(
        counts,
        [row.group for row in batch],
        mode=plan.recipe.aggregation,
        constant=plan.aggregation_constant,
        agents=[(row.trajectory, row.agent) for row in batch],
    )


def steer_kl(parts: Parts, rows: Sequence[RowMetadata]) -> None:
    """With kl_target, adapt the KL coefficient for the next round to the KL per token measured in this
    round's rewards, advantages or loss."""
    recipe = parts.plan.recipe
    if recipe.kl_target is None or parts.reference is None:
        return
    parts.metrics.mean("algorithm/kl_coef", parts.kl_coef)
    seen = "policy/kl" if recipe.kl_in == "loss" else "reward/kl"
    if seen in parts.metrics:
        parts.progress.kl_coef = steered_coefficient(
            parts.kl_coef,
            parts.metrics.value(seen),
            target=recipe.kl_target,
            num_trajectories=_num_trajectories(rows),
            horizon=recipe.kl_horizon,
        )


def record(metrics: Metrics, role: str, report: StepReport) -> None:
    """Record the metrics of an optimizer step, under the role's name."""
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
    """Copy the policy's weights to the reference every reference.update_every_epochs passes over the
    prompts."""
    every = parts.config.reference.update_every_epochs
    if every and parts.sampler.epoch // every > parts.progress.reference_updates:
        parts.progress.reference_updates = parts.sampler.epoch // every
        roles.follow_policy(parts)


def store(parts: Parts, selection: Selection, rows: Sequence[RowMetadata]) -> None:
    """Write the round's trajectories (samples/, dropped groups last) and the arrays of its rows (batches/),
    if due."""
    report, name = parts.config.report, f"round_{parts.progress.round:06d}"
    is_read, is_kept = parts.is_due(report.samples_every_rounds), parts.is_due(report.batches_every_rounds)
    if not (is_read or is_kept):
        return
    groups = parts.rollouts.whole("train", [*selection.kept, *selection.dropped])
    arrays = parts.buffer.whole(rows)
    if is_read:
        parts.reporter.store_samples(name, groups, arrays)
    if is_kept:
        parts.reporter.store_batch(name, groups, arrays)


def finish_round(parts: Parts) -> None:
    """Evaluate, export, report and save at the end of a round. Before the first round: evaluate and report
    the initial policy."""
    config, round_ = parts.config, parts.progress.round
    is_last = round_ == parts.plan.num_rounds
    cadence = parts.is_due(config.eval.every_rounds, is_last and config.eval.at_end)
    with given_up_when_late(parts):
        evaluate(parts, is_due=cadence if round_ else config.eval.before)
    if round_:
        export(parts)
    report(parts)
    save(parts, is_due=parts.is_due(config.checkpoint.every_rounds, is_last and config.checkpoint.at_end))


def report(parts: Parts) -> None:
    """Write the round's metrics to all sinks, and reset them."""
    metrics, progress = parts.metrics, parts.progress
    metrics.mean("rollout/epoch", parts.sampler.epoch)
    metrics.max("memory/peak_rss_bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    costs.count_training(parts)
    if parts.memory is not None:
        parts.memory.write(progress.round)
    parts.reporter.log(progress.round, progress.step, metrics)
    parts.watch.see(progress.round, metrics.flat())
    parts.metrics = Metrics()
    progress.is_reported = True


@contextmanager
def timed_update(parts: Parts) -> Iterator[None]:
    """Measure the time that a round takes after its rollout, including the save that may follow."""
    start = time.perf_counter()
    yield
    parts.update_s = time.perf_counter() - start + parts.clock.cost_s


def export(parts: Parts) -> None:
    """Write the policy as a Hugging Face folder, in rounds that are a multiple of
    checkpoint.export_every_rounds."""
    config = parts.config.checkpoint
    if parts.tokenizer is None or not parts.is_due(config.export_every_rounds):
        return
    home = parts.reporter.run_dir.exports if config.export_dir is None else Path(config.export_dir)
    with parts.timed("export"), parts.stop.finishing():
        parts.cluster.export(parts.tokenizer, home / f"step_{parts.progress.step}")
