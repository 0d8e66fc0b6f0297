"""Tiny random language models, and a way to run requests through an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from braid.models.causal_lm import CausalLM
from braid.rollout.engine import Completion, Request
from braid.rollout.engines.native.engine import NativeEngine

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.15,  # large enough for tokens to hang on what came before
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
_MORE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        **_SLIDING,
    },
    "gemma3_text": {"query_pre_attn_scalar": 8, **_SLIDING},
    "gpt_oss": {"num_local_experts": 1, "num_experts_per_tok": 1, **_SLIDING},
    "diffllama": {},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_experts": 1,
        "num_experts_per_tok": 1,
    },
}


HYBRIDS = ("qwen3_5_text", "bamba", "jamba")
"""Their tests are in test_native_states.py, with the rounding of their layers."""


@pytest.fixture(params=[name for name in _MORE if name not in HYBRIDS])
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tiny_lm() -> Callable[..., CausalLM]:
    return _tiny_lm


@pytest.fixture
def run_all() -> Callable[[NativeEngine, Sequence[Request]], list[Completion]]:
    return _run_all


def _tiny_lm(architecture: str = "qwen3", **more: Any) -> CausalLM:
    """The same weights for the same arguments."""
    config = AutoConfig.for_model(architecture, **{**_SIZES, **_MORE[architecture], **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CausalLM(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def _run_all(engine: NativeEngine, requests: Sequence[Request]) -> list[Completion]:
    async def gather() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(gather())
