"""On PYTHONPATH, it hides from braid all packages that a run in one process does not need."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

LACKING = {
    "datasets", "deepspeed", "gem", "gymnasium", "httpx2", "jsonschema", "latex2sympy2_extended", "math_verify",
    "mbridge", "mcp", "megatron", "ray", "reasoning_gym", "sandlock", "tensorboard", "textarena", "textworld", "uvicorn",
    "websockets",
}  # fmt: skip
_import = builtins.__import__


def _refuse(name: str, importer: str) -> None:
    """Refuses packages to braid's own modules; other libraries import theirs as they please."""
    if name.partition(".")[0] in LACKING and importer.startswith("braid."):
        raise ModuleNotFoundError(f"No module named {name!r} in this test", name=name)


def _import_others(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """Also of what another library has imported already."""
    if level == 0 and globals is not None:
        _refuse(name, str(globals.get("__name__", "")))
    return _import(name, globals, locals, fromlist or (), level)


class _Finder(MetaPathFinder):
    """For `importlib.import_module` and `find_spec`."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> None:
        frame = inspect.currentframe()
        assert frame is not None, "CPython has frames"
        while frame.f_globals is globals() and frame.f_back is not None:
            frame = frame.f_back
        while frame.f_back is not None and "importlib" in frame.f_globals.get("__name__", ""):
            frame = frame.f_back
        _refuse(fullname, frame.f_globals.get("__name__", ""))


builtins.__import__ = _import_others
sys.meta_path.insert(0, _Finder())
