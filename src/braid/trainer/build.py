"""Builds the parts of a run from a loaded config.

A run in one process has everything in the driver, and its engine shares the tensors that are trained
(one_process.py). In a run on workers the driver has only the loop: each training role, the rollout workers and the
rollout buffer are in separate processes (on_workers.py).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from braid.checkpoint.store import CheckpointStore
from braid.cluster.memory_record import MemoryRecorder
from braid.config.load import Loaded, to_yaml
from braid.config.schema import RunConfig
from braid.plan import Plan
from braid.report.reporter import Reporter

from .costs import held_bytes
from .inputs import TextInputs, read_inputs
from .parts import Parts
from .pipeline import Pipeline, PipelineSettings
from .roles import device_of

if TYPE_CHECKING:
    from .cluster import Cluster

__all__ = ["build", "read_inputs"]


def build(
    loaded: Loaded,
    plan: Plan,
    inputs: TextInputs | None,
    reporter: Reporter,
    store: CheckpointStore,
    cluster: Cluster | None = None,
) -> Parts:
    """Build all parts of a run, in their initial state. `cluster` is used if it is open and has no workers
    yet."""
    if inputs is not None and plan.layout.mode != "in_process":
        from .on_workers import build_on_workers

        parts = build_on_workers(loaded, plan, inputs, reporter, store, cluster)
    else:
        from .one_process import (  # imports models, which a run on workers avoids
            build_in_process,
            build_simulator,
        )

        parts = (
            build_simulator(loaded, plan, reporter, store)
            if inputs is None
            else build_in_process(loaded, plan, inputs, reporter, store)
        )
    if plan.is_pipelined:
        parts.pipeline = Pipeline(settings_of(loaded.config, plan), parts.sampler.take)
    parts.about = {"run_id": reporter.run_dir.run_id, "config": to_yaml(loaded)}
    if loaded.config.train.record_memory:
        parts.memory = MemoryRecorder(
            reporter.run_dir.memory, device_of(loaded.config), partial(held_bytes, parts)
        )
    return parts


def settings_of(config: RunConfig, plan: Plan) -> PipelineSettings:
    """The settings of a run's pipeline."""
    pipeline, size = config.pipeline, config.rollout.prompts_per_round
    assert pipeline is not None, "the run is not pipelined"
    return PipelineSettings(
        max_lag=pipeline.max_lag,
        groups_in_flight=pipeline.groups_in_flight or (pipeline.max_lag + 1) * size,
        on_new_weights=pipeline.on_new_weights,
        over_lag=pipeline.over_lag,
        prompts_per_round=size,
        num_rounds=plan.num_rounds,
        then=config.rollout.filter.then,
        max_batches=config.rollout.filter.max_batches,
    )
