"""Samples follow exactly the configured distribution."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.native_engines import make_engine
from tests.rounding import rounding

from braid.models.causal_lm import CausalLM
from braid.rollout.engine import Completion, Request, Sampling
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.native.sampler import _BLOCK, Sampler, _draw
from braid.rollout.engines.native.stopping import StopFinder

PROMPT = (3, 1, 4)
NUM_SAMPLES = 6000


def reference(logits: np.ndarray, previous_tokens: set[int], how: Sampling) -> np.ndarray:
    """Reference implementation of the distribution of one token, in float64: [V] -> [V]."""
    scores = logits.astype(np.float64).copy()
    for token in previous_tokens:
        scores[token] *= how.repetition_penalty if scores[token] < 0 else 1 / how.repetition_penalty
    probs = np.exp(scores / how.temperature - (scores / how.temperature).max())
    order = np.argsort(-probs, kind="stable")
    if how.top_k:
        probs[order[how.top_k :]] = 0
    probs /= probs.sum()
    num_kept = 1 + int(np.searchsorted(np.cumsum(probs[order]), how.top_p))
    probs[order[num_kept:]] = 0
    probs[probs < how.min_p * probs.max()] = 0
    return probs / probs.sum()


HOWS = {
    "plain": Sampling(max_new_tokens=3),
    "cold": Sampling(max_new_tokens=3, temperature=0.5),
    "top-k": Sampling(max_new_tokens=2, top_k=3),
    "top-p": Sampling(max_new_tokens=2, top_p=0.7),
    "min-p": Sampling(max_new_tokens=2, min_p=0.3),
    "penalty": Sampling(max_new_tokens=3, repetition_penalty=2.0),
    "all": Sampling(
        max_new_tokens=3, temperature=1.6, top_k=4, top_p=0.9, min_p=0.15, repetition_penalty=0.6
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", list(HOWS.values()), ids=list(HOWS))
def test_sampled_frequencies_are_those_of_the_enumerated_distribution(
    how: Sampling,
    tiny_lm: Callable[..., CausalLM],
    run_all: Callable[[NativeEngine, Sequence[Request]], list[Completion]],
) -> None:
    lm = tiny_lm(vocab_size=5, initializer_range=0.25)
    model = deepcopy(lm.model)
    model.set_attn_implementation("eager")
    outcomes = list(itertools.product(range(5), repeat=how.max_new_tokens))
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *o] for o in outcomes]), use_cache=False).logits.numpy()
    exact = {
        outcome: [
            reference(logits[i, len(PROMPT) + t - 1], {*PROMPT, *outcome[:t]}, how)[token]
            for t, token in enumerate(outcome)
        ]
        for i, outcome in enumerate(outcomes)
    }
    engine = make_engine(lm, max_running=1000)
    drawn = run_all(engine, [Request(PROMPT, how, (0, i)) for i in range(NUM_SAMPLES)])
    for completion in drawn[:300]:
        # float32 forward passes in two orders of summation
        assert np.exp(completion.logprobs) == pytest.approx(exact[tuple(completion.token_ids)], abs=1e-5)
    counts = Counter(tuple(c.token_ids) for c in drawn)
    expected = {outcome: NUM_SAMPLES * math.prod(p) for outcome, p in exact.items()}
    assert all(expected[outcome] > 0 for outcome in counts), "nothing impossible was drawn"
    # Cells expecting fewer than 5 are pooled, as the chi-square approximation asks for.
    cells = [(counts[o], e) for o, e in expected.items() if e >= 5]
    pooled = NUM_SAMPLES - sum(c for c, _ in cells), NUM_SAMPLES - sum(e for _, e in cells)
    cells += [pooled] if pooled[1] >= 5 else []
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 6, (
        "about the 1 - 1e-4 quantile; the keys are fixed"
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            Sampling,
            max_new_tokens=st.just(9),
            temperature=st.sampled_from([0.3, 1.0, 2.0]),
            top_k=st.sampled_from([0, 1, 3, 50, 1000]),
            top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-6]),
            min_p=st.sampled_from([0.0, 0.05, 0.6]),
            repetition_penalty=st.sampled_from([1.0, 1.4]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 1000),
)
def test_rows_with_different_settings_share_a_batch(rows: list[Sampling], seed: int) -> None:
    vocab_size, prompt = 97, (5, 6, 90)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocab_size, generator=generator) * 2
    sampler = Sampler(8, vocab_size, torch.device("cpu"))
    for slot, how in enumerate(rows):
        sampler.put(slot, how, (seed, slot), prompt)
    tokens, logprobs = sampler.sample(logits.clone(), 0)
    for row, how in enumerate(rows):
        exact = reference(logits[row].numpy(), set(prompt), how)
        assert math.exp(logprobs[row]) == pytest.approx(exact[tokens[row]], rel=1e-4)
        alone = Sampler(8, vocab_size, torch.device("cpu"))
        alone.put(3, how, (seed, row), prompt)
        assert alone.sample(logits[row : row + 1].clone(), 3) == ([tokens[row]], [logprobs[row]])


def test_a_uniform_goes_through_the_inverse_of_the_cumulative_distribution() -> None:
    from braid.rollout.random import uniforms

    sampler = Sampler(4, 4, torch.device("cpu"))
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])
    sampler.put(0, Sampling(max_new_tokens=500), (7, 8), ())
    drawn = [sampler.sample(probs.log()[None], 0)[0][0] for _ in range(500)]
    numbers = uniforms([(7, 8, position) for position in range(500)])
    assert drawn == np.searchsorted([0.1, 0.1, 0.7, 1.0], numbers, side="right").tolist()


@pytest.mark.parametrize("vocab_size", [1024, 1300, 2047])
def test_a_large_vocabulary_gives_the_tokens_of_the_exact_cumulative_distribution(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    probs = (torch.randn(400, vocab_size, generator=generator) * 3).softmax(-1)
    probs[:, 100:900] = 0.0  # a whole block
    probs[:, -5:] = 0.0
    uniforms = torch.rand(400, 1, generator=generator, dtype=torch.float64)
    uniforms[0], uniforms[1] = 0.0, 1 - 2**-53
    tokens, total = _draw(probs, uniforms)
    assert (probs.gather(1, tokens) > 0).all()
    mass = probs.double().cumsum(-1)
    mass /= mass[:, -1:].clone()
    below, above = F.pad(mass, (1, 0)).gather(1, tokens), mass.gather(1, tokens)
    error = rounding(_BLOCK)  # of float32 sums over a block
    assert (below <= uniforms + error).all()
    assert (uniforms < above + error).all()
    torch.testing.assert_close(total, probs.double().sum(-1, keepdim=True), rtol=error, atol=0)


def test_a_row_of_a_large_vocabulary_is_independent_of_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(37, 5000, generator=generator).softmax(-1)
    uniforms = torch.rand(37, 1, generator=generator, dtype=torch.float64)
    tokens, total = _draw(probs, uniforms)
    for row in range(37):
        alone = _draw(probs[row : row + 1].clone(), uniforms[row : row + 1])
        assert (alone[0].item(), alone[1].item()) == (tokens[row].item(), total[row].item())


def test_ties_at_a_border_are_kept_whole() -> None:
    sampler = Sampler(2, 6, torch.device("cpu"))
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -1.0]])
    drawn: dict[str, set[int]] = {"top_k": set(), "top_p": set()}
    for name, how in {"top_k": Sampling(1, top_k=2), "top_p": Sampling(1, top_p=0.5)}.items():
        for i in range(200):
            sampler.put(0, how, (i,), ())
            drawn[name].update(sampler.sample(logits.clone(), 0)[0])
    assert drawn == {"top_k": {0, 1, 2, 3}, "top_p": {0, 1, 2, 3}}


def test_top_p_searches_beyond_the_first_chunk_of_tokens() -> None:
    sampler = Sampler(2, 3000, torch.device("cpu"))
    sampler.put(0, Sampling(1, top_p=0.9), (0,), ())
    logits = torch.linspace(0, 1e-3, 3000)[None]
    _, logprobs = sampler.sample(logits.clone(), 0)
    num_kept = math.exp(-logprobs[0])
    assert num_kept == pytest.approx(2700, rel=2e-3), "nearly flat: 90 % of the mass are 90 % of the tokens"


PIECES = ["a", "b", "ab", "<", "/", ">", "</", " a", "a ", "", "\n", "é", "User", ":", "aab", "#"]


def sentence(token_ids: Sequence[int]) -> str:
    """Like a sentencepiece tokenizer, the first space of a text is dropped; two tokens are halves of one
    character."""
    text = b"".join({16: b"\xc3", 17: b"\xa9"}.get(t) or PIECES[t].encode() for t in token_ids)
    return text.decode(errors="replace").removeprefix(" ")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 17), min_size=1, max_size=40),
    st.lists(
        st.sampled_from(["ab", "</a>", "a a", "\n", "é", "aé", "User:", "baab", " a b", "# "]), min_size=1
    ),
)
def test_a_stop_string_is_found_with_the_token_that_completes_it(
    token_ids: list[int], strings: list[str]
) -> None:
    finder = StopFinder(sentence)
    for end in range(1, len(token_ids) + 1):
        contains = any(s in sentence(token_ids[:end]) for s in strings)
        assert finder.is_completed(token_ids[:end], strings) == contains
        if contains:
            break


def test_a_stop_string_is_found_across_many_tokens_without_text() -> None:
    finder = StopFinder(sentence)
    assert finder.is_completed([0] * 50 + [3] + [9] * 100 + [5], ["<>"])


def test_a_row_with_top_k_is_drawn_alike_beside_rows_of_any_kind() -> None:
    """At a vocabulary in two stages, with and without ties at the border of the k-th token."""
    hows = [
        Sampling(1, top_k=20, top_p=0.9),
        Sampling(1, top_k=20),
        Sampling(1, top_k=50, min_p=0.1),
        Sampling(1, top_k=700),
        Sampling(1, top_p=0.99),
        Sampling(1, greedy=True),
        Sampling(1),
    ]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4 * len(hows), 5000, generator=generator)
    logits[len(hows) : 2 * len(hows)] = (logits[len(hows) : 2 * len(hows)] * 4).round()  # many ties
    sampler = Sampler(len(logits), 5000, torch.device("cpu"))
    for slot in range(len(logits)):
        sampler.put(slot, hows[slot % len(hows)], (slot,), ())
    tokens, logprobs = sampler.sample(logits, 0)
    for slot, row in enumerate(logits):
        alone = Sampler(1, 5000, torch.device("cpu"))
        alone.put(0, hows[slot % len(hows)], (slot,), ())
        assert alone.sample(row[None], 0) == ([tokens[slot]], [logprobs[slot]])
        exact = row.double().softmax(-1)
        if (top_k := hows[slot % len(hows)].top_k) and slot % len(hows) in (1, 3):
            exact[row < row.topk(top_k).values[-1]] = 0.0  # ties stay
            assert math.exp(logprobs[slot]) == pytest.approx(exact[tokens[slot]] / exact.sum(), rel=1e-5)
