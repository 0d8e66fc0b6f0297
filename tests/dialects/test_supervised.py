"""Files for supervised fine-tuning: batches, lengths and data as in the originals, and runs of two rounds with a
tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.pictures import picture

from braid.cli.main import main
from braid.config.schema import RunConfig
from braid.errors import ConfigError
from braid_dialects.load import Read, read_config

from .conftest import IN_ONE_PROCESS, SEEDS, laid_over

BUILD = {
    "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
    "characters": "abcdefgh ?\n",
}  # fmt: skip
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "depth": 2}


def _read(folder: Path, name: str, over: dict[str, Any], **chosen: Any) -> Read:
    """The seed with other values laid over it; null removes a key."""
    tree = laid_over(yaml.safe_load((SEEDS / f"{name}-sft.yaml").read_text("utf-8")), over)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False), "utf-8")
    return read_config(path, dialect=name, **chosen)


def _config(folder: Path, name: str, over: dict[str, Any]) -> RunConfig:
    return _read(folder, name, over, **IN_ONE_PROCESS).loaded.config


def _sft(folder: Path, name: str, over: dict[str, Any]) -> dict[str, Any]:
    sft = _config(folder, name, over).sft
    assert sft is not None
    return sft.model_dump()


def test_a_step_of_roll_has_the_rows_of_all_ranks_and_accumulated_micro_batches(tmp_path: Path) -> None:
    """Eight devices, two of a replica by tensors and two by layers: two ranks."""
    made = _sft(tmp_path, "roll", {})
    assert made["rows_per_step"] == 1 * 16 * 2
    args = {"training_args": {"per_device_train_batch_size": 4}, "device_mapping": "list(range(0,4))"}
    assert _sft(tmp_path, "roll", {"sft_train": args})["rows_per_step"] == 4 * 16 * 1
    assert (made["epochs"], made["steps"], made["shuffle"], made["max_tokens"]) == (3.0, None, False, 4096)


def test_a_step_of_rlinf_is_a_number_of_micro_batches_on_each_rank(tmp_path: Path) -> None:
    assert _sft(tmp_path, "rlinf", {})["rows_per_step"] == 32
    with pytest.raises(
        ConfigError, match=r"actor\.global_batch_size: 30 rows .* not a multiple of .*=2 \* 4"
    ):
        _config(tmp_path, "rlinf", {"actor": {"global_batch_size": 30}})


@pytest.mark.parametrize(
    ("name", "over", "length"),
    [
        ("rlinf", {"runner": {"max_epochs": -1}}, (1.0, None)),
        ("rlinf", {"runner": {"max_epochs": -1, "max_steps": 7}}, (1.0, 7)),
        ("skyrl", {"num_steps": None}, (1.0, None)),
        ("skyrl", {"num_steps": None, "num_epochs": 3}, (3.0, None)),
        ("skyrl", {"max_training_steps": 50}, (1.0, 50)),
        ("roll", {"sft_train": {"training_args": {"num_train_epochs": 2}}}, (2.0, None)),
    ],
)
def test_the_length_is_that_of_the_file(
    tmp_path: Path, name: str, over: dict[str, Any], length: tuple[float, int | None]
) -> None:
    made = _sft(tmp_path, name, over)
    assert (made["epochs"], made["steps"]) == length


@pytest.mark.parametrize(
    ("name", "over", "message"),
    [
        ("rlinf", {"runner": {"max_epochs": 2, "max_steps": 7}}, r"runner\.max_steps: 7, with runner\.max_epochs=2"),
        ("rlinf", {"data": {"train_data_paths": None}}, r"data\.train_data_paths: .*braid eval"),
        ("rlinf", {"data": {"choice_key": "choices"}}, r"data\.choice_key: .*into the prompt"),
        ("skyrl", {"num_epochs": 2}, r"num_steps: conflicts with num_epochs"),
        ("skyrl", {"num_steps": None, "max_training_steps": 50}, r"max_training_steps: .*set num_steps to it"),
        ("skyrl", {"train_dataset_splits": ["train"]}, r"train_datasets: there are 1 splits for 2 data sets"),
        ("skyrl", {"train_dataset_weights": [1.0]}, r"train_dataset_weights: there are 1 weights for 2"),
        ("skyrl", {"pretokenized_dataset_paths": ["x"]}, r"pretokenized_dataset_paths: .*messages_key"),
        ("skyrl", {"sampler": "custom"}, r"sampler: .*sequential"),
        ("roll", {"system_key": "system"}, r"system_key: .*messages_key"),
    ],
)  # fmt: skip
def test_what_cannot_be_translated_is_refused_in_the_file_s_key(
    tmp_path: Path, name: str, over: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(tmp_path, name, over)


def test_data_sets_of_skyrl_have_equal_shares_unless_it_says_others(tmp_path: Path) -> None:
    for weights, shares in ((None, [1.0, 1.0]), ([1.0, 3.0], [1.0, 3.0])):
        made = _sft(tmp_path, "skyrl", {"train_dataset_weights": weights})
        assert [part["share"] for part in made["mix"]] == shares
    assert [source["name"] for source in made["data"]] == ["alpaca-cleaned", "talks.jsonl"]
    first, second = made["data"]
    assert (first["kind"], first["split"], second["kind"], second["limit"]) == (
        "hub",
        "train[:100]",
        "file",
        None,
    )
    assert made["eval_data"][0]["limit"] == 50
    alone = {"train_datasets": ["a/b"], "train_dataset_splits": ["train"], "train_dataset_weights": None}
    assert _sft(tmp_path, "skyrl", alone)["mix"] == ()
    assert _sft(tmp_path, "skyrl", {"train_on_what": "last_assistant_message"})["train_on"] == "last_turn"


def _rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Six rows of each system's data."""
    for i in range(6):
        (folder / f"{i}.png").write_bytes(picture(i % 3).data)
    letters = "abcdef"
    return {
        "roll": [{"instruction": a, "input": "" if a < "d" else a, "output": a * 2} for a in letters],
        "skyrl": [
            {"messages": [{"role": role, "content": a} for role in ("user", "assistant") * 2]} for a in letters
        ],
        "rlinf": [
            {"question": f"{a}?", "correct_answer": a, "image": f"{i}.png"} for i, a in enumerate(letters)
        ],
    }  # fmt: skip


FILES: dict[str, dict[str, Any]] = {
    "roll": {
        "sequence_length": 64,
        "eval_steps": 1,
        "global_template": "native",
        "validation": {"data_args": {"file_name": "rows.jsonl"}},
        "sft_train": {
            "data_args": {"file_name": "rows.jsonl", "template": "native"},
            "model_args": {"attn_implementation": "sdpa"},
            "training_args": {"num_train_epochs": 1, "gradient_accumulation_steps": 2, "warmup_steps": 0},
        },
        "tracker_kwargs": {"log_dir": "tb"},
    },
    "skyrl": {
        "train_datasets": ["rows.jsonl"],
        "train_dataset_splits": ["train"],
        "train_dataset_weights": None,
        "eval_datasets": ["rows.jsonl"],
        "eval_interval": 1,
        "tools_key": None,
        "num_steps": 2,
        "batch_size": 4,
        "optimizer_config": {"num_warmup_steps": 0},
        "max_length": 64,
    },
    "rlinf": {
        "data": {"train_data_paths": "rows.jsonl", "val_data_paths": "rows.jsonl"},
        "runner": {"max_epochs": 1, "val_check_interval": 1, "logger": {"log_path": "logs"}},
        "actor": {
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "model": {"model_path": None},
            "optim": {"lr_warmup_steps": 0},
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_file_trains_two_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = _rows(tmp_path)[name]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = laid_over(yaml.safe_load((SEEDS / f"{name}-sft.yaml").read_text("utf-8")), FILES[name])
    build = BUILD | ({"architecture": "qwen3_vl", "tower": TOWER} if name == "rlinf" else {})
    native = {
        "model": {"path": None, "build": build},
        "run": {"device": "cpu", "output_dir": "out", "name": "run"},
        "report": {"console": "none"},
    }
    if name == "rlinf":
        native["model"]["architecture"] = None
        native["data"] = {"use_chat_template": "auto"}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({**tree, "braid": native}))
    chosen = ["--backend", "single", "--engine", "native"]
    assert main(["explain", "theirs.yaml", *chosen]) == 0
    assert main(["train", "theirs.yaml", *chosen]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "out/run/metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "sft/loss" in line]
    assert [line["step"] for line in trained] == [1, 2]
    assert trained[-1]["sft/epoch"] == {"skyrl": 8 / 6}.get(name, 1.0)
    assert trained[-1]["eval/all/loss"] < 4
