"""Policy and value losses against numbers worked out by hand."""

import math

import pytest
import torch
from tests.formulas import (
    cispo,
    clip_cov,
    cross_entropy,
    dppo,
    gmpo,
    importance_sampling,
    kimi,
    kl_cov,
    masked_is,
    policy_gradient,
    ppo_clip,
    sapo,
    sequence_mask,
    topr,
    vespo,
)

from braid.algorithms.segments import segments
from braid.algorithms.surrogate import importance_ratio
from braid.algorithms.value_loss import value_loss

CLOSE = {"atol": 1e-6, "rtol": 0}  # exp and log in float32; expectations are given to six digits
RATIOS = torch.tensor([1.5, 0.5, 1.5, 0.5, 3.0])
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])


def _ppo(clip_high, dual_clip):
    return ppo_clip(RATIOS, ADVANTAGES, clip_low=0.2, clip_high=clip_high, dual_clip=dual_clip)


def test_ppo_clip_equals_hand_computed_values():
    # rho A:         1.5   0.5  -1.5  -0.5  -3
    # clip(rho) A:   1.2   0.8  -1.2  -0.8  -1.2
    # min:           1.2   0.5  -1.5  -0.8  -3
    loss, diagnostics = _ppo(clip_high=0.2, dual_clip=None)
    torch.testing.assert_close(loss, torch.tensor([-1.2, -0.5, 1.5, 0.8, 3.0]), **CLOSE)
    assert diagnostics["clip_fraction"].tolist() == [1, 0, 0, 1, 0]
    assert "dual_clip_fraction" not in diagnostics


def test_a_separate_upper_bound_moves_only_the_upper_clip():
    loss, _ = _ppo(clip_high=0.28, dual_clip=None)
    torch.testing.assert_close(loss, torch.tensor([-1.28, -0.5, 1.5, 0.8, 3.0]), **CLOSE)


def test_the_dual_clip_bounds_the_loss_of_bad_tokens():
    # -2 A = 2 where A < 0: only 3 exceeds it
    loss, diagnostics = _ppo(clip_high=0.2, dual_clip=2.0)
    torch.testing.assert_close(loss, torch.tensor([-1.2, -0.5, 1.5, 0.8, 2.0]), **CLOSE)
    assert diagnostics["dual_clip_fraction"].tolist() == [0, 0, 0, 0, 1]
    # 1.4 where A < 0: 1.5 and 3 exceed it
    loss, _ = _ppo(clip_high=0.2, dual_clip=1.4)
    torch.testing.assert_close(loss, torch.tensor([-1.2, -0.5, 1.4, 0.8, 1.4]), **CLOSE)


# Three tokens whose log-probs moved by ln 1/2, 0 and ln 10.
OLD = torch.tensor([-1.0, -1.0, -3.0])
NEW = torch.tensor([-1.693147, -1.0, -0.697415])
A = torch.tensor([1.0, -1.0, -4.0])


def test_the_dual_clip_bounds_a_token_that_became_ten_times_likelier():
    # rho A: 0.5, -1, -40; clip(rho) A: 0.8, -1, -4.8; the smaller ones, and no less than 3 A = -12
    ratio = importance_ratio(NEW, OLD, None)
    loss, _ = ppo_clip(ratio, A, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    torch.testing.assert_close(loss, torch.tensor([-0.5, 1.0, 12.0]), **CLOSE)


def test_cispo_equals_hand_computed_values():
    # weights clip(0.5, 1, 10) = 0.8, 1, 1.2; -w A log pi: 0.8 * 1.693147, -1 * 1, -1.2 * 4 * 0.697415
    loss, diagnostics = cispo(importance_ratio(NEW, OLD, None), NEW, A, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(loss, torch.tensor([1.354518, -1.0, -3.347592]), **CLOSE)
    assert diagnostics["clip_fraction"].tolist() == [1, 0, 1]


def test_cispo_with_a_mask_drops_the_tokens_that_ppo_would_clip():
    # A = -1 at weight 0.5 < 0.8 and A = 4 at weight 10 > 1.2 are masked; a bound on the other side masks
    # nothing
    ratio = importance_ratio(NEW, OLD, None)
    loss, diagnostics = cispo(ratio, NEW, -A, clip_low=0.2, clip_high=0.2, mask=True)
    torch.testing.assert_close(loss, torch.tensor([0.0, 1.0, 0.0]), **CLOSE)
    assert diagnostics["clip_fraction"].tolist() == [1, 0, 1]
    unmasked, _ = cispo(ratio, NEW, A, clip_low=0.2, clip_high=0.2, mask=True)
    torch.testing.assert_close(unmasked, torch.tensor([1.354518, -1.0, -3.347592]), **CLOSE)


def test_cispo_with_bounds_1_and_0_truncates_the_ratio_at_1():
    # weights 0.5, 1, 1: 0.5 * 1.693147, -1, -4 * 0.697415
    loss, _ = cispo(importance_ratio(NEW, OLD, None), NEW, A, clip_low=1.0, clip_high=0.0)
    torch.testing.assert_close(loss, torch.tensor([0.846574, -1.0, -2.789660]), **CLOSE)


def test_sapo_equals_hand_computed_values():
    ratio, advantages = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([1.0, 1.0, -2.0])
    # -1 * 4/1 * sigmoid(0) = -2;  -1 * 4/1 * sigmoid(1) = -4 * 0.731059;  2 * 4/2 * sigmoid(2 * -0.5) = 4 * 0.268941
    loss, _ = sapo(ratio, advantages, tau_positive=1.0, tau_negative=2.0)
    torch.testing.assert_close(loss, torch.tensor([-2.0, -2.924234, 1.075766]), **CLOSE)


def test_gmpo_is_the_geometric_mean_of_clipped_ratios_of_a_sequence():
    # log-ratios 0.6, 0.2 (A = 2) and -0.5, 0.1, -0.3 (A = -1), bounds of 0.4: means (0.4 + 0.2) / 2 = 0.3 and
    # (-0.4 + 0.1 - 0.3) / 3 = -0.2: losses -2 exp(0.3) = -2.699718 and exp(-0.2) = 0.818731
    logprobs = torch.tensor([0.6, 0.2, -0.5, 0.1, -0.3], requires_grad=True)
    sequences = segments(torch.ones(5, dtype=torch.bool), torch.tensor([0, 0, 1, 1, 1]))
    advantages = torch.tensor([2.0, 2.0, -1.0, -1.0, -1.0])
    loss, diagnostics = gmpo(logprobs, torch.zeros(5), advantages, sequences, clip_low=0.4, clip_high=0.4)
    torch.testing.assert_close(loss, torch.tensor([-2.699718] * 2 + [0.818731] * 3), **CLOSE)
    assert diagnostics["clip_fraction"].tolist() == [1, 0, 1, 0, 0]
    loss.sum().backward()  # of the unclipped tokens
    torch.testing.assert_close(
        logprobs.grad, torch.tensor([0.0, -2.699718, 0.0, 0.818731, 0.818731]), **CLOSE
    )


def test_vespo_equals_hand_computed_values():
    ratio, advantages = torch.tensor([1.0, 2.0, 2.0, 0.5]), torch.tensor([1.0, 1.0, -1.0, -2.0])
    logprobs = torch.tensor([-1.0, -0.5, -0.5, -2.0], requires_grad=True)
    # phi: 1; 2^2 exp(-3) = 0.199148; 2^3 exp(-2) = 1.082682; 0.5^3 exp(1) = 0.339785. loss = -phi A log pi
    loss, _ = vespo(ratio, logprobs, advantages)
    torch.testing.assert_close(loss, torch.tensor([1.0, 0.099574, -0.541341, -1.359141]), **CLOSE)
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.0, -0.199148, 1.082682, 0.679570]), **CLOSE)


def test_sequence_mask_drops_bad_sequences_that_became_unlikely():
    # Two sequences of two tokens, mean gaps (0.9 + 0.3) / 2 = 0.6 and (0.1 + 0.7) / 2 = 0.4; and a good one, 1.0.
    old = torch.full((5,), -1.0)
    new = old - torch.tensor([0.9, 0.3, 0.1, 0.7, 1.0])
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0])
    over = segments(torch.ones(5, dtype=torch.bool), torch.tensor([0, 0, 1, 1, 2]))
    ratio = importance_ratio(new, old, None)
    loss, diagnostics = sequence_mask(ratio, new, old, advantages, over, max_gap=0.5)
    # exp(-0.1) = 0.904837, within the clip; exp(-0.7) = 0.497 clipped to 0.8; exp(-1) = 0.367879 for A = 1
    torch.testing.assert_close(loss, torch.tensor([0.0, 0.0, 0.904837, 0.8, -0.367879]), **CLOSE)
    assert diagnostics["masked_fraction"].tolist() == [1, 1, 0, 0, 0]
    loss, diagnostics = sequence_mask(ratio, new, old, advantages, over, max_gap=0.7)
    torch.testing.assert_close(loss[:2], torch.tensor([0.8, 0.8]), **CLOSE)
    assert not diagnostics["masked_fraction"].any()


def test_topr_equals_hand_computed_values():
    ratio, logprobs = torch.tensor([3.0, 0.5, 4.0]), torch.tensor([-0.5, -2.0, -1.0])
    advantages = torch.tensor([2.0, -1.0, -1.0])
    # the good token ignores its ratio: 2 * 0.5; bad ones: -0.5 * 2 and -min(4, 1) * 1
    loss, diagnostics = topr(ratio, logprobs, advantages, positive_weight=1.0, negative_weight=1.0)
    torch.testing.assert_close(loss, torch.tensor([1.0, -1.0, -1.0]), **CLOSE)
    assert diagnostics["clip_fraction"].tolist() == [0, 0, 1]
    loss, _ = topr(ratio, logprobs, advantages, positive_weight=0.5, negative_weight=2.0)
    torch.testing.assert_close(loss, torch.tensor([0.5, -2.0, -2.0]), **CLOSE)


def test_clip_cov_is_ppo_but_for_the_chosen_tokens():
    is_chosen = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0])
    loss, diagnostics = clip_cov(RATIOS, ADVANTAGES, is_chosen, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(loss, torch.tensor([-1.2, 0.0, 0.0, 0.8, 3.0]), **CLOSE)
    assert diagnostics["clip_fraction"].tolist() == [1, 0, 0, 1, 0]
    assert diagnostics["chosen_fraction"].tolist() == [0, 1, 1, 0, 0]


def test_kl_cov_adds_the_distance_of_the_chosen_tokens_to_an_unclipped_surrogate():
    # -rho A: -0.5, 1, 40; 0.1 |log-ratio| of the first and the last: 0.0693147, 0.2302585
    ratio, is_chosen = importance_ratio(NEW, OLD, None), torch.tensor([1.0, 0.0, 1.0])
    loss, _ = kl_cov(ratio, NEW, OLD, A, is_chosen, cov_coef=0.1)
    torch.testing.assert_close(
        loss, torch.tensor([-0.430685, 1.0, 40.230259]), atol=1e-4, rtol=0
    )  # 40: six digits


@pytest.mark.parametrize(
    ("divergence", "bound", "is_left_out"),
    [
        # |p - q|: 0.2, 0.2, 0.02, 0.3, 0.3
        ("tv", 0.15, [1, 0, 0, 0, 1]),
        ("tv", 0.25, [0, 0, 0, 0, 1]),
        ("tv", 0.35, [0, 0, 0, 0, 0]),
        # q ln(q/p) + (1-q) ln((1-q)/(1-p)):
        # 0.3 ln 0.6 + 0.7 ln 1.4 = 0.082283 for the first two, 0.01 ln(1/3) + 0.99 ln(0.99/0.97) = 0.009220,
        # 0.5 ln 0.625 + 0.5 ln 2.5 = 0.223144, 0.8 ln 1.6 + 0.2 ln 0.4 = 0.192745
        ("kl", 0.08, [1, 0, 0, 0, 1]),
        ("kl", 0.09, [0, 0, 0, 0, 1]),
        ("kl", 0.0092, [1, 0, 1, 0, 1]),
        ("kl", 0.2, [0, 0, 0, 0, 0]),
    ],
)
def test_dppo_masks_tokens_that_leave_the_trust_region(divergence, bound, is_left_out):
    # a good token that rose; a bad one that rose and comes back; a rare good one that trebled, and so moved
    # little; a bad one that rose; a bad one that fell
    old, new = torch.tensor([0.3, 0.3, 0.01, 0.5, 0.8]), torch.tensor([0.5, 0.5, 0.03, 0.8, 0.5])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    loss, diagnostics = dppo(
        new / old,
        new.log(),
        old.log(),
        advantages,
        divergence=divergence,
        clip_low=bound,
        clip_high=bound,
    )
    # -rho A: -5/3, 5/3, -3, 8/5, 5/8
    expected = torch.tensor([-1.666667, 1.666667, -3.0, 1.6, 0.625]) * (1 - torch.tensor(is_left_out))
    torch.testing.assert_close(loss, expected, **CLOSE)
    assert diagnostics["clip_fraction"].tolist() == is_left_out


def test_dppo_has_a_bound_for_each_direction():
    new, old, advantages = torch.tensor([0.5, 0.3]), torch.tensor([0.3, 0.5]), torch.tensor([1.0, -1.0])
    for low, high, is_left_out in ((0.1, 0.3, [0, 1]), (0.3, 0.1, [1, 0])):
        _, diagnostics = dppo(
            new / old, new.log(), old.log(), advantages, divergence="tv", clip_low=low, clip_high=high
        )
        assert diagnostics["clip_fraction"].tolist() == is_left_out


def test_policy_gradient_equals_hand_computed_values():
    loss, _ = policy_gradient(torch.tensor([-0.5, -2.0]), torch.tensor([3.0, -1.0]))
    assert loss.tolist() == [1.5, -2.0]


def test_cross_entropy_is_the_negative_log_prob():
    loss, _ = cross_entropy(torch.tensor([-0.5, -2.0]))
    assert loss.tolist() == [0.5, 2.0]


# Two rows of a prompt token and answers; the second row has two turns, with one token of the environment
# between.
#   row              0     0     0     1      1      1     1     1
#   mask             -     x     x     -      x      x     -     x
#   log-ratio        9    0.1   0.3    9    -0.2   -0.4    9    0.9
LOG_RATIO = torch.tensor([9.0, 0.1, 0.3, 9.0, -0.2, -0.4, 9.0, 0.9])
MASK = torch.tensor([False, True, True, False, True, True, False, True])
ROW = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
DECISION = torch.tensor([-1, 0, 0, -1, 1, 1, -1, 2])


@pytest.mark.parametrize(
    ("index", "mean_log_ratio"),
    [
        # row 0: 0.4 / 2; row 1: 0.3 / 3
        (ROW, [0.2, 0.2, 0.1, 0.1, 0.1]),
        # the turns of row 1: -0.6 / 2 and 0.9
        (DECISION, [0.2, 0.2, -0.3, -0.3, 0.9]),
    ],
    ids=["sequences", "turns"],
)
def test_the_ratio_of_a_segment_is_the_geometric_mean_of_its_tokens(index, mean_log_ratio):
    ratio = importance_ratio(LOG_RATIO, torch.zeros(8), segments(MASK, index))
    torch.testing.assert_close(ratio[MASK], torch.tensor(mean_log_ratio).exp(), **CLOSE)


def test_the_ratio_of_a_token_is_its_own():
    ratio = importance_ratio(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0 - math.log(2.0)]), None)
    torch.testing.assert_close(ratio, torch.tensor([1.0, 2.0]), **CLOSE)


def test_value_loss_equals_hand_computed_values():
    values, old, returns = torch.tensor([2.0, 0.5, 3.0]), torch.ones(3), torch.tensor([3.0, 1.0, 0.0])
    # plain: (2 - 3)^2 / 2, (0.5 - 1)^2 / 2, 3^2 / 2
    assert value_loss(values, old, returns, clip=None).tolist() == [0.5, 0.125, 4.5]
    # kept within 0.5 of 1: 1.5, 0.5, 1.5; their losses 1.5^2 / 2, 0.125, 1.5^2 / 2; the larger ones
    assert value_loss(values, old, returns, clip=0.5).tolist() == [1.125, 0.125, 4.5]


def test_huber_value_loss_equals_hand_computed_values():
    values, old, returns = torch.tensor([2.0, 0.5, 3.0]), torch.ones(3), torch.tensor([3.0, 1.0, 0.0])
    # errors -1, -0.5, 3 with d = 0.75: 0.75 - 0.75^2 / 2, 0.5^2 / 2, 2.25 - 0.75^2 / 2
    huber = value_loss(values, old, returns, clip=None, huber_delta=0.75)
    assert huber.tolist() == [0.46875, 0.125, 1.96875]
    # kept within 0.5 of 1 the errors are -1.5, -0.5, 1.5: 1.125 - 0.28125 in place of 0.46875
    clipped = value_loss(values, old, returns, clip=0.5, huber_delta=0.75)
    assert clipped.tolist() == [0.84375, 0.125, 1.96875]


@pytest.mark.parametrize("huber_delta", [None, 0.75])
def test_bounds_of_the_value_loss_are_in_units_of_the_deviation(huber_delta):
    values, old, returns = torch.tensor([2.0, 0.5, 3.0]), torch.ones(3), torch.tensor([3.0, 1.0, 0.0])
    plain = value_loss(values, old, returns, clip=0.5, huber_delta=huber_delta)
    moved = [x * 64.0 + 100.0 for x in (values, old, returns)]  # exact in float32
    deviation = torch.full((3,), 64.0)
    scaled = value_loss(*moved, clip=0.5, huber_delta=huber_delta, deviation=deviation)
    assert (scaled / 64.0**2).tolist() == plain.tolist()


def test_masked_is_equals_hand_computed_values():
    # ratios 0.5, 1, 10: only 1 is within (0.8, 1.2); -w A log pi = 1 * -1
    loss, diagnostics = masked_is(importance_ratio(NEW, OLD, None), NEW, A, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(loss, torch.tensor([0.0, -1.0, 0.0]), **CLOSE)
    assert diagnostics["clip_fraction"].tolist() == [1, 0, 1]


def test_importance_sampling_equals_hand_computed_values():
    # -rho A: -0.5, 1, 40
    loss, _ = importance_sampling(importance_ratio(NEW, OLD, None), A)
    torch.testing.assert_close(loss, torch.tensor([-0.5, 1.0, 40.0]), rtol=1e-5, atol=0)  # exp in float32


def test_kimi_equals_hand_computed_values():
    # moved by ln 1/2, 0, ln 10: penalties 0.05 * (0.480453, 0, 5.301898); -A log pi: 1.693147, -1, -2.789660
    loss, diagnostics = kimi(NEW, OLD, A, tau=0.1)
    torch.testing.assert_close(loss, torch.tensor([1.717170, -1.0, -2.524565]), **CLOSE)
    torch.testing.assert_close(diagnostics["penalty"], torch.tensor([0.024023, 0.0, 0.265095]), **CLOSE)


def test_the_product_ratio_of_a_segment_is_that_of_its_probabilities():
    row = segments(torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long))
    logprobs = NEW.clone().requires_grad_()
    ratio = importance_ratio(logprobs, OLD, row, is_product=True)
    torch.testing.assert_close(ratio.detach(), torch.full((3,), 5.0), rtol=1e-5, atol=0)  # 1/2 * 1 * 10
    (gradient,) = torch.autograd.grad(ratio.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.full((3,), 5.0), rtol=1e-5, atol=0)  # each token its own


def test_log_ratios_are_clamped_before_the_ratio_and_have_no_gradient_beyond():
    logprobs = NEW.clone().requires_grad_()
    # ln 1/2 = -0.69 and ln 10 = 2.30 are clamped to -0.5 and 1
    ratio = importance_ratio(logprobs, OLD, None, log_min=-0.5, log_max=1.0)
    torch.testing.assert_close(ratio.detach(), torch.tensor([0.606531, 1.0, 2.718282]), **CLOSE)
    (gradient,) = torch.autograd.grad(ratio.sum(), logprobs)
    assert gradient.tolist() == [0.0, 1.0, 0.0]
