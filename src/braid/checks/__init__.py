"""Checks of the training loop: what holds in every correct loop, judged once a round (docs/checks.md).

One literal table names them; each file has a family. trainer/checks.py judges them in a run.
"""

from __future__ import annotations

from collections.abc import Mapping

from braid.types import CheckName

from .advantages import GaeReplay, GroupAdvantages
from .base import Check, Evidence, Step, Sums, Trip, add_sums
from .packing import Packing
from .ratios import FirstRatio, LaterRatios
from .reference import KlFormula, ReferenceKl, ReferenceStart
from .rollout import (
    PolicyVersions,
    PromptOpening,
    RepeatedAnswers,
    RepeatedPrompts,
    RepeatedScores,
    StopReasons,
    TrainedTokens,
)
from .sampler import SamplerEntropy, SamplerLogprobs, SamplerWeights
from .updates import ExplainedVariance, LossWeights, WeightUpdates

__all__ = ["CHECKS", "Check", "Evidence", "RepeatedPrompts", "Step", "Sums", "Trip", "add_sums"]

CHECKS: Mapping[CheckName, type[Check]] = {
    "sampler_logprobs": SamplerLogprobs,
    "sampler_weights": SamplerWeights,
    "sampler_entropy": SamplerEntropy,
    "first_ratio": FirstRatio,
    "later_ratios": LaterRatios,
    "policy_versions": PolicyVersions,
    "group_advantages": GroupAdvantages,
    "gae_replay": GaeReplay,
    "trained_tokens": TrainedTokens,
    "stop_reasons": StopReasons,
    "prompt_opening": PromptOpening,
    "repeated_answers": RepeatedAnswers,
    "repeated_scores": RepeatedScores,
    "repeated_prompts": RepeatedPrompts,
    "loss_weights": LossWeights,
    "weight_updates": WeightUpdates,
    "reference_start": ReferenceStart,
    "kl_formula": KlFormula,
    "reference_kl": ReferenceKl,
    "packing": Packing,
    "explained_variance": ExplainedVariance,
}


def as_markdown() -> str:
    """The table of docs/checks.md."""
    head = "| check | sort | what holds | threshold | off | look at |\n|---|---|---|---|---|---|\n"
    return head + "".join(
        f"| `{c.name}` | {c.sort} | {c.holds} | {c.threshold} | {c.is_off} | {c.look_at} |\n"
        for c in CHECKS.values()
    )
