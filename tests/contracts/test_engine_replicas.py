"""Several local vLLM engines behind a router, one of them with tensor parallelism."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from tests.needs import WITH_VLLM

from braid.models.loading import load_policy
from braid.rollout.engine import Request, Sampling
from braid.rollout.engines.router import Router

from .engines import MODEL, vllm
from .test_engine import generate, prompt, scale, trainer_greedy


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.xdist_group("vllm")
@WITH_VLLM
def test_every_replica_has_the_trainers_tokens_after_each_weight_sync_also_with_tensor_parallelism(
    tmp_path: Path,
) -> None:
    lm = load_policy(MODEL, temperature=1.0, seed=0, device=torch.device("cpu"))
    scale(lm, 6.0)
    prompts = [prompt(text) for text in ("1+2=", "7", "say something long", "b")]
    groups = [
        Request(ids, Sampling(max_new_tokens=8, greedy=True), (i,)) for ids in prompts for i in range(2)
    ]
    with ExitStack() as stack:
        engines = [
            stack.enter_context(vllm(lm, tmp_path / f"{size}", tensor_parallel=size)) for size in (1, 2)
        ]
        router = stack.enter_context(closing(Router(engines)))
        outputs = []
        for version, factor in ((1, 1.0), (2, 1.3)):
            with torch.no_grad():
                for name, weight in lm.named_weights():
                    if "mlp" in name:
                        weight.mul_(factor)
            router.load_weights(version, lm.named_weights())
            asyncio.run(router.set_weights(version))
            expected = [trainer_greedy(lm, ids, 8) for ids in prompts]
            for engine in engines:
                assert [c.token_ids for c in generate(engine, groups[::2])] == expected
            answers = generate(router, groups)
            assert [c.token_ids for c in answers] == [tokens for tokens in expected for _ in range(2)]
            assert {c.policy_version for c in answers} == {version}
            outputs.append(expected)
        assert outputs[0] != outputs[1]
