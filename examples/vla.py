"""Makes what examples/vla.yaml starts from, in about a minute; with --kind pi0, what
benchmarks/learned/pi0.yaml does:

    python examples/vla.py [FOLDER]

FOLDER/demonstrations: episodes of the tabletop's expert, as a LeRobot data set. FOLDER/model: a small
OpenVLA-OFT or pi0 policy in the folder layout of published checkpoints, with a vision tower that was trained
to see blocks and plates; all else is random.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tabletop import COLORS, Tabletop, expert
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PI0Config, PI0ForConditionalGeneration, PreTrainedTokenizerFast

from braid.data.lerobot import Demonstration, write_demonstrations
from braid.models.vla.openvla import Checkpoint, OpenVla, save_openvla
from braid.models.vla.vision import prepared

ENV: dict[str, Any] = {"num_blocks": 1, "num_plates": 1, "num_colors": 3}
"""As in vla.yaml; the time limit does not matter to the expert."""
IMAGE_SIZE, PATCH = 32, 8
NUM_BINS = 32
OPENVLA: dict[str, Any] = {
    "model_type": "openvla",
    "timm_model_ids": ["small"],
    "vision_sizes": [{"width": 64, "depth": 3, "heads": 4, "mlp": 192, "patch": PATCH, "registers": 0}],
    "use_fused_vision_backbone": False,
    "image_sizes": [IMAGE_SIZE],
    "n_action_bins": NUM_BINS,
    "text_config": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.15, "pad_token_id": 0,
    },
}  # fmt: skip
"""config.json. Published models have two vision towers, 256 bins, and 7 billion weights."""
_GEMMA: dict[str, Any] = {
    "model_type": "gemma", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.15,
    "pad_token_id": 0,
}  # fmt: skip
_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "patch_size": PATCH, "image_size": IMAGE_SIZE, "vision_use_head": False,
}  # fmt: skip
PI0: dict[str, Any] = {"chunk_size": 4, "max_action_dim": 3, "max_state_dim": 4}
"""Published models have chunks of 50 actions, and 3 billion weights."""
PHRASES = {
    "openvla_oft": ["In: What action should the robot take to put the", "block on the", "plate?\nOut:"],
    "pi0": ["put the", "block on the", "plate\n"],
}
"""What all prompts of a kind have in common; each is one token."""


See = tuple[Callable[[Tensor], Tensor], Sequence[nn.Module]]
"""A function from images [B, 1, 3, h, w] to embeddings of patches [B, N, D], and the modules that it runs."""


def demonstrate(num_episodes: int) -> list[Demonstration]:
    """Episodes of the expert."""
    env, episodes = Tabletop(**ENV), []
    for seed in range(num_episodes):
        frames, actions, is_over = [env.reset(seed=seed)[0]], [], False
        while not is_over:
            actions.append(expert(env))
            observation, _, is_terminated, is_truncated, _ = env.step(actions[-1])
            frames.append(observation)
            is_over = is_terminated or is_truncated
        observations = {
            name: np.stack([observation[name] for observation in frames[:-1]]) for name in ("image", "state")
        }
        episodes.append(Demonstration(observations, np.stack(actions), env.instruction))
    return episodes


def make_openvla(statistics: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> tuple[OpenVla, See]:
    """A policy with random weights, and its vision tower and projector."""
    # action tokens are the last ones
    text = {**OPENVLA["text_config"], "vocab_size": len(tokenizer) + NUM_BINS}
    raw = {**OPENVLA, "text_config": text, "norm_stats": statistics}
    model = OpenVla(replace(Checkpoint.parse(raw, "OPENVLA"), proprio_size=4))
    vision, projector = model.vision_backbone, model.projector
    nn.init.normal_(vision.featurizer.pos_embed, std=0.5)

    def see(pixels: Tensor) -> Tensor:
        return projector["fc2"](nn.functional.gelu(projector["fc1"](vision(pixels))))

    return model, (see, [vision, projector])


def make_pi0(tokenizer: PreTrainedTokenizerFast) -> tuple[PI0ForConditionalGeneration, See]:
    """As make_openvla."""
    size, width = len(tokenizer), _GEMMA["hidden_size"]
    vlm = {
        "model_type": "paligemma", "text_config": {**_GEMMA, "vocab_size": size}, "vision_config": _SIGLIP,
        "projection_dim": width, "image_token_id": size,
    }  # fmt: skip
    config = PI0Config(vlm_config=vlm, dit_config={**_GEMMA, "vocab_size": size}, **PI0)
    model = PI0ForConditionalGeneration(config)
    for layer in model.embed_action_time.modules():  # those of transformers are for pretrained weights
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    parts: Any = model.model.vlm
    nn.init.normal_(parts.vision_tower.embeddings.position_embedding.weight, std=0.5)

    def see(pixels: Tensor) -> Tensor:
        return parts.get_image_features(pixels[:, 0] * 2 - 1).pooler_output

    return model, (see, [parts.vision_tower, parts.multi_modal_projector])


def pretrain(see: See, num_steps: int, batch: int = 64, num_scenes: int = 4000) -> float:
    """Teach the vision tower and the projector what is where: the first numbers of a patch's embedding become
    the places of blocks and plates by color. Those of published models are pretrained as well; without it,
    imitation needs many times the steps. Returns the last mean squared error."""
    embed, parts = see
    weights = [p for part in parts for p in part.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=num_steps)
    env, order = Tabletop(**ENV), torch.Generator().manual_seed(0)
    scenes = [_scene(env, 10**6 + n, IMAGE_SIZE // PATCH) for n in range(num_scenes)]
    images, targets = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*scenes, strict=True))
    loss = torch.zeros(())
    for _ in range(num_steps):
        drawn = torch.randint(num_scenes, (batch,), generator=order)
        patches = embed(prepared(images[drawn].unsqueeze(1), IMAGE_SIZE, center_crop=False))
        loss = nn.functional.mse_loss(patches[..., : targets.shape[-1]], targets[drawn])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


def _scene(env: Tabletop, seed: int, side: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """An image, and for each of its patches [side * side] by kind and color: how near an object is (the
    bilinear weight of its place), alone and multiplied with the place."""
    image = env.reset(seed=seed)[0]["image"]
    targets = np.zeros((side * side, 2, ENV["num_colors"], 3), np.float32)
    centers = (np.arange(side) + 0.5) / side
    for kind, (places, colors) in enumerate([(env.blocks, env.block_colors), (env.plates, env.plate_colors)]):
        for (x, y), color in zip(places, colors, strict=True):
            near_x, near_y = (np.clip(1 - abs(coordinate - centers) * side, 0, 1) for coordinate in (x, y))
            weight = np.outer(near_y, near_x).flatten()
            targets[:, kind, color] += 4 * np.outer(weight, (1, 2 * x - 1, 2 * y - 1))
    return image, targets.reshape(side * side, -1)


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """With a token for each color, and for what all prompts have in common."""
    names = ["<unk>", "<s>", "</s>", "▁", *COLORS]
    tokenizer = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens(PHRASES[kind])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def statistics_of(episodes: list[Demonstration]) -> dict[str, Any]:
    """Of actions and states, as in a published norm_stats."""
    parts = {
        "action": np.concatenate([e.actions for e in episodes]),
        "proprio": np.concatenate([e.observations["state"] for e in episodes]),
    }
    return {"tabletop": {name: _statistics(numbers) for name, numbers in parts.items()}}


def _statistics(numbers: NDArray[np.float32]) -> dict[str, Any]:
    """Of the columns."""
    low, high = numbers.min(0), numbers.max(0)
    q01, q99 = np.quantile(numbers, 0.01, axis=0), np.quantile(numbers, 0.99, axis=0)
    ranges = {"min": low, "max": high, "q01": q01, "q99": q99, "mean": numbers.mean(0), "std": numbers.std(0)}
    return {name: values.tolist() for name, values in ranges.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="default: vla, or vla_pi0, beside this file")
    parser.add_argument("--kind", choices=list(PHRASES), default="openvla_oft")
    parser.add_argument("--episodes", type=int, default=500, help="demonstrations (default: 500)")
    parser.add_argument(
        "--vision-steps", type=int, default=2400, help="steps of pretraining the vision tower"
    )
    args = parser.parse_args()
    folder = args.folder or Path(__file__).parent / ("vla_pi0" if args.kind == "pi0" else "vla")
    episodes = demonstrate(args.episodes)
    write_demonstrations(folder / "demonstrations", episodes)
    statistics, tokenizer = statistics_of(episodes), make_tokenizer(args.kind)
    torch.manual_seed(0)
    model, see = make_pi0(tokenizer) if args.kind == "pi0" else make_openvla(statistics, tokenizer)
    error = pretrain(see, args.vision_steps)
    if isinstance(model, OpenVla):
        save_openvla(model.state_dict(), model.checkpoint, tokenizer, folder / "model")
    else:
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        (folder / "model" / "dataset_statistics.json").write_text(json.dumps(statistics))
    frames = sum(len(episode.actions) for episode in episodes)
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(  # noqa: T201
        f"{folder}: {len(episodes)} episodes of {frames} frames, a policy of {weights:,} weights, vision "
        f"error {error:.4f}"
    )


if __name__ == "__main__":
    main()
