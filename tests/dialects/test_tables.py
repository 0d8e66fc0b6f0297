"""The tables of all dialects: each row names native keys that exist, whatever the file chooses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from braid.config.schema import RunConfig
from braid.config.shape import fields_of
from braid_dialects.load import DIALECTS, read_foreign
from braid_dialects.rows import to
from braid_dialects.table import Source
from braid_dialects.translate import translate

from .conftest import ALL_SEEDS, Reader, Seed
from .samples import samples

NATIVE = {path for path, _ in fields_of(RunConfig)}
NAMED = ("cluster.placement", "cluster.group_names", "cluster.env", "env.kwargs", "env.mix")
"""Native sections whose keys are names."""
CHOSEN: tuple[tuple[str | None, str | None], ...] = (
    (None, None), ("single", "native"), ("fsdp2", "vllm"), ("megatron", "sglang"), ("deepspeed", "vllm")
)  # fmt: skip
SUPERVISED = ("roll-sft", "roll-distill", "skyrl-sft", "rlinf-sft")
SEEDS = [
    seed
    for seed in ALL_SEEDS
    if seed.name in ("rlinf-math-003", "rlinf-embodied-003", "roll-rlvr-002-prose", "skyrl-004", *SUPERVISED)
]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.name)
@pytest.mark.parametrize("chosen", CHOSEN)
def test_every_value_that_a_key_takes_becomes_native_keys_or_has_a_reason(
    reader: Reader, seed: Seed, chosen: tuple[str | None, str | None]
) -> None:
    foreign = read_foreign(reader.path(seed), [], DIALECTS[seed.dialect])
    translation = translate(foreign, DIALECTS[seed.dialect])
    dialect = translation.dialect
    values = {dialect.name_of(entry.path): entry.value for entry in translation.ledger}
    for pattern, rule in dialect.rules.items():
        path = pattern.replace("*", "math_rule")
        for value in samples(rule):
            try:
                made = rule.become(value, Source(dialect, {**values, path: value}, *chosen, at=path))
            except ValueError:
                continue
            assert made.native or made.note or rule.note, (path, value)
            for native in made.native:
                plain = re.sub(r"\[\d+\]", "[]", native)
                assert plain in NATIVE or plain.startswith(NAMED) or plain == "data.mix", (path, native)


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_aliases_are_other_names_of_keys(name: str) -> None:
    for dialect in (DIALECTS[name], *DIALECTS[name].others):
        assert set(dialect.aliases.values()) <= set(dialect.rules)
        assert not set(dialect.aliases) & set(dialect.rules)


@pytest.mark.parametrize(
    ("keys", "paths"),
    [
        ("a.b", ["a.b"]),
        ("a.{b,c}.d", ["a.b.d", "a.c.d"]),
        ("{a,b}.{c,d} e", ["a.c", "a.d", "b.c", "b.d", "e"]),
    ],
)
def test_a_row_may_stand_for_several_keys(keys: str, paths: list[str]) -> None:
    assert [rule.path for rule in to(keys, "run.seed", "count")] == paths


@pytest.mark.parametrize(
    ("values", "accepted", "refused"),
    [
        ("count?", (1, None), (0, "1")),
        ("[text]", (["a"],), ("a", [1])),
        ("fast|slow?", ("fast", None), ("other", 1)),
        ("count or -1", (3, -1), (0, None)),
        ({"on": True}, ("on",), ("off",)),
    ],
)
def test_accepted_values_are_written_in_short(
    values: Any, accepted: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    (rule,) = to("key", "run.seed", values)
    assert all(rule.takes.accepts(value) for value in accepted)
    assert not any(rule.takes.accepts(value) for value in refused)


def test_a_misspelled_type_is_an_error() -> None:
    with pytest.raises(ValueError, match="nummber"):
        to("key", "run.seed", "nummber")
