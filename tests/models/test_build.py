"""Models and tokenizers made from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from braid.config.model import BuildSpec, ModelConfig
from braid.models.build import build_model
from braid.models.loading import load_policy, load_tokenizer
from braid.models.tokenizer import character_tokenizer

CPU = torch.device("cpu")
ALPHABET = BuildSpec().characters
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "head_dim": 8}


@given(
    st.text(ALPHABET, max_size=60).filter(
        lambda text: not any(t in text for t in ("<pad>", "<eos>", "<unk>"))
    )
)
def test_any_text_over_the_alphabet_survives_a_round_trip(text: str) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_other_characters_become_the_unknown_token() -> None:
    tokenizer = character_tokenizer("ab")
    assert tokenizer.encode("aé\tb") == [3, 2, 2, 4]
    assert tokenizer.decode([3, 2, 4, 1], skip_special_tokens=True) == "ab"


def test_special_tokens_are_the_first_three_and_the_alphabet_follows() -> None:
    tokenizer = character_tokenizer("ba")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.convert_ids_to_tokens([3, 4]) == ["b", "a"]
    assert tokenizer.bos_token_id is None
    assert len(tokenizer) == 5


def test_a_saved_tokenizer_is_the_same_when_loaded(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "1 + 2 = <a>\n  'b'  "
    assert again.encode(text) == tokenizer.encode(text)
    assert again.decode(again.encode(text)) == text
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("architecture", get_args(BuildSpec.model_fields["architecture"].annotation))
@pytest.mark.parametrize("tied", [True, False])
def test_every_architecture_gets_the_sizes_asked_for(architecture: str, tied: bool) -> None:
    spec = BuildSpec(architecture=architecture, tie_embeddings=tied, max_positions=128, **SMALL)
    lm = load_policy(ModelConfig(build=spec), temperature=1.0, seed=0, device=CPU)
    config = lm.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (32, 48, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert config.max_position_embeddings == 128
    assert (config.pad_token_id, config.eos_token_id) == (0, 1)
    assert (lm.head.weight is lm.model.get_input_embeddings().weight) == tied
    part = "model.language_model" if spec.vision_tower is not None else "model"
    assert dict(lm.named_weights())[f"{part}.layers.1.self_attn.k_proj.weight"].shape == (2 * 8, 32)


def test_the_vocabulary_is_padded_to_a_multiple_of_sixteen() -> None:
    tokenizer = character_tokenizer("".join(map(chr, range(97, 97 + 14))))
    model = build_model(BuildSpec(**SMALL), tokenizer, dtype=torch.float32, seed=0)
    assert len(tokenizer) == 17
    assert model.config.vocab_size == 32
    assert tokenizer.decode([31]) == ""


def test_the_seed_decides_the_weights_and_nothing_else_does() -> None:
    config = ModelConfig(build=BuildSpec(**SMALL))
    first = load_policy(config, temperature=1.0, seed=5, device=CPU)
    state = torch.random.get_rng_state()
    torch.rand(3)
    again = load_policy(config, temperature=1.0, seed=5, device=CPU)
    torch.random.set_rng_state(state)
    other = load_policy(config, temperature=1.0, seed=6, device=CPU)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.head.weight, again.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_weights_are_held_in_the_type_asked_for(name: str, dtype: torch.dtype) -> None:
    lm = load_policy(ModelConfig(build=BuildSpec(**SMALL), dtype=name), temperature=1.0, seed=0, device=CPU)
    assert {p.dtype for p in lm.module.parameters()} == {dtype}


def test_a_built_model_can_take_another_tokenizer(tmp_path: Path) -> None:
    character_tokenizer("".join(map(chr, range(200, 400)))).save_pretrained(tmp_path)
    config = ModelConfig(build=BuildSpec(**SMALL), tokenizer=str(tmp_path))
    assert len(load_tokenizer(config)) == 203
    assert load_policy(config, temperature=1.0, seed=0, device=CPU).vocab_size == 208
