"""JSON schema of the config, for completion and validation in editors."""

from __future__ import annotations

import json
from typing import Any

from .schema import RunConfig
from .shape import describe


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a config file, with a description of every key.

    Every value may also be an interpolation, so each property also accepts text of the form `${...}`.
    """
    describe(RunConfig)
    schema = RunConfig.model_json_schema(mode="validation")
    for definition in (schema, *schema.get("$defs", {}).values()):
        for name, value in definition.get("properties", {}).items():
            definition["properties"][name] = _or_interpolation(value)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "braid config"}


def schema_text() -> str:
    """The contents of docs/schema.json."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _or_interpolation(value: dict[str, Any]) -> dict[str, Any]:
    """Let a property also accept `${...}`, unless it accepts any text already, or is a discriminator."""
    is_any_text = value.get("type") == "string" and not {"enum", "pattern"} & value.keys()
    if is_any_text or "const" in value:
        return value
    outer = {key: value[key] for key in ("title", "description", "default") if key in value}
    inner = {key: item for key, item in value.items() if key not in outer}
    options = inner.pop("anyOf", None) or [inner]
    return {**outer, "anyOf": [*options, {"type": "string", "pattern": r"\$\{"}]}
