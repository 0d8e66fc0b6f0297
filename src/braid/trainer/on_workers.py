"""Builds a run on workers: the loop is in the driver; each training role's ranks, the rollout workers and the
rollout buffer are in separate processes.

Models, engines and rewards are imported only there, not in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from braid.checkpoint.store import CheckpointStore
from braid.cluster.workers import Place
from braid.config.load import Loaded
from braid.config.schema import RunConfig
from braid.functions import GIVEN
from braid.plan import Plan
from braid.report.reporter import Reporter
from braid.training.group import GroupBackend

from .cluster import ROWS, Cluster
from .data_plane import DataPlane, make_rollout_buffer
from .inputs import TextInputs
from .parts import Parts
from .roles import export_policy, roles_on_workers
from .rollouts import Rollouts
from .supervised import sampler_of, supervised_of, warm_up_config
from .weight_sync import WeightSync, send_options

if TYPE_CHECKING:
    from braid.rollout.collector import Collector


def build_on_workers(
    loaded: Loaded,
    plan: Plan,
    inputs: TextInputs,
    reporter: Reporter,
    store: CheckpointStore,
    cluster: Cluster | None,
) -> Parts:
    """Build the parts of a text run on workers. If that fails, the processes already started are stopped."""
    if cluster is None or not cluster.is_open:
        cluster = Cluster.open(loaded.config, plan.layout)
    config, run_dir = cluster.config, reporter.run_dir.path
    make = partial(
        _collector,
        dict(GIVEN),
        config=config,
        plan=plan,
        base_dir=loaded.base_dir,
        inputs=inputs,
        run_dir=run_dir,
    )
    factories = {"rollout": make, ROWS: partial(make_rollout_buffer, plan)}
    try:
        cluster.make(factories, run_dir / "logs")
        return _parts_on(cluster, config, plan, inputs, reporter, store)
    except BaseException:
        cluster.leave()
        raise


def _parts_on(
    cluster: Cluster,
    config: RunConfig,
    plan: Plan,
    inputs: TextInputs,
    reporter: Reporter,
    store: CheckpointStore,
) -> Parts:
    """Build the parts of a run whose workers are running. Engines on the trainers' devices start first and
    then sleep: they size their caches by the memory that they find free."""
    run_dir = reporter.run_dir.path
    ranks, engines = cluster.groups["policy"], cluster.groups["rollout"]
    folder = str(run_dir / "weights")
    options = send_options(
        config, plan.layout, folder, torch.device("cuda" if config.run.device == "cuda" else "cpu")
    )
    weight_sync = WeightSync(ranks, engines, options, merged=config.rollout.engine != "native")
    rollouts = Rollouts(engines, inputs.prompts, weight_sync, plan.engines_in_turns)
    rollouts.sleep()

    def new_supervised() -> GroupBackend:
        warm, name = warm_up_config(config), "policy" if plan.verb == "sft" else "warm_up"
        return cluster.backend("policy", total_steps=plan.sft_steps, config=warm, name=name)

    supervised = supervised_of(config, plan, inputs.examples.examples, new_supervised)
    roles = roles_on_workers(config, plan, cluster.backend, supervised)
    return Parts(
        config=config,
        plan=plan,
        reporter=reporter,
        store=store,
        sampler=sampler_of(plan, supervised, config, inputs),
        eval_prompts=inputs.eval.by_source(),
        rollouts=rollouts,
        data=DataPlane(cluster.groups[ROWS]),
        policy=roles.policy,
        critic=roles.critic,
        reference=roles.reference,
        supervised=supervised,
        follow_policy=roles.follow_policy,
        update_reference=roles.update_reference,
        inference=roles.inference,
        leave=cluster.leave,
        export=partial(export_policy, config, inputs.tokenizer, roles.policy),
    )


def _collector(functions: Mapping[str, Callable[..., Any]], place: Place, **given: Any) -> Collector:
    """See collectors.make_collector; `functions` are those of GIVEN."""
    from .collectors import make_collector

    GIVEN.update(functions)
    return make_collector(place, **given)
