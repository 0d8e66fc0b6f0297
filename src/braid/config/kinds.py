"""Config keys that hold a kind of a family, such as `algorithm.policy_loss`: a name, settings, or both.

    policy_loss: cispo                         a kind
    policy_loss: {clip_high: 0.28}             settings of the recipe's kind
    policy_loss: {kind: cispo, mask: true}     both
    policy_loss: my_loss.py:MyLoss             a class or function of the user's own

Owns their validation and their schema. A key that only other kinds have is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args

from pydantic import Discriminator, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from braid.algorithms.kinds import Kind
from braid.algorithms.own import is_path, own_kind

K = TypeVar("K", bound=Kind)
OWN_FORM = "file.py:name of your own"


@dataclass(frozen=True, eq=False)
class KindOf:
    """Validates a value as a kind of `family`, one of `kinds` or the user's own. Without `kind`, settings are
    of the kind that `default_kind` returns for the section's other values."""

    family: type[Kind]
    kinds: Mapping[str, type[Kind]]
    default_kind: Callable[[Mapping[str, Any]], str]

    def field(self) -> Any:
        """The annotation of a key that holds one of the kinds."""
        union = Union[tuple(self.kinds.values())]  # noqa: UP007  # of classes from a table
        return Annotated[Annotated[union, Discriminator("kind")], self]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.with_info_wrap_validator_function(
            self._validated,
            handler(source),
            serialization=core_schema.plain_serializer_function_ser_schema(_as_written),
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Settings without `kind` may be those of several kinds, so it is no `oneOf`."""
        plain = [{"enum": list(self.kinds)}, {"type": "string", "format": OWN_FORM}]
        return {"anyOf": [*handler(schema["schema"])["oneOf"], *plain]}

    def _validated(self, value: Any, of_braid: Callable[[Any], Kind], info: ValidationInfo) -> Kind:
        if isinstance(value, self.family) and type(value) not in self.kinds.values():
            return value
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, dict):
            return of_braid(value)
        if "kind" not in value:
            made = of_braid({"kind": self.default_kind(info.data), **value})
            made.model_fields_set.discard("kind")
            return made
        if is_path(value["kind"]):
            settings = {key: item for key, item in value.items() if key != "kind"}
            base_dir = (info.context or {}).get("base_dir", Path())
            return own_kind(self.family, value["kind"], settings, base_dir=base_dir)
        return of_braid(value)


def takes_own(field: FieldInfo) -> bool:
    """Whether a field holds one of a family's kinds, and so may be one of the user's own."""
    options = (field.annotation, *get_args(field.annotation))
    return any(isinstance(item, KindOf) for option in options for item in getattr(option, "__metadata__", ()))


def _as_written(kind: Kind) -> dict[str, Any]:
    """What was set; the recipe has the rest."""
    return kind.model_dump(mode="json", exclude_unset=True)


def with_settings(base: K, changed: K | None) -> K:
    """`base` with the settings that were set in `changed`, which stands alone if it is of another kind."""
    if changed is None:
        return base
    if type(base) is not type(changed):
        return changed
    return base.model_copy(update={name: getattr(changed, name) for name in changed.model_fields_set})
