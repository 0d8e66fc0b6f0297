"""Runs a decoding step of the model for the first B slots: eager, or replayed from CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from braid.models.causal_lm import CausalLM

from .cache import DecodeAttention, KVCache, padded_length, padded_rows, row_blocks


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    logits: Tensor


class Decoder:
    """Runs decoding steps with shapes from a small set, so that a few graphs cover all of them."""

    def __init__(self, lm: CausalLM, cache: KVCache, device: torch.device, *, cuda_graphs: bool) -> None:
        self._lm, self._cache, self._device = lm, cache, device
        self._has_graphs = cuda_graphs and device.type == "cuda"
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._generation, self._addresses = -1, list[int]()

    def rows(self, num_running: int) -> int:
        """Number of rows to compute for `num_running` sequences, including padding."""
        if self._device.type == "cpu":
            return padded_rows(num_running)
        return min(self._cache.slots, padded_rows(1 << (num_running - 1).bit_length()))

    def logits(self, inputs: Tensor, lengths: NDArray[np.int64]) -> Tensor:
        """Logits [B, V] after the tokens `inputs[0]` at the positions `inputs[1]` [B], which are those before
        `lengths` [B].

        `inputs` is a CPU tensor. The next call may overwrite the result.
        """
        if self._device.type == "cpu":
            return self._compute(inputs, row_blocks(lengths))
        width = padded_length(int(lengths.max()))
        width = min(self._cache.length, 1 << max(8, (width - 1).bit_length()))
        if not self._has_graphs:
            return self._compute(inputs.to(self._device), [(slice(0, len(lengths)), width)])
        if self._generation != self._cache.generation:
            self.drop_graphs()
            self._generation = self._cache.generation
        graph = self._graphs.get((inputs.shape[1], width)) or self._capture(inputs, width)
        graph.inputs.copy_(inputs)
        graph.graph.replay()
        return graph.logits

    def drop_graphs(self) -> None:
        """Free the graphs with their memory."""
        self._graphs.clear()

    def drop_stale_graphs(self) -> None:
        """Drop all graphs if a weight has moved, since they read fixed addresses. To be called before the first
        step after weights may have moved."""
        addresses = [p.data_ptr() for p in self._lm.model.parameters()] if self._has_graphs else []
        if addresses != self._addresses:
            self.drop_graphs()
            self._addresses = addresses

    def _compute(self, inputs: Tensor, blocks: list[tuple[slice, int]]) -> Tensor:
        tokens, positions = inputs
        context = DecodeAttention(self._cache, positions, blocks)
        return self._lm.logits(self._lm.hidden(tokens, positions, context))

    def _capture(self, inputs: Tensor, width: int) -> _Graph:
        inputs, blocks = inputs.to(self._device), [(slice(0, inputs.shape[1]), width)]
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._compute(inputs, blocks)  # libraries initialise outside of the capture
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            logits = self._compute(inputs, blocks)
        self._graphs[inputs.shape[1], width] = captured = _Graph(graph, inputs, logits)
        return captured
