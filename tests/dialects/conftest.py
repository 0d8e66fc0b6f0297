"""The config files of the documentation pages: their YAML, and fragments to merge over a whole file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from braid_dialects.load import Read, read_config
from braid_dialects.table import DialectName

from .embodied import Examples

SEEDS = Path(__file__).parent / "seeds"
ENVIRONMENT = {"HOME": "/home/user", "REPO_PATH": "/opt/rlinf"}
"""Environment variables that the files name."""
IN_ONE_PROCESS: dict[str, Any] = {"backend": "single", "engine": "native"}
"""Command-line options of a run on a laptop."""


@dataclass(frozen=True, slots=True)
class Seed:
    """A config of a page. `files` are laid over each other, the last on top; `variant` is one of the last
    file's variants: role and strategy in place of its own."""

    name: str
    dialect: DialectName
    files: tuple[str, ...]
    variant: tuple[str, str] | None = None
    is_text: bool = True

    def tree(self) -> dict[str, Any]:
        """The file as plain data."""
        tree: dict[str, Any] = {}
        for name in self.files:
            tree = laid_over(tree, yaml.safe_load((SEEDS / name).read_text("utf-8")))
        variants = tree.pop("variants", {})
        if self.variant is not None:
            role, name = self.variant
            tree[role]["strategy_args"] = variants[name]
        return tree


ALL_SEEDS = (
    Seed("rlinf-math-000", "rlinf", ("rlinf-math-000.yaml",)),
    Seed("rlinf-agentic-001", "rlinf", ("rlinf-math-003.yaml", "rlinf-agentic-001.yaml")),
    Seed("roll-rlvr-002", "roll", ("roll-rlvr-002.yaml",)),
    Seed("roll-rlvr-002-prose", "roll", ("roll-rlvr-002.yaml", "roll-rlvr-002-prose.yaml")),
    Seed("roll-rlvr-002-fsdp2", "roll", ("roll-rlvr-002.yaml", "roll-rlvr-002-prose.yaml"), ("actor_train", "actor_train_fsdp2")),
    Seed("roll-rlvr-002-sglang", "roll", ("roll-rlvr-002.yaml", "roll-rlvr-002-prose.yaml"), ("actor_infer", "actor_infer_sglang")),
    Seed("roll-rlvr-002-hf", "roll", ("roll-rlvr-002.yaml", "roll-rlvr-002-prose.yaml"), ("actor_infer", "actor_infer_hf")),
    Seed("rlinf-math-003", "rlinf", ("rlinf-math-003.yaml",)),
    Seed("rlinf-embodied-003", "rlinf", ("rlinf-embodied-003.yaml",), is_text=False),
    Seed("skyrl-004", "skyrl", ("skyrl-004.yaml",)),
    Seed("roll-images", "roll", ("roll-rlvr-002.yaml", "roll-images.yaml")),
    Seed("rlinf-images", "rlinf", ("rlinf-math-003.yaml", "rlinf-images.yaml")),
    Seed("roll-sft", "roll", ("roll-sft.yaml",)),
    Seed("roll-distill", "roll", ("roll-distill.yaml",)),
    Seed("skyrl-sft", "skyrl", ("skyrl-sft.yaml",)),
    Seed("rlinf-sft", "rlinf", ("rlinf-sft.yaml",)),
    Seed("verl-gsm8k", "verl", ("verl-gsm8k.yaml",)),
    Seed("trl-grpo", "trl", ("trl-grpo.yaml",)),
    Seed("trl-dpo", "trl", ("trl-dpo.yaml",)),
    Seed("trl-sft", "trl", ("trl-sft.yaml",)),
    Seed("skyrl-images", "skyrl", ("skyrl-004.yaml", "skyrl-images.yaml")),
)  # fmt: skip
TEXT_SEEDS = tuple(seed for seed in ALL_SEEDS if seed.is_text)


def laid_over(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge mappings; other values are replaced."""
    out = dict(under)
    for key, value in over.items():
        below = out.get(key)
        out[key] = laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return out


class Reader:
    """Reads seeds, as they are where one file is all, in a folder of copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(SEEDS, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)

    def path(self, seed: Seed) -> Path:
        """The file to give to braid."""
        if len(seed.files) == 1:
            return self.folder / seed.files[0]
        return self.write(seed.name, seed.tree())

    def write(self, name: str, tree: dict[str, Any]) -> Path:
        """A file of plain data beside the seeds, where their presets are."""
        path = self.folder / f"{name}.laid.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), "utf-8")
        return path

    def read(self, seed: Seed, overrides: Sequence[str] = (), **chosen: Any) -> Read:
        """The seed's config and ledger."""
        return read_config(self.path(seed), overrides, dialect=seed.dialect, **chosen)


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Reads the seeds."""
    return Reader(tmp_path_factory.mktemp("seeds"))


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examples:
    """Reads RLinf's embodied examples."""
    monkeypatch.setenv("EMBODIED_PATH", str(tmp_path / "embodiment"))
    return Examples(tmp_path / "embodiment")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of everything that is not a mapping with keys."""
    for key, value in tree.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value:
            yield from leaves(value, name)
        else:
            yield name, value
