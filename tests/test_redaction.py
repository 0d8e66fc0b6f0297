from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from braid.redaction import redacted

SECRET = "sk-a/B+c=d\"e&f'1234567890\\xyz"
ENCODINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "URL": quote,
    "form": quote_plus,
    "twice URL": lambda text: quote_plus(quote_plus(text)),
    "all of the URL": lambda text: "".join(f"%{byte:02x}" for byte in text.encode()),
    "JSON": json.dumps,
    "JSON in JSON": lambda text: json.dumps(json.dumps(json.dumps({"a": text}))),
    "JSON with slashes": lambda text: json.dumps(text).replace("/", "\\/"),
    "JSON of numbers": lambda text: "".join(f"\\u{ord(c):04X}" for c in text),
    "Python": repr,
    "Python of bytes": lambda text: "".join(f"\\x{byte:02x}" for byte in text.encode()),
    "HTML": html.escape,
    "HTML of numbers": lambda text: "".join(f"&#{ord(c)};" for c in text),
    "hexadecimal": lambda text: text.encode().hex(),
    "hexadecimal, upper case": lambda text: text.encode().hex().upper(),
    "hexadecimal bytes": lambda text: text.encode().hex(" "),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 for URLs": lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
    "base64 after 1 byte": lambda text: base64.b64encode(b":" + text.encode() + b"more").decode(),
    "base64 of a header": lambda text: base64.b64encode(b"Bearer " + text.encode() + b"!").decode(),
    "base64 of a dictionary": lambda text: base64.b64encode(f"key: {text}.".encode()).decode(),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_secret_is_redacted_in_every_encoding(name: str) -> None:
    text = f"your key {ENCODINGS[name](SECRET)} has no credit left"
    kept = redacted(text, SECRET)
    assert kept.startswith("your key ")
    assert kept.endswith(" has no credit left")
    assert "***" in kept
    assert len(kept) < len("your key  has no credit left") + 40


def test_other_texts_and_short_secrets_stay_readable() -> None:
    assert redacted("the answer is 12", SECRET) == "the answer is 12"
    assert redacted("abcdefghijkl 6162 YWI=", "ab") == "***cdefghijkl 6162 YWI="
    assert redacted("text", "") == "text"
