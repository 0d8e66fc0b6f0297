"""Videos (extra `video`): of episodes, a grid of them with rewards drawn below each; and reading those of
others."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from braid.types import Recording

_TILE, _STRIP = 192, 30
"""Small images are enlarged to about this many pixels; height of the strip of text."""


def write_video(
    path: Path, episodes: Sequence[Recording], *, frames_per_s: int = 10, overlay: bool = True
) -> None:
    """Write an mp4 (H.264) of the episodes as one grid; one that ends earlier stays at its last frame.
    `overlay` draws title, step, reward, return and success below each, and a line between them."""
    import av  # 60 ms, and only a run with videos has it

    height, width = (max(e.frames[0].shape[axis] for e in episodes) for axis in (0, 1))
    factor = max(1, round(_TILE / max(height, width)))
    columns = math.ceil(math.sqrt(len(episodes)))
    rows = math.ceil(len(episodes) / columns)
    tile_height, tile_width = factor * height + overlay * _STRIP, factor * width
    size = [n + n % 2 for n in (rows * tile_height, columns * tile_width)]  # H.264 needs even sizes
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    with av.open(unfinished, "w", format="mp4") as file:
        stream = file.add_stream("h264", rate=Fraction(frames_per_s))
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        for step in range(max(len(e.frames) for e in episodes)):
            grid = np.zeros((*size, 3), np.uint8)
            for number, episode in enumerate(episodes):
                row, column = divmod(number, columns)
                tile = _tile(episode, step, factor, overlay=overlay)
                top, left = row * tile_height, column * tile_width
                grid[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
                if overlay and column:
                    grid[top : top + tile_height, left : left + 2] = 0
            file.mux(stream.encode(av.VideoFrame.from_ndarray(grid)))
        file.mux(stream.encode())
    os.replace(unfinished, path)


def read_video(path: Path, count: int, *, start_s: float = 0.0) -> NDArray[np.uint8]:
    """The first `count` frames [S, h, w, 3] from `start_s` on, or fewer if there are no more. Raises OSError
    or ValueError if it is not a video."""
    try:
        import av
    except ImportError as error:
        raise ValueError(
            f"videos need another package; run: pip install 'braid-rl[video]' ({error})"
        ) from error
    frames: list[NDArray[np.uint8]] = []
    with av.open(path) as file:
        stream = file.streams.video[0]
        assert stream.time_base is not None, "streams of a file have one"
        file.seek(max(0, int(start_s / stream.time_base)), stream=stream)  # to the key frame before it
        for frame in file.decode(stream):
            if frame.time is not None and frame.time >= start_s:
                frames.append(np.asarray(frame.to_ndarray(format="rgb24"), np.uint8))
            if len(frames) == count:
                break
    return np.stack(frames) if frames else np.zeros((0, 0, 0, 3), np.uint8)


def _tile(episode: Recording, step: int, factor: int, *, overlay: bool) -> NDArray[np.uint8]:
    step = min(step, len(episode.frames) - 1)
    image = episode.frames[step].repeat(factor, axis=0).repeat(factor, axis=1)
    if not overlay:
        return image
    rewards = episode.rewards[:step]
    success = "  success" if any(episode.successes[:step]) else ""
    lines = (
        episode.title,
        f"{step}  reward {rewards[-1] if rewards else 0.0:.3g}  return {sum(rewards):.3g}{success}",
    )
    return np.vstack([image, _text(lines, image.shape[1])])


def _text(lines: Sequence[str], width: int) -> NDArray[np.uint8]:
    from PIL import Image, ImageDraw, ImageFont

    strip = Image.new("RGB", (width, _STRIP))
    ImageDraw.Draw(strip).multiline_text(
        (2, 1), "\n".join(lines), (255, 255, 255), ImageFont.load_default(9.5), spacing=2
    )
    return np.asarray(strip)
