"""`braid plan`: what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from braid.cli.main import OK, USAGE, main

CONFIG = """\
run: {max_rounds: 10, device: cpu}
model: {build: {}}
data: {train: [{kind: procedural, generator: chain_sum, size: 64}]}
reward: {parts: [{kind: exact}]}
rollout: {prompts_per_round: 16, group_size: 4}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    return str(path)


def test_it_prints_memory_and_disk_without_a_run(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config]) == OK
    out = capsys.readouterr().out
    for text in ("optimizer states", "activations", "KV cache", "policy update needs most", "checkpoints"):
        assert text in out.replace("\n", " ")
    assert not (Path(config).parent / "runs").exists()


def test_a_run_that_does_not_fit_says_so(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "--device-memory", "0.1"]) == OK
    assert "It does not fit" in capsys.readouterr().out


def test_json_has_every_use_in_bytes(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "--json", "--device-memory", "1"]) == OK
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["capacity_bytes"] == 2**30
    in_stage = [use["num_bytes"] for use in device["uses"] if device["stage"] in use["stages"]]
    assert sum(in_stage) == device["peak_bytes"]


@pytest.mark.parametrize("text", ["-1", "much", "nan"])
def test_a_wrong_device_memory_is_refused(text: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, f"--device-memory={text}"]) == USAGE
    assert f"{text!r} is not a number of GiB, such as 80" in capsys.readouterr().err


def test_a_robots_policy_has_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "examples/cartpole.yaml"]) == OK
    assert "memory" in capsys.readouterr().out
