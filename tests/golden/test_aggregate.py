"""Every reduction against numbers worked out by hand."""

import pytest
import torch

from braid.algorithms.aggregate import aggregate, row_weights, turn_factors
from braid.algorithms.segments import segments

# Row  prompt  losses of policy tokens   sum   tokens
#  0     7     4                           4     1
#  1     7     1 2 3                       6     3
#  2     9     4 6                        10     2
#  3     9     -                           -     0      counts nowhere
#  4     2     -                           -     0      nor does its prompt
LOSSES = [[4.0], [1.0, 2.0, 3.0], [4.0, 6.0], [], []]
PROMPTS = [7, 7, 9, 9, 2]
EXPECTED = {
    # all 20 over 6 tokens
    "token_mean": 20 / 6,
    # row means 4, 2, 5 over 3 rows
    "sequence_mean_token_mean": 11 / 3,
    # row sums 4, 6, 10 over 3 rows
    "sequence_mean_token_sum": 20 / 3,
    # the same, over a length of 8
    "token_sum_constant": 20 / 24,
    # prompt 7: (4 + 6) / 4 = 2.5, prompt 9: 10 / 2 = 5, over 2 prompts
    "prompt_mean": 3.75,
}


@pytest.mark.parametrize("mode", EXPECTED)
def test_reductions_equal_hand_computed_values(mode):
    counts = [len(row) for row in LOSSES]
    weights = row_weights(counts, PROMPTS, mode=mode, constant=8.0)
    values = torch.tensor([loss for row in LOSSES for loss in row])
    per_position = torch.repeat_interleave(torch.tensor(weights), torch.tensor(counts))
    total = aggregate(values, torch.ones(6, dtype=torch.bool), per_position)
    torch.testing.assert_close(total, torch.tensor(EXPECTED[mode]), atol=1e-6, rtol=0)  # float32 sums of six


def test_weights_equal_hand_computed_values():
    counts = [len(row) for row in LOSSES]
    assert row_weights(counts, PROMPTS, mode="token_mean", constant=None) == [1 / 6, 1 / 6, 1 / 6, 0, 0]
    assert row_weights(counts, PROMPTS, mode="sequence_mean_token_mean", constant=None) == [
        1 / 3,
        1 / 9,
        1 / 6,
        0,
        0,
    ]
    assert row_weights(counts, PROMPTS, mode="sequence_mean_token_sum", constant=None) == [
        1 / 3,
        1 / 3,
        1 / 3,
        0,
        0,
    ]
    assert row_weights(counts, PROMPTS, mode="token_sum_constant", constant=8.0) == [
        1 / 24,
        1 / 24,
        1 / 24,
        0,
        0,
    ]
    assert row_weights(counts, PROMPTS, mode="prompt_mean", constant=None) == [1 / 8, 1 / 8, 1 / 4, 0, 0]


@pytest.mark.parametrize(
    ("losses", "mode", "expected"),
    [
        # two prompts of one row each: 6 and 10 over 3 and 2 tokens
        ([[1.0, 2.0, 3.0], [4.0, 6.0]], "token_mean", 3.2),  # 16 / 5
        ([[1.0, 2.0, 3.0], [4.0, 6.0]], "sequence_mean_token_sum", 8.0),  # 16 / 2
        ([[1.0, 2.0, 3.0], [4.0, 6.0]], "sequence_mean_token_mean", 3.5),  # (2 + 5) / 2
        # ROLL's seq-mean-token-sum-norm, 16 / 4, is over the longest row only; here it is over the rows as well
        ([[1.0, 2.0, 3.0], [4.0, 6.0]], "token_sum_constant", 2.0),  # 16 / (2 * 4)
        ([[1.0, 2.0], [4.0, 5.0, 6.0]], "token_mean", 3.6),  # 18 / 5
        ([[1.0, 2.0], [3.0]], "sequence_mean_token_mean", 2.25),  # (1.5 + 3) / 2
        ([[2.0, 3.0], [9.0]], "token_sum_constant", 1.75),  # 14 / (2 * 4)
    ],
)
def test_reductions_of_two_rows_equal_hand_computed_values(losses, mode, expected):
    counts = [len(row) for row in losses]
    weights = row_weights(counts, [0, 1], mode=mode, constant=4.0)
    per_position = torch.repeat_interleave(torch.tensor(weights), torch.tensor(counts))
    values = torch.tensor([loss for row in losses for loss in row])
    total = aggregate(values, torch.ones(len(values), dtype=torch.bool), per_position)
    torch.testing.assert_close(total, torch.tensor(expected), atol=1e-6, rtol=0)  # float32 sums of five


def test_turn_factors_let_the_turns_of_a_row_count_alike():
    # Row 0: turns of 1 and 3 tokens, so 4 / (2 * 1) and 4 / (2 * 3). Row 1: one turn of 2 tokens, 2 / (1 * 2).
    mask = torch.tensor([False, True, False, True, True, True, False, True, True])
    row = torch.tensor([0] * 6 + [1] * 3)
    decision = torch.tensor([-1, 0, -1, 1, 1, 1, -1, 2, 2])
    factors = turn_factors(segments(mask, decision), segments(mask, row))
    expected = torch.tensor([2.0, 2 / 3, 2 / 3, 2 / 3, 1.0, 1.0])
    torch.testing.assert_close(factors[mask], expected, atol=1e-6, rtol=0)  # float32
