"""What can be imported from braid.algorithms."""

from __future__ import annotations

import pytest
import torch

import braid.algorithms
from braid.algorithms import correction_factor, row_weights, sampling_weight


def test_every_exported_name_exists_and_is_no_module() -> None:
    for name in braid.algorithms.__all__:
        assert getattr(braid.algorithms, name).__class__.__name__ != "module", name
    with pytest.raises(AttributeError, match=r"has no 'grpo'; it has .*group_advantages"):
        _ = braid.algorithms.grpo


def test_missing_arguments_are_value_errors() -> None:
    logprobs = torch.zeros(2)
    with pytest.raises(ValueError, match="needs `constant`"):
        row_weights([1], [0], mode="token_sum_constant", constant=None)
    with pytest.raises(ValueError, match="level=turn needs `over`"):
        sampling_weight(logprobs, logprobs, None, level="turn")
    with pytest.raises(ValueError, match="needs `sequences`"):
        correction_factor(logprobs, mode="mask_sequence", low=0.0, high=1.0)
