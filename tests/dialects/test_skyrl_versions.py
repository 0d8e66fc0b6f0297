"""SkyRL's versions: which one a file is for, and its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.algorithms.policy_losses.cispo import Cispo
from braid.cli.main import main
from braid.config.source import parse_path, place
from braid.errors import ConfigError
from braid_dialects.load import Read, read_config

OLD = {"generator.backend": "vllm", "generator.num_inference_engines": 1}


def written(folder: Path, flat: dict[str, Any]) -> Path:
    tree: dict[str, Any] = {}
    for key, value in (
        {"trainer.epochs": 1, "generator.max_turns": 1, "trainer.logger": "console"} | flat
    ).items():
        assert place(tree, parse_path(key), value) is None
    path = folder / "skyrl.yaml"
    path.write_text(yaml.safe_dump(tree), "utf-8")
    return path


def read(folder: Path, flat: dict[str, Any], dialect: str = "skyrl") -> Read:
    return read_config(written(folder, flat), dialect=dialect)


@pytest.mark.parametrize(
    ("flat", "version"),
    [
        ({}, "0.5"),
        ({"generator.inference_engine.num_engines": 1}, "0.5"),
        ({"trainer.algorithm.off_policy_correction.tis_ratio_type": "token"}, "0.5"),
        ({"trainer.fully_async.enabled": False}, "0.5"),
        (OLD, "0.4"),
        (OLD | {"trainer.algorithm.off_policy_correction.tis_ratio_type": None}, "0.4"),
        (OLD | {"trainer.fully_async.max_staleness_steps": 4}, "0.3"),
        (OLD | {"generator.engine_init_kwargs": {}}, "0.2"),
        (OLD | {"trainer.algorithm.normalize_reward": True}, "0.1"),
        ({"trainer.algorithm.normalize_reward": True}, "0.1"),
    ],
)
def test_the_keys_of_a_file_tell_its_version(tmp_path: Path, flat: dict[str, Any], version: str) -> None:
    result = read(tmp_path, flat)
    assert result.title == f"SkyRL {version}"
    origins = result.loaded.origins
    assert origins["algorithm.aggregation"] == f"SkyRL {version} default of trainer.algorithm.loss_reduction"
    assert result.loaded.config == read(tmp_path, flat, f"skyrl@{version}").loaded.config


def test_each_version_has_its_own_defaults(tmp_path: Path) -> None:
    made = []
    for version in ("0.0", "0.1", "0.2", "0.3", "0.4", "0.5"):
        config = read(tmp_path, {}, f"skyrl@{version}").loaded.config
        assert config.reference.train is not None
        reference: Any = config.reference.train.backend
        engine: Any = config.rollout.engine
        made.append((
            config.algorithm.aggregation, config.eval_sampling.greedy, config.cluster.devices_per_node,
            engine.tensor_parallel, engine.cuda_graphs, reference.cpu_offload, config.train.backend.kind,
        ))  # fmt: skip
    mean = "sequence_mean_token_mean"
    assert made == [
        (mean, False, 4, 4, True, True, "fsdp2"),
        ("token_mean", True, 4, 4, True, True, "fsdp2"),
        ("token_mean", True, 4, 4, True, False, "fsdp2"),
        ("token_mean", True, 4, 4, False, False, "fsdp2"),
        ("token_mean", True, 1, 1, False, False, "fsdp2"),
        ("token_mean", True, 1, 1, True, False, "fsdp2"),
    ]


@pytest.mark.parametrize(("version", "backend"), [("0.1", "fsdp"), ("0.4", "fsdp"), ("0.5", "fsdp2")])
def test_fsdp_is_fsdp2_from_0_5_on(tmp_path: Path, version: str, backend: str) -> None:
    flat = {"trainer.strategy": "fsdp", "trainer.policy.fsdp_config.reshard_after_forward": False}
    result = read(tmp_path, flat, f"skyrl@{version}")
    assert result.loaded.config.train.backend.kind == backend
    disposition = {entry.path: entry.disposition for entry in result.ledger}
    expected = "applied" if backend == "fsdp2" else "no effect"
    assert disposition["trainer.policy.fsdp_config.reshard_after_forward"] == expected


def test_cispo_clips_as_in_its_version(tmp_path: Path) -> None:
    flat = {"trainer.algorithm.policy_loss_type": "cispo"}
    clips = {
        version: algorithm.policy_loss
        for version in ("0.4", "0.5")
        for algorithm in [read(tmp_path, flat, f"skyrl@{version}").loaded.config.algorithm]
    }
    assert clips == {"0.4": Cispo(clip_low=0.0, clip_high=5.0), "0.5": Cispo(clip_low=1.0, clip_high=4.0)}


def test_max_seq_len_is_computed_up_to_0_4(tmp_path: Path) -> None:
    flat = {
        "trainer.algorithm.loss_reduction": "seq_mean_token_sum_norm", "trainer.max_prompt_length": 100,
        "generator.sampling_params.max_generate_length": 50,
    }  # fmt: skip
    assert read(tmp_path, flat, "skyrl@0.4").loaded.config.algorithm.aggregation_constant == 150
    with pytest.raises(ConfigError, match=r"max_seq_len: loss_reduction=seq_mean_token_sum_norm needs it"):
        read(tmp_path, flat, "skyrl@0.5")
    set_there = flat | {"trainer.algorithm.max_seq_len": 70}
    assert read(tmp_path, set_there, "skyrl@0.5").loaded.config.algorithm.aggregation_constant == 70


def test_the_version_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, {"generator.inference_engine.num_engines": 1}))
    for verb in ("show", "explain"):
        assert main([verb, path]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "SkyRL 0.5" in text
        assert "told by generator.inference_engine" in text
        assert main([verb, path, "--dialect", "skyrl@0.4"]) == 0
        assert "SkyRL 0.4" in capsys.readouterr().out
    assert main(["convert", path]) == 0
    assert capsys.readouterr().out.startswith("# Converted from the SkyRL 0.5 config skyrl.yaml")


def test_an_unknown_version_is_refused_with_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in ("skyrl@0.9", "roll@0.1", "skirl"):
        assert main(["show", str(written(tmp_path, {})), "--dialect", wrong]) == 2
        err = capsys.readouterr().err
        assert f"--dialect: '{wrong}' is not one of native, rlinf, roll, skyrl, verl, trl, skyrl@0.0, " in err
