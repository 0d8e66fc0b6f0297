"""Compiled decode steps against those of PyTorch and transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.rounding import assert_near

from braid.config.backends import LoraConfig
from braid.errors import ModelError
from braid.models import selfcheck as models_selfcheck
from braid.models.attention import LayerCall
from braid.models.causal_lm import CausalLM
from braid.models.fused import fuse
from braid.models.lora import add_adapters
from braid.rollout.engines.native.cache import Block, Bucket, DecodeAttention, KVCache, Need, Prompt
from braid.rollout.engines.native.decoder import Decoder
from braid.rollout.engines.native.selfcheck import check_decoding
from braid_kernels.decoding import CompiledAttention
from braid_kernels.layers import can_fuse

TinyLM = Callable[..., CausalLM]

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
    cache.reserve([Need(length) for length in LENGTHS])
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

    compiled = attended(CompiledAttention)
    assert torch.equal(short.layers[0][0][3, :, 16], key[3])
    assert torch.equal(long.layers[0][1][0, :, 599], value[5])
    assert_near(
        compiled, attended(DecodeAttention), 1e-6
    )  # eight roundings: sums of up to 600 terms in another order
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(attended(CompiledAttention), compiled)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("window", [None, 1, 3, 30, 45])
def test_a_prompt_elsewhere_that_rows_share_gives_the_same_bits(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    of_prompt, after_prompt = (33, 20, 33, 1), (1, 40, 7, 12)
    prompts = Bucket(2, 36)
    prompts.write(0, 0, *(torch.randn(2, HEADS, 36, SIZE, generator=generator) for _ in range(2)))
    places = [Prompt(prompts, 0, 33), Prompt(prompts, 1, 20), Prompt(prompts, 0, 33), Prompt(prompts, 1, 1)]
    whole, parts = KVCache(4096, 4), KVCache(4096, 4)
    whole.reserve([Need(64)] * 4)
    parts.reserve([Need(40, 18)] * 4)
    for prompt in places:
        whole.add(64)
        parts.add(40, prompt)
    (bucket,), (rest,) = whole.buckets(), parts.buckets()
    bucket.write(0, 0, *(torch.randn(4, HEADS, 64, SIZE, generator=generator) for _ in range(2)))
    rest.write(0, 0, *(torch.zeros(4, HEADS, 40, SIZE) for _ in range(2)))
    for row, (prompt, num) in enumerate(zip(places, after_prompt, strict=True)):
        for store, full, first in zip(rest.layers[0], bucket.layers[0], prompts.layers[0], strict=True):
            full[row, :, : prompt.length] = first[prompt.row, :, : prompt.length]
            store[row, :, :num] = full[row, :, prompt.length : prompt.length + num]
    positions = torch.tensor([a + b - 1 for a, b in zip(of_prompt, after_prompt, strict=True)])
    query = torch.randn(4, HEADS * GROUPS, SIZE, generator=generator) * 3
    new = [torch.randn(4, HEADS, SIZE, generator=generator) for _ in range(2)]
    expected, shared = (
        CompiledAttention(positions, [Block(cached, slice(0, 4), cached.length, 0)]).attend(
            LayerCall(0, 0.3, window, None, SINKS), query, *new
        )
        for cached in (bucket, rest)
    )
    assert torch.equal(shared, expected)
    for slot in range(4):
        alike = zip(
            whole.stored(slot, int(positions[slot])), parts.stored(slot, int(positions[slot])), strict=True
        )
        assert all(torch.equal(a, b) for of_layers in alike for a, b in zip(*of_layers, strict=True))


def test_other_types_and_shapes_are_left_to_pytorch() -> None:
    cache = KVCache(64, 1)
    cache.reserve([Need(4)])
    cache.add(4)
    (bucket,) = cache.buckets()
    stores = (torch.randn(1, HEADS, bucket.length, SIZE).bfloat16() for _ in range(2))
    bucket.write(0, 0, *stores)
    new = torch.randn(1, HEADS, SIZE).bfloat16()
    call, blocks = LayerCall(0, 0.3, None, None), [Block(bucket, slice(0, 1), 32, 0)]
    compiled, expected = (
        kind(torch.tensor([3]), blocks).attend(call, new, new, new)
        for kind in (CompiledAttention, DecodeAttention)
    )
    assert torch.equal(compiled, expected)


@pytest.mark.parametrize(
    "settings",
    [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True, "pad_token_id": 6}],
    ids=["plain", "biases", "tied, with a padding token"],
)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_fused_layers_equal_the_model(kind: str, settings: dict[str, Any], tiny_lm: TinyLM) -> None:
    lm = tiny_lm(kind, **settings)
    for name, parameter in lm.model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
    fuse(lm.model)
    compiled, plain = _decoder(lm, is_compiled=True), _decoder(lm, is_compiled=False)
    with torch.inference_mode():
        assert_near(_logits(compiled), _logits(plain), 3e-6)


def _decoder(lm: CausalLM, *, is_compiled: bool) -> Decoder:
    """With random keys and values of four sequences."""
    cache = KVCache(4096, 4)
    cache.reserve([Need(64)] * 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        cache.add(64)
    (bucket,) = cache.buckets()
    for layer in range(2):
        shape = (4, HEADS, bucket.length, SIZE)
        bucket.write(layer, 0, *(torch.randn(shape, generator=generator) for _ in range(2)))
    decoder = Decoder(lm, cache, torch.device("cpu"), is_compiled=is_compiled)
    assert (decoder._layers is not None) == is_compiled
    return decoder


def _logits(decoder: Decoder) -> torch.Tensor:
    inputs = np.array([[5, 6, 7, 8], [0, 3, 11, 20]])
    decoder.refresh(has_new_weights=False)
    decoder.logits(inputs + np.array([[1], [2]]))
    return decoder.logits(inputs)[:4].clone()  # the recorded step, with other tokens


@pytest.mark.parametrize("targets", [("all-linear",), ("k_proj", "down_proj")], ids=str)
def test_fused_layers_have_adapters_merged_as_they_are_after_each_update(
    targets: tuple[str, ...], tiny_lm: TinyLM
) -> None:
    lm = tiny_lm("llama", attention_bias=True)
    with torch.no_grad():
        before = _logits(_decoder(lm, is_compiled=True))
    add_adapters(lm.model, LoraConfig(rank=4, alpha=8, targets=targets), seed=0)
    fused, plain = _decoder(lm, is_compiled=True), _decoder(lm, is_compiled=False)
    with torch.no_grad():
        assert torch.equal(_logits(fused), before)  # B = 0
        for _ in range(2):
            for _, adapter in lm.named_weights():
                adapter.normal_(0, 0.2)
            changed = _logits(fused)
            assert_near(changed, _logits(plain), 3e-6)
            assert (changed - before).abs().max() > 0.1
            before = changed


def test_layers_with_anything_added_are_left_to_transformers(tiny_lm: TinyLM) -> None:
    assert can_fuse(tiny_lm("llama"))
    assert not can_fuse(tiny_lm("gemma2"))
    assert not can_fuse(CausalLM(tiny_lm("llama").model.bfloat16()))
    (hooked := tiny_lm("llama")).backbone.norm.register_forward_hook(lambda *_: None)
    assert not can_fuse(hooked)


def test_a_model_that_compiled_steps_decode_incorrectly_is_refused(
    tiny_lm: TinyLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_selfcheck, "_agreed", set())
    lm = tiny_lm("qwen3")
    right = CompiledAttention.attend_prepared

    def wrong(self: CompiledAttention, *args: Any) -> torch.Tensor:
        return right(self, *args) * 1.01

    with monkeypatch.context() as patched:
        patched.setattr(CompiledAttention, "attend_prepared", wrong)
        with pytest.raises(ModelError, match=r"compiled steps.* rollout\.engine\.compile=never"):
            check_decoding(lm, is_compiled=True)
    check_decoding(lm, is_compiled=True)
