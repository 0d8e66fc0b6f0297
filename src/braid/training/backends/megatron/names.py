"""Conversion of weights and moments between Megatron shards and whole tensors under Hugging Face names.

Which weights Megatron fuses, in which row order, and how shards are combined is known to mbridge, and is
queried through its per-weight conversions (its own loading and saving need files and NCCL). This module adds
only what mbridge does not cover: the names in Megatron's local layers, where norms and experts are separate
modules, and the layout of transformers 5, which stores a layer's experts as one tensor.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from mbridge import AutoBridge
from torch import Tensor, nn
from transformers import PreTrainedConfig

from braid.errors import ModelError
from braid.training.shards import Boxes, boxes_of_range

from .ranks import groups

_LOCAL = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Norms that Megatron's Transformer Engine layers, whose names mbridge expects, fuse into the following
linear layer."""
_TIED = "model.embed_tokens.weight"
_EXPERT_PIECES = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}


def bridge_of(config: PreTrainedConfig, padded_vocab: int, **options: Any) -> Any:
    """mbridge's conversions for a model. `options` go to Megatron's TransformerConfig, available as its
    `config`."""
    auto: Any = AutoBridge
    bridge: Any = auto.from_config(config, dtype=options["params_dtype"])
    bridge.set_extra_args(**options)
    bridge.make_vocab_size_divisible_by = 1  # not None: embeddings are padded to padded_vocab_size
    bridge.vocab_size, bridge.padded_vocab_size = config.vocab_size, padded_vocab
    bridge.dtype = None  # otherwise it casts the tensors that it converts
    bridge._DIRECT_MAPPING = {
        **bridge._DIRECT_MAPPING,
        "output_layer.weight": "lm_head.weight",
    }  # absent with tied embeddings
    return bridge


@dataclass(frozen=True, slots=True)
class Piece:
    """A whole tensor under its Hugging Face name, or with `index` one entry along its first axis."""

    name: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """`size` rows of a parameter from `start` that are contiguous in a whole tensor too, where they begin at
    (`row`, `column`)."""

    piece: Piece
    start: int
    size: int
    row: int
    column: int = 0


@dataclass(frozen=True)
class Shard:
    """A parameter of this rank and the tensors that it is a shard of. `name` is the one that mbridge
    knows."""

    parameter: nn.Parameter
    name: str
    pieces: tuple[Piece, ...]
    is_expert: bool = False
    is_copy: bool = False
    """Whether this is a copy of a parameter (tied embeddings) that another stage owns."""

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The ranks that the tensor is sharded over."""
        if self.is_expert:
            return groups.get_expert_tensor_parallel_group()
        return groups.get_tensor_model_parallel_group()

    @property
    def is_cut(self) -> bool:
        """Whether the parameter is sharded over the group; otherwise it is replicated."""
        return getattr(self.parameter, "tensor_model_parallel", False)

    @cached_property
    def is_spoken_for(self) -> bool:
        """Whether this rank sends the part when weights are gathered, among all ranks that hold the same
        part."""
        replicas = groups.get_expert_data_parallel_group() if self.is_expert else _replicas()
        is_first = self.is_cut or dist.get_rank(self.group) == 0
        return not self.is_copy and is_first and dist.get_rank(replicas) == 0


class Names:
    """Maps the parameters of this rank's stages to Hugging Face names."""

    def __init__(
        self,
        bridge: Any,
        stages: Sequence[nn.Module],
        weights: Mapping[str, Tensor],
        head: Mapping[str, str],
    ) -> None:
        """`weights` are the whole model's (only names, shapes and types are read). `head` maps a value head's
        names in the last stage to those in `weights`. Raises ModelError if the stages have other weights."""
        self._bridge, self._head = bridge, head
        self.shapes = {name: tensor.shape for name, tensor in weights.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in weights.items()}
        self.buffers = {
            head[name]: buffer for stage in stages for name, buffer in stage.named_buffers() if name in head
        }
        self.shards = [shard for stage in stages for shard in self._shards(stage)]
        local_names = {p.name for shard in self.shards for p in shard.pieces} | self.buffers.keys()
        strange = sorted(local_names - weights.keys())
        names_by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names_by_rank, local_names)
        missing = sorted(weights.keys() - {name for names in names_by_rank for name in names})
        if strange or missing:
            raise ModelError(
                f"the weights of Megatron's layers do not match transformers': {(strange or missing)[0]} "
                f"exists only in {'Megatron' if strange else 'transformers'}; use fsdp2, fsdp or deepspeed"
            )
        self._runs = {shard.parameter: self._runs_of(shard) for shard in self.shards}

    def _shards(self, stage: nn.Module) -> Iterator[Shard]:
        module: Any = stage
        layers: Any = module.decoder.layers
        for name, parameter in module.named_parameters():
            if name == "output_layer.weight" and module.share_embeddings_and_output_weights:
                if not module.pre_process:  # the last stage's copy of the first stage's embedding
                    yield Shard(parameter, "embedding.word_embeddings.weight", (Piece(_TIED),), is_copy=True)
                continue
            head, *rest = name.split("decoder.layers.")
            if rest:
                local, _, tail = rest[0].partition(".")
                name = f"{head}decoder.layers.{layers[int(local)].layer_number - 1}.{tail}"
            yield self._shard(parameter, name)

    def _shard(self, parameter: nn.Parameter, name: str) -> Shard:
        if name in self._head:
            return Shard(parameter, name, (Piece(self._head[name]),))
        if ".local_experts." in name:
            before, _, after = name.partition(".experts.local_experts.")
            local, fused, _ = after.split(".")
            layer = before.split(".")[2]
            per_rank = self._bridge.config.num_moe_experts // groups.get_expert_model_parallel_world_size()
            expert = int(local) + per_rank * groups.get_expert_model_parallel_rank()
            piece = Piece(f"model.layers.{layer}.mlp.experts.{_EXPERT_PIECES[fused]}", expert)
            return Shard(parameter, f"{before}.experts.{fused}.weight{expert}", (piece,), is_expert=True)
        is_mixture = self._bridge.config.num_moe_experts is not None
        for local, fused in _LOCAL.items():
            if not (is_mixture and local == "pre_mlp_layernorm."):
                name = name.replace(local, fused)
        try:
            stored_names: list[str] = self._bridge._weight_name_mapping_mcore_to_hf(name)
        except NotImplementedError as error:
            raise ModelError(f"mbridge has no mapping for {name} of this architecture: {error}") from error
        pieces = tuple(Piece(stored.replace(".block_sparse_moe.", ".mlp.")) for stored in stored_names)
        return Shard(parameter, name, pieces)

    def boxes(self, shard: Shard, flat: Tensor, start: int) -> Iterator[tuple[str, list[int], Tensor]]:
        """(name, offsets, part) of the boxes of whole tensors in `flat`, which holds a parameter's elements
        from `start` in row-major order. The parts are views of `flat`."""
        for (first, *columns), box in boxes_of_range(flat.view(-1), shard.parameter.shape, start):
            for run in self._runs[shard.parameter]:
                begin, end = max(first, run.start), min(first + len(box), run.start + run.size)
                if begin >= end:
                    continue
                offsets = [run.row + begin - run.start, *(run.column + column for column in columns)]
                part = box[begin - first : end - first]
                if run.piece.index is None:
                    yield run.piece.name, offsets, part
                else:
                    yield run.piece.name, [run.piece.index, *offsets], part.unsqueeze(0)

    def _runs_of(self, shard: Shard) -> list[Run]:
        """Location of a parameter's rows in the whole tensors, found by letting mbridge convert tensors of
        row numbers."""
        parameter: Any = shard.parameter
        size, rank = dist.get_world_size(shard.group), dist.get_rank(shard.group)
        if shard.is_cut and parameter.partition_dim == 1:
            rows, columns = parameter.shape
            return [Run(shard.pieces[0], 0, rows, 0, rank * columns)]
        heights = [self.shapes[p.name][0 if p.index is None else 1] for p in shard.pieces]
        bounds = list(itertools.accumulate(heights, initial=1))  # 0 marks padding
        numbers = [torch.arange(a, b) for a, b in itertools.pairwise(bounds)]
        if shard.is_expert:
            whole = numbers[0]
        elif len(numbers) == 1:
            whole = self._bridge._weight_to_mcore_format(shard.name, [numbers[0][:, None]])[:, 0]
        else:  # a weight's rows have the order of the bias entries
            whole = self._bridge._weight_to_mcore_format(shard.name.replace(".weight", ".bias"), numbers)
        if shard.is_cut:
            column = parameter.view(len(parameter), -1)[:, 0]
            whole = self._bridge._weight_split_across_tp(shard.name, whole, column, size)[rank]
        steps = (whole.diff() != 1).nonzero().squeeze(1) + 1
        runs: list[Run] = []
        for start, end in itertools.pairwise([0, *steps.tolist(), len(whole)]):
            number = int(whole[start])
            while number and start < end:
                piece = bisect_right(bounds, number) - 1
                num = min(end - start, bounds[piece + 1] - number)
                runs.append(Run(shard.pieces[piece], start, num, number - bounds[piece]))
                start, number = start + num, number + num
        return runs

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the model's weights on rank 0, one whole tensor at a time in the model's order; other ranks
        yield empty tensors. Collective: all ranks must exhaust the iterator."""
        local_boxes = self._handed_on()
        places: list[Any] = [None] * dist.get_world_size()
        mine = {
            name: [(offsets, part.shape) for offsets, part in boxes] for name, boxes in local_boxes.items()
        }
        dist.all_gather_object(places, mine)
        device = self.shards[0].parameter.device
        for name, shape in self.shapes.items():
            boxes = local_boxes.get(name, [])
            whole = torch.empty(shape if dist.get_rank() == 0 else 0, dtype=self.dtypes[name], device=device)
            if dist.get_rank() == 0:
                Boxes(shape, whole.dtype, boxes).put(whole)
                for source, theirs in enumerate(places[1:], start=1):
                    if name in theirs:
                        Boxes(shape, whole.dtype, _received(source, theirs[name], whole)).put(whole)
            elif boxes:
                dist.send(torch.cat([part.reshape(-1) for _, part in boxes]), dst=0)
            yield name, whole

    def _handed_on(self) -> dict[str, list[tuple[list[int], Tensor]]]:
        """Boxes of whole tensors that this rank sends; of ranks with identical parts only one sends them."""
        out: dict[str, list[tuple[list[int], Tensor]]] = {}
        for shard in self.shards:
            if shard.is_spoken_for:
                flat = shard.parameter.detach().view(-1)
                for name, offsets, box in self.boxes(shard, flat, 0):
                    out.setdefault(name, []).append((offsets, box))
        if groups.get_tensor_model_parallel_rank() == 0 and dist.get_rank(_replicas()) == 0:
            out.update({name: [([0] * buffer.ndim, buffer)] for name, buffer in self.buffers.items()})
        return out


def _received(
    source: int, places: Sequence[tuple[list[int], torch.Size]], like: Tensor
) -> list[tuple[list[int], Tensor]]:
    """Receive the boxes at `places` (offsets, shape) from rank `source`."""
    sizes = [shape.numel() for _, shape in places]
    flat = like.new_empty(sum(sizes))
    dist.recv(flat, src=source)
    parts = zip(places, flat.split(sizes), strict=True)
    return [(offsets, part.view(shape)) for (offsets, shape), part in parts]


def _replicas() -> dist.ProcessGroup:
    return groups.get_data_parallel_group(with_context_parallel=True)
