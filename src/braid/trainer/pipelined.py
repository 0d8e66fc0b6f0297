"""The pipelined loop: sampling goes on while the policy is trained.

    stage   runs in               consumes                      waits for
    sample  the rollout workers   prompts that Submit names     a slot of groups_in_flight, and max_lag
    update  a thread              the oldest finished groups    prompts_per_round of them, and the last sync
    sync    this thread           the new weights               the update, and running turns, with `finish`

pipeline.py decides on the order and bounds the lag; this file executes its decisions. Invariants:

1. The version of a round's new weights is the number of rounds. No token is written by weights more than
   max_lag versions older than those that its round trains, unless over_lag=keep allows it.
2. Evaluation, reports and checkpoints come after a sync, while nothing is trained. A checkpoint names the
   groups in flight, which a resume samples again with the same keys.
3. With max_lag=0 the weights are those of on_policy.py, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from braid.report.metrics import Metrics

from .groups import GroupsInFlight
from .imitation import warm_up
from .on_policy import OnPolicy
from .pipeline import Drop, Finish, Pipeline, Submit, Sync, Train
from .progress import Counters
from .selection import Selection


@dataclass(frozen=True)
class Pipelined(OnPolicy):
    """`braid train` with a pipeline. Its rounds train as those of the on-policy loop do."""

    pipeline: Pipeline

    def run(self) -> None:
        """Train from `progress` to the last round of the plan."""
        progress, pipeline = self.progress, self.pipeline
        pipeline.start_at(progress.round)
        if not progress.counters.is_warm:
            warm_up(self)
        if not progress.counters.is_reported:
            self.finish_round()
        groups = GroupsInFlight(self.sampling, progress, pipeline, self._train_groups)
        with groups.closing():
            while True:
                if progress.is_stop_asked:
                    pipeline.stop()
                match pipeline.decide():
                    case Submit(draws):
                        groups.submit(draws)
                    case Drop(draws):
                        groups.drop(draws)
                    case Train(kept, dropped):
                        groups.start_update(kept, dropped)
                    case Sync(_, when):
                        self.sync_weights("drain" if when == "finish" else "interrupt")
                        pipeline.synced()
                        self.finish_round()
                    case Finish(is_complete):
                        break
                    case None:
                        groups.wait()
        if not is_complete:
            progress.stop_if_asked()

    def _train_groups(self, selection: Selection) -> tuple[Counters, Metrics]:
        """The update of a round; runs in a thread."""
        with self.progress.stop.finishing():
            rows, fetching = self.learner.fetch_rows(selection)
            counters, metrics = self.train(selection, rows)
        return counters, Metrics.merged(fetching, metrics)
