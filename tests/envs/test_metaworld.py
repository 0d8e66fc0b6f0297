from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from ctypes.util import find_library
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from tests.needs import need_images_of_metaworld, needs

from braid.cli.main import main
from braid.config.load import load_config
from braid.envs.simulators.adapters.metaworld import MetaWorld, _try_opengl
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.errors import ConfigError
from braid.report.video import read_video
from braid.trainer import commands

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = needs("metaworld")


@pytest.fixture
def reach() -> Iterator[MetaWorld]:
    with closing(MetaWorld("reach-v3")) as env:
        yield env


def _with_camera(task: str = "reach-v3", **options: Any) -> MetaWorld:
    need_images_of_metaworld()
    return MetaWorld(task, **{"cameras": {"image": "corner4"}, "image_size": 32, **options})


def test_it_is_a_gymnasium_environment(reach: MetaWorld) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(alternative render modes|infinity).*")
        check_env(reach, skip_render_check=True)


@pytest.mark.parametrize("task", ["reach-v3", "drawer-open-v3"])
def test_the_seed_of_a_reset_decides_the_episode_whatever_came_before(task: str) -> None:
    """Plain MetaWorld ignores it, and draws the goal from a generator of its own."""
    actions = np.random.default_rng(0).uniform(-1, 1, (10, 4)).astype(np.float32)

    def played(env: MetaWorld, seed: int) -> list[Any]:
        first = env.reset(seed=seed)[0]["state"]
        steps = [env.step(action) for action in actions]
        return [first, *(x for step in steps for x in (step[0]["state"], step[1]))]

    with closing(MetaWorld(task)) as used, closing(MetaWorld(task)) as fresh:
        other = played(used, 8)
        again = played(used, 7)
        for one, new in zip(again, played(fresh, 7), strict=True):
            np.testing.assert_array_equal(one, new)
        assert not np.array_equal(again[0][36:], other[0][36:]), "another seed, another goal"


@pytest.mark.filterwarnings("ignore:Constant")  # of the expert, on its own gains
def test_its_own_expert_succeeds_and_success_ends_an_episode_if_asked() -> None:
    expert = import_module("metaworld.policies").SawyerReachV3Policy()
    with closing(MetaWorld("reach-v3", terminate_on_success=True, max_episode_steps=100)) as env:
        for seed in range(3):
            observation, is_terminated = env.reset(seed=seed)[0], False
            while not is_terminated:
                action = np.clip(expert.get_action(observation["state"].astype(np.float64)), -1, 1)
                observation, _, is_terminated, is_truncated, info = env.step(action.astype(np.float32))
                assert info["success"] is is_terminated
                assert not is_truncated


def test_rewards_may_be_successes_alone() -> None:
    action = np.zeros(4, np.float32)
    with (
        closing(MetaWorld("reach-v3")) as dense,
        closing(MetaWorld("reach-v3", reward_mode="success")) as sparse,
    ):
        dense.reset(seed=0)
        sparse.reset(seed=0)
        assert dense.step(action)[1] > 0
        assert sparse.step(action)[1] == 0.0
        sparse._env._target_pos = sparse._env.tcp_center
        _, reward, _, _, info = sparse.step(action)
        assert info["success"]
        assert reward == 1.0


@pytest.mark.slow
def test_the_seed_decides_which_task_of_a_set_is_played() -> None:
    with closing(MetaWorld("ML10-test")) as env:
        said = [env.reset(seed=seed)[0] for seed in (0, 1, 5)]
        assert [observations["instruction"] for observations in said] == [
            "drawer open",
            "door close",
            "drawer open",
        ]
        again = env.reset(seed=0)[0]["state"]
        np.testing.assert_array_equal(again, said[0]["state"])
        assert not np.array_equal(again, said[2]["state"]), "the same task, another place"
    with closing(_with_camera("ML10-test")) as env:
        images = [env.reset(seed=seed)[0]["image"] for seed in (0, 1, 0)]
    assert (images[0] != images[1]).any()
    np.testing.assert_array_equal(images[0], images[2])
    with closing(MetaWorld("drawer-open-v3")) as alone:
        np.testing.assert_array_equal(alone.reset(seed=0)[0]["state"], said[0]["state"])


def test_a_time_limit_truncates() -> None:
    with closing(MetaWorld("reach-v3", max_episode_steps=2)) as env:
        env.reset(seed=0)
        ends = [env.step(np.zeros(4, np.float32))[2:4] for _ in range(2)]
    assert ends == [(False, False), (False, True)]


def test_cameras_give_images_and_hide_the_goal_from_the_state() -> None:
    with closing(_with_camera(cameras={"image": "corner4", "wrist": "gripperPOV"})) as env:
        first = env.reset(seed=0)[0]
        for _ in range(10):
            last = env.step(np.array([1, 0, 0, 0], np.float32))[0]
        assert env.observation_space.contains(first)
        assert first["state"].shape == (4,)
        assert first["instruction"] == "reach"
        for name in ("image", "wrist"):
            assert first[name].std() > 10, "not an empty picture"
            assert (first[name] != last[name]).any()
        np.testing.assert_array_equal(env.reset(seed=0)[0]["image"], first["image"])


@pytest.mark.slow
def test_shadows_change_the_picture() -> None:
    images = []
    for shadows in (False, True):
        with closing(_with_camera(shadows=shadows)) as env:
            images.append(env.reset(seed=0)[0]["image"])
    assert (images[0] != images[1]).any()


def test_unknown_tasks_and_cameras_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"env\.task: MetaWorld has no task 'reach-v2'.*'reach-v3'"):
        MetaWorld("reach-v2")
    with pytest.raises(
        ConfigError, match=r"env\.cameras: MetaWorld has no camera 'corner9'.*corner.*topview"
    ):
        _with_camera(cameras={"image": "corner9"})


def test_a_missing_renderer_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module("mujoco")  # which refuses an unknown name by itself
    monkeypatch.setenv("MUJOCO_GL", "vulkan")
    with pytest.raises(
        ConfigError, match=r"OpenGL by vulkan does not work here .*libegl1.*remove the cameras"
    ):
        MetaWorld("reach-v3", cameras={"image": "corner4"})
    with closing(MetaWorld("reach-v3")) as env:
        assert env.reset(seed=0)[0]["state"].shape == (39,), "without images none is needed"


def test_videos_are_refused_before_the_run_where_opengl_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import_module("mujoco")
    monkeypatch.setenv("MUJOCO_GL", "vulkan")
    _try_opengl.cache_clear()
    overrides = [f"run.output_dir={tmp_path}", "report.console=none", "env.processes=0"]
    assert main(["train", str(EXAMPLES / "robot.yaml"), *overrides]) == 2
    said = capsys.readouterr().err
    assert re.search(
        r"env\.video: no images: OpenGL by vulkan does not work .*libegl1.*remove env\.video", said
    )
    assert not list(tmp_path.glob("*/metrics.jsonl")), "nothing was trained"


@pytest.mark.slow
@pytest.mark.nightly
@needs("av")
def test_the_example_leaves_videos_of_the_robot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _with_camera().close()
    short = [f"run={{max_rounds: 1, output_dir: {tmp_path}}}", "rollout.prompts_per_round=10"]
    short += ["env.eval_episodes=2", "env.max_episode_steps=5", "env.num_envs=2", "report.console=plain"]
    loaded = load_config(EXAMPLES / "robot.yaml", short)
    folder = commands.train(loaded).run_dir / "video"
    assert sorted(file.name for file in folder.iterdir()) == ["eval_000000.mp4", "eval_000001.mp4"]
    for file in folder.iterdir():
        frames = read_video(file, 100)
        assert frames.shape == (6, 192 + 30, 2 * 192, 3), "two episodes side by side, text below"
        assert frames[:, :192].std() > 10, "not an empty picture"
    said = capsys.readouterr()
    assert re.search(r"pass@1( +\d\.\d+){2}", said.out + said.err), "success before and after"
    assert re.search(r"\nvideos +/", said.out + said.err)


def _said_with(gl: str, options: str) -> str:
    code = (
        "from braid.envs.simulators.adapters.metaworld import MetaWorld\n"
        "from braid.errors import ConfigError\n"
        f"try:\n    MetaWorld('reach-v3', {options})\nexcept ConfigError as error:\n    print(error)"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "PYOPENGL_PLATFORM")}
    env["MUJOCO_GL"] = gl
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout


def test_a_renderer_that_cannot_be_loaded_is_an_error_of_the_config() -> None:
    said = _said_with("vulkan", "")
    assert "cannot be imported with MUJOCO_GL=vulkan: invalid value for environment variable" in said
    if find_library("OSMesa") is None:
        assert "env.kind: MuJoCo cannot be imported with MUJOCO_GL=osmesa: " in _said_with("osmesa", "")
    said = _said_with("glfw", "cameras={'image': 'corner4'}")  # without a display
    assert "env.cameras: no images: OpenGL by glfw does not work here" in said


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(import_module("sys").modules, "metaworld.env_dict", None)
    with pytest.raises(ConfigError, match=r"env\.kind: .*pip install 'braid-rl\[metaworld\]'"):
        MetaWorld("reach-v3")


@pytest.mark.slow
def test_images_within_a_chunk_are_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []
    plain = MetaWorld._image
    monkeypatch.setattr(
        MetaWorld, "_image", lambda env, camera: (rendered.append(camera), plain(env, camera))[1]
    )
    _with_camera().close()
    options = {"task": "reach-v3", "cameras": {"image": "corner4"}, "image_size": 32}
    simulator = GymnasiumSimulator("braid.envs.simulators.adapters.metaworld.MetaWorld", 2, options)
    with closing(simulator):
        first = simulator.reset({0: 1, 1: 2}, filmed=[1]).observations["image"].copy()
        rendered.clear()
        chunk = np.ones((5, 4), np.float32)
        tick = simulator.step({0: chunk, 1: chunk})
        assert len(rendered) == 1 + 5 + 1, (
            "one for the policy, one per step of a film, and one again at its end"
        )
        assert len(tick.frames[1]) == 5
        with closing(_with_camera()) as alone:
            alone.reset(seed=1)
            last = [alone.step(action)[0] for action in chunk][-1]
        np.testing.assert_array_equal(tick.observations["image"][0], last["image"])
        assert (tick.observations["image"] != first).any(axis=(1, 2, 3)).all()
