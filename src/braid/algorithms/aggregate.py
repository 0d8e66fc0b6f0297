"""Loss reduction: from per-token losses to a scalar, independent of how a step is split into micro-batches.

Owns the reductions. In every mode all positions of a row share one weight, so that

    loss = sum over rows b and their positions t of  w_b * m_t * l_t        m mask, l per-token loss

`row_weights` computes w over the whole optimizer step before the first forward pass; `aggregate` sums one
micro-batch. The partial losses of the micro-batches sum to the loss, and their gradients to its gradient, for
any split, order or number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from braid.types import Aggregation


def row_weights(
    token_counts: Sequence[int],
    groups: Sequence[int],
    *,
    mode: Aggregation,
    constant: float | None,
    agents: Sequence[tuple[int, int]] = (),
) -> list[float]:
    """The loss weight of each row's positions in one optimizer step, one per row.

    A row has `token_counts` policy positions; `groups` is the id of its prompt, `agents` its trajectory and
    its agent within that (default: each row is a trajectory). What has no tokens weighs 0 and is not counted.
    With N tokens and B trajectories in the step, n_b tokens in a trajectory, P prompts, A_b agents:

        token_mean                1 / N               equal weight per token (DAPO, arXiv 2503.14476)
        sequence_mean_token_mean  1 / (B n_b)         equal weight per trajectory (GRPO, arXiv 2402.03300)
        sequence_mean_token_sum   1 / B               the gradient of the mean return, unscaled
        token_sum_constant        1 / (B constant)    the same over a constant (Dr. GRPO, arXiv 2503.20783)
        prompt_mean               1 / (P n_prompt)    equal weight per prompt, and per token within it
        agent_mean_token_mean     1 / (B A_b n_agent) equal weight per trajectory, per agent, and per token

    Where turns count (Recipe.counts_decisions), `token_counts` and every n are numbers of turns, and the loss
    of a token is also divided by the number of tokens of its turn.

    RLinf averages the means of micro-batches, so its token mean depends on the split, and it divides by zero
    on a row without tokens. Its loss_scales, with each turn a row and the mean over tokens: group_level is
    sequence_mean_token_sum of turns, with agent_level it is agent_mean_token_mean of turns, and with
    turn_level too that of tokens; they scale the surrogate only. ROLL counts over the step but leaves the
    mask out of token_mean's numerator. SkyRL scales the advantages instead, so losses that depend on the
    advantages see scaled ones, and it weighs KL and entropy differently; here all terms share one weight.
    """
    agents = agents or [(row, 0) for row in range(len(groups))]
    of_group: Counter[int] = Counter()
    of_trajectory: Counter[int] = Counter()
    of_agent: Counter[tuple[int, int]] = Counter()
    for count, group, agent in zip(token_counts, groups, agents, strict=True):
        of_group[group] += count
        of_trajectory[agent[0]] += count
        of_agent[agent] += count
    num_agents = Counter(trajectory for (trajectory, _), count in of_agent.items() if count)
    num_trajectories = len(num_agents)
    num_prompts = sum(count > 0 for count in of_group.values())
    num_tokens = sum(token_counts)

    def weight(count: int, group: int, agent: tuple[int, int]) -> float:
        if count == 0:
            return 0.0
        match mode:
            case "token_mean":
                return 1.0 / num_tokens
            case "sequence_mean_token_mean":
                return 1.0 / (num_trajectories * of_trajectory[agent[0]])
            case "sequence_mean_token_sum":
                return 1.0 / num_trajectories
            case "token_sum_constant":
                if constant is None:
                    raise ValueError("mode=token_sum_constant needs `constant`, the divisor of all sums")
                return 1.0 / (num_trajectories * constant)
            case "prompt_mean":
                return 1.0 / (num_prompts * of_group[group])
            case "agent_mean_token_mean":
                return 1.0 / (num_trajectories * num_agents[agent[0]] * of_agent[agent])

    return [weight(*row) for row in zip(token_counts, groups, agents, strict=True)]


def aggregate(
    values: Float[Tensor, "T"], mask: Bool[Tensor, "T"], weights: Float[Tensor, "T"]
) -> Float[Tensor, ""]:
    """sum_t weights_t * mask_t * values_t: the micro-batch's contribution to the step's loss.

    `weights` holds each position's row weight. `values` is not read outside the mask: a NaN there affects
    neither the sum nor the gradient.
    """
    return (torch.where(mask, values, 0.0) * weights).sum()
