"""What follows from a config: derived numbers, checks across keys, memory. Imports no torch."""

from .checks import idle_keys
from .plan import Memory, Plan, Verb
from .resolve import derive, longest_row, merge_recipe, policy_size, resolve

__all__ = [
    "Memory",
    "Plan",
    "Verb",
    "derive",
    "idle_keys",
    "longest_row",
    "merge_recipe",
    "policy_size",
    "resolve",
]
