"""Runs whose processes are killed, stopped or interrupted: they go on or end, by name, and leave nothing behind.

Every signal goes to a process that descends from the one that the test itself has started.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from braid.config.load import load_config
from braid.controller import commands
from braid.errors import WorkerError
from braid.report.reporter import Reporter

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(300)]

_LIMIT_S = 60.0
"""For processes to come up or end; far above what they need, since other tests run beside."""
_ROUNDS = 3


def _config(folder: Path, **sections: dict[str, Any]) -> Path:
    """A run of two policy ranks, a critic apart from them, and a rollout worker."""
    task = {
        "kind": "procedural", "generator": "chain_sum", "size": 16,
        "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    }  # fmt: skip
    config: dict[str, Any] = {
        "run": {"name": "run", "output_dir": str(folder), "max_rounds": _ROUNDS, "device": "cpu", "num_threads": 1},
        "model": {"build": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2, "head_dim": 16}},
        "data": {"train": [task], "max_prompt_tokens": 128},
        "reward": {"parts": [{"kind": "function", "path": f"{folder}/even.py:even"}]},
        "rollout": {"prompts_per_round": 2, "group_size": 2, "sampling": {"max_new_tokens": 6}},
        "algorithm": {"advantage": "gae"},
        "train": {"backend": "fsdp2", "optimizer": {"lr": 1e-3}},
        "critic": {"train": {"backend": "single"}},
        "cluster": {"placement": {"policy": "0-1", "critic": "2", "rollout": "2"}},
        "checkpoint": {"every_rounds": 1},
        "report": {"console": "none", "tensorboard": False},
    }  # fmt: skip
    for name, section in sections.items():
        config[name] = {**config[name], **section}
    folder.mkdir(exist_ok=True)
    (folder / "even.py").write_text(
        "def even(text):\n    return sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)\n"
    )
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _workers(of: int, role: str) -> list[psutil.Process]:
    """The processes of a role in the run that process `of` drives, and in no other."""
    found: list[psutil.Process] = []
    for process in psutil.Process(of).children(recursive=True):
        try:
            if process.cmdline()[0].startswith(f"ray::{role}"):
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return found


class _Signals:
    """Sends a signal to the last worker of a role when a phase begins for the nth time since the signal before."""

    def __init__(self, number: int, *when: tuple[str, int, str]) -> None:
        self.number, self._left = number, list(when)
        self._begun = 0

    def attach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        phase = Reporter.phase

        def told(reporter: Reporter, verb: str) -> AbstractContextManager[None]:
            self._begins(verb)
            return phase(reporter, verb)

        monkeypatch.setattr(Reporter, "phase", told)

    def _begins(self, verb: str) -> None:
        if not self._left or self._left[0][0] != verb:
            return
        self._begun += 1
        if self._begun == self._left[0][1]:
            worker = _workers(os.getpid(), self._left.pop(0)[2])[-1]
            worker.send_signal(self.number)
            self._begun = 0


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(commands.export(folder / "run", output=folder / "export") / "model.safetensors")


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Neither processes nor shared memory of a test outlive it."""
    mine = psutil.Process()
    processes, segments = set(mine.children(recursive=True)), _segments()
    yield
    _await_end([child for child in mine.children(recursive=True) if child not in processes])
    _await_gone(_segments() - segments)


def _segments() -> set[Path]:
    return set(Path("/dev/shm").glob("braid*"))


def _await_gone(files: set[Path]) -> None:
    """Those of other runs on this machine go by themselves, as soon as they are read."""
    deadline = time.monotonic() + _LIMIT_S
    while left := [file for file in files if file.exists()]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def _await_end(processes: list[psutil.Process]) -> None:
    """Those that still run after the limit are named. One that nobody has waited for has ended too."""
    deadline = time.monotonic() + _LIMIT_S
    while left := [process for process in processes if _runs(process)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.usefixtures("nothing_is_left")
def test_a_run_whose_workers_are_killed_goes_on_and_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commands.train(load_config(_config(tmp_path / "unbroken")))

    kills = _Signals(
        signal.SIGKILL, ("collect", 2, "rollout"), ("improve", 1, "policy"), ("publish", 1, "critic")
    )
    kills.attach(monkeypatch)
    run = {"output_dir": str(tmp_path / "broken"), "max_restarts": 2}
    path = _config(tmp_path / "broken", run=run)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(WorkerError, match=r"critic worker 0 of 1 died while"),
    ):
        commands.train(load_config(path))
    told = [record.getMessage() for record in caplog.records if "the run failed" in record.getMessage()]
    assert ["rollout worker 0 of 1 died" in told[0], "policy worker 1 of 2 died" in told[1]] == [True, True]
    assert len(told) == 2
    commands.train(load_config(path, ["run.resume=latest"]))

    unbroken, broken = _weights(tmp_path / "unbroken"), _weights(tmp_path / "broken")
    assert broken.keys() == unbroken.keys()
    for name, tensor in unbroken.items():
        assert torch.equal(broken[name], tensor), name


@pytest.mark.usefixtures("nothing_is_left")
def test_a_worker_that_is_stopped_ends_the_run_at_the_deadline_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Signals(signal.SIGSTOP, ("improve", 2, "policy")).attach(monkeypatch)
    path = _config(tmp_path, cluster={"call_timeout_s": 15.0})
    with pytest.raises(WorkerError, match=r"policy workers .*1 of 2 did not answer in time while in \w+\(\)"):
        commands.train(load_config(path))


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_a_driver_that_is_interrupted_or_killed_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    path = _config(tmp_path, run={"max_rounds": 1000})
    command = [sys.executable, "-m", "braid.cli.main", "train", str(path)]
    # A session of its own, as in a terminal: Ctrl-C there reaches every process of the group.
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as driver:
        try:
            deadline = time.monotonic() + 2 * _LIMIT_S
            while not (tmp_path / "run/checkpoints/step_1").exists():
                assert driver.poll() is None, driver.communicate()[1]
                assert time.monotonic() < deadline, "the run never saved"
                time.sleep(0.05)
            started = psutil.Process(driver.pid).children(recursive=True)
            assert len(_workers(driver.pid, "policy")) == 2
            if number == signal.SIGINT:
                os.killpg(driver.pid, number)
                _, said = driver.communicate(timeout=_LIMIT_S)
                assert driver.returncode == 130, said
                assert "to go on: braid train" in said
            else:
                driver.kill()
                driver.wait(_LIMIT_S)
            _await_end(started)
        finally:
            driver.kill()
