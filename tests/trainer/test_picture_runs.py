"""Runs of a vision-language model: warm-up, rounds, evaluation, export, and a run of the export."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from examples import look_agent, pictures
from tests.contracts.engines import TORCHVISION
from tests.needs import WITH_VLLM
from tests.pictures import picture

from braid.config.load import load_config
from braid.errors import ConfigError
from braid.plan import available
from braid.report.samples import read_samples
from braid.rollout.engines.vllm import kind, options
from braid.rollout.engines.vllm.options import environment
from braid.trainer import commands
from braid.types import Action, Prompt

BUILD = {
    "architecture": "qwen3_vl", "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 16, "characters": "abcdefgh ?",
    "tower": {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "depth": 2},
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rows = []
    for i, letter in enumerate("abcd"):
        (tmp_path / f"{i}.png").write_bytes(picture(i).data)
        rows.append({"prompt": "<image> a?", "answer": letter, "images": [f"{i}.png"]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "file", "path": "rows.jsonl"}
    tree: dict[str, Any] = {
        "run": {"name": "run", "output_dir": str(tmp_path / "runs"), "max_rounds": 2, "device": "cpu", "num_threads": 1},
        "model": {"vision": {"train": "all"}, "build": BUILD},
        "data": {"train": [source], "eval": [source], "max_prompt_tokens": 64},
        "sft": {"data": [source | {"response_key": "answer"}], "steps": 2, "rows_per_step": 4},
        "rollout": {"prompts_per_round": 4, "group_size": 4, "sampling": {"max_new_tokens": 3}},
        "reward": {"parts": [{"kind": "exact"}]},
        "algorithm": {"recipe": "grpo"},
        "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 1},
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def rounds_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_trains_exports_and_the_export_is_a_model_that_sees(config: Path) -> None:
    run_dir = commands.train(load_config(config)).run_dir
    assert rounds_of(run_dir)[-1]["policy/logprob_mismatch_kl"] < 1e-6
    samples = list(read_samples(run_dir / "samples/round_000002.jsonl"))
    assert {sample.trajectory.prompt.images[0].image for sample in samples} <= {picture(i) for i in range(4)}
    exported = commands.export(run_dir)
    again = ["run.name=again", f"model={{path: {exported}, vision: {{}}}}", "sft=null", "run.max_rounds=1"]
    first = rounds_of(commands.train(load_config(config, again)).run_dir)
    assert first[-1]["policy/logprob_mismatch_kl"] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["pipeline={max_lag: 1}"],
        ["model.lora={rank: 2}", "model.vision.train=none", "algorithm.kl_coef=0.01"],
        ["algorithm.recipe=ppo", "critic.train={}"],
        ["model.vision.train=projector", "train.gradient_checkpointing=true", "algorithm.kl_coef=0.01"],
        ["train.autocast=bf16"],
    ],
    ids=["pipelined", "adapters and a reference", "critic", "projector, recomputed", "bf16"],
)
def test_images_go_with_what_else_a_run_may_have(config: Path, overrides: list[str]) -> None:
    run_dir = commands.train(load_config(config, overrides)).run_dir
    bound = 1e-2 if "train.autocast=bf16" in overrides else 1e-6
    assert rounds_of(run_dir)[-1]["policy/logprob_mismatch_kl"] < bound


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
@WITH_VLLM
def test_vllm_samples_with_images(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "has_torchvision", lambda: True)
    monkeypatch.setattr(options, "environment", lambda vllm: environment(vllm) | TORCHVISION)
    overrides = ["rollout.engine={kind: vllm, max_running: 16}", "model.build.head_dim=32"]
    rounds = rounds_of(commands.train(load_config(config, overrides)).run_dir)
    assert [line["policy/logprob_mismatch_max"] < 1e-4 for line in rounds if "policy/loss" in line] == [
        True
    ] * 2


@pytest.mark.slow
def test_the_example_trains_on_the_files_that_its_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pictures.py", str(tmp_path)])
    pictures.main()
    uses = {"data.train[0]": "train", "data.eval[0]": "eval", "sft.data[0]": "sft"}
    overrides = [f"{source}.path={tmp_path}/{name}.jsonl" for source, name in uses.items()]
    overrides += [f"run.output_dir={tmp_path}/runs", "run.max_rounds=2", "sft.steps=25", "eval.target=null"]
    result = commands.train(load_config(Path(pictures.__file__).with_suffix(".yaml"), overrides))
    rounds = rounds_of(result.run_dir)
    assert [line["policy/logprob_mismatch_kl"] < 1e-6 for line in rounds if "policy/loss" in line] == [
        True
    ] * 2
    made, shuffled = ((tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("eval", "shuffled"))
    assert sorted(json.loads(line)["image"] for line in made) == sorted(
        json.loads(line)["image"] for line in shuffled
    )
    assert sum(one != other for one, other in zip(made, shuffled, strict=True)) > 0.9 * len(made)


def play(shows: Any, seed: int, moves: int) -> tuple[list[Any], float]:
    """The pictures of a game of `moves` short moves, and the rewards together."""

    async def played() -> tuple[list[Any], float]:
        walk, pictures, rewards = look_agent.Walk(shows), list[Any](), 0.0
        replies = (await walk.start(Prompt("t:0", "t", (), ()), seed)).messages
        for _ in range(moves):
            pictures += [message["content"][0]["image"] for message in replies]
            step = await walk.step(Action(f"look: {walk.board.short_move()}"))
            rewards += step.reward
            if step.is_done:
                break
            replies = step.messages
        return pictures, rewards

    return asyncio.run(played())


def test_the_game_of_the_example_is_won_by_short_moves_alone_and_shows_the_board() -> None:
    rng = np.random.default_rng(0)
    for seed in range(8):
        pictures, rewards = play("board", seed, moves=4)
        assert rewards == 1.0
        assert len(pictures) == look_agent.Board(np.random.default_rng(seed)).distance
        assert len(set(map(str, pictures))) == len(pictures), "each move changes the board"
        assert len(set(map(str, play("empty", seed, moves=4)[0]))) == 1
        assert play("other", seed, moves=4)[0] != pictures
        assert play("board", seed, moves=len(pictures) - 1)[1] == 0.0
    messages = [look_agent.game(rng) for _ in range(50)]
    answers = [game[i]["content"] for game in messages for i in range(1, len(game), 2)]
    guesses = sum(answer.startswith("guess") for answer in answers) / len(answers)
    assert abs(guesses - look_agent.SHARE_GUESSED) < 0.15


@pytest.mark.slow
def test_the_agent_that_looks_trains_on_the_games_that_its_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["look_agent.py", str(tmp_path)])
    look_agent.main()
    overrides = [
        f"sft.data[0].path={tmp_path}/sft.jsonl",
        f"run.output_dir={tmp_path}/runs",
        "run.max_rounds=2",
    ]
    overrides += ["sft.steps=5", "eval.target=null", "env.eval_episodes=16", "rollout.prompts_per_round=8"]
    overrides += ["report.samples_every_rounds=1"]
    run_dir = commands.train(load_config(Path(look_agent.__file__).with_suffix(".yaml"), overrides)).run_dir
    rounds = rounds_of(run_dir)
    assert [line["policy/logprob_mismatch_kl"] < 1e-6 for line in rounds if "policy/loss" in line] == [
        True
    ] * 2
    turns = [
        turn
        for sample in read_samples(run_dir / "samples/round_000002.jsonl")
        for turn in sample.trajectory.turns
    ]
    assert {len(turn.images) for turn in turns} == {1}, "each turn reads one picture"


@pytest.mark.slow
def test_a_resumed_run_equals_the_unbroken_one(config: Path) -> None:
    whole = rounds_of(commands.train(load_config(config, ["checkpoint.every_rounds=1"])).run_dir)
    commands.train(load_config(config, ["run.name=cut", "run.max_rounds=1", "checkpoint.every_rounds=1"]))
    cut = rounds_of(commands.train(load_config(config, ["run.name=cut", "run.resume=latest"])).run_dir)
    for name in ("reward/mean", "policy/loss", "policy/grad_norm"):
        assert cut[-1][name] == whole[-1][name], name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.backend=megatron"], "megatron has no vision towers; set it to single, fsdp2"),
        (
            ["train={backend: fsdp2, sequence_parallel: 2}"],
            "2 devices would share a sequence, but the tokens of an image stay together; set it to 1",
        ),
        (["rollout.engine=sglang"], "sglang does not get the images of prompts"),
        (["rollout.engine={kind: vllm, servers: ['http://a:1']}"], "servers do not get images"),
        (["rollout.engine={kind: vllm, in_process: false}"], "only in the engine's process; set it to true"),
        (["rollout.engine={kind: vllm, tensor_parallel: 2}"], "not tested on 2 devices per engine"),
        (["model.lora={rank: 2}"], "model.lora freezes all but its adapters"),
        (["model.build={architecture: qwen3}"], "qwen3 has no vision tower"),
        (
            [
                "model={build: {}}",
                "reward.parts=[{kind: judge, url: policy, prompt: '{response}', images: true}]",
            ],
            r"reward.parts\[0\].images: prompts have no images, since the policy reads only text",
        ),
        (["model.build.tower.patch_size=5"], "is not a multiple of 2 x patch_size=5"),
    ],
)
def test_what_images_do_not_go_with_is_refused(config: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        commands.resolve(load_config(config, overrides).config, 4)


@pytest.mark.parametrize(("model_type", "is_refused"), [("glm4v", True), ("qwen2_5_vl", False)])
def test_vllm_is_refused_for_models_that_were_not_tested_with_images(
    config: Path, tmp_path: Path, model_type: str, is_refused: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = load_config(config, ["model.build=null", f"model.path={tmp_path}", "rollout.engine=vllm"])
    refusals = [why for _, why in loaded.config.rollout.engine.image_problems(loaded.config)]
    assert [f"not tested with models of type {model_type}" in why for why in refusals] == [True] * is_refused


def test_vllm_needs_torchvision_for_images(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "has_torchvision", lambda: False)
    monkeypatch.setattr(available, "missing_packages", lambda *_: iter(()))
    loaded = load_config(config, ["rollout.engine=vllm", "model.build.head_dim=32"])
    plan = commands.resolve(loaded.config, 0)
    refusals = [why for _, why in available.machine_problems(loaded.config, plan)]
    assert any("torchvision for models that read images, and it is not installed" in why for why in refusals)
