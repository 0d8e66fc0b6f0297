"""Everything derived from a config: numbers, checks across keys, the layout, memory. Does not import
torch."""

from .lengths import longest_row, rotary_problem, row_limit
from .plan import Memory, Plan, Verb
from .resolve import default_verb, derive, merge_recipe, resolve, with_examples, with_pairs, with_prompts
from .sizes import policy_size
from .unused import unused_keys, why_unused

__all__ = [
    "Memory",
    "Plan",
    "Verb",
    "default_verb",
    "derive",
    "longest_row",
    "merge_recipe",
    "policy_size",
    "resolve",
    "rotary_problem",
    "row_limit",
    "unused_keys",
    "why_unused",
    "with_examples",
    "with_pairs",
    "with_prompts",
]
