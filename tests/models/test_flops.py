"""FLOPs by formula are those that torch counts, for every architecture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from braid.config.model import MlpSpec
from braid.models.causal_lm import CausalLM
from braid.models.flops import attention_flops
from braid.models.mlp import MlpPolicy, MlpValue
from braid.models.value import ValueModel
from braid.types import ActionSpace, Spaces

Make = Callable[..., PreTrainedModel]
LENGTH = 13


def _counted(model: PreTrainedModel, *, trains: bool) -> tuple[int, int]:
    """(linear layers, attention) that torch counts for one row through the authors' own forward: full
    squares."""
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=torch.arange(LENGTH)[None], use_cache=False).logits
        if trains:
            logits.sum().backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    return counts.pop("aten.mm", 0) + counts.pop("aten.addmm", 0), counts.pop("aten.bmm", 0)


def test_a_forward_pass_counts_what_torch_counts(architecture: str, tiny_model: Make) -> None:
    model = tiny_model(architecture)
    linear, squares = _counted(model, trains=False)
    lm = CausalLM(model)
    config = lm.config
    scores = attention_flops(config, [LENGTH])
    assert lm.flops([LENGTH], LENGTH).forward == linear + scores
    # every layer's full square, of which causal layers see (T + 1) / 2T and windows less
    full = 4 * config.num_attention_heads * 8 * LENGTH * LENGTH * config.num_hidden_layers
    assert squares == full


def test_training_is_three_times_the_forward_pass(architecture: str, tiny_model: Make) -> None:
    model = tiny_model(architecture)
    linear, _ = _counted(model, trains=True)
    flops = CausalLM(model).flops([LENGTH], LENGTH)
    assert flops.training == 3 * flops.forward
    assert linear == 3 * (flops.forward - attention_flops(model.config, [LENGTH]))


def test_a_causal_layer_sees_each_pair_once(tiny_model: Make) -> None:
    # 3 layers, 4 heads of width 8, 4 operations for each of 1 + 2 + 3 + 4 pairs, and of 1 + 2
    config = tiny_model("llama").config
    assert attention_flops(config, [4, 2]) == 3 * 4 * 8 * 4 * (10 + 3)


def test_a_window_bounds_what_a_layer_sees(tiny_model: Make) -> None:
    # windows of 5 over 7 tokens: 1 + 2 + 3 + 4 + 5 + 5 + 5 = 25 pairs in two layers, 28 in the full one
    assert attention_flops(tiny_model("gemma2").config, [7]) == 4 * 8 * 4 * (25 + 28 + 25)


def test_logits_count_where_the_policy_wrote(tiny_model: Make) -> None:
    lm = CausalLM(tiny_model("qwen3"))
    more, less = lm.flops([9, 6], 8).forward, lm.flops([9, 6], 3).forward
    assert more - less == 5 * 2 * 96 * 32


def test_gradient_checkpointing_costs_the_layers_once_more(tiny_model: Make) -> None:
    lm = CausalLM(tiny_model("qwen3"))
    plain, layers = lm.flops([9, 6], 8), lm.flops([9, 6], 0)
    lm.set_gradient_checkpointing(True)
    assert lm.flops([9, 6], 8).training == plain.training + layers.forward
    assert lm.flops([9, 6], 8).forward == plain.forward


def test_frozen_weights_cost_no_gradient(tiny_model: Make) -> None:
    model = tiny_model("qwen3")
    model.requires_grad_(False)
    flops = CausalLM(model).flops([9], 4)
    scores = attention_flops(model.config, [9])
    assert flops.training == 2 * (flops.forward - scores) + 3 * scores


def test_a_critic_counts_its_backbone_and_one_output(tiny_model: Make) -> None:
    policy = CausalLM(tiny_model("qwen3"))
    critic = ValueModel.copy_of(policy)
    assert critic.flops([9], 4).forward == policy.flops([9], 0).forward + 4 * 2 * 32


@pytest.mark.parametrize("actions", [2, 5])
def test_a_perceptron_counts_its_layers(actions: int) -> None:
    spec, spaces = MlpSpec(hidden_sizes=(8, 6)), Spaces(3, ActionSpace("discrete", actions))
    policy, value = MlpPolicy(spec, spaces, seed=0), MlpValue(spec, spaces, seed=0)
    assert policy.flops([4, 6], 8).forward == 10 * 2 * (3 * 8 + 8 * 6 + 6 * actions)
    assert value.flops([4, 6], 8).training == 3 * 10 * 2 * (3 * 8 + 8 * 6 + 6)
