"""Actions of OpenVLA: tokens of 256 bins, and normalization by the statistics of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braid.config.model import VlaConfig
from braid.errors import ModelError, suggest


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high` correspond to -1 to 1. Where `mask` is False they stay as they are.
    `clips`: normalized numbers are clipped to [-1, 1]."""

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mask: NDArray[np.bool_]
    clips: bool = True

    def normalize(self, x: NDArray[np.floating]) -> NDArray[np.float64]:
        scaled = 2 * (x - self.low) / (self.high - self.low + 1e-8) - 1
        return np.where(self.mask, np.clip(scaled, -1, 1) if self.clips else scaled, x)

    def unnormalize(self, x: NDArray[np.floating]) -> NDArray[np.float64]:
        return np.where(self.mask, 0.5 * (x + 1) * (self.high - self.low + 1e-8) + self.low, x)


def range_of(
    statistics: Mapping[str, Any], config: VlaConfig, part: str = "action", size: int | None = None
) -> Range:
    """The range of `part` (action or proprio) in a checkpoint's norm_stats, for model.vla.unnorm_key.

    As in RLinf, a key NAME also selects NAME_no_noops. Raises ModelError for an unknown key, or if the range
    is not of `size` dimensions.
    """
    key = config.unnorm_key
    if key is None and len(statistics) == 1:
        key = next(iter(statistics))
    if key not in statistics and f"{key}_no_noops" in statistics:
        key = f"{key}_no_noops"
    if not statistics:
        raise ModelError(
            "the checkpoint has no statistics of actions, without which its actions cannot be "
            "unnormalized: add those of the data that it was fine-tuned on as norm_stats to its "
            "config.json, or as dataset_statistics.json beside it"
        )
    known = ", ".join(sorted(statistics))
    if key is None or key not in statistics:
        what = (
            " is not set"
            if key is None
            else f"={key}: the checkpoint has no such statistics{suggest(key, statistics)}"
        )
        raise ModelError(f"model.vla.unnorm_key{what}; set it to one of: {known}")
    if part not in statistics[key]:
        raise ModelError(
            f"the statistics {key} of the checkpoint have no {part}; choose another model.vla.unnorm_key: "
            f"{known}"
        )
    numbers = statistics[key][part]
    how = config.normalization or ("mean_std" if config.kind == "pi0" else "quantiles")
    names = {"quantiles": ("q01", "q99"), "bounds": ("min", "max"), "mean_std": ("mean", "std")}[how]
    if missing := [name for name in names if name not in numbers]:
        raise ModelError(
            f"the statistics {key} of the checkpoint lack {missing[0]} of {part}, which "
            f"model.vla.normalization={how} needs; they contain {', '.join(sorted(numbers))}"
        )
    low, high = (np.asarray(numbers[name], np.float64) for name in names)
    if size is not None and len(low) != size:
        raise ModelError(
            f"the statistics {key} of the checkpoint are those of {len(low)} {part} dimensions, not {size}; "
            f"choose another model.vla.unnorm_key ({known}), or set model.vla.action_dim"
        )
    if how == "mean_std":
        low, high = low - high, low + high
    mask = np.asarray(numbers.get("mask", np.ones_like(low)), np.bool_)
    return Range(low, high, mask, clips=how != "mean_std")


def bin_centers(num_bins: int) -> NDArray[np.float64]:
    """The value of each bin, `num_bins` - 1 of them, between the edges of linspace(-1, 1, num_bins)."""
    edges = np.linspace(-1.0, 1.0, num_bins)
    return (edges[:-1] + edges[1:]) / 2


def bins_of(normalized: NDArray[np.floating], num_bins: int) -> NDArray[np.int64]:
    """The bin of each number in [-1, 1] as an index into the action tokens, from 0 for the first one's id.
    Action tokens count down: the last id is the lowest value."""
    edges = np.linspace(-1.0, 1.0, num_bins)
    return num_bins - np.digitize(np.clip(normalized, -1, 1), edges)


def values_of(bins: NDArray[np.integer], num_bins: int) -> NDArray[np.float64]:
    """The normalized values of indices into the action tokens. The two lowest indices have the same value."""
    return bin_centers(num_bins)[np.clip(num_bins - bins - 1, 0, num_bins - 2)]
