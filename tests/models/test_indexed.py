"""Layers whose indexer chooses the keys that a query sees."""

from __future__ import annotations

import pytest
import torch
from tests.models.test_stateful import ROWS, batch, gradients, hybrid, row_logprobs, wrong
from torch import Tensor

from braid.config.backends import LoraConfig
from braid.errors import ModelError
from braid.models.causal_lm import CausalLM
from braid.models.indexed import IndexerCall
from braid.models.lora import add_adapters
from braid.models.selfcheck import check_against_plain
from braid.models.tiny import SHORT
from braid.rollout.engines.native.selfcheck import check_decoding

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, of configs that are made small
INDEXED = ["deepseek_v32", "glm_moe_dsa", "hy_v4"]
"""An indexer for each layer; layers that share a choice; sinks."""
SIZES = {
    **dict.fromkeys(("hidden_size", "max_position_embeddings"), 64),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_routed_experts", "num_experts"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim", "head_dim", "moe_intermediate_size"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("index_n_heads", "index_head_dim"), 16),
    "num_hidden_layers": 4,
    "vocab_size": 96,
    "intermediate_size": 48,
    "num_experts_per_tok": 2,
}
"""Indexers have so many heads that no key gets a score of 0 from all: of equal scores topk takes any."""
LOGPROBS = frozenset({"logprobs"})


@pytest.mark.parametrize("architecture", INDEXED)
@pytest.mark.parametrize("recomputes", [False, True])
def test_packed_rows_with_shared_prefixes_choose_as_the_models_own_rows(
    architecture: str, recomputes: bool
) -> None:
    plain, lm = hybrid(architecture, **SIZES), CausalLM(hybrid(architecture, **SIZES))
    lm.set_gradient_checkpointing(recomputes)
    rows, packed = batch()
    assert min(ROWS) < SHORT < max(ROWS), "keys are left out in some rows"
    expected = row_logprobs(plain, rows)
    computed = lm.forward(packed, LOGPROBS)["logprobs"]
    assert (computed - expected).abs().max() <= 2e-4
    theirs, ours = gradients(plain, expected), gradients(lm.module, computed)
    largest = max(grad.norm() for grad in theirs.values())
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert (ours[name] - grad).norm() <= 1e-3 * largest, name


def every_key(self: IndexerCall, hidden: Tensor, *_: Tensor) -> Tensor:
    return torch.ones(len(hidden), hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()


@pytest.mark.parametrize("architecture", INDEXED)
def test_a_wrong_choice_is_caught(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IndexerCall, "__call__", every_key)
    assert "for rows longer than its index_topk of" in wrong(architecture, check_against_plain)


def test_the_native_engine_is_refused_with_another() -> None:
    with pytest.raises(ModelError, match=r"DeepseekV32Indexer chooses .* sample with rollout\.engine=vllm"):
        check_decoding(CausalLM(hybrid("deepseek_v32")))


def test_an_indexer_is_not_trained() -> None:
    lm = CausalLM(hybrid("glm_moe_dsa"))
    frozen = {name for name, p in lm.module.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in lm.module.named_parameters() if ".indexer." in name} != set()
    add_adapters(lm.model, LoraConfig(rank=2, targets=("all-linear",)), seed=0)
    assert not any(".indexer." in name for name, p in lm.module.named_parameters() if p.requires_grad)
    lm.forward(batch()[1], LOGPROBS)["logprobs"].sum().backward()
    assert all(p.grad is not None for p in lm.module.parameters() if p.requires_grad)
