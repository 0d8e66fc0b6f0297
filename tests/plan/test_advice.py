"""The changes that a plan names, against plans with these values."""

from __future__ import annotations

from braid.config.load import load_config
from braid.plan import resolve
from braid.plan.advice import Change, changes
from braid.plan.memory import plan_memory

BASE = [
    "model.build={num_layers: 3}",
    "run={max_rounds: 10, device: cpu}",
    "data.train=[{kind: procedural, generator: chain_sum, size: 100}]",
    "reward.parts=[{kind: exact}]",
    "rollout.engine.max_running=8",
]


def peak(*overrides: str) -> int:
    config = load_config(None, [*BASE, *overrides]).config
    return max(device.peak for device in plan_memory(config, resolve(config, num_gpus=0)))


def advised(*overrides: str) -> list[Change]:
    config = load_config(None, [*BASE, *overrides]).config
    return changes(config, resolve(config, num_gpus=0))


def test_each_change_has_the_peak_of_a_plan_with_it() -> None:
    advice = advised()
    assert len(advice) == 3
    assert all(change.before == peak() for change in advice)
    assert [change.after for change in advice] == sorted(change.after for change in advice)
    by_key = {change.key: change for change in advice}
    assert by_key["train.gradient_checkpointing"].after == peak("train.gradient_checkpointing=true")


def test_a_change_that_is_made_already_is_not_named() -> None:
    advice = advised("train.gradient_checkpointing=true")
    assert "train.gradient_checkpointing" not in {change.key for change in advice}


def test_changes_that_save_next_to_nothing_are_not_named() -> None:
    """A model of a few thousand parameters: the process itself is nearly all."""
    tiny = ["model.build={hidden_size: 16, intermediate_size: 16, num_layers: 1, num_heads: 1}"]
    tiny += ["model.build.num_kv_heads=1", "model.build.head_dim=16", "rollout.prompts_per_round=1"]
    tiny += ["rollout.group_size=2", "rollout.sampling.max_new_tokens=8", "data.max_prompt_tokens=8"]
    assert advised(*tiny) == []
