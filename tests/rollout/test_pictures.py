"""Pictures in the native engine: its log-probs are those of training, in groups and over turns."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from tests.native_engines import make_engine
from tests.pictures import FAMILIES, model_of, picture, vision_of

from braid.models.causal_lm import CausalLM
from braid.rollout.engine import Completion, Request, Sampling
from braid.training.packing import pack
from braid.types import Image, Placed, Row

SAMPLING = Sampling(max_new_tokens=9, temperature=1.0)
MARK = -1
"""In place of the family's placeholder."""
QUESTIONS: list[tuple[list[int], list[Image]]] = [
    ([5, MARK, 6, 7], [picture(1)]),
    ([5, MARK, 6, 7], [picture(5)]),  # equal tokens, another picture
    ([9, 8, 7], []),
    ([5, MARK, 11, MARK, 6, 7], [picture(0), picture(2)]),
]
SECOND: list[tuple[list[int], list[Image]]] = [([12, MARK, 13], [picture(3)]), ([14, 15], [])]


def make_lm(family: str) -> CausalLM:
    lm = CausalLM(model_of(family))
    lm.vision = vision_of(family)
    return lm


def trained_logprobs(lm: CausalLM, ids: list[int], images: tuple[Placed, ...], num: int) -> torch.Tensor:
    """Log-probs of the last `num` tokens of a row."""
    mask = np.arange(len(ids)) >= len(ids) - num
    fields = {"behavior_logprobs": np.zeros(len(ids), np.float32)}
    row = Row({"input_ids": np.array(ids)}, mask, group=0, trajectory=0, fields=fields, images=images)
    with torch.no_grad():
        return lm.forward(pack([row], lm.device), frozenset({"logprobs"}))["logprobs"][-num:]


def talk(
    lm: CausalLM, members: int = 3, **settings: Any
) -> dict[tuple[int, int, int], tuple[Request, Completion]]:
    """Two turns of `members` conversations for each question; by question, member and turn."""
    assert lm.vision is not None
    vision, engine = lm.vision, make_engine(lm, **settings)

    def expanded(ids: list[int], images: list[Image]) -> tuple[list[int], tuple[Placed, ...]]:
        return vision.expand([vision.placeholder if token == MARK else token for token in ids], images)

    async def converse(question: int, member: int) -> list[tuple[Request, Completion]]:
        ids, images = expanded(*QUESTIONS[question])
        done: list[tuple[Request, Completion]] = []
        for turn, (more, pictures) in enumerate([([], []), SECOND[member % 2]]):
            new, placed = expanded(more, pictures)
            images = (*images, *(one._replace(start=one.start + len(ids)) for one in placed))
            ids = [*ids, *new]
            name = (question, member)
            request = Request(tuple(ids), SAMPLING, (*name, turn), name, images)
            done.append((request, await engine.generate(request)))
            ids += done[-1][1].token_ids
        return done

    async def all_of_them() -> dict[tuple[int, int, int], tuple[Request, Completion]]:
        names = [(question, member) for question in range(len(QUESTIONS)) for member in range(members)]
        turns = await asyncio.gather(*(converse(*name) for name in names))
        return {
            (*name, turn): done
            for name, of_name in zip(names, turns, strict=True)
            for turn, done in enumerate(of_name)
        }

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_log_probs_are_those_of_training(family: str) -> None:
    lm = make_lm(family)
    assert lm.vision is not None
    for request, completion in talk(lm, compile="always").values():
        ids = [*request.prompt_ids, *completion.token_ids]
        assert not {*completion.token_ids} & {*lm.vision.reserved}
        expected = trained_logprobs(lm, ids, request.images, len(completion.token_ids))
        # a chunk and a step of a gated delta net round differently, and Gemma 4's embeddings are large
        bound = {"qwen3_5": 1e-4, "gemma4": 4e-5}.get(family, 1e-5)
        assert np.abs(expected.numpy() - completion.logprobs).max() < bound


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "internvl", "gemma3"])
def test_stored_prefixes_with_pictures_change_no_number(family: str) -> None:
    lm = make_lm(family)
    cached, anew = (talk(lm, prefix_caching=flag) for flag in (True, False))
    for name, (_, completion) in anew.items():
        assert cached[name][1].token_ids == completion.token_ids, name
        bound = 1e-4 if lm.has_states else 1e-5
        assert np.allclose(cached[name][1].logprobs, completion.logprobs, atol=bound)


def test_equal_tokens_with_another_picture_are_another_prompt() -> None:
    done = talk(make_lm("qwen3_vl"), members=1)
    assert done[0, 0, 0][0].prompt_ids == done[1, 0, 0][0].prompt_ids
    assert done[0, 0, 0][0].identity != done[1, 0, 0][0].identity
    assert not np.allclose(done[0, 0, 0][1].logprobs, done[1, 0, 0][1].logprobs, atol=1e-3)


def test_a_picture_is_encoded_once_per_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make_lm("qwen3_vl")
    backbone: Any = lm.backbone
    read: list[int] = []
    encode = type(backbone).get_image_features

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(len(kwargs["image_grid_thw"]))
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(type(backbone), "get_image_features", counted)
    talk(lm, members=4)
    of_questions = len({image for _, images in QUESTIONS for image in images})
    assert sum(read) <= of_questions + len(QUESTIONS) * 2  # the second turns of two members read one more
