"""The pinned packages can be installed on every Python that braid supports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
LOCKS = ("runtime", "dev", "agents", "robots", "vllm", "backends", "bench", "docs")
PYTHONS = ("3.11.0", "3.11.2", "3.12.0", "3.12.1", "3.12.12", "3.13.0", "3.13.9")


@pytest.mark.parametrize("lock", LOCKS)
def test_each_pinned_package_accepts_each_python_it_is_installed_on(lock: str) -> None:
    lines = (ROOT / "requirements" / f"{lock}.lock").read_text().splitlines()
    stated = [line.split("#")[0].strip() for line in lines]
    num_checked, refused = 0, []
    for requirement in map(Requirement, filter(None, stated)):
        try:
            accepts = SpecifierSet(metadata(requirement.name).get("Requires-Python", ""))
        except PackageNotFoundError:
            continue
        num_checked += 1
        for python in PYTHONS:
            environment = {"python_version": python.rpartition(".")[0], "python_full_version": python}
            marker = requirement.marker
            if (marker is None or marker.evaluate(environment)) and python not in accepts:
                refused.append(f"{requirement} is installed on Python {python}, but needs {accepts}")
    assert not refused, "\n".join(refused)
    if not num_checked:
        pytest.skip(f"no package of {lock}.lock is installed here")
