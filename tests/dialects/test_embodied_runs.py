"""RLinf's embodied files run with tiny policies: the documentation's in MetaWorld by its own keys and on the
tabletop by braid's, and RLinf's example of pi0 on 50 tasks of MetaWorld."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.models.vla_checkpoints import tiny_pi0, tiny_raw, tiny_tokenizer
from tests.needs import need_images_of_metaworld, needs

from braid.models.vla.openvla import Checkpoint, OpenVla, save_openvla
from braid.trainer import commands
from braid_dialects.load import Read, read_config

from .conftest import IN_ONE_PROCESS, SEEDS
from .embodied import Examples

pytestmark = pytest.mark.slow
METAWORLD = [
    *(
        f"env.{use}.{key}"
        for use in ("train", "eval")
        for key in ("env_type=metaworld", "task_name=reach-v3")
    ),
    "braid.env.shadows=false",  # which take most of the time on a CPU
]
TABLETOP = [
    "braid.env.kind=gymnasium",
    f"braid.env.id={Path(__file__).parents[2]}/examples/tabletop.py:Tabletop",
]


def write_pi0(folder: Path) -> None:
    tiny_pi0(folder)
    tiny_tokenizer().save_pretrained(folder)
    numbers = {"mean": [0.0] * 4, "std": [1.0] * 4}
    (folder / "dataset_statistics.json").write_text(
        json.dumps({"metaworld": {"action": numbers, "proprio": numbers}})
    )


def write_checkpoint(folder: Path, action_dim: int) -> None:
    bounds = {"q01": [-1.0] * action_dim, "q99": [1.0] * action_dim, "mask": [True] * action_dim}
    checkpoint = replace(Checkpoint.parse(tiny_raw(), "test"), statistics={"bridge_orig": {"action": bounds}})
    save_openvla(OpenVla(checkpoint).state_dict(), checkpoint, tiny_tokenizer(), folder)


@pytest.mark.parametrize(
    ("simulator", "action_dim", "adv_type"),
    [
        pytest.param(METAWORLD, 4, "grpo", marks=needs("metaworld"), id="metaworld"),
        pytest.param(TABLETOP, 3, "gae", id="tabletop"),
    ],
)
def test_two_rounds(
    simulator: list[str], action_dim: int, adv_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if simulator is METAWORLD:
        need_images_of_metaworld()
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model", action_dim)
    sizes = [
        f"actor.model.{key}"
        for key in (
            f"model_path={tmp_path}/model", f"action_dim={action_dim}", "num_action_chunks=5", "image_size=[24, 24]",
            "vocab_size=296", "precision=fp32", "attn_implementation=sdpa", "lora_rank=2", "lora_path=null",
        )
    ]  # fmt: skip
    overrides = [
        *simulator, *sizes, f"actor.tokenizer.tokenizer_model={tmp_path}/model", "runner.output_dir=results",
        "runner.max_epochs=2", "actor.global_batch_size=8", f"algorithm.adv_type={adv_type}",
        "env.train.total_num_envs=4", "env.eval.total_num_envs=2",
        *(f"env.{use}.init_params.camera_{side}=32" for use in ("train", "eval") for side in ("heights", "widths")),
        "braid.run.device=cpu", "braid.report.console=none",
    ]  # fmt: skip
    read = read_config(SEEDS / "rlinf-embodied-003.yaml", overrides, dialect="rlinf", **IN_ONE_PROCESS)
    assert not [entry.path for entry in read.ledger if entry.disposition == "unsupported"]
    _check_run(read)
    assert list((tmp_path / "results").rglob("*.mp4"))


def _check_run(read: Read) -> None:
    """Train for two rounds, with evaluations."""
    run_dir = commands.train(read.loaded).run_dir
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if "policy/ratio_mean" in line]
    assert len(rounds) >= 2
    assert rounds[0]["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert all("env/success_once" in line for line in rounds)
    evals = json.loads((run_dir / "summary.json").read_text())["eval"]
    assert set(evals) >= {"first", "last"}, evals


@pytest.mark.nightly
@needs("metaworld")
def test_two_rounds_of_pi0_on_many_tasks(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_images_of_metaworld()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    write_pi0(tmp_path / "model")
    sizes = [
        f"env.{use}.{key}"
        for use in ("train", "eval")
        for key in (
            "max_episode_steps=20", "max_steps_per_rollout_epoch=20", "init_params.camera_heights=32",
            "init_params.camera_widths=32",
        )
    ]  # fmt: skip
    read = examples.read(
        "metaworld_50_ppo_openpi", *sizes, f"actor.model.model_path={tmp_path}/model", "actor.model.num_action_chunks=4",
        "actor.model.num_steps=2", "runner.max_epochs=2", "runner.val_check_interval=1", "runner.save_interval=-1",
        "algorithm.update_epoch=1", "env.train.total_num_envs=4",
        "env.train.rollout_epoch=1", "env.eval.total_num_envs=2", "actor.global_batch_size=10", "braid.env.shadows=false",
        "braid.run.device=cpu", "braid.report.console=none", **IN_ONE_PROCESS,
    )  # fmt: skip
    _check_run(read)


def test_two_rounds_of_soft_actor_critic(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read = examples.read(
        "maniskill_sac_mlp", "braid.env.kind=gymnasium", "braid.env.id=Pendulum-v1", "braid.env.rescale_actions=true",
        "braid.env.video.save=false",
        *(f"env.{use}.{key}=5" for use in ("train", "eval") for key in ("max_episode_steps", "max_steps_per_rollout_epoch")),
        "env.train.total_num_envs=4", "env.eval.total_num_envs=2", "runner.max_epochs=2", "runner.val_check_interval=1",
        "algorithm.update_epoch=4", "algorithm.critic_actor_ratio=2", "algorithm.replay_buffer.min_buffer_size=1",
        "algorithm.train_actor_steps=1", "algorithm.entropy_tuning.target_entropy=-1", "actor.global_batch_size=8",
        "braid.run.device=cpu", "braid.report.console=none", **IN_ONE_PROCESS,
    )  # fmt: skip
    assert not [entry.path for entry in read.ledger if entry.disposition == "unsupported"]
    run_dir = commands.train(read.loaded).run_dir
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if "sac/updates" in line]
    assert [line["sac/updates"] for line in rounds] == [4, 4]
    assert [line["sac/transitions"] for line in rounds] == [4 * 5, 2 * 4 * 5]
    assert all(line["policy/grad_norm"] > 0 for line in rounds)
    assert "last" in json.loads((run_dir / "summary.json").read_text())["eval"]
