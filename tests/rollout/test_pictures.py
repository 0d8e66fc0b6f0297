"""Images in the native engine: its log-probs are those of training, in groups and over turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.native_engines import make_engine
from tests.picture_talks import QUESTIONS, make_lm, talk, trained_logprobs
from tests.pictures import FAMILIES

from braid.models.causal_lm import CausalLM
from braid.rollout.engine import Completion, Request


def talks(
    lm: CausalLM, members: int = 3, **settings: Any
) -> dict[tuple[int, int, int], tuple[Request, Completion]]:
    assert lm.vision is not None
    return talk(make_engine(lm, **settings), lm.vision, members)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_log_probs_are_those_of_training(family: str) -> None:
    lm = make_lm(family)
    assert lm.vision is not None
    for request, completion in talks(lm, compile="always").values():
        assert not {*completion.token_ids} & {*lm.vision.reserved}
        expected = trained_logprobs(lm, request, completion)
        # a chunk and a step of a gated delta net round differently, and Gemma 4's embeddings are large
        bound = {"qwen3_5": 1e-4, "gemma4": 4e-5}.get(family, 1e-5)
        assert np.abs(expected.numpy() - completion.logprobs).max() < bound


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "internvl", "gemma3"])
def test_stored_prefixes_with_images_change_no_number(family: str) -> None:
    lm = make_lm(family)
    cached, anew = (talks(lm, prefix_caching=flag) for flag in (True, False))
    for name, (_, completion) in anew.items():
        assert cached[name][1].token_ids == completion.token_ids, name
        bound = 1e-4 if lm.has_states else 1e-5
        assert np.allclose(cached[name][1].logprobs, completion.logprobs, atol=bound)


def test_equal_tokens_with_another_image_are_another_prompt() -> None:
    done = talks(make_lm("qwen3_vl"), members=1)
    assert done[0, 0, 0][0].prompt_ids == done[1, 0, 0][0].prompt_ids
    assert done[0, 0, 0][0].identity != done[1, 0, 0][0].identity
    assert not np.allclose(done[0, 0, 0][1].logprobs, done[1, 0, 0][1].logprobs, atol=1e-3)


def test_an_image_is_encoded_once_per_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make_lm("qwen3_vl")
    backbone: Any = lm.backbone
    read: list[int] = []
    encode = type(backbone).get_image_features

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(len(kwargs["image_grid_thw"]))
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(type(backbone), "get_image_features", counted)
    talks(lm, members=4)
    of_questions = len({image for _, images in QUESTIONS for image in images})
    assert sum(read) <= of_questions + len(QUESTIONS) * 2  # the second turns of two members read one more
