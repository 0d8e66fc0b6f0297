"""Layers that carry a state along a sequence: linear attention, state-space layers and short convolutions. As
with attention, the context of the forward pass determines what one sequence is, and keeps states if needed.

transformers' modules take a cache and a mask. A call of one here takes rows of equal width without a mask,
and a stand-in for the cache with the states before the rows:

* Padding on the right changes no output before it, because the layers are causal. The states after it are
  wrong, so rows whose states are kept have none.
* A single token after a state overwrites it, so rows that are to be differentiated have two and more.

The same calls reach the kernels of fla, causal_conv1d and mamba_ssm where transformers uses these packages.
Their options for packed rows (`seq_idx`, `cu_seqlens`) are not used: transformers drops them without a
warning where one package is missing, and rows then leak into one another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from .flops import RECURRENT
from .layout import Lay, Layout, Lift, rows_by_length, stored_places
from .transfer import to_device

LAYER_TYPES = (*RECURRENT, "hybrid", "hybrid_sliding")
"""transformers' types of layers that have a state."""
_CACHES = ("cache_params", "past_key_values")
_PACKED_LINE = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids")
"""Arguments that describe the packed positions as a whole, and so no rectangle of them."""


@dataclass(frozen=True, slots=True)
class StatefulCall:
    """A layer's own computation. `index` numbers the stateful layers of a model. `continues`: whether several
    tokens can follow a state; transformers' Mamba 1 ignores the state then."""

    index: int
    forward: Callable[..., Any]
    cache: str
    continues: bool = True

    def __call__(
        self, x: Tensor, states: Sequence[Tensor] = (), *, keeps: bool = False
    ) -> tuple[Any, list[Tensor]]:
        """x [B, L, D] after `states` [B, ...] -> outputs [B, L, ...] and, with `keeps` or `states`, the
        states after x. The given tensors may be overwritten if L is 1."""
        cache = _States(states) if keeps or states else None
        out = self.forward(hidden_states=x, **{self.cache: cache})
        if isinstance(out, tuple) and len(out) == 2:  # MiniMax returns its state, which its layers drop
            out = out[0], None
        return out, [] if cache is None else cache.states


class _States:
    """Stands in for transformers' cache in a call of one layer."""

    record_past = False

    def __init__(self, states: Sequence[Tensor]) -> None:
        self.states = list(states)
        self._has_previous = bool(states)
        self.layers: Any = defaultdict(lambda: self)
        conv, recurrent = (*self.states, None, None)[:2]
        self.conv_states: Any = defaultdict(lambda: conv)
        self.recurrent_states: Any = defaultdict(lambda: recurrent)

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return self._has_previous

    def update_conv_state(
        self, new: Tensor, *_: Any, conv_kernel_size: int | None = None, **__: Any
    ) -> Tensor:
        """Inputs [B, C, L] of a convolution, returned after those that the state holds."""
        size = conv_kernel_size or new.shape[-1]
        whole = torch.cat((self.states[0], new), dim=-1) if self._has_previous else new
        self._put(0, F.pad(whole, (max(size - whole.shape[-1], 0), 0))[..., -size:])
        return whole

    def update_recurrent_state(self, new: Tensor, *_: Any, **__: Any) -> Tensor:
        self._put(1, new)
        return new

    def get_linear_cache(self, _: int) -> Tensor | None:
        return self.states[0] if self._has_previous else None

    def set_linear_cache(self, _: int, new: Tensor) -> None:
        self._put(0, new)

    def _put(self, place: int, new: Tensor) -> None:
        self.states[place : place + 1] = [new]


class PackedStates:
    """Runs stateful layers over packed rows. A row that shares its beginning with an earlier one continues
    from the state there, which is computed once; gradients flow back through it."""

    def __init__(
        self, lengths: Sequence[int], shared: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        """As in PackedBatch."""
        self._lengths, self._shared, self._device = lengths, shared, device
        ends = {(source, num) for source, num in shared if num}
        sources = [source for source, _ in ends]
        is_simple = len(set(sources)) == len(sources) and not any(shared[source][1] for source in sources)
        self._forks = is_simple
        self._whole: Layout | None = None
        self._cut: _CutRows | None = None

    def mix(self, call: StatefulCall, x: Tensor) -> Any:
        """Outputs [T, ...] of a layer for the packed positions x [T, D]."""
        if call.continues and self._forks:
            if self._cut is None:
                self._cut = _CutRows(self._lengths, self._shared, self._device)
            return self._cut.mix(call, x)
        if self._whole is None:
            rows = rows_by_length(self._lengths)
            self._whole = Layout(rows, self._lengths, self._shared, self._device)
        layout = self._whole
        outs = [flat(call(rows)[0]) for rows in layout.split(layout.lay(x))]
        return each(lambda *parts: layout.lift(torch.cat(parts)), *outs)


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """`keeps`: the states after the rows are those of shared prefixes. `before` [rows]: number of the prefix
    that each row continues."""

    rows: int
    width: int
    keeps: bool = False
    before: Tensor | None = None


class _CutRows:
    """Rows cut where shared prefixes end, in rectangles: first the prefixes, without padding, then the rows
    that share nothing, then what follows the prefixes."""

    def __init__(
        self, lengths: Sequence[int], shared: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        stored = stored_places(lengths, shared)
        ends = {source: num for source, num in shared if num}
        prefixes = sorted(ends, key=lambda row: ends[row])
        number = {row: index for index, row in enumerate(prefixes)}
        whole = [stored[row] for row, (_, num) in enumerate(shared) if not num and row not in ends]
        rest: list[Tensor] = []
        before: list[int] = []
        for row, (source, num) in enumerate(shared):
            start = num or ends.get(row, 0)
            if start and start < lengths[row]:
                rest.append(stored[row][start:])
                before.append(number[source if num else row])
        self._rectangles: list[_Rectangle] = []
        gathers: list[Tensor] = []
        place = torch.empty(sum(lengths) - sum(num for _, num in shared), dtype=torch.long)
        offset = 0

        def lay(rows: Sequence[Tensor], width: int) -> None:
            nonlocal offset
            for row in rows:
                place[row] = offset + torch.arange(len(row))
                gathers.append(torch.cat((row, row[-1:].expand(width - len(row)))))
                offset += width

        for row in prefixes:
            lay([stored[row][: ends[row]]], ends[row])
            if self._rectangles and self._rectangles[-1].width == ends[row]:
                self._rectangles[-1] = _Rectangle(self._rectangles[-1].rows + 1, ends[row], keeps=True)
            else:
                self._rectangles.append(_Rectangle(1, ends[row], keeps=True))
        for rows, width in rows_by_length([len(row) for row in whole]):
            lay([whole[row] for row in rows], width)
            self._rectangles.append(_Rectangle(len(rows), width))
        for rows, longest in rows_by_length([len(row) for row in rest]):
            width = max(longest, 2)  # see the module's docstring
            lay([rest[row] for row in rows], width)
            index = to_device(torch.tensor([before[row] for row in rows]), device)
            self._rectangles.append(_Rectangle(len(rows), width, before=index))
        self._gather, self._place = to_device(torch.cat(gathers), device), to_device(place, device)
        self._copies = torch.empty(2, 0, dtype=torch.long, device=device)

    def mix(self, call: StatefulCall, x: Tensor) -> Any:
        laid = Lay.apply(x, self._gather, self._place, self._copies)
        parts = laid.split([each.rows * each.width for each in self._rectangles])
        outs: list[Any] = []
        kept: list[list[Tensor]] = []
        states: list[Tensor] = []
        for rectangle, part in zip(self._rectangles, parts, strict=True):
            if rectangle.before is not None and not states:
                states = [torch.cat(tensors) for tensors in zip(*kept, strict=True)]
            before = [] if rectangle.before is None else [s.index_select(0, rectangle.before) for s in states]
            rows = part.unflatten(0, (rectangle.rows, rectangle.width))
            out, after = call(rows, before, keeps=rectangle.keeps)
            outs.append(flat(out))
            if rectangle.keeps:
                kept.append(after)
        return each(lambda *parts: Lift.apply(torch.cat(parts), self._place), *outs)


def each(function: Callable[..., Tensor], out: Any, *others: Any) -> Any:
    """Apply a function to the tensors of a layer's outputs."""
    return tree_map(lambda y, *ys: None if y is None else function(y, *ys), out, *others)


def flat(out: Any) -> Any:
    """Outputs [B, L, ...] -> [B * L, ...]."""
    return each(lambda y: y.flatten(0, 1), out)


def stateful_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that carry a state, each with the name of its argument for the cache."""
    for module in model.modules():
        names = signature(type(module).forward).parameters
        cache = next((name for name in _CACHES if name in names), None)
        is_convolving = any(isinstance(child, nn.Conv1d) for child in module.children())
        is_stateful = is_convolving or hasattr(module, "slope_rate")  # the latter of MiniMax's
        if cache is not None and is_stateful and "hidden_states" in names:
            yield module, cache


def intercept(model: PreTrainedModel, current: Callable[[], Any]) -> int:
    """Make stateful layers use `current()`, the context of the forward pass, if there is one. Returns their
    number."""
    layers = list(stateful_layers(model))
    for count, (module, cache) in enumerate(layers):
        masks = tuple(name for name in signature(type(module).forward).parameters if name.endswith("mask"))
        layer = _Layer(count, cache, masks, not _is_mamba_1(module))
        module.forward = partial(_mixed, module, current, layer)
    return len(layers)


def use_step_limits(model: PreTrainedModel) -> None:
    """Give state-space layers the limits of step sizes that the model's config states. transformers' module
    of Nemotron-H has a lower limit of its own in a full pass (transformers#48989), but none in decoding."""
    limits = getattr(model.config.get_text_config(decoder=True), "time_step_limit", None)
    if limits is None:
        return
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "time_step_limit")]
    for layer in layers:
        layer.time_step_limit = tuple(limits)


def step_limits(model: nn.Module) -> tuple[float, float] | None:
    """The limits of step sizes that the model's layers apply, if they have any effect."""
    of_layers = (getattr(module, "time_step_limit", None) for module in model.modules())
    limits = {(float(limit[0]), float(limit[1])) for limit in of_layers if limit is not None}
    return next((limit for limit in sorted(limits) if limit != (0.0, float("inf"))), None)


def layers_read_by_weight(model: nn.Module) -> list[str]:
    """Names of the linear layers of stateful modules whose weights are used without calling the layer, so
    that an adapter on it would have no effect: Mamba 1's step sizes."""
    mixers = [(name, module) for name, module in model.named_modules() if _is_mamba_1(module)]
    return [f"{name}.dt_proj" for name, module in mixers if hasattr(module, "dt_proj")]


def _is_mamba_1(module: nn.Module) -> bool:
    return hasattr(module, "time_step_rank") and not hasattr(module, "n_groups")


@dataclass(frozen=True, slots=True)
class _Layer:
    index: int
    cache: str
    masks: tuple[str, ...]
    continues: bool


def _mixed(module: nn.Module, current: Callable[[], Any], layer: _Layer, *args: Any, **kwargs: Any) -> Any:
    """The forward of a stateful module: [1, T, D] -> [1, T, ...]."""
    forward = partial(type(module).forward, module)
    context = current()
    if context is None:
        return forward(*args, **kwargs)
    kwargs |= dict(zip(signature(forward).parameters, args, strict=False))
    x: Tensor = kwargs.pop("hidden_states")
    dropped = (layer.cache, *layer.masks, *_PACKED_LINE)
    kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
    forward = partial(forward, **kwargs, **dict.fromkeys(layer.masks))
    call = StatefulCall(layer.index, forward, layer.cache, layer.continues)
    return each(lambda y: y.unsqueeze(0), context.mix(call, x[0]))
