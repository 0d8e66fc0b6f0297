"""What every rollout engine owes its callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from braid.config.model import ModelConfig
from braid.errors import EngineError
from braid.models.loading import load_policy, load_tokenizer
from braid.rollout.engine import Completion, Request, RolloutEngine, Sampling
from braid.rollout.engines.native import NativeEngine

MODEL = ModelConfig.model_validate(
    {
        "build": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_layers": 2,
            "head_dim": 16,
            "max_positions": 128,
        }
    }
)


def native() -> RolloutEngine:
    lm = load_policy(MODEL, temperature=1.0, seed=0, device=torch.device("cpu"))
    return NativeEngine(lm, decode=load_tokenizer(MODEL).decode, max_running=8, max_length=128)  # pyright: ignore[reportArgumentType]


ENGINES: dict[str, Callable[[], RolloutEngine]] = {"native": native}


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> RolloutEngine:
    return ENGINES[request.param]()


def prompt(text: str) -> tuple[int, ...]:
    return tuple(load_tokenizer(MODEL).encode(text, add_special_tokens=False))


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Completion]:
    async def gather() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(gather())


REQUEST = Request(prompt("1+2="), Sampling(max_new_tokens=12), (0, 1))


def test_a_completion_has_a_logprob_per_token_and_says_why_it_ended(engine: RolloutEngine) -> None:
    (completion,) = generate(engine, [REQUEST])
    assert len(completion.token_ids) == len(completion.logprobs) == 12
    assert completion.stop_reason == "length"
    assert all(p <= 0 for p in completion.logprobs)
    assert completion.start_s <= completion.end_s


def test_the_end_token_is_kept(engine: RolloutEngine) -> None:
    (free,) = generate(engine, [REQUEST])
    end = free.token_ids[4]
    (ended,) = generate(engine, [replace(REQUEST, sampling=Sampling(12, stop_token_ids=(end,)))])
    assert ended.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert ended.stop_reason == "stop"


def test_the_stop_string_is_kept(engine: RolloutEngine) -> None:
    (free,) = generate(engine, [REQUEST])
    text = load_tokenizer(MODEL).decode(free.token_ids)
    assert isinstance(text, str)
    (ended,) = generate(engine, [replace(REQUEST, sampling=Sampling(12, stop_strings=(text[3:5],)))])
    assert load_tokenizer(MODEL).decode(ended.token_ids) == text[: text.index(text[3:5]) + 2]
    assert ended.stop_reason == "stop"


def test_equal_keys_give_equal_tokens_and_other_keys_others(engine: RolloutEngine) -> None:
    others = [replace(REQUEST, key=(0, i)) for i in range(2, 20)]
    first, *rest = generate(engine, [REQUEST, *others])
    assert generate(engine, [REQUEST])[0].token_ids == first.token_ids
    assert len({tuple(c.token_ids) for c in (first, *rest)}) == 19


def test_greedy_does_not_hang_on_the_key(engine: RolloutEngine) -> None:
    greedy = Sampling(max_new_tokens=8, greedy=True)
    a, b = generate(engine, [replace(REQUEST, sampling=greedy, key=(i,)) for i in range(2)])
    assert a.token_ids == b.token_ids


def test_completions_carry_the_published_version(engine: RolloutEngine) -> None:
    for version in (3, 4):
        engine.publish(version)
        assert generate(engine, [REQUEST])[0].policy_version == version


def test_a_cancelled_request_leaves_the_others_as_they_are(engine: RolloutEngine) -> None:
    requests = [replace(REQUEST, key=(i,)) for i in range(12)]
    expected = [c.token_ids for c in generate(engine, requests)]

    async def scenario() -> list[list[int]]:
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        for _ in range(4):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(d, asyncio.CancelledError) for d in done[::2])
        return [d.token_ids for d in done[1::2] if isinstance(d, Completion)]

    assert asyncio.run(scenario()) == expected[1::2]


def test_a_request_that_can_never_fit_is_an_error(engine: RolloutEngine) -> None:
    with pytest.raises(EngineError, match="positions"):
        generate(engine, [replace(REQUEST, sampling=Sampling(max_new_tokens=1000))])


def test_a_closed_engine_refuses(engine: RolloutEngine) -> None:
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        generate(engine, [REQUEST])
