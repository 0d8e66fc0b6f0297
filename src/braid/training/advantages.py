"""Advantage computation: from the rewards and values of a round's rows to advantages and returns.

Owns the order of the stages, the split of rows into turns, and a function for each advantage of
algorithms.recipes.ADVANTAGES, which returns the advantages of all positions [T], 0 outside the mask. The formulas are
in algorithms/. Rewards, baselines and statistics are of trajectories, whose rows follow each other
in the order of its segments; returns run over all of them. If agents have rewards of their own, the rows of each agent
(Row.player) are a trajectory here, and compared with those of the same agent.

    center and scale rewards       reward_mean, reward_std (per trajectory sum)
    clip rewards                   reward_clip (per trajectory sum)
    subtract kl_coef * KL          kl_in: reward
    clip rewards                   token_reward_clip (per position)
    whiten rewards                 whiten_rewards
    compute advantages             advantage
    subtract kl_coef * KL          kl_in: advantage
    whiten and clip advantages     whiten_advantages, advantage_clip

Statistics are taken over all rows of the round in float64, so they do not depend on the split into steps.
Trajectories that mask_truncated or mask_long_failures exclude from the loss count in these statistics, except
in whiten_advantages, which covers only the trained rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from braid.algorithms import advantages as formulas
from braid.algorithms.kl import clamped, kl_estimate
from braid.algorithms.recipes import Recipe
from braid.algorithms.rewards import RunningMoments, reward_statistics
from braid.algorithms.segments import first_positions
from braid.types import Row, exact_sum, is_at_least


def compute_advantages(
    rows: Sequence[Row],
    recipe: Recipe,
    *,
    kl_coef: float | None = None,
    running: RunningMoments | None = None,
) -> dict[str, float]:
    """Write `advantages` (and `returns` for gae) into each row, from the rewards and values of its trajectory.
    `rewards` are replaced by the processed rewards that the advantages are computed from, then in float32.

    `kl_coef` overrides the recipe's, since it may change from round to round. `running` holds the moments of
    all earlier rounds for statistics of kind "running", and is updated with this one. Returns metrics by
    name: mean KL per position, and the explained variance of the critic's values.
    """
    metrics: dict[str, float] = {}
    _normalize(rows, recipe, RunningMoments() if running is None else running)
    penalties: list[np.ndarray] = []
    if recipe.has_kl_before_update:
        kl = [np.where(row.mask, _kl(row, recipe), np.float32(0.0)) for row in rows]
        metrics["reward/kl"] = sum(float(of.sum()) for of in kl) / max(sum(row.num_tokens for row in rows), 1)
        penalties = [np.float32(recipe.kl_coef if kl_coef is None else kl_coef) * of for of in kl]
    if penalties and recipe.kl_in == "reward":
        for row, penalty in zip(rows, penalties, strict=True):
            row.fields["rewards"] = row.fields["rewards"] - penalty
    if (bound := recipe.token_reward_clip) is not None:
        for row in rows:
            row.fields["rewards"] = row.fields["rewards"].clip(-bound, bound)
    if recipe.whiten_rewards:
        mask = _flat([row.mask for row in rows])
        _unflatten(rows, "rewards", formulas.whiten(_flat([row.fields["rewards"] for row in rows]), mask))
    round_ = _Round.of(rows)
    estimator: Callable[[_Round, Recipe], Tensor] = globals()[recipe.advantage]
    advantages = estimator(round_, recipe)
    _unflatten(rows, "rewards", round_.rewards)
    if penalties and recipe.kl_in == "advantage":
        advantages = advantages - _flat(penalties)
    if recipe.whiten_advantages:
        is_trained = np.repeat(are_trained(rows, recipe), [len(row) for row in rows])
        advantages = formulas.whiten(advantages, round_.mask & torch.from_numpy(is_trained))
    if recipe.advantage_clip is not None:
        advantages = advantages.clamp(-recipe.advantage_clip, recipe.advantage_clip)
    _unflatten(rows, "advantages", advantages)
    if recipe.advantage == "gae":
        metrics["critic/explained_variance"] = _explained_variance(round_, recipe)
    return metrics


class Cut(Protocol):
    """A row or its metadata."""

    @property
    def trajectory(self) -> int: ...
    @property
    def is_truncated(self) -> bool: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def score(self) -> float: ...


def are_trained(rows: Sequence[Cut], recipe: Recipe) -> list[bool]:
    """Whether each row contributes to the loss.

    mask_truncated excludes truncated trajectories from numerator and denominator; mask_long_failures excludes
    those of at least that many tokens with a score of 0 or less. Their rewards still count in the statistics
    of their group.
    """
    num_tokens: Counter[int] = Counter()
    for row in rows:
        num_tokens[row.trajectory] += row.num_tokens
    limit = recipe.mask_long_failures

    def is_trained(row: Cut) -> bool:
        is_long_failure = (
            limit is not None and is_at_least(0.0, row.score) and num_tokens[row.trajectory] >= limit
        )
        return not (is_long_failure or (recipe.mask_truncated and row.is_truncated))

    return [is_trained(row) for row in rows]


def _trajectories(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each trajectory, or of each player in it."""
    found = [(key, list(of)) for key, of in groupby(rows, key=lambda row: (row.trajectory, row.player))]
    assert len(dict(found)) == len(found), "rows of a trajectory are apart"
    return [of for _, of in found]


def _end(row: Row) -> int:
    """The policy's last position."""
    return int(np.flatnonzero(row.mask)[-1])


def _normalize(rows: Sequence[Row], recipe: Recipe, running: RunningMoments) -> None:
    """Center, scale and clip rewards in place.

    Every reward of a trajectory is divided by its scale, and the center is subtracted at the policy's last
    position: a single final reward becomes (r - center) / scale, and with gamma = 1 the returns of all
    positions shift equally. Clipping the sum of a trajectory's rewards to reward_clip also adjusts the reward
    at that position.
    """
    trajectories = _trajectories(rows)
    if recipe.reward_mean != "none" or recipe.reward_std != "none":
        _standardize(trajectories, recipe, running)
    if (bound := recipe.reward_clip) is not None:
        totals = _totals(trajectories)
        for of, excess in zip(trajectories, (totals - totals.clamp(-bound, bound)).tolist(), strict=True):
            of[-1].fields["rewards"][_end(of[-1])] -= excess
            for row in of:
                if row.baseline is not None:
                    row.baseline = min(max(row.baseline, -bound), bound)


def _standardize(trajectories: Sequence[Sequence[Row]], recipe: Recipe, running: RunningMoments) -> None:
    totals = _totals(trajectories)
    if "running" in (recipe.reward_mean, recipe.reward_std):
        running.update(totals)
    center, scale = reward_statistics(
        totals,
        _groups(trajectories),
        mean=recipe.reward_mean,
        std=recipe.reward_std,
        running=running,
        sources=_sources(trajectories),
    )
    for of, off, divisor in zip(trajectories, center.tolist(), scale.tolist(), strict=True):
        for row in of:
            rewards = row.fields["rewards"].astype(np.float64)
            if row is of[-1]:
                rewards[_end(row)] -= off
            row.fields["rewards"] = rewards / divisor
            if row.baseline is not None:
                row.baseline = (row.baseline - off) / divisor


def _kl(row: Row, recipe: Recipe) -> np.ndarray:
    """KL of the policy before the update from the reference, per position."""
    if recipe.full_kl_in:
        return clamped(torch.from_numpy(row.fields["kl"]), recipe.kl_clamp).numpy()
    old, ref = (torch.from_numpy(row.fields[name]) for name in ("old_logprobs", "ref_logprobs"))
    return kl_estimate(old, ref, estimator=recipe.kl_estimator, clamp=recipe.kl_clamp).numpy()


@dataclass(frozen=True, slots=True)
class _Round:
    """All rows of a round, concatenated: `rewards` and `mask` [T]; `totals` [N], the sum of each trajectory's
    rewards; `groups` [N], each trajectory's group index."""

    rows: Sequence[Row]
    trajectories: Sequence[Sequence[Row]]
    rewards: Tensor
    mask: Tensor
    totals: Tensor
    groups: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row]) -> _Round:
        rewards, mask = (
            _flat([row.fields["rewards"] for row in rows]).double(),
            _flat([row.mask for row in rows]),
        )
        trajectories = _trajectories(rows)
        return cls(rows, trajectories, rewards, mask, _totals(trajectories), _groups(trajectories))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions of each trajectory [N]."""
        return tuple(sum(len(row) for row in of) for of in self.trajectories)

    def spread(self, per_trajectory: Tensor) -> Tensor:
        """[N] -> [T], 0 outside the mask."""
        lengths = torch.tensor(self.lengths, dtype=torch.long)
        return torch.repeat_interleave(per_trajectory, lengths) * self.mask


@dataclass(frozen=True, slots=True)
class _Turns:
    """The K turns of a round: the decisions of its rows, or the actions of robots.

    `index` [T] is the turn of each position, -1 outside the mask; `rewards` [K] (float64) the sum of a turn's
    rewards; `groups` [K] the group of its row; `lengths` [N] the number of turns of each trajectory.
    """

    index: Tensor
    rewards: Tensor
    groups: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, round_: _Round, *, are_actions: bool = False) -> _Turns:
        own = [_actions(row) if are_actions else row.decision for row in round_.rows]
        numbers = [int(of.max(initial=-1)) + 1 for of in own]
        first = np.cumsum([0, *numbers[:-1]])
        index = _flat(
            [np.where(row.mask, of + n, -1) for row, of, n in zip(round_.rows, own, first, strict=True)]
        )
        groups = torch.repeat_interleave(_groups([[row] for row in round_.rows]), torch.tensor(numbers))
        rewards = torch.zeros(len(groups), dtype=torch.float64)
        rewards.index_add_(0, index[round_.mask], round_.rewards[round_.mask].double())
        left = iter(numbers)
        lengths = tuple(sum(islice(left, len(of))) for of in round_.trajectories)
        return cls(index, rewards, groups, lengths)

    def spread(self, per_turn: Tensor) -> Tensor:
        """[K] -> [T], 0 outside the mask."""
        return torch.where(self.index >= 0, per_turn[self.index.clamp(min=0)], 0.0)


def _actions(row: Row) -> np.ndarray:
    """The number of each position's action within the row [T], -1 outside the mask."""
    return np.where(row.mask, (row.mask.cumsum() - 1) // row.action_size, -1)


def _states(round_: _Round) -> Tensor:
    """An id per group, player and anchor state, of each turn [K]."""
    numbers: dict[tuple[int, str, bytes], int] = {}
    states = [
        numbers.setdefault((row.group, row.player, anchor), len(numbers))
        for of in round_.trajectories
        for before, row in zip([None, *of], of, strict=False)
        for anchor in _anchors(row, before)
    ]
    return torch.tensor(states)


def _anchors(row: Row, before: Row | None) -> list[bytes]:
    """The anchor state of each of the row's turns. `before` is the row of the previous segment.

    The anchor is what a decision observed. In text that is what was read since the previous turn: for the first
    one the prompt, or the context of a new segment, without the tokens of the previous one if it begins with
    them.
    """
    if row.observations:
        # adding 0 turns -0.0 into 0.0, so that equal numbers have equal bytes
        seen = [values[: row.num_decisions] + 0 for values in row.observations.values()]
        return [b"".join(state.tobytes() for state in states) for states in zip(*seen, strict=True)]
    written = np.flatnonzero(row.mask)
    of = row.decision[written]
    begins = written[np.diff(of, prepend=-1) > 0]
    ends = written[np.diff(of, append=row.num_decisions) > 0] + 1
    ids = row.inputs["input_ids"]
    known = 0 if before is None else len(before)
    if before is not None and not np.array_equal(ids[:known], before.inputs["input_ids"]):
        known = 0
    return [ids[a:b].tobytes() for a, b in zip([known, *ends[:-1]], begins, strict=True)]


def grpo(round_: _Round, recipe: Recipe) -> Tensor:
    """grpo: each trajectory's reward relative to its group's, or each turn's relative to all turns of the
    group."""
    if recipe.advantage_level == "turn":
        turns = _Turns.of(round_)
        return turns.spread(
            formulas.group_advantages(turns.rewards, turns.groups, normalize_by_std=recipe.normalize_by_std)
        )
    return round_.spread(
        formulas.group_advantages(round_.totals, round_.groups, normalize_by_std=recipe.normalize_by_std)
    )


def gae(round_: _Round, recipe: Recipe) -> Tensor:
    """gae, over positions; or over turns or actions, with the sum of their rewards and the value of their first position.
    Also writes `returns` into the rows."""
    values = _flat([row.fields["values"] for row in round_.rows])
    is_open = [recipe.bootstrap == "always" or not of[-1].is_terminal for of in round_.trajectories]
    bootstrap = [
        float(of[-1].fields["values"][-1]) if goes_on else 0.0
        for goes_on, of in zip(is_open, round_.trajectories, strict=True)
    ]
    if recipe.value_level != "token":
        turns = _Turns.of(round_, are_actions=recipe.value_level == "action")
        everywhere = torch.ones(len(turns.rewards), dtype=torch.bool)
        steps = (turns.rewards, values[first_positions(turns.index)], everywhere, turns.lengths)
        spread = turns.spread
    else:
        steps = (round_.rewards, values, round_.mask, round_.lengths)
        spread = Tensor.contiguous
    advantages, returns = formulas.gae(
        *steps, torch.tensor(bootstrap), gamma=recipe.gamma, lam=recipe.gae_lambda
    )
    _unflatten(round_.rows, "returns", spread(returns))
    return spread(advantages)


def gigpo(round_: _Round, recipe: Recipe) -> Tensor:
    """gigpo (arXiv 2505.10978): A = episode_weight A_E + turn_weight A_T.

    A_E is the grpo advantage. A_T applies the same formula to a turn's discounted return, G_k = r_k + gamma
    G_{k+1} over the following turns, relative to the turns of the same group that start from the same state,
    in any trajectory. A state that occurs once gets 0.

    ROLL normalizes the turn term only with a deprecated key, and pools equal states of different groups.
    RLinf and SkyRL do not implement gigpo.
    """
    turns, by_std = _Turns.of(round_), recipe.normalize_by_std
    everywhere = torch.ones(len(turns.rewards), dtype=torch.bool)
    returns = formulas.discounted_returns(turns.rewards, everywhere, turns.lengths, gamma=recipe.gamma)
    of_episodes = round_.spread(
        formulas.group_advantages(round_.totals, round_.groups, normalize_by_std=by_std)
    )
    of_turns = turns.spread(formulas.group_advantages(returns, _states(round_), normalize_by_std=by_std))
    return recipe.episode_weight * of_episodes + recipe.turn_weight * of_turns


def reinforce(round_: _Round, recipe: Recipe) -> Tensor:
    """reinforce: the discounted return, over positions or turns (ROLL's agentic_reinforce)."""
    if recipe.advantage_level == "turn":
        turns = _Turns.of(round_)
        everywhere = torch.ones(len(turns.rewards), dtype=torch.bool)
        returns = formulas.discounted_returns(turns.rewards, everywhere, turns.lengths, gamma=recipe.gamma)
        return turns.spread(returns)
    return formulas.discounted_returns(round_.rewards, round_.mask, round_.lengths, gamma=recipe.gamma)


def rloo(round_: _Round, _: Recipe) -> Tensor:
    return round_.spread(formulas.leave_one_out_advantages(round_.totals, round_.groups))


def remax(round_: _Round, _: Recipe) -> Tensor:
    baselines = [of[0].baseline for of in round_.trajectories]
    assert None not in baselines, "remax needs the reward of each prompt's greedy answer"
    rewards = torch.tensor(baselines, dtype=torch.float64)
    return round_.spread(formulas.baseline_advantages(round_.totals, rewards))


def raft(round_: _Round, _: Recipe) -> Tensor:
    return round_.spread(formulas.best_of_group(round_.totals, round_.groups))


def maxrl(round_: _Round, _: Recipe) -> Tensor:
    return round_.spread(formulas.likelihood_advantages(round_.totals, round_.groups))


def _explained_variance(round_: _Round, recipe: Recipe) -> float:
    """1 - var(return - value) / var(return) over the positions whose value is learned; nan if all returns are
    equal."""
    valued = round_.mask
    if recipe.value_level != "token":
        valued = first_positions(_Turns.of(round_, are_actions=recipe.value_level == "action").index)
    returns, values = (
        _flat([row.fields[name] for row in round_.rows])[valued].numpy().astype(np.float64)
        for name in ("returns", "values")
    )
    variance = returns.var()
    return float(1.0 - (returns - values).var() / variance) if variance > 0 else float("nan")


def _totals(trajectories: Sequence[Sequence[Row]]) -> Tensor:
    """Sum of each trajectory's rewards [N], float64."""
    rewards = [np.concatenate([row.fields["rewards"] for row in of]) for of in trajectories]
    return torch.tensor([exact_sum(of[of != 0].tolist()) for of in rewards], dtype=torch.float64)


def _groups(trajectories: Sequence[Sequence[Row]]) -> Tensor:
    """An id per group and player [N]."""
    numbers: dict[tuple[int, str], int] = {}
    return torch.tensor(
        [numbers.setdefault((of[0].group, of[0].player), len(numbers)) for of in trajectories]
    )


def _sources(trajectories: Sequence[Sequence[Row]]) -> Tensor:
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(of[0].source, len(numbers)) for of in trajectories])


def _flat(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _unflatten(rows: Sequence[Row], name: str, flat: Tensor) -> None:
    parts = torch.split(flat, [len(row) for row in rows])
    for row, part in zip(rows, parts, strict=True):
        row.fields[name] = part.to(torch.float32).numpy()
