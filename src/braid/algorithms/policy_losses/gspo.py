"""gspo: ppo_clip with the ratio of sequences."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from braid.types import RatioLevel

from .ppo_clip import PpoClip


class Gspo(PpoClip):
    """PPO's clip on the geometric mean ratio of a sequence, with the narrow bounds of the paper (Zheng et al.
    2025, arXiv 2507.18071). The formula is that of ppo_clip."""

    kind: Literal["gspo"] = "gspo"  # pyright: ignore[reportIncompatibleVariableOverride]
    """ppo_clip with the ratio of sequences."""
    ratio_level: RatioLevel = "sequence"
    """Level of the probability ratio, as in ppo_clip."""
    clip_low: NonNegativeFloat = 3e-4
    """Ratios below 1 - clip_low are clipped."""
    clip_high: NonNegativeFloat = 4e-4
    """Ratios above 1 + clip_high are clipped."""
