"""Roles that share a device take turns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from braid.controller import commands
from braid.controller.data_plane import DataPlane
from braid.controller.rollouts import Rollouts
from braid.rollout.engines.native import NativeEngine
from braid.training.group import GroupBackend

from .conftest import LoadTiny

WATCHED = {
    Rollouts: ("wake", "collect", "score", "sleep", "publish"),
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
    sampling = ["to_host", "wake", "collect", "score", "sleep", "to_device"]
    round_ = [*sampling, "start_infer", "train", "publish", *sampling]  # the last for the evaluation
    order = [name for name, _ in itertools.groupby(name for name, _ in seen)]
    assert order == ["publish", *round_, *round_]
    assert {name for name, num_bytes in seen if num_bytes} == {"collect", "score"}
