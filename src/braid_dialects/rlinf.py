"""RLinf's config language.

rlinf_facts.py      properties of a file as a whole, and conditions on them
rlinf_run.py        hydra, cluster, runner, data, reward, critic
rlinf_algorithm.py  algorithm
rlinf_rollout.py    rollout, inference, env
rlinf_robots.py     robot policies, and what braid lacks of robots
rlinf_actor.py      actor
rlinf_evaluation.py evaluations of robot policies, whose keys are elsewhere
rlinf_checks.py     constraints between keys
rlinf_sft.py        supervised fine-tuning of language models
rlinf_sac.py        soft actor-critic of small robot policies
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import (
    rlinf_actor,
    rlinf_agents,
    rlinf_algorithm,
    rlinf_evaluation,
    rlinf_robots,
    rlinf_rollout,
    rlinf_run,
    rlinf_sac,
    rlinf_sft,
)
from . import rlinf_facts as facts
from .rlinf_checks import CHECKS
from .rows import rows
from .table import Dialect, Source, table

_RULES = table(
    rows(
        rlinf_run.RULES,
        rlinf_algorithm.RULES,
        rlinf_rollout.RULES,
        rlinf_robots.RULES,
        rlinf_actor.RULES,
        rlinf_agents.RULES,
    )
)
_ALIASES = {
    "rollout.model_dir": "rollout.model.model_path",
    "rollout.model_arch": "rollout.model.model_type",
    "rollout.precision": "rollout.model.precision",
    "rollout.generation_backend": "rollout.backend",
    "actor.fsdp_config.amp.enabled": "actor.fsdp_config.amp_autocast.enabled",
    "actor.fsdp_config.amp.precision": "actor.fsdp_config.amp_autocast.precision",
    "actor.fsdp_config.amp.use_grad_scaler": "actor.fsdp_config.grad_scaler.enabled",
    "actor.checkpoint_load_path": "actor.model.megatron_checkpoint",
    "actor.model.model_name": "actor.model.model_type",
    "algorithm.eval_rollout_epoch": "env.eval.rollout_epoch",
    "runner.eval_policy_path": "runner.ckpt_path",
    "algorithm.recompute_logprobs": "rollout.recompute_logprobs",
    "agentloop.print_outputs": "rollout.print_outputs",
    "rollout.sglang.attention_backend": "rollout.attention_backend",
    "rollout.sglang.decode_log_interval": "rollout.sglang_decode_log_interval",
    "rollout.sglang.use_torch_compile": "rollout.use_torch_compile",
    "rollout.sglang.torch_compile_max_bs": "rollout.torch_compile_max_bs",
    **{f"env.{role}.simulator_type": f"env.{role}.env_type" for role in ("train", "eval")},
    **{
        path.replace(".ckpt.", ".ckpt_convertor."): path
        for path in _RULES
        if path.startswith("actor.megatron.ckpt.")
    },
}

_SAC = (
    "SAC of vision-language-action and other large policies, and DAgger; use actor.model.model_type=mlp_policy, or "
    "adv_type=gae with loss_type=actor_critic, or grpo"
)
_ABSENT: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "runner.task_type": (
        "supervised fine-tuning of robot policies, offline training and online training from code editors are not "
        "read; for fine-tuning write a config with sft.demonstrations (braid sft)",
        lambda v: v in ("sft", "offline", "coding_online_rl"),
    ),
    "algorithm.adv_type": (_SAC, lambda v: v in ("embodied_dagger", *rlinf_sac.ADV_TYPES)),
}


def _base(source: Source) -> dict[str, Any]:
    """Derive the number of engine replicas, the maximum response length if the file does not set it, and the
    critic's settings."""
    native: dict[str, Any] = rlinf_agents.base(source)
    engine = facts.engine(source)
    if engine != "native" and facts.devices_of(source, "rollout") is not None:
        native["rollout.engine.replicas"] = facts.replicas(source)
    whole, prompt = source["runner.seq_length"], source["data.max_prompt_length"]
    if not facts.is_robots(source) and whole is not None and prompt is not None and whole > prompt:
        native["rollout.sampling.max_new_tokens"] = whole - prompt
    if facts.is_robots(source):
        native |= rlinf_robots.base(source)
    return native | rlinf_run.critic_settings(source)[0]


_SFT = rlinf_sft.dialect(_ALIASES)


def _of_file(dialect: Dialect, values: Mapping[str, Any], version: str | None) -> Dialect:
    """Supervised fine-tuning of language models, soft actor-critic and evaluations of robots have their own
    tables."""
    named = {dialect.name_of(path): value for path, value in values.items()}
    if rlinf_sft.is_supervised(named):
        return _SFT
    if rlinf_sac.is_sac(named):
        dialect = rlinf_sac.dialect(dialect)
    return rlinf_evaluation.of_file(dialect, values, version)


RLINF = Dialect(
    name="rlinf",
    title="RLinf",
    rules=_RULES,
    base=_base,
    places={
        "engine": facts.engine,
        "backend": facts.backend,
        "sinks": rlinf_run.sinks,
        "given": rlinf_run.given_sources,
        "kl_in": lambda s: ["algorithm.kl_in"] if s["algorithm.kl_beta"] else [],
        "scaler": lambda s: ["train.backend"] if facts.backend(s) == "megatron" else [],
    },
    checks=CHECKS,
    aliases=_ALIASES,
    absent=_ABSENT,
    of_file=_of_file,
    others=(_SFT,),
)
