"""Every test here leaves nothing behind."""

from __future__ import annotations

import pytest
from tests.leftovers import nothing_is_left

__all__ = ["nothing_is_left"]


@pytest.fixture(autouse=True)
def _leaves_nothing(nothing_is_left: None) -> None:
    """See tests.leftovers."""
