"""On PYTHONPATH, it hides from braid all packages that a run in one process does not need."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

LACKING = {
    "datasets", "deepspeed", "gymnasium", "httpx2", "latex2sympy2_extended", "math_verify", "mbridge", "megatron",
    "ray", "reasoning_gym", "sandlock", "tensorboard",
}  # fmt: skip


class _Refuse(MetaPathFinder):
    """Refuses packages to braid's own modules; other libraries import theirs as they please."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> None:
        if fullname.partition(".")[0] not in LACKING:
            return
        frame = sys._getframe(1)
        while frame.f_back is not None and "importlib" in frame.f_globals.get("__name__", ""):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("braid."):
            raise ModuleNotFoundError(f"No module named {fullname!r} in this test", name=fullname)


sys.meta_path.insert(0, _Refuse())
