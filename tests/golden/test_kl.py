"""KL estimators against numbers worked out by hand."""

import math

import pytest
import torch

from braid.algorithms.kl import kl_estimate
from braid.models.logprobs import Head, TiledLogits, token_logprobs

# A token of probability 1/2 where the reference has 1/4, and one of 1/4 where the reference has 1/2:
#   d  = log pi - log ref          ln 2 =  0.693147                  -0.693147
#   k1 = d                                 0.693147                  -0.693147
#   k2 = d^2 / 2                   0.480453 / 2 = 0.240227            0.240227
#   k3 = exp(-d) - 1 + d           1/2 - 1 + 0.693147 = 0.193147      2 - 1 - 0.693147 = 0.306853
POLICY, REFERENCE = [0.5, 0.25], [0.25, 0.5]
EXPECTED = {
    "k1": [0.693147, -0.693147],
    "k2": [0.240227, 0.240227],
    "k3": [0.193147, 0.306853],
    "abs": [0.693147, 0.693147],
}


@pytest.mark.parametrize("estimator", EXPECTED)
def test_estimators_equal_hand_computed_values(estimator):
    kl = kl_estimate(
        torch.tensor(POLICY).log(), torch.tensor(REFERENCE).log(), estimator=estimator, clamp=None
    )
    torch.testing.assert_close(kl, torch.tensor(EXPECTED[estimator]), atol=1e-6, rtol=0)  # six digits given


@pytest.mark.parametrize("estimator", EXPECTED)
def test_the_clamp_bounds_the_absolute_value(estimator):
    kl = kl_estimate(
        torch.tensor(POLICY).log(), torch.tensor(REFERENCE).log(), estimator=estimator, clamp=0.25
    )
    bounded = [min(max(value, -0.25), 0.25) for value in EXPECTED[estimator]]
    torch.testing.assert_close(kl, torch.tensor(bounded), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # log pi less log ref
        ("k1", [0.1, -0.2, 0.5]),
        ("abs", [0.1, 0.2, 0.5]),
        # 0.01 / 2, 0.04 / 2, 0.25 / 2
        ("k2", [0.005, 0.02, 0.125]),
        # e^-0.1 - 0.9, e^0.2 - 1.2, e^-0.5 - 0.5 = 0.904837 - 0.9, 1.221403 - 1.2, 0.606531 - 0.5
        ("k3", [0.004837, 0.021403, 0.106531]),
    ],
)
def test_estimators_of_small_moves_equal_hand_computed_values(estimator, expected):
    policy, reference = torch.tensor([-0.5, -1.0, -2.0]), torch.tensor([-0.6, -0.8, -2.5])
    kl = kl_estimate(policy, reference, estimator=estimator, clamp=10.0)
    torch.testing.assert_close(kl, torch.tensor(expected), atol=1e-6, rtol=0)  # six digits given


def test_the_mean_of_k1_and_of_k3_under_the_policy_is_the_divergence():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    # 0.5 ln(0.5/0.2) + 0.3 ln(0.3/0.2) + 0.2 ln(0.2/0.6) = 0.458145 + 0.121640 - 0.219722 = 0.360062
    for estimator in ("k1", "k3"):
        kl = kl_estimate(policy.log(), reference.log(), estimator=estimator, clamp=None)
        assert math.isclose(float((policy * kl).sum()), 0.360062, abs_tol=1e-6)


def test_the_full_kl_and_its_gradient_equal_hand_computed_values():
    # Logits are 2 log p with temperature 2, so p and q are the distributions above. The gradient of the
    # logits is p (log p - log q - KL) / 2: ln 2.5 = 0.916291, ln 1.5 = 0.405465, ln 1/3 = -1.098612, so
    # 0.25 * 0.556229 = 0.139057, 0.15 * 0.045403 = 0.006810, 0.1 * -1.458674 = -0.145867
    policy, reference = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
    hidden = (2 * policy.log()).requires_grad_()
    head = Head(torch.eye(3))
    logits = TiledLogits(2 * reference.log(), head, 2.0)
    _, _, kl = token_logprobs(hidden, head, torch.tensor([1]), temperature=2.0, reference=logits)
    kl.sum().backward()
    torch.testing.assert_close(kl, torch.tensor([0.360062]), atol=1e-6, rtol=0)  # six digits given
    expected = torch.tensor([[0.139057, 0.006810, -0.145867]])
    torch.testing.assert_close(hidden.grad, expected, atol=1e-6, rtol=0)
