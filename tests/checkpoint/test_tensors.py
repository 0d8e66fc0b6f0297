"""Our safetensors files, against the library that defines them."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from braid.checkpoint.tensors import DTYPES, read_tensors, write_tensors
from braid.errors import CheckpointError


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    with path.open("wb") as file:
        write_tensors(file.write, tensors)
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_library_reads_every_type_that_we_write(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    path = write(tmp_path / "x.safetensors", {"x": tensor})
    for back in (safetensors.torch.load_file(path)["x"], read_tensors(path)["x"]):
        assert back.dtype == dtype
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_shapes_and_layouts_of_all_kinds_come_back(tmp_path: Path) -> None:
    turned = torch.arange(6.0).view(2, 3).t()
    tensors = {
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "byte": torch.tensor(
            [1, 2, 3], dtype=torch.uint8
        ),  # leaves what follows at an odd place, if not sorted
        "turned": turned,
        "every_second": torch.arange(10)[::2],
        "conjugate": torch.tensor([1 + 2j]).to(torch.complex64).conj(),
        "wide": torch.tensor([1.5], dtype=torch.float64),
        "näme": torch.ones(1),
    }
    path = write(tmp_path / "x.safetensors", tensors)
    for back in (safetensors.torch.load_file(path), read_tensors(path)):
        assert back.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(back[name], tensor), name


def test_a_file_without_tensors_is_fine(tmp_path: Path) -> None:
    assert read_tensors(write(tmp_path / "x.safetensors", {})) == {}


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"x": torch.ones(1000)})
    back = read_tensors(path)["x"]
    path.write_bytes(bytes(path.stat().st_size))
    assert back.sum() == 1000


def test_a_type_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"policy/w has type torch.complex128"):
        write(tmp_path / "x.safetensors", {"policy/w": torch.ones(1, dtype=torch.complex128)})
