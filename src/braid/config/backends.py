"""Options of the training backends beside `single`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from .base import Section

DType = Literal["fp32", "bf16", "fp16"]


class FsdpConfig(Section):
    """PyTorch FSDP (`train.backend=fsdp`) and FSDP2 (`fsdp2`)."""

    sharding: Literal["full", "grad_op", "hybrid", "none"] = "full"
    """What is sharded: all states; gradients and optimizer (weights stay gathered from forward to backward); all states within
    a machine, replicated over machines; nothing."""
    size: PositiveInt | None = None
    """Devices of one shard group, replicated over the others; all when null."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer live in host memory."""
    pin_memory: bool = False
    """fsdp2: in pinned host memory."""
    reshard_after_forward: bool | PositiveInt = True
    """fsdp2: free the gathered weights after the forward pass; a number: reshard over so many devices. grad_op keeps them."""
    sync_last_micro_batch_only: bool = True
    """Reduce gradients after the last micro-batch of a step instead of after each."""
    forward_prefetch: bool = False
    """fsdp: gather the next layer's weights during the forward pass of this one."""
    backward_prefetch: Literal["pre", "post", "off"] = "off"
    """fsdp: when the next layer's weights are gathered in the backward pass."""
    limit_all_gathers: bool = False
    """fsdp: hold back gathers that would run ahead of memory."""
    use_orig_params: bool = False
    """fsdp: keep each parameter apart. Not used: they always are, for the optimizer's groups and adapters."""
    param_dtype: DType | None = None
    """Type of gathered weights and computation; model.dtype when null."""
    reduce_dtype: DType | None = None
    """Type in which gradients are reduced; fp32 when null."""
    buffer_dtype: DType | None = None
    """fsdp: type of buffers; param_dtype when null, and as they are when that is null too."""


class DeepSpeedConfig(Section):
    """DeepSpeed ZeRO (`train.backend=deepspeed`)."""

    stage: Literal[3] = 3
    """ZeRO stage."""
    hpz_partition_size: PositiveInt = 1
    """Devices of a secondary weight partition (ZeRO++ hpZ); 1 for none."""
    cpu_offload: bool = False
    """Parameters and optimizer live in host memory."""


class MegatronTransformerConfig(Section):
    """How Megatron builds a layer. Sizes come from the model folder."""

    layer_spec: str = "decoder_gpt"
    """Name of the layer specification."""
    activation: Literal[
        "swiglu",
        "gelu",
        "geglu",
        "reglu",
        "squared-relu",
        "fast-geglu",
        "fast-swiglu",
        "fast-reglu",
        "approx-gelu",
    ] = "swiglu"
    """Nonlinearity of the feed-forward layers; must be the model's."""
    normalization: Literal["rmsnorm", "layernorm", "layernorm1p"] = "rmsnorm"
    """Kind of the norms; must be the model's."""
    position_embedding: Literal["rope", "learned_absolute", "none"] = "rope"
    """Kind of positions; must be the model's."""
    add_bias_linear: bool = False
    """Linear layers have biases; must be as in the model."""
    apply_rope_fusion: bool = True
    """Fused rotary positions (GPU)."""
    bias_dropout_fusion: bool = False
    """Fused bias and dropout (GPU)."""
    bias_activation_fusion: bool = False
    """Fused bias and activation (GPU)."""
    persist_layer_norm: bool = False
    """Persistent norm kernel (GPU)."""
    gradient_accumulation_fusion: bool = False
    """Weight gradients accumulate inside the matrix product (GPU)."""
    attention_softmax_fp32: bool = True
    """Softmax of the attention in fp32."""
    batch_p2p_comm: bool = False
    """Batched sends and receives between pipeline stages."""
    variable_seq_lengths: bool = True
    """Packed micro-batches; false pads every row to seq_length."""
    cpu_initialization: bool = False
    """Weights are made in host memory."""
    seq_length: PositiveInt | None = None
    """Padded length where rows are padded; the longest row's when null."""


class MegatronCheckpointConfig(Section):
    """Where Megatron's weights come from and how they are stored."""

    load_path: str | None = None
    """A Megatron checkpoint to start from in place of the model folder."""
    format: Literal["torch", "torch_dist", "zarr"] = "torch_dist"
    """Format of stored shards."""
    distributed: bool = True
    """Every rank writes its shard."""
    from_hf: bool = True
    """Convert the Hugging Face folder at the start."""
    preset: str | None = None
    """Name of the conversion's preset; from the model's config when null."""
    model_type: str | None = None
    """Architecture that the conversion assumes; from the model's config when null."""
    hf_path: str | None = None
    """Folder to convert; model.path when null."""
    cache_dir: str | None = None
    """Keeps converted weights here; converted in memory when null."""
    num_processes: PositiveInt = 1
    """Processes of the conversion."""
    devices: tuple[NonNegativeInt, ...] = ()
    """Accelerators that convert; host memory when empty."""
    tensor_parallel: PositiveInt | None = None
    """Layout of the converted weights; the policy's when null."""
    pipeline_parallel: PositiveInt | None = None
    """Layout of the converted weights; the policy's when null."""


class MegatronConfig(Section):
    """Megatron-core (`train.backend=megatron`)."""

    tensor_parallel: PositiveInt = 1
    """Devices that share each layer."""
    pipeline_parallel: PositiveInt = 1
    """Devices that share the layers out among them."""
    virtual_pipeline: PositiveInt | None = None
    """Pieces of each stage in the interleaved schedule."""
    context_parallel: PositiveInt = 1
    """Devices that share each sequence."""
    expert_parallel: PositiveInt = 1
    """Devices that share the experts of a layer."""
    expert_tensor_parallel: PositiveInt | None = None
    """Devices that share each expert; tensor_parallel when null."""
    sequence_parallel: bool = False
    """Split norms and dropouts along the sequence within the tensor-parallel group."""
    recompute_granularity: Literal["off", "full", "selective"] = "off"
    """What is recomputed in the backward pass."""
    recompute_method: Literal["block", "uniform"] | None = None
    """full: recompute the first layers, or groups of layers."""
    recompute_num_layers: PositiveInt | None = None
    """full: how many layers, or layers of a group."""
    moe_layer_recompute: bool = False
    """Recompute the expert layers only."""
    moe_token_dispatcher: Literal["allgather", "alltoall", "flex"] = "alltoall"
    """How tokens travel to their experts."""
    moe_grouped_gemm: bool = False
    """One grouped matrix product for a device's experts (GPU)."""
    moe_shared_expert_overlap: bool = False
    """Shared experts compute while tokens travel; needs alltoall."""
    distributed_optimizer: bool = True
    """Shard the optimizer's states over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during the backward pass."""
    overlap_param_gather: bool = False
    """Gather parameters during the forward pass; needs distributed_optimizer."""
    overlap_param_gather_with_step: bool = False
    """Gather them during the optimizer step."""
    ddp_bucket_size: PositiveInt | None = None
    """Parameters of one gradient bucket; Megatron's rule when null."""
    dynamic_loss_scale_window: PositiveInt = 1000
    """fp16: finite steps after which the loss scale doubles."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on GPUs, gloo on CPUs."""
    timeout_minutes: PositiveFloat = 30.0
    """Limit of one collective."""
    tp_comm_bootstrap: Literal["nccl", "mpi", "gloo"] = "nccl"
    """How overlapped tensor-parallel communication finds its peers."""
    tp_comm_overlap_file: str | None = None
    """YAML of overlapped tensor-parallel communication; none when null."""
    transformer: MegatronTransformerConfig = MegatronTransformerConfig()
    """How a layer is built."""
    checkpoint: MegatronCheckpointConfig = MegatronCheckpointConfig()
    """Where weights come from and how they are stored."""


class OffloadConfig(Section):
    """What moves to host memory while other roles have the device."""

    weights: bool = False
    """Weights."""
    gradients: bool = False
    """Gradient buffers (freed, not copied)."""
    optimizer: bool = False
    """Optimizer states, right after each step."""


class GradScalerConfig(Section):
    """Dynamic loss scaling for fp16."""

    init_scale: PositiveFloat = 65536.0
    """Scale at the start."""
    growth_interval: PositiveInt = 2000
    """Finite steps in a row after which it doubles. An overflow halves it and leaves the step out, which does not count
    towards max_skipped_steps."""


class LoraConfig(Section):
    """Low-rank adapters (peft) in place of all weights."""

    rank: PositiveInt = 32
    """Rank of the adapters."""
    alpha: PositiveFloat | None = None
    """Their scale times rank; the rank when null."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Not used: log-probs must be the same in rollout and in training."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of the layers that get one (q_proj, ...); all-linear for every linear layer but the output head."""
    path: str | None = None
    """Adapter folder of peft to start from; its own rank, alpha and targets count."""
