"""Megatron-core options that are not supported or have no effect. Checks that depend on the model's sizes are
made when it is built (training/backends/megatron)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from braid.config.backends import MegatronConfig
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig

from .plan import Plan

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


def _option(*names: str) -> tuple[str, ...]:
    return tuple(f"train.megatron.{name}" for name in names)


def _when(condition: Callable[[RunConfig], bool]) -> Callable[[RunConfig, Plan], bool]:
    """Condition that also requires megatron as the backend."""
    return lambda config, _: config.train.backend == "megatron" and condition(config)


IDLE_IN_MEGATRON: tuple[tuple[str, Callable[[RunConfig, Plan], bool], tuple[str, ...]], ...] = (
    (
        "rows are packed without padding",
        _when(lambda _: True),
        _option("transformer.variable_seq_lengths", "transformer.seq_length"),
    ),
    (
        "norms are computed in float32 by torch's kernels, and the softmax of attention always in float32",
        _when(lambda _: True),
        _option("transformer.persist_layer_norm", "transformer.attention_softmax_fp32"),
    ),
    (
        "collectives use NCCL on GPUs and gloo on CPUs",
        _when(lambda _: True),
        _option("distributed_backend", "tp_comm_bootstrap"),
    ),
    (
        "no supported model has shared experts",
        _when(lambda _: True),
        _option("moe_shared_expert_overlap"),
    ),
    (
        "weights are converted in memory when loaded from model.path, and all backends share one checkpoint format",
        _when(lambda _: True),
        _option(
            "transformer.cpu_initialization",
            *(
                f"checkpoint.{name}"
                for name in (
                    "format",
                    "distributed",
                    "preset",
                    "model_type",
                    "hf_path",
                    "cache_dir",
                    "num_processes",
                    "devices",
                    "tensor_parallel",
                    "pipeline_parallel",
                )
            ),
        ),
    ),
    (
        "train.megatron.recompute_granularity is not full",
        _when(lambda config: config.train.megatron.recompute_granularity != "full"),
        _option("recompute_method", "recompute_num_layers"),
    ),
    (
        "recompute_granularity=full recomputes whole layers",
        _when(lambda config: config.train.megatron.recompute_granularity == "full"),
        _option("moe_layer_recompute"),
    ),
    (
        "train.megatron.tensor_parallel is 1",
        _when(lambda config: config.train.megatron.tensor_parallel == 1),
        _option("sequence_parallel"),
    ),
    (
        "train.megatron.pipeline_parallel is 1",
        _when(lambda config: config.train.megatron.pipeline_parallel == 1),
        _option("transformer.batch_p2p_comm"),
    ),
    (
        "with train.megatron.overlap_grad_reduce=false all gradients form one bucket",
        _when(lambda config: not config.train.megatron.overlap_grad_reduce),
        _option("ddp_bucket_size"),
    ),
    (
        "optimizer states are not sharded",
        _when(
            lambda config: (
                not config.train.megatron.distributed_optimizer or config.train.optimizer.kind == "sgd"
            )
        ),
        _option("overlap_param_gather"),
    ),
    (
        "SGD has no optimizer states",
        _when(lambda config: config.train.optimizer.kind == "sgd"),
        _option("distributed_optimizer"),
    ),
    (
        "fp16 is not used",
        _when(lambda config: config.model.dtype != "fp16" and config.train.autocast != "fp16"),
        _option("dynamic_loss_scale_window"),
    ),
    (
        "the backend megatron uses train.megatron.dynamic_loss_scale_window",
        _when(lambda _: True),
        ("train.grad_scaler.growth_interval",),
    ),
)
"""(why, when, keys), as in plan.available.IDLE."""
