"""Finds a secret in texts of others, such as a server's reply, in whatever encoding they repeat it."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from functools import cache

_LEAST_PART = 8
"""Characters of base64 or hexadecimal digits by which a secret is recognised; fewer occur by chance."""


def redacted(text: str, secret: str) -> str:
    """The text with `***` in place of the secret: plain, with any of its characters escaped as in URLs, JSON,
    Python or HTML, as hexadecimal digits, or in base64, also as a part of a longer text that was encoded."""
    return _pattern(secret).sub("***", text) if secret else text


@cache
def _pattern(secret: str) -> re.Pattern[str]:
    escaped = "".join(map(_escapes, secret))
    return re.compile("|".join([escaped, *map(re.escape, _base64(secret)), *_hex(secret)]))


def _escapes(character: str) -> str:
    """Pattern of one character in the escapes of URLs, JSON, Python and HTML, applied once or several
    times."""
    code, data = ord(character), character.encode(errors="surrogatepass")
    percent = "".join(f"%(?:25)*{byte:02x}" for byte in data)
    numbers = rf"\\+u{code:04x}|\\+x{code:02x}|&(?:amp;)*#(?:0*{code}|x0*{code:x});"
    named = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}.get(character)
    return rf"(?:\\*{re.escape(character)}|(?i:{percent}|{numbers}{f'|&(?:amp;)*{named};' if named else ''}))"


def _base64(secret: str) -> Iterator[str]:
    """The characters that do not depend on what surrounds the secret, for each place in a group of three
    bytes."""
    for before in range(3):
        data = bytes(before) + secret.encode(errors="surrogatepass")
        whole = slice((before * 8 + 5) // 6, len(data) * 8 // 6)
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            part = encode(data).decode()[whole]
            if len(part) >= _LEAST_PART:
                yield part


def _hex(secret: str) -> Iterator[str]:
    digits = [f"{byte:02x}" for byte in secret.encode(errors="surrogatepass")]
    if 2 * len(digits) >= _LEAST_PART:
        yield f"(?i:{'[ :-]?'.join(digits)})"
