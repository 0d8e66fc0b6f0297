"""Presents the fake device when torch is imported; see tests/fake_cuda/__init__.py. Python imports this
module at its start."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class _AtTorch:
    """A finder of torch alone, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        assert spec.origin is not None
        folder, execute = Path(spec.origin).parent, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            from tests import fake_cuda

            fake_cuda.load(folder)
            execute(module)
            fake_cuda.install()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("FAKE_CUDA"):
    sys.meta_path.insert(0, _AtTorch())
