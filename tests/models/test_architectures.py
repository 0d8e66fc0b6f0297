"""Every causal language model of the installed transformers runs as plain transformers does, or is
refused."""

from __future__ import annotations

import pytest
import transformers
from tests.models.architectures import NAMES, PAGE, recorded, recorded_routers, routers, verdict
from tests.models.families import FAMILIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # transformers' own, of configs that are made small
]


_OF_FAMILIES = {family.model_type for family in FAMILIES}
EACH = [pytest.param(name, marks=[pytest.mark.nightly] * (name not in _OF_FAMILIES)) for name in NAMES]
"""Every night; those of the page's table of families each time."""


@pytest.mark.parametrize("name", EACH)
def test_an_architecture_is_what_the_page_says(name: str) -> None:
    cell = verdict(name)  # which fails where one is let in and computed wrongly
    if f"transformers {transformers.__version__}" in PAGE.read_text():
        assert recorded()[name] == cell, "run: python tests/models/architectures.py"


@pytest.mark.parametrize("name", EACH)
def test_experts_are_replayed_where_the_page_says(name: str) -> None:
    cells = routers(name)
    if f"transformers {transformers.__version__}" in PAGE.read_text():
        assert recorded_routers().get(name) == cells, "run: python tests/models/architectures.py"
