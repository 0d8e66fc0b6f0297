"""Supported models and parallel layouts of the Megatron backend. Does not import Megatron."""

from __future__ import annotations

from transformers import PreTrainedConfig

from braid.errors import ModelError

from .kind import Megatron

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""Supported transformers model types."""
_FIXED_ROTARY = ("default", "linear", "llama3")
_OTHERS = "use fsdp2 or fsdp"


def check_model(config: PreTrainedConfig, megatron: Megatron) -> None:
    """Raise ModelError if the architecture is not supported or cannot be partitioned as `megatron` says."""
    if config.model_type not in ARCHITECTURES:
        raise ModelError(
            f"train.backend=megatron supports models of type {', '.join(ARCHITECTURES)}, not "
            f"{config.model_type}; {_OTHERS}"
        )
    rotary, kinds = config.rope_parameters["rope_type"], getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None
    mixes = getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1
    has_experts, tensor = is_mixture(config), megatron.tensor_parallel
    heads, kv_heads = config.num_attention_heads // tensor, config.num_key_value_heads
    stages = megatron.pipeline_parallel * (megatron.virtual_pipeline or 1)
    problems = {  # the problem and what to do: whether it is there
        f"train.backend=megatron supports rotary embeddings of type {', '.join(_FIXED_ROTARY)}, not "
        f"{rotary}; {_OTHERS}": rotary not in _FIXED_ROTARY,
        "train.backend=megatron supports models with experts in all layers or in none, but this model "
        f"mixes the two; {_OTHERS}": mixes,
        "train.backend=megatron does not support sliding-window attention, which this model has; "
        f"{_OTHERS}": slides,
        f"train.backend.tensor_parallel={tensor} does not divide the model's {kv_heads} key/value heads; "
        f"set it to a divisor of {kv_heads}": kv_heads % tensor,
        f"train.backend.context_parallel={megatron.context_parallel} does not divide the {heads} attention "
        "heads of each tensor-parallel rank; "
        "set it to a divisor": heads % megatron.context_parallel,
        f"train.backend.pipeline_parallel={megatron.pipeline_parallel} x "
        f"virtual_pipeline={megatron.virtual_pipeline} = {stages} stages do not divide the model's "
        f"{config.num_hidden_layers} layers; "
        "lower one of the two": config.num_hidden_layers % stages,
        f"train.backend.expert_parallel={megatron.expert_parallel}, but the model has no experts; "
        "set it to 1": megatron.expert_parallel > 1 and not has_experts,
        "mixtures of experts with train.backend.tensor_parallel above 1 need sequence parallelism; "
        "set train.backend.sequence_parallel=true": has_experts
        and tensor > 1
        and not megatron.sequence_parallel,
        "train.backend.moe_token_dispatcher=allgather needs the same number of tokens on all ranks, but "
        "packed rows vary in length; set it to alltoall": has_experts
        and megatron.moe_token_dispatcher == "allgather",
        "train.backend.moe_grouped_gemm needs Transformer Engine's expert layers, which braid does not use; "
        "set it to false": has_experts and megatron.moe_grouped_gemm,
    }
    for problem, is_found in problems.items():
        if is_found:
            raise ModelError(problem)


def is_mixture(config: PreTrainedConfig) -> bool:
    """Whether the layers are mixtures of experts."""
    return config.model_type in ("qwen3_moe", "mixtral")
