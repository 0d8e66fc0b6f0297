"""Regular expressions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from .base import RewardPart

if TYPE_CHECKING:
    from braid.rewards.base import Making, Part


class PatternReward(RewardPart):
    """1 if the turn matches a regular expression, else 0; for format rewards."""

    kind: Literal["pattern"]
    """A regular expression to search for in the last turn."""
    pattern: str
    """Regular expression, searched for in what the part reads (dot matches newlines)."""
    reads: Literal["text", "answer"] = "text"
    """text: the last turn with its special tokens and reasoning, and with the `<think>` with which the chat
    template may begin it. answer: only the answer."""

    is_deterministic: ClassVar[bool] = True

    def build(self, making: Making) -> Part:
        from braid.rewards.base import Part
        from braid.rewards.rules import matches

        return Part(matches(self, making.timeout_s, key=f"{making.key}.pattern"))
