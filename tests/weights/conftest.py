"""Every test here leaves nothing behind."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _leaves_nothing(nothing_is_left: None) -> None:
    """See tests.leftovers."""
