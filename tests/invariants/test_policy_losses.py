"""Every policy loss, ratio level and correction gives one update, however its rows are cut, ordered and
packed.

One optimizer step of a language model on conversations of two turns whose prompts are shared within a group.
What acts on chosen tokens chooses them over the whole step. The runs differ in the order of fp32 sums only.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tests.formulas import loss_of
from tests.rounding import assert_near, rounding
from torch import Tensor

from braid.algorithms.aggregate import row_weights
from braid.algorithms.policy_losses import POLICY_LOSSES
from braid.algorithms.recipes import RECIPES, Correction, Recipe
from braid.config.model import BuildSpec, ModelConfig
from braid.config.train import TrainConfig
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy
from braid.training.backend import StepReport
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss
from braid.training.step_fields import write_step_fields
from braid.types import CorrectionLevel, CorrectionMode, RatioLevel, Row

TOLERANCE = rounding(105)
"""Of a tensor's own norm, or of the number's own size or 1 where that is larger: losses, metrics and
gradients are sums over the 105 positions of all rows, in an order that changes."""

CPU = torch.device("cpu")
BASE = replace(
    RECIPES["grpo"],
    kl_coef=0.1,
    policy_loss_coef=0.7,
    entropy_coef=0.01,
    supervised_coef=0.2,
)
SETTINGS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "cov_low": 0.1, "cov_fraction": 0.2}

BOUNDS = {"dppo": {"clip_low": 0.01, "clip_high": 0.01}, "sequence_mask": {"max_gap": 0.02}}
"""Narrow enough to bind: for probabilities of about one in ten, and for some sequences."""


def _with_loss(name: str, **settings: Any) -> Recipe:
    return replace(BASE, policy_loss=loss_of(name, **SETTINGS | settings))


def _corrected(level: CorrectionLevel, mode: CorrectionMode) -> Recipe:
    return replace(BASE, corrections=(Correction(level=level, mode=mode, low=0.7, high=1.3),))


def _masks(*corrections: Correction) -> Recipe:
    return replace(BASE, corrections=corrections)


CASES: dict[str, Recipe] = {
    **{
        f"{name}, {level}": _with_loss(name, ratio_level=level, **BOUNDS.get(name, {}))
        for name in POLICY_LOSSES
        for level in get_args(RatioLevel)
    },
    **{
        f"{mode} {level}": _corrected(level, mode)
        for level in get_args(CorrectionLevel)
        for mode in get_args(CorrectionMode)
    },
    "two corrections": replace(
        BASE,
        corrections=(*_corrected("token", "truncate").corrections, *_corrected("turn", "mask").corrections),
    ),
    "dppo, kl": _with_loss("dppo", divergence="kl", **BOUNDS["dppo"]),
    "turns alike": replace(BASE, turn_weighting="turns", aggregation="sequence_mean_token_mean"),
    **{
        f"decisions, {name}": replace(_with_loss(name), logprob_level="chunk", entropy_level="action")
        for name in ("ppo_clip", "kimi")
    },
    "prompt_mean": replace(BASE, aggregation="prompt_mean"),
    "log ratio": _with_loss("ppo_clip", log_ratio_min=-0.1, log_ratio_max=0.2, clip_low=0.05, clip_high=0.1),
    "mask difference": _masks(
        Correction(level="token", mode="mask", low=-0.05, high=0.05, measure="difference")
    ),
    "mask kept": _masks(
        Correction(level="token", mode="mask", low=0.7, high=1.3),
        Correction(level="geometric", mode="mask", low=0.97, high=1.03, tokens="kept"),
    ),
}


@pytest.fixture(scope="module")
def policy() -> CausalLM:
    spec = BuildSpec(
        hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
        characters="abcdefgh",
    )  # fmt: skip
    return load_policy(ModelConfig(build=spec), temperature=0.9, seed=0, device=CPU)


@pytest.fixture(scope="module")
def rows(policy: CausalLM) -> list[Row]:
    """Groups of 3, 3 and 2; each answer has two turns with a reply between, or one turn."""
    rng = np.random.default_rng(0)
    out: list[Row] = []
    for group, (prompt, answers) in enumerate([(5, (8, 3, 13)), (2, (6, 21, 1)), (9, (4, 10))]):
        shared = rng.integers(3, 11, prompt)
        for answer in answers:
            mask = np.arange(prompt + answer) >= prompt
            if answer > 6:
                mask[prompt + 3 : prompt + 5] = False
            ids = np.concatenate([shared, rng.integers(3, 11, answer)])
            is_second = (np.arange(len(mask)) > prompt + 4) & (answer > 6)
            decision = np.where(mask, is_second, -1).astype(np.int32)
            out.append(Row({"input_ids": ids}, mask, group, trajectory=len(out), decision=decision))
    backend = SingleBackend(policy, TrainConfig(), total_steps=0, device=CPU)
    for row, result in zip(out, backend.infer(out, frozenset({"logprobs"})), strict=True):
        for name, scale in (("old_logprobs", 0.3), ("behavior_logprobs", 0.3), ("ref_logprobs", 0.5)):
            noise = rng.normal(scale=scale, size=len(row)).astype(np.float32)
            row.fields[name] = np.where(row.mask, result["logprobs"] + noise, np.float32(0))
        row.fields["advantages"] = np.where(row.mask, rng.normal(size=len(row)), 0).astype(np.float32)
        row.fields["is_success"] = np.full(len(row), row.trajectory % 3 == 0, np.float32)
    return out


def _update(
    policy: CausalLM, rows: list[Row], recipe: Recipe, micro_batch_tokens: int
) -> tuple[StepReport, dict[str, Tensor]]:
    """One step on copies; the gradients as they are before clipping."""
    policy = deepcopy(policy)
    rows = [replace(row, fields=dict(row.fields)) for row in rows]
    grads: dict[str, Tensor] = {}
    for name, p in policy.module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: grads.update({name: p.grad.clone()}))
    groups = [row.group for row in rows]
    counts = [row.num_decisions if recipe.counts_decisions else row.num_tokens for row in rows]
    weights = row_weights(counts, groups, mode=recipe.aggregation, constant=None)
    write_step_fields(rows, recipe, constant=None, key=(0, 0))
    backend = SingleBackend(
        policy, TrainConfig(micro_batch_tokens=micro_batch_tokens), total_steps=1, device=CPU
    )
    return backend.train(rows, weights, policy_loss(recipe)), grads


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(1.0, abs(other))


Whole = Callable[[str], tuple[StepReport, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def whole_of(policy: CausalLM, rows: list[Row]) -> Whole:
    """A case's update of all rows as one micro-batch."""
    return cache(lambda case: _update(policy, rows, CASES[case], micro_batch_tokens=10**6))


@pytest.mark.parametrize("case", CASES)
def test_batching_order_and_shared_prompts_do_not_change_an_update(
    case: str, policy: CausalLM, rows: list[Row], whole_of: Whole
) -> None:
    recipe = CASES[case]
    whole, grads = whole_of(case)
    shuffled = [rows[i] for i in np.random.default_rng(1).permutation(len(rows))]
    for batch, micro_batch_tokens in ((rows, 1), (shuffled, 40)):
        report, others = _update(policy, batch, recipe, micro_batch_tokens)
        assert _close(report.loss, whole.loss)
        assert report.metrics.keys() == whole.metrics.keys()
        for name, (total, count) in report.metrics.items():
            assert count == whole.metrics[name][1], name
            assert _close(total / count, whole.metrics[name][0] / count), name
        for name, value in report.maxima.items():
            assert _close(value, whole.maxima[name]), name
        for name, grad in others.items():
            assert_near(grad, grads[name], TOLERANCE, name)


@pytest.mark.parametrize("case", CASES)
def test_every_bound_and_choice_of_the_cases_acts_on_some_tokens_and_not_on_all(
    case: str, whole_of: Whole
) -> None:
    report, _ = whole_of(case)
    acts = ("clip_fraction", "chosen_fraction", "truncated_fraction", "masked_fraction")
    shares = {name: total / count for name, (total, count) in report.metrics.items() if name.endswith(acts)}
    mode = case.split()[0]
    idle = "masked_fraction" if mode == "truncate" else "truncated_fraction"
    if CASES[case].corrections and case != "two corrections":
        shares = {name: share for name, share in shares.items() if not name.endswith(idle)}
    for name, share in shares.items():
        assert 0 < share < 1, name
