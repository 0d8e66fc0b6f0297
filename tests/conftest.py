"""One thread and fixed seeds for every test."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# Properties are tried on the same examples each time, however slow the machine is.
settings.register_profile("braid", deadline=None, derandomize=True)
settings.load_profile("braid")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # libraries under test draw from the global generator
    torch.manual_seed(0)
