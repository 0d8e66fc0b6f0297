"""A run stopped by signals in any phase saves its state, and ends after its resumes like an uninterrupted
one."""

from __future__ import annotations

import copy
import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.resume.test_kill_and_resume import CONFIG, numbers, weight_hashes

from braid.config.load import load_config
from braid.errors import RunInterrupted
from braid.report.reporter import Reporter
from braid.trainer import commands

NUM_ROUNDS = 5
MOMENTS = [
    ("warm_up", 1), ("evaluate", 1), ("rollout", 1), ("compute_advantages", 1), ("update", 1), ("sync_weights", 2), ("evaluate", 1),
]  # fmt: skip
"""A phase, and at which of its beginnings since the run was started or resumed the signal comes."""
NUMBERS = itertools.cycle((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


def config(folder: Path, pipeline: dict[str, int] | None = None, **run: Any) -> Path:
    tree: dict[str, Any] = copy.deepcopy(CONFIG) | {"pipeline": pipeline}
    tree["run"] |= {"max_rounds": NUM_ROUNDS, "output_dir": str(folder / "runs"), **run}
    tree["checkpoint"] = {}
    tree["eval"] = {"every_rounds": 2}
    folder.mkdir(exist_ok=True)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Sends this process a signal at the first of the moments in the list, and takes it from there."""
    moments: list[tuple[str, int]] = []
    begun: list[str] = []
    phase = Reporter.phase

    def begin(reporter: Reporter, verb: str) -> AbstractContextManager[None]:
        begun.append(verb)
        if verb == "build":
            begun.clear()
        elif moments and moments[0] == (verb, begun.count(verb)) and "stop" not in begun:
            moments.pop(0)
            begun.append("stop")
            os.kill(os.getpid(), next(NUMBERS))
        return phase(reporter, verb)

    monkeypatch.setattr(Reporter, "phase", begin)
    return moments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("within_s", "pipeline"),
    [pytest.param(60.0, None, marks=pytest.mark.nightly), (1e-3, None), (60.0, {"max_lag": 0})],
    ids=["the round is finished", "the round is abandoned", "pipelined"],
)
def test_a_run_stopped_in_each_phase_resumes_bit_exactly(
    tmp_path: Path, signals: list[tuple[str, int]], within_s: float, pipeline: dict[str, int] | None
) -> None:
    commands.train(load_config(config(tmp_path / "unbroken", pipeline)))
    broken = config(tmp_path / "broken", pipeline, stop_within_s=within_s, resume="latest")
    signals += MOMENTS
    while signals:
        with pytest.raises(RunInterrupted, match=r"the newest checkpoint is .*step_\d+$"):
            commands.train(load_config(broken))
    commands.train(load_config(broken))
    runs = [tmp_path / name / "runs/tiny" for name in ("unbroken", "broken")]
    assert numbers(runs[0]) == numbers(runs[1])
    assert weight_hashes(runs[0]) == weight_hashes(runs[1])
    assert sorted(p.name for p in (runs[0] / "samples").iterdir()) == sorted(
        p.name for p in (runs[1] / "samples").iterdir()
    )
