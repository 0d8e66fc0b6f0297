"""Converts the settings of vLLM to the arguments of vLLM's EngineArgs."""

from __future__ import annotations

import os
from typing import Any

import torch

from braid.rollout.engines.base import Model

from .kind import Vllm

EXTENSION = "braid.rollout.engines.vllm.process.WeightReceiver"
"""The class that vLLM's workers need to receive weights (`worker_extension_cls`)."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def engine_arguments(config: Vllm, model: Model, *, on_gpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs.

    Log-probs are those of the distribution sampled from; the folder's generation_config.json is ignored.
    """
    max_tokens = config.max_model_tokens or model.longest
    arguments: dict[str, Any] = {
        "model": model.folder,
        "tokenizer": model.tokenizer,
        "trust_remote_code": model.trust_remote_code,
        "dtype": _DTYPES[model.dtype if config.dtype == "auto" else config.dtype],
        "load_format": "auto" if config.load_weights else "dummy",
        "max_model_len": max_tokens,
        "max_num_seqs": config.max_running,
        # Without chunked prefill, a batch must hold a whole prompt.
        "max_num_batched_tokens": config.prefill_tokens
        if config.chunked_prefill
        else max(config.prefill_tokens, max_tokens),
        "gpu_memory_utilization": config.memory_fraction,
        "enforce_eager": not (config.cuda_graphs and on_gpu),
        "enable_prefix_caching": config.prefix_caching,
        "enable_chunked_prefill": config.chunked_prefill,
        "tensor_parallel_size": config.tensor_parallel,
        "pipeline_parallel_size": config.pipeline_parallel,
        # A single worker needs no separate process or actor.
        "distributed_executor_backend": config.executor
        if config.tensor_parallel * config.pipeline_parallel > 1
        else "uni",
        "disable_log_stats": not config.log_stats,
        "enable_sleep_mode": model.sleeps and on_gpu,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "seed": model.seed,
        "worker_extension_cls": EXTENSION,
    }
    if config.cuda_graph_max_batch is not None:
        arguments["max_cudagraph_capture_size"] = config.cuda_graph_max_batch
    if config.block_size is not None:
        arguments["block_size"] = config.block_size
    if config.attention is not None:
        arguments["attention_backend"] = config.attention
    if model.vision is not None:
        arguments |= {
            "mm_device_do_normalize": False,  # it is done
            "mm_processor_cache_gb": 0.0,  # every request has its pixels
            "skip_mm_profiling": True,  # vLLM's own processors would make the images
        }
    return arguments


def threads() -> dict[str, str]:
    """As many CPU threads for an engine's processes as this one has."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": f"{torch.get_num_threads()}"}


def environment(config: Vllm) -> dict[str, str]:
    """Environment variables of the process that runs vLLM."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if config.in_process else "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # Otherwise vLLM binds threads to cores that the trainer also uses.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def receiver_name(engine: str, rank: int) -> str:
    """Name by which a weight sender addresses a worker of an engine."""
    return f"{engine} rank {rank}"
