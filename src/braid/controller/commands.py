"""What the command line's verbs do: open the run's folder, build its parts, run a loop, and tell how it ended."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from braid.checkpoint.store import CheckpointStore
from braid.config.load import Loaded, load_config, to_yaml
from braid.config.schema import RunConfig
from braid.errors import ConfigError, RunInterrupted, TargetMissed
from braid.models.base import copy_weights
from braid.models.loading import load_policy, load_tokenizer, save_pretrained
from braid.plan import Verb, resolve
from braid.report.reporter import Reporter
from braid.report.run_dir import RunDir
from braid.report.sinks.base import Tracker
from braid.report.sinks.build import build_sinks
from braid.report.sinks.console import Console
from braid.runtime.memory import keep_freed_memory

from . import build, on_policy, steps, supervised
from .parts import Parts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `is_target_reached` is True when eval.target asks for nothing."""

    run_dir: Path
    is_target_reached: bool


def train(loaded: Loaded) -> Outcome:
    """`braid train`: reinforcement learning, after supervised learning where the config has it."""
    return _run(loaded, "train", on_policy.run)


def sft(loaded: Loaded) -> Outcome:
    """`braid sft`: supervised learning alone."""
    return _run(loaded, "sft", supervised.run)


def evaluate(loaded: Loaded, *, run_dir: Path | None = None) -> Outcome:
    """`braid eval`: score the config's model, or the newest checkpoint of the run in `run_dir`.

    Writes a run folder of its own, named after the run with `-eval`.
    """
    run = loaded.config.run
    name = f"{run.name}-eval"
    config = loaded.config.model_copy(
        update={"run": run.model_copy(update={"name": name, "if_exists": "new", "resume": "none"})}
    )
    weights = {} if run_dir is None else _weights_of(run_dir)

    def loop(parts: Parts) -> None:
        copy_weights(weights, parts.policy.named_weights())
        steps.publish(parts)
        steps.evaluate(parts, is_due=True)
        steps.report(parts)

    return _run(replace(loaded, config=config), "eval", loop)


def export(run_dir: Path, *, output: Path | None = None, step: int | None = None) -> Path:
    """`braid export`: a checkpoint of a run as a folder that transformers loads. Returns the folder."""
    loaded = load_config(run_dir / "config.yaml")
    model = loaded.config.model
    if model.mlp is not None:
        raise ConfigError(
            f"{run_dir} trained a perceptron (model.mlp), which has no Hugging Face form; its weights are in "
            f"{run_dir / 'checkpoints'} as safetensors"
        )
    weights = _weights_of(run_dir, step)
    lm = load_policy(model, temperature=1.0, seed=loaded.config.run.seed, device=torch.device("cpu"))
    copy_weights(weights, lm.named_weights())
    folder = output or run_dir / "export"
    save_pretrained(lm, load_tokenizer(model), folder)
    return folder


def _weights_of(run_dir: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """The policy's weights in the newest checkpoint, or in that of `step`."""
    store = CheckpointStore(run_dir / "checkpoints", keep=None)
    _, state = store.load("latest" if step is None else run_dir / "checkpoints" / f"step_{step}")
    return state["policy"]["weights"]


def _run(loaded: Loaded, verb: Verb, loop: Callable[[Parts], None]) -> Outcome:
    config = loaded.config
    keep_freed_memory()
    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    inputs = build.read_inputs(loaded, verb)
    num_prompts = len(inputs.train.prompts) if inputs and verb == "train" else None
    plan = resolve(config, num_prompts, verb=verb, origin_of=loaded.origin)
    run_dir = RunDir.open(
        Path(config.run.output_dir),
        config.run.name,
        if_exists=config.run.if_exists,
        resume=config.run.resume != "none",
    )
    run_dir.describe(to_yaml(loaded), plan.to_json())
    store = CheckpointStore(run_dir.checkpoints, keep=config.checkpoint.keep)
    with Console(config.report.console, title=f"{verb} {run_dir.path.name}", folder=run_dir.path) as console:
        console.num_rounds = {"train": plan.planned_rounds, "sft": plan.sft_steps}.get(verb)
        reporter = Reporter(run_dir, console, build_sinks(run_dir, **_trackers(config)))
        if inputs is not None:
            reporter.decode = inputs.decode
            reporter.count_prompts(inputs.train, inputs.eval)
        else:
            console.counted = "env steps"
        with _told(reporter, store):
            with reporter.phase("build"):
                parts = build.build(loaded, plan, inputs, reporter, store)
            with closing(parts):
                if config.run.resume != "none":
                    _resume(parts, config.run.resume)
                loop(parts)
            missed = _missed(config, reporter, verb)
            reporter.finish("not_learned" if missed else "finished", missed)
    return Outcome(run_dir.path, missed is None)


def _trackers(config: RunConfig) -> dict[str, Any]:
    report = config.report
    shown = config.model_dump(mode="json")
    trackers = {"wandb": report.wandb, "swanlab": report.swanlab}
    return {"tensorboard": report.tensorboard} | {
        name: Tracker(section.project, section.mode, shown) for name, section in trackers.items() if section
    }


def _resume(parts: Parts, which: str) -> None:
    """Go back to a checkpoint; with `latest` and none there, to the beginning."""
    if which == "latest" and not parts.store.steps():
        logger.warning(
            "there is no checkpoint yet in %s; the run starts from the beginning", parts.store.folder
        )
        return
    step, state = parts.store.load("latest" if which == "latest" else Path(which))
    parts.store.forget_after(step)
    steps.restore(parts, state)


@contextmanager
def _told(reporter: Reporter, store: CheckpointStore) -> Iterator[None]:
    """Whatever ends the run, its summary says so."""
    try:
        yield
    except KeyboardInterrupt:
        reporter.finish("interrupted")
        saved = store.steps()
        folder = reporter.run_dir.path
        raise RunInterrupted(folder, store.folder / f"step_{saved[-1]}" if saved else None) from None
    except BaseException as error:
        reporter.finish("failed", error)
        raise


def _missed(config: RunConfig, reporter: Reporter, verb: Verb) -> TargetMissed | None:
    """What of eval.target was not reached. Evaluation alone gains nothing."""
    target, name = config.eval.target, f"mean@{config.eval.samples_per_prompt}"
    first, last = (of.get("all", {}).get(name, math.nan) for of in (reporter.first_eval, reporter.last_eval))
    problems = []
    if target.min_final is not None and not last >= target.min_final:
        problems.append(f"{name} is {last:.3f} at the end, below eval.target.min_final={target.min_final:g}")
    if verb != "eval" and target.min_gain is not None and not last - first >= target.min_gain:
        problems.append(
            f"{name} went from {first:.3f} to {last:.3f}, less than eval.target.min_gain={target.min_gain:g}"
        )
    return TargetMissed("; ".join(problems)) if problems else None
