"""Tiny random models of every architecture, with all features that affect results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from braid.models.batch import PackedBatch

_VOCAB = 96
_LENGTHS = (11, 3, 17, 8)

_SIZES: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.15,  # logits of a size at which scales and caps show
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
_MORE: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "attention_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0, **_SLIDING},
    "gemma3_text": {"query_pre_attn_scalar": 8, **_SLIDING},
    "mistral": {"sliding_window": 5, "tie_word_embeddings": False},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **_SLIDING},
}


@pytest.fixture(params=list(_MORE))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tiny_model() -> Callable[..., PreTrainedModel]:
    return _tiny_model


@pytest.fixture
def packed() -> Callable[..., PackedBatch]:
    return _packed


@pytest.fixture
def plain_outputs() -> Callable[..., dict[str, Tensor]]:
    return _plain_outputs


def _tiny_model(architecture: str, **changes: Any) -> PreTrainedModel:
    """A random model of about 20,000 parameters, with the attention of its authors."""
    config = AutoConfig.for_model(architecture, **(_SIZES | _MORE[architecture] | changes))
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def _packed(lengths: tuple[int, ...] = _LENGTHS, seed: int = 0) -> PackedBatch:
    """Random rows; about two thirds of their tokens, never the first, count as written by the policy."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(_VOCAB, (sum(lengths),), generator=generator)
    mask = torch.rand(sum(lengths), generator=generator) < 0.67
    mask[torch.tensor((0, *lengths[:-1])).cumsum(0)] = False
    return PackedBatch({"input_ids": input_ids}, mask, lengths)


def _plain_logits(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """[T, V]: each row by itself through the Hugging Face forward."""
    rows = batch.inputs["input_ids"].split(list(batch.lengths))
    return torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])


def _plain_outputs(model: PreTrainedModel, batch: PackedBatch, temperature: float) -> dict[str, Tensor]:
    """Log-probs and entropies [T] from all logits at once, 0 where the policy wrote nothing."""
    logp = (_plain_logits(model, batch).float() / temperature).log_softmax(-1)
    before = (torch.arange(len(batch.mask)) - 1).clamp(min=0)
    logprobs = logp[before].gather(1, batch.inputs["input_ids"][:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)[before]
    return {"logprobs": logprobs * batch.mask, "entropy": entropy * batch.mask}
