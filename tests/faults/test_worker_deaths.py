"""Runs whose processes are killed, stopped or interrupted continue, or end and name the process, and leave
nothing behind.

Every signal goes to a process that descends from the one that the test itself has started. Some kinds of
worker are killed in some phases; with BRAID_SOAK=1 each kind in each, which takes a quarter of an hour.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.leftovers import LIMIT_S, await_end
from tests.needs import WITH_VLLM

from braid.config.load import load_config
from braid.errors import RunInterrupted, WorkerError
from braid.report.reporter import Reporter
from braid.trainer import commands

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

ROUNDS = 5


@dataclass(frozen=True)
class Unbroken:
    """The policy's weights after each round of a run whose driver is killed in a later one, and the processes
    that it had started."""

    weights: list[dict[str, torch.Tensor]]
    processes: list[psutil.Process]


_SOAK = os.environ.get("BRAID_SOAK") == "1"
_PHASES = ("rollout", "build", "credit", "update", "sync_weights", "save")
_KILLS = (
    [(phase, 1, role) for phase in _PHASES for role in ("policy", "critic", "reference", "rollout", "rows")]
    if _SOAK
    else [
        ("rollout", 2, "rollout"),
        ("update", 1, "policy"),
        ("sync_weights", 1, "critic"),
    ]
)
_WHERE = r".* of the \w+ phase|(\w+ was )?in (sleep|wake|forget|to_host|to_device)\(\)"
"""Between phases models and engines take turns on their devices."""
_ENGINE_KILLS = [
    (phase, 1, "engine")
    for phase in (("rollout", "compute_advantages", "sync_weights", "save") if _SOAK else ())
]


def run_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """A run of two policy ranks, a critic apart from them, a rollout worker and a reference: on the ranks or,
    with BRAID_SOAK=1, in a separate process."""
    task = {
        "kind": "procedural", "generator": "chain_sum", "size": 16,
        "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    }  # fmt: skip
    config: dict[str, Any] = {
        "run": {"name": "run", "output_dir": str(folder), "max_rounds": ROUNDS, "device": "cpu", "num_threads": 1},
        "model": {"build": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2, "head_dim": 16}},
        "data": {"train": [task], "max_prompt_tokens": 128},
        "reward": {"parts": [{"kind": "function", "path": f"{folder}/even.py:even"}]},
        "rollout": {"prompts_per_round": 2, "group_size": 2, "sampling": {"max_new_tokens": 6}},
        "algorithm": {"advantage": "gae", "kl_coef": 0.01},
        "train": {"backend": "fsdp2", "optimizer": {"lr": 1e-3}},
        "critic": {"train": {"backend": "single"}},
        "reference": {"train": {"backend": "single"}} if _SOAK else {},
        "cluster": {
            "placement": {"policy": "0-1", "critic,reference,rollout": "2"} if _SOAK
            else {"policy,reference": "0-1", "critic,rollout": "2"}
        },
        "checkpoint": {"every_rounds": 1, "keep": None},
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


def _workers(driver_pid: int, role: str) -> list[psutil.Process]:
    """The processes of a role, or of vLLM, in the run that process `driver_pid` drives, and in no other."""
    workers: list[psutil.Process] = []
    for process in psutil.Process(driver_pid).children(recursive=True):
        try:
            command = process.cmdline()
            is_engine = "braid.rollout.engines.vllm.process" in command
            if is_engine if role == "engine" else command[0].startswith(f"ray::{role}"):
                workers.append(process)
        except (psutil.Error, IndexError):
            continue
    return workers


class _Signals:
    """Sends a signal to the last worker of a role, or to the driver, when a phase begins for the nth time
    since the signal before; in the build as soon as there is one."""

    def __init__(self, number: int, *when: tuple[str, int, str]) -> None:
        self.number, self._left = number, list(when)
        self._begun = 0
        self.sent_s: list[float] = []

    def attach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        phase = Reporter.phase

        def phased(reporter: Reporter, verb: str) -> AbstractContextManager[None]:
            self._begins(verb)
            return phase(reporter, verb)

        monkeypatch.setattr(Reporter, "phase", phased)

    def _begins(self, verb: str) -> None:
        if not self._left or self._left[0][0] != verb:
            return
        self._begun += 1
        if self._begun == self._left[0][1]:
            self._begun, role = 0, self._left.pop(0)[2]
            if verb == "build":
                threading.Thread(target=self._send, args=[role, _workers(os.getpid(), role)]).start()
            else:
                self._send(role)

    def _send(self, role: str, earlier: Sequence[psutil.Process] = ()) -> None:
        deadline = time.monotonic() + LIMIT_S
        workers = [psutil.Process()] if role == "driver" else []
        while not workers:
            assert time.monotonic() < deadline, f"there is no {role}"
            time.sleep(0.02)
            workers = [worker for worker in _workers(os.getpid(), role) if worker not in earlier]
        self.sent_s.append(time.monotonic())
        workers[-1].send_signal(self.number)


@contextmanager
def driven(path: Path, step: int) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A driver that has saved that step, and the processes that it has started. It has a session of its own,
    as in a terminal, where Ctrl-C reaches every process of the group."""
    command = [sys.executable, "-m", "braid.cli.main", "train", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as driver:
        try:
            deadline = time.monotonic() + 2 * LIMIT_S  # Ray and six workers start, on a busy machine
            while not (path.parent / f"run/checkpoints/step_{step}").exists():
                assert driver.poll() is None, driver.communicate()[1]
                assert time.monotonic() < deadline, "the run never saved"
                time.sleep(0.05)
            assert len(_workers(driver.pid, "policy")) == 2
            yield driver, psutil.Process(driver.pid).children(recursive=True)
        finally:
            driver.kill()


def weights(folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    exported = commands.export(folder / "run", output=folder / f"export_{step}", step=step)
    return load_file(exported / "model.safetensors")


def assert_equal(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """To the bit."""
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        assert torch.equal(mine[name], tensor), name


def test_a_killed_driver_leaves_no_process(unbroken: Unbroken) -> None:
    await_end(unbroken.processes)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kills", [_KILLS[1:2], pytest.param(_KILLS, marks=pytest.mark.nightly)], ids=len)
def test_a_run_that_is_interrupted_and_whose_workers_are_killed_names_each_and_goes_on_to_the_same_bits(
    unbroken: Unbroken,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kills: list[tuple[str, int, str]],
) -> None:
    """Ctrl-C reaches the driver and its workers while a round runs, which is given up. The rounds after it
    lose a worker of each kind in `kills`."""
    monkeypatch.setattr(commands, "_LONGEST_PAUSE_S", 0.1)
    path = run_config(tmp_path, run={"stop_within_s": 1e-3, "max_rounds": 1000})
    with driven(path, 1) as (driver, started):
        os.killpg(driver.pid, signal.SIGINT)
        _, said = driver.communicate(timeout=LIMIT_S)
        assert driver.returncode == 130, said
        assert "to resume: braid train" in said
        await_end(started)

    _Signals(signal.SIGKILL, *kills).attach(monkeypatch)
    with caplog.at_level(logging.WARNING):
        commands.train(
            load_config(run_config(tmp_path, run={"max_restarts": len(kills), "resume": "latest"}))
        )
    failures = [record.getMessage() for record in caplog.records if "the run failed" in record.getMessage()]
    for (phase, _, role), text in zip(kills, failures, strict=True):
        assert re.search(rf"WorkerError: {role} worker \d of \d died while ({_WHERE}): ", text), (phase, text)

    assert_equal(weights(tmp_path), unbroken.weights[-1])


@pytest.mark.nightly
@WITH_VLLM
@pytest.mark.timeout(3000)
def test_an_engine_killed_while_idle_ends_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(commands, "_LONGEST_PAUSE_S", 0.1)
    _Signals(signal.SIGKILL, *_ENGINE_KILLS, ("update", 1, "engine")).attach(monkeypatch)
    path = run_config(
        tmp_path,
        run={"max_restarts": len(_ENGINE_KILLS)},
        model={"build": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 1, "num_kv_heads": 1, "head_dim": 32}},
        rollout={"engine": {"kind": "vllm", "max_running": 8}},
        algorithm={"advantage": "grpo", "kl_coef": 0.0},
        train={"backend": "single"},
        cluster={"placement": {"policy": "0", "rollout": "1"}},
    )  # fmt: skip
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(
            WorkerError, match=r"rollout worker 0 of 1 .*vLLM engine 0 exited \(killed by SIGKILL\)"
        ),
    ):
        commands.train(load_config(path))
    failures = [record.getMessage() for record in caplog.records if "the run failed" in record.getMessage()]
    assert ["vLLM engine 0 exited" in text for text in failures] == [True] * len(_ENGINE_KILLS)


@pytest.mark.nightly
def test_a_run_whose_worker_is_stopped_restarts_within_ten_seconds_of_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    builds_s, phase = [], Reporter.phase

    def phased(reporter: Reporter, verb: str) -> AbstractContextManager[None]:
        if verb == "build":
            builds_s.append(time.monotonic())
        return phase(reporter, verb)

    monkeypatch.setattr(Reporter, "phase", phased)
    signals = _Signals(signal.SIGSTOP, ("update", 2, "policy"))
    signals.attach(monkeypatch)
    timeout_s = 15.0
    path = run_config(
        tmp_path,
        run={"max_rounds": 2, "max_restarts": 1},
        algorithm={"advantage": "grpo", "kl_coef": 0.0},
        cluster={"placement": {"policy": "0-1", "rollout": "2"}, "call_timeout_s": timeout_s},
    )
    with caplog.at_level(logging.WARNING):
        commands.train(load_config(path))

    (failure,) = (text for text in caplog.messages if "the run failed" in text)
    assert re.search(r"policy workers .*1 of 2 did not answer in time while in \w+\(\)", failure), failure
    passed_s = builds_s[1] - signals.sent_s[0]
    logging.getLogger(__name__).warning(
        "%.1f s from SIGSTOP to the restart, deadline %g s", passed_s, timeout_s
    )
    assert passed_s < timeout_s + 10.0, "the limit in docs/runtime.md"


@pytest.mark.parametrize(
    ("phase", "role"),
    [
        ("sync_weights", "rollout"),
        pytest.param("sync_weights", "policy", marks=pytest.mark.nightly),
        pytest.param("rollout", "policy", marks=pytest.mark.nightly),
    ],
)
def test_a_signal_ends_a_run_that_waits_for_a_stopped_worker(
    phase: str, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer's ranks save the round if it is the engine that is stopped."""
    _Signals(signal.SIGSTOP, (phase, 2, role)).attach(monkeypatch)
    signals = _Signals(signal.SIGTERM, (phase, 2, "driver"))
    signals.attach(monkeypatch)
    path = run_config(
        tmp_path,
        run={"stop_within_s": 3.0},
        algorithm={"advantage": "grpo", "kl_coef": 0.0},
        cluster={"placement": {"policy": "0-1", "rollout": "2"}},
        checkpoint={"every_rounds": 0},
    )
    with caplog.at_level(logging.WARNING), pytest.raises(RunInterrupted) as interrupted:
        commands.train(load_config(path))
    passed_s = time.monotonic() - signals.sent_s[0]
    assert passed_s < 3.0 + 20.0, "the limit in docs/runtime.md"
    if role == "rollout":
        assert interrupted.value.checkpoint == tmp_path / "run/checkpoints/step_1"
    else:
        assert "round 1 is not saved: a worker has not answered" in caplog.text
