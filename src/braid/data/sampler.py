"""Prompt samplers. Own the order of prompts and the position in it, which checkpoints save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braid.errors import DataError


class PromptSampler:
    """Draws indices below `num_prompts` endlessly: every index once per epoch, in an order that depends only
    on (seed, epoch), or in ascending order without `shuffle`."""

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool) -> None:
        if num_prompts < 1:
            raise DataError("data.train has no prompts; add a source with at least one row")
        self.num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self.num_drawn = 0
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> int:
        """Number of complete passes over all prompts."""
        return self.num_drawn // self.num_prompts

    @property
    def num_left(self) -> int:
        """Number of draws to the end of the current pass."""
        return self.num_prompts - self.num_drawn % self.num_prompts

    def take(self, k: int) -> list[int]:
        """Draw the next `k` indices. They may cross the end of an epoch, so an index may occur twice."""
        taken: list[int] = []
        while len(taken) < k:
            start = self.num_drawn % self.num_prompts
            chunk = self._order_of(self.epoch)[start : start + k - len(taken)]
            taken.extend(chunk.tolist())
            self.num_drawn += len(chunk)
        return taken

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            if self._shuffle:
                order = np.random.default_rng((self._seed, epoch)).permutation(self.num_prompts)
            else:
                order = np.arange(self.num_prompts)
            self._order = (epoch, order)
        return self._order[1]

    def state(self) -> dict[str, Any]:
        """The position in the order."""
        return {"num_drawn": self.num_drawn, "num_prompts": self.num_prompts}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state()`. Raises DataError if it was saved with a different number of prompts."""
        if state["num_prompts"] != self.num_prompts:
            raise DataError(
                f"the checkpoint was saved with {state['num_prompts']} training prompts, but the data now "
                f"has {self.num_prompts}; restore the data, or start a new run from the weights with "
                "run.resume=none"
            )
        self.num_drawn = int(state["num_drawn"])


class MixedSampler(PromptSampler):
    """Draws from groups of indices in proportion to their shares: after n draws, each group's count is within
    one or two of its share of n. Each group has its own epochs."""

    def __init__(
        self, groups: Sequence[tuple[Sequence[int] | NDArray[np.int64], float]], *, seed: int, shuffle: bool
    ) -> None:
        """`groups` are (indices, share); groups with a share of 0 are never drawn from."""
        super().__init__(sum(len(indices) for indices, _ in groups), seed=seed, shuffle=shuffle)
        self._groups = [(indices, share) for indices, share in groups if share > 0]
        self._samplers = [
            PromptSampler(len(indices), seed=seed, shuffle=shuffle) for indices, _ in self._groups
        ]

    def take(self, k: int) -> list[int]:
        """Draw the next `k` indices, each from the group whose next draw is due earliest."""
        taken: list[int] = []
        for _ in range(k):
            due = [
                (s.num_drawn + 0.5) / share
                for s, (_, share) in zip(self._samplers, self._groups, strict=True)
            ]
            chosen = due.index(min(due))
            taken.append(int(self._groups[chosen][0][self._samplers[chosen].take(1)[0]]))
        self.num_drawn += k
        return taken

    def state(self) -> dict[str, Any]:
        """The position in the order of each group."""
        return {**super().state(), "groups": [sampler.state() for sampler in self._samplers]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state()`. Raises DataError if it was saved with different groups."""
        super().load(state)
        groups = state.get("groups", ())
        if len(groups) != len(self._samplers):
            raise DataError(
                f"the checkpoint was saved with {len(groups)} shares in data.mix, which now has "
                f"{len(self._samplers)}; restore it, or start a new run from the weights with "
                "run.resume=none"
            )
        for sampler, group_state in zip(self._samplers, groups, strict=True):
            sampler.load(group_state)
