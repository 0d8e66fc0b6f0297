"""The config language of SkyRL: all its tables, and the spellings of later releases.

The meaning of a key is that of the first release's documentation. Names changed since are aliases, and keys
added since have rules too. Where a default changed, the first release's applies: a file that relies on the
default of a later release must set it explicitly (docs/dialects.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from .compat import Dialect, table
from .skyrl_algorithm import ALGORITHM
from .skyrl_checks import CHECKS
from .skyrl_generator import GENERATOR
from .skyrl_models import MODELS
from .skyrl_trainer import TRAINER, base

_ENGINE_KEYS = (
    "model_dtype",
    "run_engines_locally",
    "backend",
    "weight_sync_backend",
    "override_existing_update_group",
    "weight_transfer_threshold_cuda_ipc_GB",
    "async_engine",
    "vllm_v1_disable_multiproc",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "max_num_batched_tokens",
    "max_num_seqs",
    "enforce_eager",
    "gpu_memory_utilization",
)
"""Keys that moved from `generator` to `generator.inference_engine` under the same name."""

ALIASES: Mapping[str, str] = {
    "trainer.remove_microbatch_padding": "trainer.use_sample_packing",
    "trainer.algorithm.policy_loss_type": "trainer.algorithm.ppo_loss_type",
    "trainer.algorithm.overlong_buffer.len": "trainer.algorithm.overlong_buffer_len",
    "trainer.algorithm.overlong_buffer.penalty_factor": "trainer.algorithm.overlong_buffer_penalty_factor",
    "generator.inference_engine.num_engines": "generator.num_inference_engines",
    "generator.inference_engine.external_server_urls": "generator.remote_inference_engine_urls",
    **{
        f"generator.inference_engine.{size}_parallel_size": f"generator.inference_engine_{size}_parallel_size"
        for size in ("tensor", "pipeline", "data", "expert")
    },
    **{f"generator.inference_engine.{key}": f"generator.{key}" for key in _ENGINE_KEYS},
}


SKYRL = Dialect(
    name="skyrl",
    title="SkyRL",
    marks=frozenset(["trainer", "generator", "data", "deepspeed_config", "environment"]),
    rules=table(*TRAINER, *MODELS, *ALGORITHM, *GENERATOR),
    base=base,
    places={},
    checks=CHECKS,
    aliases=ALIASES,
)
