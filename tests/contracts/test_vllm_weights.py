"""What vLLM makes of the trainer's weights: parameters that it fuses from several, and merged adapters of
experts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.needs import WITH_VLLM
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from braid.config.model import ModelConfig
from braid.errors import EngineError
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy, load_tokenizer, save_pretrained
from braid.rollout.engine import Request, RolloutEngine, Sampling

from .engines import MODEL, vllm
from .test_engine import LOGPROB_TOLERANCE, generate, trainer_greedy, trainer_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm"), WITH_VLLM]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """qwen3_moe with adapters of all layers and experts, which are not 0."""
    folder, tokenizer = tmp_path_factory.mktemp("mixture"), load_tokenizer(MODEL)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        initializer_range=0.3, vocab_size=128, max_position_embeddings=128, pad_token_id=None, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    save_pretrained(
        CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.float32)), tokenizer, folder
    )
    lora = {"rank": 4, "alpha": 8.0}
    chosen = ModelConfig.model_validate({"path": str(folder), "lora": lora})
    lm = load_policy(chosen, temperature=1.0, seed=0, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for _, tensor in lm.named_weights():
        tensor.data.normal_(0, 0.2, generator=generator)
    return lm


def _sync(engine: RolloutEngine, version: int, weights: Iterator[tuple[str, Tensor]]) -> None:
    def load() -> None:
        engine.load_weights(version, weights)  # pyright: ignore[reportAttributeAccessIssue]

    asyncio.run(engine.set_weights(version, "drain", load))


@pytest.mark.nightly
def test_adapters_of_experts_are_merged_into_what_vllm_samples_from(
    mixture: CausalLM, tmp_path: Path
) -> None:
    request = Request((5, 9, 7), Sampling(max_new_tokens=12, temperature=1.0), key=(0, 1))
    with vllm(mixture, tmp_path) as engine:
        _sync(engine, 1, mixture.merged_weights())
        (completion,) = generate(engine, [request])
    ours = trainer_logprobs(mixture, request, completion)
    torch.testing.assert_close(torch.tensor(completion.logprobs), ours, rtol=0, atol=LOGPROB_TOLERANCE)


@pytest.mark.nightly
def test_a_missing_part_of_a_fused_parameter_is_an_error(tmp_path: Path) -> None:
    lm = load_policy(MODEL, temperature=1.0, seed=0, device=torch.device("cpu"))
    with vllm(lm, tmp_path) as engine:
        _sync(engine, 1, lm.merged_weights())
        for version, part, said in (
            (2, "1.self_attn.k_proj", "qkv_proj.weight (k)"),
            (3, "0.mlp.up_proj", "(1)"),
        ):
            others = ((name, tensor) for name, tensor in lm.merged_weights() if part not in name)
            with pytest.raises(EngineError, match="the weight sync lacked 1 weights") as caught:
                _sync(engine, version, others)
            assert said in str(caught.value)
        _sync(engine, 4, lm.merged_weights())
        request = Request((5, 9, 7), Sampling(max_new_tokens=10, greedy=True), key=(0, 1))
        (completion,) = generate(engine, [request])
    assert list(completion.token_ids) == trainer_greedy(lm, request.prompt_ids, 10)


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {},
    "mistral": {"sliding_window": None},
    "phi3": {},
    "glm4": {},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 8},
    "granite": {},
    "olmo2": {},
    "smollm3": {},
}


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_computes_each_family_as_training_does_also_with_other_norms_and_biases(
    family: str, tmp_path: Path
) -> None:
    """Norms of 1 and biases of 0, as models start with, hide whether a sync brings them."""
    tokenizer = load_tokenizer(MODEL)
    config = AutoConfig.for_model(
        family, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, vocab_size=128, max_position_embeddings=128, pad_token_id=None,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, **FAMILIES[family],
    )  # fmt: skip
    torch.manual_seed(0)
    lm = CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    save_pretrained(lm, tokenizer, tmp_path / "model")
    lm = load_policy(
        ModelConfig(path=str(tmp_path / "model")), temperature=1.0, seed=0, device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(1)
    for _, tensor in lm.named_weights():
        start = tensor.data if tensor.ndim < 2 else torch.zeros(())
        tensor.data = start + 0.2 * torch.randn(tensor.shape, generator=generator)
    request = Request((5, 9, 7), Sampling(max_new_tokens=12, temperature=1.0), key=(0, 1))
    with vllm(lm, tmp_path / "engine") as engine:
        _sync(engine, 1, lm.merged_weights())
        (completion,) = generate(engine, [request])
    ours = trainer_logprobs(lm, request, completion)
    torch.testing.assert_close(torch.tensor(completion.logprobs), ours, rtol=0, atol=LOGPROB_TOLERANCE)
