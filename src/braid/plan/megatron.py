"""Megatron-core options that are not supported or have no effect. Checks that depend on the model's sizes are
made when it is built (training/backends/megatron)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

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


def idle_in_megatron(
    key: str, train_of: Callable[[RunConfig], TrainConfig | None]
) -> Iterator[tuple[str, Callable[[RunConfig, Plan], bool], tuple[str, ...]]]:
    """(why, when, keys), as in plan.available.IDLE, of the training settings at section `key`, which
    `train_of` returns."""

    def when(condition: Callable[[RunConfig, Plan, TrainConfig], bool]) -> Callable[[RunConfig, Plan], bool]:
        def is_idle(config: RunConfig, plan: Plan) -> bool:
            train = train_of(config)
            return train is not None and train.backend == "megatron" and condition(config, plan, train)

        return is_idle

    for why, condition, names in _IDLE:
        yield why.format(key=key), when(condition), tuple(f"{key}.{name}" for name in names)


def _own(*names: str) -> tuple[str, ...]:
    return tuple(f"megatron.{name}" for name in names)


_IDLE: tuple[tuple[str, Callable[[RunConfig, Plan, TrainConfig], bool], tuple[str, ...]], ...] = (
    (
        "rows are packed without padding",
        lambda *_: True,
        _own("transformer.variable_seq_lengths", "transformer.seq_length"),
    ),
    (
        "norms are computed in float32 by torch's kernels, and the softmax of attention always in float32",
        lambda *_: True,
        _own("transformer.persist_layer_norm", "transformer.attention_softmax_fp32"),
    ),
    (
        "the fused kernel needs Transformer Engine, which is not installed",
        lambda *_: find_spec("transformer_engine") is None,
        _own("transformer.apply_rope_fusion"),
    ),
    (
        "collectives use NCCL on GPUs and gloo on CPUs",
        lambda *_: True,
        _own("distributed_backend", "tp_comm_bootstrap"),
    ),
    (
        "no supported model has shared experts",
        lambda *_: True,
        _own("moe_shared_expert_overlap"),
    ),
    (
        "the model has no experts",
        lambda config, plan, _: (
            plan.model_size is not None
            and not plan.model_size.num_experts
            and config.critic.path is None
            and config.reference.path is None
        ),
        _own("moe_grouped_gemm", "moe_layer_recompute", "moe_token_dispatcher"),
    ),
    (
        "weights are converted in memory when loaded from model.path, and all backends share one checkpoint format",
        lambda *_: True,
        _own(
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
        "{key}.megatron.recompute_granularity is not full",
        lambda _, __, train: train.megatron.recompute_granularity != "full",
        _own("recompute_method", "recompute_num_layers"),
    ),
    (
        "recompute_granularity=full recomputes whole layers",
        lambda _, __, train: train.megatron.recompute_granularity == "full",
        _own("moe_layer_recompute"),
    ),
    (
        "{key}.megatron.recompute_granularity is used instead",
        lambda _, __, train: train.megatron.recompute_granularity != "off",
        ("gradient_checkpointing",),
    ),
    (
        "{key}.megatron.tensor_parallel is 1",
        lambda _, __, train: train.megatron.tensor_parallel == 1,
        _own("sequence_parallel"),
    ),
    (
        "{key}.megatron.pipeline_parallel is 1",
        lambda _, __, train: train.megatron.pipeline_parallel == 1,
        _own("transformer.batch_p2p_comm"),
    ),
    (
        "with {key}.megatron.overlap_grad_reduce=false all gradients form one bucket",
        lambda _, __, train: not train.megatron.overlap_grad_reduce,
        _own("ddp_bucket_size"),
    ),
    (
        "optimizer states are not sharded",
        lambda _, __, train: not train.megatron.distributed_optimizer or train.optimizer.kind == "sgd",
        _own("overlap_param_gather"),
    ),
    (
        "SGD has no optimizer states",
        lambda _, __, train: train.optimizer.kind == "sgd",
        _own("distributed_optimizer"),
    ),
    (
        "fp16 is not used",
        lambda config, _, train: config.model.dtype != "fp16" and train.autocast != "fp16",
        _own("dynamic_loss_scale_window"),
    ),
    (
        "the backend megatron uses {key}.megatron.dynamic_loss_scale_window",
        lambda *_: True,
        ("grad_scaler.growth_interval",),
    ),
)
