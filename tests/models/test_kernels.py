"""Every attention kernel gives the numbers of the default one; a kernel that this machine lacks is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.rounding import assert_near, rounding
from torch import Tensor
from transformers import PreTrainedModel

from braid.errors import ModelError
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.models.kernels import AttentionKind, check_attention
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
