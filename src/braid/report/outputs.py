"""Logging of sampled answers (`rollout.print_outputs`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from textwrap import indent

from braid.types import Group, text_of

logger = logging.getLogger(__name__)


def log_outputs(round_: int, groups: Sequence[Group]) -> None:
    """Log every text trajectory of a round, with its prompt, status and reward."""
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.env_steps is not None:
                continue
            outcome = f"invalid ({trajectory.reason})"
            if trajectory.is_valid:
                outcome = f"{trajectory.status}, reward {trajectory.reward:g}"
            asked = text_of(group.prompt.messages[-1]["content"]) if group.prompt.messages else ""
            text = indent(f"{asked}\n--> {trajectory.text}", "    ")
            place = trajectory.sample + 1, len(group.trajectories)
            logger.info(
                "round %d, %s, answer %d of %d: %s\n%s", round_, group.prompt.uid, *place, outcome, text
            )
