"""Every attention kernel gives the numbers of the default one; a kernel that this machine lacks is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from braid.errors import ModelError
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.models.kernels import AttentionKind, check_attention
from braid.models.value import ValueModel

OUTPUTS = frozenset({"logprobs", "entropy"})


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
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-5)  # fp32 sums in another order
    assert our_gradients.keys() == gradients.keys()
    for name, expected in gradients.items():
        torch.testing.assert_close(our_gradients[name], expected, rtol=1e-4, atol=1e-4)


def test_a_critic_takes_over_the_policys_kernel(
    tiny_model: Callable[..., PreTrainedModel], packed: Callable[..., PackedBatch]
) -> None:
    batch, values = packed(), []
    for kind in ("auto", "eager"):
        critic = ValueModel.copy_of(CausalLM(tiny_model("qwen2"), attention=kind))
        with torch.no_grad():
            critic.value_head.weight.fill_(0.1)
        values.append(critic.forward(batch, frozenset({"values"}))["values"])
    torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=1e-5)
    assert not torch.equal(values[1], values[0])


def test_flash_attention_names_the_device_that_it_needs() -> None:
    with pytest.raises(ModelError, match=r"flash_attention_2 runs on CUDA devices.*model\.attention=auto"):
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
