"""Checks that a model decoded with the native engine's cache gives the log-probs of a full forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from braid.models.causal_lm import CausalLM
from braid.models.selfcheck import Check, check_own_weights, check_tiny_copy

from .cache import KVCache, Need, PrefillAttention, padded_rows
from .decoder import Decoder

_MOST_DECODED = 6


def check_decoding(lm: CausalLM, longest: int | None = None, *, is_compiled: bool = False) -> None:
    """Compare prefill and decoding of a ragged batch with the model's plain forward pass over each whole row.
    See models.selfcheck.check_against_plain, and Decoder for `is_compiled`."""
    check = _COMPILED if is_compiled else _DECODING
    if not check_tiny_copy(lm, check, longest):
        check_own_weights(lm, check, longest)


@torch.no_grad()
def _decoded_logprobs(lm: CausalLM, rows: Sequence[Tensor], *, is_compiled: bool = False) -> list[Tensor]:
    """Log-probs [n + 1, V] of each row, for its last n tokens and the token after: the first from prefill,
    the others from decoding. Rows are ordered from longest to shortest."""
    shortest_first, num_rows = list(rows)[::-1], len(rows)
    num_decoded = min(_MOST_DECODED, len(rows[-1]) - 1)
    ends = [len(row) - num_decoded for row in shortest_first]
    widths = [padded_rows(end) for end in ends]
    cache = KVCache(num_rows * 64, num_rows)
    cache.reserve([Need(len(row)) for row in shortest_first])
    for row in shortest_first:
        cache.add(len(row))
    prompts = [F.pad(row[:e], (0, w - e)) for row, e, w in zip(shortest_first, ends, widths, strict=True)]
    positions = [F.pad(torch.arange(e), (0, w - e)) for e, w in zip(ends, widths, strict=True)]
    last = torch.tensor([sum(widths[:i]) + end - 1 for i, end in enumerate(ends)], device=lm.device)
    decoder = Decoder(lm, cache, lm.device, is_compiled=is_compiled)
    attention = PrefillAttention(cache, 0, [(width, 1) for width in widths], decoder.prefill_kernel)
    decoder.refresh(has_new_weights=True)
    steps = [decoder.compute(torch.cat(prompts), torch.cat(positions).to(lm.device), attention, last)]
    for step in range(num_decoded):
        tokens = [int(row[end + step]) for row, end in zip(shortest_first, ends, strict=True)]
        inputs = np.array([tokens, [end + step for end in ends]])
        steps.append(decoder.logits(inputs)[:num_rows].clone())
    return list(torch.stack(steps, dim=1).log_softmax(-1).flip(0))


_DECODING = Check(_decoded_logprobs, "the native engine", "set rollout.engine=vllm")
_COMPILED = Check(
    partial(_decoded_logprobs, is_compiled=True),
    "the native engine with compiled steps",
    "set rollout.engine.compile=never, or rollout.engine=vllm",
)
