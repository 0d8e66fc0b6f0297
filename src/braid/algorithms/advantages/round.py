"""The rows of a round as an advantage reads them: trajectories, turns, and the states that turns start
from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np
import torch
from torch import Tensor

from braid.algorithms.segments import first_positions
from braid.types import Row, exact_sum


@dataclass(frozen=True, slots=True)
class Round:
    """All rows of a round, concatenated: `rewards` and `mask` [T]; `totals` [N], the sum of each trajectory's
    rewards; `groups` [N], each trajectory's group index."""

    rows: Sequence[Row]
    trajectories: Sequence[Sequence[Row]]
    rewards: Tensor
    mask: Tensor
    totals: Tensor
    groups: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Round:
        rewards, mask = (
            flat([row.fields["rewards"] for row in rows]).double(),
            flat([row.mask for row in rows]),
        )
        trajectories = trajectories_of(rows)
        return cls(rows, trajectories, rewards, mask, totals_of(trajectories), groups_of(trajectories))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions of each trajectory [N]."""
        return tuple(sum(len(row) for row in segments) for segments in self.trajectories)

    def turns(self, *, are_actions: bool = False) -> Turns:
        """The turns of the round: its decisions, or the actions of robots."""
        return Turns.of(self, are_actions=are_actions)

    def states(self) -> Tensor:
        """An id per group, player and anchor state, of each turn [K]."""
        return _states(self)

    def field(self, name: str) -> Tensor:
        """A field of all rows [T]."""
        return flat([row.fields[name] for row in self.rows])

    def write(self, name: str, values: Tensor) -> None:
        """Write values [T] into a field of the rows, in float32."""
        write_field(self.rows, name, values)

    def spread(self, per_trajectory: Tensor) -> Tensor:
        """[N] -> [T], 0 outside the mask."""
        lengths = torch.tensor(self.lengths, dtype=torch.long)
        return torch.repeat_interleave(per_trajectory, lengths) * self.mask


@dataclass(frozen=True, slots=True)
class Turns:
    """The K turns of a round: the decisions of its rows, or the actions of robots.

    `index` [T] is the turn of each position, -1 outside the mask; `rewards` [K] (float64) the sum of a turn's
    rewards; `groups` [K] the group of its row; `lengths` [N] the number of turns of each trajectory.
    """

    index: Tensor
    rewards: Tensor
    groups: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, round_: Round, *, are_actions: bool = False) -> Turns:
        turns = [_actions(row) if are_actions else row.decision for row in round_.rows]
        numbers = [int(turn.max(initial=-1)) + 1 for turn in turns]
        first = np.cumsum([0, *numbers[:-1]])
        index = flat(
            [np.where(row.mask, turn + n, -1) for row, turn, n in zip(round_.rows, turns, first, strict=True)]
        )
        groups = torch.repeat_interleave(groups_of([[row] for row in round_.rows]), torch.tensor(numbers))
        rewards = torch.zeros(len(groups), dtype=torch.float64)
        rewards.index_add_(0, index[round_.mask], round_.rewards[round_.mask].double())
        left = iter(numbers)
        lengths = tuple(sum(islice(left, len(segments))) for segments in round_.trajectories)
        return cls(index, rewards, groups, lengths)

    @property
    def first(self) -> Tensor:
        """Whether each position [T] is the first of its turn."""
        return first_positions(self.index)

    def spread(self, per_turn: Tensor) -> Tensor:
        """[K] -> [T], 0 outside the mask."""
        return torch.where(self.index >= 0, per_turn[self.index.clamp(min=0)], 0.0)


def trajectories_of(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each trajectory, or of each player in it."""
    by_player = groupby(rows, key=lambda row: (row.trajectory, row.player))
    trajectories = [(key, list(segments)) for key, segments in by_player]
    assert len(dict(trajectories)) == len(trajectories), "rows of a trajectory are apart"
    return [segments for _, segments in trajectories]


def totals_of(trajectories: Sequence[Sequence[Row]]) -> Tensor:
    """Sum of each trajectory's rewards [N], float64."""
    rewards = [np.concatenate([row.fields["rewards"] for row in segments]) for segments in trajectories]
    return torch.tensor([exact_sum(values[values != 0].tolist()) for values in rewards], dtype=torch.float64)


def groups_of(trajectories: Sequence[Sequence[Row]]) -> Tensor:
    """An id per group and player [N]."""
    numbers: dict[tuple[int, str], int] = {}
    return torch.tensor(
        [numbers.setdefault((first.group, first.player), len(numbers)) for first, *_ in trajectories]
    )


def _actions(row: Row) -> np.ndarray:
    """The number of each position's action within the row [T], -1 outside the mask."""
    return np.where(row.mask, (row.mask.cumsum() - 1) // row.action_size, -1)


def _states(round_: Round) -> Tensor:
    """An id per group, player and anchor state, of each turn [K]."""
    numbers: dict[tuple[int, str, bytes], int] = {}
    states = [
        numbers.setdefault((row.group, row.player, anchor), len(numbers))
        for segments in round_.trajectories
        for before, row in zip([None, *segments], segments, strict=False)
        for anchor in _anchors(row, before)
    ]
    return torch.tensor(states)


def _anchors(row: Row, before: Row | None) -> list[bytes]:
    """The anchor state of each of the row's turns. `before` is the row of the previous segment.

    The anchor is what a decision observed. In text that is what was read since the previous turn: for the
    first one the prompt, or the context of a new segment, without the tokens of the previous one if it begins
    with them.
    """
    if row.observations:
        # adding 0 turns -0.0 into 0.0, so that equal numbers have equal bytes
        observed = [values[: row.num_decisions] + 0 for values in row.observations.values()]
        return [b"".join(state.tobytes() for state in states) for states in zip(*observed, strict=True)]
    written = np.flatnonzero(row.mask)
    decisions = row.decision[written]
    begins = written[np.diff(decisions, prepend=-1) > 0]
    ends = written[np.diff(decisions, append=row.num_decisions) > 0] + 1
    ids = row.inputs["input_ids"]
    known = 0 if before is None else len(before)
    if before is not None and not np.array_equal(ids[:known], before.inputs["input_ids"]):
        known = 0
    return [ids[a:b].tobytes() for a, b in zip([known, *ends[:-1]], begins, strict=True)]


def flat(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def write_field(rows: Sequence[Row], name: str, flat: Tensor) -> None:
    parts = torch.split(flat, [len(row) for row in rows])
    for row, part in zip(rows, parts, strict=True):
        row.fields[name] = part.to(torch.float32).numpy()
