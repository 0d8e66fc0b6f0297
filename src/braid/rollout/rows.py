"""From trajectories to rows: from here on text and simulator episodes are handled alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from braid.types import (
    UNKNOWN_EXPERT,
    EnvSteps,
    Group,
    PolicyVersion,
    Row,
    Status,
    Trajectory,
    Turn,
    exact_sum,
)


def group_rows(group: Group, place: int, first: int) -> list[Row]:
    """Rows of one group with index `place`, whose first trajectory has index `first` among all.

    The rewards of a trajectory's rows, or of those of one player, sum to its training reward: rewards of
    turns or env steps are placed where they were given, the contribution of reward parts and shaping at the
    last position. `Row.baseline` is the training reward of the group's greedy answer.
    """
    greedy = group.greedy
    rows: list[Row] = []
    for number, trajectory in enumerate(group.trajectories, first):
        if trajectory.is_valid:
            for row in _rows_of(trajectory):
                row.group, row.trajectory = place, number
                if greedy is not None:
                    row.baseline = greedy.training_rewards.get(row.player, greedy.training_reward)
                row.source, row.reward_parts = group.prompt.source, trajectory.reward_parts
                rows.append(row)
    return rows


def _rows_of(trajectory: Trajectory) -> list[Row]:
    totals = trajectory.training_rewards
    is_truncated = trajectory.status is Status.TRUNCATED
    if trajectory.env_steps is not None:
        rows = [_simulator_row(trajectory.env_steps, is_terminal=not is_truncated)]
    else:
        agents = list(dict.fromkeys(segment.agent for segment in trajectory.segments))
        trained = [s for s in trajectory.segments if s.turns and s.is_trained]
        rows = [_text_row(s.turns, agents.index(s.agent)) for s in trained]
        for row, segment in zip(rows, trained, strict=True):
            row.player = segment.agent if segment.agent in trajectory.agent_rewards else ""
    assert trajectory.reward is not None, "valid trajectories must have been scored"
    for row in rows:
        others = [reward for agent, reward in trajectory.agent_rewards.items() if agent != row.player]
        row.is_truncated, row.score = is_truncated, exact_sum([trajectory.reward, *(-x for x in others)])
        if trajectory.shaped is not None:
            row.fields["rewards"] *= trajectory.shaped.factor
    for player, total in totals.items():
        played = [row for row in rows if row.player == player]
        rewards, end = played[-1].fields["rewards"], np.flatnonzero(played[-1].mask)[-1]
        earlier = np.concatenate([row.fields["rewards"] for row in played])
        rewards[end] = exact_sum([total, float(rewards[end]), *(-earlier[earlier != 0]).tolist()])
    return rows


def _text_row(turns: Sequence[Turn], agent: int) -> Row:
    """Context, turns and replies concatenated. An answer cut by a limit is terminal too: no state follows
    it."""
    decision = np.concatenate(
        [np.repeat((-1, k), (len(t.context_ids), len(t.output_ids))) for k, t in enumerate(turns)]
    ).astype(np.int32)
    mask = decision >= 0
    logprobs, rewards = np.zeros(len(mask), np.float32), np.zeros(len(mask))
    logprobs[mask] = [x for t in turns for x in t.logprobs]
    rewards[np.cumsum([len(t.context_ids) + len(t.output_ids) for t in turns]) - 1] = [
        t.reward for t in turns
    ]
    versions = np.zeros(len(mask), np.int32)
    versions[mask] = np.concatenate([_versions(t.policy_version, len(t.output_ids)) for t in turns])
    inputs = {"input_ids": np.array([i for t in turns for i in (*t.context_ids, *t.output_ids)], np.int64)}
    starts = np.cumsum([0, *(len(t.context_ids) + len(t.output_ids) for t in turns[:-1])]).tolist()
    images = [
        one._replace(start=start + one.start)
        for start, t in zip(starts, turns, strict=True)
        for one in t.images
    ]
    return Row(
        inputs | _experts(turns),
        mask,
        group=0,
        trajectory=0,
        fields={"behavior_logprobs": logprobs, "rewards": rewards},
        decision=decision,
        policy_versions=versions,
        agent=agent,
        images=tuple(images),
    )


def _experts(turns: Sequence[Turn]) -> dict[str, NDArray[np.signedinteger]]:
    """The input `experts` of the row of these turns, if the engine has recorded them. No engine has run the
    last token."""
    parts = [turn.experts for turn in turns if turn.experts is not None]
    if not parts:
        return {}
    assert len(parts) == len(turns), "an engine records the experts of all turns or of none"
    ends = np.cumsum([len(turn.context_ids) + len(turn.output_ids) for turn in turns])
    chosen = np.full((ends[-1], *parts[0].shape[1:]), UNKNOWN_EXPERT, parts[0].dtype)
    for part, end in zip(parts, ends, strict=True):
        chosen[end - 1 - len(part) : end - 1] = part
    return {"experts": chosen}


def _versions(version: PolicyVersion, num: int) -> NDArray[np.int32]:
    """The policy version of each of `num` tokens or env steps."""
    if isinstance(version, int):
        return np.full(num, version, np.int32)
    versions, lengths = np.array(version, np.int32).T
    return np.repeat(versions, lengths)


def _simulator_row(steps: EnvSteps, *, is_terminal: bool) -> Row:
    """The positions of each decision, and a last one for the final observation, without an action; its value
    bootstraps an episode cut by a time limit. The reward of an action is at the last of its positions."""
    (num_decisions, width), chunk = steps.logprobs.shape, steps.rewards.shape[1]
    counts = steps.num_positions
    is_kept = np.arange(width) < counts[:, None]
    rewards = np.zeros(steps.logprobs.shape)
    for action in range(chunk):
        rewards[:, max((action + 1) * width // chunk - 1, 0)] += steps.rewards[:, action]
    decision = np.append(np.repeat(np.arange(num_decisions, dtype=np.int32), counts), np.int32(-1))
    return Row(
        {name: _padded(values[is_kept]) for name, values in steps.inputs.items()},
        decision >= 0,
        group=0,
        trajectory=0,
        is_terminal=is_terminal,
        observations=steps.observations,
        fields={"behavior_logprobs": _padded(steps.logprobs[is_kept]), "rewards": _padded(rewards[is_kept])},
        decision=decision,
        policy_versions=_padded(np.repeat(_versions(steps.policy_version, num_decisions), counts)),
        action_size=max(width // chunk, 1),
    )


def _padded(values: NDArray) -> NDArray:
    """[S, ...] -> [S + 1, ...], with zeros at the end."""
    return np.concatenate([values, np.zeros_like(values[:1])])
