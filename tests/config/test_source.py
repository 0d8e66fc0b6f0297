"""Reading YAML with origins, and overrides."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.config.source import Written, apply_override, plain_scalar, read_file
from braid.errors import ConfigError


def read(tmp_path: Path, text: str) -> Written:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return read_file(path)


def override(tree: dict[str, Any], *texts: str) -> Written:
    written = Written(tree=tree)
    for text in texts:
        apply_override(written, text)
    return written


def test_every_key_knows_its_line(tmp_path: Path) -> None:
    written = read(tmp_path, "a: 1\nb:\n  - x\n  - c: 2\n    d: {e: 3}\n")
    assert written.tree == {"a": 1, "b": ["x", {"c": 2, "d": {"e": 3}}]}
    assert written.origins == {
        "a": "c.yaml:1",
        "b": "c.yaml:2",
        "b[0]": "c.yaml:3",
        "b[1]": "c.yaml:4",
        "b[1].c": "c.yaml:4",
        "b[1].d": "c.yaml:5",
        "b[1].d.e": "c.yaml:5",
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1_000", 1000),
        ("0x10", 16),
        ("0o17", 15),
        ("017", 17),
        ("-3", -3),
        (".5", 0.5),
        ("+2.", 2.0),
        ("yes", "yes"),
        ("on", "on"),
        ("true", True),
        ("~", None),
        ("", None),
        ("2024-01-02", "2024-01-02"),
        ("12:30", "12:30"),
        (".inf", math.inf),
        ("1.2.3", "1.2.3"),
        ("-", "-"),
        ("e5", "e5"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    scalar = plain_scalar(text)
    assert scalar == value
    assert type(scalar) is type(value)


def test_quoted_scalars_are_text(tmp_path: Path) -> None:
    assert read(tmp_path, "a: '1'\nb: \"true\"\nc: |\n  5\n").tree == {"a": "1", "b": "true", "c": "5\n"}


def test_own_keys_override_merged_ones_which_keep_their_line(tmp_path: Path) -> None:
    written = read(tmp_path, "base: &b\n  x: 1\n  y: 2\nother:\n  <<: *b\n  y: 3\n")
    assert written.tree["other"] == {"x": 1, "y": 3}
    assert written.origins["other.x"] == "c.yaml:2"
    assert written.origins["other.y"] == "c.yaml:6"


def test_of_several_merged_mappings_the_first_counts(tmp_path: Path) -> None:
    written = read(tmp_path, "a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b]}\n")
    assert written.tree["c"] == {"x": 1, "y": 2}


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    assert read(tmp_path, "# nothing\n").tree == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: 1\nb: 2\na: 3\n",
            "a: duplicate key, first set at c.yaml:1; remove one [c.yaml:3]",
        ),
        ("a: !!python/name:os.system x\n", "is not supported; remove it [c.yaml:1]"),
        (
            "a: &a\n  b: *a\n",
            "a.b: an alias (*name) must not refer to a node that contains it; remove it [c.yaml:1]",
        ),
        ("? [1, 2]\n: 3\n", "config: a key must be a plain scalar [c.yaml:1]"),
        ("a: {<<: 3}\n", "a: << needs a mapping, or a list of mappings, that does not contain it [c.yaml:1]"),
    ],
)
def test_unusable_values_are_reported_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    (problem,) = read(tmp_path, text).problems
    assert message in str(problem)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n  b: 2\n", "config: not valid YAML: mapping values are not allowed here [c.yaml:2:4]"),
        ("a: [1, 2\n", "config: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("a:\n\tb: 1\n", "indent YAML with spaces, not tabs [c.yaml:2:1]"),
        ("a: {b: ${c.d}}\n", "quote ${...} inside { } and [ ] [c.yaml:1:9]"),
        ("a: 1\n---\nb: 2\n", "a config is a single document, remove the line --- [c.yaml:2:1]"),
        ("- 1\n", "config: the file contains a list; a config must be a mapping [c.yaml:1]"),
        (
            "hello\n",
            "config: the file contains a single value; a config must be a mapping [c.yaml:1]",
        ),
        ("a: *nope\n", "config: not valid YAML: found undefined alias 'nope' [c.yaml:1:4]"),
        ("a: \x07\n", "config: not valid YAML: special characters are not allowed [c.yaml]"),
    ],
)
def test_syntax_errors_name_file_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert message in str(error.value)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("")
    with pytest.raises(
        ConfigError, match=r"no such file: .*quikstart.yaml, did you mean 'quickstart.yaml'\?"
    ):
        read_file(tmp_path / "quikstart.yaml")


def test_a_folder_in_place_of_a_file_lists_its_configs(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("")
    with pytest.raises(
        ConfigError, match=r"is a folder; pass a \.yaml file, such as one\.yaml \[command line\]"
    ):
        read_file(tmp_path)


def test_a_file_that_is_not_text_is_reported(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"the file is not UTF-8 text \(invalid start byte\) \[b\.yaml\]"):
        read_file(tmp_path / "b.yaml")


@pytest.mark.parametrize("key", ["a.b.1.c", "a.b[1].c"])
def test_an_override_sets_an_entry_of_a_list(key: str) -> None:
    written = override({"a": {"b": [{"c": 1}, {"c": 2}]}}, f"{key}=5")
    assert written.tree == {"a": {"b": [{"c": 1}, {"c": 5}]}}
    assert written.origins["a.b[1].c"] == "override"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("k=[1, x]", [1, "x"]),
        ("k={a: 1}", {"a": 1}),
        ("k=null", None),
        ("k=", ""),
        ("k='1'", "1"),
        ("k=a=b", "a=b"),
        ("k=${a.b}", "${a.b}"),
        ("k=true", True),
        ("k=A:(-?[0-9]+)$", "A:(-?[0-9]+)$"),
        ("k= 3 ", 3),
        ("k=# x", "# x"),
    ],
)
def test_the_value_of_an_override_is_yaml(text: str, value: object) -> None:
    assert override({}, text).tree == {"k": value}


def test_overrides_make_the_mappings_and_lists_they_need() -> None:
    assert override({}, "a.b.0.c=1", "a.b.1.c=2").tree == {"a": {"b": [{"c": 1}, {"c": 2}]}}


def test_a_mapping_replaces_what_was_there_with_its_origins() -> None:
    written = override({"a": {"b": 1}}, "a.b=2", "a={c: 3}")
    assert written.tree == {"a": {"c": 3}}
    assert "a.b" not in written.origins


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed", "config: 'seed' is not an override; write key=value, for example run.seed=1 [override]"),
        ("b.yaml", "run.seed=1; only one config file is allowed [override]"),
        ("=3", "config: '=3' is not an override"),
        ("a..b=3", "config: 'a..b=3' is not an override"),
        ("l.5=3", "l[5]: l is a list of length 1; 5 is not an index from 0 to 1 [override]"),
        ("l.x=3", "l.x: l is a list of length 1; 'x' is not an index from 0 to 1 [override]"),
        ("s.x=3", "s.x: s is 'text', which has no keys [override]"),
        ("s=[1", "s: cannot parse the value [1 "),
        ("s=a: b: c", "quote strings: 's=\"...\"' [override]"),
    ],
)
def test_a_malformed_override_says_what_to_write(text: str, message: str) -> None:
    (problem,) = override({"l": [1], "s": "text"}, text).problems
    assert message in str(problem)


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_override_raises(key: str, value: str) -> None:
    override({"a": [1, {"b": 2}]}, f"{key}={value}", f"a.{value}", f"a.1.b={value}")


@given(st.text(alphabet=" \n-:{}[]&*?|>'\"%@`!#,<ab1.$\t", max_size=60))
def test_any_text_is_read_or_refused_with_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    with contextlib.suppress(ConfigError):
        read(tmp_path_factory.getbasetemp(), text)
