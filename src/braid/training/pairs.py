"""Preference pairs in training: two rows a pair, the loss over packed pairs, and the same numbers without a
gradient.

The rows of a pair are those of one trajectory, the preferred response first, so that they stay in one
micro-batch and store their common prompt once. What a loss reads of a pair or of the whole step is in fields
of its rows, the same number at all positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from braid.algorithms.pairs import Pairs
from braid.algorithms.preference_losses import PreferenceLoss
from braid.data.pairs import Pair
from braid.models.base import Output
from braid.models.batch import PackedBatch
from braid.types import Row

from .backend import Diagnostics, Loss

_OF_PAIRS = ("margin", "target", "matched")
"""Fields of Pairs that a row has only if its data or loss have them."""


def output_of(kind: PreferenceLoss) -> Output:
    """The model's output that the loss reads."""
    return "values" if kind.trains_reward_model else "logprobs"


def rows_of_pair(pair: Pair, number: int) -> list[Row]:
    """The rows of a pair, the preferred response first; `number` identifies it within its step."""
    rows = []
    for side in (pair.chosen, pair.rejected):
        ids = np.array(side.prompt_ids + side.response_ids, np.int64)
        mask = np.array((False,) * len(side.prompt_ids) + side.response_mask)
        row = Row({"input_ids": ids}, mask, group=number, trajectory=number, images=side.images)
        for name in ("margin", "target"):
            if (value := getattr(pair, name)) is not None:
                write_field(row, name, value)
        rows.append(row)
    return rows


def write_field(row: Row, name: str, value: float) -> None:
    """Give all positions of a row a number."""
    row.fields[name] = np.full(len(row), value, np.float64)


def totals(rows: Sequence[Row], results: Sequence[Mapping[Output, NDArray[Any]]], output: Output) -> Tensor:
    """What a loss reads of each row [B], in float64: the sum of its log-probs, or its score, the value at its
    last position."""
    if output == "values":
        return torch.tensor([float(result[output][-1]) for result in results], dtype=torch.float64)
    sums = (
        float(result[output][row.mask].sum(dtype=np.float64))
        for row, result in zip(rows, results, strict=True)
    )
    return torch.tensor(list(sums), dtype=torch.float64)


def pairs_of(rows: Sequence[Row], policy: Tensor) -> Pairs:
    """The pairs of rows, in float64, with the `policy`'s totals [B]."""

    def both(name: str) -> tuple[Tensor, Tensor]:
        values = [row.fields[name][-1] if name in row.fields else 0.0 for row in rows]
        return tuple(torch.tensor(values, dtype=torch.float64).view(-1, 2).unbind(1))  # pyright: ignore[reportReturnType]

    num_tokens = torch.tensor([row.num_tokens for row in rows], dtype=torch.float64).view(-1, 2)
    chosen, rejected = policy.view(-1, 2).unbind(1)
    return Pairs(
        chosen,
        rejected,
        *both("ref_logprob"),
        num_tokens[:, 0],
        num_tokens[:, 1],
        num_tokens[:, 0].mean().expand(len(num_tokens)),
        **{name: both(name)[0] for name in _OF_PAIRS if name in rows[0].fields},
    )


def measured(kind: PreferenceLoss, pairs: Pairs) -> dict[str, Tensor]:
    """Metrics of each pair [N]: implicit rewards or scores, their difference, and whether it is positive; of
    a policy also log-probs."""
    chosen, rejected = kind.rewards(pairs)
    means = {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "margin": chosen - rejected,
        "accuracy": (chosen > rejected).double(),
    }
    if not kind.trains_reward_model:
        means |= {"logprob_chosen": pairs.chosen, "logprob_rejected": pairs.rejected}
    return {name: values.detach() for name, values in {**means, **kind.diagnostics(pairs)}.items()}


def total_loss(kind: PreferenceLoss, sft_coef: float, pairs: Pairs) -> Tensor:
    """The loss of each pair [N], with the cross-entropy of preferred responses."""
    per_pair = kind.per_pair(pairs)
    return per_pair + sft_coef * pairs.cross_entropy if sft_coef else per_pair


def preference_loss(kind: PreferenceLoss, *, sft_coef: float = 0.0) -> Loss:
    """The mean loss of a step's pairs, whose rows weigh 1 / number of pairs. Fields read: `mean_chosen`, and
    as the kind needs them `ref_logprob`, `margin`, `target` and `matched`. Sums are float64, so that the
    order of positions does not matter."""
    compute = partial(_preference_loss, kind, sft_coef)
    return Loss(frozenset({output_of(kind)}), compute, whole_trajectories=True)


def _preference_loss(
    kind: PreferenceLoss, sft_coef: float, outputs: dict[str, Tensor], batch: PackedBatch
) -> tuple[Tensor, Diagnostics]:
    assert batch.weights is not None, "training batches need weights"
    last = torch.tensor(batch.starts) + torch.tensor(batch.stored) - 1
    last = last.to(batch.device)
    sides = _sides(batch).to(batch.device)
    output = outputs[output_of(kind)]
    row = torch.arange(len(batch.lengths)).repeat_interleave(torch.tensor(batch.stored)).to(batch.device)
    none = torch.zeros(len(batch.lengths), dtype=torch.float64, device=batch.device)
    counts = none.index_add(0, row, batch.mask.double())
    if kind.trains_reward_model:
        of_rows = output.index_select(0, last).double()
    else:
        of_rows = none.index_add(0, row, output.where(batch.mask, 0.0).double())

    def both(values: Tensor) -> tuple[Tensor, Tensor]:
        return values[sides[0]], values[sides[1]]

    def field(name: str) -> tuple[Tensor, Tensor]:
        return both(batch.fields[name].index_select(0, last) if name in batch.fields else none)

    pairs = Pairs(
        *both(of_rows),
        *field("ref_logprob"),
        *both(counts),
        field("mean_chosen")[0],
        **{name: field(name)[0] for name in _OF_PAIRS if name in batch.fields},
    )
    weights = both(batch.weights.index_select(0, last).double())[0]
    loss = (total_loss(kind, sft_coef, pairs) * weights).sum()
    num = torch.tensor(len(sides[0]), device=batch.device)
    means = {f"prefer/{name}": (values.sum(), num) for name, values in measured(kind, pairs).items()}
    return loss.float(), Diagnostics(means)


def _sides(batch: PackedBatch) -> Tensor:
    """Rows of the preferred and of the rejected responses [2, N]. A row without another is both: one that
    ranks run to keep pace."""
    of_pair: dict[int, list[int]] = {}
    for row, pair in enumerate(batch.trajectories or range(len(batch.lengths))):
        of_pair.setdefault(pair, []).append(row)
    return torch.tensor([[rows[0] for rows in of_pair.values()], [rows[-1] for rows in of_pair.values()]])
