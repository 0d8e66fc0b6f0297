"""Every reduction against numbers worked out by hand."""

import math

import pytest
import torch

from braid.algorithms.aggregate import aggregate, row_weights

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
    # each row is a trajectory of one agent
    "agent_mean_token_mean": 11 / 3,
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
        # ROLL's seq-mean-token-sum-norm, 16 / 4, is over the longest row only; here it is over the rows as
        # well
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


# Row  trajectory  agent  turns of           tokens
#  0       0         0    1 and 3 tokens       4
#  1       0         1    2                    2
#  2       0         0    2 (a new context)    2
#  3       1         0    3                    3
#  4       1         1    none                 0
OF_AGENTS = [(0, 0), (0, 1), (0, 0), (1, 0), (1, 1)]
TURNS = [[1, 3], [2], [2], [3], []]


@pytest.mark.parametrize(
    ("mode", "counts_turns", "expected"),
    [
        # trajectory 0: agent 0 has 6 tokens, agent 1 has 2; the agent without tokens does not count
        ("agent_mean_token_mean", False, [1 / 24, 1 / 8, 1 / 24, 1 / 6, 0]),
        # agent 0 has 3 turns
        ("agent_mean_token_mean", True, [1 / 12, 1 / 4, 1 / 12, 1 / 2, 0]),
        # trajectory 0 has 8 tokens, in 4 turns
        ("sequence_mean_token_mean", False, [1 / 16, 1 / 16, 1 / 16, 1 / 6, 0]),
        ("sequence_mean_token_mean", True, [1 / 8, 1 / 8, 1 / 8, 1 / 2, 0]),
        ("sequence_mean_token_sum", True, [1 / 2, 1 / 2, 1 / 2, 1 / 2, 0]),
        ("token_sum_constant", False, [1 / 20, 1 / 20, 1 / 20, 1 / 20, 0]),
    ],
)
def test_rows_of_several_agents_share_the_weight_of_their_trajectory(mode, counts_turns, expected):
    counts = [len(turns) if counts_turns else sum(turns) for turns in TURNS]
    weights = row_weights(counts, [0] * 5, mode=mode, constant=10.0, agents=OF_AGENTS)
    assert weights == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("levels", "mode", "counts_turns"),
    [
        (1, "sequence_mean_token_sum", True),
        (2, "agent_mean_token_mean", True),
        (3, "agent_mean_token_mean", False),
    ],
)
def test_weights_of_tokens_are_those_of_rlinfs_loss_scales(levels, mode, counts_turns):
    """RLinf's rows are turns, of which it takes the mean over tokens, then over all K = 5 turns. It scales a
    turn by K / B (group_level), 1 / (A K_agent) (agent_level) and K_agent n / n_agent (turn_level)."""
    counts = [len(turns) if counts_turns else sum(turns) for turns in TURNS]
    weights = row_weights(counts, [0] * 5, mode=mode, constant=None, agents=OF_AGENTS)
    agents = {(0, 0): (2, 3, 6), (0, 1): (2, 1, 2), (1, 0): (1, 1, 3)}  # A, K_agent, n_agent
    for agent, turns, weight in zip(OF_AGENTS, TURNS, weights, strict=True):
        for n in turns:
            num_agents, num_turns, num_tokens = agents[agent]
            scales = (5 / 2, 1 / (num_agents * num_turns), num_turns * n / num_tokens)
            theirs = math.prod(scales[:levels]) / (5 * n)
            assert weight / (n if counts_turns else 1) == pytest.approx(theirs, rel=1e-15)
