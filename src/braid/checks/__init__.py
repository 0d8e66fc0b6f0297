"""Checks of the training loop: what holds in every correct loop, judged once a round (docs/checks.md).

One literal table names them; each file has a family. trainer/checks.py judges them in a run.
"""

from __future__ import annotations

from collections.abc import Mapping

from braid.types import CheckName

from .advantages import GaeReplay, GroupAdvantages
from .base import Check, Evidence, Step, Sums, Trip
from .sampler import SamplerEntropy, SamplerLogprobs, SamplerWeights

__all__ = ["CHECKS", "Check", "Evidence", "Step", "Sums", "Trip"]

CHECKS: Mapping[CheckName, type[Check]] = {
    "sampler_logprobs": SamplerLogprobs,
    "sampler_weights": SamplerWeights,
    "sampler_entropy": SamplerEntropy,
    "group_advantages": GroupAdvantages,
    "gae": GaeReplay,
}
