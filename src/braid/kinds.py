"""What the kinds of a family, such as policy losses or training backends, have in common.

A kind is a class: its fields are its config keys, its methods its formula or builder, its class variables
what it declares. A user's own is a class, or in some families a function, named by its path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import PrivateAttr, ValidationError

from braid.errors import ConfigError, suggest
from braid.functions import NONE_PASSED, Passed, is_passed, load_function
from braid.sections import Section
from braid.users import described, is_the_users, shown

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
    _passed: Passed = PrivateAttr(default_factory=dict)
    """The function at `kind`, if it was passed to the Python API."""

    @classmethod
    def of_function(cls: type[K], function: Callable[..., Any]) -> K:  # noqa: ARG003
        """A user's function as a kind of the family. Raises ValueError in a family that has classes only."""
        raise ValueError(f"name a class of {_home(cls)}, not a function")

    def must_define(self) -> tuple[str, ...]:
        """Methods that a user's own needs with its settings, and that the family leaves to its kinds."""
        return ()

    @property
    def is_own(self) -> bool:
        """Whether it is a user's own, named by its path."""
        return self._base_dir is not None

    def at(self: K, path: str, base_dir: Path, passed: Passed = NONE_PASSED) -> K:
        """The same, of the user's class or function at `path`, which may be among the functions `passed`."""
        named = self.model_copy(update={"kind": path})
        named._base_dir = base_dir.absolute()
        named._passed = {name: function for name, function in passed.items() if name == path}
        return named

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A user's own is loaded again in the process that receives it, where its module has not been
        imported."""
        if self._base_dir is None:
            return super().__reduce_ex__(protocol)
        family = next(base for base in type(self).__mro__ if base.__dict__.get("config_key"))
        settings = self.model_dump(exclude_unset=True, exclude={"kind"})
        return _load_again, (family, self.kind, settings, self._base_dir, dict(self._passed))


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
    passed: Passed,
) -> Kind:
    return own_kind(family, path, settings, base_dir=base_dir, passed=passed)


def is_path(kind: object) -> bool:
    """Whether `kind` names something of the user's own: `file.py:name` or `package.module.name`."""
    return isinstance(kind, str) and (":" in kind or "." in kind)


def own_kind(
    family: type[K],
    path: str,
    settings: Mapping[str, Any],
    *,
    base_dir: Path,
    passed: Passed = NONE_PASSED,
) -> K:
    """The user's class or function at `path` as one of `family`, with `settings` as its fields.

    File paths are relative to `base_dir`; `passed` are the functions passed to the Python API. Raises
    ValueError if there is none, if it is not of the family or lacks a method, for settings that it does not
    take, and for what its own code raises.
    """
    try:
        loaded = load_function(
            path, base_dir=base_dir, key=family.config_key, allows_class=True, passed=passed
        )
    except ConfigError as error:
        if not is_passed(path):
            raise ValueError(error.problems[0].message) from error
        loaded = _Missing(error.problems[0].message)  # an evaluation or an export does not need it
    if not isinstance(loaded, type):
        if settings:
            raise ValueError(
                f"{path!r} is a function, which has no settings such as {next(iter(settings))!r}; remove "
                f"them, or write a class of {family.__name__} with these fields"
            )
        try:
            made = family.of_function(loaded)
        except ValueError as error:
            raise ValueError(f"{path!r}: {error}") from None
    elif not issubclass(loaded, family):
        raise ValueError(f"{path!r} is not a class of {_home(family)}; derive it from that")
    else:
        try:
            made = loaded.model_validate(dict(settings))
        except ValidationError as error:
            raise ValueError(f"{path}: {_problems(error, loaded)}") from None
        except BaseException as error:
            if not is_the_users(error):
                raise
            raise ValueError(f"{path!r}: to make one raised {described(error)}") from error
        if missing := [name for name in made.must_define() if _is_of_the_base(loaded, name)]:
            raise ValueError(f"{path!r} does not define {' and '.join(missing)}; see {_home(family)}")
    return made.at(path, base_dir, passed)


def _is_of_the_base(kind: type[Kind], method: str) -> bool:
    """Whether a method is the first one of this name, which the family declares for its kinds to define."""
    first = next(base for base in reversed(kind.__mro__) if method in vars(base))
    return getattr(kind, method) is getattr(first, method)


def _home(family: type[Kind]) -> str:
    """Where a family is imported from."""
    return f"{family.__module__.removesuffix('.base')}.{family.__name__}"


class _Missing:
    """In place of a function that was passed to the Python API of another process."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __call__(self, *_: Any) -> Any:
        raise ValueError(self._why)


def _problems(error: ValidationError, kind: type[Kind]) -> str:
    keys, out = [key for key in kind.model_fields if key != "kind"], list[str]()
    for detail in error.errors(include_url=False):
        name = ".".join(map(str, detail["loc"]))
        match detail["type"]:
            case "extra_forbidden":
                near = suggest(name, keys)
                out.append(f"unknown key {name!r}{near}; its keys are {', '.join(keys) or 'none'}")
            case "missing":
                out.append(f"missing required key {name!r}")
            case _:
                value = f"{name} is {shown(detail['input'])}: " if name else ""
                out.append(f"{value}{detail['msg']}")
    return "; ".join(out)
