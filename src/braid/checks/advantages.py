"""Whether advantages follow from the rewards and values that they are computed from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from .base import Check, Evidence, Sums, add_sums

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from braid.algorithms.advantages.round import Round
    from braid.algorithms.recipes import Recipe
    from braid.types import Row

NUM_REPLAYED = 8
"""Trajectories of a round whose GAE is computed again."""


def advantage_sums(round_: Round, advantages: Tensor, recipe: Recipe) -> Sums:
    """Sums over the groups of a round, before KL and whitening change its `advantages` [T]: groups compared,
    and those whose advantages do not sum to 0, are not in the order of rewards, or do not have a deviation of
    1; and over the trajectories whose advantages were computed again, and their differences."""
    values = advantages.numpy()
    sums: Sums = {"advantage": float(np.abs(values).sum())}
    parts = np.split(values, np.cumsum(round_.lengths)[:-1])
    if recipe.advantage.is_centered:
        _compare_groups(round_.trajectories, parts, sums, has_unit_std=recipe.advantage.has_unit_std)
    if recipe.advantage.needs_values:
        _replay(round_, parts, recipe, sums)
    return sums


def _compare_groups(
    trajectories: Sequence[Sequence[Row]],
    parts: Sequence[NDArray[np.floating]],
    sums: Sums,
    *,
    has_unit_std: bool,
) -> None:
    groups: defaultdict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for segments, part in zip(trajectories, parts, strict=True):
        masks = [row.mask for row in segments]
        mask = masks[0] if len(masks) == 1 else np.concatenate(masks)
        reward = float(sum(row.fields["rewards"].sum(dtype=np.float64) for row in segments))
        groups[segments[0].group, segments[0].player].append((reward, float(part[mask.argmax()])))
    for pairs in groups.values():
        ordered = sorted(pairs)
        size = max(abs(a) for _, a in pairs)
        count, total = len(pairs), sum(a for _, a in pairs)
        spread, mean = ordered[-1][0] - ordered[0][0], sum(r for r, _ in pairs) / count
        std = (sum((r - mean) ** 2 for r, _ in pairs) / max(count - 1, 1)) ** 0.5
        is_ordered = all(b - a >= -1e-4 * max(size, 1) for (_, a), (_, b) in pairwise(ordered))
        deviation = (sum(a * a for _, a in pairs) / max(count - 1, 1)) ** 0.5
        is_wide = has_unit_std and std > 1e-3 and abs(deviation - 1) > 1e-2
        is_flat = spread > 1e-3 * max(abs(ordered[-1][0]), 1) and size == 0
        counted = {
            "groups": 1,
            "uncentered_groups": abs(total) > 1e-4 * max(size * count, 1),
            "unordered_groups": not is_ordered or is_flat,
            "unscaled_groups": is_wide,
        }
        add_sums(sums, counted)


def _replay(round_: Round, parts: Sequence[NDArray[np.floating]], recipe: Recipe, sums: Sums) -> None:
    """Compute the advantages of some trajectories again, each alone."""
    step = max(1, len(round_.trajectories) // NUM_REPLAYED)
    for segments, part in list(zip(round_.trajectories, parts, strict=True))[::step][:NUM_REPLAYED]:
        expected = recipe.advantage.replay(segments)
        if expected is None:
            return
        error = float(np.abs(part - expected).max())
        is_wrong = error > 1e-4 * max(float(np.abs(expected).max()), 1)
        add_sums(sums, {"replayed": 1, "replayed_wrong": is_wrong})


class GroupAdvantages(Check):
    """Advantages of a group sum to 0, in the order of its rewards."""

    name, sort = "group_advantages", "identity"
    holds = (
        "before KL and whitening, the advantages of a group sum to 0, are in the order of its rewards, and "
        "have a deviation of 1 where they are divided by it"
    )
    threshold = "1e-4 for sum and order, 1 % for the deviation"
    is_off = "advantages that compare no group, levels below the trajectory"
    causes = (
        "trajectories compared across groups, one baseline for all groups, a deviation lost to rounding, a "
        "flipped sign"
    )
    look_at = "algorithm.advantage"

    def why_off(self) -> str:
        if not self.plan.recipe.advantage.is_centered:
            return "algorithm.advantage does not center the rewards of a group"
        return "groups of one have no advantage" if self.config.rollout.group_size == 1 else ""

    def judge(self, evidence: Evidence) -> str | None:
        sums = evidence.sums
        if not (groups := sums.get("groups")):
            return None
        words = {
            "uncentered_groups": "do not sum to 0",
            "unordered_groups": "are not in the order of rewards",
            "unscaled_groups": "do not have a deviation of 1",
        }
        wrong = [f"in {sums[name]:.0f} {what}" for name, what in words.items() if sums.get(name)]
        return f"of {groups:.0f} groups, advantages {', '.join(wrong)}" if wrong else ""


class GaeReplay(Check):
    """GAE is that of each trajectory alone."""

    name, sort = "gae_replay", "identity"
    holds = "GAE is what a plain loop over one trajectory computes in float64 (8 trajectories of a round)"
    threshold = "1e-4 of the largest"
    is_off = "algorithms without values; levels below the trajectory"
    causes = "returns that run on into another trajectory, values read at positions that others wrote"
    look_at = "algorithm.advantage"

    def why_off(self) -> str:
        return "" if self.plan.recipe.advantage.needs_values else "algorithm.advantage reads no values"

    def judge(self, evidence: Evidence) -> str | None:
        sums = evidence.sums
        if not (replayed := sums.get("replayed")):
            return None
        wrong = sums["replayed_wrong"]
        return f"GAE of {wrong:.0f} of {replayed:.0f} trajectories differs from a plain loop" if wrong else ""
