"""Routers of mixtures of experts: which are replayed, and which are refused; and the type of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.mixtures import CHOSEN, EXPERTS, LAYERS, VOCAB, mixture, sampled_turns
from tests.native_engines import make_engine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from braid.errors import ModelError
from braid.models.causal_lm import CausalLM
from braid.models.experts import is_experts
from braid.models.routing import Routing, dtype_of_choices, routed
from braid.rollout.engines.base import InProcess

from .architectures import tiny_of

REPLAYED = {
    "qwen2_moe": True, "qwen3_moe": True, "mixtral": True, "olmoe": True, "gpt_oss": True,
    "deepseek_v3": False, "glm4_moe": False, "ernie4_5_moe": False, "minimax_m2": False,
}  # fmt: skip
"""Architectures whose routers are replayed, and whether they have a load-balancing loss."""


@pytest.mark.parametrize(("kind", "has_loss"), REPLAYED.items())
def test_routers_are_replayed_and_balanced_by_a_softmax(kind: str, has_loss: bool) -> None:
    lm = CausalLM(tiny_of(kind))
    lm.prepare_routers("train.router_replay")
    if has_loss:
        lm.check_balance()
        return
    with pytest.raises(ModelError, match=r"train\.router_aux_coef: .* has no load-balancing loss"):
        lm.check_balance()


def test_routers_that_mask_the_scores_of_other_groups_are_refused() -> None:
    """Of experts that are replayed, but not in a group that the router chooses now, they have no weight."""
    model = tiny_of("deepseek_v2", topk_method="group_limited_greedy")
    for module in model.modules():
        if hasattr(module, "num_group"):
            vars(module).update(num_group=2, topk_group=1)
    with pytest.raises(ModelError, match=r"train\.router_replay: .*the weights of replayed experts are"):
        CausalLM(model).prepare_routers("train.router_replay")


def test_routers_of_another_kind_are_refused() -> None:
    with pytest.raises(ModelError, match=r"Phimoe.*not chosen by a call of topk"):
        CausalLM(tiny_of("phimoe")).prepare_routers("train.router_replay")


def test_a_model_without_experts_is_refused() -> None:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    lm = CausalLM(AutoModelForCausalLM.from_config(config))
    with pytest.raises(ModelError, match=r"train\.router_replay: LlamaForCausalLM has no experts"):
        lm.prepare_routers("train.router_replay")


def test_choices_take_a_byte_where_that_is_enough() -> None:
    assert [dtype_of_choices(num) for num in (4, 128, 129, 512)] == [torch.int8] * 2 + [torch.int16] * 2


def test_weights_of_replayed_experts_are_of_the_current_scores() -> None:
    """Of Qwen3: the softmax over the replayed experts' logits."""
    lm = mixture()
    lm.prepare_routers("train.router_replay")
    replayed = torch.randint(EXPERTS, (7, LAYERS, 1)).repeat(1, 1, CHOSEN)
    replayed[..., 1] = (replayed[..., 1] + 1) % EXPERTS
    gate: Any = lm.model.model.layers[0].mlp.gate
    hidden = torch.randn(7, 32)
    with routed(Routing(replayed.to(torch.int8))):
        logits, weights, chosen = gate(hidden)
    assert torch.equal(chosen, replayed[:, 0])
    torch.testing.assert_close(weights, logits.gather(1, chosen).softmax(-1))


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.types = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "grouped_mm" in str(func):
            self.types |= {x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()}
        return func(*args, **(kwargs or {}))


def test_experts_are_computed_in_the_type_of_autocast_on_cpus_too() -> None:
    lm = mixture()
    lm.prepare_routers("train.router_replay")
    ids = torch.randint(VOCAB, (1, 9))
    lm.model.set_attn_implementation("eager")
    with routed(first := Routing()):
        plain = lm.model(input_ids=ids, use_cache=False).logits
    replay = Routing(first.stacked(EXPERTS))
    with torch.autocast("cpu", torch.bfloat16), _Products() as products, routed(replay):
        logits = lm.model(input_ids=ids, use_cache=False).logits
        (logits.float() ** 2).sum().backward()
    assert products.types == {torch.bfloat16}
    assert (logits - plain).abs().max() < 0.25, "rounding of logits of some 5 in bf16, over three layers"
    experts = [module for module in lm.model.modules() if is_experts(module)]
    for weight in (weight for module in experts for weight in module.parameters()):
        assert weight.dtype == torch.float32
        assert weight.grad is not None
        assert weight.grad.isfinite().all()
        assert weight.grad.any()


def test_an_engine_under_autocast_keeps_experts_in_its_type() -> None:
    engine = make_engine(mixture(), InProcess(str, torch.bfloat16))
    ((turns,),) = sampled_turns(engine, [[1, 2, 3]])
    assert turns[0].experts is None
    types = {n: p.dtype for n, p in engine.named_parameters() if "experts" in n}
    assert set(types.values()) == {torch.bfloat16}
    engine.close()
