"""Which prompts come next. Owns the order and the place in it, which a checkpoint saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braid.errors import DataError


class PromptSampler:
    """Draws indices below `num_prompts` for ever: each epoch has every index once, in an order of its own that
    depends on (seed, epoch) alone, or in rising order without `shuffle`."""

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool) -> None:
        if num_prompts < 1:
            raise DataError(
                "there are no prompts to draw from; give data.train at least one source with rows"
            )
        self.num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self.num_drawn = 0
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> int:
        """Passes over all prompts that are complete."""
        return self.num_drawn // self.num_prompts

    def take(self, k: int) -> list[int]:
        """The next `k` indices. They may run over the end of an epoch, so that one index comes twice."""
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
        """The place in the order."""
        return {"num_drawn": self.num_drawn, "num_prompts": self.num_prompts}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`. Raises DataError when it was taken with another number of prompts."""
        if state["num_prompts"] != self.num_prompts:
            raise DataError(
                f"the checkpoint was saved with {state['num_prompts']} training prompts, the data now has "
                f"{self.num_prompts}, so the order cannot go on; restore the data, or start a new run from the weights "
                "with resume: none"
            )
        self.num_drawn = int(state["num_drawn"])


class MixedSampler(PromptSampler):
    """Draws from groups of indices by their shares: after n draws each has had its share of n, to within one or two. Each
    group has epochs of its own."""

    def __init__(self, groups: Sequence[tuple[Sequence[int], float]], *, seed: int, shuffle: bool) -> None:
        """`groups` are (indices, share); a share of 0 is never drawn from."""
        super().__init__(sum(len(indices) for indices, _ in groups), seed=seed, shuffle=shuffle)
        self._groups = [(indices, share) for indices, share in groups if share > 0]
        self._samplers = [PromptSampler(len(of), seed=seed, shuffle=shuffle) for of, _ in self._groups]

    def take(self, k: int) -> list[int]:
        """The next `k` indices: the group whose next draw is due the earliest, again and again."""
        taken: list[int] = []
        for _ in range(k):
            due = [
                (s.num_drawn + 0.5) / share
                for s, (_, share) in zip(self._samplers, self._groups, strict=True)
            ]
            chosen = due.index(min(due))
            taken.append(self._groups[chosen][0][self._samplers[chosen].take(1)[0]])
        self.num_drawn += k
        return taken

    def state(self) -> dict[str, Any]:
        """The place in the order of each group."""
        return {**super().state(), "groups": [sampler.state() for sampler in self._samplers]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`. Raises DataError when it was taken with other groups."""
        super().load(state)
        groups = state.get("groups", ())
        if len(groups) != len(self._samplers):
            raise DataError(
                f"the checkpoint was saved with {len(groups)} shares in data.mix, which has {len(self._samplers)} now; "
                "restore it, or start a new run from the weights with resume: none"
            )
        for sampler, of in zip(self._samplers, groups, strict=True):
            sampler.load(of)
