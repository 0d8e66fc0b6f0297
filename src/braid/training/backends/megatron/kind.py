"""Settings of Megatron-core, and what it cannot do. Does not import Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat, PositiveInt

from braid.sections import Section, Unused
from braid.training.backends.base import Backend, Shares, Split, grid, has_heads, heads_of
from braid.types import Groups

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from braid.config.cluster import InferenceConfig
    from braid.config.schema import RunConfig
    from braid.config.train import TrainConfig
    from braid.models.base import TrainableModel
    from braid.plan import Plan
    from braid.plan.sizes import ModelSize

    from .backend import MegatronBackend


class Transformer(Section):
    """Kernels of Megatron's transformer layer."""

    apply_rope_fusion: bool = True
    """Use Transformer Engine's fused rotary embedding kernel, if it is installed (GPU)."""
    bias_dropout_fusion: bool = False
    """Fuse bias and dropout (GPU)."""
    bias_activation_fusion: bool = False
    """Fuse bias and activation (GPU)."""
    gradient_accumulation_fusion: bool = False
    """Fuse weight gradient accumulation into the matrix multiplication (GPU)."""
    batch_p2p_comm: bool = False
    """Batch sends and receives between pipeline stages."""


class Megatron(Backend):
    """Megatron-core."""

    kind: Literal["megatron"] = "megatron"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Megatron-core."""
    tensor_parallel: PositiveInt = 1
    """Tensor-parallel size."""
    pipeline_parallel: PositiveInt = 1
    """Pipeline-parallel size."""
    virtual_pipeline: PositiveInt | None = None
    """Virtual pipeline chunks per stage, for the interleaved schedule."""
    context_parallel: PositiveInt = 1
    """Context-parallel size: devices that share each sequence."""
    expert_parallel: PositiveInt = 1
    """Expert-parallel size: devices over which a layer's experts are distributed."""
    expert_tensor_parallel: PositiveInt | None = None
    """Tensor-parallel size of each expert; tensor_parallel when null."""
    sequence_parallel: bool = False
    """Split norms and dropouts along the sequence within the tensor-parallel group."""
    recompute_granularity: Literal["off", "full", "selective"] = "off"
    """Activation recomputation in the backward pass: whole layers (full), or attention only (selective)."""
    recompute_method: Literal["block", "uniform"] | None = None
    """With recompute_granularity full: recompute the first layers (block), or groups of layers (uniform)."""
    recompute_num_layers: PositiveInt | None = None
    """With recompute_granularity full: number of layers recomputed (block), or layers per group (uniform)."""
    moe_layer_recompute: bool = False
    """Recompute only the expert layers."""
    moe_token_dispatcher: Literal["allgather", "alltoall", "flex"] = "alltoall"
    """How tokens are dispatched to experts."""
    moe_grouped_gemm: bool = False
    """Use one grouped GEMM for all experts of a device (GPU)."""
    distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the parameter all-gather with the forward pass; requires distributed_optimizer."""
    ddp_bucket_size: PositiveInt | None = None
    """Parameters per gradient bucket; Megatron's default when null."""
    dynamic_loss_scale_window: PositiveInt = 1000
    """fp16: consecutive finite steps after which the loss scale doubles."""
    timeout_minutes: PositiveFloat | None = None
    """Timeout of one collective, in minutes; cluster.call_timeout_s when null."""
    transformer: Transformer = Transformer()
    """Transformer layer."""

    package = "megatron.core"
    parallel_sizes = (
        "tensor_parallel",
        "pipeline_parallel",
        "virtual_pipeline",
        "context_parallel",
        "expert_parallel",
        "expert_tensor_parallel",
    )
    joins_others = False  # it has one parallel layout per process
    needs_gpu = True
    instead_of_sequence_parallel = "{}.backend.context_parallel"
    trains_robots = False
    trains_reward_models = False
    trains_causal_lm = False
    reads_images = False
    frees_gradients = False
    unused_while = (
        ("recompute_granularity", "off", "recompute_method recompute_num_layers"),
        ("recompute_granularity", "selective", "recompute_method recompute_num_layers"),
        ("recompute_granularity", "full", "moe_layer_recompute"),
        ("tensor_parallel", 1, "sequence_parallel"),
        ("pipeline_parallel", 1, "transformer.batch_p2p_comm"),
        ("overlap_grad_reduce", False, "ddp_bucket_size"),
        ("distributed_optimizer", False, "overlap_param_gather"),
    )

    def build(
        self, model: TrainableModel, train: TrainConfig, *, total_steps: int, device: torch.device
    ) -> MegatronBackend:
        from .backend import MegatronBackend

        return MegatronBackend(model, train, total_steps=total_steps, device=device)

    def for_inference(self, inference: InferenceConfig) -> Megatron:
        return self.model_copy(update=inference.model_dump(exclude_none=True))

    def unused_inference(self, inference: InferenceConfig) -> Iterator[tuple[str, str]]:
        if self.for_inference(inference).tensor_parallel == 1:
            yield "inference has no tensor parallelism", "inference.sequence_parallel"

    def copy_devices(self, train: TrainConfig) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    def shares(self, train: TrainConfig, count: int) -> Shares:
        """(6 + 12 / d) P / (tensor x pipeline) bytes of P weights in half precision, of which the optimizer's
        12 are sharded over the d data-parallel ranks. A pipeline's first stage has the activations of as many
        micro-batches in flight as there are stages, each of its part of the layers (arXiv 2104.04473)."""
        part = 1.0 / (self.tensor_parallel * self.pipeline_parallel)
        replicas = max(1, count // self.copy_devices(train)) if self.distributed_optimizer else 1
        tokens = 1.0 / (self.context_parallel * self.tensor_parallel)
        return Shares(part, part, part / replicas, tokens)

    @property
    def _expert_tensor(self) -> int:
        return self.expert_tensor_parallel or self.tensor_parallel

    def divisors(self, train: TrainConfig) -> Iterator[tuple[str, int, str]]:
        tensor, pipeline, context = self.tensor_parallel, self.pipeline_parallel, self.context_parallel
        copy = self.copy_devices(train)
        parts = f"tensor {tensor} x pipeline {pipeline} x context parallel {context}"
        yield "backend.tensor_parallel", copy, f"a model replica needs {copy} devices ({parts})"
        expert, of_expert = self.expert_parallel, self._expert_tensor
        if expert > 1 or of_expert != tensor:
            size = expert * of_expert * pipeline
            parts = f"expert {expert} x expert tensor {of_expert} x pipeline parallel {pipeline}"
            yield "backend.expert_parallel", size, f"a replica of the experts needs {size} devices ({parts})"

    def splits(self, train: TrainConfig, model: ModelSize) -> Iterator[Split]:
        layers, experts, pipeline = model.num_layers, model.num_experts, self.pipeline_parallel
        stage = layers // pipeline if layers % pipeline == 0 else 0  # 0: the stages themselves are refused
        yield Split("backend.tensor_parallel", self.tensor_parallel, heads_of(model), has_heads(model))
        yield Split("backend.pipeline_parallel", pipeline, f"{layers} layers", lambda n: layers % n == 0)
        yield Split(
            "backend.virtual_pipeline",
            self.virtual_pipeline or 1,
            f"the {stage} layers of a stage",
            lambda n: stage % n == 0,
        )
        yield Split(
            "backend.expert_parallel",
            self.expert_parallel,
            f"{experts} experts",
            lambda n: n == 1 or (experts > 0 and experts % n == 0),
        )

    def groups(self, train: TrainConfig, count: int) -> Groups:
        """See Backend. Ranks are in the order tensor, context, data, pipeline, and for experts expert tensor,
        expert, data."""
        pipeline, of_tensor = self.pipeline_parallel, self._expert_tensor
        data = count // self.copy_devices(train)
        of_data = count // (of_tensor * self.expert_parallel * pipeline)
        dense = {
            "tensor": self.tensor_parallel,
            "context": self.context_parallel,
            "data": data,
            "pipeline": pipeline,
        }
        experts = {"expert tensor": of_tensor, "expert": self.expert_parallel, "expert data": of_data}
        return grid(dense) | (grid(experts, pipeline) if self.expert_parallel > 1 else {})

    def environment(self) -> dict[str, str | None]:
        """With tensor parallelism: orders collectives before the products that overlap them."""
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if self.tensor_parallel > 1 else {}

    def problems(self, config: RunConfig, train: TrainConfig, at: str) -> Iterator[tuple[str, str]]:
        if config.model.lora is not None and at != "critic.train":
            fix = f"set {at}.backend to fsdp2, fsdp or deepspeed, or remove it"
            yield "model.lora", f"megatron does not support adapters; {fix}"
        if train.liger_kernels:
            yield (
                f"{at}.liger_kernels",
                "not supported by megatron, which has its own layers; set it to false",
            )
        if self.virtual_pipeline is not None and self.pipeline_parallel == 1:
            why = "interleaving needs several pipeline stages; set pipeline_parallel above 1, or remove it"
            yield f"{at}.backend.virtual_pipeline", why

    def check_model(self, model: PreTrainedConfig) -> None:
        from .checks import check_model

        check_model(model, self)

    def unused_in(self, config: RunConfig, plan: Plan, train: TrainConfig) -> Unused:
        yield from super().unused_in(config, plan, train)
        if find_spec("transformer_engine") is None:
            why = "the fused kernel needs Transformer Engine, which is not installed"
            yield why, "@.backend.transformer.apply_rope_fusion"
        is_other = config.critic.path is not None or bool(config.reference.folders)
        if plan.model_size is not None and not plan.model_size.num_experts and not is_other:
            keys = "@.backend.{moe_grouped_gemm,moe_layer_recompute,moe_token_dispatcher}"
            yield "the model has no experts", keys
        if train.optimizer.kind == "sgd":
            yield "SGD has no optimizer states", "@.backend.{distributed_optimizer,overlap_param_gather}"
        if self.recompute_granularity != "off":
            yield "@.backend.recompute_granularity is used instead", "@.gradient_checkpointing"
        if "fp16" not in (config.model.dtype, train.autocast):
            yield "fp16 is not used", "@.backend.dynamic_loss_scale_window"
        why = "the backend megatron uses @.backend.dynamic_loss_scale_window"
        yield why, "@.grad_scaler.growth_interval"


def settings_of(train: TrainConfig) -> Megatron:
    """The settings of Megatron among training settings that have them."""
    assert isinstance(train.backend, Megatron), "the kind that builds it"
    return train.backend
