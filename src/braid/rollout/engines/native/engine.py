"""The native engine: admits requests, prefills prompts, decodes all running sequences one token at a time.

The schedule depends only on the order of requests; the completion of a request only on its prompt, settings
and key:

* Random numbers depend on the request's key and the token's index (rollout.random).
* On CPU in fp32 a sequence's numbers are bitwise independent of the rest of the batch, if the matrix library
  uses the same kernel for 16 rows and more. This was observed for models of hidden size up to 512. With
  several threads, larger products (896 x 4864) were observed to differ, and an expert of an MoE model
  computes as many rows as are routed to it.
* Otherwise numbers agree up to rounding. If a uniform falls within rounding of the border between two tokens,
  the token changes, and with it the rest of the completion: rarely in fp32; in bf16 it was observed within
  150 tokens.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from braid.errors import EngineError
from braid.models.attention import AttentionContext
from braid.models.causal_lm import CausalLM
from braid.models.experts import is_experts
from braid.models.transfer import to_device
from braid.models.vision import Sight, Span
from braid.rollout.engine import Completion, Request, check_request, version_runs
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.stepped import SteppedEngine
from braid.types import StopReason

from .cache import (
    Bucket,
    ContinueAttention,
    KVCache,
    Need,
    PrefillAttention,
    Prompt,
    free_bytes,
    padded_rows,
    size_class,
)
from .decoder import Decoder
from .kind import CPU_KV_BUDGET_TOKENS, Native
from .sampler import Sampler
from .states import ContinueStates, PrefillStates, States
from .stopping import StopFinder

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SAMPLE_TOKENS = 32
_CACHE_FRACTION = 0.8
"""Part of the free device memory for the cache; the rest is for activations, logits and graphs."""
_ADMIT_FRACTION = 16
"""Waiting requests are admitted if they number at least 1 / _ADMIT_FRACTION of those running, since a prefill
costs about as much as a step ..."""
_ADMIT_PATIENCE_STEPS = 8
"""... or if the first of them has been held back for this many steps."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """A pending request. `slot` is -1 while it waits. `versions` has the policy version of each token. With
    `shares_prompt` the keys and values of the prompt are stored once for several requests; with
    `has_old_cache` some are of earlier weights. `experts` are parts [n, L, K] of those chosen for the first
    `num_routed` tokens."""

    request: Request
    future: asyncio.Future[Completion]
    start_s: float
    end_tokens: frozenset[int]
    slot: int = -1
    shares_prompt: bool = False
    has_old_cache: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[NDArray[np.signedinteger]] = field(default_factory=list)
    num_routed: int = 0
    prompt: tuple[int, ...] = field(init=False)
    """Request.identity."""

    def __post_init__(self) -> None:
        self.prompt = self.request.identity

    def route(self, chosen: NDArray[np.signedinteger], start: int = 0) -> None:
        """Add the experts `chosen` [n, L, K] for the tokens from `start` on. Tokens that have some are
        computed again, for a cache of new weights, and keep those with which they were sampled."""
        self.experts.append(chosen[self.num_routed - start :])
        self.num_routed = start + len(chosen)

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens to prefill: the prompt, and those sampled before the cache was dropped."""
        return (*self.request.prompt_ids, *self.token_ids) if self.token_ids else self.request.prompt_ids

    @property
    def identity(self) -> tuple[int, ...]:
        """Equal for equal prefixes, their images among them."""
        return (*self.prompt, *self.token_ids) if self.token_ids else self.prompt

    @property
    def padded_prefix(self) -> int:
        return padded_rows(len(self.request.prompt_ids) + len(self.token_ids))

    @property
    def need(self) -> Need:
        prompt, new = len(self.request.prompt_ids), self.request.sampling.max_new_tokens
        return Need(new, prompt) if self.shares_prompt else Need(prompt + new)


class _Prefix(NamedTuple):
    """A conversation (Request.identity), its keys and values by layer, the states after them, which follow
    from no shorter part of it, and parts of its experts. `num_tokens`: the tokens whose keys and values take
    as much memory as keys, values and states."""

    ids: tuple[int, ...]
    stored: list[tuple[Tensor, Tensor]]
    states: States
    experts: list[NDArray[np.signedinteger]]
    num_tokens: int


class NativeEngine(SteppedEngine):
    """Samples completions with the trainer's module; see rollout.engine.RolloutEngine for the contract."""

    def __init__(self, lm: CausalLM, config: Native, run: InProcess) -> None:
        """`config` has what the run made of `auto` (trainer.collectors.native_engine): where it is left, the
        dtype is that of the weights, and steps are not compiled.

        The engine keeps a copy of the weights, updated by `set_weights`, if the run asks for one, if
        `config.dtype` is not theirs, or `run.autocast` not that of linear layers. Cached conversations have
        no more than `config.kv_budget_tokens` tokens together; beyond that the oldest are computed anew.

        An engine that owns its weights may sample while another thread trains. On GPUs it has a stream, since
        its steps would otherwise wait for all that the update has launched. Its memory belongs to that
        stream. New weights pass by events: the stream waits for the update's, which then waits until the
        weights are copied.
        """
        super().__init__()
        self._source, self._config, self._bytes_to_come = lm, config, run.bytes_to_come
        self._device = next(lm.model.parameters()).device
        # of high priority, because an update's kernels are long and a step's are short
        has_stream = run.owns_weights and self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device, priority=-1) if has_stream else None
        with self._after_update():
            dtype = None if config.dtype == "auto" else _DTYPES[config.dtype]
            self._lm = _converted(lm, dtype, run.autocast, copies=run.owns_weights)
        # no cache, since a graph must not refer to its memory
        self._autocast = partial(
            torch.autocast,
            self._device.type,
            run.autocast,
            enabled=run.autocast is not None,
            cache_enabled=False,
        )
        slots = padded_rows(config.max_running)
        self._cache = KVCache(config.kv_budget_tokens, config.max_running)
        self._sampler = Sampler(slots, lm.vocab_size, self._device)
        self._decoder = Decoder(
            self._lm,
            self._cache,
            self._device,
            cuda_graphs=config.cuda_graphs,
            is_compiled=config.compile == "always",
            records_experts=run.records_experts,
        )
        self._stops = StopFinder(run.decode)
        # Of each slot: the next input token, its index, its position (another one after images), the most
        # tokens of prompt and output, and whether it has stop strings.
        self._slots = np.zeros((5, slots), np.int64)
        self._tokens, self._indices, self._positions, self._longest, self._has_strings = self._slots
        self._is_end_token = np.zeros(lm.vocab_size, np.bool_)  # of any request so far
        self._prefixes: OrderedDict[tuple[int, ...], _Prefix] = OrderedDict()
        self._prefix_tokens = 0
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._held_steps = 0
        self._is_asleep, self._has_new_weights = False, True

    @property
    def num_pending(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def shares_weights(self) -> bool:
        return self._lm is self._source

    @property
    def cache_bytes(self) -> int:
        return self._cache.num_bytes

    async def generate(self, request: Request) -> Completion:
        """See RolloutEngine. Raises EngineError if the request can never fit or its logits are not finite."""
        self._check(request)
        future = asyncio.get_running_loop().create_future()
        end_tokens = frozenset(request.sampling.stop_token_ids)
        sequence = _Sequence(request, future, time.time(), end_tokens)
        last = self._waiting[-1] if self._waiting and self._cache.shares_prompts else None
        if last and not last.token_ids and last.prompt == sequence.prompt:
            last.shares_prompt = sequence.shares_prompt = True
        self._waiting.append(sequence)
        self._start_stepping()
        try:
            return await future
        except asyncio.CancelledError:
            self._drop(sequence)
            raise

    def sleep(self) -> None:
        """See RolloutEngine. Frees the cache; the next request allocates it again."""
        if self.num_pending:
            raise EngineError(f"cannot sleep while {self.num_pending} requests run; await them first")
        self._is_asleep = True
        self._free_cache()
        self._cache.budget_tokens = self._config.kv_budget_tokens
        self._decoder.drop_graphs()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self._is_asleep = False

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The engine's weights, under their names in the trainer's module."""
        names = (name for name, _ in self._source.model.named_parameters())
        return ((name, self._lm.model.get_parameter(name)) for name in names)

    def close(self) -> None:
        """Fail all pending requests and free the cache."""
        self._is_closed = True
        self._stop_stepping()
        self._abandon("the engine was closed")
        self._free_cache()

    def _free_cache(self) -> None:
        self._cache.free()
        self._prefixes.clear()
        self._prefix_tokens = 0

    def _check(self, request: Request) -> None:
        """Raise EngineError for a request that can never run, instead of queueing it forever."""
        prompt, longest = request.prompt_ids, len(request.prompt_ids) + request.sampling.max_new_tokens
        self._check_usable()
        if self._is_asleep:
            raise EngineError("the engine is asleep; call wake() first")
        self._current_version()
        most = getattr(self._lm.config, "max_position_embeddings", None) or longest
        check_request(request, longest=most, key="max_position_embeddings in the model's config.json")
        if min(prompt) < 0 or max(prompt) >= self._lm.vocab_size:
            raise EngineError(
                f"the prompt has a token id outside 0..{self._lm.vocab_size - 1}; use the model's tokenizer"
            )
        if self._cache.budget_tokens is None:
            self._cache.budget_tokens = self._affordable_tokens()
        if not self._cache.can_ever_fit(longest):
            origin = "" if self._config.kv_budget_tokens else " (from the free memory)"
            raise EngineError(
                f"{len(prompt)} prompt tokens + max_new_tokens={request.sampling.max_new_tokens} = "
                f"{longest} tokens, above "
                f"rollout.engine.kv_budget_tokens={self._cache.budget_tokens}{origin}; raise it or lower "
                "rollout.sampling.max_new_tokens"
            )

    @torch.inference_mode()
    def _affordable_tokens(self) -> int:
        """Tokens whose keys and values fit into the free memory, less a reserve."""
        with self._on_stream():
            return self._tokens_within(free_bytes(self._device))

    def _tokens_within(self, free: int | None) -> int:
        """As many as fit into these bytes; a constant number on CPUs."""
        if free is None:
            return CPU_KV_BUDGET_TOKENS
        sample, width = KVCache(_SAMPLE_TOKENS, 1), padded_rows(1)
        sample.reserve([Need(width)])
        sample.add(width)
        ids = to_device([0] * width, self._device)
        attention: AttentionContext = PrefillAttention(sample, 0, [(width, 1)])
        if self._lm.has_states:
            attention = PrefillStates(attention, sample.states, 0, [(width, width, 1)])
        with self._autocast():
            self._lm.hidden(ids, ids, attention)
        per_token = max(1, (sample.num_bytes - sample.states.num_bytes) // _SAMPLE_TOKENS)
        free = max(0, free - (self._bytes_to_come() if self._bytes_to_come else 0))
        usable = int(_CACHE_FRACTION * free) // (2 if self._config.prefix_caching else 1)
        # slots double, and padding takes some (states.py)
        of_states = sample.states.bytes_per_slot << (padded_rows(self._config.max_running) - 1).bit_length()
        if of_states >= usable:
            raise EngineError(
                f"the states of rollout.engine.max_running={self._config.max_running} sequences take "
                f"{of_states / 2**30:.1f} GiB, and {usable / 2**30:.1f} GiB of the device are left for the "
                "engine's cache; lower rollout.engine.max_running"
            )
        return (usable - of_states) // per_token

    @property
    def _has_begun(self) -> bool:
        """See SteppedEngine. A sequence that has begun may have returned to the queue."""
        return bool(self._running or (self._waiting and self._waiting[0].token_ids))

    @torch.no_grad()
    def _copy_weights(self) -> None:
        with self._after_update():
            for name, new in self._source.model.named_parameters(remove_duplicate=False):
                self._lm.model.get_parameter(name).copy_(new)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextmanager
    def _after_update(self) -> Iterator[None]:
        """On the engine's stream, after all that has been launched on the update's, which goes on after this
        block."""
        if self._stream is None:
            yield
            return
        of_update = torch.cuda.default_stream(self._device)
        self._stream.wait_stream(of_update)
        with torch.cuda.stream(self._stream):
            yield
        of_update.wait_stream(self._stream)

    def _drop_stale(self) -> None:
        """See SteppedEngine. Sequences whose cache is to be recomputed return to the queue; others keep it
        for the rest of their turn, but not for the next one, whose tokens have the new version."""
        self._has_new_weights = True
        for sequence in self._running:
            sequence.has_old_cache = True
        self._prefixes.clear()
        self._prefix_tokens = 0
        if self._config.recompute_cache:
            for sequence in self._running:
                sequence.slot, sequence.shares_prompt = -1, False
            self._waiting.extendleft(reversed(self._running))
            self._running.clear()
            self._cache.remove_all()

    @torch.inference_mode()
    def _step(self) -> None:
        with self._on_stream():
            self._advance()

    def _advance(self) -> None:
        """Admit and prefill waiting sequences, then decode a token of each running one."""
        admitted = self._admit()
        if admitted or self._has_new_weights:
            self._decoder.refresh(has_new_weights=self._has_new_weights)
            self._has_new_weights = False
        if admitted:
            try:
                self._prefill(admitted)
            except Exception:
                self._waiting.extend(s for s in admitted if s.slot < 0)  # to fail with the others
                raise
        if self._running:
            self._decode()

    def _admit(self) -> list[_Sequence]:
        """Take requests from the queue, in order, that fit beside the running sequences at their maximum
        lengths. New ones wait for pending weights."""
        if not self._waiting:
            return []
        num = len(self._running)
        ready = itertools.takewhile(lambda each: each.token_ids or not self._is_draining, self._waiting)
        count = self._cache.num_fitting(self._needs(ready))
        if count == 0:
            return []
        if count < num // _ADMIT_FRACTION and self._held_steps < _ADMIT_PATIENCE_STEPS:
            self._held_steps += 1
            return []
        self._held_steps = 0
        admitted = [self._waiting.popleft() for _ in range(count)]
        self._cache.reserve(list(self._needs(admitted)))
        return admitted

    def _needs(self, sequences: Iterable[_Sequence]) -> Iterator[Need]:
        """Of each sequence; those after one another that share a prompt need it once."""
        last: tuple[int, ...] | None = None
        for sequence in sequences:
            need, prompt = sequence.need, sequence.prompt
            yield need._replace(prompt=0) if sequence.shares_prompt and prompt == last else need
            last = prompt if sequence.shares_prompt else None

    def _prefill(self, admitted: Sequence[_Sequence]) -> None:
        """Prefill the distinct prefixes, shortest first, in packs of up to `prefill_tokens`."""
        groups: dict[tuple[int, ...], list[_Sequence]] = {}
        continued: list[tuple[_Sequence, _Prefix]] = []
        for sequence in admitted:
            if (known := self._known_prefix(sequence)) is not None:
                continued.append((sequence, known))
            else:
                groups.setdefault(sequence.identity, []).append(sequence)
        if continued:
            continued.sort(
                key=lambda pair: (size_class(pair[0].need.alone), len(pair[1].ids), len(pair[0].prefix))
            )
            self._continue(continued)
        pack: list[list[_Sequence]] = []
        num_tokens = 0
        for group in sorted(groups.values(), key=lambda g: g[0].padded_prefix):
            if pack and num_tokens + group[0].padded_prefix > self._config.prefill_tokens:
                self._prefill_pack(pack)
                pack, num_tokens = [], 0
            pack.append(group)
            num_tokens += group[0].padded_prefix
        if pack:
            self._prefill_pack(pack)

    def _known_prefix(self, sequence: _Sequence) -> _Prefix | None:
        """Take out the stored start of a sequence's prefix, if there is one."""
        if sequence.shares_prompt:
            return None
        known, prefix = self._pop_prefix(sequence.request.conversation or ()), sequence.identity
        is_start = known and len(known.ids) < len(prefix) and prefix[: len(known.ids)] == known.ids
        return known if is_start else None

    def _pop_prefix(self, name: tuple[int, ...]) -> _Prefix | None:
        if prefix := self._prefixes.pop(name, None):
            self._prefix_tokens -= prefix.num_tokens
        return prefix

    def _continue(self, continued: Sequence[tuple[_Sequence, _Prefix]]) -> None:
        """Prefill what follows the known prefixes, in packs of up to `prefill_tokens`, and sample the next
        tokens."""
        sizes = [(len(known.ids), len(sequence.prefix) - len(known.ids)) for sequence, known in continued]
        ends = list(itertools.accumulate(new for _, new in sizes))
        if len(continued) > 1 and ends[-1] > self._config.prefill_tokens:
            middle = len(continued) // 2
            self._continue(continued[:middle])
            self._continue(continued[middle:])
            return
        first, tokens, positions, spans = len(self._running), list[int](), list[int](), list[Span]()
        for (sequence, known), (start, _) in zip(continued, sizes, strict=True):
            self._start(sequence)
            self._cache.restore(sequence.slot, known.stored)
            self._cache.states.restore(sequence.slot, known.states)
            tokens += sequence.prefix[start:]
            positions += range(start, len(sequence.prefix))
            spans.append(Span(start, len(sequence.prefix), sequence.request.images))
        padding = [0] * (padded_rows(len(tokens)) - len(tokens))
        attention: AttentionContext = ContinueAttention(self._cache, first, sizes)
        if self._lm.has_states:
            new_tokens = [new for _, new in sizes]
            attention = ContinueStates(attention, self._cache.states, first, new_tokens)
        last = [end - 1 for end in ends]
        last += last[:1] * (padded_rows(len(last)) - len(last))
        with self._autocast():
            sight = self._lm.sight([*spans, Span(0, len(padding), ())])
            logits = self._logits(tokens + padding, positions + padding, attention, last, sight)
        if (experts := self._experts()) is not None:
            for (sequence, known), (start, num_new), end in zip(continued, sizes, ends, strict=True):
                if not sequence.num_routed:
                    sequence.experts, sequence.num_routed = [*known.experts], start
                sequence.route(experts[end - num_new : end], start)
        self._take(logits[: len(continued)], first)

    def _keep_prefix(self, sequence: _Sequence) -> None:
        """Keep the cache of a conversation's turn; drop the oldest of others above the budget."""
        name, num = sequence.request.conversation, int(self._indices[sequence.slot])
        if name is None or not self._config.prefix_caching or sequence.has_old_cache:
            return
        ids = sequence.identity[:num]
        self._pop_prefix(name)
        experts = [np.concatenate(sequence.experts)] if sequence.experts else []
        stored, states = self._cache.stored(sequence.slot, num), self._cache.states.stored(sequence.slot)
        per_token = sum(key[:, 0].nbytes + value[:, 0].nbytes for key, value in stored)
        more = self._cache.states.bytes_per_slot // max(per_token, 1)
        self._prefixes[name] = _Prefix(ids, stored, states, experts, num + more)
        self._prefix_tokens += num + more
        assert self._cache.budget_tokens is not None
        while self._prefix_tokens > self._cache.budget_tokens:
            self._pop_prefix(next(iter(self._prefixes)))

    def _prefill_pack(self, pack: Sequence[Sequence[_Sequence]]) -> None:
        """Prefill one prefix per group and sample the next token of each member."""
        first = len(self._running)
        tokens: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        prompt_of: list[int] = []
        places, spans = _places(pack), list[Span]()
        for index, group in enumerate(pack):
            prefix, width = group[0].prefix, group[0].padded_prefix
            ends.append(len(tokens) + len(prefix) - 1)
            prompt_of += [index] * len(group)
            padding = [0] * (width - len(prefix))
            tokens += [*prefix, *padding]
            positions += [*range(len(prefix)), *padding]
            spans.append(Span(0, width, group[0].request.images))
            for sequence in group:
                self._start(sequence, places[sequence.identity] if sequence.shares_prompt else None)
        prompts = [(group[0].padded_prefix, len(group)) for group in pack]
        attention: AttentionContext = PrefillAttention(
            self._cache, first, prompts, self._decoder.prefill_kernel
        )
        if self._lm.has_states:
            sizes = [(len(group[0].prefix), *prompt) for group, prompt in zip(pack, prompts, strict=True)]
            attention = PrefillStates(attention, self._cache.states, first, sizes)
        ends += ends[:1] * (padded_rows(len(ends)) - len(ends))
        with self._autocast():
            logits = self._logits(tokens, positions, attention, ends, self._lm.sight(spans))
        if (experts := self._experts()) is not None:
            for group, end in zip(pack, ends, strict=False):
                chosen = experts[end + 1 - len(group[0].prefix) : end + 1].copy()
                for sequence in group:
                    sequence.route(chosen)
        self._take(logits.index_select(0, to_device(prompt_of, self._device)), first)

    def _start(self, sequence: _Sequence, prompt: Prompt | None = None) -> None:
        """Assign the next slot to a sequence, whose prompt may be stored elsewhere. Its next input is at the
        position after the prefix."""
        slot, request, prefix = len(self._running), sequence.request, sequence.prefix
        self._sampler.put(slot, request.sampling, request.key, prefix, len(sequence.token_ids))
        self._cache.add(sequence.need.alone, prompt)
        shift = 0 if self._lm.vision is None else self._lm.vision.shift(request.images)
        self._indices[slot], self._positions[slot] = len(prefix), len(prefix) + shift
        self._longest[slot] = len(request.prompt_ids) + request.sampling.max_new_tokens
        self._has_strings[slot] = bool(request.sampling.stop_strings)
        self._is_end_token[[token for token in sequence.end_tokens if token < self._lm.vocab_size]] = True
        sequence.slot, sequence.has_old_cache = slot, False
        self._running.append(sequence)

    def _decode(self) -> None:
        """Sample one more token for every running sequence."""
        num = len(self._running)
        with self._autocast():
            logits = self._decoder.logits(self._slots[:3, :num])
        if (experts := self._experts()) is not None:
            for sequence in self._running:
                sequence.route(experts[sequence.slot, None], int(self._indices[sequence.slot]))
        self._slots[1:3, :num] += 1
        self._take(logits[:num], 0)

    def _experts(self) -> NDArray[np.signedinteger] | None:
        """Decoder.experts of the last prefill or step, in host memory."""
        return None if self._decoder.experts is None else self._decoder.experts.cpu().numpy()

    def _take(self, logits: Tensor, first: int) -> None:
        """Sample a token for each of the slots first, first + 1, ... and finish the sequences that are
        done."""
        tokens, logprobs = self._sampler.sample(logits, first)
        slots, running = slice(first, first + len(tokens)), self._running[first:]
        self._tokens[slots] = tokens
        version = self._current_version()
        for sequence, token, logprob in zip(running, tokens, logprobs, strict=True):
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
        may_stop = self._is_end_token[tokens] | (self._indices[slots] + 1 >= self._longest[slots])
        may_stop |= (self._has_strings[slots] > 0) | ~np.isfinite(logprobs)
        done: list[_Sequence] = []
        for sequence in (running[i] for i in np.flatnonzero(may_stop)):
            if not math.isfinite(sequence.logprobs[-1]):
                self._fail(sequence)
            elif reason := self._reason_to_stop(sequence):
                self._keep_prefix(sequence)
                self._finish(sequence, reason)
            else:
                continue
            done.append(sequence)
        for sequence in reversed(done):
            self._release(sequence)

    def _reason_to_stop(self, sequence: _Sequence) -> StopReason | None:
        sampling, num_tokens = sequence.request.sampling, len(sequence.token_ids)
        if sequence.token_ids[-1] in sequence.end_tokens:
            return "stop"
        if (
            sampling.stop_strings
            and num_tokens >= sampling.min_new_tokens
            and self._stops.is_completed(sequence.token_ids, sampling.stop_strings)
        ):
            return "stop"
        return "length" if num_tokens >= sampling.max_new_tokens else None

    def _finish(self, sequence: _Sequence, reason: StopReason) -> None:
        versions, now = version_runs(sequence.versions), time.time()
        experts = np.concatenate(sequence.experts) if sequence.experts else None
        done = Completion(
            sequence.token_ids, sequence.logprobs, reason, versions, sequence.start_s, now, experts
        )
        if not sequence.future.done():
            sequence.future.set_result(done)

    def _fail(self, sequence: _Sequence) -> None:
        """Fail a sequence with non-finite logits, and clear its slot so that they cannot affect other
        sequences."""
        self._cache.clear(sequence.slot)
        place = len(sequence.request.prompt_ids) + len(sequence.token_ids) - 1
        error = EngineError(
            f"the model's logits at position {place} are not finite (policy version {self._version}); its "
            "weights have diverged, or overflow in the engine's dtype"
        )
        if not sequence.future.done():
            sequence.future.set_exception(error)

    @torch.inference_mode()
    def _release(self, sequence: _Sequence) -> None:
        """Free a slot and move the last running sequence into it, so that slots stay compact."""
        slot, last = sequence.slot, self._running.pop()
        with self._on_stream():  # also called between steps
            self._cache.remove(slot, self._indices)
            if last is not sequence:
                self._sampler.move(last.slot, slot)
        if last is not sequence:
            self._slots[:, slot] = self._slots[:, last.slot]
            self._running[slot], last.slot = last, slot
        sequence.slot = -1

    def _drop(self, sequence: _Sequence) -> None:
        if sequence.slot >= 0:
            self._release(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def _abandon(self, reason: str, cause: Exception | None = None) -> None:
        """Fail all pending requests, and free the cache, whose content is undefined then."""
        pending = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        if pending:
            self._free_cache()
        for sequence in pending:
            sequence.slot = -1
            if not sequence.future.done():
                error = EngineError(reason)
                error.__cause__ = cause
                sequence.future.set_exception(error)

    def _logits(
        self,
        tokens: list[int],
        positions: list[int],
        attention: AttentionContext,
        rows: list[int],
        sight: Sight | None,
    ) -> Tensor:
        """Logits [R, V] after `rows` of the tokens at `positions`, with the images of `sight`."""
        ids, places, chosen = (to_device(numbers, self._device) for numbers in (tokens, positions, rows))
        return self._decoder.compute(ids, places, attention, chosen, sight)


def _places(groups: Sequence[Sequence[_Sequence]]) -> dict[tuple[int, ...], Prompt]:
    """Places for the prompts that sequences share, those of one width in one bucket."""
    places: dict[tuple[int, ...], Prompt] = {}
    shared = [group[0] for group in groups if any(each.shares_prompt for each in group)]
    for width, same in itertools.groupby(shared, key=lambda sequence: sequence.padded_prefix):
        prompts = [sequence.identity for sequence in same]
        bucket = Bucket(len(prompts), width)
        places |= {prompt: Prompt(bucket, row, len(prompt)) for row, prompt in enumerate(prompts)}
    return places


def _converted(
    lm: CausalLM, dtype: torch.dtype | None, autocast: torch.dtype | None, *, copies: bool
) -> CausalLM:
    """A copy of the model with parameters in `dtype`, and weights of linear layers and experts in the
    `autocast` type, which autocast would convert in every step; `lm` itself if nothing differs, unless
    `copies`. A tied head is untied if only the head is converted. Buffers (rotary frequencies) keep their
    dtype."""

    def copied(parameter: Tensor, dtype: torch.dtype | None) -> nn.Parameter:
        return nn.Parameter(parameter.detach().to(dtype or parameter.dtype, copy=True), requires_grad=False)

    def converted_by_autocast(lm: CausalLM) -> list[tuple[nn.Module, str, Tensor]]:
        casts = [m for m in lm.model.modules() if isinstance(m, nn.Linear) or is_experts(m)]
        weights = [(module, *named) for module in casts for named in module.named_parameters(recurse=False)]
        return [weight for weight in weights if autocast and weight[2].dtype != autocast]

    parameters = list(lm.model.parameters())
    is_alike = all(p.dtype == (dtype or p.dtype) for p in parameters) and not converted_by_autocast(lm)
    if is_alike and not copies:
        return lm
    lm = copy.deepcopy(lm, {id(p): copied(p, dtype) for p in parameters})
    for module, name, parameter in converted_by_autocast(lm):
        setattr(module, name, copied(parameter, autocast))
    return lm
