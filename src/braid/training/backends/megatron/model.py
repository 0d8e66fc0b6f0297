"""A Hugging Face decoder built from Megatron layers: token ids of packed rows to log-probs.

Layers follow Megatron's local specification, which runs on any device. Three parts are replaced: attention,
which must not cross the boundaries of packed rows (Megatron's local attention cannot do that); norms, which
must also run under sequence parallelism; and the output head, which computes log-probs without materializing
the logits. Rotary embeddings use the rows' position ids and the frequencies that transformers computes, so
every static RoPE scaling is supported.

    rows -> flat positions, padded -> this rank's slice (context parallel) -> layers -> hidden states at
    policy tokens
         -> log-probs over all vocabulary shards -> combined over context-parallel ranks: [T], the input of
         the loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn
from transformers import PreTrainedConfig

from braid.config.train import TrainConfig
from braid.models.attention import LayerCall, PackedAttention, attend
from braid.models.base import Output
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM, padding_without_gradient, spread, written_positions
from braid.models.kernels import packed_attention
from braid.models.logprobs import Head, token_logprobs
from braid.models.transfer import to_device
from braid.models.value import ValueModel
from braid.models.value_head import ValueHead

from .checks import is_mixture
from .kind import Megatron, settings_of
from .ranks import groups

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]  # Megatron 0.16 compares it with None


def _keeping_autocast(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's `checkpoint` to recompute under the autocast state of the forward pass.

    Recomputation runs in the backward pass, where autocast is off.
    """

    def kept(function: Callable[..., Any], distribute: bool, *args: Any) -> Any:
        device = args[0].device.type
        autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        return checkpoint(autocast(function), distribute, *args)

    return kept


# Layers, attention and experts look it up in this module.
tensor_parallel.checkpoint = _keeping_autocast(tensor_parallel.checkpoint)


def layer_options(
    config: PreTrainedConfig, train: TrainConfig, dtype: torch.dtype, autocast: torch.dtype | None = None
) -> dict[str, Any]:
    """Options for Megatron's TransformerConfig in addition to the model's sizes.

    `dtype` is the type of the weights, `autocast` the compute type if given. Dropout and Megatron's auxiliary
    expert loss are disabled: the loss is computed by the caller.
    """
    megatron = settings_of(train)
    layers = megatron.transformer
    options: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": autocast or dtype,  # residuals are summed in the compute type
        "bf16": False,  # types come from the parameters and autocast
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,  # losses of micro-batches are summed, not averaged
        "sequence_parallel": megatron.sequence_parallel and megatron.tensor_parallel > 1,
        "variable_seq_lengths": True,
        "batch_p2p_comm": layers.batch_p2p_comm,
        "overlap_p2p_comm": megatron.virtual_pipeline is not None and not layers.batch_p2p_comm,
        "apply_rope_fusion": layers.apply_rope_fusion and find_spec("transformer_engine") is not None,
        "bias_dropout_fusion": layers.bias_dropout_fusion,
        "bias_activation_fusion": layers.bias_activation_fusion,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": layers.gradient_accumulation_fusion,
        **_recompute_options(train),
    }
    if config.model_type == "qwen2":
        options["add_qkv_bias"] = True
    if is_mixture(config):
        options |= {
            # softmax over the selected experts equals softmax over all, renormalized over the selected
            "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
            "moe_token_dispatcher_type": megatron.moe_token_dispatcher,
            "moe_permute_fusion": False,
        }
    return options


def _recompute_options(train: TrainConfig) -> dict[str, Any]:
    megatron = settings_of(train)
    kind = megatron.recompute_granularity
    if kind == "full" or (kind == "off" and train.gradient_checkpointing):
        settings = megatron if kind == "full" else Megatron()
        return {
            "recompute_granularity": "full",
            "recompute_method": settings.recompute_method or "uniform",
            "recompute_num_layers": settings.recompute_num_layers or 1,
        }
    modules = ["core_attn"] * (kind == "selective") + ["moe"] * megatron.moe_layer_recompute
    return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}


@dataclass
class PackedRows(PackedSeqParams):
    """Passes the packed attention through Megatron's layers. `qkv_format` keeps Megatron's value for plain
    sequences."""

    qkv_format: str = "sbhd"
    attention: PackedAttention | None = None


class PackedCoreAttention(nn.Module):
    """Core attention over packed rows. With context parallelism each rank holds a slice of the positions; an
    all-to-all exchanges it for all positions of a subset of the heads, and a second one reverses it (Ulysses,
    arXiv 2309.14509)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,  # Megatron's signature; the mask comes with the rows
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None, "set by Megatron"
        scale = softmax_scale or config.kv_channels**-0.5
        self._call = LayerCall(layer_number - 1, scale, sliding_window=None, softcap=None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # Megatron's signature
        packed_seq_params: PackedRows,
        **_: Any,
    ) -> Tensor:
        """Attention over this rank's positions and heads: [T, 1, Hq, d], [T, 1, Hkv, d] -> [T, 1, Hq * d]."""
        attention = packed_seq_params.attention
        assert attention is not None, "every pass has rows"
        size = groups.get_context_parallel_world_size()
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if size > 1:
            if k.shape[1] % size:
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            q, k, v = (_all_positions(x, size) for x in (q, k, v))
        out = attend(attention, self._call, q, k, v)
        if size > 1:
            out = _all_heads(out, size)
        return out.flatten(1).unsqueeze(1)


def _all_positions(x: Tensor, size: int) -> Tensor:
    """Over context-parallel ranks: [T / size, H, d] -> [T, H / size, d]."""
    parts = x.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    return tensor_parallel.all_to_all(groups.get_context_parallel_group(), parts).flatten(0, 1)


def _all_heads(x: Tensor, size: int) -> Tensor:
    """Inverse of `_all_positions`: [T, H / size, d] -> [T / size, H, d]."""
    parts = x.unflatten(0, (size, -1)).contiguous()
    parts = tensor_parallel.all_to_all(groups.get_context_parallel_group(), parts)
    return parts.transpose(0, 1).flatten(1, 2)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32.

    Replaces Megatron's local norm, which rejects sequence parallelism. There each rank sees a part of the
    positions, and the attribute `sequence_parallel` tells Megatron to sum the gradients of `weight`. The
    linear layer that follows allocates its gradient buffers in the type of its input, so under autocast the
    norm returns the autocast type.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        self.eps = eps
        self._is_before_linear = config.sequence_parallel and hidden_size == config.hidden_size

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        dtype, device = x.dtype, x.device.type
        if self._is_before_linear and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(dtype)


def stage_spec(
    config: PreTrainedConfig, layers: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Specification of a pipeline stage: Megatron's local one with this module's attention and norms."""
    spec: Any = get_gpt_layer_local_spec(
        num_experts=_num_experts(config),
        qk_layernorm=config.model_type.startswith("qwen3"),
        normalization="RMSNorm",
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.model_type.startswith("qwen3"):
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[spec] * get_num_layers_to_build(layers, vp_stage=vp_stage),
        layer_norm=RMSNorm,  # pyright: ignore[reportArgumentType]
    )


def _num_experts(config: PreTrainedConfig) -> int | None:
    if not is_mixture(config):
        return None
    return getattr(config, "num_experts", None) or config.num_local_experts


class Decoder(GPTModel):
    """One pipeline stage. The first stage takes token ids; the last returns log-probs, or values for a
    critic; all others return hidden states."""

    def __init__(self, model: CausalLM | ValueModel, config: TransformerConfig, vp_stage: int | None) -> None:
        """`vp_stage` is the index of this stage among the rank's stages in the interleaved schedule."""
        is_last = groups.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
        hf, is_critic = text_config(model), isinstance(model, ValueModel)
        super().__init__(
            config=config,
            transformer_layer_spec=stage_spec(hf, config, vp_stage),  # pyright: ignore[reportArgumentType]
            vocab_size=padded_vocab(hf.vocab_size),
            max_sequence_length=hf.max_position_embeddings,
            share_embeddings_and_output_weights=hf.tie_word_embeddings and not is_critic,
            position_embedding_type="none",  # passed to `decoder` with each batch
            pre_process=groups.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
            post_process=is_last,
            vp_stage=vp_stage,
        )
        self.value_head: ValueHead | None = None
        if is_critic and is_last:
            self.output_layer, self.value_head = None, deepcopy(model.value_head)
        rotary: Any = model.backbone.rotary_emb
        assert rotary.attention_scaling == 1.0, "holds for the rotary embeddings that check_model accepts"
        self._frequencies: Tensor = rotary.inv_freq.float().clone()
        self._source: Any = model
        self._padding = padding_without_gradient(model.backbone)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # packed rows, not a padded batch
        self, batch: PackedBatch, outputs: frozenset[Output]
    ) -> Any:
        """Run the stage over packed rows.

        The last stage returns `outputs` by name, [T] each, zero at positions that the policy did not write.
        Other stages return hidden states [T', 1, D], where T' is T divided by the context-parallel size and,
        with sequence parallelism, the tensor-parallel size.
        """
        num_slices = groups.get_context_parallel_world_size()
        split = num_slices * (
            groups.get_tensor_model_parallel_world_size() if self.config.sequence_parallel else 1
        )
        padded = batch.num_positions + -batch.num_positions % split
        size = padded // num_slices
        start = groups.get_context_parallel_rank() * size
        hidden = None
        if self.pre_process:
            ids = F.pad(batch.inputs["input_ids"], (0, padded - batch.num_positions))
            hidden = self._embedded(ids[start : start + size])
        positions = F.pad(batch.positions, (0, padded - batch.num_positions))[start : start + size]
        angles = torch.outer(positions.float(), self._frequencies.to(positions.device))
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat((angles, angles), dim=1)[:, None, None],
            packed_seq_params=PackedRows(
                attention=packed_attention(self._source.attention, _padded_rows(batch, padded))
            ),
        )
        return self._outputs(hidden, batch, outputs, start, size) if self.post_process else hidden

    def _embedded(self, ids: Tensor) -> Tensor:
        """Embed token ids: [T] -> [T, 1, D], or this rank's part with sequence parallelism. As in
        transformers, the padding token's embedding receives no gradient."""
        hidden = self.embedding(ids.unsqueeze(0), None)
        if self._padding is None:
            return hidden
        if self.config.sequence_parallel:
            ids = ids.chunk(groups.get_tensor_model_parallel_world_size())[
                groups.get_tensor_model_parallel_rank()
            ]
        return torch.where((ids == self._padding)[:, None, None], hidden.detach(), hidden)

    def _outputs(
        self, hidden: Tensor, batch: PackedBatch, outputs: frozenset[Output], start: int, size: int
    ) -> dict[str, Tensor]:
        written, before = written_positions(batch)
        is_here = (before >= start) & (before < start + size)
        positions, here = (to_device(x, batch.device) for x in (written[is_here], before[is_here] - start))
        if self.value_head is not None:
            if self.config.sequence_parallel:
                # every rank computes all values, but only the gradient of its own positions counts
                hidden = tensor_parallel.gather_from_sequence_parallel_region(
                    hidden, tensor_parallel_output_grad=False
                )
            values = self.value_head(hidden.squeeze(1).index_select(0, here))
            computed: Mapping[str, Tensor | None] = self.value_head.outputs(values, outputs)
        else:
            computed = self._logprobs(
                hidden, here, batch.inputs["input_ids"].index_select(0, positions), outputs
            )
        flat = {name: spread(computed[name], positions, batch) for name in outputs}
        if groups.get_context_parallel_world_size() == 1:
            return flat
        # Each position is nonzero on one rank only. All ranks compute the same loss and keep the gradient of
        # their positions.
        group = groups.get_context_parallel_group()
        return {
            name: tensor_parallel.reduce_from_tensor_model_parallel_region(flat[name], group)
            for name in sorted(outputs)  # in the same order on every rank
        }

    def _logprobs(
        self, hidden: Tensor, here: Tensor, ids: Tensor, outputs: frozenset[Output]
    ) -> dict[str, Tensor | None]:
        """Log-probs of `ids` [N], each predicted from the hidden state at its index in `here` [N]."""
        output_layer: Any = self.output_layer
        for hook in output_layer._forward_pre_hooks.values():  # the weight is used without calling the layer
            hook(output_layer, ())
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        logprobs, entropy, _ = token_logprobs(
            hidden.squeeze(1).index_select(0, here),
            self._head(),
            ids,
            temperature=self._source.temperature,
            with_entropy="entropy" in outputs,
            chunk_bytes=self._source.chunk_bytes,
            compiles=self._source.compiles,
        )
        return {"logprobs": logprobs, "entropy": entropy}

    def _head(self) -> Head:
        """This rank's vocabulary shard, without padding rows."""
        output_layer: Any = self.output_layer
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else output_layer.weight
        )
        assert weight is not None, "the last stage has one"
        first = groups.get_tensor_model_parallel_rank() * len(weight)
        shard = weight[: max(0, min(len(weight), self._source.vocab_size - first))]
        group = (
            groups.get_tensor_model_parallel_group()
            if groups.get_tensor_model_parallel_world_size() > 1
            else None
        )
        return Head(shard, first=first, group=group)


def text_config(model: CausalLM | ValueModel) -> PreTrainedConfig:
    """Config of the text decoder."""
    return model.backbone.config.get_text_config(decoder=True)


def padded_vocab(vocab_size: int) -> int:
    """Vocabulary size rounded up to a multiple of the tensor-parallel size."""
    return vocab_size + -vocab_size % groups.get_tensor_model_parallel_world_size()


def _padded_rows(batch: PackedBatch, padded: int) -> PackedBatch:
    """Pad the batch to `padded` positions with one more row, which attends only to itself."""
    num = padded - batch.num_positions
    if not num:
        return batch
    shared = (*batch.shared, (0, 0)) if batch.shared else ()
    mask = F.pad(batch.mask, (0, num))
    return PackedBatch({}, mask, (*batch.lengths, num), shared=shared)
