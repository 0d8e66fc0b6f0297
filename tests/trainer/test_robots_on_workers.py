"""Simulators and robot policies on workers match a run in one process, which can resume them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.envs import unruly

from braid.cluster.ray import connect, disconnect
from braid.config.cluster import ClusterConfig
from braid.config.load import load_config
from braid.errors import WorkerError
from braid.trainer import commands

from .test_vla_runs import ADAPTERS, OFT, PI0, write_config

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("workers")]

CARTPOLE: dict[str, Any] = {
    "model": {"mlp": {"hidden_sizes": [16]}},
    "env": {"kind": "gymnasium", "id": "CartPole-v1", "num_envs": 8, "eval_episodes": 8},
    "rollout": {"prompts_per_round": 16, "group_size": 1},
    "algorithm": {"recipe": "ppo", "kl_coef": 0.0},
    "train": {"optimizer": {"lr": 1e-3, "eps": 1e-5}, "steps_per_pass": 2},
    "eval": {"every_rounds": 1},
    "checkpoint": {"every_rounds": 1, "keep": None},
}
APART = {"policy,critic": "0-1", "rollout": "2-3"}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all runs."""
    connect(ClusterConfig(), num_processes=8)
    yield
    disconnect()


def _train(path: Path, *overrides: str) -> list[dict[str, float]]:
    loaded = load_config(path, list(overrides))
    commands.train(loaded)
    run = loaded.config.run
    text = (path.parent / run.output_dir / run.name / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def _cartpole(folder: Path) -> Path:
    run = {"max_rounds": 2, "device": "cpu", "num_threads": 1, "output_dir": str(folder)}
    report = {"console": "none", "tensorboard": False}
    (folder / "run.yaml").write_text(yaml.safe_dump({**CARTPOLE, "run": run, "report": report}))
    return folder / "run.yaml"


def _assert_alike(mine: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    """Every metric but those of clock and machine: equal but for the order of sums in float32."""
    for one, two in zip(mine, other, strict=True):
        kept = [
            {k: v for k, v in line.items() if not k.startswith(("time", "memory/")) and not k.endswith("_s")}
            for line in (one, two)
        ]
        assert kept[0] == pytest.approx(kept[1], rel=1e-3, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("fsdp2", marks=pytest.mark.nightly),
        "single",
        pytest.param("deepspeed", marks=pytest.mark.nightly),
    ],
)
def test_simulators_and_a_perceptron_on_workers_match_one_process(tmp_path: Path, backend: str) -> None:
    path = _cartpole(tmp_path)
    placement = APART if backend != "single" else {"policy": "0", "critic": "1", "rollout": "2"}
    on_workers = [f"train.backend={backend}", f"cluster.placement={json.dumps(placement)}"]
    alone = _train(path, "run.name=alone")
    _assert_alike(_train(path, "run.name=apart", *on_workers), alone)
    saved = (tmp_path / "apart" / "checkpoints").glob("step_*")
    middle = sorted(saved, key=lambda folder: int(folder.name.removeprefix("step_")))[1]
    resumed = _train(path, "run.name=resumed", f"run.resume={middle}", "run.allow_changes=true")
    _assert_alike(resumed[-1:], alone[-1:])


@pytest.mark.parametrize(
    ("placement", "overrides"),
    [
        pytest.param(
            {"policy,critic": "0", "rollout": "1", "env": "2-3"},
            [],
            id="several per rollout worker",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"policy,critic": "0", "rollout": "0-1", "env": "2"},
            ["env.pipeline_stages=2", "env.offload=true", "env.processes=2"],
            id="stages and offload",
        ),
    ],
)
def test_simulators_on_devices_of_their_own_match_one_process(
    tmp_path: Path, placement: dict[str, str], overrides: list[str]
) -> None:
    path = _cartpole(tmp_path)
    alone = _train(path, "run.name=alone")
    apart = _train(path, "run.name=apart", f"cluster.placement={json.dumps(placement)}", *overrides)
    _assert_alike(apart, alone)
    assert len(list((tmp_path / "apart" / "logs").glob("env-*.log"))) == 2


@pytest.mark.nightly
def test_a_worker_of_simulators_that_dies_ends_the_run_and_is_named(tmp_path: Path) -> None:
    placement = json.dumps({"policy,critic": "0", "rollout": "1", "env": "2"})
    (first := tmp_path / "first").touch()
    crashing_env = [
        "env.processes=0",
        f"env.id={Path(unruly.__file__)}:Unruly",
        f"env.kwargs={{act: {unruly.CRASH}, first: {first}}}",
    ]
    with pytest.raises(WorkerError, match=r"env worker 0 of 1 died while rollout was in"):
        _train(_cartpole(tmp_path), *crashing_env, f"cluster.placement={placement}")


@pytest.mark.parametrize(
    ("vla", "lora"),
    [
        pytest.param(OFT, None, id="openvla_oft"),
        pytest.param(PI0, None, id="pi0", marks=pytest.mark.nightly),
        pytest.param(OFT, ADAPTERS, id="adapters", marks=pytest.mark.nightly),
    ],
)
def test_a_vla_policy_trains_on_several_ranks_as_in_one_process(
    tmp_path: Path, vla: dict[str, Any], lora: dict[str, Any] | None
) -> None:
    path = write_config(tmp_path, vla, lora=lora)
    alone = _train(path, "run.name=alone")
    placement = json.dumps({"policy": "0-1", "rollout": "0-1"})
    sharded = _train(path, "run.name=apart", "train.backend=fsdp2", f"cluster.placement={placement}")
    _assert_alike(sharded, alone)


@pytest.mark.nightly
def test_a_pipelined_run_of_simulators_on_workers_ends(tmp_path: Path) -> None:
    placement = json.dumps({"policy,critic": "0", "rollout": "1-2"})
    lines = _train(
        _cartpole(tmp_path), "run.name=stream", "pipeline.max_lag=1", f"cluster.placement={placement}"
    )
    assert lines[-1]["pipeline/lag_max"] <= 1
    assert lines[-1]["eval/all/mean@1"] > 0
