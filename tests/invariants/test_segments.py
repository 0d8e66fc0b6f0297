"""No number of an update depends on how a trajectory was cut into segments.

The same episodes are trained on twice: each in one segment; and with a segment for every turn, which reads
again all that came before it. The runs differ in the order of fp32 sums only.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple, get_args

import numpy as np
import pytest
import torch
from tests.formulas import advantage_of, changed
from tests.rounding import assert_near, rounding
from tests.rows import rows_of
from torch import Tensor

from braid.algorithms.advantages import ADVANTAGES
from braid.algorithms.aggregate import row_weights
from braid.algorithms.policy_losses.clip_cov import ClipCov
from braid.algorithms.policy_losses.kl_cov import KlCov
from braid.algorithms.policy_losses.ppo_clip import PpoClip
from braid.algorithms.recipes import RECIPES, Correction, Recipe
from braid.algorithms.rewards import RunningMoments
from braid.config.model import BuildSpec, ModelConfig
from braid.config.train import TrainConfig
from braid.models.base import TrainableModel
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy
from braid.models.value import ValueModel
from braid.training.advantages import are_trained, compute_advantages
from braid.training.backend import Loss, StepReport
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss, value_loss_of
from braid.training.step_fields import write_step_fields
from braid.types import (
    AdvantageLevel,
    Aggregation,
    CorrectionLevel,
    CorrectionMode,
    Group,
    Prompt,
    RatioLevel,
    Row,
    Segment,
    Status,
    Trajectory,
    Turn,
)

CPU = torch.device("cpu")
NUM_TURNS = ((3, 2, 1), (3, 3), (2, 3, 1))
BASE = replace(RECIPES["grpo"], kl_coef=0.1, entropy_coef=0.01, supervised_coef=0.2)
DISCOUNT = {"gamma": 0.9, "gae_lambda": 0.9}
CASES: dict[str, Recipe] = {
    **{mode: replace(BASE, aggregation=mode) for mode in get_args(Aggregation)},
    **{
        f"{mode} of turns": replace(BASE, aggregation=mode, turn_weighting="turns")
        for mode in get_args(Aggregation)
    },
    **{f"advantage {name}": replace(BASE, advantage=advantage_of(name, **DISCOUNT)) for name in ADVANTAGES},
    "advantage of turns": replace(BASE, advantage=changed(BASE.advantage, level="turn")),
    "gae of turns": replace(BASE, advantage=advantage_of("gae", level="turn", **DISCOUNT)),
    **{
        f"ratio {level}": replace(BASE, policy_loss=PpoClip(ratio_level=level))
        for level in get_args(RatioLevel)
    },
    **{
        f"{mode} {level}": replace(BASE, corrections=(Correction(level=level, mode=mode, low=0.7, high=1.3),))
        for level in get_args(CorrectionLevel)
        for mode in get_args(CorrectionMode)
    },
    "clip_cov": replace(BASE, policy_loss=ClipCov(cov_low=0.1, cov_fraction=0.2)),
    "kl_cov": replace(BASE, policy_loss=KlCov(cov_fraction=0.2)),
    "log-probs of decisions": replace(BASE, logprob_level="chunk", entropy_level="action"),
    "statistics": replace(
        BASE,
        advantage=advantage_of("reinforce", **DISCOUNT),
        reward_mean="running",
        reward_std="batch",
        whiten_advantages=True,
    ),
    "clipped rewards": replace(BASE, reward_mean="group", reward_std="group", reward_clip=0.5),
    "KL in the reward": replace(
        BASE,
        advantage=advantage_of("gae", **DISCOUNT),
        kl_in="reward",
        kl_estimator="k1",
        whiten_rewards=True,
        token_reward_clip=1.0,
    ),
    "without truncated ones": replace(BASE, mask_truncated=True, whiten_advantages=True),
    "without long failures": replace(BASE, mask_long_failures=6),
}


def _groups() -> list[Group]:
    """Conversations whose replies are one of two; one is truncated."""
    rng = np.random.default_rng(0)
    groups = []
    for number, lengths in enumerate(NUM_TURNS):
        asked = rng.integers(3, 11, 4).tolist()
        prompt = Prompt(f"test:{number}", "test", tuple(asked), ())
        group = Group(prompt, [], greedy=Trajectory(prompt, 0, reward=0.3))
        for sample, num_turns in enumerate(lengths):
            turns = []
            for turn in range(num_turns):
                read = [3 + int(rng.integers(2)), 5] if turn else asked
                written = rng.integers(3, 11, int(rng.integers(1, 5))).tolist()
                turns.append(Turn(read, written, [0.0] * len(written), "stop", turn, float(rng.normal())))
            status = Status.TRUNCATED if (number, sample) == (1, 0) else Status.FINISHED
            reward = float(rng.normal())
            group.trajectories.append(
                Trajectory(prompt, sample, status, segments=[Segment(turns)], reward=reward)
            )
        groups.append(group)
    return groups


def _cut(trajectory: Trajectory) -> Trajectory:
    segments, read = [], []
    for turn in trajectory.turns:
        context = [*read, *turn.context_ids]
        segments.append(Segment([replace(turn, context_ids=context)]))
        read = [*context, *turn.output_ids]
    return replace(trajectory, segments=segments)


WHOLE = rows_of(_groups())
CUT = rows_of([replace(g, trajectories=[_cut(t) for t in g.trajectories]) for g in _groups()])
TOLERANCE = rounding(sum(len(row) for row in CUT))
"""Of a tensor's own norm, or of the number's own size or 1 where that is larger: losses, metrics and
gradients are sums over the positions of all rows, in an order that changes."""


class Update(NamedTuple):
    """Everything that one step gives."""

    report: StepReport
    grads: dict[str, Tensor]
    facts: dict[str, float]
    moments: RunningMoments


@pytest.fixture(scope="module")
def policy() -> CausalLM:
    spec = BuildSpec(
        hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
        characters="abcdefgh",
    )  # fmt: skip
    return load_policy(ModelConfig(build=spec), temperature=0.9, seed=0, device=CPU)


def _with_fields(policy: CausalLM, rows: Sequence[Row]) -> list[Row]:
    """Copies, with fields that depend on the trajectory and the number of the token in it alone."""
    rows = [replace(row, fields={"rewards": row.fields["rewards"].copy()}) for row in rows]
    backend = SingleBackend(policy, TrainConfig(), total_steps=0, device=CPU)
    inferred = backend.infer(rows, frozenset({"logprobs"}))
    scales = {"old_logprobs": 0.3, "behavior_logprobs": 0.3, "ref_logprobs": 0.5, "values": 1.0}
    for name, scale in scales.items():
        rngs = {row.trajectory: np.random.default_rng((len(name), row.trajectory)) for row in rows}
        for row, result in zip(rows, inferred, strict=True):
            row.fields[name] = np.zeros(len(row), np.float32)
            row.fields[name][row.mask] = rngs[row.trajectory].normal(scale=scale, size=row.num_tokens)
            if name != "values":
                row.fields[name] += np.where(row.mask, result["logprobs"], np.float32(0))
    for row in rows:
        row.fields["is_success"] = np.full(len(row), row.trajectory % 3 == 0, np.float32)
    return rows


def _update(
    policy: CausalLM,
    rows: Sequence[Row],
    recipe: Recipe,
    micro_batch_tokens: int,
    trained: TrainableModel | None = None,
    loss: Loss | None = None,
) -> Update:
    """One step, from rewards to gradients, as they are before clipping."""
    rows, moments = _with_fields(policy, rows), RunningMoments()
    facts = compute_advantages(rows, recipe, running=moments)
    rows = [row for row, is_so in zip(rows, are_trained(rows, recipe), strict=True) if is_so]
    model = deepcopy(trained or policy)
    grads: dict[str, Tensor] = {}
    for name, p in model.module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: grads.update({name: p.grad.clone()}))
    counts_decisions = recipe.value_level == "turn" if loss else recipe.counts_decisions
    weights = row_weights(
        [row.num_decisions if counts_decisions else row.num_tokens for row in rows],
        [row.group for row in rows],
        mode=recipe.aggregation,
        constant=40.0,
        agents=[(row.trajectory, row.agent) for row in rows],
    )
    write_step_fields(rows, recipe, constant=40.0, key=(0, 0))
    backend = SingleBackend(
        model, TrainConfig(micro_batch_tokens=micro_batch_tokens), total_steps=1, device=CPU
    )
    return Update(backend.train(rows, weights, loss or policy_loss(recipe)), grads, facts, moments)


def _assert_equal(one: Update, other: Update) -> None:
    def close(a: float, b: float, what: str) -> None:
        assert abs(a - b) <= TOLERANCE * max(1.0, abs(b)), f"{what}: {a} is not {b}"

    close(one.report.loss, other.report.loss, "loss")
    assert one.report.metrics.keys() == other.report.metrics.keys()
    for name, (total, count) in one.report.metrics.items():
        assert count == other.report.metrics[name][1], name
        close(total / count, other.report.metrics[name][0] / count, name)
    for name, value in one.report.maxima.items():
        close(value, other.report.maxima[name], name)
    for name, value in one.facts.items():
        close(value, other.facts[name], name)
    assert one.moments.count == other.moments.count
    close(one.moments.mean, other.moments.mean, "running mean")
    assert one.grads.keys() == other.grads.keys()
    for name, grad in one.grads.items():
        assert_near(grad, other.grads[name], TOLERANCE, name)


def test_the_rows_of_the_two_are_the_same_tokens() -> None:
    assert len(WHOLE) == sum(map(len, NUM_TURNS))
    assert len(CUT) == sum(map(sum, NUM_TURNS))
    whole, cut = (
        [(row.trajectory, token) for row in rows for token in row.inputs["input_ids"][row.mask].tolist()]
        for rows in (WHOLE, CUT)
    )
    assert whole == cut


@pytest.mark.parametrize("case", CASES)
def test_an_update_does_not_depend_on_segments(case: str, policy: CausalLM) -> None:
    whole = _update(policy, WHOLE, CASES[case], 10**6)
    assert whole.report.grad_norm > 0
    for micro_batch_tokens in (10**6, 8):  # no two rows of a trajectory have 8 tokens together
        _assert_equal(_update(policy, CUT, CASES[case], micro_batch_tokens), whole)


@pytest.mark.parametrize("level", get_args(AdvantageLevel))
@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_a_critics_update_does_not_depend_on_segments(
    mode: Aggregation, level: AdvantageLevel, policy: CausalLM
) -> None:
    recipe = replace(BASE, advantage=advantage_of("gae", level=level, **DISCOUNT), aggregation=mode)
    critic, loss = ValueModel.copy_of(policy), value_loss_of(recipe)
    with torch.no_grad():
        dict(critic.named_weights())["value_head.weight"].normal_(generator=torch.Generator().manual_seed(0))
    whole = _update(policy, WHOLE, recipe, 10**6, critic, loss)
    _assert_equal(_update(policy, CUT, recipe, 8, critic, loss), whole)
