"""Which changes of keys would help a run most, each found by planning the run with that key changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from braid.config.backends import LoraConfig
from braid.config.schema import RunConfig
from braid.errors import ConfigError

from .memory import plan_memory
from .plan import Plan
from .repair import with_values
from .resolve import resolve

_LEAST_SAVED = 0.01
"""Changes that save a smaller part of the peak are not worth naming."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key with another value: the peak of the fullest device before and after it, in bytes, and what else
    changes."""

    key: str
    value: Any
    before: int
    after: int
    cost: str


def changes(config: RunConfig, plan: Plan, *, capacity: int | None = None, most: int = 3) -> list[Change]:
    """The changes that save most memory where most is needed, at most `most` of them. Each is planned in
    full, and left out if its config could not run."""
    devices = plan_memory(config, plan, capacity=capacity)
    if not devices:
        return []
    before = max(device.peak for device in devices)
    helpful: list[Change] = []
    for key, value, cost in _candidates(config, plan):
        changed = with_values(config, {key: value})
        try:
            planned = resolve(changed, plan.num_prompts, verb=plan.verb, num_gpus=_num_gpus(plan))
        except ConfigError:
            continue
        after = max(device.peak for device in plan_memory(changed, planned, capacity=capacity))
        if before - after >= _LEAST_SAVED * before:
            helpful.append(Change(key, value, before, after, cost))
    return sorted(helpful, key=lambda change: change.after)[:most]


def _num_gpus(plan: Plan) -> int:
    return plan.layout.num_nodes * plan.layout.devices_per_node if plan.layout.has_gpus else 0


def _candidates(config: RunConfig, plan: Plan) -> Iterator[tuple[str, Any, str]]:
    """(key, value, what else it changes) of the changes that are tried."""
    train, engine = config.train, config.rollout.engine
    same = "same results up to rounding"
    yield "train.micro_batch_tokens", max(1, train.micro_batch_tokens // 2), same
    yield "train.gradient_checkpointing", True, f"{same}, a third more time in updates"
    yield "train.logprob_chunk_bytes", max(1, train.logprob_chunk_bytes // 4), same
    if config.critic.train is not None:
        yield "critic.train.micro_batch_tokens", max(1, config.critic.train.micro_batch_tokens // 2), same
        yield "critic.train.gradient_checkpointing", True, f"{same}, a third more time in its updates"
    if config.model.dtype == "fp32":
        yield "model.dtype", "bf16", "results differ: products in 8 bits of precision, fp32 master weights"
        if not plan.layout.has_gpus:
            yield "train.autocast", "bf16", "results differ: products in 8 bits of precision"
    if config.model.lora is None and not config.model.kind.is_robot:
        yield "model.lora", LoraConfig(rank=32), "trains adapters of rank 32 in place of all weights"
    for name in ("weights", "optimizer"):
        yield f"train.offload.{name}", True, "same results, more time: it is copied in each round"
    yield "rollout.engine.max_running", max(1, engine.max_running // 2), f"{same}, a slower rollout"
    budget = engine.kv_budget(has_gpus=plan.layout.has_gpus)
    if budget is not None and "kv_budget_tokens" in type(engine).model_fields:
        yield "rollout.engine.kv_budget_tokens", max(1, budget // 2), f"{same}, a slower rollout"
    if (fraction := getattr(engine, "memory_fraction", None)) is not None:
        yield "rollout.engine.memory_fraction", round(fraction / 2, 2), "fewer sequences at a time"
    prompts = config.rollout.prompts_per_round
    yield "rollout.prompts_per_round", max(1, prompts // 2), "half the trajectories in a round"
