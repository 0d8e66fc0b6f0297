"""Judges the checks of the loop (braid.checks) at the end of each round's update."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from braid.checks import CHECKS, Check, Evidence, RepeatedPrompts, Trip
from braid.config.schema import RunConfig
from braid.data.sampler import PromptSampler
from braid.errors import CheckTripped
from braid.plan import Plan
from braid.report.reporter import Reporter
from braid.types import CheckName

logger = logging.getLogger(__name__)


class Checks:
    """The checks of a run. `evidence` collects what is measured in the current round. Its state, in
    checkpoints, has the rounds in a row that violated each check."""

    def __init__(self, config: RunConfig, plan: Plan, reporter: Reporter) -> None:
        self._stops, self._reporter = config.checks.on_trip == "stop", reporter
        checks: dict[CheckName, Check] = {name: check(config, plan) for name, check in CHECKS.items()}
        off: dict[CheckName, str] = {name: check.why_off() for name, check in checks.items()}
        off |= dict.fromkeys(config.checks.disable, "checks.disable names it")
        if plan.verb == "train":
            reporter.checks_off = {name: why for name, why in off.items() if why}
        self._checks = {name: check for name, check in checks.items() if not off[name]}
        repeated = self._checks.get("repeated_prompts")
        self._prompts = repeated if isinstance(repeated, RepeatedPrompts) else None
        self._since: dict[str, list[int]] = {}
        """Of each check that the last judged rounds violated: the first of them, and their number."""
        self._to_raise: Trip | None = None
        self.evidence = Evidence(0)

    def begin(self, round_: int) -> None:
        """Begin to collect the evidence of a round."""
        self.evidence = Evidence(round_)

    def is_on(self, name: CheckName) -> bool:
        """Whether a check is judged in this run."""
        return name in self._checks

    def draw(self, sampler: PromptSampler, count: int) -> list[int]:
        """The next prompts of the sampler, noted for the check repeated_prompts."""
        return sampler.take(count) if self._prompts is None else self._prompts.draw(sampler, count)

    def judge(self) -> None:
        """Judge the evidence of the round, and report the checks that trip."""
        for name, check in self._checks.items():
            violation = check.judge(self.evidence)
            if violation is None:
                continue
            if not violation:
                self._since.pop(name, None)
                continue
            since, count = self._since.get(name, [self.evidence.round, 0])
            self._since[name] = [since, count + 1]
            if count + 1 >= check.rounds:
                self._trip(check, since, violation)

    def _trip(self, check: Check, since: int, evidence: str) -> None:
        before = self._reporter.trips.get(check.name)
        trip = Trip(
            check=check.name,
            sort=check.sort,
            since=since if before is None else before["since"],
            last=self.evidence.round,
            rounds=1 if before is None else before["rounds"] + 1,
            evidence=evidence,
            causes=check.causes,
            look_at=check.look_at,
        )
        if before is None or before["last"] < since - 1:
            logger.warning("%s", trip)
        self._reporter.trips[check.name] = asdict(trip)
        if self._stops and self._to_raise is None:
            self._to_raise = trip

    def stop_if_tripped(self) -> None:
        """Raise CheckTripped if a check has tripped in the round, with checks.on_trip=stop."""
        if self._to_raise is not None:
            raise CheckTripped(f"{self._to_raise} (checks.on_trip=stop)")

    def state(self) -> dict[str, Any]:
        """The rounds in a row that violated each check, and the prompts of the epoch."""
        prompts = {} if self._prompts is None else self._prompts.state()
        return {"since": {name: list(counts) for name, counts in self._since.items()}, "prompts": prompts}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state()`."""
        self._since = {name: list(counts) for name, counts in state["since"].items()}
        if self._prompts is not None:
            self._prompts.load(state["prompts"])
