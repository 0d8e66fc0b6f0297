"""The commands of the command line: open the run folder, build the run, run its loop, and report the
outcome."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers.utils.logging import disable_progress_bar

from braid.checkpoint.store import CheckpointStore
from braid.cluster.environment import environment
from braid.cluster.interrupts import StopSignals, stop_signals
from braid.cluster.memory import keep_freed_memory, settled
from braid.cluster.status import status_on_signal
from braid.config.changes import Change, changes
from braid.config.load import Loaded, load_config, to_yaml
from braid.config.paths import with_absolute_paths
from braid.config.schema import RunConfig
from braid.config.secrets import distinct, hidden
from braid.cores import num_cores
from braid.data.pairs import CONVERSATION_TEMPLATE
from braid.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    EnvError,
    Problem,
    RolloutError,
    RunInterrupted,
    StopTraining,
    TargetMissed,
    WorkerError,
)
from braid.json_text import read_json
from braid.plan import Plan, Verb, resolve
from braid.plan.threads import num_sharing, thread_counts
from braid.report.names import declare
from braid.report.reporter import Reporter, Status
from braid.report.run_dir import RunDir
from braid.report.sinks.base import Sink, Tracker
from braid.report.sinks.build import build_sinks
from braid.report.sinks.console import Console
from braid.report.streams import reward_prints_in
from braid.types import is_at_least

from .build import RunSpec, build, open_cluster
from .evaluation_run import Trained
from .inputs import planned, read_inputs
from .preflight import check_inputs
from .run import Run

if TYPE_CHECKING:
    from .cluster import RayCluster

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run. `is_target_reached` is true if eval.target is not set."""

    run_dir: Path
    is_target_reached: bool


PASSING = (EngineError, EnvError, RolloutError, OSError)
"""Possibly transient failures, of engines, environments, rollouts or the operating system rather than of
config or training: a restart may succeed (run.max_restarts). So it may after a worker died or hung."""
_LONGEST_PAUSE_S = 60.0
_HOLDS_WEIGHTS = ("model.path.", "model.gguf.", "model.build.", "model.mlp.", "model.lora.")
"""Keys that say which weights a model has."""

_COUNTED = {"token": "action tokens", "action": "env steps", "chunk": "decisions"}
"""algorithm.logprob_level of a robot policy -> what a position of its rows is, of which the console shows the
number."""


def train(
    loaded: Loaded,
    cluster: RayCluster | None = None,
    plan: Plan | None = None,
    *,
    sinks: Sequence[Sink] = (),
) -> Outcome:
    """`braid train`: reinforcement learning, after the supervised warm-up if the config has one. With
    run.eval_only, evaluate the config's model, or the checkpoint that run.resume names. Uses the processes of
    `cluster` if they have been launched already, and the `plan` if it has been resolved. `sinks` receive the
    metrics beside the config's."""
    loaded = with_absolute_paths(loaded)
    run = loaded.config.run
    if not run.eval_only:
        return _run(loaded, plan or _plan_of(loaded, "train"), cluster, sinks)
    if run.resume == "none":
        return _evaluate(loaded, plan, cluster)
    store = _store_of(loaded.config, Path(run.output_dir) / run.name)
    return _evaluate(loaded, plan, cluster, _trained_in(store, run.resume))


def sft(loaded: Loaded, cluster: RayCluster | None = None, plan: Plan | None = None) -> Outcome:
    """`braid sft`: supervised learning only; `cluster` and `plan` as in `train`."""
    loaded = with_absolute_paths(loaded)
    return _run(loaded, plan or _plan_of(loaded, "sft"), cluster)


def prefer(loaded: Loaded, cluster: RayCluster | None = None, plan: Plan | None = None) -> Outcome:
    """`braid prefer`: learning from preferences, after the supervised warm-up if the config has one;
    `cluster` and `plan` as in `train`."""
    loaded = with_absolute_paths(loaded)
    return _run(loaded, plan or _plan_of(loaded, "prefer"), cluster)


def evaluate(
    loaded: Loaded,
    cluster: RayCluster | None = None,
    plan: Plan | None = None,
    *,
    run_dir: Path | None = None,
) -> Outcome:
    """`braid eval`: evaluate the config's model, or the newest checkpoint of the run in `run_dir`; `cluster`
    and `plan` as in `train`.

    Writes a separate run folder, named after the run with the suffix `-eval`.
    """
    trained = None if run_dir is None else _trained_of(run_dir)
    return _evaluate(with_absolute_paths(loaded), plan, cluster, trained)


def export(run_dir: Path, *, output: Path | None = None, step: int | Literal["best"] | None = None) -> Path:
    """`braid export`: write a checkpoint of a run as a folder that transformers loads. Returns the folder."""
    loaded = load_config(run_dir / "config.yaml")
    kind = loaded.config.model.kind
    if why := kind.why_not_exported:
        weights = f"its weights are safetensors files in {run_dir / 'checkpoints'}"
        raise ConfigError(f"{run_dir} {why}; {weights}")
    disable_progress_bar()
    folder = output or run_dir / "export"
    trained = _trained_of(run_dir, step)
    if trained.scores is None:
        kind.export(loaded.config, trained.weights, folder)
    else:
        from braid.models.reward_model import export_reward_model

        export_reward_model(
            loaded.config, trained.weights, trained.scores, folder, plain_template=CONVERSATION_TEMPLATE
        )
    return folder


def _plan_of(loaded: Loaded, verb: Verb) -> Plan:
    return resolve(loaded.config, verb=verb, origin_of=loaded.origin)


def _evaluate(
    loaded: Loaded, plan: Plan | None, cluster: RayCluster | None, trained: Trained | None = None
) -> Outcome:
    """Evaluate the config's model, with the weights of a checkpoint if given."""
    if trained is not None and trained.scores is not None:
        raise ConfigError(
            f"{trained.folder} has a reward model, which writes no answers; its accuracy on "
            "prefer.eval_data is in the metrics of its run"
        )
    if trained is not None:
        _refuse_other_model(loaded, trained)
    run = loaded.config.run
    update = {"name": f"{run.name}-eval", "if_exists": "new", "resume": "none"}
    # An evaluation saves nothing, so it must not touch the run's checkpoint.dir.
    checkpoint = loaded.config.checkpoint.model_copy(update={"dir": None})
    config = loaded.config.model_copy(update={"run": run.model_copy(update=update), "checkpoint": checkpoint})
    loaded = replace(loaded, config=config)
    return _run(loaded, plan or _plan_of(loaded, "eval"), cluster, trained=trained)


def _refuse_other_model(loaded: Loaded, trained: Trained) -> None:
    """Raise ConfigError if the config's model is not the one whose weights are in the checkpoint."""
    if not trained.config or loaded.config.run.allow_changes:
        return
    problems = [
        Problem(
            change.key,
            f"is {change.after or 'absent'}, but was {change.before or 'absent'} in {trained.folder}, whose "
            "weights are evaluated; remove it, or evaluate that model without a run (braid eval "
            "CONFIG.yaml). If it is the same model in another folder, set run.allow_changes=true",
            loaded.origin(change.key),
        )
        for change in changes(trained.config, to_yaml(loaded), loaded.origins)
        if f"{change.key}.".startswith(_HOLDS_WEIGHTS)
    ]
    if problems:
        raise ConfigError(problems)


def _trained_of(run_dir: Path, step: int | Literal["best"] | None = None) -> Trained:
    """The policy in a run's newest checkpoint, or in that of `step`, or of the best evaluation."""
    store = _store_of(load_config(run_dir / "config.yaml").config, run_dir)
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"the run {run_dir} has no checkpoint in {store.folder}")
    which = f"--step {step}"
    if step == "best":
        try:
            step = read_json(run_dir / "summary.json")["eval"]["best"]["step"]
        except (OSError, ValueError, KeyError):
            step = None
        if step is None:
            why = "has no evaluation of eval.target.metric in its summary.json"
            raise ConfigError(f"--step best: {run_dir} {why}; pass a number of {', '.join(map(str, steps))}")
        which = f"the best evaluation is of step {step} (checkpoint.keep_best keeps its checkpoint)"
    if step is not None and step not in steps:
        have = ", ".join(map(str, steps))
        raise ConfigError(f"{which}: {run_dir} has no checkpoint of that step; available: {have}")
    return _trained_in(store, "latest" if step is None else str(store.path(step)))


def _trained_in(store: CheckpointStore, which: str) -> Trained:
    from braid.training.shards import read_weights

    folder, _, state = store.locate(which if which == "latest" else Path(which))
    role = "policy" if "policy" in state else "warm_up"
    weights = state[role].get("weights") or read_weights(folder / role)
    scores = state.get("preferences", {}).get("scores")
    return Trained(weights, folder, state.get("about", {}).get("config", ""), scores)


def _store_of(config: RunConfig, run_dir: Path) -> CheckpointStore:
    """The checkpoint store of the run in `run_dir`."""
    folder = config.checkpoint.dir
    return CheckpointStore(
        run_dir / "checkpoints" if folder is None else Path(folder), config.checkpoint.keep
    )


def _run(
    loaded: Loaded,
    plan: Plan,
    cluster: RayCluster | None = None,
    sinks: Sequence[Sink] = (),
    trained: Trained | None = None,
) -> Outcome:
    """Carry out `plan`, made before the data was read, on the processes of `cluster`, if it is open.
    `trained` is what to evaluate, if not the config's model."""
    config, verb = loaded.config, plan.verb
    keep_freed_memory()
    disable_progress_bar()
    if config.run.num_threads != "auto":
        torch.set_num_threads(config.run.num_threads)
    with environment(config.cluster.variables), stop_signals() as stop:
        inputs = read_inputs(loaded, verb)
        plan = planned(loaded, plan, inputs)
        check_inputs(loaded, plan, inputs)
        done: Status = "finished"
        with _in_folder(RunSpec(loaded, plan, inputs, trained), cluster, stop, sinks) as (attempts, begin):
            reporter = attempts.reporter
            try:
                attempts.keep_trying(begin, config.run.resume)
            except StopTraining:
                done = "stopped"
            missed = _missed(config, reporter, verb)
            reporter.finish("not_learned" if missed and done == "finished" else done, missed)
    return Outcome(reporter.run_dir.path, missed is None)


@contextmanager
def _in_folder(
    spec: RunSpec, cluster: RayCluster | None, stop: StopSignals, sinks: Sequence[Sink]
) -> Iterator[tuple[_Attempts, Callable[[], None]]]:
    """Open the run's folder, its console and its reporter, which records how the block ends. Yields the
    attempts of the run, and what starts to write its files."""
    loaded, plan, inputs = spec.loaded, spec.plan, spec.inputs
    config, verb = loaded.config, plan.verb
    run_dir = RunDir.open(
        Path(config.run.output_dir),
        config.run.name,
        if_exists=config.run.if_exists,
        resume=config.run.resume != "none",
    )
    store = _store_of(config, run_dir.path)
    with (
        nullcontext() if verb == "eval" else store.held(),
        Console(config.report.console, title=f"{verb} {run_dir.path.name}", folder=run_dir.path) as console,
        reward_prints_in(run_dir.path / "logs" / "rewards.log"),
    ):
        if config.run.resume == "none":
            run_dir.forget_id()
            _refuse_checkpoints_of_others(store)
        else:
            _compare(loaded, store, run_dir)
        loaded = _stored(loaded, run_dir.path.name)
        spec = replace(spec, loaded=loaded)
        _divide_cores(config, plan)
        console.num_rounds = plan.last_round
        declare("policy", plan.recipe.policy_loss.metrics)
        if config.prefer is not None:
            declare("prefer", config.prefer.loss.metrics)
        reporter = Reporter(
            run_dir,
            console,
            sinks,
            checkpoints=store.folder,
            best=(config.eval.target_metric, config.eval.is_lower_better),
        )

        def begin() -> None:
            run_dir.describe(to_yaml(loaded), hidden(plan.to_json(), distinct(loaded.secrets)), loaded.kept)
            reporter.begin(build_sinks(run_dir, **_sink_settings(loaded, run_dir.path.name)))

        if inputs is not None:
            reporter.decode = inputs.decode
            reporter.count_data(
                train=inputs.train,
                eval=inputs.eval,
                sft=inputs.examples,
                sft_eval=inputs.held_out_examples,
                prefer=inputs.pairs,
                prefer_eval=inputs.held_out,
            )
        else:
            console.counted = _COUNTED[config.robot_logprob_level]
        with _told(reporter, store), status_on_signal(lambda: console.doing):
            yield _Attempts(spec, reporter, store, stop, cluster), begin


def _stored(loaded: Loaded, name: str) -> Loaded:
    """The config as the run folder `name` stores it: with the name that if_exists gave the folder, and
    without what only this start was told. A stored run.allow_changes would allow those of every later
    resume."""
    run = loaded.config.run.model_copy(update={"name": name, "resume": "none", "allow_changes": False})
    return replace(loaded, config=loaded.config.model_copy(update={"run": run}))


def _divide_cores(config: RunConfig, plan: Plan) -> None:
    """Of several processes, log the numbers of CPU threads; in this one, torch has at most its share of the
    cores, unless the user has set the number. Workers have theirs from the start (cluster.ray)."""
    sharing = num_sharing(config, plan.layout, "policy", 0, is_pipelined=plan.is_pipelined)
    if plan.layout.mode != "in_process" or sharing > 1:
        logger.info("CPU threads: %s (%s)", *thread_counts(config, plan))
    share = max(1, num_cores() // sharing)
    is_ours = config.run.num_threads == "auto" and "OMP_NUM_THREADS" not in os.environ
    if is_ours and plan.layout.mode == "in_process" and torch.get_num_threads() > share:
        torch.set_num_threads(share)


def _sink_settings(loaded: Loaded, name: str) -> dict[str, Any]:
    report, shown = loaded.config.report, loaded.to_show()
    trackers = {"wandb": report.wandb, "swanlab": report.swanlab}
    return {
        "folder": None if report.dir is None else Path(report.dir),
        "tensorboard_queue": report.tensorboard_queue if report.tensorboard else None,
        "tensorboard_samples": report.tensorboard_samples,
    } | {
        key: Tracker(section.project, section.name or name, section.mode, section.samples, shown)
        for key, section in trackers.items()
        if section
    }


def _compare(loaded: Loaded, store: CheckpointStore, run_dir: RunDir) -> None:
    """Log the settings that differ from those of the checkpoint to resume from. Without run.allow_changes,
    raises ConfigError if guarded settings (algorithm, model, data, ...) have changed, or if the checkpoint
    belongs to another run."""
    which = loaded.config.run.resume
    checkpoint = store.about(which if which == "latest" else Path(which))
    if checkpoint is None:
        return
    folder, about = checkpoint
    changed = changes(about.get("config", ""), to_yaml(loaded), loaded.origins) if about else []
    if changed:
        logger.info("settings changed since %s: %s", folder, "; ".join(map(str, changed)))
    if loaded.config.run.allow_changes:
        return
    problems = [
        Problem(
            change.key,
            f"is {change.after}, but was {change.before} in {folder}; restore it, or set "
            "run.allow_changes=true",
            loaded.origin(change.key),
        )
        for change in changed
        if change.is_guarded
    ]
    if about and folder.is_relative_to(run_dir.path):
        run_dir.take_id(about["run_id"])
    if about and about["run_id"] != run_dir.run_id:
        message = (
            f"{folder} is a checkpoint of another run than the one in {run_dir.path}; to resume from it "
            "anyway, set run.allow_changes=true"
        )
        problems.append(Problem("run.resume", message, loaded.origin("run.resume")))
    if original := _original(store, run_dir, about.get("run_id"), changed):
        message = (
            f"{run_dir.path} is a copy of {original}, and {store.folder} holds that run's checkpoints; set "
            "checkpoint.dir to a copy of them"
        )
        problems.append(Problem("checkpoint.dir", message, loaded.origin("checkpoint.dir")))
    if problems:
        raise ConfigError(problems)


def _original(
    store: CheckpointStore, run_dir: RunDir, run_id: str | None, changed: Sequence[Change]
) -> Path | None:
    """The run folder that wrote the newest checkpoint, if this one is a copy of it with the same folder of
    checkpoints."""
    before = {change.key: change.before or "" for change in changed}
    name = before.get("run.name", run_dir.path.name)
    folder = Path(before.get("run.output_dir", run_dir.path.parent), name)
    if store.folder.is_relative_to(run_dir.path) or folder.resolve() == run_dir.path.resolve():
        return None
    known = folder / ".run_id"
    return folder if known.is_file() and known.read_text() == run_id else None


def _refuse_checkpoints_of_others(store: CheckpointStore) -> None:
    """Raise ConfigError if a new run finds checkpoints in its folder, which it would mistake for its own and
    remove."""
    if store.steps():
        message = (
            f"{store.folder} contains checkpoints of another run; set run.resume=latest to resume that run, "
            "or choose another folder, or remove them"
        )
        raise ConfigError([Problem("checkpoint.dir", message, "file system")])


@dataclass(frozen=True, slots=True)
class _Attempts:
    """Builds a run and runs it, again after transient failures, on the processes of `cluster` if it is
    open."""

    spec: RunSpec
    reporter: Reporter
    store: CheckpointStore
    stop: StopSignals
    cluster: RayCluster | None

    def keep_trying(self, begin: Callable[[], None], resume: str) -> None:
        """Run to the end, from the checkpoint `resume` unless that is "none". After a transient failure,
        restart from the newest checkpoint, up to run.max_restarts times, with exponential backoff.

        `begin` starts to write the run's files: before anything is built, but of a run that is resumed only
        after its checkpoint has been loaded, so that a resume that fails leaves them as they are."""
        max_restarts, store = self.spec.loaded.config.run.max_restarts, self.store
        which, has_begun = resume, False
        for restart in itertools.count(1):
            try:
                if which == "none" and not has_begun:
                    begin()
                    has_begun = True
                with self._built(is_restart=restart > 1) as run, settled():
                    if which != "none":
                        run.progress.resume(which)
                    if not has_begun:
                        begin()
                        has_begun = True
                    with self._stoppable():
                        run.run()
                return
            except (*PASSING, WorkerError) as error:
                if restart > max_restarts or not _may_pass(error):
                    raise
                which = "latest" if has_begun and store.steps() else resume
                pause_s = min(2.0 ** (restart - 1), _LONGEST_PAUSE_S)
                logger.warning(
                    "the run failed: %s: %s; restart %d of %d in %g s from %s",
                    type(error).__name__,
                    error,
                    restart,
                    max_restarts,
                    pause_s,
                    "the beginning" if which == "none" else f"checkpoint {which}",
                )
                self.reporter.restart()
                time.sleep(pause_s)

    @contextmanager
    def _built(self, *, is_restart: bool) -> Iterator[Run]:
        """A new run, whose workers, with their engines, environments and reward processes, are stopped after
        the block."""
        with ExitStack() as stack:
            with self.reporter.phase("build"):
                cluster = open_cluster(self.spec, self.cluster, is_restart=is_restart)
                stack.callback(cluster.leave)
                run = build(self.spec, self.reporter, self.store, self.stop, cluster)
                stack.callback(run.models.rollouts.close)
            yield run

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Wrap the loop: after a signal it has run.stop_within_s seconds to stop, an evaluation none."""
        grace_s = 0.0 if self.spec.plan.verb == "eval" else self.spec.loaded.config.run.stop_within_s
        with self.stop.graceful(grace_s):
            try:
                yield
            except (*PASSING, WorkerError) as error:
                if not self.stop.is_requested:
                    raise
                logger.warning("the run failed while stopping: %s: %s", type(error).__name__, error)
                self.stop.end()


def _may_pass(error: Exception) -> bool:
    """Whether a restart may succeed. An exception raised in a worker counts as if it were raised here."""
    if isinstance(error, WorkerError):
        return error.raised is None or isinstance(error.raised, PASSING)
    return isinstance(error, PASSING)


@contextmanager
def _told(reporter: Reporter, store: CheckpointStore) -> Iterator[None]:
    """Record in the summary how the run ended, whatever ends it."""
    try:
        yield
    except KeyboardInterrupt:
        reporter.finish("interrupted")
        saved = store.steps()
        folder = reporter.run_dir.path
        raise RunInterrupted(folder, store.path(saved[-1]) if saved else None) from None
    except BaseException as error:
        reporter.finish("failed", error)
        raise


def _missed(config: RunConfig, reporter: Reporter, verb: Verb) -> TargetMissed | None:
    """The error that eval.target was missed; None if it was reached. `min_gain` does not apply to
    evaluations."""
    target, name = config.eval.target, config.eval.target_metric
    first, last = (
        evaluation.get("all", {}).get(name, math.nan)
        for evaluation in (reporter.first_eval, reporter.last_eval)
    )
    problems = []
    if math.isnan(last) and not (target.min_final is None and target.max_final is None):
        problems.append(f"there is no final {name}: no answer of the evaluation is valid, or none was made")
    elif target.min_final is not None and not is_at_least(last, target.min_final):
        problems.append(f"final {name} is {last:.3f}, below eval.target.min_final={target.min_final:g}")
    elif target.max_final is not None and not is_at_least(-last, -target.max_final):
        problems.append(f"final {name} is {last:.3f}, above eval.target.max_final={target.max_final:g}")
    gain, moved = (first - last, "fell") if config.eval.is_lower_better else (last - first, "rose")
    if verb != "eval" and target.min_gain is not None and not is_at_least(gain, target.min_gain):
        problems.append(
            f"the gain in {name} is unknown, since the first or the last evaluation has no valid answer or "
            "was not made"
            if math.isnan(gain)
            else f"{name} {moved} from {first:.3f} to {last:.3f}, by less than "
            f"eval.target.min_gain={target.min_gain:g}"
        )
    return TargetMissed("; ".join(problems)) if problems else None
