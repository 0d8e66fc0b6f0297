"""Runs a decoding step of the model for the first B slots: eager, or replayed from CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from braid.models.attention import AttentionContext

from .cache import DecodeAttention, KVCache, padded_length, padded_rows


class LanguageModel(Protocol):
    """A language model as the engine needs it (such as models.causal_lm.CausalLM)."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def vocab_size(self) -> int: ...

    def hidden(self, input_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """[T], [T] -> [T, D]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V]."""
        ...


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    positions: Tensor
    logits: Tensor


class Decoder:
    """Runs decoding steps with shapes from a small set, so that a few graphs cover all of them."""

    def __init__(self, lm: LanguageModel, cache: KVCache, device: torch.device, *, cuda_graphs: bool) -> None:
        self._lm, self._cache, self._device = lm, cache, device
        self._has_graphs = cuda_graphs and device.type == "cuda"
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._captured_from: tuple[int, ...] = ()

    def rows(self, num_running: int) -> int:
        """Number of rows to compute for `num_running` sequences, including padding."""
        if self._device.type == "cpu":
            return padded_rows(num_running)
        return min(self._cache.slots, padded_rows(1 << (num_running - 1).bit_length()))

    def logits(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Logits [B, V] after `tokens` [B] at `positions` [B], all below `longest`.

        Arguments are CPU tensors. The next call may overwrite the result.
        """
        width = padded_length(longest)
        if self._device.type == "cpu":
            return self._compute(tokens, positions, width)
        width = min(self._cache.length, 1 << max(8, (width - 1).bit_length()))
        if not self._has_graphs:
            return self._compute(tokens.to(self._device), positions.to(self._device), width)
        self._drop_stale()
        graph = self._graphs.get((len(tokens), width)) or self._capture(tokens, positions, width)
        graph.tokens.copy_(tokens)
        graph.positions.copy_(positions)
        graph.graph.replay()
        return graph.logits

    def _compute(self, tokens: Tensor, positions: Tensor, width: int) -> Tensor:
        context = DecodeAttention(self._cache, positions, width)
        return self._lm.logits(self._lm.hidden(tokens, positions, context))

    def _capture(self, tokens: Tensor, positions: Tensor, width: int) -> _Graph:
        tokens, positions = tokens.to(self._device), positions.to(self._device)
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._compute(tokens, positions, width)  # libraries initialise outside of the capture
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            logits = self._compute(tokens, positions, width)
        self._graphs[len(tokens), width] = captured = _Graph(graph, tokens, positions, logits)
        return captured

    def _drop_stale(self) -> None:
        """Drop all graphs if the cache or a weight has moved, since they read fixed addresses."""
        weights = (p.data_ptr() for p in self._lm.model.parameters())
        addresses = (self._cache.generation, *weights)
        if addresses != self._captured_from:
            self._graphs.clear()
            self._captured_from = addresses
