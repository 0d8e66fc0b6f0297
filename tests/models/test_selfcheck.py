"""Which architectures are let in, and what is said about those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from braid.errors import ModelError
from braid.models.attention import IMPLEMENTATION
from braid.models.causal_lm import CausalLM
from braid.models.selfcheck import check_against_plain

Make = Callable[..., PreTrainedModel]

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "phi3": {},
    "olmo2": {},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}


def _other(architecture: str, **more: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(architecture, **(SIZES | more))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_the_known_architectures_pass(architecture: str, tiny_model: Make) -> None:
    lm = CausalLM(tiny_model(architecture))
    check_against_plain(lm)
    assert lm.model.config._attn_implementation == IMPLEMENTATION


@pytest.mark.parametrize("architecture", OTHERS)
def test_architectures_that_nothing_was_written_for_pass_too(architecture: str) -> None:
    check_against_plain(CausalLM(_other(architecture, **OTHERS[architecture])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounding_of_half_precision_is_allowed_for(
    architecture: str, dtype: torch.dtype, tiny_model: Make
) -> None:
    check_against_plain(CausalLM(tiny_model(architecture).to(dtype)))  # pyright: ignore[reportArgumentType]


def test_layers_with_a_state_of_their_own_are_refused() -> None:
    with pytest.raises(
        ModelError, match="MambaForCausalLM has layers of type linear_attention; braid runs models whose"
    ):
        CausalLM(_other("mamba"))


def test_layers_with_attention_code_of_their_own_are_refused() -> None:
    lm = CausalLM(_other("bloom"))
    with pytest.raises(
        ModelError, match=r"BloomForCausalLM: 2 of 2 layers \(the first is layer 0\) do not attend through"
    ):
        check_against_plain(lm)


def test_layers_that_keep_keyword_arguments_to_themselves_are_refused() -> None:
    lm = CausalLM(_other("nemotron", head_dim=8))
    with pytest.raises(
        ModelError, match="NemotronAttention did not pass attention_context on to its attention; this"
    ):
        check_against_plain(lm)


def test_attention_sinks_are_refused() -> None:
    lm = CausalLM(_other("gpt_oss", head_dim=8, num_local_experts=4))
    with pytest.raises(
        ModelError, match="GptOssAttention uses attention with s_aux, which braid does not know"
    ):
        check_against_plain(lm)


def test_attention_in_both_directions_is_refused() -> None:
    lm = CausalLM(_other("bert"))
    with pytest.raises(
        ModelError, match="BertLMHeadModel gives other log-probs for packed rows than by its own forward"
    ):
        check_against_plain(lm)


class _LouderQwen(Qwen3ForCausalLM):
    """Does something to its logits that no config tells."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out


def test_logits_changed_by_code_of_its_own_are_refused() -> None:
    config = AutoConfig.for_model("qwen3", head_dim=8, **SIZES)
    config._attn_implementation = "eager"
    with pytest.raises(
        ModelError, match="_LouderQwen gives other log-probs for packed rows than by its own forward"
    ):
        check_against_plain(CausalLM(_LouderQwen(config)))


def test_a_sliding_layer_that_hides_its_window_is_refused(tiny_model: Make) -> None:
    model = tiny_model("gemma2")
    lm = CausalLM(model)
    model.get_submodule("model.layers.2.self_attn").sliding_window = None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        ModelError, match="layer 2 is of type sliding_attention but attends with sliding_window=None"
    ):
        check_against_plain(lm)


def test_a_head_that_is_not_linear_is_refused(tiny_model: Make) -> None:
    model = tiny_model("qwen3")
    model.set_output_embeddings(nn.Sequential(nn.Linear(32, 96)))
    with pytest.raises(
        ModelError, match="Qwen3ForCausalLM has no linear output head but Sequential; braid needs"
    ):
        CausalLM(model)
