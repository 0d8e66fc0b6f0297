"""Invalid trajectories of a round or an evaluation: counted, warned of with their reason, and too many
refused."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from braid.errors import RolloutError
from braid.types import Trajectory

logger = logging.getLogger(__name__)

_NUM_REASONS = 3
"""Number of reasons that an error names."""


@dataclass(slots=True)
class Validity:
    """Checks trajectories of rounds and evaluations. `max_fraction` is rollout.max_invalid_fraction."""

    max_fraction: float
    _warned: dict[str, float] = field(default_factory=dict)
    """Share of the trajectories that a reason had made invalid when it was last warned of."""

    def check(self, trajectories: Sequence[Trajectory], where: str) -> None:
        """Warn of the commonest reason of invalid trajectories: when it is new, and again once its share has
        doubled. Raises RolloutError if more than rollout.max_invalid_fraction are invalid. `where` names the
        trajectories: "round 3"."""
        reasons = _by_kind(trajectories)
        if not reasons:
            return
        num_invalid = sum(map(len, reasons.values()))
        what = f"{num_invalid} of {len(trajectories)} trajectories of {where} are invalid"
        limit = self.max_fraction
        if num_invalid > limit * len(trajectories):
            raise RolloutError(
                f"{what}, above rollout.max_invalid_fraction={limit:g}; most common: "
                f"{most_common(trajectories)}"
            )
        kind = next(iter(reasons))
        share = len(reasons[kind]) / len(trajectories)
        if share >= 2 * self._warned.get(kind, 0.0):
            self._warned[kind] = share
            logger.warning("%s, and in no mean; most common: %s", what, _counted(reasons[kind]))


def most_common(trajectories: Iterable[Trajectory]) -> str:
    """The commonest reasons of invalid trajectories, each with its number and one example."""
    return "; ".join(map(_counted, list(_by_kind(trajectories).values())[:_NUM_REASONS]))


def _counted(reasons: list[str]) -> str:
    return f"{len(reasons)} x {reasons[0]}"


def _by_kind(trajectories: Iterable[Trajectory]) -> dict[str, list[str]]:
    """Reasons by what failed and its exception, the commonest first: messages may quote each answer."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for trajectory in trajectories:
        if not trajectory.is_valid:
            kinds[": ".join(trajectory.reason.split(": ")[:2])].append(trajectory.reason)
    return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))
