"""A round whose prompts have one picture of 224x224 each, against a round of text prompts with as many tokens,
with one model: rollout, log-probs and update of 16 prompts x 8 answers of 32 tokens.

CPU time of one thread, the sides taking turns; the start of a run is subtracted, and every picture is new in its
round. Five minutes of CPU.

    python benchmarks/picture_rounds.py [--repeats 3] [--train none|projector|all]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from braid.config.load import load_config
from braid.images import data_uri, image_of
from braid.trainer import commands

SIDE, PROMPTS, ROUNDS = 224, 16, 3
TOKENS = (SIDE // 32) ** 2
"""Tokens of a picture: patches of 16 pixels, four of which make a token."""
BUILD = {
    "architecture": "qwen3_vl", "hidden_size": 256, "intermediate_size": 768, "num_layers": 6, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 64, "max_positions": 256, "characters": "ab ?",
    "tower": {"image_size": SIDE, "patch_size": 16, "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4},
}  # fmt: skip


def jpeg(rng: np.random.Generator) -> str:
    """A smooth picture with noise, as a data URI."""
    coarse = PIL.Image.fromarray(rng.integers(0, 256, (7, 7, 3), dtype=np.uint8)).resize((SIDE, SIDE))
    noise, file = rng.normal(0, 8, (SIDE, SIDE, 3)), BytesIO()
    pixels = np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8)
    PIL.Image.fromarray(pixels).save(file, "JPEG")
    return data_uri(image_of(file.getvalue(), Path()))


def write_prompts(folder: Path, repeats: int) -> None:
    """Rows for all rounds: pictures with a question, and texts of as many tokens."""
    rng, num = np.random.default_rng(0), PROMPTS * ROUNDS * repeats
    pictures = [{"prompt": "a?", "image": jpeg(rng), "answer": "a"} for _ in range(num)]
    around = 2  # the tokens that begin and end a picture
    texts = [
        {"prompt": "".join(rng.choice(list("ab "), TOKENS + around)) + "a?", "answer": "a"}
        for _ in range(num)
    ]
    for name, lines in (("pictures", pictures), ("texts", texts)):
        for i in range(repeats):
            part = lines[i * PROMPTS * ROUNDS : (i + 1) * PROMPTS * ROUNDS]
            (folder / f"{name}_{i}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))


def seconds(folder: Path, name: str, trained: str, rounds: int) -> float:
    """CPU time of a run of `rounds` rounds."""
    tree: dict[str, Any] = {
        "run": {"name": f"{name}_{rounds}", "device": "cpu", "num_threads": 1, "output_dir": str(folder), "max_rounds": rounds},
        "model": {"vision": {"train": trained}, "build": BUILD},
        "data": {"max_prompt_tokens": 64, "train": [{"kind": "file", "path": str(folder / f"{name}.jsonl")}]},
        "reward": {"parts": [{"kind": "repetition", "ngram": 1}]},
        "rollout": {"prompts_per_round": PROMPTS, "group_size": 8, "sampling": {"max_new_tokens": 32, "min_new_tokens": 32}},
        "algorithm": {"recipe": "grpo", "old_logprobs": "recompute"},
        "eval": {"before": False, "at_end": False},
        "checkpoint": {"at_end": False},
        "report": {"console": "none", "tensorboard": False},
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(tree))
    loaded, start = load_config(folder / "config.yaml"), time.process_time()
    commands.train(loaded)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train", choices=["none", "projector", "all"], default="none", help="of the tower")
    args = parser.parse_args()
    sides: dict[str, list[float]] = {"pictures": [], "texts": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder, args.repeats)
        for i in range(args.repeats):
            for side, durations in sides.items():
                one, all_rounds = (
                    seconds(folder, f"{side}_{i}", args.train, rounds) for rounds in (1, ROUNDS)
                )
                durations.append((all_rounds - one) / (ROUNDS - 1))
                print(f"{side}: {durations[-1]:.2f} s per round", flush=True)
    pictures, texts = map(statistics.median, sides.values())
    print(f"{pictures:.2f} s with pictures, {texts:.2f} s with text, ratio {pictures / texts:.2f}")


if __name__ == "__main__":
    main()
