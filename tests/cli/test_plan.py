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


def test_measured_rates_give_the_time_of_a_round(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["model.build={hidden_size: 32, intermediate_size: 48, num_heads: 2, num_kv_heads: 1}"]
    sizes += ["model.build.head_dim=16", "model.build.num_layers=1", "run.num_threads=1"]
    lengths = ["--prompt-tokens", "8", "--answer-tokens", "16"]
    assert main(["plan", config, *sizes, "--measure", "--json", *lengths]) == OK
    data = json.loads(capsys.readouterr().out)
    assert data["lengths"] == {"prompt": 8, "answer": 16}
    assert data["round_s"] == pytest.approx(sum(time["seconds"] for time in data["times"]))
    assert data["round_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--answer-tokens", "8"], "add --measure"),
        (["--measure", "--answer-tokens", "0"], "'0' is not a number of tokens, such as 200"),
        (
            ["--measure", "--for", "eval", "data.eval=[{kind: procedural, generator: chain_sum}]"],
            "--measure:",
        ),
    ],
)
def test_lengths_and_measures_that_make_no_sense_are_refused(
    arguments: list[str], message: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, *arguments]) == USAGE
    assert message in capsys.readouterr().err
