"""Roles that share a device take turns."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from braid.cluster.interrupts import StopSignals
from braid.cluster.workers import InProcessGroup
from braid.config.schema import RunConfig
from braid.data.prompts import Prompts, PromptSet
from braid.data.worked import NO_EXAMPLES
from braid.models import roles
from braid.plan import derive
from braid.rollout.engines.native.engine import NativeEngine
from braid.trainer import build, collectors, commands
from braid.trainer.buffer import Buffer
from braid.trainer.cluster import ROWS, Cluster, OneProcess
from braid.trainer.inputs import TextInputs
from braid.trainer.rollouts import Rollouts
from braid.training.backends.single.backend import SingleBackend

from .conftest import LoadTiny

WATCHED = {
    Rollouts: ("wake", "gather", "sleep", "set_weights"),
    SingleBackend: ("to_host", "to_device"),
    Buffer: ("start_infer", "for_ranks"),
}


def test_the_engine_frees_its_cache_before_models_return_and_wakes_after_they_leave(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[NativeEngine] = []
    calls: list[tuple[str, int]] = []
    start = NativeEngine.__init__

    def started(engine: NativeEngine, *args: Any, **kwargs: Any) -> None:
        start(engine, *args, **kwargs)
        engines.append(engine)

    def watched(cls: type, name: str) -> None:
        call = getattr(cls, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            value = call(*args, **kwargs)
            calls.append((name, engines[-1].cache_bytes))
            return value

        monkeypatch.setattr(cls, name, recorded)

    monkeypatch.setattr(NativeEngine, "__init__", started)
    for cls, names in WATCHED.items():
        for name in names:
            watched(cls, name)
    commands.train(
        load_tiny("run.max_rounds=2", "train.passes_per_round=2", "eval.before=false", "eval.every_rounds=1")
    )
    sampling = ["to_host", "wake", "gather", "sleep", "to_device"]
    round_ = [*sampling, "start_infer", "for_ranks", "set_weights", *sampling]  # the last for the evaluation
    order = [name for name, _ in itertools.groupby(name for name, _ in calls)]
    assert order == ["sleep", "set_weights", *round_, *round_]
    assert {name for name, num_bytes in calls if num_bytes} == {"gather"}


class _Built(Exception):
    """A model of the trainer is built."""


class _Workers(Cluster):
    """Rollout workers with `engine`."""

    def __init__(self, config: RunConfig, engine: Any) -> None:
        self.config, self._engine = config, engine

    def make(self, *_: Any) -> dict[str, Any]:
        return {"policy": None, ROWS: None, "rollout": InProcessGroup("rollout", lambda _: self._engine)}

    def _add(self, *_: Any) -> Any:
        raise _Built

    def export(self, *_: Any) -> None: ...

    def leave(self) -> None: ...


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("pipeline", ["null", "{}"])
def test_an_engine_on_the_trainers_device_sleeps_before_any_model_is_built(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, is_here: bool, pipeline: str
) -> None:
    """vLLM and SGLang size their caches by the memory that they find free, and fail if it changes meanwhile.
    With a pipeline they never sleep."""
    calls: list[str] = []
    engine = SimpleNamespace(sleep=lambda: calls.append("sleep"), close=lambda: calls.append("close"))

    def built(*_: Any, **__: Any) -> Any:
        raise _Built

    loaded = load_tiny("rollout.engine=vllm", f"pipeline={pipeline}")
    plan = derive(loaded.config, None, "train")
    inputs = TextInputs(
        tokenizer=None,  # type: ignore[arg-type]
        train=PromptSet(Prompts([]), {}),
        eval=PromptSet(Prompts([]), {}),
        examples=NO_EXAMPLES,
        end_token_ids=(),
    )
    reporter: Any = SimpleNamespace(run_dir=SimpleNamespace(path=Path()))
    monkeypatch.setattr(roles, "make_policy", built)
    monkeypatch.setattr(collectors, "start_engines", lambda *_, **__: [engine])
    monkeypatch.setattr(collectors, "text_collector", lambda *_, **__: engine)
    here = OneProcess(loaded.config, has_threads=False)
    on_gpus = loaded.config.run.model_copy(update={"device": "cuda"})  # which the driver need not have
    cluster = here if is_here else _Workers(loaded.config.model_copy(update={"run": on_gpus}), engine)
    with pytest.raises(_Built):
        build.build(build.RunSpec(loaded, plan, inputs), reporter, None, StopSignals(), cluster)  # type: ignore[arg-type]
    here.leave()
    slept = ["sleep"] if pipeline == "null" else []
    assert calls == slept + (["close"] if is_here else [])
