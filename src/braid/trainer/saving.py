"""Checkpoints of a run: when they are written, what is in them, and the end of a run that was asked to stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from braid.cluster.interrupts import RoundCut
from braid.config.env import AgentEnvConfig
from braid.errors import StopTraining
from braid.rollout.engine import NewWeights
from braid.training.backend import TrainingBackend
from braid.training.group import ModelGroup

from . import roles
from .parts import Parts
from .pipeline import start_of
from .supervised import Supervised

logger = logging.getLogger(__name__)

_ANSWER_S = 8.0
"""Seconds in which idle ranks answer; those that do not are not waited for when the run has been asked to stop."""


def save(parts: Parts, *, is_due: bool) -> None:
    """Write a checkpoint of the whole state if `is_due`, or if due by time when no cadence in rounds is
    set."""
    config = parts.config.checkpoint
    if is_due or (not config.every_rounds and parts.clock.is_due(config.every_s)):
        _save(parts, counters(parts))


def _save(parts: Parts, at: Mapping[str, Any]) -> None:
    """Write a checkpoint of the models' current state and the matching counters `at`."""
    start = time.perf_counter()
    with parts.timed("save"), parts.stop.finishing():
        parts.store.save(at["progress"]["step"], partial(_write_state, parts, at))
    parts.clock.saved(time.perf_counter() - start)
    parts.saved = at["progress"]


def restore(parts: Parts, state: dict[str, Any], folder: Path) -> None:
    """Restore the parts from the checkpoint in `folder`."""
    parts.progress.load(state["progress"])
    for role, model in _saved_models(parts).items():
        if state.get(role) is not None:
            model.restore(state[role], folder / role)
    parts.sampler.load(state["sampler"])
    if (warm_up := _unfinished_warm_up(parts)) is not None:
        warm_up.sampler.load(state["warm_up_sampler"])
    parts.reward_moments.load(state["reward_moments"])
    parts.metrics.load(state["metrics"])
    parts.saved = state["progress"]
    if parts.pipeline is not None:
        parts.pipeline.load(state.get("pipeline") or start_of(parts.progress.round))
    if parts.progress.is_warm:
        roles.sync_weights(parts)
        if (opponent := state.get("opponent")) is not None:
            parts.rollouts.load_opponent(opponent)
    parts.reporter.load(state["reporter"])  # last, since it removes the records of later rounds


def stop_if_asked(parts: Parts) -> None:
    """If a signal has asked the run to stop, save unsaved state and raise KeyboardInterrupt; if a callback has,
    StopTraining."""
    if parts.stop.is_requested:
        _end(parts, counters(parts))
    if parts.reporter.is_stop_asked:
        at = counters(parts)
        if at["progress"] != parts.saved:
            _save(parts, at)
        raise StopTraining


@contextmanager
def given_up_when_late(parts: Parts) -> Iterator[None]:
    """Wrap a block that changes no model. If the run has been asked to stop, and the block fails or cannot
    finish in the remaining time, save the state from before the block and end the run."""
    at = counters(parts)
    try:
        yield
    except (RoundCut, Exception) as error:
        if not parts.stop.is_requested:
            raise
        if not isinstance(error, RoundCut):
            logger.warning("round %d is abandoned: %s", parts.progress.round, error)
        _end(parts, at)


def sync_weights(parts: Parts, when: NewWeights = "drain") -> None:
    """Sync the policy's weights as roles.sync_weights does. If the run has been asked to stop and the sync cannot finish in
    the remaining time, save the state before it and end the run."""
    try:
        with parts.stop.cuttable():
            roles.sync_weights(parts, when)
    except RoundCut:
        _end(parts, counters(parts))


def _end(parts: Parts, at: Mapping[str, Any]) -> NoReturn:
    """Write a checkpoint as `_save` does, unless there is one of `at` already, and end the run."""
    if at["progress"] != parts.saved:
        if not _ranks_answer(parts):
            parts.rollouts.close()  # ranks that wait for one of its workers then fail, within 5 s on another machine
        if _ranks_answer(parts):
            _save(parts, at)
        else:
            logger.warning(
                "round %d is not saved: a worker has not answered for %g s",
                at["progress"]["round"],
                _ANSWER_S,
            )
    parts.stop.end()


def _ranks_answer(parts: Parts) -> bool:
    """Whether all ranks of the models to save answer a call: one that is stopped, or waits for another process that is,
    does not."""
    models = _saved_models(parts).values()
    calls = [(model.ranks, model.ranks.start(TrainingBackend.data_place)) for model in models]
    until_s = time.monotonic() + _ANSWER_S
    return all(ranks.is_done(call, max(0.0, until_s - time.monotonic())) for ranks, call in calls)


def counters(parts: Parts) -> dict[str, Any]:
    """A copy of the run's state without its models."""
    warm_up = _unfinished_warm_up(parts)
    return {
        "progress": parts.progress.state(),
        "sampler": parts.sampler.state(),
        "warm_up_sampler": None if warm_up is None else warm_up.sampler.state(),
        "reward_moments": parts.reward_moments.state(),
        "reporter": parts.reporter.state(parts.progress.round),
        "metrics": parts.metrics.state(),
        "about": dict(parts.about),
    } | ({} if parts.pipeline is None else {"pipeline": parts.pipeline.state()})


def _unfinished_warm_up(parts: Parts) -> Supervised | None:
    """The supervised warm-up before the first round; None once it is complete."""
    return None if parts.progress.is_warm or parts.plan.verb != "train" else parts.supervised


def _write_state(
    parts: Parts, at: Mapping[str, Any], folder: Path
) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Have the models' workers write to `folder`. Returns the rest of the state that `restore` needs for a
    bit-exact resume, and the files written."""
    state: dict[str, object] = dict(at)
    env = parts.config.env
    has_opponent = isinstance(env, AgentEnvConfig) and env.opponents is not None
    state["opponent"] = parts.rollouts.opponent_state() if has_opponent else None
    files: dict[str, dict[str, object]] = {}
    for role, model in _saved_models(parts).items():
        state[role], written = model.save(folder / role)
        files |= {f"{role}/{name}": line for name, line in written.items()}
    return state, files


def _saved_models(parts: Parts) -> dict[str, ModelGroup]:
    """The models to save in a checkpoint. Excludes a reference that always equals the folder it was loaded
    from; during the warm-up, only the model being trained."""
    if (warm_up := _unfinished_warm_up(parts)) is not None:
        return {"warm_up": warm_up.model}
    config = parts.config.reference
    changes = config.path is None or config.update_every_epochs > 0
    models = {
        "policy": parts.policy,
        "critic": parts.critic,
        "reference": parts.reference if changes else None,
    }
    return {role: model for role, model in models.items() if model is not None}
