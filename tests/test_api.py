"""The Python API: in a script, with a function defined there, in a running event loop, and with dicts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.envs.odd import RAISED, UnreadableError

import braid
from braid.errors import ConfigError, ReportError

BUILD = {
    "hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 16,
}  # fmt: skip


def config(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    sums = {"kind": "procedural", "generator": "chain_sum", "size": 20}
    return {
        "run": {"name": "tiny", "output_dir": str(folder), "max_rounds": 2, "device": "cpu"},
        "model": {"build": BUILD},
        "data": {"train": [sums], "eval": [{**sums, "size": 2, "seed": 100}], "max_prompt_tokens": 160},
        "rollout": {"prompts_per_round": 2, "group_size": 2, "sampling": {"max_new_tokens": 4}},
        "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 1},
        **sections,
    }


def even(text: str) -> float:
    return sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)


def test_a_dict_trains_with_a_reward_and_callbacks_and_the_run_can_be_read(tmp_path: Path) -> None:
    rounds: list[int] = []

    def watch(round_: int, metrics: Mapping[str, float]) -> None:
        rounds.append(round_)
        assert not round_ or "reward/part/even" in metrics

    run = braid.train(config(tmp_path), ["run.max_rounds=1"], reward=even, callbacks=[watch])
    assert rounds == [0, 1]
    assert run.is_target_reached
    assert run.path == tmp_path / "tiny"
    again = braid.load_run(tmp_path / "tiny")
    assert again.summary["status"] == "finished"
    assert [line["round"] for line in again.metrics] == [0, 1]
    assert len(list(again.samples(1))) == 4
    with pytest.raises(
        FileNotFoundError, match=r"of round 4 are not stored in .*samples; stored rounds: 1 \(report\."
    ):
        again.samples(4)
    assert again.config.rollout.group_size == 2
    assert (again.export(tmp_path / "model") / "config.json").is_file()
    assert braid.evaluate(run.path, reward=even).path.name == "tiny-eval"


def test_it_works_while_an_event_loop_runs(tmp_path: Path) -> None:
    async def notebook() -> braid.Run:
        return braid.train(config(tmp_path), ["run.max_rounds=1"], reward=even)

    assert asyncio.run(notebook()).summary["status"] == "finished"


@pytest.mark.parametrize("kind", RAISED.values(), ids=RAISED)
def test_a_callback_that_raises_ends_the_run(tmp_path: Path, kind: type[BaseException]) -> None:
    def fail(round_: int, _: Mapping[str, float]) -> None:
        raise kind(f"not round {round_}")

    text = "its text cannot be shown: ValueError" if kind is UnreadableError else "not round 0"
    expected = rf"a callback raised {kind.__name__}: {text} \(test_api.py:\d+\)"
    with pytest.raises(ReportError, match=expected):
        braid.train(config(tmp_path), reward=even, callbacks=[fail])


@pytest.mark.parametrize("way", ["returns", "raises"])
def test_a_callback_stops_the_run_with_a_checkpoint(tmp_path: Path, way: str) -> None:
    def stop(round_: int, _: Mapping[str, float]) -> object:
        if round_ == 1 and way == "raises":
            raise braid.StopTraining
        return braid.STOP if round_ == 1 else None

    run = braid.train(config(tmp_path), ["run.max_rounds=9"], reward=even, callbacks=[stop])
    assert (run.summary["status"], run.summary["round"], run.summary["error"]) == ("stopped", 1, None)
    assert [line["round"] for line in run.metrics] == [0, 1]
    again = braid.train(run.path, ["run.resume=latest", "run.max_rounds=2"], reward=even)
    assert (again.path, again.summary["status"], again.summary["round"]) == (run.path, "finished", 2)


def test_a_function_of_an_earlier_process_is_asked_for(tmp_path: Path) -> None:
    settings = config(tmp_path, reward={"parts": [{"kind": "function", "path": "braid.given.lost"}]})
    with pytest.raises(ConfigError, match=r"'lost' was passed to braid\.train from Python and is not stored"):
        braid.train(settings)
    with pytest.raises(ConfigError, match="holds no run"):
        braid.load_run(tmp_path)
    with pytest.raises(AttributeError, match="it has STOP, Run"):
        _ = braid.fit


SCRIPT = """
import braid
run = braid.train({config!r}, reward=lambda text: len(text) / 4)
print(run.summary["status"])
"""


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
def test_a_script_without_a_guard_trains_on_workers_with_a_function_of_its_own(tmp_path: Path) -> None:
    settings = config(tmp_path, cluster={"placement": {"policy": 0, "rollout": 1}})
    (tmp_path / "script.py").write_text(SCRIPT.format(config=settings))
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["finished"], done.stderr
