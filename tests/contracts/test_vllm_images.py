"""Images in vLLM: its log-probs are those of training, for the families that braid samples from with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from tests.needs import WITH_VLLM
from tests.picture_talks import MARK, SECOND, Question, make_lm, talk, trained_logprobs
from tests.pictures import config_of, picture
from torch import Tensor

from braid.errors import EngineError
from braid.models.causal_lm import CausalLM
from braid.rollout.engine import RolloutEngine
from braid.rollout.engines.vllm.kind import CPU_HEAD_SIZES, FAMILIES_WITH_IMAGES

from .engines import vllm

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm"), WITH_VLLM]

TOLERANCE = 1e-4
"""fp32 with other kernels, which sum in another order: 5e-6 was the most."""
BLOCK = 32
LONG = [6, 7, 8] * 12
"""Fills blocks of the prefix cache."""
QUESTIONS: list[Question] = [
    ([5, MARK, *LONG], [picture(1)]),
    ([5, MARK, *LONG], [picture(5)]),  # equal tokens, another picture
    ([9, *LONG], []),
    ([*LONG, MARK, 11, MARK, 6, 7], [picture(0), picture(2)]),
]


def config_for_cpus(family: str) -> Any:
    """The family's config with heads of the least size that vLLM has kernels for."""
    config = config_of(family)
    text, size = config.text_config, CPU_HEAD_SIZES[0]
    text.num_attention_heads, text.num_key_value_heads, text.head_dim = 2, 1, size
    text.rope_parameters["mrope_section"] = [6, 5, 5]
    return config


def family_params() -> list[Any]:
    return [
        pytest.param(family, marks=[] if family == "qwen3_vl" else [pytest.mark.nightly])
        for family in FAMILIES_WITH_IMAGES
    ]


@pytest.fixture(scope="module", params=family_params())
def lm_and_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[CausalLM, RolloutEngine]]:
    lm = make_lm(request.param, config_for_cpus(request.param))
    with vllm(lm, tmp_path_factory.mktemp(request.param), block_size=BLOCK) as engine:
        sync(engine, 1, lm.named_weights())
        yield lm, engine


def sync(engine: RolloutEngine, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
    def load() -> None:
        engine.load_weights(version, weights)  # pyright: ignore[reportAttributeAccessIssue]

    asyncio.run(engine.set_weights(version, "drain", load))


def test_log_probs_with_images_are_those_of_training_after_each_sync(
    lm_and_engine: tuple[CausalLM, RolloutEngine],
) -> None:
    """Groups, turns, prompts with no image and with two; stored prefixes and features are of their images,
    and of the current weights."""
    lm, engine = lm_and_engine
    assert lm.vision is not None
    generator = torch.Generator().manual_seed(3)
    for version in (1, 2):
        if version > 1:
            for _, weight in lm.named_weights():
                weight.data.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)
            sync(engine, version, lm.named_weights())
        done = talk(engine, lm.vision, questions=QUESTIONS)
        for request, completion in done.values():
            assert completion.policy_version == version
            assert not {*completion.token_ids} & {*lm.vision.reserved}
            expected = trained_logprobs(lm, request, completion)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=TOLERANCE)
        assert done[0, 0, 0][0].prompt_ids == done[1, 0, 0][0].prompt_ids
        (request, _), (_, other) = done[0, 0, 0], done[1, 0, 0]
        swapped = trained_logprobs(lm, request, other)
        assert (torch.tensor(other.logprobs) - swapped).abs().max() > 100 * TOLERANCE


def test_a_weight_of_the_tower_that_was_not_sent_is_an_error(
    lm_and_engine: tuple[CausalLM, RolloutEngine],
) -> None:
    lm, engine = lm_and_engine
    assert lm.vision is not None
    without = ((name, weight) for name, weight in lm.named_weights() if "patch_embed" not in name)
    with pytest.raises(EngineError, match=r"lacked .* weights of vLLM's .*patch_embed"):
        sync(engine, 8, without)
    sync(engine, 9, lm.named_weights())
    assert talk(engine, lm.vision, 1, [SECOND[0]])
