"""Roles that share a device take turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from braid.plan import derive
from braid.rollout.engines.native import NativeEngine
from braid.trainer import commands, on_workers, one_process
from braid.trainer.data_plane import DataPlane
from braid.trainer.rollouts import Rollouts
from braid.training.group import GroupBackend

from .conftest import LoadTiny

WATCHED = {
    Rollouts: ("wake", "collect", "sleep", "set_weights"),
    GroupBackend: ("to_host", "to_device"),
    DataPlane: ("start_infer", "train"),
}


def test_the_engine_frees_its_cache_before_models_return_and_wakes_after_they_leave(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[NativeEngine] = []
    seen: list[tuple[str, int]] = []
    start = NativeEngine.__init__

    def started(engine: NativeEngine, *args: Any, **kwargs: Any) -> None:
        start(engine, *args, **kwargs)
        engines.append(engine)

    def watched(cls: type, name: str) -> None:
        call = getattr(cls, name)

        def told(*args: Any, **kwargs: Any) -> Any:
            value = call(*args, **kwargs)
            seen.append((name, engines[-1].cache_bytes))
            return value

        monkeypatch.setattr(cls, name, told)

    monkeypatch.setattr(NativeEngine, "__init__", started)
    for cls, names in WATCHED.items():
        for name in names:
            watched(cls, name)
    commands.train(
        load_tiny("run.max_rounds=2", "train.passes_per_round=2", "eval.before=false", "eval.every_rounds=1")
    )
    sampling = ["to_host", "wake", "collect", "sleep", "to_device"]
    round_ = [*sampling, "start_infer", "train", "set_weights", *sampling]  # the last for the evaluation
    order = [name for name, _ in itertools.groupby(name for name, _ in seen)]
    assert order == ["set_weights", *round_, *round_]
    assert {name for name, num_bytes in seen if num_bytes} == {"collect"}


class _Built(Exception):
    """A model of the trainer is built."""


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("pipeline", ["null", "{}"])
def test_an_engine_on_the_trainers_device_sleeps_before_any_model_is_built(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, is_here: bool, pipeline: str
) -> None:
    """vLLM and SGLang size their caches by the memory that they find free, and fail if it changes meanwhile. With a
    pipeline they never sleep."""
    calls: list[str] = []
    engine = SimpleNamespace(
        sleep=lambda: calls.append("sleep"),
        start_on=lambda rank, method: SimpleNamespace(wait=lambda: calls.append(f"{method} {rank}")),
        close=lambda: calls.append("close"),
    )

    def built(*_: Any, **__: Any) -> Any:
        raise _Built

    config = load_tiny("rollout.engine=vllm", f"pipeline={pipeline}").config
    plan: Any = derive(config, None, "train")
    inputs: Any = SimpleNamespace(tokenizer=None, prompts={}, examples=SimpleNamespace(examples=None))
    reporter: Any = SimpleNamespace(run_dir=SimpleNamespace(path=Path()))
    monkeypatch.setattr(one_process, "make_policy", built)
    monkeypatch.setattr(one_process, "start_engines", lambda *_: [engine])
    cluster: Any = SimpleNamespace(groups={"policy": None, "rollout": engine}, backend=built)
    build: Callable[[], Any] = (
        partial(one_process._policy_and_engine, config, plan, inputs, reporter)
        if is_here
        else partial(on_workers._parts_on, cluster, config, plan, inputs, reporter, None)  # type: ignore[arg-type]
    )
    with pytest.raises(_Built):
        build()
    slept = ["sleep" if is_here else "sleep 0"] if pipeline == "null" else []
    assert calls == slept + (["close"] if is_here else [])
