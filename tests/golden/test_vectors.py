"""Preference losses, reward models and distillation against vectors.json: numbers of each formula that were
computed in float64 without braid, with gradients of the mean loss by central differences."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.algorithms.advantages.reinforce import discounted_returns
from braid.algorithms.distillation import (
    bounded_ratio,
    divergence,
    over_top_k,
    sorted_distance,
    teacher_penalty,
)
from braid.algorithms.pairs import Pairs
from braid.algorithms.preference_losses import PREFERENCE_LOSSES
from braid.algorithms.preference_losses.bradley_terry import BradleyTerry
from braid.training.pairs import measured, total_loss
from braid.types import Divergence

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("vectors.json").read_text("utf-8"))
TOLERANCE = 1e-6
"""Absolute and relative; the numbers have eight digits."""
KINDS = {"bco": "bco_pair", "nca": "nca_pair", "sigmoid_nll": "sigmoid"}
SETTINGS = {"eps": "label_smoothing"}
"""Names in the vectors -> braid's, where they differ."""


def _cases(family: str) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in VECTORS[family]]


def _tensor(values: Any, *, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def _assert_close(computed: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(computed, dtype=torch.float64), _tensor(expected), atol=TOLERANCE, rtol=TOLERANCE
    )


@pytest.mark.parametrize("case", _cases("preference"))
def test_preference_losses(case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    params = {SETTINGS.get(name, name): value for name, value in case["params"].items()}
    sft_coef = params.pop("alpha", 0.0)
    kind = PREFERENCE_LOSSES[KINDS.get(case["formula_id"], case["formula_id"])].model_validate(params)
    chosen, rejected = (_tensor(inputs[f"policy_{side}"], grad=True) for side in ("chosen", "rejected"))
    reference = [_tensor(inputs[f"ref_{side}"]) for side in ("chosen", "rejected")]
    num_tokens = [_tensor(inputs[f"{side}_tokens"]) for side in ("chosen", "rejected")]
    matched = None
    if kind.matches_pairs:
        matched = kind.match((chosen - rejected).detach(), reference[0] - reference[1])
    pairs = Pairs(
        chosen, rejected, *reference, *num_tokens, num_tokens[0].mean().expand(len(chosen)), matched=matched
    )
    loss = total_loss(kind, sft_coef, pairs).mean()
    loss.backward()
    metrics = measured(kind, pairs)
    # The vectors give every pair the mean cross-entropy, and the losses of aot by rank.
    per_pair = kind.per_pair(pairs) + sft_coef * pairs.cross_entropy.mean()
    _assert_close(per_pair.detach().sort().values, sorted(expected["per_pair"]))
    _assert_close(loss.detach(), expected["loss"])
    for name in ("reward_chosen", "reward_rejected"):
        _assert_close(metrics[name], expected[name])
    for name in ("accuracy", "margin"):
        _assert_close(metrics[name].mean(), expected[name])
    _assert_close(chosen.grad, expected["grad_policy_chosen"])
    _assert_close(rejected.grad, expected["grad_policy_rejected"])


def _scored(chosen: Tensor, rejected: Tensor, **columns: Tensor | None) -> Pairs:
    nothing = torch.zeros_like(chosen)
    return Pairs(chosen, rejected, *[nothing] * 5, **columns)


@pytest.mark.parametrize("case", _cases("reward_model"))
def test_reward_models(case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    kind = BradleyTerry(center_coef=case.get("params", {}).get("center_coefficient") or 0.0)
    if "scores_best_first" in inputs:  # every response is preferred to all after it
        scores = _tensor(inputs["scores_best_first"], grad=True)
        better, worse = zip(*combinations(range(len(scores)), 2), strict=True)
        loss = kind.per_pair(_scored(scores[list(better)], scores[list(worse)])).mean()
        loss.backward()
        _assert_close(loss.detach(), expected["loss"])
        _assert_close(scores.grad, expected["grad"])
        return
    chosen, rejected = (_tensor(inputs[side], grad=True) for side in ("chosen", "rejected"))
    columns = {name: None if inputs[name] is None else _tensor(inputs[name]) for name in ("margin", "target")}
    pairs = _scored(chosen, rejected, **columns)
    loss = kind.per_pair(pairs).mean()
    loss.backward()
    metrics = measured(kind, pairs)
    _assert_close(loss.detach(), expected["loss"])
    _assert_close(metrics["accuracy"].mean(), expected["accuracy"])
    _assert_close(metrics["margin"].mean(), expected["mean_margin"])
    _assert_close(chosen.grad, expected["grad_chosen"])
    _assert_close(rejected.grad, expected["grad_rejected"])


def _whole(kind: Divergence, weight: str = "beta") -> Callable[..., Tensor]:
    """A divergence over the whole vocabulary."""

    def compute(student: Tensor, teacher: Tensor, params: dict[str, Any]) -> Tensor:
        temperature = params.get("temperature", 1.0)
        logp, logq = ((logits / temperature).log_softmax(-1) for logits in (student, teacher))
        return divergence(logp, logq, kind=kind, weight=params.get(weight, 0.5))

    return compute


def _roll(kind: Divergence, weight: str = "") -> Callable[..., Tensor]:
    """One of ROLL's, over the teacher's top k, to which both distributions are limited."""

    def compute(student: Tensor, teacher: Tensor, params: dict[str, Any]) -> Tensor:
        scale = params.get("kd_temperature", 1.0)
        logp, logq = _top(student / scale, teacher / (scale * params.get("teacher_temperature", 1.0)), params)
        return divergence(*over_top_k(logp, logq, "renormalize"), kind=kind, weight=params.get(weight, 0.5))

    return compute


def _top(student: Tensor, teacher: Tensor, params: dict[str, Any], *, of_student: bool = False) -> Any:
    """Log-probs of the k likeliest tokens of the teacher or the student."""
    chosen = (student if of_student else teacher).topk(params["topk"]).indices
    return (logits.log_softmax(-1).gather(-1, chosen) for logits in (student, teacher))


def _with_tail(student: Tensor, teacher: Tensor, params: dict[str, Any]) -> Tensor:
    logp, logq = over_top_k(*_top(student, teacher, params, of_student=True), "tail")
    return divergence(logp, logq, kind="jensen_shannon", weight=params["alpha"])


def _as_they_are(student: Tensor, teacher: Tensor, params: dict[str, Any]) -> Tensor:
    """verl bounds log-probs, and the sum, from below."""
    both = over_top_k(*_top(student, teacher, params), "drop")
    logp, logq = (values.clamp(min=params["log_prob_min_clamp"]) for values in both)
    return divergence(logp, logq, kind="forward_kl").clamp(min=0)


def _floored(student: Tensor, teacher: Tensor, params: dict[str, Any]) -> Tensor:
    """NeMo-RL: the teacher's log-prob is -100 outside its top k."""
    values, chosen = teacher.topk(params["topk"])
    logq = torch.full_like(teacher, -100.0).scatter(-1, chosen, values.log_softmax(-1))
    return divergence(student.log_softmax(-1), logq, kind="mixed_kl", weight=params["mixed_kl_weight"])


OF_LOGITS: dict[str, Callable[..., Tensor]] = {
    "forward_kl": _whole("forward_kl"),
    "jsd_half": _whole("jensen_shannon"),
    "jsd_temperature": _whole("jensen_shannon"),
    "topk_renormalised_forward": _roll("forward_kl"),
    "skewed_forward": _roll("skewed_forward_kl", "skew_lambda"),
    "roll_js": _roll("jensen_shannon"),
    "topk_unnormalised_forward": _as_they_are,
    "student_topk_tail_js": _with_tail,
    "mixed_zero_outside_topk": _floored,
}


@pytest.mark.parametrize("name", OF_LOGITS)
def test_divergences_of_logits(name: str) -> None:
    case = next(case for case in VECTORS["distillation"] if case["name"] == name)
    inputs, expected = case["inputs"], case["expected"]
    student, teacher = _tensor(inputs["student_logits"], grad=True), _tensor(inputs["teacher_logits"])
    mask = _tensor(inputs["mask"])
    per_token = OF_LOGITS[name](student, teacher, case["params"])
    mean = (per_token * mask).sum() / mask.sum()
    mean.backward()
    _assert_close(per_token.detach(), expected["per_token"])
    _assert_close(mean.detach(), expected["masked_mean"])
    _assert_close(student.grad, expected["grad_student_logits"])
    if "student_mass" in expected:
        masses = (logprobs.detach().exp().sum(-1) for logprobs in _top(student, teacher, case["params"]))
        for computed, mass in zip(masses, ("student_mass", "teacher_mass"), strict=True):
            _assert_close(computed, expected[mass])


def _discounted(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Tensor]:
    logp, logq, mask = (_tensor(inputs[name]) for name in ("student_logprobs", "teacher_logprobs", "mask"))
    rewards = -params["kl_coef"] * teacher_penalty(logp, [(logq, 1.0, mask)])
    everywhere = torch.ones(len(rewards), dtype=torch.bool)  # the discount counts masked tokens too
    return {"advantage": discounted_returns(rewards, everywhere, [len(rewards)], gamma=params["discount"])}


def _routed(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Tensor]:
    teachers = [
        (
            _tensor(inputs[f"teacher_{name}"]),
            params[f"coef_{name}"],
            _tensor(inputs[f"rows_of_{name}"])[:, None],
        )
        for name in "ab"
    ]
    penalty = teacher_penalty(_tensor(inputs["student_logprobs"]), teachers)
    return {"pure": -penalty, "mixed": _tensor(inputs["rl_advantage"])[:, None] - penalty}


def _weighed(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Tensor]:
    per_token, logp, old = (_tensor(inputs[name]) for name in ("per_token", "logprobs", "old_logprobs"))
    return {"per_token": per_token * bounded_ratio(logp, old, params["clip"])}


def _by_rank(inputs: dict[str, Any], _: dict[str, Any]) -> dict[str, Tensor]:
    p, q = inputs["student_probs"], inputs["teacher_probs"]
    distance = sorted_distance(_tensor(p), _tensor(q))
    return {"per_position": distance, "loss": distance.mean()}


OF_LOGPROBS = {
    "discounted_kl_reward": _discounted,
    "routed_teachers_and_reward": _routed,
    "is_clipped_loss": _weighed,
    "uld_other_tokenizer": _by_rank,
}


@pytest.mark.parametrize("name", OF_LOGPROBS)
def test_teachers_of_sampled_tokens(name: str) -> None:
    case = next(case for case in VECTORS["distillation"] if case["name"] == name)
    computed = OF_LOGPROBS[name](case["inputs"], case.get("params", {}))
    for key, values in case["expected"].items():
        _assert_close(computed[key], values)


def test_every_case_of_distillation_is_computed() -> None:
    assert {case["name"] for case in VECTORS["distillation"]} == OF_LOGITS.keys() | OF_LOGPROBS.keys()
