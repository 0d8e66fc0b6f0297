"""Tiny random language models, which tests of engines use too."""

from tests.rollout.conftest import tiny_lm

__all__ = ["tiny_lm"]
