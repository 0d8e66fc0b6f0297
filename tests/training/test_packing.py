"""Packing and unpacking of rows; micro-batches respect their budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.models.batch import PackedBatch
from braid.training.group import share_rows
from braid.training.packing import grouped_micro_batches, micro_batches, pack, unpack
from braid.types import Row

CPU = torch.device("cpu")


def _text(*ids: int, **fields: list[float]) -> Row:
    mask = np.arange(len(ids)) > 0
    arrays = {name: np.array(values, np.float32) for name, values in fields.items()}
    return Row({"input_ids": np.array(ids, np.int64)}, mask, group=0, trajectory=0, fields=arrays)


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 50))
def test_every_row_is_in_one_micro_batch_and_none_is_over_the_budget(
    lengths: list[int], max_tokens: int
) -> None:
    batches = micro_batches(lengths, max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= max_tokens


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 50), st.randoms())
def test_the_sizes_of_micro_batches_do_not_depend_on_row_order(
    lengths: list[int], max_tokens: int, rng
) -> None:
    def shapes(sizes: list[int]) -> list[list[int]]:
        return [[sizes[i] for i in batch] for batch in micro_batches(sizes, max_tokens)]

    shuffled = lengths.copy()
    rng.shuffle(shuffled)
    assert shapes(shuffled) == shapes(lengths)


def test_micro_batches_are_nearly_equal() -> None:
    # filled one after the other they would hold 10, 10 and 1
    assert [len(batch) for batch in micro_batches([1] * 21, 10)] == [7, 7, 7]


def test_a_row_over_the_budget_is_alone_in_its_micro_batch() -> None:
    assert micro_batches([3, 30, 4], 10) == [[1], [2, 0]]


def test_no_rows_give_no_micro_batches() -> None:
    assert micro_batches([], 10) == []


def test_rows_are_laid_end_to_end() -> None:
    rows = [_text(5, 6, 7, advantages=[0, 1, 2]), _text(8, 9, advantages=[0, 3])]
    rows[1].trajectory = 7
    batch = pack(rows, CPU, weights=[0.5, 0.25])
    assert batch.inputs["input_ids"].tolist() == [5, 6, 7, 8, 9]
    assert batch.mask.tolist() == [False, True, True, False, True]
    assert batch.lengths == (3, 2)
    assert batch.trajectory.tolist() == [0, 0, 0, 1, 1]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.fields["advantages"].tolist() == [0, 1, 2, 0, 3]
    assert batch.weights is not None
    assert batch.weights.tolist() == [0.5, 0.5, 0.5, 0.25, 0.25]
    assert batch.weights.dtype == torch.float32


def test_decisions_are_numbered_over_all_rows_of_a_batch() -> None:
    decision = np.array([-1, 0, 0, -1, 1, 2], np.int32)  # the last turn is right after another
    conversation = Row({"input_ids": np.arange(6)}, decision >= 0, 0, 0, decision=decision)
    batch = pack([conversation, _text(1, 2), conversation], CPU)
    assert batch.decision is not None
    assert batch.decision.tolist() == [-1, 0, 0, -1, 1, 2, -1, 3, 4, 4, -1, 5, 6]  # the prompt once


def test_fields_are_omitted_unless_requested() -> None:
    batch = pack([_text(1, 2, advantages=[0, 1])], CPU, with_fields=False)
    assert batch.fields == {}
    assert batch.weights is None


def test_what_a_decision_observed_is_stored_once_for_all_of_its_tokens() -> None:
    def chunks(*sizes: int, value: int) -> Row:
        """After two tokens of instruction, chunks of actions, each after an image and a state."""
        decision = np.repeat([-1, *range(len(sizes))], [2, *sizes]).astype(np.int32)
        observations = {
            "image": np.full((len(sizes), 2, 2, 3), value, np.uint8),
            "state": np.arange(4 * len(sizes), dtype=np.float32).reshape(-1, 4),
        }
        ids = {"input_ids": np.zeros(len(decision), np.int64)}
        return Row(ids, decision >= 0, 0, value, observations=observations, decision=decision)

    batch = pack([chunks(3, 1, value=5), chunks(2, value=6)], CPU)
    assert batch.num_positions == 10, "the images differ, so the prompt is not shared"
    assert batch.observations["image"].dtype == torch.uint8
    assert batch.observations["image"][:, 0, 0, 0].tolist() == [5, 5, 6]
    assert batch.observations["state"].shape == (3, 4)
    assert batch.observed is not None
    assert batch.observed.tolist() == [0, 0, 0, 0, 0, 1, 2, 2, 2, 2]


def test_outputs_come_back_row_by_row_in_float32() -> None:
    flat = torch.arange(5, dtype=torch.bfloat16, requires_grad=True)
    batch = PackedBatch({}, torch.ones(5, dtype=torch.bool), (3, 2))
    parts = unpack(flat, batch)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert all(part.dtype == np.float32 for part in parts)


def answers(*responses: list[int], prompt: tuple[int, ...] = (5, 6, 7), group: int = 0) -> list[Row]:
    """Rows of one prompt."""
    rows = []
    for number, response in enumerate(responses):
        ids = np.array([*prompt, *response], np.int64)
        mask = np.arange(len(ids)) >= len(prompt)
        fields = {"rewards": np.where(mask, 1.0, 0.0).astype(np.float32)}
        rows.append(Row({"input_ids": ids}, mask, group, trajectory=10 * group + number, fields=fields))
    return rows


def test_rows_of_a_group_store_their_prompt_once() -> None:
    batch = pack(answers([1], [2, 3], [4]), CPU, weights=[0.5, 0.25, 1.0])
    assert batch.inputs["input_ids"].tolist() == [5, 6, 7, 1, 2, 3, 4]
    assert batch.lengths == (4, 5, 4)
    assert batch.shared == ((0, 0), (0, 3), (0, 3))
    assert batch.positions.tolist() == [0, 1, 2, 3, 3, 4, 3]
    assert batch.previous.tolist() == [-1, 0, 1, 2, 2, 4, 2]
    assert batch.trajectory.tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert batch.weights is not None
    assert batch.weights.tolist() == [0.5] * 4 + [0.25] * 2 + [1.0]
    assert batch.fields["rewards"].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert [part.tolist() for part in unpack(torch.arange(7), batch)] == [
        [0, 1, 2, 3],
        [0, 0, 0, 4, 5],
        [0, 0, 0, 6],
    ]


def test_micro_batches_keep_a_group_together_where_it_fits() -> None:
    rows = answers([1], [2, 2], [3]) + answers([4], [5], prompt=(8, 9), group=1)
    assert grouped_micro_batches(rows, 7) == [[1, 0, 2], [3, 4]]
    cut = grouped_micro_batches(rows, 5)
    assert sorted(index for batch in cut for index in batch) == [0, 1, 2, 3, 4]
    assert all(pack([rows[i] for i in batch], CPU).num_positions <= 5 for batch in cut)


def test_rows_of_a_trajectory_have_one_number_and_stay_together_if_they_must() -> None:
    rows = [*answers([1], [2, 2], [3], [4]), *answers([1, 1], prompt=(8, 9), group=1)]
    rows[2].trajectory = rows[4].trajectory = rows[0].trajectory
    for max_tokens in (1, 5, 9, 100):
        batches = grouped_micro_batches(rows, max_tokens, whole_trajectories=True)
        assert sorted(index for batch in batches for index in batch) == [0, 1, 2, 3, 4]
        (batch,) = (batch for batch in batches if 0 in batch)
        assert {0, 2, 4} <= set(batch)
    assert len(grouped_micro_batches(rows, 1)) == 5
    assert pack(rows, CPU).trajectories == (0, 1, 0, 2, 0)


@pytest.mark.parametrize("balances", [True, False])
def test_a_rank_has_all_rows_of_a_trajectory(balances: bool) -> None:
    rows = answers([1], [2, 2], [3], [4], [5], [6, 6, 6])
    for number, row in enumerate(rows):
        row.trajectory = number // 2
    shares = share_rows(rows, 3, balances=balances)
    assert sorted(shares) == [[0, 1], [2, 3], [4, 5]]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 50), st.integers(1, 7))
def test_no_micro_batch_has_more_rows_than_allowed(
    lengths: list[int], max_tokens: int, max_rows: int
) -> None:
    batches = micro_batches(lengths, max_tokens, max_rows)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) <= max_rows
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= max_tokens


def test_a_limit_of_rows_gives_nearly_equal_batches_too() -> None:
    assert [len(batch) for batch in micro_batches([1] * 9, 100, 4)] == [3, 3, 3]


def test_a_group_is_cut_at_the_limit_of_rows() -> None:
    rows = answers([1], [2], [3], [4], [5]) + answers([6], prompt=(8, 9), group=1)
    batches = grouped_micro_batches(rows, 1000, 2)
    assert all(len(batch) <= 2 for batch in batches)
    assert sorted(index for batch in batches for index in batch) == [0, 1, 2, 3, 4, 5]
