"""The pipelined loop, which samples while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeInt, PositiveInt

from braid.sections import Section, Unused

if TYPE_CHECKING:
    from braid.plan.plan import Plan

    from .schema import RunConfig


class PipelineConfig(Section):
    """The pipelined loop. A token's lag is the number of versions between the weights that wrote it and those
    that are trained on it."""

    max_lag: NonNegativeInt = 1
    """Bound on the lag: a group is started only if it can be trained on within it. 0 gives the same weights
    as without a pipeline; 1 samples one round ahead (one-step off-policy)."""
    groups_in_flight: PositiveInt | None = None
    """Maximum number of groups sampled at a time; (max_lag + 1) * rollout.prompts_per_round when null."""
    on_new_weights: Literal["finish", "interrupt"] = "finish"
    """finish: new weights wait for the running turns of the policy. interrupt: running turns continue with
    the new weights, and each token keeps the version and the log-prob with which it was sampled."""
    over_lag: Literal["drop", "resample", "keep"] = "drop"
    """Groups above max_lag, because later groups finished first: drop them, sample their prompts again, or
    train on them all the same."""

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if plan.verb != "train":
            yield "only braid train has a pipeline", "pipeline.*"
        if self.max_lag == 0:
            why = "with pipeline.max_lag=0 nothing runs when engines get new weights"
            yield why, "pipeline.{on_new_weights,over_lag}"
