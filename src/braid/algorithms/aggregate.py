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

from .segments import Segments


def row_weights(
    token_counts: Sequence[int],
    groups: Sequence[int],
    *,
    mode: Aggregation,
    constant: float | None,
) -> list[float]:
    """The loss weight of each row's positions in one optimizer step, one per row.

    Row b has n_b = `token_counts[b]` policy positions; `groups[b]` is the id of its prompt. Rows and prompts
    without tokens weigh 0 and are not counted. Where log-probs are those of decisions (logprob_level), read
    decisions for tokens. With B rows, P prompts and N tokens in the step:

        token_mean                1 / N               equal weight per token (DAPO, arXiv 2503.14476)
        sequence_mean_token_mean  1 / (B n_b)         equal weight per row (GRPO, arXiv 2402.03300)
        sequence_mean_token_sum   1 / B               the gradient of the mean return, unscaled
        token_sum_constant        1 / (B constant)    the same over a constant (Dr. GRPO, arXiv 2503.20783)
        prompt_mean               1 / (P N_prompt)    equal weight per prompt, and per token within it

    RLinf averages the means of micro-batches, so its token mean depends on the split, and it divides by zero
    on a row without tokens. ROLL counts over the step but leaves the mask out of token_mean's numerator.
    SkyRL scales the advantages instead, so losses that depend on the advantages see scaled ones, and it
    weighs KL and entropy differently; here all terms share one weight.
    """
    tokens_of_group: Counter[int] = Counter()
    for count, group in zip(token_counts, groups, strict=True):
        tokens_of_group[group] += count
    num_rows = sum(count > 0 for count in token_counts)
    num_prompts = sum(count > 0 for count in tokens_of_group.values())
    num_tokens = sum(token_counts)

    def weight(count: int, group: int) -> float:
        if count == 0:
            return 0.0
        match mode:
            case "token_mean":
                return 1.0 / num_tokens
            case "sequence_mean_token_mean":
                return 1.0 / (num_rows * count)
            case "sequence_mean_token_sum":
                return 1.0 / num_rows
            case "token_sum_constant":
                assert constant is not None, "token_sum_constant needs the constant derived by the plan"
                return 1.0 / (num_rows * constant)
            case "prompt_mean":
                return 1.0 / (num_prompts * tokens_of_group[group])

    return [weight(count, group) for count, group in zip(token_counts, groups, strict=True)]


def turn_factors(turns: Segments, sequences: Segments) -> Float[Tensor, "T"]:
    """Per-position factors that give the turns of a row equal weight and keep the row's total weight:

        n_b / (K_b n_turn)        n_b, K_b positions and turns of the row, n_turn positions of the turn

    With sequence_mean_token_mean each position then weighs 1 / (B K_b n_turn). RLinf: the same for one agent,
    with loss_scales group_level and agent_level and seq-mean-token-mean; adding turn_level gives tokens equal
    weight again. Not in ROLL and SkyRL (in SkyRL, each turn of a step-wise trajectory is a separate row).
    """
    num_turns = sequences.sum(1.0 / turns.size).clamp(min=1.0)
    return (sequences.size / (num_turns * turns.size)).float()


def aggregate(
    values: Float[Tensor, "T"], mask: Bool[Tensor, "T"], weights: Float[Tensor, "T"]
) -> Float[Tensor, ""]:
    """sum_t weights_t * mask_t * values_t: the micro-batch's contribution to the step's loss.

    `weights` holds each position's row weight. `values` is not read outside the mask: a NaN there affects
    neither the sum nor the gradient.
    """
    return (torch.where(mask, values, 0.0) * weights).sum()
