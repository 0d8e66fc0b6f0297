"""Base of all config sections: frozen, unknown keys rejected, defaults validated, numbers finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler

Unused = Iterator[tuple[str, str]]
"""(reason, keys): config keys that have no effect in a run. Keys are patterns separated by spaces: `{a,b}`
stands for alternatives, and `section.*` for all keys of a section. `@` stands for the section's own path."""


class Section(BaseModel):
    """A section of the config. Instances are immutable."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
    )

    only_for_training: ClassVar[str] = ""
    """Patterns of the keys that an evaluation does not depend on."""
    unused_while: ClassVar[tuple[tuple[str, Any, str], ...]] = ()
    """(key, value, keys): those of its keys, separated by spaces, that have no effect while `key` has this
    value."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler, /
    ) -> dict[str, Any]:
        """With the descriptions that braid.config.shape.describe has set."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, field in cls.model_fields.items():
            if field.description and name in properties:
                properties[name]["description"] = field.description
        return schema

    def unused_settings(self) -> Unused:
        """Keys of this section that have no effect by `unused_while`."""
        for key, value, keys in self.unused_while:
            if getattr(self, key) == value:
                shown = "off" if value is None else str(value).lower()
                yield f"@.{key} is {shown}", " ".join(f"@.{name}" for name in keys.split())

    def unused(self, config: Any, plan: Any) -> Unused:
        """Keys of this section that have no effect in the run of `config`, and keys of others that its kind
        leaves without one. Where several reasons are given for a key, the first counts."""
        del config, plan
        yield from ()
