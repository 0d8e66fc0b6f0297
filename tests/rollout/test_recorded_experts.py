"""The native engine records the experts that it chose for each token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.mixtures import CHOSEN, EXPERTS, LAYERS, VOCAB, mixture
from tests.native_engines import make_engine

from braid.models.causal_lm import CausalLM
from braid.models.routing import Routing, routed
from braid.rollout.engine import Completion, Request, Sampling
from braid.rollout.engines.base import InProcess

PROMPTS = [tuple(np.random.default_rng(n).integers(0, VOCAB, n).tolist()) for n in (3, 3, 17, 40)]


@torch.no_grad()
def _chosen(lm: CausalLM, ids: Sequence[int]) -> np.ndarray:
    """The experts of a plain forward pass [T, L, K], sorted."""
    lm.model.set_attn_implementation("eager")
    with routed(routing := Routing()):
        lm.model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return np.sort(routing.stacked(EXPERTS).numpy(), axis=-1)


@pytest.mark.parametrize("recompute_cache", [False, True])
def test_completions_have_the_experts_of_all_tokens_but_the_last(recompute_cache: bool) -> None:
    """Requests of several lengths end at different times, those of one prompt are prefilled once, and some
    begin while others run; weights come in between, which are the same."""
    lm = mixture()
    engine = make_engine(
        lm,
        InProcess(str, owns_weights=True, records_experts=True),
        max_running=3,
        recompute_cache=recompute_cache,
    )

    async def scenario() -> list[Completion]:
        await engine.set_weights(0)
        requests = [Request(p, Sampling(4 + 5 * i), (i,)) for i, p in enumerate(PROMPTS)]
        tasks = [asyncio.create_task(engine.generate(request)) for request in (*requests, requests[0])]
        for version in (1, 2):
            for _ in range(4):
                await asyncio.sleep(0)
            await engine.set_weights(version, "interrupt")
        return await asyncio.gather(*tasks)

    completions = asyncio.run(scenario())
    engine.close()
    for prompt, completion in zip((*PROMPTS, PROMPTS[0]), completions, strict=True):
        ids = (*prompt, *completion.token_ids[:-1])
        assert completion.experts is not None
        assert completion.experts.dtype == np.int8
        assert completion.experts.shape == (len(ids), LAYERS, CHOSEN)
        np.testing.assert_array_equal(np.sort(completion.experts, axis=-1), _chosen(mixture(), ids))
