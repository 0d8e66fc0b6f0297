"""Attention and cache for every Hugging Face decoder, through transformers' own attention interface.

A model switched to the implementation "braid" calls `_attend` in each attention layer, which hands the layer's
queries, keys and values to the context given to the forward call: `model(input_ids, position_ids=...,
attention_context=context)`. Training and prefill use `PackedAttention`; the native engine brings contexts that also
keep a cache. No architecture needs code of its own; one whose layers do not go through the interface is found out by
`models.selfcheck` when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from braid.errors import ModelError

IMPLEMENTATION = "braid"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What one attention layer asks for beside its tensors."""

    layer: int
    scaling: float
    sliding_window: int | None
    softcap: float | None


AttentionKernel = Callable[[LayerCall, Tensor, Tensor, Tensor], Tensor]
"""Attention over right-padded rows, as causal_attention does it."""


class AttentionContext(Protocol):
    """Decides which positions attend to which, and keeps keys and values where it needs to."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, Hq, d], key and value [T, Hkv, d] -> [T, Hq, d]."""
        ...


def _attend(  # noqa: PLR0913  # the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  # the context knows better
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    attention_context: AttentionContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if attention_context is None:
        raise ModelError(
            f"{type(module).__name__} did not pass attention_context on to its attention; "
            "this architecture does not forward keyword arguments and cannot be used with braid"
        )
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses attention with {name}, which braid does not know")
    if dropout:
        raise ModelError(
            f"attention dropout {dropout} makes log-probs random; set attention_dropout to 0 in config.json"
        )
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention_context.attend(
        LayerCall(layer, scale, sliding_window, softcap),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Make "braid" known to transformers. Safe to call more than once. It brings no mask function, so transformers builds
    no mask: the context decides who attends to whom."""
    AttentionInterface.register(IMPLEMENTATION, _attend)


class PackedAttention:
    """Causal attention within each of the packed segments.

    Segments of like length are laid into right-padded rectangles for the kernel: with a causal mask no real
    position ever attends to padding, so the rectangles change no number.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        shared: Sequence[tuple[int, int]] = (),
        kernel: AttentionKernel | None = None,
    ) -> None:
        """`lengths` [B] of the segments, in packing order; `shared` as PackedBatch has it; `kernel` for the rectangles,
        causal_attention when None."""
        self._kernel = kernel or causal_attention
        shared = shared or [(0, 0)] * len(lengths)
        self._rectangles = _rectangles(lengths)
        stored = _stored_places(lengths, shared)
        owned = [torch.arange(length) >= num for length, (_, num) in zip(lengths, shared, strict=True)]
        num_stored = sum(int(own.sum()) for own in owned)
        gather: list[Tensor] = []
        self._place = torch.empty(num_stored, dtype=torch.long)
        copies: list[Tensor] = []
        offset = 0
        for rows, width in self._rectangles:
            for row in rows:
                places = offset + torch.arange(lengths[row])
                self._place[stored[row][owned[row]]] = places[owned[row]]
                copies.append(torch.stack((stored[row][~owned[row]], places[~owned[row]])))
                gather.append(torch.cat((stored[row], stored[row][-1:].expand(width - lengths[row]))))
                offset += width
        self._gather = torch.cat(gather)
        self._is_identity = torch.equal(self._gather, torch.arange(num_stored))
        self._gather, self._place = self._gather.to(device), self._place.to(device)
        self._copies = torch.cat(copies, dim=1).to(device)

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See AttentionContext. On CPU autocast stops here: the backward pass of attention is several times slower in bf16
        than in float32, so that softmax and all it weighs stay in float32."""
        if query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return self.attend(call, query.float(), key.float(), value.float())
        if not self._is_identity:
            query, key, value = (
                _Lay.apply(x, self._gather, self._place, self._copies) for x in (query, key, value)
            )
        sizes = [len(rows) * width for rows, width in self._rectangles]
        outs = [
            self._kernel(call, *(x.unflatten(0, (len(rows), width)) for x in qkv)).flatten(0, 1)
            for (rows, width), *qkv in zip(
                self._rectangles, query.split(sizes), key.split(sizes), value.split(sizes), strict=True
            )
        ]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self._is_identity else _Lift.apply(out, self._place)


def causal_attention(call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over right-padded rows: [B, L, Hq, d], [B, L, Hkv, d] -> [B, L, Hq, d]."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    groups = q.shape[1] // k.shape[1]
    # CPU kernels share a key head among query heads for less time than copies of it take; not all CUDA kernels can.
    is_shared = groups > 1 and q.device.type == "cpu" and call.softcap is None
    if groups > 1 and not is_shared:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    width = q.shape[2]
    window = call.sliding_window if call.sliding_window and call.sliding_window < width else None
    if call.softcap is None and window is None:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=call.scaling, enable_gqa=is_shared
        )
        return out.transpose(1, 2)
    place = torch.arange(width, device=q.device)
    behind = place[:, None] - place[None, :]
    visible = (behind >= 0) & (behind < (window or width))
    if call.softcap is None:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=call.scaling, enable_gqa=is_shared
        )
        return out.transpose(1, 2)
    scores = torch.tanh(q @ k.transpose(-1, -2) * (call.scaling / call.softcap)) * call.softcap
    weights = scores.masked_fill(~visible, float("-inf")).float().softmax(-1).to(v.dtype)
    return (weights @ v).transpose(1, 2)


class _Lay(torch.autograd.Function):
    """[T, ...] -> [rectangles, ...]. Backward is a gather too, since padding receives no gradient, plus what the copies of
    shared positions received: `copies` [2, N] has where each is stored and where it lies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Tensor, place: Tensor, copies: Tensor) -> Tensor:
        ctx.save_for_backward(place, copies)
        return x.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        place, (stored, lies) = ctx.saved_tensors
        out = grad.index_select(0, place)
        if len(stored):
            out.index_add_(0, stored, grad.index_select(0, lies))
        return out, None, None, None


class _Lift(torch.autograd.Function):
    """[rectangles, ...] -> [T, ...]: drops the padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.size = x.shape[0]
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (place,) = ctx.saved_tensors
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, place, grad), None


def _stored_places(lengths: Sequence[int], shared: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Where each position of each segment is stored."""
    out: list[Tensor] = []
    start = 0
    for length, (source, num) in zip(lengths, shared, strict=True):
        own = start + torch.arange(length - num)
        out.append(torch.cat((out[source][:num], own)) if num else own)
        start += length - num
    return out


def _rectangles(lengths: Sequence[int]) -> list[tuple[list[int], int]]:
    """Rows grouped by like length: (rows, width), each row at least three quarters as long as its width."""
    out: list[tuple[list[int], int]] = []
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        if out and lengths[row] * 4 >= out[-1][1] * 3:
            out[-1][0].append(row)
        else:
            out.append(([row], lengths[row]))
    return out
