from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.pictures import TOKENIZER, picture, vision_of

from braid.errors import RewardError
from braid.models.tokenizer import character_tokenizer
from braid.rollout.engine import Completion, Request
from braid.trainer.services import EngineJudge


class _Says:
    """An engine that always gives the same reply."""

    version = 0

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        return Completion(self._ids, [0.0] * len(self._ids), "stop", 0, 0.0, 0.0)


def test_a_policy_that_reasons_judges_by_its_answer() -> None:
    tokenizer = character_tokenizer("ask 0123456789<>/think")
    said = tokenizer.encode("<think>2 or 9</think>7", add_special_tokens=False)
    judge = EngineJudge(_Says([*said, 1]), tokenizer, (1,), seed=0)  # pyright: ignore[reportArgumentType]
    asked = judge([{"role": "user", "content": "ask"}], max_tokens=30, temperature=0.0, key=(1,))
    assert asyncio.run(asked) == "7"


def test_a_policy_that_reads_images_judges_with_them() -> None:
    vision = vision_of("qwen3_vl")
    says = _Says([*TOKENIZER.encode("yes", add_special_tokens=False), 1])
    judge = EngineJudge(says, TOKENIZER, (1,), seed=0, vision=vision)  # pyright: ignore[reportArgumentType]

    def ask(content: Any) -> str:
        asked = judge([{"role": "user", "content": content}], max_tokens=30, temperature=0.0, key=(1,))
        return asyncio.run(asked)

    image = {"type": "image", "image": picture(1)}
    assert ask([image, {"type": "text", "text": "is it right?"}]) == "yes"
    (request,) = says.asked
    ids, images = vision.expand([vision.placeholder, *TOKENIZER.encode("is it right?")], [picture(1)])
    assert (list(request.prompt_ids), request.images) == (ids, images)
    with pytest.raises(RewardError, match="but 1 placeholders"):
        ask(f"is {vision.mark} right?")
