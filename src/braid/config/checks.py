"""Checks of the training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from braid.sections import Section, Unused
from braid.types import CheckName

if TYPE_CHECKING:
    from braid.plan.plan import Plan

    from .schema import RunConfig


class ChecksConfig(Section):
    """Checks of the training loop: what must hold in a correct loop, tested in every round of `braid train`
    (docs/checks.md)."""

    on_trip: Literal["warn", "stop"] = "warn"
    """When a check trips. warn: log it, and list it in summary.json and in the closing report. stop: the run
    also fails after the round, before its checkpoint."""
    disable: tuple[CheckName, ...] = ()
    """Names of checks to leave out."""

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if plan.verb != "train":
            yield "only braid train has rounds to check", "checks.*"
