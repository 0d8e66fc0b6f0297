"""Base of all config sections: frozen, unknown keys rejected, defaults validated, numbers finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the config. Instances are immutable."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    unused_while: ClassVar[tuple[tuple[str, Any, str], ...]] = ()
    """(key, value, keys): those of its keys, separated by spaces, that have no effect while `key` has this
    value."""

    def unused_settings(self, at: str = "") -> Iterator[tuple[str, str]]:
        """(reason, keys) by `unused_while`, of this section at key `at` and of those below it."""
        prefix = f"{at}." if at else ""
        for key, value, keys in self.unused_while:
            if getattr(self, key) == value:
                shown = "off" if value is None else str(value).lower()
                yield f"{prefix}{key} is {shown}", " ".join(f"{prefix}{name}" for name in keys.split())
        for name, value in self:
            if isinstance(value, Section):
                yield from value.unused_settings(f"{prefix}{name}")
