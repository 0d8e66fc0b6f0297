"""A function of a user as a policy loss."""

from __future__ import annotations

from collections.abc import Mapping

from braid.kinds import CallsFunction

from .base import PolicyLoss, Surrogate, Tokens


class FunctionLoss(CallsFunction, PolicyLoss):
    """A function of `Tokens` that returns the loss of each token [T], or that and diagnostics by name. The
    latter are declared as its attribute `metrics`, a dict from name to meaning."""

    @property
    def metrics(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self._function, "metrics", {})

    def per_token(self, tokens: Tokens) -> Surrogate:
        returned = self._function(tokens)
        return returned if isinstance(returned, tuple) else (returned, {})
