from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.data.sampler import PromptSampler
from braid.errors import DataError

TAKES = st.lists(st.integers(1, 12), min_size=1, max_size=8)


@given(num=st.integers(1, 9), takes=TAKES, seed=st.integers(0, 3))
def test_every_epoch_has_every_prompt_once_however_it_is_cut(num: int, takes: list[int], seed: int) -> None:
    sampler = PromptSampler(num, seed=seed, shuffle=True)
    drawn = [i for k in takes for i in sampler.take(k)]
    assert len(drawn) == sum(takes)
    assert drawn == PromptSampler(num, seed=seed, shuffle=True).take(sum(takes))
    for start in range(0, len(drawn) - num + 1, num):
        assert sorted(drawn[start : start + num]) == list(range(num))
    assert sampler.epoch == sum(takes) // num


@given(num=st.integers(1, 9), before=TAKES, after=TAKES)
def test_resuming_gives_the_sequence_that_would_have_come(
    num: int, before: list[int], after: list[int]
) -> None:
    unbroken, resumed = (PromptSampler(num, seed=1, shuffle=True) for _ in range(2))
    for k in before:
        unbroken.take(k)
    resumed.load(unbroken.state())
    assert [unbroken.take(k) for k in after] == [resumed.take(k) for k in after]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    sampler = PromptSampler(50, seed=0, shuffle=True)
    first, second = sampler.take(50), sampler.take(50)
    assert first != second
    assert PromptSampler(50, seed=1, shuffle=True).take(50) != first


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    assert PromptSampler(3, seed=0, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


def test_a_round_may_be_larger_than_the_data() -> None:
    sampler = PromptSampler(2, seed=0, shuffle=True)
    assert sorted(sampler.take(6)) == [0, 0, 0, 1, 1, 1]
    assert sampler.epoch == 3


def test_no_prompts_or_other_data_than_before_are_refused() -> None:
    with pytest.raises(DataError, match=r"no prompts to draw from; give data\.train"):
        PromptSampler(0, seed=0, shuffle=True)
    state = PromptSampler(5, seed=0, shuffle=True).state()
    with pytest.raises(DataError, match="saved with 5 training prompts, the data now has 6"):
        PromptSampler(6, seed=0, shuffle=True).load(state)
