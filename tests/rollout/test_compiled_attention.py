"""Compiled decode attention against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from tests.rounding import assert_near

from braid.models.attention import LayerCall
from braid.rollout.engines.native.cache import Block, DecodeAttention, KVCache
from braid.rollout.engines.native.compiled import CompiledAttention

HEADS, GROUPS, SIZE = 2, 2, 8
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
LENGTHS = (1, 3, 4, 17, 31, 600)


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 6, 5000])
def test_it_equals_pytorchs_for_every_number_of_threads(
    window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(4096, 8)
    cache.reserve(LENGTHS)
    for length in LENGTHS:
        cache.add(length)
    short, long = cache.buckets()
    for bucket in (short, long):
        shape = (bucket.rows, HEADS, bucket.length, SIZE)
        bucket.write(0, 0, *(torch.randn(shape, generator=generator) for _ in range(2)))
    blocks = [Block(short, slice(0, 5), 32, 0), Block(long, slice(0, 1), 608, 5)]
    positions = torch.tensor([*(length - 1 for length in LENGTHS), 0, 0])
    call = LayerCall(0, 0.3, window, softcap, sinks)
    query = torch.randn(8, HEADS * GROUPS, SIZE, generator=generator) * 3
    key, value = (torch.randn(8, HEADS, SIZE, generator=generator) for _ in range(2))

    def attended(kind: type[DecodeAttention]) -> torch.Tensor:
        return kind(positions, blocks).attend(call, query, key, value)[: len(LENGTHS)]

    found = attended(CompiledAttention)
    assert torch.equal(short.layers[0][0][3, :, 16], key[3])
    assert torch.equal(long.layers[0][1][0, :, 599], value[5])
    assert_near(
        found, attended(DecodeAttention), 1e-6
    )  # eight roundings: sums of up to 600 terms in another order
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(attended(CompiledAttention), found)
    finally:
        torch.set_num_threads(threads)


def test_other_types_and_shapes_are_left_to_pytorch() -> None:
    cache = KVCache(64, 1)
    cache.reserve([4])
    cache.add(4)
    (bucket,) = cache.buckets()
    stores = (torch.randn(1, HEADS, bucket.length, SIZE).bfloat16() for _ in range(2))
    bucket.write(0, 0, *stores)
    new = torch.randn(1, HEADS, SIZE).bfloat16()
    call, blocks = LayerCall(0, 0.3, None, None), [Block(bucket, slice(0, 1), 32, 0)]
    found, expected = (
        kind(torch.tensor([3]), blocks).attend(call, new, new, new)
        for kind in (CompiledAttention, DecodeAttention)
    )
    assert torch.equal(found, expected)
