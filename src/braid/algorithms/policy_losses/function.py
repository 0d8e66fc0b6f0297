"""A function of a user as a policy loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import PrivateAttr

from .base import PolicyLoss, Surrogate, Tokens


class FunctionLoss(PolicyLoss):
    """A function of `Tokens` that returns the loss of each token [T], or that and diagnostics by name. The
    latter are declared as its attribute `metrics`, a dict from name to meaning."""

    _function: Callable[[Tokens], Any] = PrivateAttr()

    @classmethod
    def calling(cls, function: Callable[[Tokens], Any]) -> FunctionLoss:
        loss = cls()
        loss._function = function
        return loss

    @property
    def metrics(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self._function, "metrics", {})

    def per_token(self, tokens: Tokens) -> Surrogate:
        returned = self._function(tokens)
        return returned if isinstance(returned, tuple) else (returned, {})
