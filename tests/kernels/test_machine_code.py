"""Machine code of kernels on disk, and machines where Numba does not work, each in a separate process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import braid_kernels

pytestmark = pytest.mark.slow

KERNEL = """
import ctypes
import numpy as np
from numba import carray
from braid_kernels.machine_code import c_function
from braid_kernels.vectors import exp

@c_function()
def kernel(data):
    x = carray(data, (1,), np.float32)
    x[0] = exp(x[0])

x = np.zeros(1, np.float32)
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)(x.ctypes.data)
print(x[0], kernel.cache_hits)
"""
WHY_NOT = "from braid_kernels import kernels_for; print(kernels_for().why_not)"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the kernels, as in an installed package."""
    to = tmp_path / "package" / "braid_kernels"
    shutil.copytree(Path(braid_kernels.__file__).parent, to, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kernel.py").write_text(KERNEL)
    return to


def _said(package: Path, code: Path | str, **environment: str) -> str:
    """What a program prints, with `environment` and the home and temporary folders beside the package."""
    beside = package.parents[1]
    here = {"HOME": str(beside / "home"), "TMPDIR": str(beside), "PYTHONPATH": str(package.parent)}
    args = [code] if isinstance(code, Path) else ["-c", code]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    run = subprocess.run(
        [sys.executable, *args],
        env=plain | here | {"PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_code_is_kept_until_a_file_changes_from_which_functions_are_inlined(package: Path) -> None:
    script = package.parents[1] / "kernel.py"
    assert [_said(package, script) for _ in range(2)] == ["1.0 0", "1.0 1"]
    vectors = package / "vectors.py"
    before = vectors.read_text()
    vectors.write_text(before.replace("+ x + _FLOAT(1))", "+ x + _FLOAT(2))"))
    assert _said(package, script) == "2.0 0"
    vectors.write_text(before)
    assert _said(package, script) == "1.0 1"


@pytest.mark.parametrize(
    ("ending", "num_bytes"),
    [
        ("nbi", 40),
        ("nbc", 1000),
        *(
            pytest.param(ending, 0, marks=[pytest.mark.slow, pytest.mark.nightly])
            for ending in ("nbi", "nbc")
        ),
    ],
)
def test_a_damaged_file_is_replaced(package: Path, ending: str, num_bytes: int) -> None:
    script = package.parents[1] / "kernel.py"
    _said(package, script)
    (file,) = package.rglob(f"kernel*.{ending}")
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert [_said(package, script) for _ in range(2)] == ["1.0 0", "1.0 1"]


def test_code_is_kept_in_the_first_folder_that_can_be_written_by_this_user_alone(package: Path) -> None:
    beside, numbas = package.parents[1], package.parents[1] / "numba"
    script = beside / "kernel.py"
    _said(package, script, NUMBA_CACHE_DIR=str(numbas))
    assert list(numbas.rglob("*.nbc"))
    assert not list(package.rglob("*.nbc"))
    (package / "__pycache__").write_text("a file, since nothing is read-only for root")
    _said(package, script)
    assert list((beside / "home" / ".cache" / "numba").rglob("*.nbc"))
    without = {"NUMBA_CACHE_DIR": "/dev/null/none", "HOME": "/dev/null/none"}
    assert [_said(package, script, **without) for _ in range(2)] == ["1.0 0", "1.0 1"]
    (folder,) = beside.glob("braid-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert _said(package, script, **without) == "1.0 0"
    shutil.rmtree(folder)
    folder.symlink_to(numbas)
    assert _said(package, script, **without) == "1.0 0"


def test_where_numba_does_not_work_a_sentence_says_so(package: Path) -> None:
    assert _said(package, WHY_NOT) == "None"
    assert "switched off by NUMBA_DISABLE_JIT; unset it" in _said(package, WHY_NOT, NUMBA_DISABLE_JIT="1")
    broken = package.parent / "numba" / "__init__.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('Numba needs NumPy 2.0 or less')")
    said = _said(package, WHY_NOT)
    assert "ImportError: Numba needs NumPy 2.0 or less" in said
    assert "pip install numba" in said
