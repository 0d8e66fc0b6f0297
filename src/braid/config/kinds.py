"""Config keys that hold a kind of a family, such as `algorithm.policy_loss`: a name, settings, or both.

    policy_loss: cispo                         a kind
    policy_loss: {clip_high: 0.28}             settings of the recipe's kind
    policy_loss: {kind: cispo, mask: true}     both
    policy_loss: my_loss.py:MyLoss             a class or function of the user's own

In other families, such as `rollout.engine`, settings without a kind belong to the default kind.

Owns their validation and their schema. A key that only other kinds have is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args

from pydantic import Discriminator, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from braid.functions import passed_in
from braid.kinds import Kind, is_path, own_kind

K = TypeVar("K", bound=Kind)
OWN_FORM = "file.py:name of your own"


@dataclass(frozen=True, eq=False)
class KindOf:
    """Validates a value as a kind of `family`, one of `kinds` or the user's own. Settings without `kind` are
    of `default_kind`; where that depends on the section's other values, as on the recipe, it is a function of
    them, and what was not set is left to it."""

    family: type[Kind]
    kinds: Mapping[str, type[Kind]]
    default_kind: str | Callable[[Mapping[str, Any]], str]

    def field(self) -> Any:
        """The annotation of a key that holds one of the kinds."""
        union = Union[tuple(self.kinds.values())]  # noqa: UP007  # of classes from a table
        return Annotated[Annotated[union, Discriminator("kind")], self]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        written = core_schema.plain_serializer_function_ser_schema(
            _all if isinstance(self.default_kind, str) else _as_written
        )
        return core_schema.with_info_wrap_validator_function(
            self._validated, handler(source), serialization=written
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Settings without `kind` may be those of several kinds, so it is no `oneOf`."""
        plain = [{"enum": list(self.kinds)}, {"type": "string", "format": OWN_FORM}]
        return {"anyOf": [*handler(schema["schema"])["oneOf"], *plain]}

    def with_kind(self, value: Any) -> Any:
        """A name, or settings of the default kind, as a mapping with `kind`; other values as they are."""
        if isinstance(value, str) and "${" not in value:
            return {"kind": value}
        if isinstance(value, dict) and "kind" not in value and isinstance(self.default_kind, str):
            return {"kind": self.default_kind, **value}
        return value

    def _validated(self, value: Any, of_braid: Callable[[Any], Kind], info: ValidationInfo) -> Kind:
        if isinstance(value, self.family) and type(value) not in self.kinds.values():
            return value
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, dict):
            return of_braid(value)
        if "kind" not in value:
            default = self.default_kind
            made = of_braid({"kind": default if isinstance(default, str) else default(info.data), **value})
            made.model_fields_set.discard("kind")
            return made
        if is_path(value["kind"]):
            settings = {key: item for key, item in value.items() if key != "kind"}
            base_dir = (info.context or {}).get("base_dir", Path())
            return own_kind(self.family, value["kind"], settings, base_dir=base_dir, passed=passed_in(info))
        return of_braid(value)


def kinds_of(field: FieldInfo) -> KindOf | None:
    """The family that a field holds a kind of, which may be one of the user's own."""
    options = (field.annotation, *get_args(field.annotation))
    marks = (mark for option in (field, *options) for mark in _marks(option))
    return next((mark for mark in marks if isinstance(mark, KindOf)), None)


def _marks(option: Any) -> Sequence[Any]:
    return option.metadata if isinstance(option, FieldInfo) else getattr(option, "__metadata__", ())


def _as_written(kind: Kind) -> dict[str, Any]:
    """What was set; the recipe has the rest."""
    return kind.model_dump(mode="json", exclude_unset=True)


def _all(kind: Kind) -> dict[str, Any]:
    return kind.model_dump(mode="json")


def with_settings(base: K, changed: K | None) -> K:
    """`base` with the settings that were set in `changed`, which stands alone if it is of another kind."""
    if changed is None:
        return base
    if type(base) is not type(changed):
        return changed
    return base.model_copy(update={name: getattr(changed, name) for name in changed.model_fields_set})
