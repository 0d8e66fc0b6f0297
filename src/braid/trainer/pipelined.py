"""The pipelined loop: sampling goes on while the policy is trained.

    stage   runs in                 consumes                        waits for
    sample  the rollout workers     prompts that Submit names       a slot of groups_in_flight, and max_lag
    update  a thread                the oldest finished groups      prompts_per_round of them, and the last sync
    sync    this thread             the new weights                 the update, and running turns, with `finish`

pipeline.py decides on the order and bounds the lag; this file executes its decisions. Invariants:

1. The version of a round's new weights is the number of rounds. No token is written by weights more than
   max_lag versions older than those that its round trains, unless over_lag=keep allows it.
2. Evaluation, reports and checkpoints come after a sync, while nothing is trained. A checkpoint names the groups
   in flight, which a resume samples again with the same keys.
3. With max_lag=0 the weights are those of on_policy.py, to the bit.
"""

from __future__ import annotations

from . import saving, steps
from .groups import GroupsInFlight
from .parts import Parts
from .pipeline import Drop, Finish, Submit, Sync, Train


def run(parts: Parts) -> None:
    """Train from `parts.progress` to the last round of the plan."""
    progress, pipeline = parts.progress, parts.pipeline
    assert pipeline is not None, "the config has a pipeline"
    if not progress.is_warm:
        steps.warm_up(parts)
    if not progress.is_reported:
        steps.finish_round(parts)
    groups = GroupsInFlight(parts, pipeline)
    with groups.closing():
        while True:
            if parts.stop.is_requested or parts.reporter.is_stop_asked:
                pipeline.stop()
            match pipeline.decide():
                case Submit(draws):
                    groups.submit(draws)
                case Drop(draws):
                    groups.drop(draws)
                case Train(kept, dropped):
                    groups.start_update(kept, dropped)
                case Sync(_, when):
                    saving.sync_weights(parts, "drain" if when == "finish" else "interrupt")
                    pipeline.synced()
                    steps.finish_round(parts)
                case Finish(is_complete):
                    break
                case None:
                    groups.wait()
    if not is_complete:
        saving.stop_if_asked(parts)
