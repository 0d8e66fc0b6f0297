"""The loop of off-policy reinforcement learning in simulators (`sac`).

    reset states ─rollout─> episodes ─> replay buffer ─draw─> batches ─update─> weights ─sync weights─> the
    next round

One round is one rollout batch, whose episodes enter the replay buffer, and the updates that are then due.
Of the on-policy loop's invariants 3 and 4 hold here too; transitions in the buffer are of any earlier
weights. The buffer changes only in the update, so an abandoned round leaves nothing in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from braid.cluster.workers import WorkerGroup
from braid.report.metrics import Metrics
from braid.training.soft_actor_critic import SoftActorCritic
from braid.types import Group

from .imitation import warm_up
from .progress import Counters
from .run import Run


@dataclass(frozen=True)
class OffPolicy(Run):
    """`braid train` with `sac`."""

    sac: WorkerGroup[SoftActorCritic]

    def run(self) -> None:
        """Train from `progress` to the last round of the plan."""
        progress = self.progress
        if not progress.counters.is_warm:
            warm_up(self)
        while not progress.is_complete:
            progress.stop_if_asked()
            if progress.counters.is_reported:  # else a resume goes on with the end of the round
                with progress.given_up_when_late():
                    progress.start_round()
                    selection = self.sampling.rollout(progress.round)
                    progress.check_time()
                    with progress.stop.cuttable():
                        groups = self.sampling.rollouts.whole("train", selection.kept)
                progress.metrics.merge(selection.metrics)
                with progress.timed_update():
                    with progress.stop.finishing():
                        progress.end_update(*self.learn(groups))
                    self.sync_weights()
            self.finish_round()

    def learn(self, groups: Sequence[Group]) -> tuple[Counters, Metrics]:
        """Add the valid episodes of the round to the replay buffer, and take the updates that are due.
        Returns the counters after it, whose `step` counts updates of the critics."""
        timing = Metrics()
        episodes = [trajectory for group in groups for trajectory in group.valid]
        with self.progress.reports.timed("update", timing):
            ((num_updates, metrics),) = self.sac.call(SoftActorCritic.learn, episodes)
        counters = replace(self.progress.counters, step=num_updates, is_reported=False)
        return counters, Metrics.merged(timing, metrics)


@dataclass(frozen=True, slots=True)
class ReplayState:
    """What of soft actor-critic is in checkpoints beside the policy's weights."""

    sac: WorkerGroup[SoftActorCritic]

    def state(self) -> dict[str, Any]:
        """The live state: to be written before the next round."""
        return self.sac.call(SoftActorCritic.state)[0]

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.sac.call(SoftActorCritic.load, state)
