"""Off-policy corrections and the selection of tokens by covariance, against numbers worked out by hand."""

import pytest
import torch

from braid.algorithms.corrections import correction_factor, proximal_logprobs, sampling_weight
from braid.algorithms.covariance import choose_greatest, choose_within, covariances
from braid.algorithms.segments import segments

CLOSE = {"atol": 1e-6, "rtol": 0}  # exp in float32; expectations are given to six digits

# One row of three tokens: log pi_old - log mu = 0.2, 0, -0.1
OLD, BEHAVIOR = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.2, -1.0, -0.9])
ONE_ROW = segments(torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long))
# The same row, where the environment said the second token.
TWO_TURNS = segments(torch.tensor([True, False, True]), torch.tensor([0, -1, 1]))


@pytest.mark.parametrize(
    ("level", "over", "expected"),
    [
        ("token", None, [1.221403, 1.0, 0.904837]),
        ("sequence", ONE_ROW, [1.105171] * 3),  # exp(0.1)
        ("geometric", ONE_ROW, [1.033895] * 3),  # exp(0.1 / 3)
        ("turn", ONE_ROW, [1.105171] * 3),
        ("turn_geometric", ONE_ROW, [1.033895] * 3),
    ],
)
def test_weights_equal_hand_computed_values(level, over, expected):
    torch.testing.assert_close(
        sampling_weight(OLD, BEHAVIOR, over, level=level), torch.tensor(expected), **CLOSE
    )


def test_each_turn_has_its_own_weight():
    weight = sampling_weight(OLD, BEHAVIOR, TWO_TURNS, level="turn")
    torch.testing.assert_close(weight[[0, 2]], torch.tensor([1.221403, 0.904837]), **CLOSE)


def test_the_proximal_policy_lies_between_sampler_and_policy_by_the_age_of_the_weights():
    logprobs, behavior = torch.full((5,), -1.0, requires_grad=True), torch.full((5,), -2.0)
    # in training: version 5, so before the update: 4; a = (4 - v) / (5 - v), and 0 where v is 4 or later
    versions = torch.tensor([2.0, 3.0, 4.0, 5.0, 1.0])
    proximal = proximal_logprobs(logprobs, behavior, versions, version=5)
    torch.testing.assert_close(proximal, torch.tensor([-1.333333, -1.5, -2.0, -2.0, -1.25]), **CLOSE)
    assert not proximal.requires_grad


def test_truncation_bounds_the_weight():
    weight = sampling_weight(OLD, BEHAVIOR, None, level="token")
    factor, is_outside = correction_factor(weight, mode="truncate", low=0.0, high=1.2)
    torch.testing.assert_close(factor, torch.tensor([1.2, 1.0, 0.904837]), **CLOSE)
    assert is_outside.tolist() == [True, False, False]
    factor, is_outside = correction_factor(weight, mode="truncate", low=0.95, high=2.0)
    torch.testing.assert_close(factor, torch.tensor([1.221403, 1.0, 0.95]), **CLOSE)
    assert is_outside.tolist() == [False, False, True]


def test_truncation_at_2_of_tokens_and_of_the_sequence():
    old, behavior = torch.tensor([-1.0, -1.5, -0.5]), torch.tensor([-1.5, -1.0, -1.5])
    # differences 0.5, -0.5, 1: e^0.5, e^-0.5, e cut off at 2; their sum is 1
    token = sampling_weight(old, behavior, None, level="token")
    factor, _ = correction_factor(token, mode="truncate", low=0.0, high=2.0)
    torch.testing.assert_close(factor, torch.tensor([1.648721, 0.606531, 2.0]), **CLOSE)
    sequence = sampling_weight(old, behavior, ONE_ROW, level="sequence")
    factor, _ = correction_factor(sequence, mode="truncate", low=0.0, high=5.0)
    torch.testing.assert_close(factor, torch.full((3,), 2.718282), **CLOSE)


def test_without_an_upper_bound_nothing_is_too_large():
    weight = torch.tensor([0.4, 1.0, 1e8])
    factor, is_outside = correction_factor(weight, mode="truncate", low=0.5, high=None)
    assert factor.tolist() == [0.5, 1.0, 1e8]
    assert is_outside.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("level", "over", "expected"),
    [
        # e^-1 - e^-1.2, 0, e^-1 - e^-0.9
        ("token", None, [0.066685, 0.0, -0.038690]),
        ("sequence", ONE_ROW, [0.027995] * 3),
        ("geometric", ONE_ROW, [0.009332] * 3),
    ],
)
def test_differences_of_probabilities_equal_hand_computed_values(level, over, expected):
    weight = sampling_weight(OLD, BEHAVIOR, over, level=level, measure="difference")
    torch.testing.assert_close(weight, torch.tensor(expected), **CLOSE)


def test_a_weight_over_the_kept_tokens_ignores_the_others():
    kept = ONE_ROW.within(torch.tensor([False, True, True]))
    # of 0.2, 0, -0.1 the last two: their mean is -0.05, their sum -0.1
    weight = sampling_weight(OLD, BEHAVIOR, kept, level="geometric")
    torch.testing.assert_close(weight, torch.full((3,), 0.951229), **CLOSE)
    weight = sampling_weight(OLD, BEHAVIOR, kept, level="sequence")
    torch.testing.assert_close(weight, torch.full((3,), 0.904837), **CLOSE)
    # of no token at all: e^0
    nothing = ONE_ROW.within(torch.zeros(3, dtype=torch.bool))
    assert sampling_weight(OLD, BEHAVIOR, nothing, level="geometric").tolist() == [1.0, 1.0, 1.0]


def test_one_token_beyond_the_bounds_masks_only_its_sequence():
    rows = segments(torch.tensor([True, True, False, True]), torch.tensor([0, 0, 1, 1]))
    weight = torch.tensor([1.0, 2.1, 9.0, 1.0])  # the 9 is no token of the policy
    factor, is_outside = correction_factor(weight, mode="mask_sequence", low=0.5, high=2.0, sequences=rows)
    assert factor.tolist() == [0, 0, 1, 1]
    assert is_outside.tolist() == [True, True, False, False]


def test_a_mask_excludes_values_beyond_its_bounds():
    weight = torch.tensor([0.4, 0.5, 1.0, 2.0, 2.1])
    factor, is_outside = correction_factor(weight, mode="mask", low=0.5, high=2.0)
    assert factor.tolist() == [0, 1, 1, 1, 0]
    assert is_outside.tolist() == [True, False, False, False, True]


def test_covariances_equal_hand_computed_values():
    # means 1 and -2: (2, 0, -2) times (1.5, 0.5, -2)
    result = covariances(torch.tensor([3.0, 1.0, -1.0]), torch.tensor([-0.5, -1.5, -4.0]))
    assert result.tolist() == [3.0, 0.0, 4.0]


def test_clip_covs_choice_is_among_the_tokens_between_its_bounds():
    together = torch.tensor([3.0, 0.0, 4.0, 1.0, 2.0, 6.0]).double()
    priorities = torch.tensor([0.9, 0.1, 0.2, 0.3, 0.5, 0.0]).double()
    # strictly between 1 and 5: tokens 0, 2, 4; half of six tokens is three
    chosen = choose_within(together, priorities, fraction=0.5, low=1.0, high=5.0)
    assert chosen.tolist() == [True, False, True, False, True, False]
    # a third is two: those of the lowest priority
    chosen = choose_within(together, priorities, fraction=0.34, low=1.0, high=5.0)
    assert chosen.tolist() == [False, False, True, False, True, False]


def test_kl_covs_choice_is_the_greatest_covariances():
    together = torch.tensor([3.0, 0.0, 4.0, 4.0, 2.0]).double()
    priorities = torch.tensor([0.1, 0.2, 0.9, 0.3, 0.4]).double()
    # one of five: of the two equal ones that of lower priority; then both
    assert choose_greatest(together, priorities, fraction=0.2).tolist() == [False, False, False, True, False]
    assert choose_greatest(together, priorities, fraction=0.4).tolist() == [False, False, True, True, False]


@pytest.mark.parametrize(("fraction", "num"), [(0.0, 0), (0.001, 1), (0.2, 1), (0.39, 1), (0.4, 2), (1.0, 5)])
def test_the_share_of_tokens_is_rounded_down_to_at_least_one(fraction, num):
    together, priorities = torch.arange(5.0).double(), torch.arange(5.0).double()
    assert choose_greatest(together, priorities, fraction=fraction).sum() == num
    assert choose_within(together, priorities, fraction=fraction, low=-1.0, high=9.0).sum() == num
