"""The config language of SkyRL: all its tables, and the spellings of later releases.

The meaning of a key is that of the first release's documentation. Names changed since are aliases, and keys
added since have rules too. Defaults are those of the file's version (skyrl_versions.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import skyrl_facts as facts
from . import skyrl_versions
from .rows import rows
from .skyrl_algorithm import ALGORITHM
from .skyrl_generator import GENERATOR
from .skyrl_sft import SKYRL_SFT, is_supervised
from .skyrl_trainer import TRAINER
from .table import Dialect, Source, table

_ENGINE_KEYS = (
    "model_dtype run_engines_locally backend weight_sync_backend override_existing_update_group "
    "weight_transfer_threshold_cuda_ipc_GB async_engine vllm_v1_disable_multiproc enable_prefix_caching "
    "enable_chunked_prefill max_num_batched_tokens max_num_seqs enforce_eager gpu_memory_utilization"
)
"""Keys that moved from `generator` to `generator.inference_engine` under the same name."""


def _aliases() -> dict[str, str]:
    algorithm, old, new = "trainer.algorithm", "generator", "generator.inference_engine"
    return {
        "trainer.remove_microbatch_padding": "trainer.use_sample_packing",
        f"{algorithm}.policy_loss_type": f"{algorithm}.ppo_loss_type",
        f"{algorithm}.overlong_buffer.len": f"{algorithm}.overlong_buffer_len",
        f"{algorithm}.overlong_buffer.penalty_factor": f"{algorithm}.overlong_buffer_penalty_factor",
        f"{new}.num_engines": f"{old}.num_inference_engines",
        f"{new}.external_server_urls": f"{old}.remote_inference_engine_urls",
        **{
            f"{new}.{kind}_parallel_size": f"{new}_{kind}_parallel_size"
            for kind in ("tensor", "pipeline", "data", "expert")
        },
        **{f"{new}.{key}": f"{old}.{key}" for key in _ENGINE_KEYS.split()},
    }


def _base(source: Source) -> dict[str, Any]:
    """Settings common to all files: rows in rollout order, all roles on the chosen backend, paths relative to
    the working directory."""
    out: dict[str, Any] = {"run.base_dir": str(Path.cwd())}
    out |= {f"{path}.shuffle": False for path in facts.trained(source)}
    if facts.has_turns(source):
        out |= {"env.kind": "agent", "env.name": "skyrl_gym"}
        if source["environment.env_class"] not in facts.EXAMPLES:
            out["env.kwargs.id_key"] = "env_class"
        out["env.kwargs.max_turns"] = source["generator.max_turns"]
    if source["trainer.eval_interval"] <= 0:
        out["eval.before"] = False
    if source.backend is not None:
        out |= {f"{path}.backend.kind": source.backend for path in facts.models(source)}
    return out


def _of_file(dialect: Dialect, values: Mapping[str, Any], version: str | None) -> Dialect:
    """Supervised fine-tuning has its own table; others are of a version."""
    return SKYRL_SFT if is_supervised(values) else skyrl_versions.of_file(dialect, values, version)


SKYRL = Dialect(
    name="skyrl",
    title="SkyRL",
    rules=table(rows(TRAINER, ALGORITHM, GENERATOR)),
    base=_base,
    places={
        "engine": facts.engine,
        "backend": facts.backend,
        "train": lambda s: facts.TRAIN[facts.role_of(s)],
        "trained": facts.trained,
        "models": facts.models,
        "tracker": lambda s: s["trainer.logger"],
        "trackers": lambda s: [
            f"report.{tracker}" for tracker in ("wandb", "swanlab") if tracker == s["trainer.logger"]
        ],
        "sampling": lambda s: "eval.sampling" if ".eval_sampling_params." in s.at else "rollout.sampling",
    },
    aliases=_aliases(),
    of_file=_of_file,
    others=(SKYRL_SFT,),
    versions=skyrl_versions.VERSIONS,
)
