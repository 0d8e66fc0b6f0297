"""Robot policies learn through the whole loop: an arm by PPO, a vision-language-action policy by imitation
and GRPO."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from numpy.typing import NDArray
from tests.models.vla_checkpoints import tiny_raw, tiny_tokenizer

from braid.config.load import load_config
from braid.data.lerobot import Demonstration, write_demonstrations
from braid.models.vla.openvla import Checkpoint, OpenVla, save_openvla
from braid.trainer import commands

EXAMPLES = Path(__file__).parents[2] / "examples"
NEAR = 0.2
CLUMSINESS = 0.35
"""Standard deviation of the demonstrated actions."""


class Spot(gymnasium.Env[dict[str, Any], Any]):
    """One step: point at the bright spot of the image, with an error below NEAR."""

    observation_space = spaces.Dict(
        {"image": spaces.Box(0, 255, (24, 24, 3), np.uint8), "instruction": spaces.Text(20)}
    )
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict]:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-0.8, 0.8)
        return self._observed(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict]:
        is_success = abs(float(action[0]) - self.place) < NEAR
        return self._observed(), float(is_success), True, False, {"success": is_success}

    def _observed(self) -> dict[str, Any]:
        image, column = np.zeros((24, 24, 3), np.uint8), round(11.5 + 11.5 * self.place)
        image[:, max(column - 2, 0) : column + 3] = 255
        return {"image": image, "instruction": "push red cube"}


SPOT: dict[str, Any] = {
    "run": {"name": "spot", "max_rounds": 30, "device": "cpu", "output_dir": "runs"},
    "model": {
        "path": "model",
        "vla": {
            "kind": "openvla_oft", "form": "rlinf", "action_dim": 1, "num_action_chunks": 1, "max_prompt_tokens": 20,
            "center_crop": False,
        },
    },
    "env": {"kind": "gymnasium", "id": f"{__file__}:Spot", "num_envs": 64, "processes": 0, "eval_episodes": 500},
    "sft": {"demonstrations": "demonstrations", "steps": 500, "rows_per_step": 32, "optimizer": {"lr": 3.0e-3}},
    "rollout": {"prompts_per_round": 16, "group_size": 16},
    "algorithm": {"recipe": "grpo"},
    "train": {"optimizer": {"lr": 3.0e-3}, "steps_per_pass": 2},
    "eval": {"before": True, "every_rounds": 30},
    "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 0},
}  # fmt: skip


def _evaluations(config: Path, overrides: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results of the first and the last evaluation of a run."""
    loaded = load_config(config, ["run.output_dir=runs", "report.console=none", *overrides])
    evals = json.loads((commands.train(loaded).run_dir / "summary.json").read_text())["eval"]
    return evals["first"]["all"], evals["last"]["all"]


def _write_model(folder: Path) -> None:
    raw = tiny_raw(fused=False, bins=32)
    action = {"q01": [-1.0], "q99": [1.0]}
    checkpoint = replace(Checkpoint.parse(raw, "test"), statistics={"spot": {"action": action}})
    torch.manual_seed(0)
    save_openvla(OpenVla(checkpoint).state_dict(), checkpoint, tiny_tokenizer(), folder)


def _demonstrate(folder: Path, num_frames: int) -> None:
    env, rng = Spot(), np.random.default_rng(0)
    images, actions = [], []
    for seed in range(num_frames):
        images.append(env.reset(seed=10**6 + seed)[0]["image"])
        actions.append([np.clip(env.place + rng.normal(0, CLUMSINESS), -1, 1)])
    shown: dict[str, NDArray] = {"image": np.stack(images)}
    write_demonstrations(folder, [Demonstration(shown, np.array(actions, np.float32), "push red cube")])


@pytest.mark.slow
@pytest.mark.nightly
def test_a_vla_policy_surpasses_its_demonstrator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _write_model(tmp_path / "model")
    _demonstrate(tmp_path / "demonstrations", 2000)
    Path("spot.yaml").write_text(yaml.safe_dump(SPOT))
    first, last = _evaluations(Path("spot.yaml"), [])
    # The demonstrator succeeds with probability erf(0.2 / 0.35 / sqrt(2)) = 0.43; chance is at most 0.2, the
    # optimum 1. The standard error of 500 episodes is 0.022.
    assert 0.3 < first["pass@1"] < 0.55
    assert last["pass@1"] > first["pass@1"] + 0.25
