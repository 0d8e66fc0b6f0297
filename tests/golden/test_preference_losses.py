"""Preference losses against their formulas, computed pair by pair with `math`, and gradients against
differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError

from braid.algorithms.pairs import Pairs
from braid.algorithms.preference_losses import PREFERENCE_LOSSES
from braid.algorithms.preference_losses.base import PreferenceLoss

CHOSEN, REJECTED = (-9.0, -21.25, -6.5, -14.0), (-12.5, -17.0, -8.0, -14.0)
REF_CHOSEN, REF_REJECTED = (-11.0, -20.5, -7.25, -13.0), (-11.25, -19.0, -7.0, -13.0)
NUM_CHOSEN, NUM_REJECTED = (5.0, 9.0, 3.0, 4.0), (6.0, 7.0, 4.0, 4.0)
"""Log-probs under policy and reference, and lengths; the last pair is a tie."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Relative: the losses are up to 60, of a few float32 operations each."""


class One(NamedTuple):
    """A pair: log-probs, and c, r and h."""

    chosen: float
    rejected: float
    c: float
    r: float
    n_c: float
    n_r: float

    @property
    def h(self) -> float:
        return self.c - self.r


ONES = [
    One(a, b, a - ra, b - rb, n, m)
    for a, b, ra, rb, n, m in zip(
        CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, NUM_CHOSEN, NUM_REJECTED, strict=True
    )
]


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_s(x: float) -> float:
    return -math.log1p(math.exp(-x))


Case = tuple[str, dict[str, Any], Callable[[One], float]]
CASES: tuple[Case, ...] = (
    ("sigmoid", {"beta": 0.3}, lambda p: -log_s(0.3 * p.h)),
    (
        "sigmoid",
        {"beta": 0.3, "label_smoothing": 0.1},
        lambda p: -0.9 * log_s(0.3 * p.h) - 0.1 * log_s(-0.3 * p.h),
    ),
    ("sigmoid", {"reference_free": True}, lambda p: -log_s(0.1 * (p.chosen - p.rejected))),
    (
        "sigmoid",
        {"f_divergence": "forward_kl"},
        lambda p: -log_s(0.1 * (math.exp(-p.r) - math.exp(-p.c))),
    ),
    ("sigmoid", {"f_divergence": "js"}, lambda p: -log_s(0.1 * (log_s(p.c) - log_s(p.r)))),
    ("sigmoid_norm", {"beta": 0.5}, lambda p: -log_s(0.5 * (p.c / p.n_c - p.r / p.n_r))),
    ("ipo", {}, lambda p: (p.h - 5) ** 2),
    ("ipo", {"length_normalized": True}, lambda p: (p.c / p.n_c - p.r / p.n_r - 5) ** 2),
    ("hinge", {"beta": 0.4}, lambda p: max(0.0, 1 - 0.4 * p.h)),
    (
        "robust",
        {"label_smoothing": 0.2},
        lambda p: (-0.8 * log_s(0.1 * p.h) + 0.2 * log_s(-0.1 * p.h)) / 0.6,
    ),
    ("bco_pair", {}, lambda p: -log_s(0.1 * p.c) - log_s(-0.1 * p.r)),
    ("sppo_hard", {}, lambda p: (p.c - 5) ** 2 + (p.r + 5) ** 2),
    (
        "nca_pair",
        {},
        lambda p: -log_s(0.1 * p.c) - (log_s(-0.1 * p.c) + log_s(-0.1 * p.r)) / 2,
    ),
    (
        "exo_pair",
        {"label_smoothing": 0.05},
        lambda p: sum(q * math.log(q / e) for q, e in ((s(0.1 * p.h), 0.95), (s(-0.1 * p.h), 0.05))),
    ),
    ("apo_zero", {}, lambda p: 1 - s(0.1 * p.c) + s(0.1 * p.r)),
    ("apo_down", {}, lambda p: s(0.1 * p.c) + 1 - s(0.1 * p.h)),
    (
        "discopop",
        {"tau": 0.1},
        lambda p: -log_s(0.1 * p.h) * (1 - s(p.h)) + math.exp(-0.1 * p.h) * s(p.h),
    ),
    ("simpo", {}, lambda p: -log_s(2 * (p.chosen / p.n_c - p.rejected / p.n_r) - 1)),
    ("sft", {}, lambda p: -p.chosen / 5.25),
    (
        "bradley_terry",
        {"center_coef": 0.01},
        lambda p: -log_s(p.chosen - p.rejected) + 0.01 * (p.chosen + p.rejected) ** 2,
    ),
)  # fmt: skip
IDS = [" ".join([kind, *map(str, settings.values())]) for kind, settings, _ in CASES]


def _kind(name: str, **settings: Any) -> PreferenceLoss:
    return PREFERENCE_LOSSES[name].model_validate(settings)


def _pairs(dtype: torch.dtype, **changed: Any) -> Pairs:
    lists = {
        "chosen": CHOSEN, "rejected": REJECTED, "ref_chosen": REF_CHOSEN, "ref_rejected": REF_REJECTED,
        "num_chosen": NUM_CHOSEN, "num_rejected": NUM_REJECTED, "mean_chosen": [5.25] * 4, **changed,
    }  # fmt: skip
    return Pairs(**{name: torch.tensor(values, dtype=dtype) for name, values in lists.items()})


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("kind", "settings", "formula"), CASES, ids=IDS)
def test_a_loss_is_that_of_its_formula(
    kind: str, settings: dict[str, Any], formula: Callable[[One], float], dtype: torch.dtype
) -> None:
    per_pair = _kind(kind, **settings).per_pair(_pairs(dtype))
    assert per_pair.dtype == dtype
    assert per_pair.tolist() == pytest.approx([formula(p) for p in ONES], rel=TOLERANCE[dtype], abs=1e-6)


@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
def test_the_gradient_is_that_of_the_loss(kind: str) -> None:
    made = _kind(kind)
    matched = torch.tensor([0.5, -1.0, 0.25, 2.0], dtype=torch.float64) if made.matches_pairs else None

    def loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        others = {name: getattr(_pairs(torch.float64), name) for name in
                  ("ref_chosen", "ref_rejected", "num_chosen", "num_rejected", "mean_chosen")}  # fmt: skip
        return made.per_pair(Pairs(chosen, rejected, **others, matched=matched))

    pairs = _pairs(torch.float64)
    inputs = (pairs.chosen.requires_grad_(), pairs.rejected.requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs)


def test_hand_computed_numbers() -> None:
    """log ratios 1 and -0.5, so that h is 1.5 and beta h 0.15; -log s(0.15) = 0.6209570..."""
    pairs = _pairs(torch.float64, chosen=[-10.0] * 4, rejected=[-12.0] * 4, ref_chosen=[-11.0] * 4,
                   ref_rejected=[-11.5] * 4)  # fmt: skip
    assert _kind("sigmoid").per_pair(pairs)[0].item() == pytest.approx(0.6209570, abs=1e-7)
    assert _kind("ipo").per_pair(pairs)[0].item() == pytest.approx(12.25)
    chosen, rejected = _kind("sigmoid").rewards(pairs)
    assert chosen[0].item() == pytest.approx(0.1)
    assert rejected[0].item() == pytest.approx(-0.05)


def test_optimal_transport_compares_sorted_differences() -> None:
    """Differences of the policy 3.5, -4.25, 1.5, 0 and of the reference 0.25, -1.5, -0.25, 0."""
    ranked = [(3.5, 0.25), (-4.25, -1.5), (1.5, 0.0), (0.0, -0.25)]
    expected = [-log_s(0.1 * (d - q)) for d, q in ranked]
    assert _kind("aot").per_pair(_pairs(torch.float64)).tolist() == pytest.approx(expected, rel=1e-12)


def test_a_reward_model_reads_margins_and_targets() -> None:
    pairs = _pairs(torch.float64, margin=[1.0, 0.0, -0.5, 0.0], target=[0.9, 0.6, 0.5, 1.0])
    differences = [a - b - m for a, b, m in zip(CHOSEN, REJECTED, (1.0, 0.0, -0.5, 0.0), strict=True)]
    expected = [
        -t * log_s(d) - (1 - t) * log_s(-d) for d, t in zip(differences, (0.9, 0.6, 0.5, 1.0), strict=True)
    ]
    assert _kind("bradley_terry").per_pair(pairs).tolist() == pytest.approx(expected, rel=1e-12)
    far = _pairs(torch.float32, chosen=[800.0, -800.0, 0, 0], rejected=[-800.0, 800.0, 0, 0])
    assert _kind("bradley_terry").per_pair(far).tolist()[:2] == [0.0, 1600.0], "finite at any score"


def test_only_losses_of_log_ratios_need_a_reference() -> None:
    without = {name for name in PREFERENCE_LOSSES if not _kind(name).needs_reference}
    assert without == {"simpo", "sft", "bradley_terry"}
    assert not _kind("ipo", reference_free=True).needs_reference


@pytest.mark.parametrize(
    ("kind", "setting"),
    [("sigmoid", {"label_smoothing": 0.5}), ("exo_pair", {"label_smoothing": 0.0}), ("sigmoid", {"beta": 0.0}),
     ("aot", {"reference_free": True})],
)  # fmt: skip
def test_settings_without_a_meaning_are_refused(kind: str, setting: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        _kind(kind, **setting)
