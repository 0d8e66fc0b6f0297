"""A run whose policy trains on worker processes is the run of one process, and each can go on from the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from braid.config.load import load_config
from braid.controller import commands

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

_TASK = {
    "kind": "procedural",
    "generator": "chain_sum",
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "size": 32,
}


_REWARD = """
def even(text):
    return sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)
"""


def _run(folder: Path, name: str, *, rounds: int, sharded: bool, resume: str = "none") -> Path:
    build = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2, "head_dim": 16}
    config: dict[str, Any] = {
        "run": {
            "name": name, "output_dir": str(folder), "max_rounds": rounds, "device": "cpu", "num_threads": 1,
            "resume": resume,
        },
        "model": {"build": build},
        "data": {"train": [_TASK], "max_prompt_tokens": 128},
        "sft": {"data": [{**_TASK, "response_key": "answer"}], "steps": 2},
        "reward": {"parts": [{"kind": "function", "path": f"{folder}/even.py:even"}]},
        "rollout": {"prompts_per_round": 4, "group_size": 4, "sampling": {"max_new_tokens": 8}},
        "algorithm": {"kl_coef": 0.01},
        "train": {"backend": "fsdp2" if sharded else "single", "optimizer": {"lr": 1e-3, "eps": 1e-5}, "steps_per_pass": 2},
        "checkpoint": {"every_rounds": 1, "keep": None},
        "report": {"console": "none", "tensorboard": False},
    }  # fmt: skip
    if sharded:
        config["cluster"] = {"placement": {"policy": "0-1"}}
    (folder / "even.py").write_text(_REWARD)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    commands.train(load_config(path))
    return folder / name


def _metrics(run: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def _weights(run: Path, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(commands.export(run, output=folder / f"{run.name}-export") / "model.safetensors")


def test_runs_on_either_layout_agree_and_go_on_from_each_other(tmp_path: Path) -> None:
    alone = _run(tmp_path, "alone", rounds=3, sharded=False)
    group = _run(tmp_path, "group", rounds=2, sharded=True)
    # Rewards hang on sampled tokens, which are the same as long as weights agree to about float32's rounding.
    assert _metrics(group, "reward/mean") == pytest.approx(_metrics(alone, "reward/mean")[:2])
    assert _metrics(group, "policy/loss") == pytest.approx(_metrics(alone, "policy/loss")[:2], abs=1e-4)
    _run(tmp_path, "group", rounds=3, sharded=False, resume="latest")
    assert _metrics(group, "reward/mean") == pytest.approx(_metrics(alone, "reward/mean"))
    mine, other = _weights(group, tmp_path), _weights(alone, tmp_path)
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        # AdamW divides small gradients, and their roundings, by their own size: a tenth of one step of 1e-3.
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
