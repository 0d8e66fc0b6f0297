"""A function of a user as a preference loss."""

from __future__ import annotations

from braid.kinds import CallsFunction

from .base import Pairs, PreferenceLoss, Tensor


class FunctionLoss(CallsFunction, PreferenceLoss):
    """A function of `Pairs` that returns the loss of each pair [N]. It reads log-probs of the reference
    unless its attribute `needs_reference` is False."""

    @property
    def needs_reference(self) -> bool:
        return getattr(self._function, "needs_reference", True)

    def per_pair(self, pairs: Pairs) -> Tensor:
        return self._function(pairs)
