"""CPU threads of a run in this process and of its engines, and the line that says how processes divide the
cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from tests.plan.test_layout import TEXT

from braid.config.load import load_config
from braid.plan import resolve
from braid.rollout.engines.vllm.options import threads
from braid.trainer.commands import _divide_cores


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch has three threads, on a machine with four cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def _divided(caplog: pytest.LogCaptureFixture, *overrides: str) -> tuple[int, str]:
    """(threads of torch in this process, what was logged)."""
    config = load_config(None, [*TEXT, *overrides]).config
    with caplog.at_level("INFO"):
        _divide_cores(config, resolve(config, num_gpus=0))
    return torch.get_num_threads(), caplog.text


def test_one_process_keeps_what_torch_has_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert _divided(caplog) == (3, "")


def test_a_process_has_no_more_threads_than_its_container_has_cores(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert _divided(caplog) == (2, "")


def test_an_engine_that_samples_during_training_has_half_of_the_cores(
    caplog: pytest.LogCaptureFixture,
) -> None:
    count, log = _divided(caplog, "rollout.engine=vllm", "pipeline.max_lag=1")
    assert count == 2
    assert "CPU threads: 2 per process (run.num_threads=auto: 4 cores / processes" in log
    assert threads() == {"OMP_NUM_THREADS": "2"}


def test_the_users_number_stands(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert _divided(caplog, "run.num_threads=2")[0] == 3  # already set, at the start of the run
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert _divided(caplog)[0] == 3
    assert threads() == {}


def test_workers_are_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    threads, log = _divided(caplog, "train.backend=fsdp2", "cluster.placement={policy: 0-1, rollout: 2}")
    assert threads == 3  # the driver computes nothing
    assert "CPU threads: policy 2, rollout 4 (run.num_threads=auto: 4 cores / processes" in log
