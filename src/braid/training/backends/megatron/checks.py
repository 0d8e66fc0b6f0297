"""Supported models and parallel layouts of the Megatron backend. Does not import Megatron."""

from __future__ import annotations

from transformers import PreTrainedConfig

from braid.config.backends import MegatronConfig
from braid.errors import ModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""Supported transformers model types."""
_FIXED_ROTARY = ("default", "linear", "llama3")


def check_model(config: PreTrainedConfig, own: MegatronConfig) -> None:
    """Raise ModelError if the architecture is not supported or cannot be partitioned as `own` says."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"train.backend=megatron supports models of type {', '.join(ARCHITECTURES)}, not {kind}; use fsdp2, fsdp or "
            "deepspeed"
        )
    rotary = config.rope_parameters["rope_type"]
    if rotary not in _FIXED_ROTARY:
        raise ModelError(
            f"train.backend=megatron supports rotary embeddings of type {', '.join(_FIXED_ROTARY)}, not {rotary}; "
            "use fsdp2, fsdp or deepspeed"
        )
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        raise ModelError(
            "train.backend=megatron supports models with experts in all layers or in none, but this model mixes the two; "
            "use fsdp2, fsdp or deepspeed"
        )
    if _slides(config):
        raise ModelError(
            "train.backend=megatron does not support sliding-window attention, which this model has; use fsdp2, fsdp or deepspeed"
        )
    _check_sizes(config, own)
    _check_experts(config, own)


def _check_sizes(config: PreTrainedConfig, own: MegatronConfig) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads % own.tensor_parallel:
        raise ModelError(
            f"train.megatron.tensor_parallel={own.tensor_parallel} does not divide the model's {kv_heads} key/value heads; "
            f"set it to a divisor of {kv_heads}"
        )
    if (heads // own.tensor_parallel) % own.context_parallel:
        raise ModelError(
            f"train.megatron.context_parallel={own.context_parallel} does not divide the {heads // own.tensor_parallel} "
            "attention heads of each tensor-parallel rank; set it to a divisor"
        )
    stages = own.pipeline_parallel * (own.virtual_pipeline or 1)
    if config.num_hidden_layers % stages:
        raise ModelError(
            f"train.megatron.pipeline_parallel={own.pipeline_parallel} x virtual_pipeline={own.virtual_pipeline} = {stages} "
            f"stages do not divide the model's {config.num_hidden_layers} layers; lower one of the two"
        )


def _check_experts(config: PreTrainedConfig, own: MegatronConfig) -> None:
    if not is_mixture(config):
        if own.expert_parallel > 1:
            raise ModelError(
                f"train.megatron.expert_parallel={own.expert_parallel}, but the model has no experts; set it to 1"
            )
        return
    if own.tensor_parallel > 1 and not own.sequence_parallel:
        raise ModelError(
            "mixtures of experts with train.megatron.tensor_parallel above 1 need sequence parallelism; set "
            "train.megatron.sequence_parallel=true"
        )
    if own.moe_token_dispatcher == "allgather":
        raise ModelError(
            "train.megatron.moe_token_dispatcher=allgather needs the same number of tokens on all ranks, but packed rows vary "
            "in length; set it to alltoall"
        )
    if own.moe_grouped_gemm:
        raise ModelError(
            "train.megatron.moe_grouped_gemm needs Transformer Engine's expert layers, which braid does not use; set it to false"
        )


def is_mixture(config: PreTrainedConfig) -> bool:
    """Whether the layers are mixtures of experts."""
    return config.model_type in ("qwen3_moe", "mixtral")


def _slides(config: PreTrainedConfig) -> bool:
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None
