"""SkyRL's versions: which one a file is for, and the defaults that have changed.

The table has the defaults of the documentation of June 2025, before the first release, which is `skyrl@0.0`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from .table import Dialect

VERSIONS = ("0.0", "0.1", "0.2", "0.3", "0.4", "0.5")
_AT = "trainer.algorithm"
_SINCE: dict[str, dict[str, Any]] = {
    **{f"trainer.placement.{role}_num_gpus_per_node": {"0.4": 1} for role in ("policy", "critic", "ref")},
    "generator.inference_engine_tensor_parallel_size": {"0.4": 1},
    "generator.batched": {"0.1": False},
    "generator.use_conversation_multi_turn": {"0.1": True},
    "generator.eval_sampling_params.temperature": {"0.1": 0.0},
    "generator.enforce_eager": {"0.3": True, "0.5": False},
    "trainer.strategy": {"0.5": "fsdp"},
    "trainer.ref.fsdp_config.cpu_offload": {"0.2": False},
    f"{_AT}.loss_reduction": {"0.1": "token_mean"},
    f"{_AT}.cispo.cispo_eps_clip_low": {"0.3": 0.0, "0.5": 1.0},
    f"{_AT}.cispo.cispo_eps_clip_high": {"0.3": 5.0, "0.5": 4.0},
}
"""Key -> version from which on it has a default -> that default."""
_MARKS: dict[str, tuple[str, ...]] = {
    "0.5": ("generator.inference_engine", "trainer.remove_microbatch_padding", f"{_AT}.dppo"),
    "0.4": (
        f"{_AT}.off_policy_correction", f"{_AT}.sapo", f"{_AT}.zero_variance_filter", "generator.external_proxy_url",
    ),
    "0.3": ("trainer.fully_async", f"{_AT}.cispo", "trainer.rope_scaling"),
    "0.2": ("generator.engine_init_kwargs", "trainer.policy.model.lora", f"{_AT}.clip_cov"),
    "0.1": (f"{_AT}.normalize_reward", "trainer.reward", "trainer.use_orm_score"),
}  # fmt: skip
"""Version -> keys or sections that it was the first to have, or for 0.1 the last."""
_OLD_LAYOUT = (
    "defaults", "deepspeed_config", "generator.backend", "generator.num_inference_engines",
    "generator.inference_engine_tensor_parallel_size", "generator.gpu_memory_utilization", "generator.run_engines_locally",
    "generator.weight_sync_backend", "generator.async_engine", "generator.remote_inference_engine_urls",
    *_MARKS["0.1"],
)  # fmt: skip
"""Keys that 0.5 no longer has."""


def of_file(dialect: Dialect, values: Mapping[str, Any], version: str | None) -> Dialect:
    """SkyRL's dialect in the version that is given, or that the file's keys tell."""
    why = "set by --dialect"
    if version is None:
        version, why = _told(values)
    rules = dict(dialect.rules)
    for path, since in _SINCE.items():
        newest = [default for first, default in since.items() if first <= version]
        if newest:
            rules[path] = replace(rules[path], default=newest[-1])
    return replace(dialect, rules=rules, version=version, version_from=why)


def _told(paths: Collection[str]) -> tuple[str, str]:
    """The version that keys tell, and how. A file that is not of the old layout is 0.5's, where scripts set
    what they change."""
    sections = {".".join(path.split(".")[:end]) for path in paths for end in range(1, path.count(".") + 2)}
    is_old = any(key in sections for key in _OLD_LAYOUT)
    for version, marks in _MARKS.items():
        if (is_old or version == "0.5") and (mark := next((key for key in marks if key in sections), None)):
            return version, f"told by {mark}"
    which = "no key tells which; --dialect skyrl@VERSION sets another"
    return ("0.4", f"the last with this layout, {which}") if is_old else ("0.5", f"the newest, {which}")
