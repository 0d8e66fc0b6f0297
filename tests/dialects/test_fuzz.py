"""Any foreign file loads or raises a ConfigError: no other exception, no code executed, every key accounted
for."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from braid.errors import BraidError
from braid_dialects.devices import DEVICES
from braid_dialects.load import DIALECTS, read_config, read_foreign
from braid_dialects.translate import NATIVE, translate

from .conftest import ALL_SEEDS, IN_ONE_PROCESS, Reader, Seed, leaves

SENTINEL = "sentinel-of-evaluated-code"
_OPEN = f"open({SENTINEL!r}, 'w')"
CODE = (
    f"list(range(0, {_OPEN}.fileno()))",
    f"[{_OPEN} for _ in range(1)]",
    f"__import__('pathlib').Path({SENTINEL!r}).touch()",
    f"list(range(0,4)) + [{_OPEN}]",
    f'${{oc.decode:"{_OPEN}"}}',
    f"${{eval:{_OPEN}}}",
    f"{{{{ {_OPEN} }}}}",
    f"!!python/object/apply:pathlib.Path.touch [{SENTINEL}]",
)
"""Texts that would create a file if they were executed."""
INTERPOLATIONS = (
    "${", "${}", "${a", "${a.b.c}", "${oc.env:NO_SUCH_VARIABLE}", "${oc.env:HOME}", "${rollout_batch_size}", "${runner}",
    "${trainer.policy}", "${subtract:1}", "${multiply:a,2}", "${div:1,0}", "${int_div:1,0}", "${..x}", "${.}", "${oc.select:x}",
    "\\${literal}", "${${oc.env:HOME}}", "${actor_train}", "${hydra:runtime.cwd}", "???",
)  # fmt: skip
WILD = (
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    float("1e300"),
    "",
    "x" * 2000,
    "\x00",
    "日本",
    [],
    {},
    [[]],
    {"a": {"b": []}},
    "0-7:0-3",
)

_scalars = st.one_of(
    st.sampled_from(WILD),
    st.sampled_from(CODE),
    st.sampled_from(INTERPOLATIONS),
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=12),
)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
_names = st.one_of(
    st.text(max_size=10),
    st.sampled_from(("*", "a.b", "[0]", "braid", "0", " ", "hydra", "defaults", "rewards")),
)
_changes = st.lists(
    st.tuples(
        st.sampled_from(("replace", "remove", "add", "rename")), st.integers(0, 10_000), _names, _values
    ),
    min_size=1,
    max_size=4,
)
_choices = st.sampled_from(({}, IN_ONE_PROCESS))


def mutated(tree: dict[str, Any], changes: list[tuple[str, int, str, Any]]) -> dict[str, Any]:
    """The tree with some of its keys replaced, removed, renamed, or joined by others."""
    tree = copy.deepcopy(tree)
    for what, index, name, value in changes:
        places = list(_mappings(tree))
        keyed = [(mapping, key) for mapping in places for key in mapping]
        if what == "add" or not keyed:
            places[index % len(places)][name] = value
            continue
        mapping, key = keyed[index % len(keyed)]
        old = mapping.pop(key)
        if what == "replace":
            mapping[key] = value
        elif what == "rename":
            mapping[name] = old
    return tree


def _mappings(tree: dict[str, Any]) -> Any:
    yield tree
    for value in tree.values():
        if isinstance(value, dict):
            yield from _mappings(value)


def check(
    reader: Reader, seed: Seed, changes: list[tuple[str, int, str, Any]], chosen: dict[str, Any]
) -> None:
    path = reader.write("fuzzed", mutated(seed.tree(), changes))
    try:
        read = read_config(path, dialect=seed.dialect, **chosen)
    except BraidError:
        return
    finally:
        assert not Path(SENTINEL).exists()
    rows = [entry.path for entry in read.ledger]
    foreign = read_foreign(path, (), DIALECTS[seed.dialect])
    foreign_tree = {key: value for key, value in foreign.tree.items() if key != NATIVE}
    for name, _ in leaves(foreign_tree):
        assert any(name == row or name.startswith((f"{row}.", f"{row}[")) for row in rows), name


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


_SLOW_INPUTS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture)
_FAST = settings(max_examples=25, suppress_health_check=_SLOW_INPUTS)
_LONG = settings(max_examples=150, suppress_health_check=_SLOW_INPUTS)
_SEEDS = st.sampled_from([seed for seed in ALL_SEEDS if seed.variant is None])
_ONE_OF_EACH = {seed.dialect: seed for seed in reversed(ALL_SEEDS) if seed.variant is None}.values()
"""The first file of each dialect."""


@pytest.mark.slow
@_FAST
@given(seed=_SEEDS, changes=_changes, chosen=_choices)
def test_a_mutated_file_loads_or_raises_a_config_error(
    reader: Reader, seed: Seed, changes: list[tuple[str, int, str, Any]], chosen: dict[str, Any]
) -> None:
    check(reader, seed, changes, chosen)


@pytest.mark.slow
@pytest.mark.nightly
@_LONG
@given(seed=_SEEDS, changes=_changes, chosen=_choices)
def test_many_mutated_files_load_or_raise_a_config_error(
    reader: Reader, seed: Seed, changes: list[tuple[str, int, str, Any]], chosen: dict[str, Any]
) -> None:
    check(reader, seed, changes, chosen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=seed.name, marks=[pytest.mark.nightly] * (seed not in _ONE_OF_EACH))
        for seed in ALL_SEEDS
        if seed.variant is None
    ],
)
def test_each_key_takes_any_value_without_a_traceback(reader: Reader, seed: Seed) -> None:
    dialect = DIALECTS[seed.dialect]
    base = read_foreign(reader.path(seed), (), dialect)
    for number, (path, _) in enumerate(leaves(base.tree)):
        foreign = copy.deepcopy(base)
        mapping: Any = foreign.tree
        *parents, name = path.split(".")
        for parent in parents:
            mapping = mapping[parent]
        for value in (WILD[number % len(WILD)], CODE[number % len(CODE)], None, 3, "text", [1], {"a": 1}):
            mapping[name] = value
            translate(foreign, dialect)
    assert not Path(SENTINEL).exists()


@given(st.text(max_size=40))
@example("list(range(0,8))")
@example("(" * 500)
def test_a_device_mapping_is_read_or_refused(text: str) -> None:
    assert isinstance(DEVICES.accepts(text), bool)


@pytest.mark.parametrize("text", CODE)
def test_code_in_a_device_mapping_is_refused_and_not_run(reader: Reader, text: str) -> None:
    seed = next(seed for seed in ALL_SEEDS if seed.name == "roll-rlvr-002")
    tree = seed.tree()
    tree["actor_train"]["device_mapping"] = text
    with pytest.raises(BraidError, match=r"device_mapping|eval|oc.decode|decode"):
        read_config(reader.write("code", tree), dialect="roll")
    assert not Path(SENTINEL).exists()


YAML_TEXTS = {
    "a tag": f"rollout_batch_size: !!python/object/apply:os.system ['touch {SENTINEL}']\nactor_train: {{}}\n",
    "a tag of its own": "rollout_batch_size: !mine 3\nactor_train: {}\n",
    "an anchor in itself": "actor_train: &a\n  model_args: *a\nrollout_batch_size: 1\n",
    "a merge of itself": "actor_train: &a\n  <<: *a\nrollout_batch_size: 1\n",
    "many aliases": "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b]\nactor_train: *c\n",
    "a circle of interpolations": "rollout_batch_size: ${prompt_length}\nprompt_length: ${rollout_batch_size}\n",
    "a circle through itself": "actor_train: {infer_batch_size: '${actor_train}'}\n",
    "a list": "- rollout_batch_size\n",
    "two documents": "rollout_batch_size: 1\n---\nprompt_length: 2\n",
    "no YAML": "rollout_batch_size: [1\n",
    "nothing": "",
    "a key twice": "rollout_batch_size: 1\nrollout_batch_size: 2\n",
    "a key that is a list": "? [a, b]\n: 1\nactor_train: {}\n",
    "deep nesting": "actor_train: " + "{a: " * 60 + "1" + "}" * 60 + "\n",
    "deep lists": "actor_train: " + "[" * 60 + "]" * 60 + "\n",
    "very deep nesting": "actor_train: " + "{a: " * 5000 + "1" + "}" * 5000 + "\n",
    "very deep interpolation": "exp_name: " + "${" * 500 + "}" * 500 + "\nactor_train: {}\n",
    "bytes that are no text": "rollout_batch_size: \x01\n",
    "defaults that are no list": "defaults: 3\nactor_train: {}\n",
    "a preset that is not there": "defaults: [env/none@env.train]\nactor_train: {}\n",
    "a preset outside": "defaults: [../../../etc/passwd@env]\nactor_train: {}\n",
}


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize("what", sorted(YAML_TEXTS))
def test_any_yaml_loads_or_raises_a_config_error(tmp_path: Path, what: str, dialect: Any) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(YAML_TEXTS[what], "utf-8")
    with suppress(BraidError):
        read_config(path, dialect=dialect)
    assert not (tmp_path / SENTINEL).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    ["", "=", "a", "a=", "=1", "..=1", "a[0]=1", "a.-1=2", "rollout_batch_size=[", "++rollout_batch_size=x", "~x", "x=${y", "x=!!python/none"],
)  # fmt: skip
def test_any_override_is_applied_or_raises_a_config_error(reader: Reader, override: str) -> None:
    for seed in ALL_SEEDS:
        if seed.variant is None:
            with pytest.raises(BraidError):
                reader.read(seed, [override])


def test_a_written_file_reads_as_it_was(reader: Reader) -> None:
    """The mutations go through a file: what is written is what is read."""
    seed = ALL_SEEDS[0]
    assert yaml.safe_load(reader.write("same", seed.tree()).read_text("utf-8")) == seed.tree()
