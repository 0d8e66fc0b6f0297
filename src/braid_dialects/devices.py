"""Parser of ROLL's device mappings. ROLL runs them through `eval`; here they are matched, never executed.

    mapping = term { "+" term }
    term    = "list(" mapping ")" | "range(" [first ","] end ["," step] ")" | "[" [number { "," number }] "]"
            | "(" mapping ")"

Numbers are integers; a YAML list of integers is accepted too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .values import Takes

GRAMMAR = "write list(range(0,8)), range(8), [0,1,2], or a sum of them"
MAX_TEXT = 1000
"""Maximum number of characters in a mapping."""
MAX_DEPTH = 8
"""Maximum nesting of brackets."""
MAX_DEVICES = 65_536
"""Maximum number of devices in a mapping."""
_NUMBERS = r"-?[0-9]{1,9}(?:,-?[0-9]{1,9})*,?"
_TERM = rf"(?:range\({_NUMBERS}\)|\[(?:{_NUMBERS})?\])"
_SUM = rf"{_TERM}(?:\+{_TERM})*"


def parse_devices(mapping: str | Sequence[int]) -> tuple[int, ...]:
    """Return the device indices of a mapping, in its order.

    Raises ValueError for syntax errors, an empty mapping, negative indices, and duplicates.
    """
    shown = repr(text if len(text := str(mapping)) <= 60 else text[:57] + "...")
    devices = tuple(_numbers(mapping, shown)) if isinstance(mapping, str) else tuple(mapping)
    wrong = {
        "it contains no device": not devices,
        f"more than {MAX_DEVICES} devices": len(devices) > MAX_DEVICES,
        "device numbers start at 0": min(devices, default=0) < 0,
        "a device appears twice": len(set(devices)) < len(devices),
    }
    if found := next((what for what, is_so in wrong.items() if is_so), None):
        raise ValueError(f"{shown}: {found}; {GRAMMAR}")
    return devices


def _numbers(text: str, shown: str) -> Iterator[int]:
    plain = re.sub(r"\s*([][(),+])\s*", r"\1", text[:MAX_TEXT].strip())
    for _ in range(MAX_DEPTH):
        plain = re.sub(rf"(?:\blist|(?<![\w]))\(({_SUM})\)", r"\1", plain)
    if len(text) > MAX_TEXT or not re.fullmatch(_SUM, plain):
        raise ValueError(f"invalid device mapping {shown}; {GRAMMAR}")
    num = 0
    for term in re.findall(_TERM, plain):
        numbers = [int(number) for number in re.findall(r"-?[0-9]+", term)]
        if term.startswith("range") and (len(numbers) > 3 or numbers[2:] == [0]):
            raise ValueError(f"{shown}: range() needs 1 to 3 numbers and a step other than 0; {GRAMMAR}")
        made = range(*numbers) if term.startswith("range") else numbers
        if (num := num + len(made)) > MAX_DEVICES:
            raise ValueError(f"{shown}: more than {MAX_DEVICES} devices; {GRAMMAR}")
        yield from made


def _is_mapping(value: object) -> bool:
    """Whether the value is a string or a list of integers; parse_devices reports errors in its contents."""
    is_list = isinstance(value, list) and all(type(item) is int for item in value)
    return is_list or (isinstance(value, str) and value != "")


DEVICES = Takes(f"a device mapping: {GRAMMAR}", _is_mapping)
