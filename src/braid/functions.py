"""User functions named in a config, as `package.module.function` or `file.py:function`, and those passed to
the Python API, as `braid.given.name`, which the config holds.

Owns finding and importing them; their signatures are up to the callers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from os.path import isfile  # False for names that no file can have
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from braid.errors import ConfigError, Problem, suggest
from braid.users import described, is_the_users

if TYPE_CHECKING:
    from pydantic import ValidationInfo

Passed = Mapping[str, Callable[..., Any]]
"""Functions passed to the Python API, by their paths."""
NONE_PASSED: Passed = MappingProxyType({})
_PASSED = "braid.given."


def path_of_passed(function: Callable[..., Any], unnamed: str) -> str:
    """The path of a function that is passed to the Python API. `unnamed` is the name of a lambda."""
    name = getattr(function, "__name__", type(function).__name__)
    return f"{_PASSED}{name if name.isidentifier() else unnamed}"


def is_passed(path: str) -> bool:
    """Whether `path` names a function that was passed to the Python API, for this run or another."""
    return path.startswith(_PASSED)


def passed_in(info: ValidationInfo) -> Passed:
    """The functions with which a config is validated."""
    return (info.context or {}).get("functions", NONE_PASSED)


class _NotFound(Exception):
    """Carries the reason why a path does not name a function."""


_FORM = "is not a path to Python code; write package.module.name or file.py:name"


def load_function(
    path: str, *, base_dir: Path, key: str, allows_class: bool = False, passed: Passed = NONE_PASSED
) -> Callable[..., Any]:
    """Load the callable named by `path`, one of the functions `passed` among others. File paths are relative
    to `base_dir` (the config's folder); a file is executed only once.

    Raises ConfigError for the config key `key` if the file, module or function does not exist, importing it
    fails, it is not callable, or, without `allows_class`, a class.
    """
    try:
        if is_passed(path):
            if path not in passed:
                name = path.removeprefix(_PASSED)
                raise _NotFound(
                    f"the function {name!r} was passed to braid.train from Python and is not stored with the "
                    "run; call braid.train or braid.evaluate with it again, or name a function in a file: "
                    "file.py:function"
                )
            return passed[path]
        module, names = _from_file(path, base_dir) if ":" in path else _from_package(path)
        return _member(module, names, path, allows_class=allows_class)
    except _NotFound as problem:
        raise ConfigError([Problem(key, str(problem), "config")]) from problem.__cause__


def _member(module: ModuleType, names: Sequence[str], path: str, *, allows_class: bool) -> Callable[..., Any]:
    member: Any = module
    for name in names:
        if not hasattr(member, name):
            known = [n for n in vars(member) if not n.startswith("_")]
            where = Path(module.__file__).name if ":" in path and module.__file__ else module.__name__
            raise _NotFound(f"{path!r}: {where!r} has no {name!r}{suggest(name, known)}")
        member = getattr(member, name)
    if isinstance(member, type) and not allows_class:
        instance = member.__name__.lower()
        raise _NotFound(
            f"{path!r} is a class, not a function; name a function, or an instance: define `{instance} = "
            f"{member.__name__}()` in the module and use {path.removesuffix(member.__name__)}{instance}"
        )
    if not callable(member):
        wanted = "a class or a function" if allows_class else "a function"
        raise _NotFound(f"{path!r} is a {type(member).__name__}, not {wanted}")
    return member


def _from_file(path: str, base_dir: Path) -> tuple[ModuleType, list[str]]:
    file_name, _, function = path.rpartition(":")
    file = (base_dir / Path(file_name).expanduser()).resolve()
    if not function or file.suffix != ".py":
        raise _NotFound(f"{path!r} {_FORM}")
    if not isfile(file):
        near = suggest(file.name, [p.name for p in file.parent.glob("*.py")])
        raise _NotFound(f"{path!r}: no such file: {file}{near}")
    name = f"braid_user_{sha256(str(file).encode()).hexdigest()[:12]}_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec and spec.loader, "a .py file always has a loader"  # noqa: PT018
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: dataclasses and pickle look up the module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            if not is_the_users(error):
                raise
            raise _NotFound(f"{path!r}: running {file} raised {described(error)}") from error
    return sys.modules[name], function.split(".")


def _from_package(path: str) -> tuple[ModuleType, list[str]]:
    """Import the longest prefix that is a module, so that paths can also name methods of a class."""
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise _NotFound(f"{path!r} {_FORM}")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            return importlib.import_module(name), parts[end:]
        except BaseException as error:
            if not is_the_users(error):
                raise
            is_missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
            if not is_missing:
                raise _NotFound(f"{path!r}: importing {name} raised {described(error)}") from error
    raise _NotFound(
        f"{path!r}: no module named {parts[0]!r}; for a file next to the config write "
        f"'{'/'.join(parts[:-1])}.py:{parts[-1]}', else install the package into braid's environment"
    )
