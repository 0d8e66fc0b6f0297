"""Recipes are complete, cheap to import, and never written to."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, fields

import pytest

from braid.algorithms.recipes import RECIPES, Recipe
from braid.config.algorithm import AlgorithmConfig


def test_every_part_of_a_recipe_can_be_set_in_the_config():
    assert {field.name for field in fields(Recipe)} <= set(AlgorithmConfig.model_fields)


def test_every_recipe_is_a_config_that_validates():
    for name, recipe in RECIPES.items():
        parts = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
        parts["corrections"] = tuple(asdict(correction) for correction in recipe.corrections)
        assert AlgorithmConfig(recipe=name, **parts).advantage == recipe.advantage


def test_a_recipe_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        RECIPES["grpo"].kl_coef = 0.5  # pyright: ignore[reportAttributeAccessIssue]


def test_recipes_import_without_torch():
    code = "import sys, braid.algorithms.recipes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
