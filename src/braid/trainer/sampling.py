"""Sampling and scoring: the groups of a round, and what is reported of them at once.

Language models and simulators differ in the rollout workers, not here. Tokens stay on the workers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from braid.cluster.interrupts import StopSignals
from braid.config.schema import RunConfig
from braid.data.sampler import PromptSampler
from braid.envs.kinds import VideoConfig
from braid.errors import TrainingError
from braid.report.metrics import Metrics
from braid.report.outputs import log_outputs
from braid.report.video import write_video
from braid.rollout.collector import Use
from braid.training.backend import TrainingBackend
from braid.types import Group, Key

from .checks import Checks
from .keys import COPY_KEY, EVAL_KEY, TRAIN_KEY
from .models import Models
from .reports import Reports
from .round_metrics import group_metrics, selection_metrics, status_metrics
from .selection import Selection
from .validity import Validity, most_common

logger = logging.getLogger(__name__)


class Sampling:
    """Draws prompts, and has the rollout workers sample and score them."""

    def __init__(
        self,
        config: RunConfig,
        sampler: PromptSampler,
        models: Models,
        reports: Reports,
        stop: StopSignals,
        checks: Checks,
    ) -> None:
        self.config, self.sampler = config, sampler
        self.models, self.rollouts, self.reports = models, models.rollouts, reports
        self._stop, self._checks = stop, checks
        self.validity = Validity(config.rollout.max_invalid_fraction)

    def rollout(self, round_: int) -> Selection:
        """Sample and score a round's groups, and shape the rewards of valid trajectories: batches of prompts
        are drawn until rollout.filter is satisfied. The groups have no tokens, which stay on the workers.
        Raises RolloutError if too many trajectories are invalid."""
        rollout = self.config.rollout
        selection = Selection(rollout.filter, rollout.prompts_per_round)
        sampled: list[Group] = []
        with self._stop.cuttable():
            self.rollouts.forget("train")
            self.models.start_sampling()
        while not selection.is_done:
            prompts = self._checks.draw(self.sampler, rollout.prompts_per_round)
            first = selection.num_batches * len(prompts)
            keys: list[Key] = [(TRAIN_KEY, round_, first + place) for place in range(len(prompts))]
            with self.reports.timed("rollout", selection.metrics), self._stop.cuttable():
                self.rollouts.submit("train", prompts, rollout.group_size, keys)
                groups, scoring = self.rollouts.gather("train", keys)
            selection.metrics.merge(scoring)
            self.show_outputs(round_, groups)
            selection.metrics.merge(self.check_round(round_, groups))
            selection.add(groups)
            sampled += groups
        with self._stop.cuttable():
            self.models.end_sampling()
        self.complete(selection, sampled, round_)
        return selection

    def collect_eval(self, prompts: Sequence[int], group_size: int) -> list[Group]:
        """Sample and score a group for each of the evaluation's `prompts`, in their order. Every evaluation
        uses the same random numbers."""
        with self._stop.cuttable():
            self.rollouts.forget("eval")
            self.models.start_sampling()
            keys: list[Key] = [(EVAL_KEY, 0, prompt) for prompt in prompts]
            self.rollouts.submit("eval", prompts, group_size, keys)
            groups, _ = self.rollouts.gather("eval", keys)
            self.models.end_sampling()
        return groups

    def show_outputs(self, round_: int, groups: Sequence[Group]) -> None:
        """Log the outputs of groups, with rollout.print_outputs, and write their video, with env.video."""
        if (video := self.config.env.video_of("train")) is not None:
            self.show_films(video, "train", round_, groups)
        if self.config.rollout.print_outputs:
            log_outputs(round_, self.rollouts.whole("train", groups))

    def show_films(self, video: VideoConfig, use: Use, round_: int, groups: Sequence[Group]) -> None:
        """Write a video of the episodes that were filmed (see SimulatorDriver); warn if they are all
        invalid."""
        every = video.train_every_rounds or 1
        filmed = [g for g in groups if g.key[-1] < video.num_episodes and g.key[-2] % every == 0]
        whole = self.rollouts.whole(use, filmed)
        films = [t.recording for group in whole for t in group.trajectories if t.recording is not None]
        folder = self.reports.reporter.run_dir.videos if video.dir is None else Path(video.dir)
        if whole and not films:
            reasons = {t.reason for group in whole for t in group.trajectories}
            logger.warning(
                "no video: the episodes that were filmed are all invalid (%s)", "; ".join(sorted(reasons))
            )
        if films:
            file = folder / f"{use}_{round_:06d}.mp4"
            write_video(file, films, overlay=video.overlay, frames_per_s=video.frames_per_s)

    def check_round(self, round_: int, groups: Sequence[Group]) -> Metrics:
        """Count the trajectories of a round by status. Raises RolloutError if too many are invalid."""
        trajectories = [t for group in groups for t in group.trajectories]
        self.validity.check(trajectories, f"round {round_}")
        return status_metrics(trajectories)

    def complete(self, selection: Selection, groups: Sequence[Group], round_: int) -> None:
        """Complete the selection of a round, and its metrics, of all `groups` that were sampled and scored,
        including dropped ones. Raises TrainingError if all of them are invalid."""
        selection.fill((self.config.run.seed, COPY_KEY, round_))
        metrics = selection.metrics
        metrics.merge(group_metrics(self.config, groups))
        metrics.merge(self._rates(groups, metrics.value("time/rollout_s")))
        metrics.merge(selection_metrics(selection))
        if selection.config.then == "resample" and len(selection.kept) < selection.size:
            logger.warning(
                "round %d continues with %d of %d groups after rollout.filter.max_batches=%d batches: %s",
                round_, len(selection.kept), selection.size, selection.num_batches, selection.describe(),
            )  # fmt: skip
        if selection.reasons["invalid"] == len(groups):
            raise TrainingError(
                f"round {round_} has nothing to train on: all its trajectories are invalid; most common: "
                f"{most_common(t for group in groups for t in group.trajectories)}"
            )

    def _rates(self, groups: Sequence[Group], seconds: float) -> Metrics:
        """What this round's sampling wrote, and its rates; floating-point operations by the formula of
        models.flops."""
        metrics, trajectories = Metrics(), [t for group in groups for t in group.sampled]
        outputs = sum(t.num_output_tokens for t in trajectories)
        metrics.add("rollout/tokens", outputs)
        metrics.mean("rollout/tokens_per_s", outputs / seconds)
        if env_steps := sum(t.lengths.env_steps for t in trajectories):
            metrics.add("env/steps", env_steps)
            metrics.mean("env/steps_per_s", env_steps / seconds)
        if self.config.train.count_flops:
            lengths = [t.lengths.total for t in trajectories]
            flops = self.models.policy.ranks.call(TrainingBackend.flops, lengths, outputs)[0]
            metrics.mean("flops/rollout_per_s", flops.forward / seconds)
        return metrics
