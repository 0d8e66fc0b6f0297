"""The reference page and the schema in docs/ are current; examples name the schema and load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from braid.config.json_schema import schema, schema_text
from braid.config.load import load_config
from braid.config.reference import reference_text
from braid.config.schema import RunConfig
from braid.config.shape import describe, fields_of, sections_of
from braid.plan import default_verb, resolve

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def test_the_reference_page_is_current() -> None:
    assert (ROOT / "docs/config.md").read_text("utf-8") == reference_text(), "run `make docs`"


def test_the_schema_file_is_current() -> None:
    assert (ROOT / "docs/schema.json").read_text("utf-8") == schema_text(), "run `make docs`"


def test_every_key_has_a_description() -> None:
    describe(RunConfig)
    assert [path for path, field in fields_of(RunConfig) if not field.description] == []


def test_every_key_is_on_the_reference_page() -> None:
    page = reference_text()
    for path, field in fields_of(RunConfig):
        is_section = bool(sections_of(field))
        assert (
            f"## {path}" if is_section else f"| `{path.rpartition('.')[2]}` |"
        ) in page or path.startswith(
            (
                "critic.train.",
                "sft.optimizer.",
                "prefer.optimizer.",
                "sac.optimizer.",
                "sac.critic_optimizer.",
            )  # which refer to train
        ), path


def test_the_schema_is_json_with_a_description_of_every_section() -> None:
    definitions = json.loads(schema_text())["$defs"]
    assert all(definition["description"] for definition in definitions.values())


def test_the_schema_lets_any_number_be_an_interpolation() -> None:
    seed = schema()["$defs"]["RunSection"]["properties"]["seed"]
    assert seed["anyOf"] == [{"minimum": 0, "type": "integer"}, {"type": "string", "pattern": r"\$\{"}]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_name_the_schema_and_resolve_without_warnings(path: Path) -> None:
    text = path.read_text("utf-8")
    assert "# yaml-language-server: $schema=../docs/schema.json" in text
    loaded = load_config(path)
    verb = default_verb(loaded.config)
    assert f"braid {verb} examples/{path.name}" in text
    assert resolve(loaded.config, verb=verb, origin_of=loaded.origin).warnings == ()
