"""From per-token losses to one number, the same however a step is cut into micro-batches.

Owns the reductions. In every mode all positions of a row share one weight, so that

    loss = sum over the step's rows b, positions t of  w_b * m_t * l_t        (m: mask, l: per-token loss)

`row_weights` counts w over the whole optimizer step before the first forward pass; `aggregate` sums one micro-batch. The
shares of the micro-batches add up to the loss and their gradients to its gradient, whatever the cut, order or rank.
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
) -> list[float]:
    """The weight [B] of each row's positions in the loss of one optimizer step.

    `token_counts[b]` = n_b positions that the policy wrote in row b, `groups[b]` numbers its prompt. A row without tokens
    weighs 0 and is not counted; with B rows, N = sum n_b tokens and P prompts that do have tokens:

        token_mean                1 / N                  every token counts alike (DAPO, arXiv 2503.14476)
        sequence_mean_token_mean  1 / (B n_b)            every answer counts alike (GRPO, arXiv 2402.03300)
        sequence_mean_token_sum   1 / B                  the policy gradient of the mean return
        token_sum_constant        1 / (B constant)       the same, scaled by a fixed length (Dr. GRPO, arXiv 2503.20783)
        prompt_mean               1 / (P N_group(b))     every prompt counts alike, and tokens within it

    Where others differ: RLinf averages micro-batch means, so its token-mean depends on the cut, and divides by zero on a row
    without tokens. ROLL counts over the global mini-batch but leaves the mask out of token-mean's numerator. SkyRL scales
    the advantages by these weights, so losses that look at advantages see scaled ones, and weighs KL and entropy otherwise
    than the policy term; here one weight serves all three.
    """
    tokens_of_group: Counter[int] = Counter()
    for count, group in zip(token_counts, groups, strict=True):
        tokens_of_group[group] += count
    num_rows = sum(count > 0 for count in token_counts)
    num_prompts = sum(count > 0 for count in tokens_of_group.values())
    num_tokens = sum(token_counts)

    def divisor(count: int, group: int) -> float:
        match mode:
            case "token_mean":
                return num_tokens
            case "sequence_mean_token_mean":
                return num_rows * count
            case "sequence_mean_token_sum":
                return num_rows
            case "token_sum_constant":
                assert constant is not None, "token_sum_constant needs a constant: the plan derives it"
                return num_rows * constant
            case "prompt_mean":
                return num_prompts * tokens_of_group[group]

    return [
        1.0 / divisor(count, group) if count else 0.0
        for count, group in zip(token_counts, groups, strict=True)
    ]


def aggregate(
    values: Float[Tensor, "T"], mask: Bool[Tensor, "T"], weights: Float[Tensor, "T"]
) -> Float[Tensor, ""]:
    """sum_t weights_t * mask_t * values_t: this micro-batch's share of the step's loss.

    `weights` holds each position's row weight. What `values` holds outside the mask is not read: NaN there reaches
    neither the sum nor the gradient.
    """
    return (torch.where(mask, values, 0.0) * weights).sum()
