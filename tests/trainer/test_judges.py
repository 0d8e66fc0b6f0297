"""Judges with models of their own, in the run's process, in a child process and on workers of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.conftest import TINY_MODEL, LoadTiny
from tests.trainer.test_engine_runs import use_sglang_like

from braid.config.load import Loaded
from braid.config.model import BuildSpec
from braid.errors import ConfigError
from braid.models.build import build_model
from braid.models.tokenizer import character_tokenizer
from braid.plan import resolve
from braid.trainer import commands, preflight

MakeJudge = Callable[[str, int], Path]
LETTERS = {letter: number for number, letter in enumerate("abcdefgh")}


@pytest.fixture
def make_judge(tmp_path: Path) -> MakeJudge:
    """Write the folder of a tiny model with random weights; the seed decides on them."""

    def make(name: str, seed: int) -> Path:
        tokenizer = character_tokenizer("abcdefgh")
        spec = BuildSpec.model_validate(TINY_MODEL)
        model = build_model(spec, tokenizer, dtype=torch.float32, seed=seed)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def judge(**settings: Any) -> dict[str, Any]:
    """A judge whose score is the last letter that it writes."""
    sampled = {"temperature": 1.0, "max_tokens": 100, "prompt": "{prompt}{response}"}
    sampled |= {"pattern": "([a-h])", "scores": LETTERS, "retries": 9}
    return {"kind": "judge", **sampled, **settings}


def parts(*judges: dict[str, Any]) -> str:
    return f"reward.parts={json.dumps(judges)}"


def rounds(loaded: Loaded) -> list[dict[str, float]]:
    """The metrics of each round of a run, without times."""
    outcome = commands.train(loaded)
    lines = map(json.loads, (outcome.run_dir / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if name.startswith(("reward/part", "status/", "loss/"))}
        for line in lines
    ]


def test_a_judge_of_the_policys_weights_scores_as_the_policy_does(
    load_tiny: LoadTiny, make_judge: MakeJudge
) -> None:
    make_judge("judge", 3)
    policy = "model={build: null, path: judge}"
    still = ("train.optimizer.lr=1e-30", "run.max_rounds=2")
    separate = rounds(load_tiny(policy, *still, parts(judge(path="judge", name="j"))))
    itself = rounds(load_tiny(policy, *still, "run.name=itself", parts(judge(url="policy", name="j"))))
    assert separate == itself
    assert all(line["status/invalid"] == 0 for line in separate if "status/invalid" in line)
    assert sum("reward/part/j" in line for line in separate) >= 2


def test_two_judges_have_different_models_and_a_shared_one_is_loaded_once(
    load_tiny: LoadTiny, make_judge: MakeJudge
) -> None:
    make_judge("first", 3)
    make_judge("second", 4)
    names = {"a": "first", "b": "second", "same": "first"}
    loaded = load_tiny(
        parts(*(judge(path=folder, name=name) for name, folder in names.items())),
        "run.max_rounds=2",
    )
    plan = resolve(loaded.config)
    assert [memory.role for memory in plan.memory if memory.role.startswith("reward")] == [
        "reward:same",
        "reward:b",
    ]
    for line in rounds(loaded):
        if "reward/part/a" in line:
            assert line["reward/part/a"] == line["reward/part/same"] != line["reward/part/b"]


def test_a_resumed_run_with_a_judge_goes_on_to_the_same_bits(
    load_tiny: LoadTiny, make_judge: MakeJudge
) -> None:
    make_judge("judge", 3)
    scored = parts(judge(path="judge", top_k=5))
    whole = rounds(load_tiny(scored, "run.max_rounds=3", "run.name=whole"))
    rounds(load_tiny(scored, "run.max_rounds=2", "run.name=cut", "checkpoint.every_rounds=1"))
    resumed = rounds(load_tiny(scored, "run.max_rounds=3", "run.name=cut", "run.resume=latest"))
    assert resumed[-1] == whole[-1]


def test_a_missing_folder_or_package_of_a_judge_is_reported_before_the_run(load_tiny: LoadTiny) -> None:
    loaded = load_tiny(parts(judge(path="./absent")))
    with pytest.raises(ConfigError, match=r"reward\.parts\[0\]\.path: .*absent"):
        preflight.check(loaded, resolve(loaded.config))


@pytest.mark.slow
def test_judges_with_devices_of_their_own_score_as_in_one_process(
    load_tiny: LoadTiny, make_judge: MakeJudge
) -> None:
    make_judge("judge", 3)
    scored = parts(judge(path="judge"))
    alone = rounds(load_tiny(scored, "run.max_rounds=2"))
    apart = rounds(load_tiny(scored, "run.max_rounds=2", "run.name=apart", "cluster.placement={reward: 1-2}"))
    assert apart == alone


@pytest.mark.slow
def test_a_judge_is_served_by_an_engine_in_a_child_process(
    load_tiny: LoadTiny, make_judge: MakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_sglang_like(monkeypatch)
    make_judge("judge", 3)
    loaded = load_tiny(parts(judge(path="judge", engine="sglang")), "run.max_rounds=1")
    outcome = commands.train(loaded)
    assert list((outcome.run_dir / "logs").rglob("judge_0.log"))
