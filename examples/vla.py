"""Makes what examples/vla.yaml starts from, in about a minute:

    python examples/vla.py [FOLDER]

FOLDER/demonstrations: episodes of the tabletop's expert, as a LeRobot data set. FOLDER/model: a small OpenVLA-OFT policy in the
folder layout of published checkpoints, with a vision tower that was trained to see blocks and plates and a random language
model.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tabletop import COLORS, Tabletop, expert
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from braid.data.lerobot import Demonstration, write_demonstrations
from braid.models.vla.openvla import Checkpoint, OpenVla, save_openvla
from braid.models.vla.vision import prepared

ENV: dict[str, Any] = {"num_blocks": 1, "num_plates": 1, "num_colors": 3}
"""As in vla.yaml; the time limit does not matter to the expert."""
NUM_BINS = 32
CONFIG: dict[str, Any] = {
    "model_type": "openvla",
    "timm_model_ids": ["small"],
    "vision_sizes": [{"width": 64, "depth": 3, "heads": 4, "mlp": 192, "patch": 8, "registers": 0}],
    "use_fused_vision_backbone": False,
    "image_sizes": [32],
    "n_action_bins": NUM_BINS,
    "text_config": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.15, "pad_token_id": 0,
    },
}  # fmt: skip
"""config.json. Published models have two vision towers, 256 bins, and 7 billion weights."""


def demonstrate(num_episodes: int) -> list[Demonstration]:
    """Episodes of the expert."""
    env, episodes = Tabletop(**ENV), []
    for seed in range(num_episodes):
        seen, actions, is_over = [env.reset(seed=seed)[0]], [], False
        while not is_over:
            actions.append(expert(env))
            observation, _, is_terminated, is_truncated, _ = env.step(actions[-1])
            seen.append(observation)
            is_over = is_terminated or is_truncated
        observations = {name: np.stack([of[name] for of in seen[:-1]]) for name in ("image", "state")}
        episodes.append(Demonstration(observations, np.stack(actions), env.instruction))
    return episodes


def make_model(episodes: list[Demonstration], vision_steps: int) -> tuple[OpenVla, PreTrainedTokenizerFast]:
    """A policy whose language model is random, and a tokenizer for the instructions."""
    parts = {
        "action": np.concatenate([e.actions for e in episodes]),
        "proprio": np.concatenate([e.observations["state"] for e in episodes]),
    }
    statistics = {"tabletop": {name: _statistics(numbers) for name, numbers in parts.items()}}
    tokenizer = _tokenizer()
    text = {
        **CONFIG["text_config"],
        "vocab_size": len(tokenizer) + NUM_BINS,
    }  # action tokens are the last ones
    raw = {**CONFIG, "text_config": text, "norm_stats": statistics}
    torch.manual_seed(0)
    model = OpenVla(replace(Checkpoint.parse(raw, "CONFIG"), proprio_size=4))
    pretrain(model, vision_steps)
    return model, tokenizer


def pretrain(model: OpenVla, num_steps: int, batch: int = 64, num_scenes: int = 4000) -> float:
    """Teach the vision tower and the projector what is where: the first numbers of a patch's embedding become the places of
    blocks and plates by color. Those of published models are pretrained as well; without it, imitation needs many times
    the steps. Returns the last mean squared error."""
    vision, projector = model.vision_backbone, model.projector
    torch.nn.init.normal_(vision.featurizer.pos_embed, std=0.5)
    side = CONFIG["image_sizes"][0] // vision.featurizer.sizes.patch
    weights = [p for p in [*vision.parameters(), *projector.parameters()] if p.requires_grad]
    optimizer = torch.optim.AdamW(weights)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=num_steps)
    env, order = Tabletop(**ENV), torch.Generator().manual_seed(0)
    scenes = [_scene(env, 10**6 + n, side) for n in range(num_scenes)]
    images, targets = (torch.from_numpy(np.stack(of)) for of in zip(*scenes, strict=True))
    loss = torch.zeros(())
    for _ in range(num_steps):
        drawn = torch.randint(num_scenes, (batch,), generator=order)
        pixels = prepared(images[drawn].unsqueeze(1), CONFIG["image_sizes"][0], center_crop=False)
        patches = projector["fc2"](torch.nn.functional.gelu(projector["fc1"](vision(pixels))))
        loss = torch.nn.functional.mse_loss(patches[..., : targets.shape[-1]], targets[drawn])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


def _scene(env: Tabletop, seed: int, side: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """An image, and for each of its patches [side * side] by kind and color: how near an object is (the bilinear weight of
    its place), alone and multiplied with the place."""
    image = env.reset(seed=seed)[0]["image"]
    targets = np.zeros((side * side, 2, ENV["num_colors"], 3), np.float32)
    centers = (np.arange(side) + 0.5) / side
    for kind, (places, colors) in enumerate([(env.blocks, env.block_colors), (env.plates, env.plate_colors)]):
        for (x, y), color in zip(places, colors, strict=True):
            near_x, near_y = (np.clip(1 - abs(of - centers) * side, 0, 1) for of in (x, y))
            weight = np.outer(near_y, near_x).flatten()
            targets[:, kind, color] += 4 * np.outer(weight, (1, 2 * x - 1, 2 * y - 1))
    return image, targets.reshape(side * side, -1)


def _tokenizer() -> PreTrainedTokenizerFast:
    """With a token for each color, and for what all prompts have in common."""
    names = ["<unk>", "<s>", "</s>", "▁", *COLORS]
    tokenizer = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens(["In: What action should the robot take to put the", "block on the", "plate?\nOut:"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def _statistics(numbers: NDArray[np.float32]) -> dict[str, Any]:
    """Of the columns, as in a published norm_stats."""
    low, high = numbers.min(0), numbers.max(0)
    q01, q99 = np.quantile(numbers, 0.01, axis=0), np.quantile(numbers, 0.99, axis=0)
    found = {"min": low, "max": high, "q01": q01, "q99": q99, "mean": numbers.mean(0), "std": numbers.std(0)}
    return {name: values.tolist() for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "vla")
    parser.add_argument("--episodes", type=int, default=500, help="demonstrations (default: 500)")
    parser.add_argument(
        "--vision-steps", type=int, default=2400, help="steps of pretraining the vision tower"
    )
    args = parser.parse_args()
    episodes = demonstrate(args.episodes)
    write_demonstrations(args.folder / "demonstrations", episodes)
    model, tokenizer = make_model(episodes, args.vision_steps)
    save_openvla(model.state_dict(), model.checkpoint, tokenizer, args.folder / "model")
    frames = sum(len(episode.actions) for episode in episodes)
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.folder}: {len(episodes)} episodes of {frames} frames, a policy of {weights:,} weights")  # noqa: T201


if __name__ == "__main__":
    main()
