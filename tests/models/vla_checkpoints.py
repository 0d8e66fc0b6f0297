"""Tiny checkpoints in the published layouts of vision-language-action policies."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PI0Config, PI0ForConditionalGeneration, PreTrainedTokenizerFast

from braid.models.vla.openvla import Checkpoint, OpenVla, save_openvla
from braid.models.vla.vision import TowerSizes

DINO = TowerSizes(width=16, depth=3, heads=2, mlp=24, patch=8, registers=2)
SIGLIP = TowerSizes(width=12, depth=3, heads=2, mlp=20, patch=8, registers=0)
STATISTICS = {
    "toy_no_noops": {
        "action": {
            "q01": [-0.5, -1.0, 0.0], "q99": [0.5, 3.0, 1.0], "min": [-1.0, -2.0, 0.0], "max": [1.0, 4.0, 1.0],
            "mask": [True, True, False], "mean": [0.0, 1.0, 0.5], "std": [0.5, 1.0, 0.5],
        },
        "proprio": {"q01": [0.0, -1.0], "q99": [2.0, 1.0], "mean": [1.0, 0.0], "std": [1.0, 1.0]},
    }
}  # fmt: skip


def tiny_tokenizer(
    words: str = "in : what action should the robot take to push cube red blue ? out",
) -> PreTrainedTokenizerFast:
    names = ["<unk>", "<s>", "</s>", "▁", *words.split(), "In", "What", "Out", "\n"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def tiny_raw(*, fused: bool = True, bins: int = 256) -> dict[str, Any]:
    towers = [DINO, SIGLIP] if fused else [SIGLIP]
    return {
        "model_type": "openvla",
        "timm_model_ids": ["dino", "siglip"][-len(towers) :],
        "vision_sizes": [asdict(tower) for tower in towers],
        "use_fused_vision_backbone": fused,
        "image_sizes": [24] * len(towers),
        "n_action_bins": bins,
        "pad_to_multiple_of": 8,
        "norm_stats": STATISTICS,
        "text_config": {
            "model_type": "llama", "vocab_size": bins + 48, "hidden_size": 32, "intermediate_size": 40,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
        },
    }  # fmt: skip


def tiny_openvla(
    folder: Path, *, fused: bool = True, proprio_size: int | None = None, seed: int = 0
) -> OpenVla:
    """A random checkpoint, written to `folder`. All weights are perturbed, so that each has an effect."""
    raw = tiny_raw(fused=fused)
    checkpoint = Checkpoint.parse(raw, "test")
    if proprio_size is not None:
        checkpoint = replace(checkpoint, proprio_size=proprio_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = OpenVla(checkpoint).eval()
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    save_openvla(model.state_dict(), checkpoint, tiny_tokenizer(), folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "openvla"
    return model


def tiny_pi0(folder: Path, *, seed: int = 0) -> PI0ForConditionalGeneration:
    """A random checkpoint, written to `folder`."""
    gemma = {
        "model_type": "gemma",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "patch_size": 8, "image_size": 16, "vision_use_head": False,
    }  # fmt: skip
    config = PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": {**gemma, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64},
            "vision_config": vision,
            "projection_dim": 32,
            "image_token_id": 64,
        },
        dit_config={**gemma, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 64},
        chunk_size=4,
        max_state_dim=6,
        max_action_dim=5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PI0ForConditionalGeneration(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model
