"""Rows of groups, as training has them."""

from __future__ import annotations

from collections.abc import Sequence

from braid.rollout.rows import group_rows
from braid.types import Group, Row


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """One row for each segment of the valid trajectories, in order, with `behavior_logprobs` and `rewards`.

    `Row.group` is the place of the group, `Row.trajectory` that of the trajectory among all of `groups`,
    invalid ones counted.
    """
    rows: list[Row] = []
    first = 0
    for place, group in enumerate(groups):
        rows += group_rows(group, place, first)
        first += len(group.trajectories)
    return rows
