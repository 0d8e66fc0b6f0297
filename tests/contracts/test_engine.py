"""The contract of rollout engines: in this process, in another one, or a server."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.errors import EngineError
from braid.models.attention import PackedAttention
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy, load_tokenizer
from braid.rollout.engine import Completion, NewWeights, Request, RolloutEngine, Sampling
from braid.rollout.engines import ENGINES as KINDS
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.remote import RemoteEngine
from braid.weights.files import FileSender
from braid.weights.sender import LinkedSender
from braid.weights.sending import Sender
from braid.weights.wire import Receipt

from .engines import ENGINES, MAX_TOKENS, MODEL, engine_params

LOGPROB_TOLERANCE = 5e-4
"""fp32 with other kernels, which sum in another order; weights are large, and logits up to about 30."""


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    """The trainer's model."""
    lm = load_policy(MODEL, temperature=1.0, seed=0, device=torch.device("cpu"))
    scale(lm, 6.0)
    return lm


@pytest.fixture(scope="module", params=engine_params())
def engine(
    request: pytest.FixtureRequest, lm: CausalLM, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutEngine]:
    with ENGINES[request.param](lm, tmp_path_factory.mktemp("engine")) as engine:
        sync(engine, lm, 1)
        yield engine


def test_every_kind_of_engine_is_held_to_the_contract() -> None:
    assert {name.partition("_")[0] for name in ENGINES} == KINDS.keys()


def sync(engine: RolloutEngine, lm: CausalLM, version: int) -> None:
    """Sync weights as a run does, also to an engine in another process."""
    asyncio.run(set_weights(engine, lm, version))


async def set_weights(engine: RolloutEngine, lm: CausalLM, version: int, when: NewWeights = "drain") -> None:
    def load() -> None:
        engine.load_weights(version, lm.named_weights())  # pyright: ignore[reportAttributeAccessIssue]

    await engine.set_weights(version, when, None if isinstance(engine, NativeEngine) else load)


def scale(lm: CausalLM, factor: float) -> None:
    """Larger weights make tokens depend on their context."""
    with torch.no_grad():
        for name, weight in lm.named_weights():
            if "norm" not in name:
                weight.mul_(factor)


def prompt(text: str) -> tuple[int, ...]:
    return tuple(load_tokenizer(MODEL).encode(text, add_special_tokens=False))


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Completion]:
    async def gather() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(gather())


@torch.no_grad()
def trainer_logits(lm: CausalLM, ids: Sequence[int]) -> Tensor:
    """[T, V] by the trainer's own forward pass."""
    context = PackedAttention([len(ids)], torch.device("cpu"))
    return lm.logits(lm.hidden(torch.tensor(ids), torch.arange(len(ids)), context))


def trainer_greedy(lm: CausalLM, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(int(trainer_logits(lm, ids)[-1].argmax()))
    return ids[len(prompt_ids) :]


def trainer_logprobs(lm: CausalLM, request: Request, completion: Completion) -> Tensor:
    """Log-probs of the completion's tokens, without truncation of the distribution."""
    ids = [*request.prompt_ids, *completion.token_ids]
    logits = trainer_logits(lm, ids)[len(request.prompt_ids) - 1 : -1] / request.sampling.temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


REQUEST = Request(prompt("1+2="), Sampling(max_new_tokens=12), (0, 1))


def test_a_completion_has_a_logprob_per_token_and_a_stop_reason(engine: RolloutEngine) -> None:
    before_s = time.time()
    (completion,) = generate(engine, [REQUEST])
    assert len(completion.token_ids) == len(completion.logprobs) == 12
    assert completion.stop_reason == "length"
    assert all(p <= 0 for p in completion.logprobs)
    assert before_s <= completion.start_s <= completion.end_s <= time.time()


def test_greedy_output_equals_the_trainers_after_each_weight_sync(
    engine: RolloutEngine, lm: CausalLM
) -> None:
    prompts = [prompt(text) for text in ("1+2=", "7", "say something long")]
    requests = [Request(ids, Sampling(max_new_tokens=10, greedy=True), (0,)) for ids in prompts]
    outputs = []
    for version, factor in ((2, 1.3), (3, 1 / 1.3)):
        with torch.no_grad():
            for name, weight in lm.named_weights():
                if "mlp" in name or "v_proj" in name:
                    weight.mul_(factor).add_(
                        torch.sin(torch.arange(weight.numel()) * factor).view_as(weight) * 0.05
                    )
        sync(engine, lm, version)
        completions = generate(engine, requests)
        outputs.append([c.token_ids for c in completions])
        assert outputs[-1] == [trainer_greedy(lm, ids, 10) for ids in prompts]
        assert {c.policy_version for c in completions} == {version}
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_trainer_at_the_temperature(
    engine: RolloutEngine, lm: CausalLM, temperature: float
) -> None:
    request = replace(REQUEST, sampling=Sampling(max_new_tokens=20, temperature=temperature))
    requests = [replace(request, key=(i,)) for i in range(6)]
    for asked, completion in zip(requests, generate(engine, requests), strict=True):
        expected = trainer_logprobs(lm, asked, completion)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), expected, rtol=0, atol=LOGPROB_TOLERANCE
        )


def test_logprobs_of_a_truncated_distribution_are_renormalized(
    engine: RolloutEngine, lm: CausalLM, request: pytest.FixtureRequest
) -> None:
    asked = replace(REQUEST, sampling=Sampling(max_new_tokens=12, top_k=3))
    if "sglang_server" in request.node.name:
        with pytest.raises(EngineError, match="before applying top_p, top_k and min_p"):
            generate(engine, [asked])
        return
    (completion,) = generate(engine, [asked])
    ids = [*asked.prompt_ids, *completion.token_ids]
    top = trainer_logits(lm, ids)[len(asked.prompt_ids) - 1 : -1].topk(3)
    left = dict.fromkeys(range(12), 0.0)
    for place, token in enumerate(completion.token_ids):
        assert token in top.indices[place]
        index = top.indices[place].tolist().index(token)
        left[place] = top.values[place].log_softmax(-1)[index].item()
    torch.testing.assert_close(
        torch.tensor(completion.logprobs), torch.tensor(list(left.values())), rtol=0, atol=LOGPROB_TOLERANCE
    )


def test_the_end_token_is_kept(engine: RolloutEngine) -> None:
    (free,) = generate(engine, [REQUEST])
    end = free.token_ids[4]
    (ended,) = generate(engine, [replace(REQUEST, sampling=Sampling(12, stop_token_ids=(end,)))])
    assert ended.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert ended.stop_reason == "stop"


def test_no_end_token_is_sampled_before_min_new_tokens(engine: RolloutEngine) -> None:
    (free,) = generate(engine, [REQUEST])
    ends = tuple(dict.fromkeys(free.token_ids[:3]))
    (later,) = generate(engine, [replace(REQUEST, sampling=Sampling(12, 8, stop_token_ids=ends))])
    assert not set(ends) & set(later.token_ids[:8])


def test_the_stop_string_is_kept(engine: RolloutEngine) -> None:
    tokenizer = load_tokenizer(MODEL)

    def visible(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    (free,) = generate(engine, [REQUEST])
    stop = visible(free.token_ids)[3:5]
    (ended,) = generate(engine, [replace(REQUEST, sampling=Sampling(12, stop_strings=(stop,)))])
    heads = (free.token_ids[:n] for n in range(1, 13))
    assert ended.token_ids == next(ids for ids in heads if stop in visible(ids))
    assert ended.stop_reason == "stop"


def test_a_stop_string_may_name_a_special_token(engine: RolloutEngine) -> None:
    """As chat templates' <|im_end|>. <eos> is token 1, and no end token here."""
    hot = Sampling(30, temperature=2.0, stop_strings=("<eos>",))
    done = generate(engine, [replace(REQUEST, sampling=hot, key=(5, i)) for i in range(40)])
    ended = [completion for completion in done if 1 in completion.token_ids]
    assert ended, "1,200 tokens of about 100 kinds"
    for completion in ended:
        assert completion.token_ids.index(1) == len(completion.token_ids) - 1
        assert completion.stop_reason == "stop"


def test_equal_keys_give_equal_tokens_and_other_keys_others(engine: RolloutEngine) -> None:
    hot = replace(REQUEST, sampling=Sampling(12, temperature=2.0))
    others = [replace(hot, key=(0, i)) for i in range(2, 20)]
    first, *rest = generate(engine, [hot, *others])
    assert generate(engine, [hot])[0].token_ids == first.token_ids
    assert len({tuple(c.token_ids) for c in (first, *rest)}) == 19


def test_greedy_decoding_does_not_depend_on_the_key(engine: RolloutEngine) -> None:
    greedy = Sampling(max_new_tokens=8, greedy=True)
    a, b = generate(engine, [replace(REQUEST, sampling=greedy, key=(i,)) for i in range(2)])
    assert a.token_ids == b.token_ids


def test_a_repetition_penalty_prevents_repeated_tokens(engine: RolloutEngine) -> None:
    sampling = Sampling(max_new_tokens=20, greedy=True, repetition_penalty=50.0)
    (completion,) = generate(engine, [replace(REQUEST, sampling=sampling)])
    assert len(set(completion.token_ids)) == 20


def test_a_cancelled_request_does_not_affect_others(engine: RolloutEngine) -> None:
    requests = [replace(REQUEST, key=(i,)) for i in range(12)]
    expected = [c.token_ids for c in generate(engine, requests[1::2])]
    long = Sampling(max_new_tokens=100)  # not finished by the time of the cancellation
    requests[::2] = [replace(r, sampling=long) for r in requests[::2]]

    async def scenario() -> list[Any]:
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        for _ in range(4):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for _ in range(20):  # on a busy machine an engine in another process may end them before this one goes on
        done = asyncio.run(scenario())
        assert [d.token_ids for d in done[1::2]] == expected
        assert all(isinstance(d, asyncio.CancelledError | Completion) for d in done[::2])
        if any(isinstance(d, asyncio.CancelledError) for d in done[::2]):
            return
    raise AssertionError("no request was cancelled while it ran")


def change(lm: CausalLM, seed: int) -> CausalLM:
    """Change the weights in place; returns a copy of them before."""
    before = copy.deepcopy(lm)
    with torch.no_grad():
        for name, weight in lm.named_weights():
            if "mlp" in name or "v_proj" in name:
                weight.add_(torch.sin(torch.arange(weight.numel()) * float(seed)).view_as(weight) * 0.05)
    return before


LONG = [replace(REQUEST, sampling=Sampling(100), key=(7, i)) for i in range(7)]
SHORT = replace(REQUEST, sampling=Sampling(2))
"""Engines run all of these at once."""


def test_running_requests_drain_before_new_weights_and_others_wait_for_them(
    engine: RolloutEngine, lm: CausalLM
) -> None:
    if isinstance(engine, NativeEngine):
        pytest.skip("it reads the trainer's own tensors; see tests/rollout/test_native_engine.py")
    sync(engine, lm, 20)
    requests = [replace(request, sampling=Sampling(30)) for request in LONG]

    async def scenario() -> tuple[list[Completion], list[Completion]]:
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0)  # they have begun
        switch = asyncio.create_task(set_weights(engine, lm, 21))
        await asyncio.sleep(0)
        held = [asyncio.create_task(engine.generate(request)) for request in requests]
        before = await asyncio.gather(*running)
        await switch
        return before, await asyncio.gather(*held)

    expected = generate(engine, requests)
    before, after = asyncio.run(scenario())
    assert [(c.token_ids, c.policy_version) for c in before] == [(c.token_ids, 20) for c in expected]
    assert [c.policy_version for c in after] == [21] * len(requests)


def test_interrupted_requests_continue_with_new_weights_and_each_token_has_its_version(
    engine: RolloutEngine, lm: CausalLM
) -> None:
    if isinstance(engine, NativeEngine):
        pytest.skip("it reads the trainer's own tensors; see tests/rollout/test_native_engine.py")
    sync(engine, lm, 30)
    weights: dict[int, CausalLM] = {}

    async def scenario(*versions: int) -> list[Completion]:
        running = [asyncio.create_task(engine.generate(request)) for request in LONG]
        for version in versions:
            weights[version - 1] = change(lm, version)
            await engine.generate(SHORT)  # the others get tokens meanwhile
            await set_weights(engine, lm, version, "interrupt")
        return await asyncio.gather(*running)

    for version in range(31, 71, 2):  # a busy machine may delay an interrupt until all requests are done
        completions = asyncio.run(scenario(version, version + 1))
        weights[version + 1] = lm
        for request, completion in zip(LONG, completions, strict=True):
            check_logprobs_of_versions(weights, request, completion)
        if any(not isinstance(completion.policy_version, int) for completion in completions):
            return
    pytest.fail("no request was interrupted after its first token")


def check_logprobs_of_versions(
    weights: Mapping[int, CausalLM], request: Request, completion: Completion
) -> None:
    """Each token's log-prob is that of the weights of its version."""
    num = request.sampling.max_new_tokens
    assert len(completion.token_ids) == len(completion.logprobs) == num
    assert completion.stop_reason == "length"
    runs = completion.policy_version
    runs = ((runs, num),) if isinstance(runs, int) else runs
    versions = [version for version, length in runs for _ in range(length)]
    assert versions == sorted(versions)
    each = {version: trainer_logprobs(weights[version], request, completion) for version, _ in runs}
    expected = torch.stack([each[version][i] for i, version in enumerate(versions)])
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=LOGPROB_TOLERANCE)


def test_a_sleeping_engine_refuses_requests_and_wakes_with_new_weights(
    engine: RolloutEngine, lm: CausalLM
) -> None:
    request = replace(REQUEST, sampling=Sampling(10, greedy=True))
    expected = trainer_greedy(lm, REQUEST.prompt_ids, 10)
    sync(engine, lm, 7)
    (before,) = generate(engine, [request])
    for _ in range(2):
        engine.sleep()
    assert engine.cache_bytes == 0
    with pytest.raises(EngineError, match="asleep"):
        generate(engine, [request])
    engine.wake()
    (after,) = generate(engine, [request])
    assert before.token_ids == after.token_ids == expected
    engine.sleep()
    sync(engine, lm, 8)
    for _ in range(2):
        engine.wake()
    (last,) = generate(engine, [request])
    assert (last.token_ids, last.policy_version) == (expected, 8)


def test_a_damaged_transfer_is_reported_and_blocks_sampling_until_one_succeeds(
    engine: RolloutEngine, lm: CausalLM
) -> None:
    if isinstance(engine, NativeEngine):
        pytest.skip("it reads the trainer's own tensors: nothing is transferred")
    assert isinstance(engine, RemoteEngine)
    sync(engine, lm, 11)
    with (
        damaged(engine._sender),
        pytest.raises(EngineError, match=r"differ from what the trainer"),
    ):
        engine.load_weights(12, lm.named_weights())
    with pytest.raises(EngineError, match="has no weights"):
        generate(engine, [REQUEST])
    with pytest.raises(EngineError, match="has version None of the weights, not 12"):
        asyncio.run(engine.set_weights(12))
    sync(engine, lm, 13)
    (completion,) = generate(engine, [replace(REQUEST, sampling=Sampling(10, greedy=True))])
    assert completion.token_ids == trainer_greedy(lm, REQUEST.prompt_ids, 10)
    assert completion.policy_version == 13


@contextmanager
def damaged(sender: Sender | None) -> Iterator[None]:
    """Flip one bit of what `sender` sends, in shared memory or in a file."""
    if isinstance(sender, FileSender):
        write = sender._write

        def write_and_damage(folder: Path, version: int, weights: Iterator[tuple[str, Tensor]]) -> Receipt:
            receipt = write(folder, version, weights)
            file = folder / "bucket_00001.safetensors"
            data = bytearray(file.read_bytes())
            data[-5] ^= 4
            file.write_bytes(data)
            return receipt

        sender._write = write_and_damage
        yield
        sender._write = write
        return
    assert isinstance(sender, LinkedSender)
    assert sender._link is not None
    transfer, num_buckets = sender._link.transfer, 0

    def transfer_damaged(parts: Sequence[Tensor], deadline: float) -> None:
        nonlocal num_buckets
        num_buckets += 1
        parts = [part.clone() for part in parts]
        if num_buckets == 2:
            parts[0][0] ^= 4
        transfer(parts, deadline)

    sender._link.transfer = transfer_damaged
    yield


def test_a_request_that_can_never_fit_is_an_error(engine: RolloutEngine) -> None:
    with pytest.raises(EngineError, match="positions"):
        generate(engine, [replace(REQUEST, sampling=Sampling(max_new_tokens=MAX_TOKENS))])


def test_a_closed_engine_refuses(engine: RolloutEngine) -> None:
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        generate(engine, [REQUEST])
