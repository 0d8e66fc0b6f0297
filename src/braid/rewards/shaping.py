"""Reward shaping for training. Evaluation and reports use the unshaped reward."""

from __future__ import annotations

from braid.config.reward import OverlongConfig, RewardConfig
from braid.types import ShapedReward, Status, Trajectory


def has_shaping(config: RewardConfig) -> bool:
    """Whether training uses a shaped reward."""
    return (
        config.truncated != "keep"
        or config.overlong is not None
        or (config.scale, config.shift, config.clip) != (1.0, 0.0, None)
    )


def shape_reward(trajectory: Trajectory, config: RewardConfig, *, max_new_tokens: int) -> ShapedReward:
    """Shape the reward r of a valid, scored trajectory, in this order:

        truncated: zero      r = 0 if a limit truncated the trajectory, intermediate rewards included
        overlong             r - penalty clip((length - (max_new_tokens - buffer)) / buffer, 0, 1),
                             with the length of the longest turn
        scale, shift         scale r + shift
        clip                 clip(r, -clip, clip)

    The penalty is DAPO's (arXiv 2503.14476): it starts `buffer_tokens` before the limit of a turn and reaches
    its full value at the limit. SkyRL zeroes in evaluation too and leaves the rest to user code; RLinf
    scales; ROLL clips normalised rewards.
    """
    assert trajectory.reward is not None, "only scored trajectories are shaped"
    is_zeroed = config.truncated == "zero" and trajectory.status is Status.TRUNCATED
    reward = 0.0 if is_zeroed else trajectory.reward
    if config.overlong is not None:
        reward -= overlong_penalty(trajectory, config.overlong, max_new_tokens)
    reward = config.scale * reward + config.shift
    if config.clip is not None:
        reward = min(max(reward, -config.clip), config.clip)
    return ShapedReward(reward, 0.0 if is_zeroed else config.scale)


def overlong_penalty(trajectory: Trajectory, config: OverlongConfig, max_new_tokens: int) -> float:
    """Penalty between 0 and `config.penalty`; 0 for simulators, which generate no tokens."""
    longest = max((len(turn.output_ids) for turn in trajectory.turns), default=0)
    over = (longest - (max_new_tokens - config.buffer_tokens)) / config.buffer_tokens
    return config.penalty * min(max(over, 0.0), 1.0)
