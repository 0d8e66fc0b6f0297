"""Every attention kernel gives the numbers of the default one; a kernel that this machine lacks is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tests.rounding import assert_near, rounding
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from braid.errors import ModelError
from braid.models import attention
from braid.models.attention import LayerCall, has_varlen_kernel, visible_keys
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.models.kernels import AttentionKind, check_attention, packed_attention
from braid.models.value import ValueModel

OUTPUTS = frozenset({"logprobs", "entropy"})
TOLERANCE = rounding(3 * (32 + 48 + 17))  # 3 layers: sums over 32 and 48 features and up to 17 positions


def _gradients(lm: CausalLM, batch: PackedBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    outputs = lm.forward(batch, OUTPUTS)
    sum(output.sum() for output in outputs.values()).backward()  # pyright: ignore[reportAttributeAccessIssue]
    gradients = {n: p.grad for n, p in lm.module.named_parameters() if p.grad is not None}
    return {name: output.detach() for name, output in outputs.items()}, gradients


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_kernel_changes_no_output_and_no_gradient(
    kind: AttentionKind,
    architecture: str,
    tiny_model: Callable[..., PreTrainedModel],
    packed: Callable[..., PackedBatch],
) -> None:
    batch = packed()
    outputs, gradients = _gradients(CausalLM(tiny_model(architecture)), batch)
    ours, our_gradients = _gradients(CausalLM(tiny_model(architecture), attention=kind), batch)
    for name, expected in outputs.items():
        assert_near(ours[name], expected, TOLERANCE, name)
    assert our_gradients.keys() == gradients.keys()
    for name, expected in gradients.items():
        assert_near(our_gradients[name], expected, TOLERANCE, name)


def _plain_varlen(  # the arguments of torch.nn.attention.varlen.varlen_attn
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, most_q: int, most_k: int, *,
    scale: float, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    assert torch.equal(ends_q, ends_k)
    assert ends_q.dtype == torch.int32
    assert most_q == most_k == ends_q.diff().max()
    behind, ahead = window_size
    assert ahead == 0
    outs = []
    for start, end in pairwise(ends_q.tolist()):
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * scale
        visible = visible_keys(end - start, end - start if behind < 0 else behind + 1, q.device)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v[start:end]))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("shared", [(), ((0, 0), (0, 5), (0, 0), (2, 3))])
def test_variable_length_attention_is_that_of_rectangles(
    window: int | None, shared: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", _plain_varlen)
    batch = PackedBatch({}, torch.ones(1), (9, 12, 3, 7), shared=shared)
    generator, results = torch.Generator().manual_seed(0), []
    sizes = [(batch.num_positions, heads, 8) for heads in (4, 2, 2)]
    qkv = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in sizes]
    for is_varlen in (False, True):
        monkeypatch.setattr(attention, "has_varlen_kernel", lambda *_, chosen=is_varlen: chosen)
        context = packed_attention("auto", batch)
        out = context.attend(LayerCall(0, 0.3, window, None), *qkv)
        results.append((out, *torch.autograd.grad(out.square().sum(), qkv)))
    torch.testing.assert_close(*results)


def test_the_variable_length_kernel_serves_half_precision_on_recent_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = LayerCall(0, 1.0, 4, None)

    def is_chosen(
        call: LayerCall = plain,
        dtype: torch.dtype = torch.bfloat16,
        size: int = 64,
        capability: tuple[int, int] = (9, 0),
    ) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        with FakeTensorMode():
            query = torch.empty(5, 4, size, dtype=dtype, device="cuda")
            return has_varlen_kernel(call, query, query)

    assert is_chosen()
    assert is_chosen(dtype=torch.float16)
    assert not is_chosen(dtype=torch.float32)
    assert not is_chosen(capability=(7, 5))
    assert not is_chosen(size=36)
    assert not is_chosen(size=512)
    assert not is_chosen(replace(plain, softcap=2.0))
    assert not is_chosen(replace(plain, sinks=torch.zeros(4)))
    on_cpu = torch.empty(5, 4, 64, dtype=torch.bfloat16)
    assert not has_varlen_kernel(plain, on_cpu, on_cpu)


def test_cudnns_attention_is_off(tiny_model: Callable[..., PreTrainedModel]) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    CausalLM(tiny_model("qwen2"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_critic_takes_over_the_policys_kernel(
    tiny_model: Callable[..., PreTrainedModel], packed: Callable[..., PackedBatch]
) -> None:
    batch, values = packed(), []
    for kind in ("auto", "eager"):
        critic = ValueModel.copy_of(CausalLM(tiny_model("qwen2"), attention=kind))
        with torch.no_grad():
            critic.value_head.weight.fill_(0.1)
        values.append(critic.forward(batch, frozenset({"values"}))["values"])
    assert_near(values[1], values[0], TOLERANCE)
    assert not torch.equal(values[1], values[0])


def test_flash_attention_names_the_device_that_it_needs() -> None:
    with pytest.raises(ModelError, match=r"flash_attention_2 needs CUDA devices.*model\.attention=auto"):
        check_attention("flash_attention_2", torch.device("cpu"))


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="says what is missing where flash-attn is not installed"
)
def test_flash_attention_names_the_package_that_it_needs() -> None:
    with pytest.raises(ModelError, match="the package flash-attn, which is not installed"):
        check_attention("flash_attention_2", torch.device("cuda"))


@pytest.mark.parametrize("kind", ["auto", "sdpa", "eager"])
def test_the_other_kernels_need_nothing(kind: AttentionKind) -> None:
    check_attention(kind, torch.device("cpu"))
