"""RLinf's config language: tables of its keys, by topic.

rlinf_facts.py      properties of a file as a whole
rlinf_run.py        hydra, cluster, runner, data, reward, critic
rlinf_algorithm.py  algorithm
rlinf_rollout.py    rollout, inference
rlinf_actor.py      actor
rlinf_embodied.py   env, and robot policies
rlinf_checks.py     constraints between keys
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from . import rlinf_actor, rlinf_algorithm, rlinf_embodied, rlinf_rollout, rlinf_run
from . import rlinf_facts as facts
from .compat import ABSENT, Dialect, Source, become, table
from .rlinf_checks import CHECKS

_RULES = table(
    *rlinf_run.RULES,
    *rlinf_algorithm.RULES,
    *rlinf_rollout.RULES,
    *rlinf_actor.RULES,
    *rlinf_embodied.RULES,
)


def _aliases() -> Iterator[tuple[str, str]]:
    """Yield (other spelling, the table's spelling)."""
    yield "rollout.model_dir", "rollout.model.model_path"
    yield "rollout.model_arch", "rollout.model.model_type"
    yield "rollout.precision", "rollout.model.precision"
    yield "actor.fsdp_config.amp.enabled", "actor.fsdp_config.amp_autocast.enabled"
    yield "actor.fsdp_config.amp.precision", "actor.fsdp_config.amp_autocast.precision"
    yield "actor.fsdp_config.amp.use_grad_scaler", "actor.fsdp_config.grad_scaler.enabled"
    yield "actor.checkpoint_load_path", "actor.model.megatron_checkpoint"
    yield "actor.model.max_prompt_length", "runner.max_prompt_length"
    yield "algorithm.recompute_logprobs", "rollout.recompute_logprobs"
    yield "agentloop.print_outputs", "rollout.print_outputs"
    yield "rollout.sglang.attention_backend", "rollout.attention_backend"
    yield "rollout.sglang.decode_log_interval", "rollout.sglang_decode_log_interval"
    yield "rollout.sglang.use_torch_compile", "rollout.use_torch_compile"
    yield "rollout.sglang.torch_compile_max_bs", "rollout.torch_compile_max_bs"
    for role in ("train", "eval"):
        yield f"env.{role}.simulator_type", f"env.{role}.env_type"
        yield f"env.{role}.enable_offload", "env.enable_offload"
    for path in _RULES:
        if path.startswith("actor.megatron.ckpt."):
            yield path.replace(".ckpt.", ".ckpt_convertor."), path


def _base(source: Source) -> Mapping[str, Any]:
    """Derive the number of engine replicas, the maximum response length if the file does not set it, and the
    critic's settings."""
    native: dict[str, Any] = {}
    engine = facts.engine(source)
    devices = facts.devices_of(source, "rollout")
    if engine != "native" and devices is not None:
        native[f"rollout.{engine}.replicas"] = max(1, len(devices.numbers) // facts.engine_parallel(source))
    whole, prompt = source.get("runner.seq_length"), source.get("data.max_prompt_length")
    if not facts.is_robots(source) and whole is not None and prompt is not None and whole > prompt:
        native["rollout.sampling.max_new_tokens"] = whole - prompt
    return native | _critic(source)


def _critic(source: Source) -> dict[str, Any]:
    """Return all training settings of a critic with its own settings; the actor's are the defaults."""
    known = [
        key for key in source.values if key.startswith(("critic.optim.", "critic.model.", "critic.lr_sched."))
    ]
    if not facts.has_critic(source) or not set(known) - {"critic.model.model_path"}:
        return {}
    view, native = rlinf_run.critic_view(source), dict[str, Any]()
    for path, rule in _RULES.items():
        has_value = path in view.values or (rule.disposition == "applied" and rule.default is not ABSENT)
        if rule.disposition == "applied" and has_value and "*" not in path and not path.startswith("critic."):
            native |= become(rule, view.get(path), replace(view, at=path)).native
    chosen = {} if source.backend is None else {"critic.train.backend": source.backend}
    return rlinf_run.of_critic(native) | chosen


RLINF = Dialect(
    name="rlinf",
    title="RLinf",
    marks=frozenset(
        [
            "cluster",
            "runner",
            "algorithm",
            "actor",
            "rollout",
            "critic",
            "reward",
            "inference",
            "env",
            "hydra",
            "defaults",
        ]
    ),
    rules=_RULES,
    base=_base,
    places={},
    checks=CHECKS,
    aliases=dict(_aliases()),
)
