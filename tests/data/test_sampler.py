from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.data.sampler import MixedSampler, PromptSampler
from braid.errors import DataError

TAKES = st.lists(st.integers(1, 12), min_size=1, max_size=8)


@given(num=st.integers(1, 9), takes=TAKES, seed=st.integers(0, 3))
def test_every_epoch_has_every_prompt_once_regardless_of_round_size(
    num: int, takes: list[int], seed: int
) -> None:
    sampler = PromptSampler(num, seed=seed, shuffle=True)
    drawn = [i for k in takes for i in sampler.take(k)]
    assert len(drawn) == sum(takes)
    assert drawn == PromptSampler(num, seed=seed, shuffle=True).take(sum(takes))
    for start in range(0, len(drawn) - num + 1, num):
        assert sorted(drawn[start : start + num]) == list(range(num))
    assert sampler.epoch == sum(takes) // num


@given(num=st.integers(1, 9), before=TAKES, after=TAKES)
def test_resuming_continues_the_sequence(num: int, before: list[int], after: list[int]) -> None:
    unbroken, resumed = (PromptSampler(num, seed=1, shuffle=True) for _ in range(2))
    for k in before:
        unbroken.take(k)
    resumed.load(unbroken.state())
    assert [unbroken.take(k) for k in after] == [resumed.take(k) for k in after]


def test_epochs_and_seeds_have_different_orders() -> None:
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
    with pytest.raises(DataError, match=r"data\.train has no prompts"):
        PromptSampler(0, seed=0, shuffle=True)
    state = PromptSampler(5, seed=0, shuffle=True).state()
    with pytest.raises(DataError, match="saved with 5 training prompts, but the data now has 6"):
        PromptSampler(6, seed=0, shuffle=True).load(state)


GROUPS = [(range(10), 0.5), (range(10, 13), 0.3), (range(13, 20), 0.2), (range(20, 25), 0.0)]


@given(takes=TAKES)
def test_shares_hold_at_every_position_for_any_sizes(takes: list[int]) -> None:
    sampler = MixedSampler(GROUPS, seed=0, shuffle=True)
    drawn = [i for k in takes for i in sampler.take(k)]
    for indices, share in GROUPS:
        assert abs(sum(i in indices for i in drawn) - share * len(drawn)) <= 1.5  # each group is due in turn
    assert drawn == MixedSampler(GROUPS, seed=0, shuffle=True).take(sum(takes))


@given(before=TAKES, after=TAKES)
def test_a_mix_resumes_and_refuses_other_groups(before: list[int], after: list[int]) -> None:
    unbroken, resumed = (MixedSampler(GROUPS, seed=1, shuffle=True) for _ in range(2))
    for k in before:
        unbroken.take(k)
    resumed.load(unbroken.state())
    assert [unbroken.take(k) for k in after] == [resumed.take(k) for k in after]
    with pytest.raises(DataError, match=r"saved with 3 shares in data\.mix, which now has 2"):
        MixedSampler([(range(20), 0.5), (range(20, 25), 0.5)], seed=1, shuffle=True).load(unbroken.state())


def test_small_groups_repeat_only_after_each_row_was_drawn() -> None:
    drawn = MixedSampler([(range(3), 1.0), (range(3, 100), 1.0)], seed=0, shuffle=True).take(12)
    small = [i for i in drawn if i < 3]
    assert sorted(small[:3]) == sorted(small[3:6]) == [0, 1, 2]
