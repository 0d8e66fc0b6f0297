"""Sizes of models without loading them, against the models themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from braid.config.backends import LoraConfig
from braid.config.model import BuildSpec
from braid.models.build import build_model
from braid.models.lora import add_adapters, named_adapters
from braid.models.tokenizer import character_tokenizer
from braid.plan.sizes import size_of_folder, size_of_spec

ARCHITECTURES = get_args(BuildSpec.model_fields["architecture"].annotation)


def spec(architecture: str, *, tied: bool = True) -> BuildSpec:
    return BuildSpec.model_validate(
        {
            "architecture": architecture,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_layers": 3,
            "head_dim": 16,
            "characters": "abcdefghijklmnopqrstu",
            "tie_embeddings": tied,
        }
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_build_spec_has_as_many_parameters_as_its_model(architecture: str, tied: bool) -> None:
    described = spec(architecture, tied=tied)
    model = build_model(described, character_tokenizer(described.characters), dtype=torch.float32, seed=0)
    assert size_of_spec(described).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj"), ("mlp.up_proj",)])
def test_adapters_have_as_many_parameters_as_peft_makes(
    architecture: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    described, lora = spec(architecture), LoraConfig(rank=3, targets=targets)
    model = build_model(described, character_tokenizer(described.characters), dtype=torch.float32, seed=0)
    model.save_pretrained(tmp_path)
    add_adapters(model, lora, seed=0)
    expected = sum(tensor.numel() for _, tensor in named_adapters(model))
    assert size_of_spec(described).adapter_parameters(lora) == expected
    folder = size_of_folder(tmp_path)
    assert folder is not None
    assert folder.adapter_parameters(lora) == expected


def test_the_size_of_an_adapter_folder_is_read_from_it(tmp_path: Path) -> None:
    """Without the weights that peft saves beside adapters of the output head."""
    tensors = {"a": torch.zeros(3, 8), "b": torch.zeros(5, 3), "lm_head.base_layer.weight": torch.zeros(5, 8)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    size = size_of_spec(spec("qwen3"))
    assert size.adapter_parameters(LoraConfig(path=str(tmp_path))) == 3 * 8 + 5 * 3
    assert size.adapter_parameters(LoraConfig(path=str(tmp_path / "gone"))) == 0


def test_the_size_of_a_folder_is_read_from_headers(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    size = size_of_folder(tmp_path)
    assert size is not None
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.head_parameters == 32 * 16
    assert (size.num_layers, size.num_kv_heads, size.head_dim, size.max_positions) == (2, 2, 4, 64)


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"num_attention_heads": 2}'])
def test_a_folder_without_headers_has_no_size(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert size_of_folder(tmp_path) is None


def test_damaged_weights_have_no_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2, "hidden_size": 4}))
    (tmp_path / "model.safetensors").write_bytes(b"\x00\x01")
    assert size_of_folder(tmp_path) is None
