"""Learning from the rows of a round: advantages, and the optimizer steps of critic and policy."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from braid.algorithms.aggregate import row_weights
from braid.algorithms.kl import steered_coefficient
from braid.algorithms.rewards import RunningMoments
from braid.checks import Step, add_sums
from braid.checks.packing import EVERY_ROUNDS, MOST_ROWS, SHARE
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig
from braid.errors import TrainingError
from braid.models.base import Output
from braid.plan import Plan
from braid.report.metrics import Metrics
from braid.training.advantages import are_trained
from braid.training.backend import TrainingBackend
from braid.training.group import ModelGroup
from braid.training.losses import policy_loss, value_loss_of, with_value_loss
from braid.training.rollout_buffer import RolloutBuffer
from braid.types import RowMetadata

from .buffer import Buffer
from .checks import Checks
from .keys import BATCH_KEY, CHOICE_KEY
from .models import Models
from .progress import Counters
from .reports import Reports, is_due, record
from .selection import Selection

logger = logging.getLogger(__name__)

MAX_EMPTY_ROUNDS = 10
"""Number of consecutive rounds without anything to train on after which the run fails."""


class Rows(NamedTuple):
    """Rows of a round, and the metrics of what was done with them."""

    rows: list[RowMetadata]
    metrics: Metrics


class Learner:
    """Computes advantages and updates the models. `reward_moments` are those of all rounds so far, if rewards
    are normalised by them."""

    def __init__(
        self, config: RunConfig, plan: Plan, models: Models, buffer: Buffer, reports: Reports, checks: Checks
    ) -> None:
        self._config, self._plan, self._models, self._buffer = config, plan, models, buffer
        self._reports = reports
        self.checks = checks
        self.reward_moments = RunningMoments()

    def fetch_rows(self, selection: Selection) -> Rows:
        """Have the rollout buffer fetch the round's rows from the workers that sampled them."""
        metrics = Metrics()
        with self._reports.timed("compute_advantages", metrics):
            return Rows(self._buffer.open(self._models.rollouts.start_rows(selection.kept)), metrics)

    def compute_advantages(self, rows: Sequence[RowMetadata], kl_coef: float | None) -> Rows:
        """Compute log-probs, values and advantages of the round's rows. Returns the rows to train on; an
        empty list if there is nothing to learn from. `kl_coef` as in Counters."""
        recipe, metrics = self._plan.recipe, Metrics()
        with self._reports.timed("compute_advantages", metrics):
            if rows:
                self._infer_fields(rows)
                computed, moments, sums = self._buffer.whole.compute_advantages(
                    self._kl_coef(kl_coef), self.reward_moments
                )
                self.reward_moments.load(moments.state())
                add_sums(self.checks.evidence.sums, sums)
                for name, value in computed.items():
                    metrics.mean(name, value)
                if recipe.supervised_coef > 0:
                    self._buffer.every.mark_successes(self._config.eval.success_reward)
            is_trained = are_trained(rows, recipe)
            trained = [row for row, is_so in zip(rows, is_trained, strict=True) if is_so]
            if recipe.mask_truncated or recipe.mask_long_failures is not None:
                num_masked = _num_trajectories(rows) - _num_trajectories(trained)
                metrics.add("rollout/masked_trajectories", num_masked)
        metrics.add("rollout/empty_rounds", int(not trained))
        return Rows(trained, metrics)

    def check_rows(self, selection: Selection, rows: Sequence[RowMetadata]) -> None:
        """Measure the rows of the round for the checks of the loop, before the update."""
        checks, rollouts = self.checks, self._models.rollouts
        rescores = checks.is_on("repeated_scores")
        add_sums(checks.evidence.sums, rollouts.check_sums(selection.kept, rescores=rescores))
        if not checks.is_on("packing") or (checks.evidence.round - 1) % EVERY_ROUNDS or not rows:
            return
        buffer, policy, chosen = self._buffer, self._models.policy, list[RowMetadata]()
        while len(chosen) < min(MOST_ROWS, len(rows)) and (
            len(chosen) < 2 or sum(map(len, chosen)) < SHARE * sum(map(len, rows))
        ):
            chosen.append(rows[len(chosen)])
        passes: list[tuple[str, list[RowMetadata]]] = [("packed_logprobs", chosen)]
        passes += [("lone_logprobs", [row]) for row in chosen]
        for field, batch in passes:
            for call in buffer.start_infer(policy, batch, {"logprobs": field}):
                call.wait()
        for part in buffer.shards.call(RolloutBuffer.compare_fields, "packed_logprobs", "lone_logprobs"):
            add_sums(checks.evidence.sums, part)

    def _infer_fields(self, rows: Sequence[RowMetadata]) -> None:
        """Compute log-probs and values before the update; models on separate workers run in parallel."""
        models, plan, buffer = self._models, self._plan, self._buffer
        asked: list[tuple[ModelGroup, dict[Output, str]]] = []
        if plan.old_logprobs == "recompute":
            fields: dict[Output, str] = {"logprobs": "old_logprobs"}
            if self._config.train.router_replay == "old":
                fields["experts"] = "experts"
            asked.append((models.inference or models.policy, fields))
        elif plan.old_logprobs == "behavior":
            buffer.every.copy_field("behavior_logprobs", "old_logprobs")
        elif plan.old_logprobs == "interpolated":
            buffer.every.write_policy_versions()
        if plan.recipe.full_kl_in in ("reward", "advantage"):
            asked.append((models.policy, {plan.recipe.divergence: "kl"}))
        if plan.learns_values:
            asked.append((models.critic or models.policy, {"values": "values"}))
        started = [buffer.start_infer(model, rows, fields) for model, fields in asked]
        started += [
            buffer.start_infer(model, compared, self._reference_fields())
            for model, compared in self._by_reference(rows)
        ]
        for call in itertools.chain.from_iterable(started):
            call.wait()
        weights = {
            source: teacher.kl_weight
            for teacher in self._config.reference.teachers
            for source in teacher.sources
        }
        if any(weight != 1.0 for weight in weights.values()):
            buffer.every.weigh_kl(weights)

    def _reference_fields(self) -> dict[Output, str]:
        """What the references compute before the update, and the fields that it is written to."""
        if self._plan.recipe.compares_distributions:
            return {"top_tokens": "top_tokens", "top_logprobs": "top_logprobs"}
        return {"logprobs": "ref_logprobs"}

    def _by_reference(self, rows: Sequence[RowMetadata]) -> list[tuple[ModelGroup, list[RowMetadata]]]:
        """Each reference that computes something before the update, with the rows that it is asked about."""
        models, recipe = self._models, self._plan.recipe
        if recipe.compares_distributions and recipe.kl_top_k is None:
            return []
        if models.reference is not None:
            return [(models.reference, list(rows))]
        asked = [
            (model, [row for row in rows if row.source in sources]) for model, sources in models.teachers
        ]
        return [(model, compared) for model, compared in asked if compared]

    def count_empty(self, counters: Counters, selection: Selection, rows: Sequence[RowMetadata]) -> int:
        """The number of consecutive rounds without `rows` to train on, this one included, which is logged.
        Raises TrainingError after MAX_EMPTY_ROUNDS."""
        if rows:
            return 0
        num_empty = counters.empty_rounds + 1
        why = selection.describe() if selection.reasons else ""
        if selection.kept:
            why += (
                " and " if why else ""
            ) + "algorithm.mask_truncated or mask_long_failures masks all remaining trajectories"
        if num_empty >= MAX_EMPTY_ROUNDS:
            raise TrainingError(
                f"{num_empty} consecutive rounds, up to round {counters.round}, had nothing to train on. In "
                f"the last one: {why}. {self._reports.watch.diagnosis()}"
            )
        logger.warning("round %d has nothing to train on: %s", counters.round, why)
        return num_empty

    @contextmanager
    def timed_update(self, rows: Sequence[RowMetadata]) -> Iterator[Metrics]:
        """Yield the metrics of the round's optimizer steps on `rows`, of which there is at least one, and add
        the time of the block and its rate."""
        metrics = Metrics()
        with self._reports.timed("update", metrics):
            yield metrics
        tokens = sum(len(row) for row in rows) * self._config.train.passes_per_round
        metrics.mean("train/tokens_per_s", tokens / metrics.value("time/update_s"))

    def is_critic_warm_up(self, round_: int) -> bool:
        """Whether only values are learned in this round."""
        return self._plan.learns_values and round_ <= self._config.critic.warmup_rounds

    def update_critic(self, rows: Sequence[RowMetadata], counters: Counters, metrics: Metrics) -> None:
        """Take the critic's steps of the round, on mini-batches of `rows`; during the warm-up of a policy
        with a value head, those of its values. Does nothing for a policy without values."""
        models, recipe = self._models, self._plan.recipe
        if models.critic is None and not self.is_critic_warm_up(counters.round):
            return
        critic = models.critic or models.policy
        loss, level = value_loss_of(recipe), recipe.value_level
        for batch in self._batches(rows, counters.round, self._config.critic.train or self._config.train):
            counts = [
                {"token": row.num_tokens, "action": row.num_actions, "turn": row.num_decisions}[level]
                for row in batch
            ]
            arguments = self._buffer.for_ranks(critic, batch, self._weights(batch, counts), loss)
            report = critic.ranks.scatter(TrainingBackend.train, arguments)[0]
            record(metrics, "critic", report)
            self.checks.evidence.steps.append(Step("critic", report, self._whole_weight(batch, counts)))

    def update_policy(self, rows: Sequence[RowMetadata], counters: Counters, metrics: Metrics) -> int:
        """Take the policy's steps of the round, on mini-batches of `rows`, with the value loss if it has a
        value head. Returns their number: 0 during the warm-up of the critic."""
        policy, recipe, step = self._models.policy, self._plan.recipe, counters.step
        if self.is_critic_warm_up(counters.round):
            return 0
        for batch in self._batches(rows, counters.round, self._config.train):
            counts = [row.num_decisions if recipe.counts_decisions else row.num_tokens for row in batch]
            places = [(row.shard, row.index) for row in batch]
            self._buffer.whole.write_step_fields(places, (self._config.run.seed, CHOICE_KEY, step))
            loss = policy_loss(
                recipe,
                kl_coef=self._kl_coef(counters.kl_coef),
                version=counters.round,
                is_checked=step == counters.step,
            )
            if self._plan.learns_values and self._models.critic is None:
                loss = with_value_loss(loss, recipe)
            arguments = self._buffer.for_ranks(policy, batch, self._weights(batch, counts), loss)
            report = policy.ranks.scatter(TrainingBackend.train, arguments)[0]
            record(metrics, "policy", report)
            self.checks.evidence.steps.append(Step("policy", report, self._whole_weight(batch, counts)))
            if recipe.early_stop_ratio is not None:
                metrics.add("policy/early_stopped_steps", int(report.is_stopped))
            step += 1
        return step - counters.step

    def _batches(
        self, rows: Sequence[RowMetadata], round_: int, train: TrainConfig
    ) -> Iterator[list[RowMetadata]]:
        """Mini-batches of whole groups, reshuffled in each pass."""
        groups = sorted({row.group for row in rows})
        for pass_ in range(train.passes_per_round):
            order = np.array(groups)
            if train.shuffle:
                seed = (self._config.run.seed, BATCH_KEY, round_, pass_)
                np.random.default_rng(seed).shuffle(order)
            for chosen in np.array_split(order, min(train.steps_per_pass, len(order))):
                members = set(chosen.tolist())
                yield [row for row in rows if row.group in members]

    def _weights(self, batch: Sequence[RowMetadata], counts: Sequence[int]) -> list[float]:
        """Each row's loss weight, of one of its tokens or decisions, of which it has `counts`."""
        return row_weights(
            counts,
            [row.group for row in batch],
            mode=self._plan.recipe.aggregation,
            constant=self._plan.aggregation_constant,
            agents=[(row.trajectory, row.agent) for row in batch],
        )

    def _whole_weight(self, batch: Sequence[RowMetadata], counts: Sequence[int]) -> float:
        """What the weights of all tokens or decisions of a step sum to, by definition of the aggregation."""
        num_trajectories = len({row.trajectory for row, count in zip(batch, counts, strict=True) if count})
        mean_count = sum(counts) / max(num_trajectories, 1)
        match self._plan.recipe.aggregation:
            case "sequence_mean_token_sum":
                return mean_count
            case "token_sum_constant":
                assert self._plan.aggregation_constant is not None, "the plan derives it"
                return mean_count / self._plan.aggregation_constant
            case _:
                return 1.0 if num_trajectories else 0.0

    def steer_kl(
        self, kl_coef: float | None, measured: Metrics, rows: Sequence[RowMetadata]
    ) -> tuple[float | None, Metrics]:
        """With kl_target, adapt the KL coefficient for the next round to the KL per token `measured` in this
        round's rewards, advantages or loss. Returns the new coefficient, as in Counters."""
        recipe, metrics = self._plan.recipe, Metrics()
        if recipe.kl_target is None or not self._plan.needs_reference:
            return kl_coef, metrics
        current = self._kl_coef(kl_coef)
        metrics.mean("algorithm/kl_coef", current)
        name = "policy/kl" if recipe.kl_in == "loss" else "reward/kl"
        if name in measured:
            kl_coef = steered_coefficient(
                current,
                measured.value(name),
                target=recipe.kl_target,
                num_trajectories=_num_trajectories(rows),
                horizon=recipe.kl_horizon,
            )
        return kl_coef, metrics

    def _kl_coef(self, steered: float | None) -> float:
        return self._plan.recipe.kl_coef if steered is None else steered

    def store(self, round_: int, selection: Selection, rows: Sequence[RowMetadata]) -> None:
        """Write the round's trajectories (samples/, dropped groups last) and the arrays of its rows
        (batches/), if due."""
        report, name = self._config.report, f"round_{round_:06d}"
        is_read, is_kept = (
            is_due(round_, every) for every in (report.samples_every_rounds, report.batches_every_rounds)
        )
        if not (is_read or is_kept):
            return
        groups = self._models.rollouts.whole("train", [*selection.kept, *selection.dropped])
        arrays = self._buffer.copies(rows)
        if is_read:
            self._reports.reporter.store_samples(name, groups, arrays)
        if is_kept:
            self._reports.reporter.store_batch(name, groups, arrays)


def _num_trajectories(rows: Sequence[RowMetadata]) -> int:
    return len({row.trajectory for row in rows})
