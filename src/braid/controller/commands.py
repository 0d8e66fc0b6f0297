"""What the command line's verbs do: open the run's folder, build its parts, run a loop, and tell how it ended."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from braid.checkpoint.store import CheckpointStore
from braid.config.load import Loaded, load_config, to_yaml
from braid.errors import CheckpointError, ConfigError, Problem, RunInterrupted
from braid.models.loading import load_policy, load_tokenizer, save_pretrained
from braid.plan import Plan, Verb, resolve
from braid.report.reporter import Reporter
from braid.report.run_dir import RunDir

from . import build, on_policy, steps, supervised
from .parts import Parts, Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `is_target_reached` is True when eval.target asks for nothing."""

    run_dir: Path
    steps: int
    first_eval: dict[str, dict[str, float]]
    last_eval: dict[str, dict[str, float]]
    missed: str

    @property
    def is_target_reached(self) -> bool:
        return not self.missed


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
    weights = None if run_dir is None else _newest(run_dir)

    def loop(parts: Parts) -> None:
        if weights is not None:
            parts.policy.load_weights(weights["policy"]["weights"])
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
    state = _newest(run_dir, step)
    lm = load_policy(model, temperature=1.0, seed=loaded.config.run.seed, device=torch.device("cpu"))
    weights = state["policy"]["weights"]
    with torch.no_grad():
        for name, tensor in lm.named_weights():
            tensor.copy_(weights[name])
    folder = output or run_dir / "export"
    save_pretrained(lm, load_tokenizer(model), folder)
    return folder


def _newest(run_dir: Path, step: int | None = None) -> dict[str, Any]:
    store = CheckpointStore(run_dir / "checkpoints", keep=None)
    _, state = store.load("latest" if step is None else run_dir / "checkpoints" / f"step_{step}")
    return state


def _run(loaded: Loaded, verb: Verb, loop: Callable[[Parts], None]) -> Outcome:
    config = loaded.config
    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    inputs = build.read_inputs(loaded, verb)
    num_prompts = len(inputs.train.prompts) if inputs and verb == "train" else None
    plan = resolve(config, num_prompts, verb=verb, origin_of=loaded.origin)
    is_resumed = config.run.resume != "none"
    run_dir = RunDir.open(
        Path(config.run.output_dir), config.run.name, if_exists=config.run.if_exists, resume=is_resumed
    )
    reporter = Reporter(run_dir, config.report, plan, decode=inputs.decode if inputs else None)
    run_dir.describe(to_yaml(loaded), plan.to_json())
    store = CheckpointStore(run_dir.checkpoints, keep=config.checkpoint.keep)
    with _told(reporter, run_dir, store) as progress:
        parts = build.build(loaded, plan, inputs, reporter, store)
        try:
            parts.progress = progress
            if is_resumed:
                _resume(parts, run_dir, config.run.resume)
            loop(parts)
        finally:
            parts.close()
        missed = _missed(parts)
        reporter.finish("not_learned" if missed else "finished", progress, missed)
        return Outcome(run_dir.path, progress.step, progress.first_eval, progress.last_eval, missed)


def _resume(parts: Parts, run_dir: RunDir, which: str) -> None:
    """Go back to a checkpoint; with `latest` and none there, to the beginning."""
    if which == "latest" and not parts.store.steps():
        logger.warning("there is no checkpoint in %s yet; the run starts from the beginning", run_dir.checkpoints)
        run_dir.rewind(None)
        return
    _, state = parts.store.load("latest" if which == "latest" else Path(which))
    steps.restore(parts, state)
    run_dir.rewind(parts.progress.round)


@contextmanager
def _told(reporter: Reporter, run_dir: RunDir, store: CheckpointStore) -> Iterator[Progress]:
    """Whatever ends the run, its summary says so."""
    progress = Progress()
    try:
        yield progress
    except KeyboardInterrupt:
        reporter.finish("interrupted", progress)
        newest = store.steps()
        raise RunInterrupted(run_dir.path, run_dir.checkpoints / f"step_{newest[-1]}" if newest else None) from None
    except BaseException as error:
        reporter.finish("failed", progress, f"{type(error).__name__}: {error}")
        raise
    finally:
        run_dir.close()


def _missed(parts: Parts) -> str:
    """What of eval.target was not reached; empty when all was."""
    target, progress = parts.config.eval.target, parts.progress
    if target.min_final is None and target.min_gain is None:
        return ""
    name = f"mean@{parts.config.eval.samples_per_prompt}"
    first = progress.first_eval.get("all", {}).get(name, math.nan)
    last = progress.last_eval.get("all", {}).get(name, math.nan)
    problems = []
    if target.min_final is not None and not last >= target.min_final:
        problems.append(f"{name} is {last:.3f} at the end, eval.target.min_final asks for {target.min_final:g}")
    if target.min_gain is not None and not last - first >= target.min_gain:
        problems.append(
            f"{name} went from {first:.3f} to {last:.3f}, eval.target.min_gain asks for a gain of {target.min_gain:g}"
        )
    return "; ".join(problems)
