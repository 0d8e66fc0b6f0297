"""States of stateful layers (models.stateful) for running sequences, beside the cache of keys and values.

They are stored by slot: of each layer one tensor [slots, ...] per kind of state, convolution and recurrence.
A decode step computes on views of the first slots, so states are never gathered, which would cost as much as
the step; the inputs, which are small, are brought into the order of slots instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from braid.models.attention import AttentionContext, LayerCall
from braid.models.stateful import StatefulCall, each, flat

States = dict[int, list[Tensor]]
"""Of one sequence, by layer: convolution and recurrent state."""
_MIN_SLOTS = 16


@dataclass(slots=True)
class StateCache:
    """States [slots, ...] by layer. `generation` counts allocations."""

    layers: States = field(default_factory=dict)
    generation: int = 0

    def write(self, layer: int, slots: slice, states: Sequence[Tensor]) -> None:
        """Store `states` [slots, ...] of a layer."""
        for store, new in zip(self._stores(layer, slots.stop, states), states, strict=True):
            store[slots].copy_(new)

    def views(self, layer: int, slots: slice) -> list[Tensor]:
        """What is stored for these slots, and zeros for those beyond the ones in use."""
        return [store[slots] for store in self._stores(layer, slots.stop, self.layers[layer])]

    def move(self, source: int, slot: int) -> None:
        """Copy a slot's states to another slot."""
        for store in itertools.chain(*self.layers.values()):
            store[slot].copy_(store[source])

    def stored(self, slot: int) -> States:
        """Copies of a slot's states."""
        return {layer: [store[slot].clone() for store in stores] for layer, stores in self.layers.items()}

    def restore(self, slot: int, states: States) -> None:
        """Write back what `stored` returned."""
        for layer, of_layer in states.items():
            self.write(layer, slice(slot, slot + 1), [state[None] for state in of_layer])

    def clear(self, slot: int) -> None:
        """Zero a slot that contains non-finite values."""
        for store in itertools.chain(*self.layers.values()):
            if slot < len(store):
                store[slot].zero_()

    def free(self) -> None:
        self.layers.clear()
        self.generation += 1

    @property
    def num_bytes(self) -> int:
        return sum(store.nbytes for store in itertools.chain(*self.layers.values()))

    @property
    def bytes_per_slot(self) -> int:
        return sum(store[0].nbytes for store in itertools.chain(*self.layers.values()))

    def _stores(self, layer: int, num_slots: int, like: Sequence[Tensor]) -> list[Tensor]:
        """The layer's tensors, with room for so many slots: their number doubles."""
        old = self.layers.get(layer, [])
        if old and len(old[0]) >= num_slots:
            return old
        size = max(_MIN_SLOTS, 1 << (num_slots - 1).bit_length())
        new = [state.new_zeros(size, *state.shape[1:]) for state in like]
        for store, before in zip(new, old, strict=False):
            store[: len(before)].copy_(before)
        self.layers[layer] = new
        self.generation += 1
        return new


@dataclass(frozen=True, slots=True)
class PrefillStates:
    """Each prompt by itself and without its padding, so that the states after it are right, and as
    independent of other prompts as the rest of a prefill. `prompts`: its length, its padded length and the
    number of sequences that start from it; slots are assigned in order, from `first_slot` on."""

    attention: AttentionContext
    states: StateCache
    first_slot: int
    prompts: Sequence[tuple[int, int, int]]

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention.attend(call, query, key, value)

    def mix(self, call: StatefulCall, x: Tensor) -> Any:
        outs: list[Any] = []
        slot, start = self.first_slot, 0
        for length, width, num in self.prompts:
            out, states = call(x[None, start : start + length], keeps=True)
            outs.append(each(partial(_padded, length=width), flat(out)))
            copies = [state.expand(num, *state.shape[1:]) for state in states]
            self.states.write(call.index, slice(slot, slot + num), copies)
            slot, start = slot + num, start + width
        return each(lambda *parts: torch.cat(parts), *outs)


@dataclass(frozen=True, slots=True)
class ContinueStates:
    """New tokens of sequences whose states are in the cache. `sizes`: the number of each sequence, from
    `first_slot` on; further tokens are padding. On CPUs each runs by itself, because the bits of small
    products depend on their number of rows; elsewhere those of one size run side by side."""

    attention: AttentionContext
    states: StateCache
    first_slot: int
    sizes: Sequence[int]

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention.attend(call, query, key, value)

    def mix(self, call: StatefulCall, x: Tensor) -> Any:
        outs: list[Any] = []
        slot, start = self.first_slot, 0
        is_cpu = x.device.type == "cpu"
        numbered = enumerate(self.sizes)
        for (size, _), same in itertools.groupby(numbered, lambda each: (each[1], each[0] if is_cpu else 0)):
            num = len(list(same))
            rows = x[start : start + num * size].unflatten(0, (num, size))
            stored = self.states.views(call.index, slice(slot, slot + num))
            outs.append(flat(_advanced(call, rows, stored)))
            slot, start = slot + num, start + num * size
        return each(lambda *parts: _padded(torch.cat(parts), len(x)), *outs)


@dataclass(frozen=True, slots=True)
class DecodeStates:
    """One new token of each sequence. `places` [B]: place in the batch of each slot, those of padding after
    the slots in use."""

    attention: AttentionContext
    states: StateCache
    places: Tensor

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention.attend(call, query, key, value)

    def mix(self, call: StatefulCall, x: Tensor) -> Any:
        stored = self.states.views(call.index, slice(0, len(x)))
        out = _advanced(call, x.index_select(0, self.places)[:, None], stored)
        return each(lambda y: torch.empty_like(y[:, 0]).index_copy_(0, self.places, y[:, 0]), out)


def _advanced(call: StatefulCall, x: Tensor, stored: Sequence[Tensor]) -> Any:
    """Outputs of x [B, L, D] after the states `stored`, which become those after x."""
    if x.shape[1] > 1 and not call.continues:
        steps = [_advanced(call, x[:, i : i + 1], stored) for i in range(x.shape[1])]
        return each(lambda *ys: torch.cat(ys, dim=1), *steps)
    out, states = call(x, stored)
    for store, new in zip(stored, states, strict=True):
        if new is not store:
            store.copy_(new)
    return out


def _padded(y: Tensor, length: int) -> Tensor:
    """[L, ...] -> [length, ...] with zeros at the end."""
    return F.pad(y, (0, 0) * (y.ndim - 1) + (0, length - len(y)))
