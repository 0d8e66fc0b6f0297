"""Images with questions for pictures.yaml: one coloured shape each. Writes the files of its data, and
the examples to evaluate again with the images of other rows (shuffled.jsonl):

    python examples/pictures.py examples/pictures
"""

from __future__ import annotations

import base64
import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SHAPES = ("square", "cross", "ring")
SIDES = ("left", "right")
QUESTIONS = {
    "what colour is it?": tuple(COLOURS),
    "which shape is it?": SHAPES,
    "which side is it on?": SIDES,
}
"""Questions and their possible answers."""
CELL = 16
"""Side of a quarter of an image, in pixels."""
SHARE_GUESSED = 2 / 3
"""Of the examples to imitate, those that guess; the others say what is in the image before they answer."""


def draw(rng: np.random.Generator) -> tuple[NDArray[np.uint8], tuple[str, str, str]]:
    """Pixels [32, 32, 3] of a shape in one quarter of a grey image, and its colour, shape and side."""
    colour, shape = (str(rng.choice(names)) for names in (tuple(COLOURS), SHAPES))
    row, column = rng.integers(2, size=2)
    size = rng.uniform(6, CELL / 2)
    y, x = np.abs(np.mgrid[:CELL, :CELL] + 0.5 - CELL / 2)
    square, distance = np.maximum(x, y) <= size, np.hypot(x, y)
    inside = {
        "square": square,
        "cross": square & (np.minimum(x, y) <= 0.3 * size),
        "ring": (distance <= size) & (distance >= 0.6 * size),
    }[shape]
    pixels = np.full((2 * CELL, 2 * CELL, 3), 128, np.uint8)
    pixels[row * CELL :, column * CELL :][:CELL, :CELL][inside] = COLOURS[colour]
    return pixels, (colour, shape, SIDES[column])


def rows(num: int, seed: int) -> list[dict[str, Any]]:
    """Rows with an image as base64, a question, its answer, and a response to imitate."""
    rng = np.random.default_rng(seed)
    made: list[dict[str, Any]] = []
    for _ in range(num):
        pixels, answers = draw(rng)
        place = int(rng.integers(len(QUESTIONS)))
        question, possible = list(QUESTIONS.items())[place]
        if rng.random() < SHARE_GUESSED:
            response = f"perhaps {rng.choice(possible)}"
        else:
            response = f"{' '.join(answers)}: {answers[place]}"
        file = BytesIO()
        PIL.Image.fromarray(pixels).save(file, "PNG")
        image = base64.b64encode(file.getvalue()).decode()
        made.append({"image": image, "prompt": question, "answer": answers[place], "response": response})
    return made


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    made = {
        "train": rows(2_000, seed=0),
        "eval": rows(300, seed=1_000_000),
        "sft": rows(16_000, seed=500_000),
    }
    images = np.random.default_rng(0).permutation([row["image"] for row in made["eval"]])
    made["shuffled"] = [row | {"image": str(image)} for row, image in zip(made["eval"], images, strict=True)]
    for name, lines in made.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


if __name__ == "__main__":
    main()
