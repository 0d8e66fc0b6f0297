"""reasoning-gym without its requirement that needs a C compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

from braid.generators import MissingGenerator, reasoning_gym

WITHOUT = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {names} else find(name, *rest)
sys.meta_path.insert(0, type("Hide", (), {{"find_spec": staticmethod(lambda name, *_: _hide(name))}}))
def _hide(name):
    if name in {names}:
        raise ModuleNotFoundError(name, name=name)
from braid.generators import MissingGenerator, reasoning_gym
try:
    made = reasoning_gym({generator!r}).create_dataset({generator!r}, size=1, seed=0)[0]
    print("made", made["answer"])
except MissingGenerator as error:
    print("refused", error)
"""


def _without(names: set[str], generator: str) -> str:
    code = WITHOUT.format(names=names, generator=generator)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_generators_work_without_pycosat_but_for_the_one_that_uses_it() -> None:
    answer = str(reasoning_gym().create_dataset("chain_sum", size=1, seed=0)[0]["answer"])
    assert _without({"pycosat"}, "chain_sum") == f"made {answer}\n"
    refused = _without({"pycosat"}, "zebra_puzzles")
    assert refused.startswith("refused zebra_puzzles needs the package pycosat")
    assert "pip install pycosat" in refused


def test_without_reasoning_gym_the_command_that_installs_it_is_named() -> None:
    refused = _without({"reasoning_gym"}, "chain_sum")
    assert refused.startswith(
        "refused the package reasoning-gym is not installed; run: pip install --no-deps"
    )


def test_it_is_an_import_error() -> None:
    """So environments of the library are refused as those of other libraries that are missing."""
    assert issubclass(MissingGenerator, ImportError)


@pytest.mark.parametrize("generator", [None, "chain_sum"])
def test_the_factory_knows_all_generators(generator: str | None) -> None:
    assert "zebra_puzzles" in reasoning_gym(generator).DATASETS
