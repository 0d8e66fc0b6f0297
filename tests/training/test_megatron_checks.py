"""Models that Megatron cannot build or partition are refused before anything is built, with an
alternative."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from braid.errors import ModelError
from braid.training.backends.megatron.checks import check_model
from braid.training.backends.megatron.kind import Megatron

SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}


@pytest.mark.parametrize(
    ("kind", "sizes", "options", "words"),
    [
        ("gemma2", {}, {}, "not|of type gemma2; use fsdp2"),
        ("jamba", {}, {}, "supports models of type .*, not jamba; use fsdp2"),
        (
            "qwen3",
            {},
            {"tensor_parallel": 4},
            "does not divide the model's 2 key/value heads; set it to a divisor of 2",
        ),
        ("qwen3", {}, {"context_parallel": 3}, "does not divide the 4 attention heads"),
        (
            "qwen3",
            {},
            {"pipeline_parallel": 2, "virtual_pipeline": 3},
            "= 6 stages do not divide .* 4 layers",
        ),
        ("qwen3", {}, {"expert_parallel": 2}, "the model has no experts"),
        ("mixtral", {"sliding_window": 8}, {}, "sliding-window"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, {}, "mixes the two"),
        ("qwen3_moe", {}, {"tensor_parallel": 2}, "sequence_parallel=true"),
        ("qwen3_moe", {}, {"moe_token_dispatcher": "allgather"}, "set it to alltoall"),
        ("qwen3_moe", {}, {"moe_grouped_gemm": True}, "set it to false"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
            {},
            "not yarn",
        ),
    ],
)
def test_unsupported_models_are_refused_with_an_alternative(
    kind: str, sizes: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        check_model(AutoConfig.for_model(kind, **SIZES, **sizes), Megatron(**options))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_supported_models_are_accepted(kind: str) -> None:
    options = Megatron(tensor_parallel=2, pipeline_parallel=2, sequence_parallel=True, context_parallel=2)
    check_model(AutoConfig.for_model(kind, **SIZES), options)
