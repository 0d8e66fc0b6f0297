"""The native engine on CUDA: graphs and eager decoding are one, and both are the plain model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from tests.native_engines import make_engine
from transformers import AutoConfig, AutoModelForCausalLM

from braid.config.model import ModelConfig
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy
from braid.models.routing import Routing, routed
from braid.rollout.engine import Completion, Request, Sampling
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.native.engine import NativeEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]


@pytest.fixture
def lm() -> CausalLM:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "head_dim": 32,
        "max_positions": 1024,
    }
    config = ModelConfig.model_validate({"build": sizes})
    return load_policy(config, temperature=1.0, seed=0, device=torch.device("cuda"))


SETTINGS = {"max_running": 24, "compile": "always", "prefix_caching": False}


def engine_of(lm: CausalLM, autocast: torch.dtype | None = None, **settings: Any) -> NativeEngine:
    """With SETTINGS, where `settings` do not say otherwise."""
    return make_engine(lm, InProcess(str, autocast), **{**SETTINGS, **settings})


def requests(num: int, **how: float | bool) -> list[Request]:
    return [
        Request(tuple(range(3, 8 + i % 5)), Sampling(max_new_tokens=20 + i, **how), (i,))  # pyright: ignore[reportArgumentType]
        for i in range(num)
    ]


def run_all(engine: NativeEngine, work: Sequence[Request]) -> list[Completion]:
    async def gather() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(r) for r in work))

    return asyncio.run(gather())


def plain_logprobs(lm: CausalLM, request: Request, completion: Completion) -> torch.Tensor:
    model = deepcopy(lm.model)
    model.set_attn_implementation("eager")
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]], device="cuda")
    with torch.no_grad():
        logps = model(ids, use_cache=False).logits[0].double().log_softmax(-1).cpu()
    before = slice(len(request.prompt_ids) - 1, -1)
    return logps[before].gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("compile", ["always", "never"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_logprobs_are_those_of_a_plain_forward(cuda_graphs: bool, compile: str, lm: CausalLM) -> None:
    work = requests(40, top_k=0)
    engine = engine_of(lm, cuda_graphs=cuda_graphs, compile=compile)
    for request, completion in zip(work, run_all(engine, work), strict=True):
        expected = plain_logprobs(lm, request, completion)
        # float32 products, summed in other orders
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, **WINDOWS},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS},
    "qwen3": {},
}
"""With softcaps, with sinks, and with neither."""


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_later_turns_have_the_logprobs_of_a_plain_forward(architecture: str, prefix_caching: bool) -> None:
    """With prefix caching a later turn continues from the cache."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 1}  # fmt: skip
    config = AutoConfig.for_model(architecture, **sizes, **ARCHITECTURES[architecture])
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    lm = CausalLM(model.eval())
    engine = engine_of(lm, prefix_caching=prefix_caching)
    prompts = [tuple(range(3, 8 + i)) for i in range(12)]
    for turn in range(3):
        work = [
            Request(ids, Sampling(max_new_tokens=6 + i), (i, turn), (i,)) for i, ids in enumerate(prompts)
        ]
        done = run_all(engine, work)
        for request, completion in zip(work, done, strict=True):
            expected = plain_logprobs(lm, request, completion)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4
            )
        prompts = [(*ids, *c.token_ids, 7, 8 + turn) for ids, c in zip(prompts, done, strict=True)]
    assert bool(engine._prefixes) == prefix_caching


def test_graphs_record_the_experts_of_a_plain_forward() -> None:
    """Sequences end at different times, so that slots move. Experts are batched, because grouped products of
    float32 wait for the device, which no graph can do, and those of bf16 round choices."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
             "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
             "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **sizes)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lm, work = CausalLM(model.eval()), requests(12)
    lm.model.set_experts_implementation("batched_mm")
    run = InProcess(str, records_experts=True)
    engine = make_engine(lm, run, max_running=8, prefix_caching=False)
    completions = run_all(engine, work)
    assert engine._decoder._graphs, "steps were replayed"
    plain = deepcopy(lm.model)
    plain.set_attn_implementation("eager")
    for request, completion in zip(work, completions, strict=True):
        ids = [*request.prompt_ids, *completion.token_ids[:-1]]
        with torch.no_grad(), routed(routing := Routing()):
            plain(torch.tensor([ids], device="cuda"), use_cache=False)
        expected = np.sort(routing.stacked(8).cpu().numpy(), axis=-1)
        assert len(np.unique(expected[len(request.prompt_ids) :])) > 2, "tokens choose different experts"
        assert completion.experts is not None
        np.testing.assert_array_equal(np.sort(completion.experts, axis=-1), expected)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_graphs_and_eager_decoding_give_the_same_greedy_tokens(
    autocast: torch.dtype | None, lm: CausalLM
) -> None:
    work = requests(30, greedy=True)
    graphs, eager = (
        [c.token_ids for c in run_all(engine_of(lm, cuda_graphs=on, autocast=autocast), work)]
        for on in (True, False)
    )
    assert graphs == eager


def test_the_cache_takes_most_of_the_free_memory_at_most(lm: CausalLM) -> None:
    free = torch.cuda.mem_get_info()[0]
    engine = engine_of(lm)
    run_all(engine, requests(4))
    assert engine._cache.budget_tokens is not None
    per_token = 2 * 2 * 2 * 32 * 4  # at most: keys and values, 2 layers, 2 heads of 32, 4 bytes
    assert 0.3 * free < engine._cache.budget_tokens * per_token
    assert engine.cache_bytes < 0.8 * free


def test_graphs_see_weights_changed_in_place_and_weights_replaced(lm: CausalLM) -> None:
    engine, work = engine_of(lm), requests(8)
    for replaces in (False, True):
        with torch.no_grad():
            for parameter in lm.model.parameters():
                changed = parameter * 1.2
                if replaces:
                    parameter.data = changed
                else:
                    parameter.copy_(changed)
        asyncio.run(engine.set_weights(1))
        for request, completion in zip(work, run_all(engine, work), strict=True):
            expected = plain_logprobs(lm, request, completion)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4
            )


def test_graphs_see_buffers_that_have_moved(lm: CausalLM) -> None:
    """As an offloaded model's do: graphs would read the memory where they were."""
    engine, work = engine_of(lm), requests(8, greedy=True)
    expected = [c.token_ids for c in run_all(engine, work)]
    buffers = list(engine._lm.model.buffers())
    assert buffers
    for buffer in buffers:
        old, buffer.data = buffer.data, buffer.data.clone()
        old.fill_(float("nan"))
    asyncio.run(engine.set_weights(1))
    assert [c.token_ids for c in run_all(engine, work)] == expected


def test_every_kind_of_sampling_runs_on_the_device(lm: CausalLM) -> None:
    how = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    done = run_all(engine_of(lm), requests(20, **how))
    assert [len(c.token_ids) for c in done] == [20 + i for i in range(20)]
    assert all(p <= 0 for c in done for p in c.logprobs)
