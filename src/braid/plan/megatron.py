"""Megatron-core options that are not supported or have no effect. Checks that depend on the model's sizes are
made when it is built (training/backends/megatron)."""

from __future__ import annotations

from collections.abc import Iterator

from braid.config.backends import MegatronConfig
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig

_OTHERS = "fsdp2, fsdp or deepspeed"


def missing_in_megatron(config: RunConfig, key: str, train: TrainConfig) -> Iterator[tuple[str, str]]:
    """(key, message) of everything in the training settings `train`, at section `key`, that is not
    supported."""
    if train.backend != "megatron":
        return
    if config.model.lora is not None and key != "critic.train":
        yield (
            "model.lora",
            f"megatron does not support adapters; set {key}.backend to {_OTHERS}, or remove it",
        )
    if train.liger_kernels:
        yield f"{key}.liger_kernels", "not supported by megatron, which has its own layers; set it to false"
    for name, message in (*_unknown_layers(train.megatron), *_unknown_schedules(train.megatron)):
        yield f"{key}.megatron.{name}", message


def _unknown_layers(own: MegatronConfig) -> Iterator[tuple[str, str]]:
    """Keys that must match the model and have the same value for all supported models."""
    known = {
        "layer_spec": "decoder_gpt",
        "activation": "swiglu",
        "normalization": "rmsnorm",
        "position_embedding": "rope",
        "add_bias_linear": False,
    }
    for name, value in known.items():
        if (given := getattr(own.transformer, name)) != value:
            yield (
                f"transformer.{name}",
                f"{given} does not match the models supported with megatron (llama, qwen2, qwen3, qwen3_moe, mixtral), which "
                f"have {value}; remove it, or use backend {_OTHERS}",
            )


def _unknown_schedules(own: MegatronConfig) -> Iterator[tuple[str, str]]:
    if own.virtual_pipeline is not None and own.pipeline_parallel == 1:
        yield (
            "virtual_pipeline",
            "interleaving needs several pipeline stages; set pipeline_parallel above 1, or remove it",
        )
    if own.overlap_param_gather_with_step:
        yield (
            "overlap_param_gather_with_step",
            "not implemented in this version; set it to false, and use overlap_param_gather to gather parameters during the "
            "next forward pass",
        )
    if own.tp_comm_overlap_file is not None:
        yield (
            "tp_comm_overlap_file",
            "overlapped tensor-parallel communication needs Transformer Engine layers, which braid does not use; remove it",
        )
    if own.checkpoint.load_path is not None or not own.checkpoint.from_hf:
        yield (
            "checkpoint." + ("from_hf" if own.checkpoint.load_path is None else "load_path"),
            "weights are loaded from a Hugging Face folder; convert the Megatron checkpoint to one, set model.path to it, and "
            "remove this",
        )
