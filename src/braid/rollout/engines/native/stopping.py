"""Finds stop strings in the text of tokens that arrive one at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class StopFinder:
    """Detects whether the newest token completed a stop string, however the string is split into tokens.

    Only the tail of the text is decoded, and only if the newest token can contain a string's last character:
    a printable ASCII character other than a space always appears in the text of its token decoded alone.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._piece = functools.cache(lambda token_id: decode([token_id]))

    def is_completed(self, token_ids: Sequence[int], strings: Sequence[str]) -> bool:
        """Whether the text of `token_ids` contains one of `strings`, given that it did not without the last
        token."""
        piece = self._piece(token_ids[-1])
        possible = [s for s in strings if s[-1] in piece or not "!" <= s[-1] <= "~"]
        if not possible:
            return False
        # A tokenizer may decode the first tokens of a tail differently (a space, half a character): keep a
        # margin.
        needed = max(map(len, possible)) + len(piece) + 4
        num_tokens = needed
        while True:
            tail = self._decode(token_ids[-num_tokens:])
            if any(s in tail for s in possible):
                return True
            if len(tail) >= needed or num_tokens >= len(token_ids):
                return False
            num_tokens *= 2
