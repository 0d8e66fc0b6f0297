"""Starts rollout engines in other processes from a config, or connects to servers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from braid.cluster.watchdog import folder_prefix
from braid.config.schema import RunConfig
from braid.models.build import build_model
from braid.models.causal_lm import CausalLM
from braid.models.loading import TORCH_DTYPES
from braid.models.tokenizer import model_path
from braid.plan import Plan
from braid.rollout.engines.base import Model, Process, ServedEngine
from braid.rollout.engines.remote import RemoteEngine
from braid.rollout.engines.router import Router
from braid.training.worker import device_of
from braid.weights.sending import SendOptions

from .inputs import TextInputs


def make_engine(
    config: RunConfig,
    plan: Plan,
    inputs: TextInputs,
    sending: SendOptions,
    *,
    number: int,
    logs: Path,
) -> RemoteEngine:
    """Start engine `number` of the run as a child process with its log file in `logs`, or connect to the
    server with that index. Raises EngineError on failure."""
    engine, timeout_s = config.rollout.engine, config.cluster.call_timeout_s
    assert isinstance(engine, ServedEngine), "engines in the run's processes are not started"
    longest = max(plan.max_trajectory_tokens or 1, plan.eval_max_trajectory_tokens or 1)
    if engine.servers:
        max_tokens = engine.max_model_tokens or longest
        return engine.connect(
            engine.servers[number], max_tokens=max_tokens, sending=sending, timeout_s=timeout_s
        )

    def model(folder: Path) -> Model:
        return Model(
            _model_folder(config, inputs.tokenizer, folder, has_weights=engine.load_weights),
            tokenizer=str(folder),
            dtype=config.model.dtype,
            longest=longest,
            trust_remote_code=config.model.trust_remote_code,
            sleeps=number in plan.engines_in_turns,
            seed=config.run.seed,
            vision=inputs.vision,
        )

    return start_engine(
        engine, number, config, model=model, sending=sending, log=logs / f"engine_{number}.log"
    )


def start_engine(
    engine: ServedEngine,
    number: int,
    config: RunConfig,
    *,
    model: Callable[[Path], Model],
    sending: SendOptions,
    log: Path,
) -> RemoteEngine:
    """Start a child process with an engine. `model` is what it loads, and may write to the folder that it
    gets, which the engine removes. Raises EngineError on failure."""
    with ExitStack() as undo:
        folder = Path(mkdtemp(prefix=folder_prefix(os.getpid())))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        process = Process(
            log,
            sending,
            start_timeout_s=config.cluster.start_timeout_s,
            timeout_s=config.cluster.call_timeout_s,
            folder=folder,
            on_gpu=device_of(config).type == "cuda",
        )
        started = engine.start(number, model(folder), process)
        undo.pop_all()  # the engine owns the folder from here on
        return started


def start_engines(
    config: RunConfig,
    plan: Plan,
    inputs: TextInputs,
    sending: SendOptions,
    logs: Path,
    *,
    first: int = 0,
) -> list[RemoteEngine]:
    """The engines of one process: a child process, engine `first` of the run, or all servers."""
    engine = config.rollout.engine
    assert isinstance(engine, ServedEngine), "engines in the run's processes are not started"
    engines: list[RemoteEngine] = []
    try:
        for number in range(first, first + (len(engine.servers) or 1)):
            started = make_engine(config, plan, inputs, sending, number=number, logs=logs)
            engines.append(started)
    except BaseException:
        for started in engines:
            started.close()
        raise
    return engines


def as_one(engines: Sequence[RemoteEngine]) -> RemoteEngine | Router:
    """The engine, or a router over several."""
    return engines[0] if len(engines) == 1 else Router(engines)


@dataclass(frozen=True, slots=True)
class PolicyReceiver:
    """See collector.WeightReceiver. Sends the weights of the policy among the `workers` of this process to
    engines in other ones."""

    workers: Mapping[str, Any]
    engine: RemoteEngine | Router
    receivers: Sequence[str] = ()

    def receive(self, version: int, ticket: Mapping[str, Any] | None) -> None:  # noqa: ARG002
        """Load the current weights of the policy in this process into the engine, with adapters merged."""
        lm: CausalLM = self.workers["policy"].model
        self.engine.load_weights(version, lm.merged_weights() if lm.has_adapters else lm.named_weights())

    def close(self) -> None:
        """See WeightReceiver. Nothing to do: the collector closes the engine."""


def _model_folder(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, folder: Path, *, has_weights: bool
) -> str:
    """Folder from which an engine loads the model: the model's own folder if the weights are to be loaded
    from it, else one written to `folder`. Without weights it holds only the config, since weight syncs bring
    the weights."""
    model = config.model
    tokenizer.save_pretrained(folder)
    if model.path is not None:
        path = model_path(model)
        if has_weights:
            return path
        described = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        described.save_pretrained(folder)
        return str(folder)
    assert model.build is not None, "text needs a language model"
    built = build_model(model.build, tokenizer, dtype=TORCH_DTYPES[model.dtype], seed=config.run.seed)
    if has_weights:
        built.save_pretrained(folder)
    else:
        built.config.architectures = [type(built).__name__]
        built.config.save_pretrained(folder)
    return str(folder)
