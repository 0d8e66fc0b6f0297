"""The library of the device: compiled on first use, kept in ~/.cache/braid/tests by version of PyTorch and
source."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import yaml

SOURCE = Path(__file__).with_name("device.cpp")
TORCH = "2.13"
"""The version whose internals device.cpp knows."""


class BuildError(Exception):
    """The library cannot be built on this machine."""


def built() -> Path:
    """The library's path, with the names of the operators without a CUDA kernel beside it (.json)."""
    torch_version = version("torch")
    if not torch_version.startswith(f"{TORCH}."):
        raise BuildError(f"it is made for torch {TORCH}, not {torch_version}")
    if (compiler := shutil.which("g++")) is None:
        raise BuildError("there is no g++")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder = Path(spec.origin).parent
    if (torch_folder / "lib/libtorch_cuda.so").exists():
        raise BuildError("this torch is built for real ones")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "braid/tests"
    folder = cache / f"fake_cuda-{torch_version}-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "device.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not library.exists():
            names = _without_cuda_kernel(torch_folder.parent)
            library.with_suffix(".json").write_text(json.dumps(names))
            _compile(compiler, torch_folder, library)
    return library


def _compile(compiler: str, torch_folder: Path, library: Path) -> None:
    includes = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include"]
    unfinished = library.with_suffix(".part")
    command = [
        compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", *(f"-I{path}" for path in includes), str(SOURCE),
        "-o", str(unfinished), f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(done.stderr.strip()[:2000] or f"g++ ended with {done.returncode}")
    unfinished.rename(library)


def _without_cuda_kernel(site_packages: Path) -> list[str]:
    """Operators with a kernel for the CPU and none that CUDA could use."""
    file = site_packages / "torchgen/packaged/ATen/native/native_functions.yaml"
    entries = yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    names: list[str] = []
    for entry in entries:
        keys = {key.strip() for keys in entry.get("dispatch", {}) for key in keys.split(",")}
        if "CPU" in keys and "CUDA" not in keys and not any("Composite" in key for key in keys):
            names.append(f"aten::{entry['func'].split('(')[0]}")
    return names
