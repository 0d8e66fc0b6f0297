"""Every file of the documentation loads unchanged, and all its keys, including those named in prose, are
accounted for.

`python -m tests.dialects.test_seeds` prints how many keys became what; docs/dialects.md has that table.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from braid.plan import default_verb, derive, resolve, unused_keys
from braid_dialects.load import DIALECTS, read_foreign
from braid_dialects.translate import NATIVE

from .conftest import ALL_SEEDS, ENVIRONMENT, IN_ONE_PROCESS, TEXT_SEEDS, Reader, Seed, leaves

DOCS = Path(__file__).parents[2] / "docs" / "dialects.md"
DISPOSITIONS = ("applied", "unused", "implied", "no effect", "unsupported")

PROSE = {
    "rlinf": (
        "cluster.component_placement",
        "actor.fsdp_config.grad_scaler.init_scale",
        "actor.fsdp_config.grad_scaler.growth_interval",
    ),
    "roll": (
        "critic.device_mapping", "critic.infer_batch_size", "critic.model_args.dtype",
        "critic.training_args.per_device_train_batch_size", "critic.training_args.gradient_accumulation_steps",
        "critic.training_args.learning_rate", "critic.strategy_args.strategy_name", "reference.infer_batch_size",
        "reference.model_args.dtype",
    ),
    "verl": ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "algorithm.filter_groups.enable"),
    "trl": ("beta", "vllm_server_base_url"),
    "skyrl": ("trainer.policy.deepspeed_config.gradient_clipping", "generator.sampling_params.stop"),
}  # fmt: skip
"""Keys that the pages name in prose and none of their files has."""


@pytest.mark.parametrize("seed", ALL_SEEDS, ids=lambda seed: seed.name)
def test_a_page_s_file_loads_unchanged_with_each_leaf_in_the_ledger_once(reader: Reader, seed: Seed) -> None:
    ledger = reader.read(seed).ledger
    paths = [entry.path for entry in ledger]
    assert len(set(paths)) == len(paths)
    foreign = read_foreign(reader.path(seed), (), DIALECTS[seed.dialect])
    for path, _ in leaves({key: value for key, value in foreign.tree.items() if key != NATIVE}):
        rows = [row for row in paths if path == row or path.startswith(f"{row}.")]
        assert len(rows) == 1, path
    assert {entry.disposition for entry in ledger} <= set(DISPOSITIONS)
    assert [entry.path for entry in ledger if entry.disposition == "unsupported"] == []


@pytest.mark.parametrize("seed", ALL_SEEDS, ids=lambda seed: seed.name)
def test_keys_without_a_native_value_have_a_reason(reader: Reader, seed: Seed) -> None:
    for entry in reader.read(seed).ledger:
        assert entry.native or entry.note, entry.path
        assert not (entry.disposition == "applied" and not entry.native), entry.path
        assert entry.origin, entry.path


@pytest.mark.parametrize("seed", ALL_SEEDS, ids=lambda seed: seed.name)
def test_unused_keys_have_the_reason_of_the_plan(reader: Reader, seed: Seed) -> None:
    read = reader.read(seed)
    idle = unused_keys(read.loaded.config, derive(read.loaded.config, None, default_verb(read.loaded.config)))
    kept = {row["path"]: row for row in json.loads(read.loaded.kept["ledger.json"])}
    for entry in read.ledger:
        if entry.native:
            unread = [key for native in entry.native for key in idle if f"{native}.".startswith(f"{key}.")]
            is_unused = len(unread) >= len(entry.native)
            assert entry.disposition == ("unused" if is_unused else "applied"), entry.path
            assert not is_unused or entry.note in {idle[key] for key in unread}
        assert (kept[entry.path]["disposition"], kept[entry.path]["note"]) == (entry.disposition, entry.note)


@pytest.mark.parametrize("seed", TEXT_SEEDS, ids=lambda seed: seed.name)
def test_a_text_config_is_planned_for_one_process(reader: Reader, seed: Seed) -> None:
    config = reader.read(seed, **IN_ONE_PROCESS).loaded.config
    assert (config.train.backend.kind, config.rollout.engine.kind) == ("single", "native")
    plan = resolve(config, num_prompts=1000, verb=default_verb(config))
    assert plan.steps_per_round >= 1


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_key_that_a_page_names_in_prose_has_a_rule(name: str) -> None:
    dialect = DIALECTS[name]  # pyright: ignore[reportArgumentType]
    for key in PROSE[name]:
        rule = dialect.rule_of(key)
        assert rule is not None, key
        assert rule.disposition != "unsupported", key


def disposition_table(reader: Reader) -> str:
    """Number of keys of each file by disposition, as a Markdown table."""
    lines = [
        "| file | keys | " + " | ".join(DISPOSITIONS) + " |",
        "|---|" + "---:|" * (len(DISPOSITIONS) + 1),
    ]
    for seed in ALL_SEEDS:
        counts = Counter(entry.disposition for entry in reader.read(seed).ledger)
        cells = [seed.name, str(counts.total()), *(str(counts[name]) for name in DISPOSITIONS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def test_the_docs_count_the_keys_by_disposition(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m tests.dialects.test_seeds` prints the table to put there."""
    # as without Transformer Engine
    monkeypatch.setattr("braid.training.backends.megatron.kind.find_spec", lambda _: None)
    assert disposition_table(reader) in DOCS.read_text("utf-8")


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(disposition_table(Reader(Path(folder))))
