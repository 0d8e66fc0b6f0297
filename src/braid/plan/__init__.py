"""Everything derived from a config: numbers, checks across keys, the layout, memory. Does not import
torch."""

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
