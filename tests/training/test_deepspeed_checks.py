"""Models that DeepSpeed cannot train are refused before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.test_stateful import hybrid
from transformers import AutoConfig

from braid.config.load import load_config
from braid.errors import ModelError
from braid.plan import derive
from braid.trainer.runnable import run_problems
from braid.training.backends.deepspeed.kind import DeepSpeed

WORDS = "deepspeed cannot train models with layers that carry a state or have an indexer.*use fsdp2 or fsdp"
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "jamba", "minimax", "mamba", "deepseek_v32"])
def test_architectures_with_a_state_or_an_indexer_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=WORDS):
        DeepSpeed().check_model(hybrid(name).config)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral"])
def test_others_are_not(name: str) -> None:
    DeepSpeed().check_model(AutoConfig.for_model(name, **SIZES))


def test_the_refusal_precedes_the_run(tmp_path: Path) -> None:
    hybrid("bamba").config.save_pretrained(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path}/model}}\n"
        "data: {train: [{kind: file, path: x.jsonl}]}\n"
        "reward: {parts: [{kind: exact}]}\ntrain: {backend: deepspeed}\n"
    )
    config = load_config(tmp_path / "run.yaml").config
    problems = run_problems(config, derive(config, None, "train"))
    assert any(problem.key == "train.backend" and "carry a state" in problem.message for problem in problems)
