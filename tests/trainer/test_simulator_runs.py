"""Training runs in simulators: settings that change no number, and rollouts of several episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.driven import drive
from tests.envs.test_simulator_processes import LIMIT_S

from braid.config.load import load_config
from braid.config.model import MlpSpec
from braid.envs.simulators.base import reset_prompts
from braid.envs.simulators.processes import SimulatorProcesses
from braid.models.mlp import MlpPolicy
from braid.plan import resolve
from braid.rollout.drivers.simulators import SimulatorDriver
from braid.rollout.engines.simulators import SimulatorEngine
from braid.trainer import commands

CONFIG = """
run: {name: it, max_rounds: 2, num_threads: 1, device: cpu}
model: {mlp: {hidden_sizes: [8], num_action_chunks: 2}}
env: {kind: gymnasium, id: Pendulum-v1, max_episode_steps: 5, num_envs: 4, processes: 0, eval_episodes: 3}
rollout: {prompts_per_round: 4, group_size: 1}
algorithm: {recipe: ppo, kl_coef: 0.0}
"""
TIMES = ("time/", "memory/", "flops/", "throughput/")


def _metrics(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    path = folder / "run.yaml"
    path.write_text(CONFIG)
    run = folder / str(len(list(folder.iterdir())))
    commands.train(load_config(path, [f"run.output_dir={run}", *overrides]))
    (metrics,) = run.glob("*/metrics.jsonl")
    rounds = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        {name: value for name, value in values.items() if not name.startswith(TIMES) and "per_s" not in name}
        for values in rounds
    ]


@pytest.mark.slow
def test_processes_stages_and_offloading_change_no_number(tmp_path: Path) -> None:
    of_rollouts = ["env.auto_reset=true", "env.max_steps_per_rollout=14", "algorithm.reward_level=action"]
    plain = _metrics(tmp_path, *of_rollouts)
    assert plain == _metrics(
        tmp_path, *of_rollouts, "env.processes=2", "env.pipeline_stages=2", "env.offload=true"
    )
    # 7 decisions: two episodes of 3 (5 env steps), and a third that is cut after one
    assert {line["env/truncated/rollout"] for line in plain if "env/truncated/rollout" in line} == {1 / 3}


def test_an_engine_that_sleeps_ends_the_processes_and_starts_them_for_the_next_episode(
    tmp_path: Path,
) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    config = load_config(tmp_path / "run.yaml", ["env.processes=1", "env.offload=true"]).config
    assert resolve(config).engines_in_turns == (0,), "it sleeps after each sampling"

    others = set(psutil.Process().children())
    simulator = SimulatorProcesses(
        "Pendulum-v1", 2, {"max_episode_steps": 3}, num_processes=2, timeout_s=LIMIT_S
    )
    policy = MlpPolicy(MlpSpec(), simulator.spaces, seed=0)
    engine = SimulatorEngine(simulator, policy, retries=0, offloads=True)
    driver, prompts = SimulatorDriver(engine, seed=0), reset_prompts("Pendulum-v1", 3)
    assert len(set(psutil.Process().children()) - others) == 2
    rewards = [t.reward for group in drive(driver, prompts) for t in group.trajectories]
    engine.sleep()
    assert not set(psutil.Process().children()) - others
    assert rewards == [t.reward for group in drive(driver, prompts) for t in group.trajectories]
    assert None not in rewards
    engine.close()
    assert not set(psutil.Process().children()) - others


def test_a_video_without_pictures_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _metrics(tmp_path, "env.video.save=true", "run.max_rounds=1", "rollout.max_invalid_fraction=1")
    assert "no video: the episodes that were filmed are all invalid (environment: no picture" in caplog.text
    assert "env.kwargs.render_mode=rgb_array" in caplog.text
