"""Equal tensors have equal fingerprints, and damage of every kind is detected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import TrainingError
from braid.weights.fingerprint import (
    BLOCK_BYTES,
    SMALL_BYTES,
    bytes_of,
    check_synced,
    fingerprint,
)

SIZES = [
    0,
    1,
    7,
    8,
    4095,
    SMALL_BYTES,
    SMALL_BYTES + 1,
    65_536,
    BLOCK_BYTES - 8,
    BLOCK_BYTES,
    3 * BLOCK_BYTES + 12_345,
]

KNOWN = {
    SMALL_BYTES: "d6378e7375479ee1e9de1f35604dc13f",
    SMALL_BYTES + 1: "b5cb282e03cd2ad4e524f675dc451e93",
    BLOCK_BYTES - 8: "8318b0f8a0d08764980bbb1e2d84a53f",
    3 * BLOCK_BYTES + 12_345: "48c156052ab0cea787e5f64d07b066bf",
}
"""Fingerprints of `_data` for some sizes, the same on every machine."""


def _data(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_fingerprint_does_not_depend_on_machine_or_layout(num_bytes: int) -> None:
    data = _data(num_bytes)
    whole = fingerprint(data)
    assert whole == KNOWN.get(num_bytes, whole)
    spread = torch.zeros(num_bytes, 3, dtype=torch.uint8)
    spread[:, 1] = data
    assert fingerprint(spread[:, 1]) == whole
    assert fingerprint(torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]) == whole, "at an odd address"


@given(st.data())
def test_every_flipped_bit_and_every_burst_is_detected(data: st.DataObject) -> None:
    num_bytes = data.draw(st.sampled_from(SIZES[1:]))
    tensor = _data(num_bytes)
    start = data.draw(st.integers(0, num_bytes - 1))
    length = data.draw(st.integers(1, min(8128, num_bytes - start)))
    mask = data.draw(st.integers(1, 255))
    damaged = tensor.clone()
    damaged[start : start + length] ^= mask
    assert fingerprint(damaged) != fingerprint(tensor)


@pytest.mark.parametrize("shift", [8, 64, 4096, 8192, 65_536, BLOCK_BYTES])
def test_bytes_that_are_shifted_swapped_or_lost_are_detected(shift: int) -> None:
    tensor = _data(4 * BLOCK_BYTES)
    swapped = tensor.clone()
    swapped[:shift], swapped[shift : 2 * shift] = tensor[shift : 2 * shift].clone(), tensor[:shift].clone()
    lost = tensor.clone()
    lost[shift : 2 * shift] = 0
    values = {fingerprint(t) for t in (tensor, tensor.roll(shift), swapped, lost)}
    assert len(values) == 4


def test_a_fingerprint_includes_type_and_shape() -> None:
    tensor = torch.zeros(6, dtype=torch.int32)
    values = {fingerprint(t) for t in (tensor, tensor.float(), tensor.view(2, 3), tensor[:5])}
    assert len(values) == 4


def test_the_trainers_weights_are_compared_as_the_engine_holds_them(tmp_path: Path) -> None:
    trainer = {"a": torch.randn(50, 1000), "b": torch.randn(4)}
    engine = {"a": trainer["a"].bfloat16(), "b": trainer["b"]}
    check_synced(trainer.items(), engine.items(), version=1, folder=tmp_path)
    engine["a"][0, 0] += 1
    with pytest.raises(TrainingError, match=r"1 of 2 tensors \(a\)"):
        check_synced(trainer.items(), engine.items(), version=1, folder=tmp_path)


def test_the_bytes_of_a_tensor_are_its_own_memory_where_they_can_be() -> None:
    tensor = torch.randn(10, 10)
    assert bytes_of(tensor).data_ptr() == tensor.data_ptr()
    assert bytes_of(tensor.t()).data_ptr() != tensor.data_ptr()
    assert bytes_of(tensor.flatten()[1:]).data_ptr() % 8 == 0
