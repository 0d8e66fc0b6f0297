"""Logging of sampled answers (`rollout.print_outputs`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from textwrap import indent

from braid.types import Group, Trajectory

logger = logging.getLogger(__name__)


def log_outputs(round_: int, groups: Sequence[Group]) -> None:
    """Log every text trajectory of a round, with its prompt, status and reward."""
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.env_steps is None:
                logger.info(
                    "round %d, %s, answer %d of %d: %s\n%s",
                    round_,
                    group.prompt.uid,
                    trajectory.sample + 1,
                    len(group.trajectories),
                    _outcome(trajectory),
                    _texts(trajectory),
                )


def _outcome(trajectory: Trajectory) -> str:
    if not trajectory.is_valid:
        return f"invalid ({trajectory.reason})"
    return f"{trajectory.status}, reward {trajectory.reward:g}"


def _texts(trajectory: Trajectory) -> str:
    messages = trajectory.prompt.messages
    asked = messages[-1]["content"] if messages else ""
    return indent(f"{asked}\n--> {trajectory.text}", "    ")
