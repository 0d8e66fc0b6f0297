"""Writes demonstrations of MetaWorld's scripted experts as a LeRobot folder, which sft.demonstrations names:

    python examples/metaworld_demonstrations.py FOLDER --tasks reach-v3 button-press-v3 --episodes 20

All 50 tasks have an expert. Observations are those of `env: {kind: metaworld, cameras: {image: corner4}}`: an
image, the gripper's position and opening, and the task's name in words. Episodes end at their first success;
those in which the expert fails are left out.
"""

from __future__ import annotations

import argparse
import warnings
from contextlib import closing
from pathlib import Path

import numpy as np
from metaworld.policies import ENV_POLICY_MAP

from braid.data.lerobot import Demonstration, write_demonstrations
from braid.envs.simulators.adapters.metaworld import MetaWorld


def demonstrate(task: str, num_episodes: int, image_size: int = 64) -> list[Demonstration]:
    """The episodes with seeds 0, 1, ... in which the expert succeeds."""
    expert, episodes = ENV_POLICY_MAP[task](), []
    # without cameras, so that the expert sees the whole state
    with closing(
        MetaWorld(task, terminate_on_success=True, image_size=image_size, render_mode="rgb_array")
    ) as env:
        for seed in range(num_episodes):
            observation, images, states, actions, is_success = env.reset(seed=seed)[0], [], [], [], False
            is_over = False
            while not is_over:
                action = expert.get_action(observation["state"].astype(np.float64))
                images.append(env.render())
                states.append(observation["state"][:4])
                actions.append(np.clip(action, -1, 1).astype(np.float32))
                observation, _, is_success, is_truncated, _ = env.step(actions[-1])
                is_over = is_success or is_truncated
            if is_success:
                observations = {"image": np.stack(images), "state": np.stack(states)}
                episodes.append(Demonstration(observations, np.stack(actions), observation["instruction"]))
    return episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=list(ENV_POLICY_MAP), metavar="TASK", required=True)
    parser.add_argument("--episodes", type=int, default=20, help="of each task (default: 20)")
    parser.add_argument("--image-size", type=int, default=64, help="height and width in pixels (default: 64)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "Constant")  # of the experts, on their own gains
    episodes = []
    for task in args.tasks:
        of_task = demonstrate(task, args.episodes, args.image_size)
        print(f"{task}: the expert succeeded in {len(of_task)} of {args.episodes} episodes")  # noqa: T201
        episodes += of_task
    if not episodes:
        parser.error("no expert succeeded, so that there is nothing to imitate; ask for more --episodes")
    write_demonstrations(args.folder, episodes, fps=80)


if __name__ == "__main__":
    main()
