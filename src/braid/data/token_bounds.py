"""How many tokens a text can have at most, without tokenizing it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tokenizers.pre_tokenizers import ByteLevel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Sequence", "Prepend", "Replace"}
"""These leave ASCII as it is, but for a space, which SentencePiece writes as U+2581, in 3 bytes."""
_GROWTH = 12
"""Each makes at most 11 times as many UTF-8 bytes of a character (NFKC of U+FDFA)."""
_KEEPING = {"ByteLevel", "Split", "Digits", "Punctuation", "Sequence", "Metaspace"}
"""Pre-tokenizers that keep all characters, unless their behavior is Removed. Metaspace writes a space in 3
bytes."""


@dataclass(frozen=True, slots=True)
class TokenBound:
    """A text that is not empty has at least one token and at most `most(text)`: each stands for at least one
    byte of the text that normalizers and pre-tokenizers leave."""

    per_ascii: int
    added: int

    def most(self, text: str) -> int:
        """An upper bound of the number of tokens."""
        size = len(text) * self.per_ascii if text.isascii() else _GROWTH * len(text.encode(errors="replace"))
        return size + self.added


def token_bound(tokenizer: PreTrainedTokenizerBase) -> TokenBound | None:
    """The bound of a tokenizer; None if its parts allow none to be stated."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else _bound(backend.to_str(), backend.num_special_tokens_to_add(False))


@lru_cache(maxsize=1)  # parsing a large vocabulary takes 0.2 s, and each source of a run asks
def _bound(tokenizer_json: str, num_special: int) -> TokenBound | None:
    described: dict[str, Any] = json.loads(tokenizer_json)
    model, keeps = described["model"], list(_parts(described["pre_tokenizer"]))
    normalizers = {_normalizer(part) for part in _parts(described["normalizer"])}
    kinds = {part["type"] for part in keeps}
    is_kept = kinds <= _KEEPING and all(part.get("behavior") != "Removed" for part in keeps)
    if not is_kept or not normalizers <= _NORMALIZERS or model["type"] not in ("BPE", "WordLevel"):
        return None
    has_prefix = "Prepend" in normalizers or any(
        part.get("add_prefix_space") or part.get("prepend_scheme", "never") != "never" for part in keeps
    )
    if has_prefix and any(len(token["content"]) < 2 for token in described["added_tokens"]):
        # the text after each added token gets a prefix, which the token's own bytes must make up for
        return None
    has_all = "ByteLevel" in kinds and model["vocab"].keys() >= set(ByteLevel.alphabet())
    if not has_all and model.get("unk_token") is None:  # unknown characters have no token
        return None
    spaces = {"Metaspace", "Replace"} & (kinds | normalizers)
    return TokenBound(3 if spaces else 1, num_special + 4)  # a leading space


def _normalizer(part: Mapping[str, Any]) -> str:
    """Its kind, if it is a known use of it."""
    is_odd = (
        part["type"] == "Replace" and (part["pattern"], part["content"]) != ({"String": " "}, "\u2581")
    ) or (part["type"] == "Prepend" and part["prepend"] != "\u2581")
    return "other" if is_odd else part["type"]


def _parts(described: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, and those in it."""
    if described is not None:
        yield described
        for inside in (*described.get("normalizers", ()), *described.get("pretokenizers", ())):
            yield from _parts(inside)
