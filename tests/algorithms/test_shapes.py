"""pytest checks the shapes that the signatures state (pyproject.toml, --jaxtyping-packages)."""

import pytest
import torch
from jaxtyping import TypeCheckError

from braid.algorithms.aggregate import aggregate
from braid.algorithms.kl import kl_estimate


def test_tensors_of_different_lengths_are_refused():
    with pytest.raises(TypeCheckError, match="ref_logprobs"):
        kl_estimate(torch.zeros(3), torch.zeros(1), estimator="k1", clamp=None)


def test_a_mask_of_floats_is_refused():
    with pytest.raises(TypeCheckError, match="mask"):
        aggregate(torch.zeros(3), torch.ones(3), torch.ones(3))


def test_a_padded_rectangle_is_refused():
    with pytest.raises(TypeCheckError, match="logprobs"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(2, 3), estimator="k1", clamp=None)
