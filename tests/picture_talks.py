"""Conversations with images, and what the trainer makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tests.pictures import model_of, picture, vision_of

from braid.models.causal_lm import CausalLM
from braid.models.vision import Vision
from braid.rollout.engine import Completion, Request, RolloutEngine, Sampling
from braid.training.packing import pack
from braid.types import Image, Placed, Row

SAMPLING = Sampling(max_new_tokens=9, temperature=1.0)
MARK = -1
"""In place of the family's placeholder."""
Question = tuple[list[int], list[Image]]
QUESTIONS: list[Question] = [
    ([5, MARK, 6, 7], [picture(1)]),
    ([5, MARK, 6, 7], [picture(5)]),  # equal tokens, another image
    ([9, 8, 7], []),
    ([5, MARK, 11, MARK, 6, 7], [picture(0), picture(2)]),
]
SECOND: list[Question] = [([12, MARK, 13], [picture(3)]), ([14, 15], [])]


def make_lm(family: str, config: Any = None) -> CausalLM:
    lm = CausalLM(model_of(family, config))
    lm.vision = vision_of(family)
    return lm


def trained_logprobs(lm: CausalLM, request: Request, completion: Completion) -> torch.Tensor:
    """Log-probs of the completion's tokens in the row that is trained on."""
    ids, num = [*request.prompt_ids, *completion.token_ids], len(completion.token_ids)
    mask = np.arange(len(ids)) >= len(ids) - num
    fields = {"behavior_logprobs": np.zeros(len(ids), np.float32)}
    columns = {"input_ids": np.array(ids)}
    row = Row(columns, mask, group=0, trajectory=0, fields=fields, images=request.images)
    with torch.no_grad():
        return lm.forward(pack([row], lm.device), frozenset({"logprobs"}))["logprobs"][-num:]


def talk(
    engine: RolloutEngine, vision: Vision, members: int = 3, questions: Sequence[Question] = QUESTIONS
) -> dict[tuple[int, int, int], tuple[Request, Completion]]:
    """Two turns of `members` conversations for each question; by question, member and turn."""

    def expanded(ids: list[int], images: list[Image]) -> tuple[list[int], tuple[Placed, ...]]:
        return vision.expand([vision.placeholder if token == MARK else token for token in ids], images)

    async def converse(question: int, member: int) -> list[tuple[Request, Completion]]:
        ids, images = expanded(*questions[question])
        done: list[tuple[Request, Completion]] = []
        for turn, (more, looked) in enumerate([([], []), SECOND[member % 2]]):
            new, placed = expanded(more, looked)
            images = (*images, *(one._replace(start=one.start + len(ids)) for one in placed))
            ids = [*ids, *new]
            name = (question, member)
            request = Request(tuple(ids), SAMPLING, (*name, turn), name, images)
            done.append((request, await engine.generate(request)))
            ids += done[-1][1].token_ids
        return done

    async def all_of_them() -> dict[tuple[int, int, int], tuple[Request, Completion]]:
        names = [(question, member) for question in range(len(questions)) for member in range(members)]
        turns = await asyncio.gather(*(converse(*name) for name in names))
        return {
            (*name, turn): done
            for name, of_name in zip(names, turns, strict=True)
            for turn, done in enumerate(of_name)
        }

    return asyncio.run(all_of_them())
