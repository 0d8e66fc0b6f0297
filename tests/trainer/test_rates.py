"""Rates that `braid plan --measure` takes from short runs of a model's steps and samples."""

from __future__ import annotations

from dataclasses import asdict

from braid.config.load import load_config
from braid.plan import resolve
from braid.plan.times import Lengths, Rates
from braid.trainer.rates import _extended, measure

BASE = [
    "model.build={hidden_size: 32, intermediate_size: 48, num_heads: 2, num_kv_heads: 1, head_dim: 16}",
    "run={max_rounds: 10, device: cpu, num_threads: 1}",
    "data.train=[{kind: procedural, generator: chain_sum, size: 100}]",
    "reward.parts=[{kind: exact}]",
    "rollout={prompts_per_round: 2, group_size: 2}",
]


def test_every_rate_of_a_deep_model_is_measured() -> None:
    config = load_config(None, [*BASE, "model.build.num_layers=6", "model.lora={rank: 2}"]).config
    rates = measure(config, resolve(config, num_gpus=0), Lengths(8, 24))
    assert rates.running == 4
    assert all(value is not None for value in asdict(rates).values())
    assert rates.train_token_s > 0 < rates.infer_token_s
    assert rates.disk_bytes_per_s > 0 < rates.copy_bytes_per_s


def test_depths_are_extended_in_a_straight_line() -> None:
    few = Rates(2.0, 1.0, 1.0, 8, 0.5, 0.1, 100.0, 10.0)
    more = Rates(3.0, 1.0, 1.5, 8, 1.0, 0.2, 100.0, 10.0)
    deep = _extended(few, more, 10)
    assert (deep.train_token_s, deep.infer_token_s, deep.prefill_s) == (6.0, 3.0, 2.5)
    assert (deep.running, deep.step_s, deep.disk_bytes_per_s) == (8, 1.0, 10.0)
