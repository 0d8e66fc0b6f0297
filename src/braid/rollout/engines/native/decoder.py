"""Runs the model for the engine: prefills, and decoding steps for all running sequences, eager or replayed
from CUDA graphs."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from braid.models.attention import AttentionContext
from braid.models.causal_lm import CausalLM
from braid.models.cpu_kernels import CpuKernels, cpu_kernels
from braid.models.gpu import has_kernels
from braid.models.routing import Routing, routed
from braid.models.transfer import to_device
from braid.models.vision import Sight

from .cache import (
    ROW_MULTIPLE,
    Block,
    DecodeAttention,
    KVCache,
    padded_length,
    padded_rows,
    round_up,
    row_blocks,
)
from .states import DecodeStates

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    logits: Tensor
    experts: Tensor | None


class Decoder:
    """Runs decoding steps with shapes from a small set, so that a few graphs cover all of them. With
    `records_experts` of a mixture of experts, `experts` [T, L, K] are those that the last prefill chose for
    its tokens, or the last step for the tokens of all slots."""

    experts: Tensor | None = None

    def __init__(
        self,
        lm: CausalLM,
        cache: KVCache,
        device: torch.device,
        *,
        cuda_graphs: bool = False,
        is_compiled: bool = False,
        records_experts: bool = False,
    ) -> None:
        """`is_compiled`: on CPUs steps and prefills are computed by braid_kernels as far as it knows the
        model; to import and compile it takes some seconds. On GPUs steps are computed by gpu_layers.py where
        it knows the model."""
        self._lm, self._cache, self._device = lm, cache, device
        self._records_experts = records_experts
        kernels = cpu_kernels(lm) if is_compiled and device.type == "cpu" else CpuKernels()
        if kernels.why_not:
            logger.info("decode steps are not compiled: %s", kernels.why_not)
        self.prefill_kernel, self._layers = kernels.attention, kernels.layers
        self._attention = kernels.decode_attention or DecodeAttention
        cache.shares_prompts = self._layers is not None
        self._gpu_layers = None
        if is_compiled and has_kernels(device):
            from .gpu_layers import GpuLayers, can_fuse_on_gpu  # imports Triton

            self._gpu_layers = GpuLayers(lm) if can_fuse_on_gpu(lm) else None
        self._has_graphs = cuda_graphs and device.type == "cuda"
        self._graphs: dict[tuple[tuple[int, int, int], ...], _Graph] = {}
        self._generation, self._addresses = -1, list[int]()

    def logits(self, inputs: NDArray[np.int64]) -> Tensor:
        """Logits [B, V], B >= N, after the tokens `inputs[0]` [N] of all slots, with their indices
        `inputs[1]` and their positions, the last of `inputs`, which differ after images.

        The next call may overwrite the result.
        """
        batch, blocks = self._batch(inputs)
        generation = self._cache.generation + self._cache.states.generation
        if self._generation != generation:
            self.drop_graphs()
            self._generation = generation
        if self._layers is not None:
            return self._layers.step(batch, blocks)
        if not self._has_graphs:
            return self._compute(to_device(batch, self._device), blocks)
        key = tuple((block.bucket.length, block.places.stop, block.width) for block in blocks)
        graph = self._graphs.get(key)
        if graph is None:
            return self._capture(key, batch.to(self._device), blocks)
        graph.inputs.copy_(batch.pin_memory(), non_blocking=True)
        graph.graph.replay()
        self.experts = graph.experts
        return graph.logits

    def _batch(self, inputs: NDArray[np.int64]) -> tuple[Tensor, list[Block]]:
        """Tokens, indices, of each slot its place in the batch, and positions if the model reads images
        [3 or 4, B], with slots in the order of buckets; and the blocks. On CPU padding comes last; elsewhere
        each bucket has a number of rows from a small set, and padding writes to its unused rows. The slots
        that are not in use have the places of padding if the model has states."""
        blocks, places, size = list[Block](), list[NDArray[np.int64]](), 0
        buckets = self._cache.buckets()
        is_cpu = self._device.type == "cpu"
        for bucket in buckets:
            num, lengths = len(bucket.slots), inputs[1, bucket.slots] + 1
            places.append(np.arange(size, size + num))
            if is_cpu:
                whole = [(slice(0, num), bucket.length)]  # compiled layers read each row's own length
                of_rows = row_blocks(lengths) if self._layers is None else whole
                blocks += [Block(bucket, rows, width, size + rows.start) for rows, width in of_rows]
                size += num
            else:
                rows = min(bucket.rows, padded_rows(1 << (num - 1).bit_length()))
                width = 1 << max(8, (padded_length(int(lengths.max())) - 1).bit_length())
                blocks.append(Block(bucket, slice(0, rows), min(bucket.length, width), size))
                size += rows
        if is_cpu:
            size = padded_rows(size) if self._layers is None else round_up(size, ROW_MULTIPLE)
        batch = np.zeros((3 if self._lm.vision is None else 4, size), np.int64)
        slots, place = np.concatenate([bucket.slots for bucket in buckets]), np.concatenate(places)
        batch[:2, place], batch[2, slots] = inputs[:2, slots], place
        if self._lm.vision is not None:
            batch[3, place] = inputs[-1, slots]
        if self._lm.has_states:
            batch[2, len(slots) :] = np.setdiff1d(np.arange(size), place)
        return torch.from_numpy(batch), blocks

    def drop_graphs(self) -> None:
        """Free the graphs, or recorded steps, with their memory."""
        self._graphs.clear()
        if self._layers is not None:
            self._layers.forget()

    def refresh(self, *, has_new_weights: bool) -> None:
        """Copy the weights of compiled layers if they have changed, and drop all graphs if a weight has
        moved, since they read fixed addresses. To be called before the first prefill or step after weights
        may have changed."""
        if self._layers is not None:
            self._layers.update(is_new=has_new_weights)
        reads_addresses = self._has_graphs or self._gpu_layers is not None
        if reads_addresses and self._addresses_now() != self._addresses:
            self.drop_graphs()
            if self._gpu_layers is not None:
                self._gpu_layers.join()
            self._addresses = self._addresses_now()

    def _addresses_now(self) -> list[int]:
        model = self._lm.model
        return [tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers())]

    def compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: AttentionContext,
        rows: Tensor,
        sight: Sight | None = None,
    ) -> Tensor:
        """Logits [R, V] after `rows` [R] of the tokens [T] at `positions` [T], with the images of
        `sight`."""
        if self._layers is not None:
            return self._layers.logits(tokens, positions, attention, rows)
        with routed(routing := Routing() if self._records_experts else None):
            hidden = self._lm.hidden(tokens, positions, attention, sight)
        if routing is not None:
            assert self._lm.routers is not None, "only those of mixtures are recorded"
            self.experts = routing.stacked(self._lm.routers.num_experts)
        return self._lm.logits(hidden.index_select(0, rows))

    def _compute(self, batch: Tensor, blocks: list[Block]) -> Tensor:
        if self._gpu_layers is not None:
            return self._gpu_layers.step(batch, blocks)
        tokens, indices, places, *positions = batch
        attention: AttentionContext = self._attention(indices, blocks)
        if self._lm.has_states:
            attention = DecodeStates(attention, self._cache.states, places)
        logits = self.compute(tokens, positions[0] if positions else indices, attention, places)
        if self.experts is not None:
            self.experts = self.experts.index_select(0, places)
        return logits

    def _capture(self, key: tuple[tuple[int, int, int], ...], batch: Tensor, blocks: list[Block]) -> Tensor:
        """Compute a step, and capture a graph for later ones of its shape. A step cannot be repeated, because
        it changes states. No graphs are captured from now on if a layer of the model waits for the device,
        which no graph can do."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            computed = self._compute(batch, blocks)  # libraries initialise outside of the capture
        torch.cuda.current_stream(self._device).wait_stream(side)
        experts = self.experts
        for tensor in [computed] if experts is None else [computed, experts]:
            tensor.record_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        try:
            # the update of a pipelined run may allocate memory meanwhile, in another thread
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = self._compute(batch, blocks)
        except RuntimeError as error:
            self._has_graphs = False
            self.drop_graphs()
            with suppress(RuntimeError):  # a capture that fails leaves its memory pool in use
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), graph.pool())
            logger.info("decoding without CUDA graphs: %s (%s)", type(self._lm.model).__name__, error)
        else:
            self._graphs[key] = _Graph(graph, batch, logits, self.experts)
        self.experts = experts
        return computed
