"""Markers of reasoning in text, one table for the chat formats that parse it and the rewards that skip it."""

from __future__ import annotations

import re
from collections import deque

OF_MODELS = (
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<think>", "</think>"),
)
"""Start and end of the reasoning of Gemma 4, Command A, Seed-OSS, MiniMax-M3, Magistral, Kimi and Sky-T1,
whose templates have the first of them; other models, and those that only a prompt tells to reason, write
`<think>`."""
OF_PROMPTS = tuple((f"<{name}>", f"</{name}>") for name in ("thinking", "thought", "reasoning"))
"""What prompts tell models to write around their reasoning."""


def _pattern(pairs: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    """A marker; group 1 is an end."""
    starts, ends = ("|".join(map(re.escape, markers)) for markers in zip(*pairs, strict=True))
    return re.compile(rf"({ends})|(?:{starts})")


_PROMPTED, _ANY = _pattern(OF_PROMPTS), _pattern(OF_MODELS + OF_PROMPTS)


def without_reasoning(text: str, *, is_parsed: bool = False) -> str:
    """The text after the last reasoning; empty if that does not end. With `is_parsed` the model's format has
    already found the reasoning and `text` follows it: a model's marker in it is one that the answer speaks
    of."""
    marks = deque((_PROMPTED if is_parsed else _ANY).finditer(text), maxlen=1)
    if not marks:
        return text
    return text[marks[0].end() :] if marks[0][1] else ""
