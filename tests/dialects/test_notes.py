"""What rows of the ledger say is true of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from braid_dialects.load import read_config
from braid_dialects.table import Entry

from .conftest import ALL_SEEDS, Reader, Seed
from .test_agentic import roll

SEED_OF = {seed.name: seed for seed in ALL_SEEDS}


def row(reader: Reader, name: str, key: str, *overrides: str, **chosen: Any) -> Entry:
    seed: Seed = SEED_OF[name]
    (entry,) = [entry for entry in reader.read(seed, overrides, **chosen).ledger if entry.path == key]
    return entry


@pytest.mark.parametrize(
    ("name", "training", "evaluation"),
    [
        ("roll-rlvr-002", "actor_infer.generating_args", "validation.generating_args"),
        ("skyrl-004", "generator.sampling_params", "generator.eval_sampling_params"),
    ],
)
def test_only_the_temperature_of_training_is_said_to_be_that_of_training(
    reader: Reader, name: str, training: str, evaluation: str
) -> None:
    values = ("+validation.data_args.file_name=a.jsonl",) * (name == "roll-rlvr-002")
    values += (f"{training}.temperature=0.9", f"{evaluation}.temperature=0.7")
    at = {key: row(reader, name, f"{key}.temperature", *values) for key in (training, evaluation)}
    assert at[training].native == {"rollout.sampling.temperature": 0.9}
    assert "also in training" in at[training].note
    assert at[evaluation].native == {"eval.sampling.temperature": 0.7}
    assert "training" not in at[evaluation].note


@pytest.mark.parametrize("name", ["skyrl-004", "rlinf-math-003", "roll-rlvr-002"])
def test_a_list_of_defaults_without_presets_is_said_to_be_empty(reader: Reader, name: str) -> None:
    tree = SEED_OF[name].tree() | {"defaults": ["_self_", {"override hydra/job_logging": "stdout"}]}
    ledger = read_config(reader.write("defaults", tree), dialect=SEED_OF[name].dialect).ledger
    (entry,) = [entry for entry in ledger if entry.path == "defaults"]
    assert (entry.disposition, entry.note) == ("no effect", "it lists no presets")


@pytest.mark.parametrize(
    ("actor_key", "native"), [(None, {"model.vla.unnorm_key": "libero_10"}), ("bridge_orig", {})]
)
def test_rollout_unnorm_key_is_overridden_only_by_a_key_that_is_there(
    reader: Reader, actor_key: str | None, native: dict[str, str]
) -> None:
    tree = SEED_OF["rlinf-embodied-003"].tree()
    tree["rollout"]["unnorm_key"] = "libero_10"
    if actor_key is None:
        del tree["actor"]["model"]["unnorm_key"]
    ledger = read_config(reader.write("unnorm", tree), dialect="rlinf").ledger
    (entry,) = [entry for entry in ledger if entry.path == "rollout.unnorm_key"]
    assert entry.native == native
    assert ("overridden by actor.model.unnorm_key" in entry.note) == (actor_key is not None)


def test_the_template_of_an_agentic_file_has_no_effect(tmp_path: Path) -> None:
    for template in ("qwen2_5", "chatml"):
        read = roll(tmp_path, None, f"actor_train.data_args.template={template}")
        (entry,) = [entry for entry in read.ledger if entry.path == "actor_train.data_args.template"]
        assert entry.disposition == "no effect"
        assert read.loaded.config.model.chat_template is None
