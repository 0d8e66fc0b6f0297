"""The key/value cache of running sequences, and attention over it.

Sequences are kept in buckets by their maximum length (prompt and new tokens): up to 512, 1024, 2048, ...
tokens. A bucket is one tensor [rows, Hkv, length, d] for keys and one for values per layer, as long as its
longest sequence needs, whose running sequences are kept compact in the first rows. So a long sequence takes
memory and time for itself only, and attention still reads plain views. Pages would take less memory, but
PyTorch's attention on CPUs cannot read them: gathering them first copies what the kernel then reads once.
Below 512 tokens a further call of the kernel costs more than it saves.

The kernel of braid_kernels reads a sequence from two places, so that the sequences of a group share the keys
and values of their prompt: these are in a bucket of the prompts that were prefilled together, and the rows
above have the sampled tokens only.

The engine numbers sequences by slots; `KVCache` knows the bucket and row of each. A layer here is the n-th
attention call in a forward pass: some architectures call one attention module several times (DiffLlama).
States of stateful layers are in states.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from braid.models.attention import (
    AttentionKernel,
    ImageBlocks,
    LayerCall,
    causal_attention,
    softmax_with_sinks,
)
from braid.models.gpu import has_kernels
from braid.models.transfer import to_device

from .states import StateCache

_LENGTH_MULTIPLE, _KERNEL_BLOCK, _WHOLE_SUMS = 32, 512, 384
ROW_MULTIPLE, _MIN_ROWS = 4, 16


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
    """Number of rows to compute for `num_rows` sequences or for a prompt of as many tokens, such that on CPU
    in fp32 a row is bitwise independent of their number.

    Matrix products use a different kernel below 16 rows; element-wise functions do where a tensor ends within
    a vector register.
    """
    return max(_MIN_ROWS, round_up(num_rows, ROW_MULTIPLE))


def free_bytes(device: torch.device) -> int | None:
    """Memory of the device that this process can still allocate; None on CPUs."""
    if device.type == "cpu":
        return None
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def size_class(longest: int) -> int:
    """The bucket for sequences of up to `longest` tokens."""
    return ((longest - 1) // _KERNEL_BLOCK).bit_length()


@dataclass(slots=True, eq=False)
class Bucket:
    """Sequences of one size class: keys and values [rows, Hkv, length, d] by layer. `slots` are those of the
    sequences in the first rows, `longest` their maximum lengths here, `prompts` those that are elsewhere."""

    rows: int = 0
    length: int = 0
    slots: list[int] = field(default_factory=list)
    longest: list[int] = field(default_factory=list)
    prompts: list[Prompt | None] = field(default_factory=list)
    longest_prompt: int = 0
    """Of those so far, as a power of two."""
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.rows * self.length

    def resize(self, rows: int, length: int) -> None:
        """Allocate anew, keeping the sequences."""
        self.rows, self.length = rows, length
        for layer, stores in self.layers.items():
            self.layers[layer] = (self._moved(stores[0]), self._moved(stores[1]))

    def write(self, layer: int, first: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values [N, Hkv, L, d] to rows first, first + 1, ... Positions beyond the bucket's
        length are padding."""
        self.allocate(layer, key, value)
        for store, new in zip(self.layers[layer], (key, value), strict=True):
            store[first : first + new.shape[0], :, : new.shape[2]].copy_(new[:, :, : self.length])

    def allocate(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Room for keys and values like these [N, Hkv, L, d]."""
        if layer not in self.layers:
            # Zeros, since masked values are still multiplied by 0 and must be finite.
            self.layers[layer] = (self._zeros_like(key), self._zeros_like(value))

    def _zeros_like(self, new: Tensor) -> Tensor:
        return new.new_zeros(self.rows, new.shape[1], self.length, new.shape[3])

    def _moved(self, old: Tensor) -> Tensor:
        num, length = len(self.slots), min(old.shape[2], self.length)
        new = self._zeros_like(old)
        new[:num, :, :length].copy_(old[:num, :, :length])
        return new


class Need(NamedTuple):
    """Most positions that a sequence takes for itself, and those of a new prompt elsewhere."""

    alone: int
    prompt: int = 0


class Prompt(NamedTuple):
    """The first `length` positions of sequences: a row of a bucket that only prompts are in."""

    bucket: Bucket
    row: int
    length: int


class KVCache:
    """Buckets within a token budget.

    `budget_tokens` bounds the sum of the buckets' rows x length, those of prompts among them, and must be set
    before use; each token takes the memory of its keys and values in all layers. `generation` counts the
    layouts so far. `shares_prompts`: attention can read a sequence's prompt elsewhere, and of each part
    exactly its length.
    """

    def __init__(self, budget_tokens: int | None, max_slots: int) -> None:
        self.budget_tokens, self._max_slots = budget_tokens, max_slots
        self._buckets: dict[int, Bucket] = {}
        self._places: list[tuple[Bucket, int]] = []  # of each slot
        self.generation = 0
        self.shares_prompts = False
        self.states = StateCache()

    def can_ever_fit(self, longest: int) -> bool:
        """Whether a sequence of up to `longest` tokens can run by itself."""
        return self._least_length(longest) <= self._budget

    def num_fitting(self, needs: Iterable[Need]) -> int:
        """How many further sequences, in this order, can run beside the present ones."""
        of_kinds, num, room = self._of_kinds(()), 0, self._room()
        for need in needs:
            _add(of_kinds, need.alone)
            room -= need.prompt
            if len(self._places) + num == self._max_slots or self._num_tokens(of_kinds, room) > room:
                break
            num += 1
        return num

    def reserve(self, further: Sequence[Need]) -> None:
        """Allocate room for further sequences that `num_fitting` accepted: the number of rows doubles, if
        there is memory. If there is not, the other buckets give back what they do not use."""
        needs = self._of_kinds(need.alone for need in further)
        room = self._room() - sum(need.prompt for need in further)
        buckets = {kind: self._buckets.get(kind) or Bucket() for kind in needs}
        small = {
            kind: buckets[kind]
            for kind, (rows, longest) in needs.items()
            if rows > buckets[kind].rows or longest > buckets[kind].length
        }
        others = sum(bucket.num_tokens for kind, bucket in buckets.items() if kind not in small)
        spare = room - others - self._num_tokens({kind: needs[kind] for kind in small}, room)
        if spare < 0:
            small, spare = buckets, room - self._num_tokens(needs, room)
        if not small:
            return
        for kind, bucket in small.items():
            rows, length = needs[kind][0], self._length(needs[kind][1], room)
            more = min((1 << (rows - 1).bit_length()), self._max_slots) - rows if rows else 0
            more = min(more, spare // length) if more else 0
            spare -= more * length
            bucket.resize(rows + more, length)
        self._buckets = {kind: buckets[kind] for kind in sorted(buckets) if buckets[kind].rows}
        self.generation += 1

    def add(self, longest: int, prompt: Prompt | None = None) -> None:
        """Give the next slot to a sequence for which there is room: up to `longest` tokens after the prompt,
        if that is elsewhere."""
        bucket = self._buckets[size_class(longest)]
        assert len(bucket.slots) < bucket.rows, "the room was reserved"
        self._places.append((bucket, len(bucket.slots)))
        bucket.slots.append(len(self._places) - 1)
        bucket.longest.append(longest)
        bucket.prompts.append(prompt)
        if prompt and prompt.length > bucket.longest_prompt:
            bucket.longest_prompt = 1 << (prompt.length - 1).bit_length()
            self.generation += 1

    def remove(self, slot: int, lengths: NDArray[np.int64]) -> None:
        """Remove a sequence. The last of its bucket takes its row, the last of all its slot. `lengths`:
        positions in use of each slot."""
        bucket, row = self._places[slot]
        moved, longest, prompt = bucket.slots.pop(), bucket.longest.pop(), bucket.prompts.pop()
        if moved != slot:
            length = int(lengths[moved]) - (prompt.length if prompt else 0)
            for stores in bucket.layers.values():
                for store in stores:
                    store[row, :, :length].copy_(store[len(bucket.slots), :, :length])
            bucket.slots[row], bucket.longest[row], bucket.prompts[row] = moved, longest, prompt
            self._places[moved] = bucket, row
        last, row = self._places.pop()
        if slot < len(self._places):
            self.states.move(len(self._places), slot)
            self._places[slot] = last, row
            last.slots[row] = slot

    def remove_all(self) -> None:
        self._places.clear()
        for bucket in self._buckets.values():
            for of_rows in (bucket.slots, bucket.longest, bucket.prompts):
                of_rows.clear()

    def start_of(self, slot: int) -> tuple[Bucket, int]:
        """Bucket and row of a sequence's first positions."""
        bucket, row = self._places[slot]
        prompt = bucket.prompts[row]
        return (prompt.bucket, prompt.row) if prompt else (bucket, row)

    def buckets(self) -> list[Bucket]:
        """Those with sequences."""
        return [bucket for bucket in self._buckets.values() if bucket.slots]

    def stored(self, slot: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of the first `length` keys and values of a slot, by layer."""
        bucket, row = self._places[slot]
        parts: list[tuple[Bucket, int, int]] = [(bucket, row, length)]
        if prompt := bucket.prompts[row]:
            parts = [prompt]
            if length > prompt.length:  # else the bucket may not have decoded yet, and have no layers
                parts.append((bucket, row, length - prompt.length))
        key, value = (
            [[part.layers[layer][i][at, :, :num] for part, at, num in parts] for layer in parts[0][0].layers]
            for i in range(2)
        )
        return [(torch.cat(k, dim=1), torch.cat(v, dim=1)) for k, v in zip(key, value, strict=True)]

    def restore(self, slot: int, stored: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write back what `stored` returned."""
        bucket, row = self.start_of(slot)
        for layer, (key, value) in enumerate(stored):
            bucket.write(layer, row, key[None], value[None])

    def clear(self, slot: int) -> None:
        """Zero a slot that contains non-finite values."""
        self.states.clear(slot)
        bucket, row = self._places[slot]
        for stores in bucket.layers.values():
            for store in stores:
                store[row].zero_()

    @property
    def num_bytes(self) -> int:
        buckets = (*self._buckets.values(), *self._of_prompts())
        layers = (stores for bucket in buckets for stores in bucket.layers.values())
        return self.states.num_bytes + sum(store.nbytes for stores in layers for store in stores)

    def free(self) -> None:
        self._buckets.clear()
        self._places.clear()
        self.states.free()
        self.generation += 1

    @property
    def _budget(self) -> int:
        assert self.budget_tokens is not None
        return self.budget_tokens

    def _of_prompts(self) -> list[Bucket]:
        """Buckets of the prompts of all sequences."""
        prompts = (prompt for bucket in self._buckets.values() for prompt in bucket.prompts if prompt)
        return list(dict.fromkeys(prompt.bucket for prompt in prompts))

    def _room(self) -> int:
        """Tokens of the budget beside the present prompts."""
        return self._budget - sum(bucket.num_tokens for bucket in self._of_prompts())

    def _of_kinds(self, lengths: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Sequences of each size class and their maximum length, with further ones of `lengths`."""
        needs = {
            kind: (len(bucket.slots), max(bucket.longest, default=0))
            for kind, bucket in self._buckets.items()
        }
        for length in lengths:
            _add(needs, length)
        return needs

    def _num_tokens(self, needs: dict[int, tuple[int, int]], room: int) -> int:
        return sum(rows * self._length(longest, room) for rows, longest in needs.values())

    def _length(self, longest: int, room: int) -> int:
        """Length of a bucket for sequences of up to `longest` tokens: in eighths of a power of two, so that
        it seldom changes."""
        padded = padded_length(round_up(longest, max(_LENGTH_MULTIPLE, 1 << longest.bit_length() >> 4)))
        return padded if padded <= room else self._least_length(longest)

    def _least_length(self, longest: int) -> int:
        return longest if self.shares_prompts else padded_length(longest)


def _add(needs: dict[int, tuple[int, int]], length: int) -> None:
    kind = size_class(length)
    rows, longest = needs.get(kind, (0, 0))
    needs[kind] = rows + 1, max(longest, length)


class PrefillAttention:
    """Causal attention over concatenated right-padded prompts; fills the cache. Padding in the cache is
    overwritten before the sequence grows long enough to see it."""

    def __init__(
        self,
        cache: KVCache,
        first_slot: int,
        prompts: Sequence[tuple[int, int]],
        kernel: AttentionKernel = causal_attention,
    ) -> None:
        """`prompts`: (padded width, number of sequences that start from it) of each prompt, with equal widths
        adjacent. Slots are assigned in order, from `first_slot` on."""
        self._blocks: list[tuple[int, int, list[tuple[Bucket, int, list[int]]]]] = []
        self._chosen: dict[tuple[int, int], Tensor] = {}
        for width, same in itertools.groupby(prompts, key=lambda prompt: prompt[0]):
            copies = [num for _, num in same]
            prompt_of = [prompt for prompt, num in enumerate(copies) for _ in range(num)]
            self._blocks.append((width, len(copies), _writes(cache, first_slot, prompt_of)))
            first_slot += len(prompt_of)
        self._sizes = [width * num for width, num, _ in self._blocks]
        self._next_layer, self._kernel = itertools.count(), kernel
        self._images: ImageBlocks | None = None
        self._visible: dict[int | None, list[Tensor | None]] = {}

    def see(self, blocks: ImageBlocks) -> None:
        """Let the positions of images see each other."""
        self._images = blocks

    def _calls(self, call: LayerCall) -> list[LayerCall]:
        """The call of a layer for each block of prompts, with the keys that are visible where there are
        images."""
        images, window = self._images, call.sliding_window
        if images is None:
            return [call] * len(self._blocks)
        if window not in self._visible:
            parts = zip(self._blocks, images.numbers.split(self._sizes), strict=True)
            numbers = (part.unflatten(0, (num, width)) for (width, num, _), part in parts)
            self._visible[window] = [images.visible(call, part, part) for part in numbers]
        return [
            call if visible is None else replace(call, chosen=(visible,), sliding_window=None)
            for visible in self._visible[window]
        ]

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer = next(self._next_layer)
        outs: list[Tensor] = []
        parts = zip(*(x.split(self._sizes) for x in (query, key, value)), strict=True)
        for of_block, (width, num, writes), qkv in zip(self._calls(call), self._blocks, parts, strict=True):
            q, k, v = (x.unflatten(0, (num, width)) for x in qkv)
            kernel = causal_attention if of_block.chosen else self._kernel
            outs.append(kernel(of_block, q, k, v).flatten(0, 1))
            for bucket, row, chosen in writes:
                if chosen != list(range(num)):
                    index = self._chosen.get((id(bucket), row))
                    if index is None:  # in the first layer
                        index = self._chosen[id(bucket), row] = to_device(chosen, k.device)
                    of_k, of_v = k.index_select(0, index), v.index_select(0, index)
                else:
                    of_k, of_v = k, v
                bucket.write(layer, row, of_k.transpose(1, 2), of_v.transpose(1, 2))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _writes(cache: KVCache, first_slot: int, prompt_of: list[int]) -> list[tuple[Bucket, int, list[int]]]:
    """Buckets of the first positions of the slots from `first_slot` on, with the first of adjacent rows and
    the prompt of each of them."""
    writes: list[tuple[Bucket, int, list[int]]] = []
    last: dict[Bucket, tuple[Bucket, int, list[int]]] = {}
    for slot, prompt in enumerate(prompt_of, first_slot):
        bucket, row = cache.start_of(slot)
        if bucket not in last or row > last[bucket][1] + len(last[bucket][2]):
            writes.append((bucket, row, []))
            last[bucket] = writes[-1]
        _, first, chosen = last[bucket]
        if row == first + len(chosen):  # else it shares the row above
            chosen.append(prompt)
    return writes


class ContinueAttention:
    """Attention of the new tokens of sequences whose earlier ones are in the cache, to which the new ones are
    added."""

    def __init__(self, cache: KVCache, first_slot: int, sizes: Sequence[tuple[int, int]]) -> None:
        """`sizes`: of each sequence, from `first_slot` on, the tokens in the cache and the new ones; equal
        sizes in the same bucket are adjacent. Further tokens are padding."""
        places = [(*cache.start_of(slot), *size) for slot, size in enumerate(sizes, first_slot)]
        self._blocks: list[tuple[Bucket, slice, int, int]] = []
        for (bucket, known, new), same in itertools.groupby(places, key=lambda place: (place[0], *place[2:])):
            rows = [row for _, row, *_ in same]
            self._blocks.append((bucket, slice(rows[0], rows[-1] + 1), known, new))
        self._next_layer = itertools.count()
        self._images: ImageBlocks | None = None

    def see(self, blocks: ImageBlocks) -> None:
        """Let the positions of the new images see each other."""
        self._images = blocks

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer, heads = next(self._next_layer), key.shape[1]
        outs: list[Tensor] = []
        start = 0
        for bucket, rows, known, new in self._blocks:
            stores, num = bucket.layers[layer], rows.stop - rows.start
            tokens = slice(start, start + num * new)
            for store, x in zip(stores, (key, value), strict=True):
                store[rows, :, known : known + new].copy_(x[tokens].unflatten(0, (num, new)).transpose(1, 2))
            k, v = (store[rows, :, : known + new] for store in stores)
            groups = query.shape[1] // heads
            q = query[tokens].unflatten(0, (num, new)).transpose(1, 2)  # [num, Hq, new, d]
            q = q.unflatten(1, (heads, groups)).flatten(2, 3)
            sinks = (
                None if call.sinks is None else call.sinks.view(heads, -1, 1).repeat_interleave(new, dim=1)
            )
            mask = self._mask(call, known, new, query, tokens).repeat(1, groups, 1)[:, None]
            out = _attend(call, q, k, v, mask, sinks).unflatten(2, (groups, new)).flatten(1, 2)
            outs.append(out.transpose(1, 2).flatten(0, 1))
            start += num * new
        outs.append(outs[0].new_zeros(len(query) - start, *outs[0].shape[1:]))
        return torch.cat(outs)

    def _mask(self, call: LayerCall, known: int, new: int, query: Tensor, tokens: slice) -> Tensor:
        """Additive attention mask [1 or n, new, known + new] of sequences whose new tokens are `tokens`."""
        visible = None
        if self._images is not None:
            numbers = self._images.numbers[tokens].unflatten(0, (-1, new))
            visible = self._images.visible(call, numbers, F.pad(numbers, (known, 0), value=-1), known)
        if visible is None:
            column = torch.arange(known + new, device=query.device)
            last, window = column[known:, None], call.sliding_window
            visible = (column <= last)[None]
            if window is not None:
                visible &= column > last - window
        zeros = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        return zeros.masked_fill_(~visible, float("-inf"))


def _attend(call: LayerCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention with an additive mask; q is [B, Hkv, N, d], `sinks` [Hkv, N, 1]."""
    if call.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scaling)
    scores = q @ k.transpose(2, 3) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    return softmax_with_sinks(scores + mask, sinks).to(v.dtype) @ v


def row_blocks(lengths: NDArray[np.int64]) -> list[tuple[slice, int]]:
    """Adjacent rows of similar length, and the `padded_length` to read for them: one long sequence does not
    make all others read as many positions. Below 512 positions a further call costs more than it saves."""
    blocks: list[tuple[slice, int]] = []
    start = 0
    for _, same in itertools.groupby(lengths.tolist(), key=size_class):
        stop = start + sum(1 for _ in same)
        blocks.append((slice(start, stop), padded_length(int(lengths[start:stop].max()))))
        start = stop
    return blocks


class Block(NamedTuple):
    """Adjacent rows of a bucket and the number of positions to read for them, a `padded_length` above theirs.
    `start`: the first row's place in the batch."""

    bucket: Bucket
    rows: slice
    width: int
    start: int

    @property
    def places(self) -> slice:
        return slice(self.start, self.start + self.rows.stop - self.rows.start)


class DecodeAttention:
    """Attention of one new token per sequence to all previous ones.

    Created once per step; all shapes depend only on the number of tokens and `blocks`, so that a step can be
    captured as a CUDA graph. Query heads that share a key head are laid out along the query axis: q is [B,
    Hkv, G, d]. On GPUs a kernel reads of each row what is in use; otherwise all rows of a block are read up
    to its width, with a mask.
    """

    def __init__(self, positions: Tensor, blocks: Sequence[Block]) -> None:
        """`positions` [B] of the new tokens. Those beyond the blocks are padding."""
        self._positions, self._blocks = positions, blocks
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._indices: dict[tuple[int, int], Tensor] = {}
        self._next_layer = itertools.count()

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._of_layer(next(self._next_layer), call, query, key, value)

    def _of_layer(self, layer: int, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num, heads, _ = key.shape
        q = query.unflatten(1, (heads, -1))
        sinks = None if call.sinks is None else call.sinks.view(heads, -1, 1)
        outs: list[Tensor] = []
        for block in self._blocks:
            stores, index = block.bucket.layers[layer], self._index(block, heads)
            for store, new in zip(stores, (key, value), strict=True):
                store.view(-1, store.shape[3]).index_copy_(0, index, new[block.places].flatten(0, 1))
            if has_kernels(query.device) and query.shape[-1] == value.shape[-1] <= 256:
                outs.append(self._of_kernel(call, block, query[block.places], *stores))
                continue
            k, v = (store[block.rows] for store in stores)
            mask = self._mask(block, call.sliding_window, query.dtype)
            k, v = (x[:, :, : block.width] for x in (k, v))
            outs.append(_attend(call, q[block.places], k, v, mask, sinks).flatten(1, 2))
        if num > (end := self._blocks[-1].places.stop):
            outs.append(outs[0].new_zeros(num - end, *outs[0].shape[1:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _of_kernel(
        self, call: LayerCall, block: Block, query: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        from braid.models.gpu.kernels import attend_cache  # imports Triton

        where = {"positions": self._positions[block.places], "row": block.rows.start, "longest": block.width}
        how = {"window": call.sliding_window, "softcap": call.softcap, "sinks": call.sinks}
        return attend_cache(query, keys, values, scaling=call.scaling, **where, **how)

    def _index(self, block: Block, heads: int) -> Tensor:
        """Index [n * Hkv] of a block's new entries among all (row, head, position) triples of its bucket's
        layer."""
        if (block.start, heads) not in self._indices:
            positions = self._positions[block.places]
            strips = torch.arange(block.rows.start * heads, block.rows.stop * heads, device=positions.device)
            index = strips * block.bucket.length + positions.repeat_interleave(heads)
            self._indices[block.start, heads] = index
        return self._indices[block.start, heads]

    def _mask(self, block: Block, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive attention mask [n, 1, 1, width] of a block: 0 where visible, else -inf."""
        window = window if window is not None and window < block.width else None
        if (block.start, window) not in self._masks:
            column = torch.arange(block.width, device=self._positions.device)
            last = self._positions[block.places, None]
            is_hidden = column > last
            if window is not None:
                is_hidden |= column <= last - window
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
            self._masks[block.start, window] = mask.masked_fill_(is_hidden, float("-inf"))[:, None, None]
        return self._masks[block.start, window]
