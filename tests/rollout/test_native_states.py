"""States of hybrid models in the native engine: they follow their sequences through slots, groups, turns and
new weights."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.test_stateful import hybrid as hybrid_model
from tests.native_engines import COPY, make_engine
from tests.rollout.test_native_engine import (
    full_logprobs,
    interrupted_turns,
    plain,
    prompts,
)

from braid.errors import EngineError
from braid.models.causal_lm import CausalLM
from braid.plan.sizes import size_of_folder
from braid.rollout.engine import Completion, Request, Sampling
from braid.rollout.engines.native.cache import KVCache, Need, PrefillAttention
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.native.states import ContinueStates, PrefillStates, StateCache

Run = Callable[[NativeEngine, Sequence[Request]], list[Completion]]
TinyLM = Callable[..., CausalLM]
HYBRIDS = ["qwen3_5_text", "bamba", "jamba"]
ARCHITECTURES = ["qwen3_next", "kimi_linear", "falcon_h1", "jamba", "nemotron_h", "lfm2"]
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, of packages that are not installed


@pytest.fixture(params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest) -> str:
    return request.param


def requests(num: int, longest: int = 30) -> list[Request]:
    """Groups of three, of ragged prompts and answers."""
    draw = random.Random(1)
    return [
        Request(prompt, Sampling(draw.randint(1, longest)), (group, member))
        for group, prompt in enumerate(prompts(num))
        for member in range(3)
    ]


def test_a_sequence_has_the_same_bits_alone_and_in_a_full_engine(
    hybrid: str, tiny_lm: TinyLM, run_all: Run
) -> None:
    """Its slot changes as others leave, and prompts of a group are prefilled once."""
    lm, asked = tiny_lm(hybrid), requests(5)
    together = run_all(make_engine(lm, max_running=7), asked)
    for request, completion in list(zip(asked, together, strict=True))[::4]:
        alone = run_all(make_engine(lm), [request])[0]
        assert completion.token_ids == alone.token_ids
        assert completion.logprobs == alone.logprobs


def test_logprobs_of_groups_and_moved_slots_are_those_of_a_plain_forward(
    hybrid: str, tiny_lm: TinyLM, run_all: Run
) -> None:
    lm, asked = tiny_lm(hybrid), requests(4, longest=16)
    model = plain(lm)
    for request, completion in zip(asked, run_all(make_engine(lm, max_running=7), asked), strict=True):
        expected = full_logprobs(model, request.prompt_ids, completion.token_ids, 1.0)
        # A gated delta net amplifies rounding: its own decoding in transformers is as far from a full pass.
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("num_new", [1, 6])
def test_a_turn_continues_from_the_states_of_the_last_one(
    hybrid: str, num_new: int, tiny_lm: TinyLM, run_all: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, continued = tiny_lm(hybrid), list[int]()
    mix = ContinueStates.mix

    def counted(self: ContinueStates, *args: object) -> object:
        continued.append(sum(self.sizes))
        return mix(self, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(ContinueStates, "mix", counted)
    engine = make_engine(lm, prefix_caching=True)
    histories = [prompt[:20] for prompt in prompts(3)]
    for turn in range(3):
        asked = [
            Request(tuple(history), Sampling(5 + 2 * c, greedy=True), (c, turn), (c,))
            for c, history in enumerate(histories)
        ]
        done = run_all(engine, asked)
        fresh = run_all(make_engine(lm), asked)
        for with_states, anew in zip(done, fresh, strict=True):
            assert with_states.token_ids == anew.token_ids
            np.testing.assert_allclose(with_states.logprobs, anew.logprobs, atol=1e-4)
        histories = [
            (*request.prompt_ids, *completion.token_ids, *range(9, 8 + num_new))
            for request, completion in zip(asked, done, strict=True)
        ]
    assert continued[0] == 3 * num_new, "and the last token of the turn before"


@pytest.mark.parametrize("recompute_cache", [False, True])
def test_states_of_old_weights_are_recomputed_or_kept_until_the_turn_ends(
    hybrid: str, recompute_cache: bool, tiny_lm: TinyLM, run_all: Run
) -> None:
    lm = tiny_lm(hybrid)
    engine = make_engine(lm, COPY, recompute_cache=recompute_cache)
    interrupted, later, after = asyncio.run(interrupted_turns(engine, lm))
    (_, num_old), _ = interrupted.policy_version  # pyright: ignore[reportGeneralTypeIssues]
    prefix = (3, 4, 5, *interrupted.token_ids[:num_old])
    rest = run_all(make_engine(lm), [Request(prefix, Sampling(30 - num_old, greedy=True), (0, 0))])[0]
    same = np.allclose(rest.logprobs, interrupted.logprobs[num_old:], atol=1e-4)
    assert same == recompute_cache
    anew = run_all(make_engine(lm), [later])[0]
    assert after.token_ids == anew.token_ids
    np.testing.assert_allclose(after.logprobs, anew.logprobs, atol=1e-4)


def test_states_count_as_memory_of_the_cache_and_are_freed(
    hybrid: str, tiny_lm: TinyLM, run_all: Run
) -> None:
    engine = make_engine(tiny_lm(hybrid))
    run_all(engine, requests(2))
    states = engine._cache.states
    assert engine.cache_bytes > states.num_bytes > 0
    assert states.num_bytes % states.bytes_per_slot == 0
    engine.sleep()
    assert engine.cache_bytes == 0


def test_kept_conversations_are_charged_for_their_states(tiny_lm: TinyLM, run_all: Run) -> None:
    engine = make_engine(tiny_lm("qwen3_5_text"), prefix_caching=True, kv_budget_tokens=128)
    run_all(engine, [Request((3, 4, 5), Sampling(4), (c,), (c,)) for c in range(8)])
    states = engine._cache.states.bytes_per_slot
    per_token = 2 * 2 * 8 * 4  # keys and values of two heads of 8 numbers, in fp32, in one layer
    assert engine._prefix_tokens == len(engine._prefixes) * (6 + states // per_token) <= 128
    assert 0 < len(engine._prefixes) < 8


def test_the_budget_of_a_device_leaves_room_for_the_states_of_all_slots(tiny_lm: TinyLM) -> None:
    with torch.inference_mode():
        lm = tiny_lm("qwen3_5_text")
        few, many = (make_engine(lm, max_running=n)._tokens_within(2**26) for n in (16, 1024))
        engine = make_engine(lm)
        with pytest.raises(EngineError, match=r"states of rollout\.engine\.max_running=256 sequences take"):
            engine._tokens_within(2**16)
    sample = StateCache()
    sample.layers = {0: [torch.zeros(1, 2 * 2 * 8 + 4 * 8, 4), torch.zeros(1, 4, 8, 8)]}
    assert (few - many) == pytest.approx((1024 - 16) * sample.bytes_per_slot // (2 * 2 * 8 * 4), abs=1)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "olmo_hybrid"])
def test_the_plan_knows_the_size_of_states_from_a_models_files(architecture: str, tmp_path: Path) -> None:
    lm = CausalLM(hybrid_model(architecture))
    lm.model.save_pretrained(tmp_path)
    size = size_of_folder(tmp_path)
    assert size is not None
    cache, length = KVCache(64, 1), 16
    cache.reserve([Need(length)])
    cache.add(length)
    attention = PrefillStates(
        PrefillAttention(cache, 0, [(length, 1)]), cache.states, 0, [(length, length, 1)]
    )
    with torch.no_grad():
        lm.hidden(torch.arange(length), torch.arange(length), attention)
    assert size.state_numbers * 4 == cache.states.bytes_per_slot
    stored = cache.stored(0, 1)
    if stored and not size.is_latent:
        assert size.kv_numbers_per_token == sum(key.numel() + value.numel() for key, value in stored)
