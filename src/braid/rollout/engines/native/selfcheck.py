"""Checks that a model decoded with the native engine's cache gives the log-probs of a full forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from braid.errors import ModelError
from braid.models.attention import AttentionContext
from braid.models.causal_lm import CausalLM
from braid.models.selfcheck import Check, check_own_weights, check_tiny_copy
from braid.models.stateful import step_limits

from .cache import ContinueAttention, KVCache, Need, PrefillAttention, padded_rows
from .decoder import Decoder
from .states import ContinueStates, PrefillStates

_MOST_DECODED, _BEFORE_LEAVING = 6, 2


def check_decoding(lm: CausalLM, longest: int | None = None, *, is_compiled: bool = False) -> None:
    """Compare prefill and decoding of a ragged batch with the model's plain forward pass over each whole row.
    See models.selfcheck.check_against_plain, and Decoder for `is_compiled`."""
    if (limits := step_limits(lm.model)) is not None:
        raise ModelError(
            f"{type(lm.model).__name__} limits the step sizes of its state-space layers to {limits[0]:g} to "
            f"{limits[1]:g} in a full pass, but its code for decoding does not, so that engine and trainer "
            "would differ; it can be trained by braid sft, or choose another model (docs/models.md)"
        )
    check = _COMPILED if is_compiled else _DECODING
    for each in (check, _RESUMING) if lm.has_states else (check,):
        if not check_tiny_copy(lm, each, longest):
            check_own_weights(lm, each, longest)


@torch.no_grad()
def _decoded_logprobs(lm: CausalLM, rows: Sequence[Tensor], *, is_compiled: bool = False) -> list[Tensor]:
    """Log-probs [n + 1, V] of each row, for its last n tokens and the token after: the first from prefill,
    the others from decoding. Rows are ordered from longest to shortest."""
    shortest_first, num_rows = list(rows)[::-1], len(rows)
    num_decoded = min(_MOST_DECODED, len(rows[-1]) - 1)
    ends = [len(row) - num_decoded for row in shortest_first]
    cache = KVCache(num_rows * 128, num_rows)
    cache.reserve([Need(len(row)) for row in shortest_first])
    decoder = Decoder(lm, cache, lm.device, is_compiled=is_compiled)
    steps = [_prefilled(lm, cache, decoder, shortest_first, ends)]
    for step in range(num_decoded):
        tokens = [int(row[end + step]) for row, end in zip(shortest_first, ends, strict=True)]
        inputs = np.array([tokens, [end + step for end in ends]])
        steps.append(decoder.logits(inputs)[:num_rows].clone())
    return list(torch.stack(steps, dim=1).log_softmax(-1).flip(0))


def _prefilled(
    lm: CausalLM, cache: KVCache, decoder: Decoder, rows: Sequence[Tensor], starts: Sequence[int]
) -> Tensor:
    """Logits [R, V] after the first `starts` tokens of the rows, which get the first slots."""
    for row in rows:
        cache.add(len(row))
    widths = [padded_rows(start) for start in starts]
    prompts = [F.pad(row[:n], (0, w - n)) for row, n, w in zip(rows, starts, widths, strict=True)]
    positions = [F.pad(torch.arange(n), (0, w - n)) for n, w in zip(starts, widths, strict=True)]
    last = torch.tensor([sum(widths[:i]) + n - 1 for i, n in enumerate(starts)], device=lm.device)
    attention: AttentionContext = PrefillAttention(
        cache, 0, [(width, 1) for width in widths], decoder.prefill_kernel
    )
    if lm.has_states:
        sizes = [(start, width, 1) for start, width in zip(starts, widths, strict=True)]
        attention = PrefillStates(attention, cache.states, 0, sizes)
    decoder.refresh(has_new_weights=True)
    return decoder.compute(torch.cat(prompts), torch.cat(positions).to(lm.device), attention, last)


@torch.no_grad()
def _resumed_logprobs(lm: CausalLM, rows: Sequence[Tensor]) -> list[Tensor]:
    """As _decoded_logprobs, where states change places: after prefill and two tokens the first sequence
    leaves, so that the last takes its slot; it returns from its snapshot, by a continuation of one token,
    to the slot that the last had; and the end of all rows is computed from snapshots, in one pass."""
    rows = list(rows)[::-1]
    num_decoded = min(_MOST_DECODED, len(rows[0]) - 1)
    starts = [len(row) - num_decoded for row in rows]
    if num_decoded <= _BEFORE_LEAVING + 1 or len(rows) < 2:  # no room for it within the run's rows
        return _decoded_logprobs(lm, rows[::-1])
    cache = KVCache(len(rows) * 128, len(rows))
    cache.reserve([Need(len(row)) for row in rows])
    decoder = Decoder(lm, cache, lm.device)
    order, logits = list(range(len(rows))), [list[Tensor]() for _ in rows]

    def decode(step: int) -> None:
        """The token `step` after the prompt, of all sequences in the order of slots."""
        tokens = [int(rows[row][starts[row] + step]) for row in order]
        positions = [starts[row] + step for row in order]
        out = decoder.logits(np.array([tokens, positions]))
        for slot, row in enumerate(order):
            logits[row].append(out[slot].clone())

    def resume(first: int, resumed: Sequence[int], num_new: int) -> None:
        """Give slots from `first` on to the snapshots of these rows, with so many new tokens each."""
        sizes, tokens, positions = list[tuple[int, int]](), list[Tensor](), list[Tensor]()
        for slot, row in enumerate(resumed, first):
            known = starts[row] + _BEFORE_LEAVING
            cache.add(len(rows[row]))
            keys, states = snapshots[row]
            cache.restore(slot, keys)
            cache.states.restore(slot, states)
            sizes.append((known, num_new))
            tokens.append(rows[row][known : known + num_new])
            positions.append(torch.arange(known, known + num_new))
        attention = ContinueStates(
            ContinueAttention(cache, first, sizes), cache.states, first, [num_new] * len(resumed)
        )
        last = torch.arange(1, len(resumed) + 1, device=lm.device) * num_new - 1
        out = decoder.compute(torch.cat(tokens), torch.cat(positions).to(lm.device), attention, last)
        for row, of_row in zip(resumed, out, strict=True):
            logits[row].append(of_row.clone())

    for row, of_row in enumerate(_prefilled(lm, cache, decoder, rows, starts)):
        logits[row].append(of_row.clone())
    for step in range(_BEFORE_LEAVING):
        decode(step)
    lengths = [start + _BEFORE_LEAVING for start in starts]
    snapshots = [(cache.stored(row, n), cache.states.stored(row)) for row, n in enumerate(lengths)]
    cache.remove(0, np.array(lengths))
    order = [order[-1], *order[1:-1]]
    decode(_BEFORE_LEAVING)
    resume(len(order), [0], 1)
    order.append(0)
    for step in range(_BEFORE_LEAVING + 1, num_decoded - 1):
        decode(step)
    cache.remove_all()
    resume(0, range(len(rows)), num_decoded - _BEFORE_LEAVING)
    return [torch.stack(of_row).log_softmax(-1) for of_row in logits[::-1]]


_DECODING = Check(_decoded_logprobs, "the native engine", "set rollout.engine=vllm")
_RESUMING = Check(
    _resumed_logprobs,
    "the native engine's slots and snapshots of states",
    "choose another model (docs/models.md)",
)
_COMPILED = Check(
    partial(_decoded_logprobs, is_compiled=True),
    "the native engine with compiled steps",
    "set rollout.engine.compile=never, or rollout.engine=vllm",
)
