"""Learning from preferences (`braid prefer`): pairs, their order, the models, and the loop over them. A round
is one optimizer step, on the pairs that the sampler draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braid.algorithms.pairs import Pairs
from braid.config.prefer import PreferConfig
from braid.config.schema import RunConfig
from braid.data.pairs import CONVERSATION_TEMPLATE, Pair
from braid.data.sampler import PromptSampler
from braid.report.metrics import Metrics
from braid.training.backend import TrainingBackend
from braid.training.group import ModelGroup
from braid.training.pairs import (
    measured,
    output_of,
    pairs_of,
    preference_loss,
    rows_of_pair,
    total_loss,
    totals,
    write_field,
)
from braid.types import Row

from .imitation import RunOnData, warm_up
from .inputs import TextInputs
from .models import Models
from .reports import is_due, record

_AT_ONCE = 256
"""Pairs of a forward pass over many: they are in host memory together."""
_SCORED = 1024
"""Pairs on which scores are measured if none are held out."""
_TRAINED = ""
"""Name of the pairs to train on among those with known log-probs; sources have others."""


@dataclass
class Preferences:
    """The pairs to train on, those held out by source, the sampling order, and the models."""

    config: PreferConfig
    pairs: Sequence[Pair]
    held_out: Mapping[str, Sequence[Pair]]
    sampler: PromptSampler
    models: Models
    _known: dict[str, Tensor] = field(default_factory=dict)
    """The reference's log-probs of pairs [N, 2] by source, if they are computed once."""

    @classmethod
    def of(cls, config: PreferConfig, seed: int, inputs: TextInputs, models: Models) -> Preferences:
        """Build it from a run's inputs and models."""
        pairs = inputs.pairs.pairs
        sampler = PromptSampler(len(pairs), seed=seed, shuffle=True)
        return cls(config, pairs, inputs.held_out.by_source, sampler, models)

    scores: dict[str, float] = field(default_factory=dict)
    """Mean and standard deviation (std) of a reward model's scores, once they are measured."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint has beside the models and the sampler; no `scores` if a policy is trained."""
        scores = dict(self.scores) if self.config.loss.trains_reward_model else None
        return {"known": dict(self._known), "scores": scores}

    def load(self, state: Mapping[str, Any], /) -> None:
        self._known, self.scores = dict(state["known"]), dict(state["scores"] or {})

    def precompute_reference(self) -> None:
        """With prefer.precompute_reference, compute the reference's log-probs of all pairs, unless a
        checkpoint had them, and release the reference."""
        reference = self.models.reference
        if not self.config.precompute_reference or reference is None:
            return
        for name, pairs in {_TRAINED: self.pairs, **self.held_out}.items():
            if name not in self._known:
                parts = [_logprobs(reference, rows) for rows, _ in _chunks(pairs)]
                self._known[name] = torch.cat(parts).view(-1, 2)
        self.models.drop_reference()

    def learn(self) -> Metrics:
        """Take one optimizer step."""
        kind, policy = self.config.loss, self.models.policy
        indices = self.sampler.take(self.config.pairs_per_step)
        rows = _rows([self.pairs[i] for i in indices])
        self._write_reference(rows, _TRAINED, indices)
        num_chosen = [row.num_tokens for row in rows[::2]]
        for row in rows:
            write_field(row, "mean_chosen", sum(num_chosen) / len(num_chosen))
        if kind.matches_pairs:
            matched = self._matched(pairs_of(rows, _logprobs(policy, rows))).matched
            assert matched is not None, "the loss matches pairs"
            for i, number in enumerate(matched.repeat_interleave(2).tolist()):
                write_field(rows[i], "matched", number)
        loss = preference_loss(kind, sft_coef=self.config.sft_coef)
        metrics = Metrics()
        record(metrics, "prefer", policy.train(rows, [1.0 / len(indices)] * len(rows), loss))
        return metrics

    def evaluate(self) -> Metrics:
        """Measure the loss and the metrics of held-out pairs, of each source and of all together."""
        metrics, kind = Metrics(), self.config.loss
        by_source = {name: self._measure(name, pairs) for name, pairs in self.held_out.items()}
        for name, pairs in {**by_source, "all": _joined(list(by_source.values()))}.items():
            whole = self._matched(replace(pairs, mean_chosen=pairs.num_chosen.mean().expand_as(pairs.chosen)))
            means = measured(kind, whole)
            values = {"loss": total_loss(kind, self.config.sft_coef, whole)}
            values |= {what: means[what] for what in ("accuracy", "margin")}
            for what, numbers in values.items():
                metrics.mean(f"eval/{name}/{what}", numbers.sum().item(), len(numbers))
        return metrics

    def measure_scores(self) -> None:
        """Measure mean and deviation of a reward model's scores, over all held-out pairs, or without any over
        the first pairs to train on."""
        measured_on = self.held_out or {_TRAINED: self.pairs[:_SCORED]}
        pairs = _joined([self._measure(name, some) for name, some in measured_on.items()])
        scores = torch.cat([pairs.chosen, pairs.rejected])
        self.scores = {"mean": scores.mean().item(), "std": scores.std(correction=0).item()}

    def export_reward_model(self, config: RunConfig, folder: Path) -> None:
        """Write the reward model as a Hugging Face folder."""
        from braid.models.reward_model import export_reward_model

        (weights, *_) = self.models.policy.ranks.call(TrainingBackend.full_weights)
        export_reward_model(config, weights, self.scores, folder, plain_template=CONVERSATION_TEMPLATE)

    def _measure(self, source: str, pairs: Sequence[Pair]) -> Pairs:
        policy, output = self.models.policy, output_of(self.config.loss)
        parts = []
        for rows, indices in _chunks(pairs):
            self._write_reference(rows, source, indices)
            parts.append(pairs_of(rows, totals(rows, policy.infer(rows, frozenset({output})), output)))
        return _joined(parts)

    def _matched(self, pairs: Pairs) -> Pairs:
        """The pairs of a whole step or source with what a loss that compares them needs."""
        if not self.config.loss.matches_pairs:
            return pairs
        differences = pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected
        return replace(pairs, matched=self.config.loss.match(*differences))

    def _write_reference(self, rows: Sequence[Row], source: str, indices: Sequence[int]) -> None:
        """Give the rows of these pairs of a source the reference's log-probs, if the loss reads them."""
        if not self.config.loss.needs_reference:
            return
        if source in self._known:
            logprobs = self._known[source][list(indices)].flatten()
        else:
            assert self.models.reference is not None, "the plan has a reference"
            logprobs = _logprobs(self.models.reference, rows)
        for row, logprob in zip(rows, logprobs.tolist(), strict=True):
            write_field(row, "ref_logprob", logprob)


@dataclass(frozen=True)
class Preferring(RunOnData):
    """`braid prefer`."""

    data: Preferences

    def run(self) -> None:
        """Train from `progress` to the last step, after the supervised warm-up if there is one."""
        if not self.progress.counters.is_warm:
            warm_up(self)
        self.data.precompute_reference()
        self.take_steps()

    def finish_round(self) -> None:
        progress = self.progress
        is_exported = is_due(progress.round, progress.config.export_every_rounds)
        if self.data.config.loss.trains_reward_model and (progress.is_last_round or is_exported):
            self.data.measure_scores()
        super().finish_round()


def _rows(pairs: Sequence[Pair]) -> list[Row]:
    return [row for number, pair in enumerate(pairs) for row in rows_of_pair(pair, number)]


def _chunks(pairs: Sequence[Pair]) -> Iterator[tuple[list[Row], range]]:
    """The rows and indices of all pairs, some at a time."""
    for start in range(0, len(pairs), _AT_ONCE):
        indices = range(start, min(start + _AT_ONCE, len(pairs)))
        yield _rows([pairs[i] for i in indices]), indices


def _logprobs(model: ModelGroup, rows: Sequence[Row]) -> Tensor:
    """Log-probs of the responses of rows [B]."""
    return totals(rows, model.infer(rows, frozenset({"logprobs"})), "logprobs")


def _joined(parts: Sequence[Pairs]) -> Pairs:
    columns = {one.name: [getattr(part, one.name) for part in parts] for one in fields(Pairs)}
    joined: dict[str, Any] = {
        name: None if values[0] is None else torch.cat(values) for name, values in columns.items()
    }
    return Pairs(**joined)
