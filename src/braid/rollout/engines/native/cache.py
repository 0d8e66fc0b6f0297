"""The key/value cache of running sequences, and attention over it.

Sequence s stores its keys and values in slot s of one tensor [slots, Hkv, length, d] per layer. Running sequences are
kept compact in the first slots, so that decoding reads plain views. A layer here is the n-th attention call in a
forward pass: some architectures call one attention module several times (DiffLlama).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from braid.models.attention import LayerCall, causal_attention, softmax_with_sinks

_LENGTH_MULTIPLE, _KERNEL_BLOCK, _WHOLE_SUMS = 32, 512, 384
_ROW_MULTIPLE, _MIN_ROWS, _PROMPT_MULTIPLE = 4, 16, 16


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def padded_length(length: int) -> int:
    """Number of positions to read for a sequence of `length`, such that on CPU the result is bitwise
    independent of other sequences.

    The attention kernel works in blocks of 512 positions. It sums up to 384 of them in order, more in two
    halves, and 512 in order again; masked positions add zeros, which change the bits of a sum only if they
    change how it is halved.
    """
    padded = round_up(length, _LENGTH_MULTIPLE)
    return padded if padded % _KERNEL_BLOCK <= _WHOLE_SUMS else round_up(padded, _KERNEL_BLOCK)


def padded_rows(num_rows: int) -> int:
    """Number of rows to compute for `num_rows`, such that on CPU in fp32 a row is bitwise independent of
    their number.

    Matrix products use a different kernel below 16 rows; element-wise functions do where a tensor ends within
    a vector register.
    """
    return max(_MIN_ROWS, round_up(num_rows, _ROW_MULTIPLE))


def padded_prompt(length: int) -> int:
    """Number of positions to prefill for a prompt; depends only on `length`, for the same reason."""
    return round_up(length, _PROMPT_MULTIPLE)


def free_bytes(device: torch.device) -> int | None:
    """Memory of the device that this process can still allocate; None on CPUs."""
    if device.type == "cpu":
        return None
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


class KVCache:
    """Slots for keys and values within a token budget.

    `budget_tokens` bounds slots x length, and must be set before use; each token takes the memory of its keys
    and values in all layers.
    """

    def __init__(self, budget_tokens: int | None, max_slots: int, device: torch.device) -> None:
        """On CPUs, the slots that padding rows write to come on top of both limits."""
        self.budget_tokens, self._max_slots = budget_tokens, max_slots
        self._pads = device.type == "cpu"
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.slots, self.length, self.generation = 0, 0, 0

    def fits(self, slots: int, length: int) -> bool:
        """Whether `slots` sequences of up to `length` tokens can run together."""
        assert self.budget_tokens is not None
        return slots <= self._max_slots and slots * padded_length(length) <= self.budget_tokens

    def reserve(self, slots: int, length: int, num_used: int) -> None:
        """Allocate room for sizes that `fits` accepted, keeping the content of the first `num_used` slots.

        The length grows by doubling; the number of slots is the most that the budget then allows. Each new
        layout increments `generation`.
        """
        if slots <= self.slots and length <= self.length:
            return
        assert self.budget_tokens is not None
        most = self.budget_tokens // slots // _LENGTH_MULTIPLE * _LENGTH_MULTIPLE
        self.length = min(1 << (padded_length(length) - 1).bit_length(), most)
        self.slots = min(self._max_slots, self.budget_tokens // self.length)
        if self._pads:
            self.slots = padded_rows(self.slots)
        self.generation += 1
        for layer, old in self._layers.items():
            self._layers[layer] = (self._moved(old[0], num_used), self._moved(old[1], num_used))

    def write_prompts(self, layer: int, first: int, key: Tensor, value: Tensor) -> None:
        """Write prompts' keys and values [N, Hkv, L, d] to slots first, first + 1, ..."""
        if layer not in self._layers:
            # Zeros, since masked values are still multiplied by 0 and must be finite.
            self._layers[layer] = (self._zeros_like(key), self._zeros_like(value))
        for store, new in zip(self._layers[layer], (key, value), strict=True):
            store[first : first + new.shape[0], :, : new.shape[2]].copy_(new)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, each [slots, Hkv, length, d]."""
        return self._layers[layer]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        for stores in self._layers.values():
            for store in stores:
                store[target, :, :length].copy_(store[source, :, :length])

    def stored(self, slot: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of the first `length` keys and values of a slot, by layer."""
        return [(k[slot, :, :length].clone(), v[slot, :, :length].clone()) for k, v in self._layers.values()]

    def restore(self, slot: int, stored: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write back what `stored` returned."""
        for stores, parts in zip(self._layers.values(), stored, strict=True):
            for store, part in zip(stores, parts, strict=True):
                store[slot, :, : part.shape[1]].copy_(part)

    def clear(self, slot: int) -> None:
        """Zero a slot that contains non-finite values."""
        for stores in self._layers.values():
            for store in stores:
                store[slot].zero_()

    @property
    def num_bytes(self) -> int:
        return sum(store.nbytes for stores in self._layers.values() for store in stores)

    def free(self) -> None:
        self._layers.clear()
        self.slots = self.length = 0

    def _zeros_like(self, new: Tensor) -> Tensor:
        return new.new_zeros(self.slots, new.shape[1], self.length, new.shape[3])

    def _moved(self, old: Tensor, num_used: int) -> Tensor:
        length = min(old.shape[2], self.length)
        new = self._zeros_like(old)
        new[:num_used, :, :length].copy_(old[:num_used, :, :length])
        return new


class PrefillAttention:
    """Causal attention over concatenated right-padded prompts; fills the cache. Padding in the cache is overwritten
    before the sequence grows long enough to see it."""

    def __init__(self, cache: KVCache, first_slot: int, prompts: Sequence[tuple[int, int]]) -> None:
        """`prompts`: (padded width, number of sequences that start from it) of each prompt, with equal widths
        adjacent. Slots are assigned in order, from `first_slot` on."""
        self._cache = cache
        self._blocks: list[tuple[int, int, list[int]]] = []
        for width, same in itertools.groupby(prompts, key=lambda prompt: prompt[0]):
            copies = [num for _, num in same]
            self._blocks.append((width, first_slot, copies))
            first_slot += sum(copies)
        self._sizes = [width * len(copies) for width, _, copies in self._blocks]
        self._next_layer = itertools.count()

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer = next(self._next_layer)
        outs: list[Tensor] = []
        parts = zip(*(x.split(self._sizes) for x in (query, key, value)), strict=True)
        for (width, slot, copies), qkv in zip(self._blocks, parts, strict=True):
            q, k, v = (x.unflatten(0, (len(copies), width)) for x in qkv)
            outs.append(causal_attention(call, q, k, v).flatten(0, 1))
            if len(copies) < sum(copies):
                index = [row for row, num in enumerate(copies) for _ in range(num)]
                k, v = k[index], v[index]
            self._cache.write_prompts(layer, slot, k.transpose(1, 2), v.transpose(1, 2))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class ContinueAttention:
    """Attention of the new tokens of sequences whose earlier ones are in the cache, to which the new ones are added."""

    def __init__(self, cache: KVCache, first_slot: int, sizes: Sequence[tuple[int, int]]) -> None:
        """`sizes`: of each sequence, from `first_slot` on, the tokens in the cache and the new ones; equal sizes are
        adjacent. Further tokens are padding."""
        self._cache, self._first = cache, first_slot
        self._blocks = [(sum(1 for _ in same), *size) for size, same in itertools.groupby(sizes)]
        self._next_layer = itertools.count()

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        stores, heads = self._cache.layer(next(self._next_layer)), key.shape[1]
        outs: list[Tensor] = []
        slot, start = self._first, 0
        for num, known, new in self._blocks:
            tokens, slots = slice(start, start + num * new), slice(slot, slot + num)
            for store, of in zip(stores, (key, value), strict=True):
                store[slots, :, known : known + new].copy_(
                    of[tokens].unflatten(0, (num, new)).transpose(1, 2)
                )
            k, v = (store[slots, :, : known + new] for store in stores)
            groups = query.shape[1] // heads
            q = query[tokens].unflatten(0, (num, new)).transpose(1, 2)  # [num, Hq, new, d]
            q = q.unflatten(1, (heads, groups)).flatten(2, 3)
            sinks = (
                None if call.sinks is None else call.sinks.view(heads, -1, 1).repeat_interleave(new, dim=1)
            )
            mask = self._mask(call.sliding_window, known, new, query).repeat(groups, 1)
            out = _attend(call, q, k, v, mask, sinks).unflatten(2, (groups, new)).flatten(1, 2)
            outs.append(out.transpose(1, 2).flatten(0, 1))
            slot, start = slot + num, start + num * new
        outs.append(outs[0].new_zeros(len(query) - start, *outs[0].shape[1:]))
        return torch.cat(outs)

    def _mask(self, window: int | None, known: int, new: int, query: Tensor) -> Tensor:
        """Additive attention mask [new, known + new]."""
        column = torch.arange(known + new, device=query.device)
        last = column[known:, None]
        is_hidden = column > last
        if window is not None:
            is_hidden |= column <= last - window
        zeros = torch.zeros(is_hidden.shape, dtype=query.dtype, device=query.device)
        return zeros.masked_fill_(is_hidden, float("-inf"))


def _attend(call: LayerCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention with an additive mask; q is [B, Hkv, N, d], `sinks` [Hkv, N, 1]."""
    if call.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scaling)
    scores = q @ k.transpose(2, 3) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    return softmax_with_sinks(scores + mask, sinks).to(v.dtype) @ v


def row_blocks(lengths: NDArray[np.int64]) -> list[tuple[slice, int]]:
    """Adjacent rows of similar length, and the `padded_length` to read for them: one long sequence does not make
    all others read as many positions. Below 512 positions a further call costs more than it saves."""
    sizes = [int(length - 1) // _KERNEL_BLOCK for length in lengths]
    blocks: list[tuple[slice, int]] = []
    start = 0
    for _, same in itertools.groupby(sizes, key=int.bit_length):
        stop = start + sum(1 for _ in same)
        blocks.append((slice(start, stop), padded_length(int(lengths[start:stop].max()))))
        start = stop
    return blocks


class DecodeAttention:
    """Attention of one new token in each of the first B slots to all previous tokens of its slot.

    Created once per step; all shapes depend only on B and `blocks`, so that a step can be captured as a CUDA
    graph. Query heads that share a key head are laid out along the query axis: q is [B, Hkv, G, d].
    """

    def __init__(self, cache: KVCache, positions: Tensor, blocks: Sequence[tuple[slice, int]]) -> None:
        """`positions` [B] of the new tokens. `blocks`: adjacent rows, and the number of positions to read for them:
        a `padded_length` above their positions."""
        self._cache, self._positions, self._blocks = cache, positions, blocks
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._places: dict[int, Tensor] = {}
        self._next_layer = itertools.count()

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, _ = key.shape
        stores = self._cache.layer(next(self._next_layer))
        place = self._place(heads, key.device)
        for store, new in zip(stores, (key, value), strict=True):
            store.view(-1, store.shape[3]).index_copy_(0, place, new.reshape(rows * heads, -1))
        q = query.unflatten(1, (heads, -1))
        sinks = None if call.sinks is None else call.sinks.view(heads, -1, 1)
        outs: list[Tensor] = []
        for block, width in self._blocks:
            k, v = (store[block, :, :width] for store in stores)
            mask = self._mask(block, width, call.sliding_window, query.dtype)
            outs.append(_attend(call, q[block], k, v, mask, sinks))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.reshape(rows, query.shape[1], -1)

    def _place(self, heads: int, device: torch.device) -> Tensor:
        """Index [B * Hkv] of the new entries among all (slot, head, position) triples of a layer."""
        if heads not in self._places:
            strips = torch.arange(len(self._positions) * heads, device=device) * self._cache.length
            self._places[heads] = strips + self._positions.repeat_interleave(heads)
        return self._places[heads]

    def _mask(self, block: slice, width: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive attention mask [B, 1, 1, width] of a block: 0 where visible, else -inf."""
        window = window if window is not None and window < width else None
        if (block.start, window) not in self._masks:
            column = torch.arange(width, device=self._positions.device)
            last = self._positions[block, None]
            is_hidden = column > last
            if window is not None:
                is_hidden |= column <= last - window
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
            self._masks[block.start, window] = mask.masked_fill_(is_hidden, float("-inf"))[:, None, None]
        return self._masks[block.start, window]
