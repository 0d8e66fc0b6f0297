from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.needs import needs

from braid.report.video import write_video
from braid.types import Recording

pytestmark = needs("av")


def _recording(brightness: int, num_steps: int, size: int = 64, title: str = "") -> Recording:
    frames = [np.full((size, size, 3), brightness, np.uint8)] * (num_steps + 1)
    return Recording(frames, [0.5] * num_steps, [i == num_steps - 1 for i in range(num_steps)], title)


def _read(path: Path) -> NDArray[np.uint8]:
    """All frames, [S, h, w, 3]."""
    with import_module("av").open(path) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


def test_episodes_are_a_grid_of_the_longest_ones_length(tmp_path: Path) -> None:
    path = tmp_path / "videos" / "episodes.mp4"
    episodes = [_recording(60, 2), _recording(120, 4), _recording(240, 1)]
    write_video(path, episodes, overlay=False)
    frames = _read(path)
    assert frames.shape == (5, 2 * 192, 2 * 192, 3), "64 pixels are enlarged to 192"
    places = [frames[:, y, x].mean(-1) for y, x in ((96, 96), (96, 288), (288, 96), (288, 288))]
    for area, brightness in zip(places, (60, 120, 240, 0), strict=True):
        # H.264 is lossy: a plain area may be off by a few of 255
        np.testing.assert_allclose(area, brightness, atol=8)
    assert [p.name for p in path.parent.iterdir()] == ["episodes.mp4"]


def test_step_reward_return_and_success_are_drawn_below(tmp_path: Path) -> None:
    episodes = [_recording(0, 3, title="put the red block on the blue plate")]
    write_video(tmp_path / "a.mp4", episodes)
    frames = _read(tmp_path / "a.mp4").astype(int)
    assert frames.shape[1:] == (192 + 30, 192, 3)
    assert frames[:, :190].max() < 20, "nothing on the image itself"
    strips = frames[:, 192:]
    assert (strips.max(axis=(1, 2, 3)) > 150).all()
    assert all(abs(strips[i + 1] - strips[i]).max() > 60 for i in range(3)), "the numbers change"
    write_video(
        tmp_path / "b.mp4", [Recording(episodes[0].frames, episodes[0].rewards, title=episodes[0].title)]
    )
    other = _read(tmp_path / "b.mp4").astype(int)
    assert abs(other[3, 192:] - strips[3]).max() > 60, "without a success the word is missing"


def test_a_line_separates_episodes_side_by_side(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", [_recording(200, 2), _recording(200, 2)])
    frame = _read(tmp_path / "a.mp4")[0].astype(int)
    assert frame[10:180, 192:194].max() < 100
    assert frame[10:180, [100, 180, 206, 300]].min() > 180


@pytest.mark.parametrize("size", [33, 480])
def test_images_of_any_size_are_encoded(tmp_path: Path, size: int) -> None:
    write_video(tmp_path / "a.mp4", [_recording(90, 1, size)])
    frames = _read(tmp_path / "a.mp4")
    assert frames.shape[1] % 2 == frames.shape[2] % 2 == 0
    np.testing.assert_allclose(frames[:, 10:20, 10:20], 90, atol=8)
