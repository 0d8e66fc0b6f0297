"""What follows from a config: derived numbers, checks across keys, memory. Imports no torch."""

from .plan import Memory, Plan, Verb
from .resolve import resolve

__all__ = ["Memory", "Plan", "Verb", "resolve"]
