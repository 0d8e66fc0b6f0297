"""Accepted architectures, and errors of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from braid.errors import ModelError
from braid.models.attention import IMPLEMENTATION
from braid.models.causal_lm import CausalLM
from braid.models.selfcheck import (
    PACKED_ROWS,
    Check,
    PlainLogprobs,
    _Wider,
    check_against_plain,
    check_tiny_copy,
)
from braid.models.tiny import tiny_config
from braid.rollout.engines.native.selfcheck import check_decoding

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
    "diffllama": {},  # its layers attend twice each
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "phi3": {},
    "olmo2": {},
    "nemotron": {"head_dim": 8},  # its layers hand on no keyword arguments
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}


def _other(architecture: str, **more: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(architecture, **(SIZES | more))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_the_known_architectures_pass(architecture: str, tiny_model: Make) -> None:
    lm = CausalLM(tiny_model(architecture))
    check_against_plain(lm)
    check_decoding(lm)
    assert lm.model.config._attn_implementation == IMPLEMENTATION


@pytest.mark.parametrize("architecture", OTHERS)
def test_architectures_that_nothing_was_written_for_pass_too(architecture: str) -> None:
    lm = CausalLM(_other(architecture, **OTHERS[architecture]))
    check_against_plain(lm)
    check_decoding(lm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounding_of_half_precision_is_allowed_for(
    architecture: str, dtype: torch.dtype, tiny_model: Make
) -> None:
    check_against_plain(CausalLM(tiny_model(architecture).to(dtype)))  # pyright: ignore[reportArgumentType]


def test_layers_with_their_own_attention_code_are_refused() -> None:
    with pytest.raises(
        ModelError,
        match=r"BloomForCausalLM cannot run with packed rows: .* its layers do not attend through transformers'",
    ):
        check_against_plain(CausalLM(_other("bloom")))


def test_attention_in_both_directions_is_refused() -> None:
    with pytest.raises(
        ModelError, match="BertLMHeadModel cannot run with packed rows: log-probs differ by up to"
    ):
        check_against_plain(CausalLM(_other("bert")))


def _rotary(kind: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "rope_theta": 10_000.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    if kind != "dynamic":
        rope["original_max_position_embeddings"] = 64
    return {"rope_parameters": rope, "max_position_embeddings": 64 if kind == "dynamic" else 256}


@pytest.mark.parametrize("check", [check_against_plain, check_decoding])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_change_with_a_batchs_longest_row_run_up_to_that_length(
    kind: str, check: Callable[[CausalLM, int], None]
) -> None:
    lm = CausalLM(_other("llama", **_rotary(kind)))
    check(lm, 64)
    with pytest.raises(ModelError, match=r"for rows longer than its \w*max_position_embeddings of 64 tokens"):
        check(lm, 65)


def test_rotary_positions_that_are_scaled_once_and_for_all_run_at_any_length() -> None:
    lm = CausalLM(_other("llama", **_rotary("yarn")))
    check_against_plain(lm)
    check_decoding(lm)


def test_a_window_only_in_the_mask_is_refused_for_longer_rows() -> None:
    lm = CausalLM(_other("phimoe", num_local_experts=4, sliding_window=50))
    check_against_plain(lm, 50)
    with pytest.raises(
        ModelError,
        match="PhimoeForCausalLM is computed incorrectly with packed rows for rows longer than its "
        "sliding_window of 50 tok",
    ):
        check_against_plain(lm, 51)


def test_what_the_native_engine_cannot_decode_is_refused_with_another_engine() -> None:
    lm = CausalLM(_other("phimoe", num_local_experts=4, sliding_window=50))
    with pytest.raises(
        ModelError, match=r"computed incorrectly with the native engine .* set rollout\.engine=vllm"
    ):
        check_decoding(lm)


def test_a_copy_under_the_wider_type_leaves_the_memo_alone() -> None:
    """Else each tensor's copy casts all tensors that were copied before it: minutes for a model of many
    layers."""
    tensor, memo = torch.zeros(2), {}
    with _Wider(torch.float32):
        copy = tensor.__deepcopy__(memo)
    assert memo[id(tensor)] is copy


def test_large_logits_in_bf16_hide_no_difference(tiny_model: Make) -> None:
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30.0)  # pyright: ignore[reportOptionalMemberAccess]
    lm = CausalLM(model.to(torch.bfloat16))  # pyright: ignore[reportArgumentType]
    check_against_plain(lm)
    lm._logit_scale = 1.05  # log-probs of -100 are 5 nats off
    with pytest.raises(ModelError, match="with these weights gives different log-probs with packed rows"):
        check_against_plain(lm)


class _LouderQwen(Qwen3ForCausalLM):
    """Changes its logits in a way that the config does not show."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out


def test_logits_changed_by_custom_code_are_refused() -> None:
    config = AutoConfig.for_model("qwen3", head_dim=8, **SIZES)
    config._attn_implementation = "eager"
    with pytest.raises(
        ModelError, match="_LouderQwen cannot run with packed rows: log-probs differ by up to"
    ):
        check_against_plain(CausalLM(_LouderQwen(config)))


def test_a_sliding_layer_that_hides_its_window_is_refused(tiny_model: Make) -> None:
    model = tiny_model("gemma2")
    lm = CausalLM(model)
    model.get_submodule("model.layers.2.self_attn").sliding_window = None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        ModelError, match="Gemma2ForCausalLM with these weights gives different log-probs with packed rows"
    ):
        check_against_plain(lm)


def test_a_head_that_is_not_linear_is_refused(tiny_model: Make) -> None:
    model = tiny_model("qwen3")
    model.set_output_embeddings(nn.Sequential(nn.Linear(32, 96)))
    with pytest.raises(
        ModelError, match="the output head of Qwen3ForCausalLM is Sequential, not linear; braid needs"
    ):
        CausalLM(model)


def test_a_copy_that_agreed_is_not_compared_again(tiny_model: Make) -> None:
    compared: list[int] = []

    def logprobs(lm: CausalLM, rows: Sequence[Tensor]) -> list[Tensor]:
        compared.append(len(rows))
        return PACKED_ROWS.logprobs(lm, rows)

    lm, check = CausalLM(tiny_model("qwen3")), Check(logprobs, "packed rows", "")
    for _ in range(2):
        assert check_tiny_copy(lm, check, None)
    assert len(compared) == 1
    lm.model.config.rms_norm_eps *= 2
    assert check_tiny_copy(lm, check, None)
    assert check_tiny_copy(lm, replace(check, what="other rows"), None)
    assert len(compared) == 3
    wrong = replace(check, logprobs=lambda _, rows: [torch.zeros(len(row), 96) for row in rows])
    for _ in range(2):
        with pytest.raises(ModelError, match="cannot run with packed rows"):
            check_tiny_copy(lm, wrong, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(tiny_model: Make, value: float) -> None:
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.up_proj.weight")[0, 0] = value
    with pytest.raises(
        ModelError,
        match=r"1 of the \d+ weights .* contain NaN or infinity, among them model.layers.0.mlp.up_proj",
    ):
        check_against_plain(CausalLM(model))
    with pytest.raises(ModelError, match="contain NaN or infinity"):
        PlainLogprobs.of(CausalLM(model), None, None, is_hollow=False)


def test_an_overflow_of_finite_weights_is_named(tiny_model: Make) -> None:
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.down_proj.weight").fill_(1e38)
        model.get_parameter("model.layers.0.mlp.up_proj.weight").fill_(1e38)
    with pytest.raises(ModelError, match="its weights are finite: it overflows in float32"):
        check_against_plain(CausalLM(model))


def test_a_tiny_config_keeps_settings_of_single_layers_and_can_be_read_again(tmp_path: Path) -> None:
    """Gemma 4's layers with full attention have larger heads: transformers' per_layer_config, by number of
    the layer."""
    config = AutoConfig.for_model("gemma4_text")
    tiny_config(config, frozenset()).save_pretrained(tmp_path)
    tiny = AutoConfig.from_pretrained(tmp_path)
    assert tiny.num_hidden_layers < config.num_hidden_layers
    heads = [layer.head_dim for layer in tiny.per_layer_config]
    assert dict(zip(tiny.layer_types, heads, strict=True)) == {"sliding_attention": 16, "full_attention": 32}
