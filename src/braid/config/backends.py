"""Options of the training backends other than `single`."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from braid.sections import Section

DType = Literal["fp32", "bf16", "fp16"]


class FsdpConfig(Section):
    """PyTorch FSDP (`train.backend=fsdp`) and FSDP2 (`fsdp2`)."""

    sharding: Literal["full", "grad_op", "hybrid", "none"] = "full"
    """full: shard parameters, gradients and optimizer state. grad_op: shard gradients and optimizer state
    (weights stay gathered from forward to backward). hybrid: shard everything within a machine, replicate
    across machines. none: shard nothing."""
    size: PositiveInt | None = None
    """Devices per shard group, with replicas across groups; null for all devices."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    pin_memory: bool = False
    """fsdp2: use pinned host memory for cpu_offload."""
    reshard_after_forward: bool | PositiveInt = True
    """fsdp2: free the gathered weights after the forward pass; a number reshards them to that many devices.
    grad_op keeps them gathered."""
    sync_last_micro_batch_only: bool = False
    """Reduce gradients only after the last micro-batch of a step instead of after each: less communication,
    but every rank holds the gradients of the whole model."""
    forward_prefetch: bool = False
    """fsdp: gather the next layer's weights during the current layer's forward pass."""
    backward_prefetch: Literal["pre", "post", "off"] = "off"
    """fsdp: when the next layer's weights are gathered in the backward pass: before (pre) or after (post) the
    current layer's gradients are computed; off for no prefetch."""
    limit_all_gathers: bool = False
    """fsdp: limit the number of all-gathers in flight to bound memory."""
    param_dtype: DType | None = None
    """Dtype of gathered weights and computation. null: train.autocast's for fp32 models, else model.dtype."""
    reduce_dtype: DType | None = None
    """Dtype of gradient reduction; fp32 when null."""
    buffer_dtype: DType | None = None
    """fsdp: dtype of buffers, such as rotary frequencies; unchanged when null."""


class DeepSpeedConfig(Section):
    """DeepSpeed ZeRO (`train.backend=deepspeed`)."""

    stage: Literal[3] = 3
    """ZeRO stage."""
    hpz_partition_size: PositiveInt = 1
    """Devices per secondary weight partition (ZeRO++ hpZ); 1 disables it."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""


class MegatronTransformerConfig(Section):
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


class MegatronConfig(Section):
    """Megatron-core (`train.backend=megatron`)."""

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
    transformer: MegatronTransformerConfig = MegatronTransformerConfig()
    """Transformer layer."""


class OffloadConfig(Section):
    """State moved to host memory while other roles use the device."""

    weights: bool = False
    """Offload weights."""
    gradients: bool = False
    """Free gradient buffers (they are not copied)."""
    optimizer: bool = False
    """Offload optimizer state after each step."""


class GradScalerConfig(Section):
    """Dynamic loss scaling for fp16."""

    init_scale: PositiveFloat = 65536.0
    """Initial loss scale."""
    growth_interval: PositiveInt = 2000
    """Consecutive finite steps after which the scale doubles. An overflow halves the scale and skips the
    step, which does not count towards max_skipped_steps."""


class LoraConfig(Section):
    """Low-rank adapters (peft), trained instead of the full weights."""

    rank: PositiveInt = 32
    """Adapter rank."""
    alpha: PositiveFloat | None = None
    """Adapter scale times rank (the LoRA alpha); rank when null."""
    targets: tuple[str, ...] = ("all-linear",)
    """Layers that get an adapter (q_proj, ...); all-linear: every linear layer except the output head, and
    the weights of routed experts (gate_up_proj, down_proj), one adapter per expert; routers stay frozen. Only
    for OpenVLA may the head (lm_head) be among them."""
    path: str | None = None
    """peft adapter folder to start from; its rank, alpha and targets take precedence."""
