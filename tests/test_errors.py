"""Suggestions of near names."""

from __future__ import annotations

from difflib import get_close_matches

from hypothesis import given
from hypothesis import strategies as st

from braid.errors import suggest

NAMES = st.text("ab_.", min_size=1, max_size=8)


@given(NAMES, st.lists(NAMES, max_size=12))
def test_the_nearest_name_is_that_of_difflib(name: str, known: list[str]) -> None:
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    assert suggest(name, known) == (f", did you mean {near[0]!r}?" if near else "")
