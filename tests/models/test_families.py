"""The page of models says of each family what braid does with it."""

from __future__ import annotations

import pytest
import transformers
from tests.models.families import FAMILIES, PAGE, UNKNOWN, Family, cells, recorded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # transformers' own, of configs that are made small
]
_VLLM = 2
"""Place of the cell in `cells`."""


@pytest.mark.skipif(
    f"transformers {transformers.__version__}" not in PAGE.read_text(),
    reason="the page is of another version of transformers",
)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_what_the_page_says(family: Family) -> None:
    page, computed = recorded()[family.name], list(cells(family))
    if computed[_VLLM] == UNKNOWN:
        assert page[_VLLM] in ("yes", "unknown there")
        page[_VLLM] = UNKNOWN
    assert page == computed, "run: python -m tests.models.families"


def test_the_page_has_no_other_family() -> None:
    assert list(recorded()) == [family.name for family in FAMILIES]
