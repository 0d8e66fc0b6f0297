"""ROLL's strategies: strategy_args of workers that train or infer, and of engines."""

from __future__ import annotations

from typing import Any

from . import roll_facts as facts
from .conversions import Idle, mapped, null_as, opposite, when
from .roll_facts import STRATEGY, of_backend, of_engine
from .table import (
    ABSENT,
    Apply,
    Became,
    Convert,
    Implied,
    NoEffect,
    Rule,
    Source,
    Unsupported,
    no_effect,
)
from .values import ANY, BOOL, COUNT, INT, TEXT, choice, nullable, number

TORCH_DTYPES = {
    "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"
}  # fmt: skip
_FRACTION = number(0.0, 1.0, above=True, samples=(0.4, 0.7))
_LAYER_NOTE = "use braid.train.megatron.transformer"


def of_batch(native: str = "", *idle: Idle) -> Convert:
    """Conversion of a key of the batch arithmetic: sets steps_per_pass, and the key's own native key unless
    one of `idle` gives a reason against it."""

    def convert(value: Any, source: Source) -> Became:
        made = facts.batches(source)
        if native and not any(condition(source) for condition in idle):
            made[native] = value if value is not None else 1
        return Became(made)

    return convert


def _strategy(role: str) -> Convert:
    def convert(_: str, source: Source) -> Any:
        if source.backend is not None:
            return no_effect("overridden by --backend; batch sizes are computed as for the file's strategy")
        made: dict[str, Any] = {f"{facts.NATIVE_TRAIN[role]}.backend": facts.file_backend(source, role)}
        return Became(made | ({} if role == "reference" else facts.batches(source)))

    return convert


def strategies(role: str, *idle: Idle) -> tuple[Rule, ...]:
    """The strategy_args keys of a role that trains or computes log-probs."""
    native = facts.NATIVE_TRAIN[role]
    kind = "infer" if role == "reference" else "train"
    names = (f"megatron_{kind}", f"fsdp2_{kind}", *(("hf_infer",) if role == "reference" else ()))
    return (
        Apply(f"{role}.strategy_args.strategy_name", f"{native}.backend", choice(*names),
              when(*idle, then=_strategy(role)), default=f"fsdp2_{kind}"),
        Implied(f"{role}.num_gpus_per_worker", COUNT,
              "training workers always have one device, as in ROLL"),
        Apply(f"{role}.backend_timeout", f"{native}.megatron.timeout_minutes", COUNT,
              when(*idle, of_backend("megatron", role)), default=30),
        *_megatron(role, *idle),
        *_fsdp2(role, *idle),
        Implied(f"{role}.router_replay.mode", choice("disable"), "no router replay"),
    )  # fmt: skip


def _megatron(role: str, *idle: Idle) -> tuple[Rule, ...]:
    """The strategy_config keys of megatron_train and megatron_infer, the documented ones first."""
    config, native = f"{role}.{STRATEGY}", f"{facts.NATIVE_TRAIN[role]}.megatron"
    chosen = (*idle, of_backend("megatron", role))

    def sized(name: str, short: str) -> Rule:
        """The keys of TP, PP and CP, which enter the batch arithmetic."""
        own = f"{native}.{short}"
        convert = (
            when(*chosen, then=null_as(1))
            if role == "reference"
            else when(*idle, _not_file_megatron(role), then=of_batch(own, of_backend("megatron", role)))
        )
        return Apply(f"{config}.{name}", own, nullable(COUNT), convert, note="dp = devices / (TP * PP * CP)")

    def plain(
        name: str,
        short: str,
        takes: Any = BOOL,
        convert: Convert | None = None,
        default: Any = ABSENT,
        note: str = "",
    ) -> Rule:
        return Apply(
            f"{config}.{name}", f"{native}.{short}", takes, when(*chosen, then=convert), default, note
        )

    return (
        sized("tensor_model_parallel_size", "tensor_parallel"),
        sized("pipeline_model_parallel_size", "pipeline_parallel"),
        sized("context_parallel_size", "context_parallel"),
        plain("expert_model_parallel_size", "expert_parallel", nullable(COUNT), null_as(1),
              note="does not enter the batch arithmetic"),
        plain("expert_tensor_parallel_size", "expert_tensor_parallel", nullable(COUNT)),
        plain("virtual_pipeline_model_parallel_size", "virtual_pipeline", nullable(COUNT)),
        plain("sequence_parallel", "sequence_parallel", convert=_sequence_parallel(role),
              note="always on with TP > 1 and EP > 1, as required by Megatron"),
        plain("recompute_granularity", "recompute_granularity", nullable(choice("full", "selective")),
              _recompute(role, native),
              note="only full set: recompute each layer separately (uniform, 1)"),
        plain("recompute_method", "recompute_method", nullable(choice("uniform", "block", "recompute")),
              lambda v, _: "block" if v == "recompute" else v, note="recompute, as in ROLL's list, is block"),
        plain("recompute_num_layers", "recompute_num_layers", nullable(COUNT)),
        plain("moe_layer_recompute", "moe_layer_recompute"),
        plain("moe_token_dispatcher_type", "moe_token_dispatcher", choice("allgather", "alltoall"),
              default="allgather"),
        plain("moe_grouped_gemm", "moe_grouped_gemm", nullable(BOOL), null_as(False)),
        plain("moe_shared_expert_overlap", "moe_shared_expert_overlap"),
        plain("overlap_grad_reduce", "overlap_grad_reduce"),
        plain("overlap_param_gather", "overlap_param_gather", note="not supported by ROLL"),
        plain("use_distributed_optimizer", "distributed_optimizer", default=False),
        plain("ddp_bucket_size", "ddp_bucket_size", nullable(COUNT)),
        plain("ckpt_format", "checkpoint.format", choice("legacy", "torch_dist"),
              mapped({"legacy": "torch", "torch_dist": "torch_dist"})),
        plain("variable_seq_lengths", "transformer.variable_seq_lengths"),
        plain("apply_rope_fusion", "transformer.apply_rope_fusion"),
        plain("bias_activation_fusion", "transformer.bias_activation_fusion"),
        *(
            NoEffect(f"{config}.{name}", ANY, why)
            for name, why in {
                "delay_grad_reduce": "gradients are always reduced after the last micro-batch",
                "accumulate_allreduce_grads_in_fp32": "gradients are always fp32",
                "check_for_nan_in_loss_and_grad": "every step is checked, and skipped if not finite",
                "calculate_per_token_loss": "set by loss_agg_mode",
                "use_flash_attn": "not read by ROLL; use attn_implementation",
                "overlap_p2p_comm": _LAYER_NOTE,
                "sequence_packing": "rows are always packed",
                "save_hf_model": "use training_args.save_hf_model",
                "save_merged_model": "braid export always writes merged weights",
                "async_save_ckpt": "checkpoints are written directly to their final location",
                "ckpt_d2h_non_blocking": "checkpoints are written directly to their final location",
                "compile_warmup": "use braid.train.compile",
                "moe_router_dtype": "the router always computes in fp32",
                "cross_entropy_loss_fusion": "for Megatron's loss only; log-probs are computed from logits",
                "bf16": "overridden by model_args.dtype, as in ROLL",
                "use_batched_model_update": "weights are always sent in buckets of model_update_buffer_size_mb",
            }.items()
        ),
        *(
            Unsupported(f"{config}.{name}", "remove it, or use the keys of braid.train.megatron", default=False)
            for name in (
                "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout",
                "recompute_modules", "moe_aux_loss_coeff", "moe_router_load_balancing_type",
                "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy",
                "moe_enable_routing_replay", "mtp_num_layers", "transformer_impl", "cuda_graph_impl", "cuda_graph_scope", "fp8",
                "fp8_recipe", "fp8_param", "additional_configs", "distrib_optim_fully_reshardable",
                "distrib_optim_fully_reshardable_mem_efficient", "ddp_average_in_collective", "optimizer", "optimizer_cpu_offload",
                "optimizer_offload_fraction",
            )
        ),
    )  # fmt: skip


def _not_file_megatron(role: str) -> Idle:
    return lambda source: (
        ""
        if facts.file_backend(source, role) == "megatron"
        else "for Megatron only; the file's strategy is fsdp2"
    )


def _sequence_parallel(role: str) -> Convert:
    def convert(value: bool, source: Source) -> Any:
        config = f"{role}.{STRATEGY}"
        tensor, expert = (
            source.get(f"{config}.{name}_model_parallel_size") or 1 for name in ("tensor", "expert")
        )
        if tensor == 1:
            return no_effect("for tensor_model_parallel_size above 1 only")
        return value or expert > 1

    return convert


def _recompute(role: str, native: str) -> Convert:
    def convert(value: str | None, source: Source) -> Became:
        made: dict[str, Any] = {f"{native}.recompute_granularity": value or "off"}
        method, layers = f"{role}.{STRATEGY}.recompute_method", f"{role}.{STRATEGY}.recompute_num_layers"
        if value == "full" and source.get(method) is None and source.get(layers) is None:
            made |= {f"{native}.recompute_method": "uniform", f"{native}.recompute_num_layers": 1}
        return Became(made)

    return convert


def _fsdp2(role: str, *idle: Idle) -> tuple[Rule, ...]:
    """The strategy_config keys of fsdp2_train and fsdp2_infer."""
    config, native = f"{role}.{STRATEGY}", f"{facts.NATIVE_TRAIN[role]}.fsdp"
    chosen = (*idle, of_backend("fsdp2", role))
    dtype = choice(*TORCH_DTYPES)

    def size(value: int, source: Source) -> int | None:
        return value if 1 < value < facts.world(source, role) else None

    def offload(value: bool, _: Source) -> Became:
        return Became({f"{native}.cpu_offload": value, f"{native}.pin_memory": value})

    return (
        Apply(f"{config}.fsdp_size", f"{native}.size", INT, when(*chosen, then=size),
              note="values up to 1 mean all devices: a single shard group"),
        Apply(f"{config}.param_dtype", f"{native}.param_dtype", dtype, when(*chosen, then=mapped(TORCH_DTYPES)),
              note="dtype of gathered weights and computation; trained weights stay fp32, while ROLL trains them in this dtype"),
        Apply(f"{config}.reduce_dtype", f"{native}.reduce_dtype", dtype, when(*chosen, then=mapped(TORCH_DTYPES))),
        Apply(f"{config}.reshard_after_forward", f"{native}.reshard_after_forward", nullable(BOOL),
              when(*chosen, then=null_as(True))),
        Apply(f"{config}.offload_policy", f"{native}.cpu_offload", BOOL, when(*chosen, then=offload)),
        Apply(f"{config}.reduce_scatter_during_grad_accumulation", f"{native}.sync_last_micro_batch_only", BOOL,
              when(*chosen, then=opposite), default=True),
        NoEffect(f"{config}.wrap_policy", ANY, "each decoder layer is always wrapped as a unit"),
        NoEffect(f"{config}.save_only_model", BOOL, "checkpoints always contain the whole state"),
        *(
            Unsupported(f"{config}.{name}", "remove it; experts are sharded like other weights", default=default)
            for name, default in {"ep_size": 1, "efsdp_size": 1, "moe_use_grouped_mm": False, "apply_expert_patch": False}.items()
        ),
        *(Unsupported(f"{config}.{name}", "use a lower braid.train.micro_batch_tokens") for name in ("apply_tiled_mlp",
        "tiled_num_shards")),
    )  # fmt: skip


def per_worker(_: Any, source: Source) -> Became:
    engine = facts.engine(source)
    return Became(
        {
            f"rollout.{engine}.tensor_parallel": facts.engine_tensor_parallel(source),
            f"rollout.{engine}.replicas": facts.replicas(source),
        }
    )


def _served(short: str, convert: Convert | None = None) -> Convert:
    """Conversion of a key that both engines have."""

    def converted(value: Any, source: Source) -> Became:
        made = value if convert is None else convert(value, source)
        return Became({f"rollout.{facts.engine(source)}.{short}": made})

    return when(of_engine("vllm", "sglang"), then=converted)


def _engine_keys(engine: str, rows: dict[str, tuple[str, Any, Convert | None]]) -> tuple[Rule, ...]:
    """The strategy_config keys of one engine. `rows`: ROLL's name -> (native name, allowed values,
    conversion)."""
    config = f"actor_infer.{STRATEGY}"
    return tuple(
        Apply(f"{config}.{name}", f"rollout.{engine}.{native}", takes, when(of_engine(engine), then=convert))
        for name, (native, takes, convert) in rows.items()
    )


def _pipeline_parallel(value: int, source: Source) -> Became:
    return Became(
        {f"rollout.{facts.engine(source)}.pipeline_parallel": value} | dict(per_worker(None, source).native)
    )


_CONFIG = f"actor_infer.{STRATEGY}"

ENGINES: tuple[Rule, ...] = (
    # strategy_config of both engines
    Apply(f"{_CONFIG}.load_format", "rollout.vllm.load_weights", choice("dummy", "auto", "safetensors", "pt"),
          _served("load_weights", lambda v, _: v != "dummy"), default="dummy",
          note="dummy: random weights until the first weight sync, which precedes sampling"),
    # vLLM
    *_engine_keys("vllm", {
        "gpu_memory_utilization": ("memory_fraction", _FRACTION, None),
        "block_size": ("block_size", nullable(COUNT), None),
        "max_model_len": ("max_model_tokens", nullable(COUNT), None),
        "tensor_parallel_size": ("tensor_parallel", COUNT, per_worker),
        "pipeline_parallel_size": ("pipeline_parallel", COUNT, _pipeline_parallel),
        "enforce_eager": ("cuda_graphs", BOOL, opposite),
        "enable_prefix_caching": ("prefix_caching", BOOL, None),
        "enable_chunked_prefill": ("chunked_prefill", BOOL, None),
        "max_num_batched_tokens": ("prefill_tokens", COUNT, None),
        "disable_log_stats": ("log_stats", BOOL, opposite),
        "distributed_executor_backend": ("executor", choice("mp", "ray", "uni"), None),
    }),
    Apply(f"{_CONFIG}.max_num_seqs", "rollout.vllm.max_running", COUNT, when(of_engine("vllm"), _running_said := (
        lambda s: "overridden by max_running_requests" if "max_running_requests" in s.values else "")),
        note="max_running_requests takes precedence"),
    *(
        NoEffect(f"{_CONFIG}.{name}", ANY, why)
        for name, why in {
            "disable_custom_all_reduce": "vLLM's default is used",
            "sleep_level": "a sleeping engine always releases weights and cache",
            "logprobs_mode": "log-probs are always those of the sampling distribution",
            "swap_space": "vLLM's default is used",
            "optimization_level": "vLLM's default is used; see enforce_eager",
            "cuda_graph_sizes": "vLLM's default is used; see enforce_eager",
            "cudagraph_capture_sizes": "vLLM's default is used; see enforce_eager",
            "disable_mm_preprocessor_cache": "prompts are text only",
            "seed": "the run's seed is used",
            "enable_memory_saver": "a sleeping engine always releases weights and cache",
            "grpc_mode": "the engine runs inside the run",
        }.items()
    ),
    *(
        Unsupported(f"{_CONFIG}.{name}", "remove it, or start servers and list them in braid.rollout.vllm.servers")
        for name in ("data_parallel_size", "quantization", "online_quantization", "online_quantization_config.*", "speculative_config", "dp_size", "ep_size", "enable_expert_parallel")
    ),
    # SGLang
    *_engine_keys("sglang", {
        "mem_fraction_static": ("memory_fraction", _FRACTION, None),
        "tp_size": ("tensor_parallel", COUNT, per_worker),
        "pp_size": ("pipeline_parallel", COUNT, _pipeline_parallel),
        "context_length": ("max_model_tokens", nullable(COUNT), None),
        "attention_backend": ("attention", nullable(TEXT), None),
        "disable_cuda_graph": ("cuda_graphs", BOOL, opposite),
        "cuda_graph_max_bs": ("cuda_graph_max_batch", nullable(COUNT), None),
        "disable_radix_cache": ("prefix_caching", BOOL, opposite),
        "chunked_prefill_size": ("prefill_tokens", COUNT, None),
        "enable_torch_compile": ("torch_compile", BOOL, None),
        "torch_compile_max_bs": ("torch_compile_max_batch", COUNT, None),
        "decode_log_interval": ("decode_log_interval", COUNT, None),
        "max_running_requests": ("max_running", COUNT, when(_running_said)),
    }),
)  # fmt: skip
