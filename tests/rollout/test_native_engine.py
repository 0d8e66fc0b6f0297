"""The native engine against the plain Hugging Face model, and against itself with other batches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.native_engines import COPY, make_engine
from tests.rounding import rounding
from transformers import PreTrainedModel

from braid.config.train import TrainConfig
from braid.errors import EngineError
from braid.models.attention import AttentionContext
from braid.models.causal_lm import CausalLM
from braid.models.vision import Sight
from braid.rollout.engine import Completion, Request, Sampling
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.native import engine as engine_module
from braid.rollout.engines.native.cache import KVCache, Need, PrefillAttention, row_blocks
from braid.rollout.engines.native.engine import NativeEngine
from braid.training.backends.single.backend import SingleBackend
from braid.types import Row

Run = Callable[[NativeEngine, Sequence[Request]], list[Completion]]
TinyLM = Callable[..., CausalLM]


def letters(token_ids: Sequence[int]) -> str:
    """One character per token, from 'A' on."""
    return "".join(chr(ord("A") + t) for t in token_ids)


def prompts(num: int, vocab_size: int = 64, longest: int = 40) -> list[tuple[int, ...]]:
    draw = random.Random(0)
    return [tuple(draw.randrange(2, vocab_size) for _ in range(draw.randint(1, longest))) for _ in range(num)]


def load(engine: NativeEngine) -> tuple[int, int]:
    """Number of running and of waiting requests."""
    return len(engine._running), len(engine._waiting)


class Counting(CausalLM):
    """Counts decoding steps, and prefilled tokens after the first of each prompt."""

    num_steps = num_prefilled = 0

    def hidden(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        sight: Sight | None = None,
    ) -> torch.Tensor:
        if isinstance(context, PrefillAttention):
            self.num_prefilled += int((positions > 0).sum())
        else:
            self.num_steps += 1
        return super().hidden(input_ids, positions, context, sight)


async def let_run(turns: int) -> None:
    """Let the engine take about so many steps."""
    for _ in range(turns):
        await asyncio.sleep(0)


def plain(lm: CausalLM) -> PreTrainedModel:
    model = deepcopy(lm.model)
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def full_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], temperature: float
) -> torch.Tensor:
    """Log-probs of `output` by one plain forward over the whole sequence."""
    logits = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
    logps = (logits[len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)
    return logps.gather(1, torch.tensor(output)[:, None])[:, 0]


@pytest.mark.parametrize("compile", ["never", "always"])
def test_greedy_tokens_are_those_of_generate(
    compile: str, architecture: str, tiny_lm: TinyLM, run_all: Run
) -> None:
    lm = tiny_lm(architecture)
    model = plain(lm)
    sampling = Sampling(max_new_tokens=20, greedy=True, stop_token_ids=(1,))
    requests = [Request(p, sampling, (i,)) for i, p in enumerate(prompts(6))]
    done = run_all(make_engine(lm, max_running=2, compile=compile), requests)
    for request, completion in zip(requests, done, strict=True):
        ids = torch.tensor([request.prompt_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20
        )  # pyright: ignore[reportCallIssue]
        assert completion.token_ids == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("compile", ["never", "always"])
def test_logprobs_are_those_of_a_plain_forward(
    compile: str, architecture: str, tiny_lm: TinyLM, run_all: Run
) -> None:
    lm = tiny_lm(architecture)
    model = plain(lm)
    sampling = Sampling(max_new_tokens=24, temperature=0.7)
    requests = [Request(p, sampling, (i,)) for i, p in enumerate(prompts(8))]
    requests += [replace(r, key=(9, *r.key), sampling=replace(sampling, greedy=True)) for r in requests[:2]]
    for request, completion in zip(
        requests, run_all(make_engine(lm, compile=compile), requests), strict=True
    ):
        expected = full_logprobs(model, request.prompt_ids, completion.token_ids, 0.7)
        # 2 layers: sums over 32 and 48 features and up to 40 positions; then over 64 tokens of the vocabulary
        tolerance = rounding(2 * (32 + 48 + 40) + 64)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=tolerance
        )


def mixed_requests(num: int) -> list[Request]:
    """Every kind of sampling, ragged prompts and limits, some prompts shared."""
    kinds = [
        Sampling(max_new_tokens=30),
        Sampling(max_new_tokens=9, temperature=0.6, top_k=5),
        Sampling(max_new_tokens=25, top_p=0.8),
        Sampling(max_new_tokens=12, min_p=0.1, temperature=1.5),
        Sampling(max_new_tokens=40, repetition_penalty=1.3, stop_token_ids=(5, 6, 7), min_new_tokens=4),
        Sampling(max_new_tokens=33, stop_strings=("AB", "Z", "xKy")),
        Sampling(max_new_tokens=21, greedy=True, repetition_penalty=1.2),
        Sampling(max_new_tokens=1),
    ]
    texts = prompts(num)
    return [Request(texts[i // 3 * 3 if i % 2 else i], kinds[i % len(kinds)], (1, i)) for i in range(num)]


def facts(completion: Completion) -> tuple[list[int], list[float], str]:
    return completion.token_ids, completion.logprobs, completion.stop_reason


@pytest.mark.slow
@pytest.mark.parametrize("compile", [pytest.param("never", marks=pytest.mark.nightly), "always"])
def test_a_request_gets_the_same_bits_in_any_batch_and_order(
    compile: str, architecture: str, tiny_lm: TinyLM, run_all: Run
) -> None:
    lm = tiny_lm(architecture)
    requests = mixed_requests(24)
    together = [facts(c) for c in run_all(make_engine(lm, compile=compile), requests)]
    alone_engine = make_engine(lm, compile=compile)
    assert [facts(run_all(alone_engine, [r])[0]) for r in requests[:8]] == together[:8]
    order = random.Random(1).sample(range(24), 24)
    for limits in ({"max_running": 5}, {"prefill_tokens": 16, "kv_budget_tokens": 400}):
        shuffled = run_all(make_engine(lm, compile=compile, **limits), [requests[i] for i in order])
        assert [facts(c) for c in shuffled] == [together[i] for i in order]


def test_requests_that_arrive_while_others_run_change_nothing(tiny_lm: TinyLM, run_all: Run) -> None:
    lm = tiny_lm()
    requests = mixed_requests(20)
    together = [facts(c) for c in run_all(make_engine(lm), requests)]
    engine = make_engine(lm, max_running=8)

    async def late(index: int) -> Completion:
        await let_run(2 * index)
        return await engine.generate(requests[index])

    async def gather() -> list[Completion]:
        return await asyncio.gather(*(late(i) for i in range(20)))

    assert [facts(c) for c in asyncio.run(gather())] == together


def test_prompts_of_a_group_are_prefilled_once(tiny_lm: TinyLM, run_all: Run) -> None:
    engine = make_engine(lm := Counting(tiny_lm().model))
    texts = prompts(3)
    sampling = Sampling(max_new_tokens=5)
    done = run_all(engine, [Request(texts[i % 3], sampling, (i,)) for i in range(12)])
    assert lm.num_prefilled == sum(len(text) - 1 for text in texts)
    assert lm.num_steps == 4, "the first tokens come with the prefill"
    assert len({tuple(c.token_ids) for c in done}) == 12, "keys differ, so samples do"


def test_the_prompt_of_a_group_is_stored_once(tiny_lm: TinyLM, run_all: Run) -> None:
    """With room for 400 tokens, six sequences of 80 + 20 tokens run at once, not three; all are as if they
    ran alone."""
    prompt = (*range(3, 60), *range(3, 26))
    group = [Request(prompt, Sampling(max_new_tokens=20), (i,)) for i in range(6)]
    others = [Request((5, i), Sampling(max_new_tokens=4 + i), (i,)) for i in range(20)]

    def run(
        requests: list[Request], *, compile: str, **limits: Any
    ) -> list[tuple[list[int], list[float], str]]:
        engine = make_engine(tiny_lm("qwen3"), compile=compile, **limits)
        prefill = engine._prefill

        def recorded(admitted: Any) -> None:
            most_running.append(len(engine._running) + len(admitted))
            prefill(admitted)

        engine._prefill = recorded  # type: ignore[method-assign]
        return [facts(completion) for completion in run_all(engine, requests)]

    most_running: list[int] = []
    together = run(group, compile="always", kv_budget_tokens=400)
    assert most_running == [6]
    most_running.clear()
    run(group, compile="never", kv_budget_tokens=400)
    assert max(most_running) == 3
    assert together == [run([request], compile="always")[0] for request in group]
    mixed = run([*others[:10], *group, *others[10:]], compile="always", kv_budget_tokens=500, max_running=9)
    assert mixed[10:16] == together
    run(group[:1], compile="always", kv_budget_tokens=100)
    with pytest.raises(EngineError, match=r"80 prompt tokens \+ max_new_tokens=20 = 100 tokens, above"):
        run(group[:1], compile="always", kv_budget_tokens=99)


def test_lengths_stop_tokens_and_least_lengths_are_kept(tiny_lm: TinyLM, run_all: Run) -> None:
    every_token = tuple(range(64))
    requests = [
        Request((3, 4), Sampling(max_new_tokens=7), (0,)),
        Request((3, 4), Sampling(max_new_tokens=7, stop_token_ids=every_token), (1,)),
        Request((3, 4), Sampling(max_new_tokens=30, stop_token_ids=every_token[:63], min_new_tokens=5), (2,)),
        Request((3, 4), Sampling(max_new_tokens=6, stop_strings=("A",), min_new_tokens=6), (3,)),
    ]
    free, first, least, barred = run_all(make_engine(tiny_lm()), requests)
    assert (len(free.token_ids), free.stop_reason) == (7, "length")
    assert (len(first.token_ids), first.stop_reason) == (1, "stop")
    assert least.token_ids[:5] == [63] * 5, "the only token that does not end the answer"
    assert least.logprobs[:5] == [0.0] * 5
    assert least.stop_reason == "stop"
    assert len(barred.token_ids) == 6


def test_a_stop_string_ends_the_answer_and_is_kept(tiny_lm: TinyLM, run_all: Run) -> None:
    lm = tiny_lm()
    request = Request((3, 4, 5), Sampling(max_new_tokens=40), (0,))
    (free,) = run_all(make_engine(lm), [request])
    text = letters(free.token_ids)
    stop = text[17:20]
    limited = replace(request, sampling=Sampling(40, stop_strings=("~~", stop)))
    (cut,) = run_all(make_engine(lm, InProcess(letters)), [limited])
    assert letters(cut.token_ids) == text[: text.index(stop) + 3]
    assert cut.stop_reason == "stop"
    assert cut.logprobs == free.logprobs[: len(cut.logprobs)]


def test_cancelling_frees_the_slot_at_once_and_affects_no_other(tiny_lm: TinyLM, run_all: Run) -> None:
    lm = tiny_lm()
    requests = [Request(p, Sampling(max_new_tokens=30), (i,)) for i, p in enumerate(prompts(4))]
    expected = [facts(c) for c in run_all(make_engine(lm), requests)]
    engine = make_engine(lm, max_running=2)

    async def scenario() -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        await let_run(6)
        assert load(engine) == (2, 2)
        tasks[0].cancel()
        tasks[3].cancel()
        await asyncio.gather(tasks[0], tasks[3], return_exceptions=True)
        assert load(engine) == (2, 0), "the next one took the place"
        return await asyncio.gather(*tasks[1:3])

    assert [facts(c) for c in asyncio.run(scenario())] == expected[1:3]
    assert load(engine) == (0, 0)


@pytest.mark.parametrize(("limits", "most"), [({"max_running": 3}, 3), ({"kv_budget_tokens": 4 * 64}, 4)])
def test_no_more_runs_than_the_budget_allows(limits: dict[str, Any], most: int, tiny_lm: TinyLM) -> None:
    engine = make_engine(tiny_lm(), **limits)
    requests = [Request((2, 3), Sampling(max_new_tokens=40 + i % 5), (i,)) for i in range(9)]

    async def peak() -> int:
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        running = 0
        while not all(t.done() for t in tasks):
            await asyncio.sleep(0)
            running = max(running, load(engine)[0])
        return running

    assert asyncio.run(peak()) == most


def test_what_can_never_run_is_refused_with_the_key_to_change(tiny_lm: TinyLM, run_all: Run) -> None:
    engine = make_engine(tiny_lm(max_position_embeddings=80), kv_budget_tokens=96)
    for prompt, sampling, text in [
        (
            (2,) * 70,
            Sampling(max_new_tokens=11),
            r"70 prompt tokens \+ max_new_tokens=11 = 81 tokens, above",
        ),
        ((), Sampling(max_new_tokens=1), "the prompt has no token"),
        ((64,), Sampling(max_new_tokens=1), r"a token id outside 0\.\.63"),
        ((2,), Sampling(max_new_tokens=0), "max_new_tokens=0"),
    ]:
        with pytest.raises(EngineError, match=text):
            run_all(engine, [Request(prompt, sampling, (0,))])
    small = make_engine(tiny_lm(), kv_budget_tokens=64)
    with pytest.raises(EngineError, match=r"above rollout\.engine\.kv_budget_tokens=64"):
        run_all(small, [Request((2,) * 60, Sampling(max_new_tokens=5), (0,))])


@pytest.mark.parametrize("compile", ["never", "always"])
def test_shared_weights_are_read_in_place_and_copies_wait_for_set_weights(
    compile: str, tiny_lm: TinyLM, run_all: Run
) -> None:
    lm = tiny_lm()
    shared, copied = make_engine(lm, compile=compile), make_engine(lm, dtype="bf16", compile=compile)
    request = Request((3, 4, 5), Sampling(max_new_tokens=20), (0,))
    before = [run_all(e, [request])[0] for e in (shared, copied)]
    with torch.no_grad():
        for parameter in lm.model.parameters():
            parameter.mul_(1.5)
    changed, same = (run_all(e, [request])[0] for e in (shared, copied))
    assert changed.token_ids != before[0].token_ids
    assert facts(same) == facts(before[1])
    for engine in (shared, copied):
        asyncio.run(engine.set_weights(7))
    after = [run_all(e, [request])[0] for e in (shared, copied)]
    assert [c.policy_version for c in after] == [7, 7]
    assert facts(after[0]) == facts(changed)
    assert after[1].token_ids != same.token_ids
    assert next(lm.model.parameters()).dtype == torch.float32


def test_a_bf16_copy_keeps_rotary_frequencies_exact_and_stays_near(tiny_lm: TinyLM, run_all: Run) -> None:
    lm = tiny_lm(initializer_range=0.1)
    request = Request(prompts(1)[0], Sampling(max_new_tokens=60), (0,))
    (completion,) = run_all(make_engine(lm, dtype="bf16"), [request])
    expected = full_logprobs(plain(lm), request.prompt_ids, completion.token_ids, 1.0)
    # about 25 roundings to the 8 bits of bfloat16 of numbers of size 1
    torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=25 * 2**-8)


def gap(lm: CausalLM, engine: NativeEngine, run_all: Run) -> float:
    """Mean difference between the engine's log-probs and those of training under autocast, in nats."""
    work = [Request(p, Sampling(max_new_tokens=30), (i,)) for i, p in enumerate(prompts(6))]
    completions = run_all(engine, work)
    rows = [
        Row(
            {"input_ids": np.array([*request.prompt_ids, *done.token_ids])},
            np.arange(len(request.prompt_ids) + 30) >= len(request.prompt_ids),
            group=0,
            trajectory=i,
        )
        for i, (request, done) in enumerate(zip(work, completions, strict=True))
    ]
    trainer = SingleBackend(lm, TrainConfig(autocast="bf16"), total_steps=1, device=lm.device)
    inferred = trainer.infer(rows, frozenset({"logprobs"}))
    sampled = np.concatenate([done.logprobs for done in completions])
    trained = np.concatenate(
        [outputs["logprobs"][row.mask] for outputs, row in zip(inferred, rows, strict=True)]
    )
    return float(np.abs(sampled - trained).mean())


def test_under_autocast_the_engine_has_the_arithmetic_of_training(
    architecture: str, tiny_lm: TinyLM, run_all: Run
) -> None:
    lm = tiny_lm(architecture, tie_word_embeddings=True)
    engine = make_engine(lm, InProcess(str, torch.bfloat16))
    assert not engine.shares_weights
    # Products of the same numbers; a sum in another order may round to the next number of bf16, but seldom
    # does.
    for version in (1, 2):
        assert gap(lm, engine, run_all) < gap(lm, make_engine(lm), run_all) / 4
        with torch.no_grad():
            for parameter in lm.model.parameters():
                parameter.mul_(1.1)
        asyncio.run(engine.set_weights(version))
    dtypes = {name: parameter.dtype for name, parameter in engine.named_parameters()}
    assert dtypes.keys() == dict(lm.model.named_parameters()).keys()
    assert dtypes["model.embed_tokens.weight"] == dtypes["model.norm.weight"] == torch.float32
    assert dtypes["model.layers.0.self_attn.q_proj.weight"] == torch.bfloat16


def test_autocast_converts_nothing_in_a_model_of_its_type(tiny_lm: TinyLM) -> None:
    lm = tiny_lm()
    lm.model.to(torch.bfloat16)
    assert make_engine(lm, InProcess(str, torch.bfloat16)).shares_weights


def test_the_cache_has_the_size_of_the_free_memory_after_each_sleep(
    tiny_lm: TinyLM, run_all: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, 2 layers, 2 heads, 8 numbers of 4 bytes
    free = 1000 * per_token
    monkeypatch.setattr(engine_module, "free_bytes", lambda _: free)
    engine, request = (
        make_engine(tiny_lm(max_position_embeddings=1024), prefix_caching=False),
        Request((3,), Sampling(max_new_tokens=700), (0,)),
    )
    run_all(engine, [request])
    assert 700 * per_token < engine.cache_bytes
    engine.sleep()
    free //= 2
    engine.wake()
    with pytest.raises(
        EngineError, match=r"above rollout\.engine\.kv_budget_tokens=400 \(from the free memory\)"
    ):
        run_all(engine, [request])


def test_a_long_sequence_reserves_its_length_for_itself_only() -> None:
    cache = KVCache(8192, 64)
    assert cache.num_fitting(map(Need, [4224, *[100] * 64])) == 1 + 28, "4,608 positions and 28 x 128"
    cache.reserve([Need(4224), *[Need(100)] * 20])
    for longest in (4224, *[100] * 20):
        cache.add(longest)
    long, short = cache.buckets()[::-1]
    assert (long.rows, long.length, short.rows, short.length) == (1, 4608, 28, 128), (
        "rows double within the budget"
    )
    assert cache.num_fitting([Need(512)]) == 0, "all short ones would be as long"
    assert cache.num_fitting([Need(600)]) == 1, "1,024 of 4,608 + 20 x 128 are left"
    cache.reserve([Need(600)])
    assert [(bucket.rows, bucket.length) for bucket in cache.buckets()] == [(23, 128), (1, 4608)], (
        "others give back their spare rows"
    )


def test_a_step_copies_to_the_host_once(
    tiny_lm: TinyLM, run_all: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = 0

    def counted(method: Callable[..., object]) -> Callable[..., object]:
        def count(*args: object, **kwargs: object) -> object:
            nonlocal copies
            copies += 1
            return method(*args, **kwargs)

        return count

    engine, work = (
        make_engine(tiny_lm()),
        [Request((3, 4, i), Sampling(max_new_tokens=20), (i,)) for i in range(5)],
    )
    run_all(engine, work)
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    run_all(engine, work)
    assert copies == 20


def train(lm: CausalLM) -> None:
    """Change the weights in place, as training does."""
    with torch.no_grad():
        for parameter in lm.model.parameters():
            parameter.mul_(1.2)


GREEDY = [Request(ids, Sampling(max_new_tokens=30, greedy=True), (i,)) for i, ids in enumerate(prompts(12))]


def test_weights_are_not_switched_under_requests_that_read_them_in_place(tiny_lm: TinyLM) -> None:
    engine = make_engine(tiny_lm())

    async def scenario() -> None:
        task = asyncio.create_task(engine.generate(GREEDY[0]))
        await let_run(1)
        with pytest.raises(EngineError, match="cannot sync version 1 while 1 requests run"):
            await engine.set_weights(1)
        assert (await task).policy_version == 0

    asyncio.run(scenario())


async def interrupted(engine: NativeEngine, lm: CausalLM) -> list[Completion]:
    """Train while requests run, and switch to the new weights some steps later."""
    tasks = [asyncio.create_task(engine.generate(request)) for request in GREEDY]
    await let_run(8)
    train(lm)
    await let_run(4)
    await engine.set_weights(5, "interrupt")
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("recompute_cache", [False, True])
def test_interrupted_requests_continue_with_new_weights(
    tiny_lm: TinyLM, run_all: Run, recompute_cache: bool
) -> None:
    lm = Counting(tiny_lm().model)
    old = [c.token_ids for c in run_all(make_engine(tiny_lm()), GREEDY)]
    engine = make_engine(lm, COPY, recompute_cache=recompute_cache)
    completions = asyncio.run(interrupted(engine, lm))
    begun: list[int] = []
    for completion, before in zip(completions, old, strict=True):
        (first, num_old), (second, num_new) = completion.policy_version  # pyright: ignore[reportGeneralTypeIssues, reportAssignmentType]
        assert (first, second) == (0, 5)
        assert num_old + num_new == len(completion.token_ids) == len(completion.logprobs)
        assert completion.token_ids[:num_old] == before[:num_old], "training was seen before the switch"
        begun.append(num_old)
    rest = [
        Request((*r.prompt_ids, *c.token_ids[:n]), Sampling(30 - n, greedy=True), r.key)
        for r, c, n in zip(GREEDY, completions, begun, strict=True)
    ]
    fresh = [c.token_ids for c in run_all(make_engine(lm), rest)]
    continued = [c.token_ids[n:] for c, n in zip(completions, begun, strict=True)]
    assert continued != [ids[n:] for ids, n in zip(old, begun, strict=True)]
    assert (continued == fresh) == recompute_cache, "an old cache gives other tokens"
    prefilled = [*GREEDY, *rest] if recompute_cache else GREEDY
    assert engine._lm.num_prefilled == sum(len(r.prompt_ids) - 1 for r in prefilled)


async def interrupted_turns(engine: NativeEngine, lm: CausalLM) -> tuple[Completion, Request, Completion]:
    """A turn during which weights change, and the conversation's next request with its completion."""
    first = Request((3, 4, 5), Sampling(30, greedy=True), (0, 0), (0,))
    task = asyncio.create_task(engine.generate(first))
    await let_run(8)
    assert load(engine) == (1, 0)
    train(lm)
    await engine.set_weights(5, "interrupt")
    history = (*first.prompt_ids, *(await task).token_ids, 7, 8)
    later = Request(history, Sampling(10, greedy=True), (0, 1), (0,))
    return await task, later, await engine.generate(later)


@pytest.mark.parametrize("compile", ["never", "always"])
@pytest.mark.parametrize("recompute_cache", [False, True])
def test_a_turn_begun_after_an_interrupt_reads_keys_of_the_new_weights_only(
    tiny_lm: TinyLM, run_all: Run, recompute_cache: bool, compile: str
) -> None:
    lm = tiny_lm()
    engine = make_engine(lm, COPY, recompute_cache=recompute_cache, compile=compile)
    interrupted, later, after = asyncio.run(interrupted_turns(engine, lm))
    assert [version for version, _ in interrupted.policy_version] == [0, 5]  # pyright: ignore[reportGeneralTypeIssues]
    assert after.policy_version == 5
    anew = run_all(make_engine(lm), [later])[0]
    assert after.token_ids == anew.token_ids
    np.testing.assert_allclose(after.logprobs, anew.logprobs, atol=2e-5)


def test_compiled_steps_continue_with_new_weights(tiny_lm: TinyLM) -> None:
    """Those between two steps, with no new request."""

    def tokens(compile: str) -> list[list[int]]:
        engine = make_engine(lm := tiny_lm(), COPY, compile=compile)
        return [completion.token_ids for completion in asyncio.run(interrupted(engine, lm))]

    assert tokens(compile="always") == tokens(compile="never")


def test_a_recomputed_sequence_keeps_its_place_in_its_random_numbers(tiny_lm: TinyLM, run_all: Run) -> None:
    """With equal weights before and after, nothing changes."""
    how = Sampling(max_new_tokens=30, min_new_tokens=20, repetition_penalty=1.3, stop_token_ids=(7, 8, 9))
    requests = [replace(request, sampling=how) for request in GREEDY]
    expected = [c.token_ids for c in run_all(make_engine(tiny_lm()), requests)]
    engine = make_engine(tiny_lm(), COPY, recompute_cache=True)

    async def scenario() -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        for version in (1, 2, 3):
            await let_run(6)
            await engine.set_weights(version, "interrupt")
        return await asyncio.gather(*tasks)

    assert [c.token_ids for c in asyncio.run(scenario())] == expected


def test_draining_finishes_running_requests_with_the_old_weights_and_holds_new_ones(
    tiny_lm: TinyLM, run_all: Run
) -> None:
    lm = tiny_lm()
    engine = make_engine(lm, COPY)
    old, new = run_all(make_engine(tiny_lm()), GREEDY), run_all(make_engine(trained(tiny_lm())), GREEDY)

    async def scenario() -> tuple[list[Completion], list[Completion]]:
        running = [asyncio.create_task(engine.generate(request)) for request in GREEDY]
        await let_run(5)
        train(lm)
        switch = asyncio.create_task(engine.set_weights(1))
        await let_run(1)
        held = [asyncio.create_task(engine.generate(request)) for request in GREEDY]
        before = await asyncio.gather(*running)
        await switch
        return before, await asyncio.gather(*held)

    before, after = asyncio.run(scenario())
    assert [(c.token_ids, c.policy_version) for c in before] == [(c.token_ids, 0) for c in old]
    assert [(c.token_ids, c.policy_version) for c in after] == [(c.token_ids, 1) for c in new]


def trained(lm: CausalLM) -> CausalLM:
    train(lm)
    return lm


def test_a_drain_ends_when_its_requests_are_cancelled_and_a_cancelled_drain_holds_nothing(
    tiny_lm: TinyLM,
) -> None:
    engine = make_engine(tiny_lm(), COPY)

    async def scenario() -> None:
        running = asyncio.create_task(engine.generate(GREEDY[0]))
        await let_run(3)
        switch = asyncio.create_task(engine.set_weights(1))
        await let_run(1)
        running.cancel()
        await switch
        running = asyncio.create_task(engine.generate(GREEDY[0]))
        await let_run(3)
        switch = asyncio.create_task(engine.set_weights(2))
        held = asyncio.create_task(engine.generate(GREEDY[1]))
        await let_run(3)
        assert load(engine) == (1, 1)
        switch.cancel()
        await let_run(3)
        assert load(engine) == (2, 0)
        assert [(await task).policy_version for task in (running, held)] == [1, 1]

    asyncio.run(scenario())


@pytest.mark.parametrize("recompute_cache", [False, True])
def test_syncs_take_effect_in_order(tiny_lm: TinyLM, recompute_cache: bool) -> None:
    engine = make_engine(tiny_lm(), COPY, recompute_cache=recompute_cache)

    async def scenario() -> None:
        running = asyncio.create_task(engine.generate(GREEDY[0]))
        await let_run(6)
        switches = [
            asyncio.create_task(engine.set_weights(version, when))
            for version, when in ((1, "interrupt"), (2, "drain"), (3, "interrupt"), (4, "drain"))
        ]
        await let_run(1)
        held = asyncio.create_task(engine.generate(GREEDY[1]))
        versions = (await running).policy_version
        assert isinstance(versions, tuple)
        assert [version for version, _ in versions] == [0, 1]
        await asyncio.gather(*switches)
        assert (await held).policy_version == 4

    asyncio.run(scenario())


def test_weights_that_do_not_arrive_fail_the_requests_and_the_next_sync_repairs_the_engine(
    tiny_lm: TinyLM, run_all: Run
) -> None:
    engine = make_engine(tiny_lm())

    def lost() -> None:
        raise EngineError("the connection was lost")

    async def scenario() -> None:
        running = asyncio.create_task(engine.generate(GREEDY[0]))
        await let_run(3)
        with pytest.raises(EngineError, match="the connection was lost"):
            await engine.set_weights(1, "interrupt", lost)
        with pytest.raises(EngineError, match=r"version 1 .* could not be loaded: the connection was lost"):
            await running
        with pytest.raises(EngineError, match="no weights"):
            await engine.generate(GREEDY[0])
        await engine.set_weights(2, load=lambda: None)

    asyncio.run(scenario())
    assert {c.policy_version for c in run_all(engine, GREEDY)} == {2}


@pytest.mark.parametrize("compile", ["never", "always"])
def test_non_finite_logits_fail_only_their_request(compile: str, tiny_lm: TinyLM, run_all: Run) -> None:
    lm = tiny_lm(tie_word_embeddings=False)
    engine = make_engine(lm, compile=compile)
    good = [Request((3, 4, 5, i), Sampling(max_new_tokens=12), (i,)) for i in range(3)]
    expected = [facts(c) for c in run_all(engine, good)]
    unused = next(t for t in range(6, 64) if not any(t in ids for ids, *_ in expected))
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[unused] = float("nan")  # pyright: ignore[reportIndexIssue]
    bad = Request((3, unused), Sampling(max_new_tokens=12), (0,))

    async def scenario() -> list[Completion | BaseException]:
        return await asyncio.gather(*(engine.generate(r) for r in (bad, *good)), return_exceptions=True)

    for _ in range(2):  # the second time, good requests take the slot that the bad one had
        failed, *rest = asyncio.run(scenario())
        assert isinstance(failed, EngineError)
        assert "logits at position 2 are not finite" in str(failed)
        assert [facts(c) for c in rest if isinstance(c, Completion)] == expected


class FailsOnce(CausalLM):
    """Runs out of memory in one call of the head."""

    calls = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 4:
            raise MemoryError("no memory left")
        return super().logits(hidden)


def test_an_error_of_the_model_fails_all_pending_requests_and_the_engine_survives(
    tiny_lm: TinyLM, run_all: Run
) -> None:
    requests = [Request((3, 4), Sampling(max_new_tokens=9), (i,)) for i in range(4)]
    expected = [facts(c) for c in run_all(make_engine(tiny_lm()), requests)]
    engine = make_engine(FailsOnce(tiny_lm().model), max_running=2)

    async def scenario() -> list[Completion | BaseException]:
        return await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)

    failed = asyncio.run(scenario())
    assert all(isinstance(e, EngineError) and "no memory left" in str(e) for e in failed)
    assert [facts(c) for c in run_all(engine, requests)] == expected


def test_closing_fails_pending_requests_and_refuses_new_ones(tiny_lm: TinyLM) -> None:
    engine = make_engine(tiny_lm(), max_running=1)

    async def scenario() -> list[Completion | BaseException]:
        tasks = [
            asyncio.create_task(engine.generate(Request((2, i), Sampling(max_new_tokens=50), (i,))))
            for i in (3, 4)
        ]
        await let_run(3)
        assert load(engine)[0] > 0
        engine.close()
        return await asyncio.gather(
            *tasks, engine.generate(Request((2,), Sampling(1), (0,))), return_exceptions=True
        )

    running, waiting, late = asyncio.run(scenario())
    assert all(isinstance(e, EngineError) for e in (running, waiting, late))
    assert "the engine was closed" in str(running)
    assert "the engine is closed" in str(late)


@pytest.mark.parametrize("turns", [1, 3])
def test_an_interrupted_event_loop_leaves_an_engine_that_works(
    turns: int, tiny_lm: TinyLM, run_all: Run
) -> None:
    engine = make_engine(tiny_lm())
    request = Request((2, 3), Sampling(max_new_tokens=30), (0,))

    async def interrupted() -> None:
        tasks = [asyncio.create_task(engine.generate(request)) for _ in range(3)]
        await let_run(turns)
        assert sum(load(engine)) == 3
        del tasks

    asyncio.run(interrupted())
    assert load(engine) == (0, 0)
    assert len(run_all(engine, [request])[0].token_ids) == 30


def test_longer_requests_after_shorter_ones_get_room(tiny_lm: TinyLM, run_all: Run) -> None:
    lm = tiny_lm()
    requests = [
        Request((2, 3, i), Sampling(max_new_tokens=n), (i,)) for i, n in enumerate([5, 60, 9, 150, 4, 30], 4)
    ]
    expected = [facts(run_all(make_engine(lm), [r])[0]) for r in requests]
    engine = make_engine(lm, kv_budget_tokens=320)
    assert [facts(c) for c in run_all(engine, requests)] == expected

    async def staggered() -> list[Completion]:
        tasks = []
        for request in requests:
            tasks.append(asyncio.create_task(engine.generate(request)))
            await let_run(2)
        return await asyncio.gather(*tasks)

    assert [facts(c) for c in asyncio.run(staggered())] == expected


def _talk(
    lm: CausalLM, num: int, *, only: Sequence[int] | None = None, **limits: Any
) -> tuple[dict[int, list[Completion]], Counting, NativeEngine]:
    """Conversations of three turns, in lock step or out of it: turn t of number i reads 3 + i + t more
    tokens. Compiled layers are not counted."""
    counting = Counting(lm.model, temperature=lm.temperature)
    engine = make_engine(lm if limits.get("compile") == "always" else counting, **limits)
    assert engine._cache.shares_prompts == (limits.get("compile") == "always")
    draw = random.Random(7)
    words = [[tuple(draw.randrange(2, 64) for _ in range(3 + i + t)) for t in range(3)] for i in range(num)]

    async def converse(i: int) -> list[Completion]:
        history: tuple[int, ...] = ()
        turns: list[Completion] = []
        for t, said in enumerate(words[i]):
            history += said
            await let_run(i % 3)
            sampling = Sampling(max_new_tokens=4 + i % 5, temperature=0.7)
            turns.append(await engine.generate(Request(history, sampling, (i, t), (i,))))
            history += tuple(turns[-1].token_ids)
        return turns

    async def talk() -> list[list[Completion]]:
        return await asyncio.gather(*(converse(i) for i in chosen))

    chosen = range(num) if only is None else only
    return dict(zip(chosen, asyncio.run(talk()), strict=True)), counting, engine


def _outputs(done: dict[int, list[Completion]]) -> dict[int, list[tuple[list[int], list[float]]]]:
    return {i: [(turn.token_ids, turn.logprobs) for turn in turns] for i, turns in done.items()}


def test_a_conversation_continues_from_its_cache(architecture: str, tiny_lm: TinyLM) -> None:
    lm = tiny_lm(architecture)
    anew, all_tokens, _ = _talk(lm, 6, prefix_caching=False)
    kept, fewer_tokens, _ = _talk(lm, 6, prefix_caching=True)
    assert fewer_tokens.num_prefilled < all_tokens.num_prefilled / 2
    for i, turns in kept.items():
        for turn, other in zip(turns, anew[i], strict=True):
            assert turn.token_ids == other.token_ids
            # 2 layers: sums over 32 and 48 features and up to 60 positions; then over 64 tokens of the
            # vocabulary
            torch.testing.assert_close(
                torch.tensor(turn.logprobs), torch.tensor(other.logprobs), atol=2e-5, rtol=0.0
            )


@pytest.mark.parametrize("compile", ["never", "always"])
def test_a_continued_conversation_does_not_depend_on_others(compile: str, tiny_lm: TinyLM) -> None:
    lm = tiny_lm("qwen3")
    together, _, _ = _talk(lm, 40, prefix_caching=True, compile=compile)
    alone, _, _ = _talk(lm, 40, only=[17], prefix_caching=True, compile=compile)
    assert _outputs(alone)[17] == _outputs(together)[17]


@pytest.mark.parametrize("compile", ["never", "always"])
def test_the_oldest_conversations_are_forgotten_above_the_budget(compile: str, tiny_lm: TinyLM) -> None:
    lm = tiny_lm("qwen3")
    done, counting, engine = _talk(
        lm, 12, prefix_caching=True, kv_budget_tokens=320, max_running=2, compile=compile
    )
    assert 0 < sum(len(prefix.ids) for prefix in engine._prefixes.values()) == engine._prefix_tokens <= 320
    everything, all_tokens, _ = _talk(lm, 12, prefix_caching=False)
    assert counting.num_prefilled < all_tokens.num_prefilled
    assert {i: [t.token_ids for t in turns] for i, turns in done.items()} == {
        i: [t.token_ids for t in turns] for i, turns in everything.items()
    }


@pytest.mark.parametrize("between", ["nothing", "new weights", "sleep"])
def test_conversations_are_kept_while_the_weights_stay_and_the_engine_is_awake(
    between: str, tiny_lm: TinyLM, run_all: Run
) -> None:
    """Also where all requests of a round have ended before the next turns come."""
    engine = make_engine(tiny_lm("qwen3"), prefix_caching=True)
    first = [Request((3, 4, 5, i), Sampling(max_new_tokens=6), (i, 0), (i,)) for i in range(3)]
    done = run_all(engine, first)
    if between == "new weights":
        asyncio.run(engine.set_weights(1))
    elif between == "sleep":
        engine.sleep()
        engine.wake()
    lm = engine._lm = engine._decoder._lm = Counting(engine._lm.model)
    later = [
        replace(request, prompt_ids=(*request.prompt_ids, *answer.token_ids, 7, 8), key=(request.key[0], 1))
        for request, answer in zip(first, done, strict=True)
    ]
    turns = run_all(engine, later)
    assert lm.num_prefilled == (0 if between == "nothing" else 3 * 11)
    anew = run_all(make_engine(tiny_lm("qwen3")), later)
    assert [completion.token_ids for completion in turns] == [completion.token_ids for completion in anew]


@pytest.mark.parametrize("compile", ["never", "always"])
def test_a_long_sequence_is_read_by_itself_and_changes_no_other(
    compile: str, tiny_lm: TinyLM, run_all: Run
) -> None:
    lengths = np.array([40, 33, 1100, 61, 600, 700, 511, 513])
    blocks = [((rows.start, rows.stop), width) for rows, width in row_blocks(lengths)]
    assert blocks == [((0, 2), 64), ((2, 3), 1120), ((3, 4), 64), ((4, 6), 704), ((6, 7), 512), ((7, 8), 544)]
    lm = tiny_lm("gpt_oss", max_position_embeddings=2048)  # sinks and a window
    words = random.Random(1).choices(range(2, 64), k=1100)
    sampling = Sampling(max_new_tokens=20)
    requests = [Request(tuple(words[:n]), sampling, (n,)) for n in (7, 30, 1100, 12, 520, 505)]
    together = [facts(c) for c in run_all(make_engine(lm, compile=compile), requests)]
    assert [facts(run_all(make_engine(lm, compile=compile), [r])[0]) for r in requests] == together


@pytest.mark.parametrize("compile", ["never", "always"])
def test_sequences_of_all_lengths_arrive_and_leave_in_a_small_cache(compile: str, tiny_lm: TinyLM) -> None:
    lm = tiny_lm("qwen3", max_position_embeddings=4096)
    draw = random.Random(5)
    sizes = [draw.choice((10, 60, 490, 700, 1000, 1300)) for _ in range(24)]
    requests = [
        Request(tuple(draw.choices(range(2, 64), k=size)), Sampling(max_new_tokens=draw.randint(1, 40)), (i,))
        for i, size in enumerate(sizes)
    ]

    async def staggered(engine: NativeEngine) -> list[Completion]:
        tasks = []
        for i, request in enumerate(requests):
            tasks.append(asyncio.create_task(engine.generate(request)))
            await let_run(i % 7)
        return await asyncio.gather(*tasks)

    small, large = (make_engine(lm, kv_budget_tokens=budget, compile=compile) for budget in (4096, 65536))
    together = [facts(c) for c in asyncio.run(staggered(small))]
    assert small._cache.generation > large._cache.generation
    assert [facts(c) for c in asyncio.run(staggered(large))] == together
    assert [facts(asyncio.run(large.generate(r))) for r in requests[::5]] == together[::5]
    assert all(bucket.num_tokens for bucket in small._cache._buckets.values())
    assert sum(bucket.num_tokens for bucket in small._cache._buckets.values()) <= 4096


async def _groups_talk(engine: NativeEngine, seed: int) -> list[list[Completion]]:
    """Conversations of up to four turns, in groups of equal first prompts; many answers have one token."""
    draw = random.Random(seed)
    plans = []
    for _ in range(draw.randint(1, 5)):
        opening = tuple(draw.choices(range(2, 64), k=draw.choice((1, 15, 16, 17, 40, 93))))
        for _ in range(draw.randint(1, 5)):
            said = [tuple(draw.choices(range(2, 64), k=draw.randint(1, 9))) for _ in range(draw.randrange(4))]
            plans.append(
                [
                    (opening if t == 0 else tokens, draw.choice((1, 1, 2, 7)))
                    for t, tokens in enumerate([(), *said])
                ]
            )

    async def converse(i: int, turns: list[tuple[tuple[int, ...], int]], wait: int) -> list[Completion]:
        history: tuple[int, ...] = ()
        done: list[Completion] = []
        for t, (said, most) in enumerate(turns):
            await let_run(wait if t else 0)
            history += said
            sampling = Sampling(max_new_tokens=most, stop_token_ids=(1, 2, 3))
            done.append(await engine.generate(Request(history, sampling, (i, t), (i,))))
            history += tuple(done[-1].token_ids)
        return done

    waits = draw.choices(range(4), k=len(plans))
    return await asyncio.gather(*(converse(i, turns, waits[i]) for i, turns in enumerate(plans)))


@pytest.mark.parametrize("compile", ["never", "always"])
def test_short_answers_of_groups_in_several_turns_do_not_depend_on_the_cache(
    compile: str, tiny_lm: TinyLM
) -> None:
    """With any budget, down to that of the longest sequence, 93 + 3 * 9 + 4 * 7 tokens, padded or not."""
    lm = tiny_lm("qwen3")
    for seed in range(5):
        expected = asyncio.run(_groups_talk(make_engine(lm, prefix_caching=False), seed))
        limits = {"kv_budget_tokens": (148, 149, 160, 161, 2000)[seed % 5], "max_running": 3 + seed % 9}
        if compile == "never":
            limits["kv_budget_tokens"] = max(160, limits["kv_budget_tokens"])
        engine = make_engine(lm, compile=compile, prefix_caching=seed % 4 > 0, **limits)
        for turns, others in zip(asyncio.run(_groups_talk(engine, seed)), expected, strict=True):
            for turn, other in zip(turns, others, strict=True):
                assert turn.token_ids == other.token_ids
                np.testing.assert_allclose(turn.logprobs, other.logprobs, atol=2e-5)
        assert not engine.num_pending


@pytest.mark.parametrize("num_new", [1, 2, 3])
def test_a_sequence_that_fills_the_budget_runs(num_new: int, tiny_lm: TinyLM, run_all: Run) -> None:
    """Its prompt, padded, would be longer than its place in the cache."""
    lm = tiny_lm("qwen3")
    request = Request(tuple(range(2, 43)), Sampling(max_new_tokens=num_new), (0,))
    engine = make_engine(lm, compile="always", kv_budget_tokens=41 + num_new)
    assert facts(run_all(engine, [request])[0]) == facts(
        run_all(make_engine(lm, compile="always"), [request])[0]
    )
