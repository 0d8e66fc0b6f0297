"""Draws the pictures of pictures.yaml: `python examples/pictures.py FOLDER` writes train.jsonl, sft.jsonl and
eval.jsonl there. Each row has a picture of one coloured shape, a question and its answer."""

from __future__ import annotations

import base64
import json
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SHAPES = ("square", "circle", "triangle")
SIDE, CELL = 32, 16


def draw(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, str]]:
    """Pixels [SIDE, SIDE, 3] of a shape in one quarter of the picture, and the answer to each question."""
    shape, colour = SHAPES[rng.integers(3)], list(COLOURS)[rng.integers(4)]
    top, left = rng.integers(2), rng.integers(2)
    y, x = np.mgrid[:CELL, :CELL] - CELL // 2
    size = rng.integers(4, CELL // 2)
    inside = {
        "square": (abs(y) <= size * 0.85) & (abs(x) <= size * 0.85),
        "circle": y * y + x * x <= size * size,
        "triangle": (y <= size * 0.8) & (y >= -size) & (abs(x) <= (y + size) * 0.55),
    }[shape]
    pixels = np.full((SIDE, SIDE, 3), 245, np.uint8)
    pixels[top * CELL : (top + 1) * CELL, left * CELL : (left + 1) * CELL][inside] = COLOURS[colour]
    side = ("left", "right")[left]
    return pixels, {
        "what colour is it ?": colour,
        "which shape is it ?": shape,
        "which side is it on ?": side,
    }


def rows(num: int, seed: int) -> list[dict[str, str]]:
    """Rows with a picture as base64, a prompt and an answer."""
    rng = np.random.default_rng(seed)
    out: list[dict[str, str]] = []
    for _ in range(num):
        pixels, answers = draw(rng)
        question = list(answers)[rng.integers(len(answers))]
        file = BytesIO()
        PIL.Image.fromarray(pixels).save(file, "PNG")
        image = base64.b64encode(file.getvalue()).decode()
        out.append({"image": image, "prompt": question, "answer": answers[question]})
    return out


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, num, seed in (("sft", 4_000, 1), ("train", 8_000, 2), ("eval", 300, 3)):
        lines = (json.dumps(row) for row in rows(num, seed))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
