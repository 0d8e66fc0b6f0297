"""What the kinds of a family, such as policy losses, have in common.

A kind is a class: its fields are its config keys, its methods its formula, its class variables what it
declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import PrivateAttr

from braid.functions import give, given
from braid.sections import Section

K = TypeVar("K", bound="Kind")
F = TypeVar("F", bound="CallsFunction")


class Kind(Section):
    """One kind of a family. Instances are immutable, and hold the settings of one run."""

    kind: Any = ""  # a literal in braid's own kinds
    """The kind."""

    config_key: ClassVar[str] = ""
    """The config key of the family."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """Metrics that it reports: name -> meaning. All are dimensionless."""

    _base_dir: Path | None = PrivateAttr(None)
    """Of a user's own: where the path `kind` starts from."""

    @classmethod
    def of_function(cls: type[K], function: Callable[..., Any]) -> K:
        """A user's function as a kind of the family."""
        raise NotImplementedError(f"{cls.__name__} has no form as a function")

    @property
    def is_own(self) -> bool:
        """Whether it is a user's own, named by its path."""
        return self._base_dir is not None

    def at(self: K, path: str, base_dir: Path) -> K:
        """The same, of the user's class or function at `path`."""
        named = self.model_copy(update={"kind": path})
        named._base_dir = base_dir.absolute()
        return named

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A user's own is loaded again in the process that receives it, where its module has not been
        imported."""
        if self._base_dir is None:
            return super().__reduce_ex__(protocol)
        family = next(base for base in type(self).__mro__ if base.__dict__.get("config_key"))
        settings = self.model_dump(exclude_unset=True, exclude={"kind"})
        return _load_again, (family, self.kind, settings, self._base_dir, given(self.kind))


class CallsFunction(Kind):
    """A kind whose formula is a user's function."""

    _function: Callable[..., Any] = PrivateAttr()

    @classmethod
    def calling(cls: type[F], function: Callable[..., Any]) -> F:
        kind = cls()
        kind._function = function
        return kind


def _load_again(
    family: type[Kind],
    path: str,
    settings: Mapping[str, Any],
    base_dir: Path,
    passed: Callable[..., Any] | None,
) -> Kind:
    """`passed` is what was passed to the Python API of the process that sent it."""
    if passed is not None:
        give(passed, path.rpartition(".")[2])
    module = import_module("braid.algorithms.own")
    return module.own_kind(family, path, settings, base_dir=base_dir)
