"""Files for pipelines and methods that braid does not support are refused with that name; conflicts are
reported in the file's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.cli.main import main
from braid.config.source import parse_path, place

from .embodied import EVALUATION

_ROBOT = {"runner.task_type": "embodied", "env.train.env_type": "libero", "actor.model.model_type": "openpi"}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "rlinf sft of robots": ("supervised fine-tuning of robot policies", {
        "runner.task_type": "sft", "data.train_data_pathes": "x", "actor.model.openpi_data.x": 1, "env.x": 1,
    }),
    "rlinf sac": ("SAC", _ROBOT | {"algorithm.adv_type": "embodied_sac", "algorithm.target_entropy": -4, "algorithm.q_head.num": 2}),
    "roll dpo": ("preference (DPO) pipeline of ROLL", {"exp_name": "x", "pretrain": "m", "chosen_key": "c", "beta": 0.1}),
    "behavior": ("no simulator behavior", EVALUATION | {"env.eval.env_type": "behavior"}),
}  # fmt: skip


def written(folder: Path, flat: dict[str, Any]) -> str:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        assert place(tree, parse_path(key), value) is None
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False), "utf-8")
    return str(path)


@pytest.mark.parametrize("name", FILES)
def test_the_feature_is_named_and_no_other_spelling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    feature, flat = FILES[name]
    path = written(tmp_path, flat)
    for verb in ("show", "explain"):
        assert main([verb, path]) == 2
        out, err = capsys.readouterr()
        assert feature in err
        assert "did you mean" not in out + err
        assert "missing `kind`" not in out + err
        assert len(err.splitlines()) == 1


def test_a_simulator_cannot_be_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, EVALUATION | {"env.eval.env_type": "behavior"})
    assert main(["show", path, "--allow-unsupported", "env.eval.env_type"]) == 2
    err = capsys.readouterr().err
    assert "env.eval.env_type: 'behavior' cannot be ignored: there is no simulator behavior" in err
    assert "missing" not in err


_SKYRL = {"trainer.epochs": 2, "trainer.logger": "console", "generator.n_samples_per_prompt": 4}


@pytest.mark.parametrize(
    ("overrides", "start", "names"),
    [
        (
            ["trainer.num_warmup_steps=3", "trainer.policy.optimizer_config.num_warmup_steps=4"],
            "braid: trainer.policy.optimizer_config.num_warmup_steps: 4 here, but ",
            "trainer.num_warmup_steps sets it to 3",
        ),
        (
            ["trainer.strategy=megatron", "trainer.policy.model.lora.rank=8", "trainer.algorithm.use_kl_loss=false"],
            "braid: trainer.policy.model.lora.rank: ",
            "set trainer.strategy (braid.train.backend) to fsdp2",
        ),
        (
            ["trainer.policy.optimizer_config.adam_betas=[0.9,1.0]"],
            "braid: trainer.policy.optimizer_config.adam_betas: 1.0 is not a number >= 0 and < 1",
            "",
        ),
        (["braid.cluster.placement.rollout=7"], "braid: braid.cluster.placement: ", "This works: braid.cluster.placement={"),
    ],
    ids=["two keys", "plan", "schema", "native key"],
)  # fmt: skip
def test_conflicts_are_told_in_the_keys_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], start: str, names: str
) -> None:
    assert main(["show", written(tmp_path, _SKYRL), *overrides]) == 2
    err = capsys.readouterr().err
    assert err.startswith(start)
    assert names in err
