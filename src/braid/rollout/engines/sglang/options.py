"""Converts the settings of SGLang to the arguments of sglang.launch_server."""

from __future__ import annotations

from braid.rollout.engines.base import Model

from .kind import Sglang

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def server_arguments(config: Sglang, model: Model) -> list[str]:
    """Arguments of `python -m sglang.launch_server`, except for its address."""
    values = {
        "--model-path": model.folder,
        "--tokenizer-path": model.tokenizer,
        "--dtype": _DTYPES[model.dtype if config.dtype == "auto" else config.dtype],
        "--load-format": "auto" if config.load_weights else "dummy",
        "--context-length": config.max_model_tokens or model.longest,
        "--max-running-requests": config.max_running,
        "--mem-fraction-static": config.memory_fraction,
        "--max-prefill-tokens": config.prefill_tokens,
        "--chunked-prefill-size": config.prefill_tokens if config.chunked_prefill else -1,
        "--tp-size": config.tensor_parallel,
        "--pp-size": config.pipeline_parallel,
        "--decode-log-interval": config.decode_log_interval,
        "--random-seed": model.seed,
        "--cuda-graph-max-bs": config.cuda_graph_max_batch,
        "--attention-backend": config.attention,
        "--torch-compile-max-bs": config.torch_compile_max_batch if config.torch_compile else None,
    }
    flags = {
        "--enable-deterministic-inference": config.deterministic,
        "--trust-remote-code": model.trust_remote_code,
        "--disable-cuda-graph": not config.cuda_graphs,
        "--disable-radix-cache": not config.prefix_caching,
        "--enable-torch-compile": config.torch_compile,
        "--enable-memory-saver": model.sleeps,
        "--enable-weights-cpu-backup": model.sleeps,
    }
    arguments = [word for name, value in values.items() if value is not None for word in (name, str(value))]
    return arguments + [name for name, is_on in flags.items() if is_on]
