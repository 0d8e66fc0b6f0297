"""Attention for all Hugging Face decoders, through transformers' attention interface: each layer passes
queries, keys and values to the context of the forward pass,
`with attending(context): model(input_ids, position_ids=...)`. Training uses `PackedAttention`; the native
engine has contexts with a KV cache. Layers that carry a state use the same contexts; see stateful.py."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from braid.errors import ModelError

from .indexed import IndexerCall
from .layout import Layout, rows_by_length
from .stateful import PackedStates, StatefulCall

IMPLEMENTATION = "braid"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Options of an attention layer's call. `sinks` [Hq] are logits that join each head's softmax without a
    value (gpt-oss, arXiv 2309.17453). `chosen` has the keys [B, L, L] that an indexer chose in each
    rectangle of the context; a kernel is passed those of the rectangle that it computes."""

    layer: int
    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None = None
    chosen: tuple[Tensor, ...] = ()


AttentionKernel = Callable[[LayerCall, Tensor, Tensor, Tensor], Tensor]
"""Kernel for attention over right-padded rows; see causal_attention."""


@dataclass(frozen=True, slots=True)
class ImageBlocks:
    """The number of each position's image in its sequence [T], -1 for text. The positions of an image see
    each other (Gemma 3, arXiv 2503.19786), in all layers or `only_in_windows`."""

    numbers: Tensor
    only_in_windows: bool

    def visible(self, call: LayerCall, queries: Tensor, keys: Tensor, first: int = 0) -> Tensor | None:
        """Keys [B, Q, K] that the queries of a layer see, of the numbers [B, Q] and [B, K] of their images;
        the first query is at place `first` of the keys. None: as without images."""
        if self.only_in_windows and call.sliding_window is None:
            return None
        places = torch.arange(keys.shape[1], device=keys.device)
        behind = places[first : first + queries.shape[1], None] - places[None, :]
        is_same = (queries[:, :, None] == keys[:, None, :]) & (queries >= 0)[:, :, None]
        visible = (behind >= 0) | is_same
        return visible if call.sliding_window is None else visible & (behind < call.sliding_window)


class AttentionContext(Protocol):
    """Determines which positions attend to which, and stores keys and values if needed. One context serves
    one forward pass."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, Hq, d], key and value [T, Hkv, d] -> [T, Hq, d]."""
        ...


class StatefulContext(AttentionContext, Protocol):
    """A context for models some of whose layers carry a state (stateful.py)."""

    def mix(self, call: StatefulCall, x: Tensor) -> Any:
        """Inputs [T, D] of a layer with a state -> its outputs [T, ...], of each sequence by itself."""
        ...


class IndexedContext(AttentionContext, Protocol):
    """A context for models with indexers (indexed.py)."""

    def choose(self, call: IndexerCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Inputs [T, ...] of an indexer -> what it chooses for each of the context's rectangles."""
        ...


CONTEXT: ContextVar[AttentionContext | None] = ContextVar("attention context", default=None)


@contextmanager
def attending(context: AttentionContext | None) -> Generator[None]:
    """Make attention layers in this block use `context`."""
    token = CONTEXT.set(context)
    try:
        yield
    finally:
        CONTEXT.reset(token)


def _attend(  # noqa: PLR0913  # transformers' signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  # the context determines the mask
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    context = CONTEXT.get()
    assert context is not None, "the forward pass must run within `attending`"
    if kwargs.get("position_bias") is not None:
        raise ModelError(
            f"{type(module).__name__} adds a position_bias to its attention, which braid does not support"
        )
    if dropout:
        raise ModelError(
            f"attention dropout of {dropout} makes log-probs random; set attention_dropout to 0 in "
            "config.json"
        )
    layer: int = getattr(module, "layer_idx", -1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(
        context,
        LayerCall(layer, scale, sliding_window, softcap, s_aux, kwargs.get("indices") or ()),
        *(x[0].transpose(0, 1) for x in (query, key, value)),
    )
    return out.unsqueeze(0), None


def attend(context: AttentionContext, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`context.attend` in autocast's type. On CPUs attention runs in float32 even under autocast, because its
    backward pass is several times slower in bf16."""
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return context.attend(call, query, key, value)
    dtype = torch.float32 if device == "cpu" else torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return context.attend(call, *(x.to(dtype) for x in (query, key, value)))


def register() -> None:
    """Register the implementation "braid" with transformers, without a mask function: it builds no mask."""
    AttentionInterface.register(IMPLEMENTATION, _attend)
    # It builds a plan for each shape, and packed rows make most shapes new.
    torch.backends.cuda.enable_cudnn_sdp(False)


def use(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention of a model's decoder; a vision tower, whose positions all see each other, keeps
    PyTorch's."""
    towers = dict.fromkeys(set(model.config.sub_configs) - {"text_config"}, "sdpa")
    model.set_attn_implementation({"": implementation, "text_config": implementation} | towers)


class PackedAttention:
    """Causal attention within each packed segment. PyTorch's variable-length kernel takes the segments as
    they are, where it applies; for others, segments of similar length are copied into right-padded
    rectangles."""

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        shared: Sequence[tuple[int, int]] = (),
        kernel: AttentionKernel | None = None,
    ) -> None:
        """`lengths` [B] of the segments in packing order; `shared` as in PackedBatch; `kernel` computes
        attention over the rectangles (default: the variable-length kernel or causal_attention)."""
        self._lengths, self._device, self._kernel = lengths, device, kernel
        self._shared = shared or [(0, 0)] * len(lengths)
        self._layouts: dict[bool, Layout] = {}
        self._states: PackedStates | None = None
        self._blocks: ImageBlocks | None = None
        self._visible: dict[int | None, tuple[Tensor, ...]] = {}

    def see(self, blocks: ImageBlocks) -> None:
        """Let the positions of images see each other."""
        self._blocks, self._visible = blocks, {}

    def _of_images(self, call: LayerCall) -> LayerCall:
        """The call of a layer with the keys that are visible where there are images."""
        blocks, window = self._blocks, call.sliding_window
        if blocks is None:
            return call
        if window not in self._visible:
            layout = self._layout(is_varlen=False)
            numbers = layout.split(layout.lay(blocks.numbers))
            masks = [blocks.visible(call, part, part) for part in numbers]
            self._visible[window] = tuple(mask for mask in masks if mask is not None)
        visible = self._visible[window]
        return replace(call, chosen=visible, sliding_window=None) if visible else call

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        call = self._of_images(call)
        is_varlen = self._kernel is None and has_varlen_kernel(call, query, value)
        layout = self._layout(is_varlen=is_varlen)
        laid = [layout.lay(x) for x in (query, key, value)]
        if is_varlen:
            return layout.lift(varlen_attention(call, *laid, ends=layout.ends, longest=max(self._lengths)))
        kernel = causal_attention if self._kernel is None or call.chosen else self._kernel
        calls = [replace(call, chosen=(part,)) for part in call.chosen] or [call] * len(layout.rectangles)
        outs = [
            kernel(of_rows, *qkv).flatten(0, 1)
            for of_rows, *qkv in zip(calls, *(layout.split(x) for x in laid), strict=True)
        ]
        return layout.lift(outs[0] if len(outs) == 1 else torch.cat(outs))

    def choose(self, call: IndexerCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        layout = self._layout(is_varlen=False)
        parts = zip(*(layout.split(layout.lay(x)) for x in inputs), strict=True)
        return tuple(call(*rows) for rows in parts)

    def _layout(self, *, is_varlen: bool) -> Layout:
        if is_varlen not in self._layouts:
            alone = [([row], length) for row, length in enumerate(self._lengths)]
            rectangles = alone if is_varlen else rows_by_length(self._lengths)
            self._layouts[is_varlen] = Layout(rectangles, self._lengths, self._shared, self._device)
        return self._layouts[is_varlen]

    def mix(self, call: StatefulCall, x: Tensor) -> Any:
        if self._states is None:
            self._states = PackedStates(self._lengths, self._shared, self._device)
        return self._states.mix(call, x)


def has_varlen_kernel(call: LayerCall, query: Tensor, value: Tensor) -> bool:
    """Whether FlashAttention in PyTorch can compute this layer."""
    size = query.shape[-1]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and call.softcap is None
        and call.sinks is None
        and not call.chosen
        and size == value.shape[-1] <= 256
        and size % 8 == 0
        and query.device.type == "cuda"
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def varlen_attention(
    call: LayerCall, query: Tensor, key: Tensor, value: Tensor, *, ends: Tensor, longest: int
) -> Tensor:
    """Causal attention over adjacent segments, none above `longest`: [T, Hq, d], [T, Hkv, d] -> [T, Hq, d].
    `ends` [B + 1] starts with 0."""
    # not all supported versions of the kernel share key heads
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    window = (-1 if call.sliding_window is None else call.sliding_window - 1, 0)
    out = varlen_attn(query, key, value, ends, ends, longest, longest, scale=call.scaling, window_size=window)
    return cast("Tensor", out)


def causal_attention(call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over right-padded rows: [B, L, Hq, d], [B, L, Hkv, d] -> [B, L, Hq, d]."""
    if call.softcap is not None:
        return eager_attention(call, query, key, value)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    groups = q.shape[1] // k.shape[1]
    # On CPUs grouped-query kernels are faster than copying key heads; not all CUDA kernels support them.
    is_shared = groups > 1 and q.device.type == "cpu"
    if groups > 1 and not is_shared:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    width, size = v.shape[2:]
    window = call.sliding_window if call.sliding_window and call.sliding_window < width else None
    visible = call.chosen[0][:, None] if call.chosen else None
    if window is not None:
        within = visible_keys(width, window, q.device)
        visible = within if visible is None else visible & within
    if call.sinks is not None:
        q, k, v = _with_sink_key(call.sinks / call.scaling, q, k, v)
        if visible is not None:
            visible = F.pad(visible, (1, 0, 1, 0), value=True)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, scale=call.scaling, enable_gqa=is_shared
    )
    if call.sinks is not None:
        out = out[:, :, 1:, :size]
    return out.transpose(1, 2)


def eager_attention(call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(scale q k + mask) v with a float32 softmax. Shapes as in causal_attention."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    width = q.shape[2]
    visible = visible_keys(width, call.sliding_window or width, q.device)
    scores = scores.masked_fill(~visible, float("-inf"))
    weights = softmax_with_sinks(scores, None if call.sinks is None else call.sinks[:, None, None])
    return (weights.to(v.dtype) @ v).transpose(1, 2)


def visible_keys(width: int, window: int, device: torch.device) -> Tensor:
    """Boolean mask [width, width] of the keys (columns) that each query sees: its own and up to `window` - 1
    before it."""
    place = torch.arange(width, device=device)
    behind = place[:, None] - place[None, :]
    return (behind >= 0) & (behind < window)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """float32 softmax over `scores` [..., K] and one extra logit `sinks` [..., 1], whose probability is
    dropped: [..., K]."""
    scores = scores.float()
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def _with_sink_key(sinks: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Prepend the sink as a key with value 0, and a query that sees only this key. The mask stays causal, so
    every kernel can be used. [B, H, L, d] -> [B, H, L + 1, d + 8]; kernels prefer multiples of 8.

    The sink's key is 1 in a dimension in which the other keys are 0 and the queries are `sinks` [Hq]."""
    place = F.pad(q.new_ones(1), (0, 7))
    of_queries = (sinks.to(q.dtype)[:, None] * place)[:, None].expand(*q.shape[:2], q.shape[2] + 1, 8)
    is_first = torch.arange(k.shape[2] + 1, device=k.device) == 0
    of_keys = (is_first[:, None] * place).expand(*k.shape[:2], -1, 8)
    front = (0, 0, 1, 0)
    return (
        torch.cat((F.pad(q, front), of_queries), dim=-1),
        torch.cat((F.pad(k, front), of_keys), dim=-1),
        F.pad(v, (0, q.shape[3] + 8 - v.shape[3], 1, 0)),
    )
