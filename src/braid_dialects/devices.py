"""Parser of ROLL's device mappings. ROLL runs them through `eval`; here they are parsed by a small grammar
and never executed.

    mapping = term { "+" term }
    term    = "list(" mapping ")" | "range(" [first ","] end ["," step] ")" | "[" [number { "," number }] "]"
            | "(" mapping ")"

Numbers are integers; a YAML list of integers is accepted too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .values import Takes

GRAMMAR = "write list(range(0,8)), range(8), [0,1,2], or a sum of them"
MAX_TEXT = 1000
"""Maximum number of characters in a mapping."""
MAX_DEPTH = 8
"""Maximum nesting of brackets."""
MAX_DEVICES = 65_536
"""Maximum number of devices in a mapping."""
_TOKEN = re.compile(r"\s*(?:(-?\d{1,9})(?!\w)|(list|range)\b|([][(),+]))")


def parse_devices(mapping: str | Sequence[int]) -> tuple[int, ...]:
    """Return the device indices of a mapping, in its order.

    Raises ValueError for syntax errors, an empty mapping, negative indices, and duplicates.
    """
    devices = _Parser(mapping).parse() if isinstance(mapping, str) else tuple(mapping)
    if not devices:
        raise ValueError(f"{_shown(mapping)} contains no device; {GRAMMAR}")
    seen: set[int] = set()
    for device in devices:
        if device < 0 or device in seen:
            what = "device numbers start at 0" if device < 0 else f"device {device} appears twice"
            raise ValueError(f"{_shown(mapping)}: {what}; {GRAMMAR}")
        seen.add(device)
    return devices


def _is_mapping(value: object) -> bool:
    """Whether the value is a string or a list of integers; parse_devices reports errors in its contents."""
    is_list = isinstance(value, list) and all(type(item) is int for item in value)
    return is_list or (isinstance(value, str) and value != "")


DEVICES = Takes(
    f"a device mapping: {GRAMMAR}", _is_mapping, ("list(range(0,8))", "list(range(0,16))", [0, 1, 2, 3])
)


def _shown(mapping: object) -> str:
    text = str(mapping)
    return repr(text if len(text) <= 60 else text[:57] + "...")


class _Parser:
    """Recursive-descent parser of a mapping."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._depth = 0
        if len(text) > MAX_TEXT:
            raise self._wrong("too long")
        self._rest = self._tokens()

    def parse(self) -> tuple[int, ...]:
        devices = self._sum()
        if self._rest:
            raise self._wrong(f"unexpected {self._rest[0]!r}")
        return tuple(devices)

    def _tokens(self) -> list[str]:
        tokens, at = [], 0
        text = self._text.rstrip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise self._wrong(f"unexpected {text[at:].strip()[:20]!r}")
            tokens.append(found[0].strip())
            at = found.end()
        return tokens

    def _sum(self) -> list[int]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong("brackets are nested too deeply")
        devices = self._term()
        while self._rest[:1] == ["+"]:
            self._take("+")
            devices = devices + self._term()
            self._check_count(len(devices))
        self._depth -= 1
        return devices

    def _term(self) -> list[int]:
        match self._rest[:1]:
            case ["list"]:
                self._take("list")
                return self._in_brackets()
            case ["("]:
                return self._in_brackets()
            case ["range"]:
                self._take("range")
                return self._range()
            case ["["]:
                return self._numbers("[", "]")
        raise self._wrong(f"unexpected {self._rest[0]!r}" if self._rest else "unexpected end")

    def _in_brackets(self) -> list[int]:
        self._take("(")
        devices = self._sum()
        self._take(")")
        return devices

    def _range(self) -> list[int]:
        bounds = self._numbers("(", ")")
        if not 1 <= len(bounds) <= 3 or (len(bounds) == 3 and bounds[2] == 0):
            raise self._wrong("range() needs 1 to 3 numbers and a step other than 0")
        numbers = range(*bounds)
        self._check_count(len(numbers))
        return list(numbers)

    def _numbers(self, opening: str, closing: str) -> list[int]:
        self._take(opening)
        numbers: list[int] = []
        while self._rest[:1] != [closing]:
            numbers.append(self._number())
            if self._rest[:1] != [closing]:
                self._take(",")
        self._take(closing)
        return numbers

    def _number(self) -> int:
        if not self._rest or not re.fullmatch(r"-?\d+", self._rest[0]):
            raise self._wrong(f"{self._rest[0]!r} is not a number" if self._rest else "unexpected end")
        return int(self._rest.pop(0))

    def _take(self, token: str) -> None:
        if self._rest[:1] != [token]:
            raise self._wrong(f"missing {token!r}" + (f" before {self._rest[0]!r}" if self._rest else ""))
        self._rest.pop(0)

    def _check_count(self, count: int) -> None:
        if count > MAX_DEVICES:
            raise self._wrong(f"{count} devices, more than {MAX_DEVICES}")

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"invalid device mapping {_shown(self._text)}: {what}; {GRAMMAR}")
