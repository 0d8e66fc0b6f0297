"""Compiled attention against PyTorch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.rounding import assert_near
from torch import Tensor

from braid.config.load import load_config
from braid.errors import ModelError
from braid.models.attention import LayerCall, causal_attention
from braid.models.kernels import check_attention
from braid.models.roles import make_policy, make_reference
from braid_kernels.attention import compiled_attention

SHAPES = [(1, 1, 1, 1, 32), (3, 7, 4, 2, 32), (2, 130, 4, 1, 64), (1, 300, 2, 2, 96)]
"""Rows, length, query heads, key heads, size."""


def _inputs(num: int, length: int, heads: int, kv_heads: int, size: int) -> list[Tensor]:
    """Queries, keys, values, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(num, length, count, size, generator=generator) for count in counts]


def _results(kernel: object, call: LayerCall, inputs: list[Tensor]) -> list[Tensor]:
    """Output, and gradients of queries, keys and values."""
    *qkv, grad = (x.clone().requires_grad_() for x in inputs)
    out = kernel(call, *qkv)  # pyright: ignore[reportCallIssue]
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 17, 5000])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_pytorchs_for_every_number_of_threads(
    shape: tuple[int, int, int, int, int], window: int | None
) -> None:
    inputs, call = _inputs(*shape), LayerCall(0, 0.3, window, None)
    compiled = _results(compiled_attention, call, inputs)
    exact = _results(causal_attention, call, [x.double() for x in inputs])
    scale = max(float(torch.linalg.vector_norm(x)) for x in exact)
    for ours, plain in zip(
        compiled, exact, strict=True
    ):  # of one key, gradients of queries are 0 up to rounding
        assert torch.linalg.vector_norm(ours - plain) <= 2e-6 * scale
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert all(map(torch.equal, _results(compiled_attention, call, inputs), compiled))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_rows_may_be_apart_in_memory_and_in_half_precision() -> None:
    inputs, call = _inputs(2, 40, 4, 2, 32), LayerCall(0, 0.3, None, None)
    expected = _results(compiled_attention, call, inputs)
    apart = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in inputs]
    assert all(map(torch.equal, _results(compiled_attention, call, apart), expected))
    for ours, plain in zip(
        _results(compiled_attention, call, [x.bfloat16() for x in inputs]), expected, strict=True
    ):
        assert ours.dtype == torch.bfloat16
        assert_near(ours.float(), plain, 1e-2)


@pytest.mark.parametrize(
    "call",
    [LayerCall(0, 0.3, None, 3.0), LayerCall(0, 0.3, None, None, torch.ones(4))],
    ids=["softcap", "sinks"],
)
def test_other_layers_are_left_to_pytorch(call: LayerCall) -> None:
    inputs = _inputs(2, 40, 4, 2, 32)
    compiled, plain = (_results(kernel, call, inputs) for kernel in (compiled_attention, causal_attention))
    assert all(map(torch.equal, compiled, plain))
    odd, call = _inputs(2, 40, 4, 2, 24), LayerCall(0, 0.3, None, None)
    compiled, plain = (_results(kernel, call, odd) for kernel in (compiled_attention, causal_attention))
    assert all(map(torch.equal, compiled, plain))


def test_it_is_chosen_where_a_round_is_long_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {build: {hidden_size: 32, num_layers: 1, num_heads: 1, num_kv_heads: 1, intermediate_size: 32}}\n"
        "data: {train: [{kind: file, path: prompts.jsonl}]}\nreward: {parts: [{kind: exact}]}\n"
    )

    def chosen(*overrides: str) -> set[str]:
        config = load_config(path, overrides).config
        policy = make_policy(config, torch.device("cpu"))
        return {policy.attention, make_reference(config, torch.device("cpu")).attention}

    assert chosen("rollout.sampling.max_new_tokens=4") == {"auto"}
    assert "attention in training is not compiled: rounds are too short for that" in caplog.text
    many = "rollout.prompts_per_round=1000000"
    assert chosen(many) == {"compiled"}
    assert "attention in training is compiled by Numba" in caplog.text
    assert chosen(many, "model.attention=sdpa") == {"sdpa"}
    with pytest.raises(ModelError, match=r"they are for CPUs; or set model\.attention=auto"):
        check_attention("compiled", torch.device("cuda"))
