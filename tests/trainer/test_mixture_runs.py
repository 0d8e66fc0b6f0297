"""Whole PPO runs with adapters on a mixture of experts, whose experts transformers keeps in fused
parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.needs import WITH_VLLM
from transformers import AutoConfig, AutoModelForCausalLM

from braid.checkpoint.store import CheckpointStore
from braid.models.causal_lm import CausalLM
from braid.models.loading import save_pretrained
from braid.models.tokenizer import character_tokenizer
from braid.trainer import commands

from .conftest import LoadTiny

LOGPROB_TOLERANCE = 5e-4
"""fp32 with other kernels, which sum in another order."""


def _mixture(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = character_tokenizer("abcdefgh")
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, initializer_range=0.3, vocab_size=len(tokenizer), max_position_embeddings=64,
        pad_token_id=None, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_pretrained(CausalLM(model), tokenizer, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    ["native", pytest.param("vllm", marks=[pytest.mark.xdist_group("vllm"), pytest.mark.nightly, WITH_VLLM])],
)
def test_ppo_with_adapters_of_experts_trains_policy_critic_and_engine(
    load_tiny: LoadTiny, engine: str, tmp_path: Path
) -> None:
    """The engine's log-probs are those of the trainer in every round, so it samples from the merged
    experts."""
    folder = _mixture(tmp_path / "mixture")
    run = commands.train(
        load_tiny(
            f"model={{path: {folder}, lora: {{rank: 4}}}}",
            "algorithm={recipe: ppo, kl_coef: 0.01}",
            "train.optimizer.lr=0.03",
            f"rollout.engine={engine}",
            "rollout.max_invalid_fraction=0",
            "data.max_prompt_tokens=8",
            "reward.parts=[{kind: function, path: 'rewards.py:early'}]",
            rewards="def early(response):\n    return sum(letter < 'e' for letter in response)\n",
        )
    ).run_dir
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if "policy/logprob_mismatch_max" in line]
    assert [line["round"] for line in rounds] == [1, 2, 3]
    assert max(line["policy/logprob_mismatch_max"] for line in rounds) < LOGPROB_TOLERANCE
    assert rounds[0]["reward/kl"] == pytest.approx(0.0, abs=1e-6)
    assert rounds[-1]["reward/kl"] > 1e-3, (
        "the policy has moved away from its reference, the same model without adapters"
    )
    assert "critic/loss" in rounds[-1]
    trained = CheckpointStore(run / "checkpoints").locate()[2]["policy"]["weights"]
    assert any(".experts." in name and "lora_B" in name and tensor.any() for name, tensor in trained.items())
    exported, info = AutoModelForCausalLM.from_pretrained(commands.export(run), output_loading_info=True)
    assert not any(info.values())
    plain = AutoModelForCausalLM.from_pretrained(folder)
    experts = [name for name, _ in plain.named_parameters() if ".experts." in name]
    assert experts
    assert not any(torch.equal(exported.get_parameter(name), plain.get_parameter(name)) for name in experts)


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["rollout", "old"])
def test_a_run_replays_experts_and_resumes_to_the_same_numbers(
    load_tiny: LoadTiny, replay: str, tmp_path: Path
) -> None:
    """In bf16, with adapters, groups of several prompts, and two passes; and in a pipeline."""
    folder = _mixture(tmp_path / "mixture")
    keys = (
        f"model={{path: {folder}, dtype: bf16, lora: {{rank: 4}}}}",
        f"train={{router_replay: {replay}, router_aux_coef: 0.01, passes_per_round: 2}}",
        "train.optimizer.lr=0.01",
        "checkpoint.every_rounds=1",
        "rollout.max_invalid_fraction=0",
        "data.max_prompt_tokens=8",
    )
    whole = commands.train(load_tiny(*keys)).run_dir
    commands.train(load_tiny(*keys, "run.name=cut", "run.max_rounds=2"))
    cut = commands.train(load_tiny(*keys, "run.name=cut", "run.resume=latest")).run_dir
    last = [json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) for run in (whole, cut)]
    commands.train(load_tiny(*keys, "run.name=pipelined", "pipeline.max_lag=1"))
    names = [name for name in last[0] if name.startswith(("router/", "policy/"))]
    assert {"router/load_max", "router/load_min", "router/entropy", "router/aux_loss"} <= set(names)
    assert {name: last[0][name] for name in names} == {name: last[1][name] for name in names}
