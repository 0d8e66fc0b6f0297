"""Allowed values of a state, and exact restoration."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from braid.checkpoint.tree import pack, unpack
from braid.errors import CheckpointError


class Colour(StrEnum):
    RED = "red"


def round_trip(value: Any) -> Any:
    data, tensors = pack({"value": value})
    return unpack(json.loads(json.dumps(data, allow_nan=False)), tensors)["value"]


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.just(1 << 2000)
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


@given(TREES)
def test_plain_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    back = round_trip(value)
    assert repr(back) == repr(value)  # tells tuple from list, -0.0 from 0.0, True from 1


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 5e-324, 1.7976931348623157e308])
def test_special_floats_are_restored(value: float) -> None:
    assert repr(round_trip(value)) == repr(value)


def test_keys_that_look_like_tags_of_the_format_are_restored() -> None:
    for value in ({"$tuple": [1]}, {"$x": 1, "y": 2}, {"a": {"$dict": {}}}):
        assert round_trip(value) == value


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float16, np.int64, np.uint64, np.bool_, np.uint8]),
        hnp.array_shapes(min_dims=0, min_side=0),
    )
)
def test_arrays_are_restored_with_type_and_bits(value: np.ndarray) -> None:
    back = round_trip(value)
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert back.tobytes() == value.tobytes()


def test_read_only_and_foreign_byte_order_arrays_come_back_equal() -> None:
    frozen = np.arange(3.0)
    frozen.setflags(write=False)
    np.testing.assert_array_equal(round_trip(frozen), frozen)
    np.testing.assert_array_equal(round_trip(np.arange(3, dtype=">i4")), [0, 1, 2])


def test_numpy_scalars_and_subclasses_come_back_as_plain_values() -> None:
    assert repr(round_trip([np.float32(0.1), np.int32(3), np.bool_(True)])) == repr(
        [float(np.float32(0.1)), 3, True]
    )
    assert type(round_trip(Colour.RED)) is str
    assert type(round_trip(OrderedDict(a=1))) is dict


def test_states_of_random_generators_resume_bit_exactly() -> None:
    rng, py, gen = np.random.default_rng(1), random.Random(1), torch.Generator().manual_seed(1)
    state = (rng.bit_generator.state, py.getstate(), gen.get_state(), np.random.MT19937(3).state)
    expected = (rng.random(), py.random(), torch.rand(3, generator=gen))
    back = round_trip(state)
    rng.bit_generator.state = back[0]
    py.setstate(back[1])
    gen.set_state(back[2])
    assert rng.random() == expected[0]
    assert py.random() == expected[1]
    assert torch.equal(torch.rand(3, generator=gen), expected[2])
    assert np.array_equal(back[3]["state"]["key"], state[3]["state"]["key"])


def test_a_shared_tensor_is_stored_once_and_restored_as_one() -> None:
    tied = torch.ones(3, 4)
    data, tensors = pack({"embed": tied, "head": torch.nn.Parameter(tied)})
    assert len(tensors) == 1
    back = unpack(data, tensors)
    assert back["embed"] is back["head"]
    assert not back["head"].requires_grad


def test_different_views_of_one_memory_keep_their_values() -> None:
    base = torch.arange(12.0)
    views = {"all": base, "part": base[3:6], "rows": base.view(3, 4), "turned": base.view(3, 4).t()}
    data, tensors = pack(views)
    assert len(tensors) == 4
    for name, tensor in unpack(data, tensors).items():
        assert torch.equal(tensor, views[name])


def test_two_paths_with_the_same_text_keep_separate_tensors() -> None:
    state = {"a": {"b": torch.ones(1)}, "a/b": torch.zeros(1), "__metadata__": torch.ones(2)}
    data, tensors = pack(state)
    assert "__metadata__" not in tensors
    back = unpack(data, tensors)
    assert back["a"]["b"].item() == 1
    assert back["a/b"].item() == 0


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({1, 2}, "a set"),
        (object(), "a object"),
        (np.array([object()]), "a numpy array of object"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.empty(2, device="meta"), "meta"),
    ],
)
def test_a_value_that_cannot_be_saved_is_named_with_its_path(value: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=r"policy/0/x") as caught:
        pack({"policy": [{"x": value}]})
    assert named in str(caught.value)
