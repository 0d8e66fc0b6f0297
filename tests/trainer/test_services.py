from __future__ import annotations

import asyncio

from braid.models.tokenizer import character_tokenizer
from braid.rollout.engine import Completion, Request
from braid.trainer.services import PolicyJudge


class _Says:
    """An engine that always gives the same reply."""

    version = 0

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    async def generate(self, request: Request) -> Completion:
        return Completion(self._ids, [0.0] * len(self._ids), "stop", 0, 0.0, 0.0)


def test_a_policy_that_reasons_judges_by_its_answer() -> None:
    tokenizer = character_tokenizer("ask 0123456789<>/think")
    said = tokenizer.encode("<think>2 or 9</think>7", add_special_tokens=False)
    judge = PolicyJudge(_Says([*said, 1]), tokenizer, (1,), seed=0)  # pyright: ignore[reportArgumentType]
    asked = judge([{"role": "user", "content": "ask"}], max_tokens=30, temperature=0.0, key=(1,))
    assert asyncio.run(asked) == "7"
