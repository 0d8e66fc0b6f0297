"""Training keys in whole tiny runs: their output, and results that they must not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from braid.checkpoint.store import CheckpointStore
from braid.trainer import commands

from .conftest import LoadTiny

pytestmark = pytest.mark.slow

PPO = ("algorithm.recipe=ppo", "train.passes_per_round=2", "algorithm.kl_coef=0.01")


def _lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _state(run: Path) -> dict[str, Any]:
    return CheckpointStore(run / "checkpoints").locate()[2]


def _weights(run: Path, role: str = "policy") -> dict[str, torch.Tensor]:
    return _state(run)[role]["weights"]


def _train(load_tiny: LoadTiny, name: str, *overrides: str) -> Path:
    return commands.train(load_tiny(f"run.name={name}", *overrides)).run_dir


def _assert_equal(one: Path, other: Path, *, atol: float = 0.0, role: str = "policy") -> None:
    ours, theirs = _weights(one, role), _weights(other, role)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "keys",
    [
        ("train.micro_batch_rows=3",),
        ("train.infer_batch_rows=5", "train.infer_batch_tokens=16"),
        ("model.attention=eager",),
    ],
)
def test_how_rows_are_computed_changes_weights_only_by_rounding(
    load_tiny: LoadTiny, keys: tuple[str, ...]
) -> None:
    plain = _train(load_tiny, "plain", *PPO, "run.max_rounds=1")
    other = _train(load_tiny, "other", *PPO, "run.max_rounds=1", *keys)
    # fp32 sums in another order, through two AdamW steps of rate 3e-3
    _assert_equal(other, plain, atol=1e-4)
    _assert_equal(other, plain, atol=1e-4, role="critic")


def test_measurement_and_offloading_change_no_bit(load_tiny: LoadTiny) -> None:
    plain = _train(load_tiny, "plain", *PPO)
    other = _train(
        load_tiny,
        "other",
        *PPO,
        "train.count_flops=true",
        "train.record_memory=true",
        "train.offload={weights: true, gradients: true, optimizer: true}",
    )
    _assert_equal(other, plain)
    _assert_equal(other, plain, role="critic")


def test_rates_of_operations_are_reported_for_what_was_done(load_tiny: LoadTiny) -> None:
    run = _train(load_tiny, "run", *PPO, "train.count_flops=true")
    first, *rounds = _lines(run)
    assert not any(name.startswith("flops/") for name in first)
    for line in rounds:
        assert all(line[f"flops/{what}_per_s"] > 0 for what in ("rollout", "infer", "train"))
    simple = _train(load_tiny, "simple", "train.count_flops=true")  # nothing is inferred in it
    assert {name for name in _lines(simple)[1] if name.startswith("flops/")} == {
        "flops/rollout_per_s",
        "flops/train_per_s",
    }


def test_memory_is_recorded_after_each_round(load_tiny: LoadTiny) -> None:
    run = _train(load_tiny, "run", *PPO, "train.record_memory=true")
    files = sorted((run / "memory").iterdir())
    assert [file.name for file in files] == [f"round_{n:06d}.json" for n in range(4)]
    record = json.loads(files[3].read_text())
    held = record["held_bytes"]
    assert set(held) == {"policy", "critic", "reference", "engine"}
    # AdamW holds two numbers for each weight, and a count for each tensor
    assert held["policy"]["optimizer"] >= 2 * held["policy"]["weights"] > 0
    assert held["reference"]["optimizer"] == held["reference"]["gradients"] == 0
    assert held["engine"]["kv_cache"] == 0, "it sleeps between rounds"
    assert {"rollout", "update"} <= set(record["peak_bytes"])


def test_the_schedule_and_the_optimizer_are_those_of_the_config(load_tiny: LoadTiny) -> None:
    optimizer = (
        "train.optimizer={kind: sgd, lr: 0.1, schedule: {decay: linear, decay_steps: 2, warmup_steps: 1, "
        "start_ratio: 0.5, min_ratio: 0.1}}"
    )
    run = _train(load_tiny, "run", optimizer)
    assert [line["policy/lr"] for line in _lines(run)[1:]] == pytest.approx([0.075, 0.1, 0.01])
    assert _state(run)["policy"]["optimizer"] == {}


def test_fp16_runs_report_their_loss_scale_and_keep_it(load_tiny: LoadTiny) -> None:
    scaled = ("train.autocast=fp16", "train.grad_scaler={init_scale: 1.0e9, growth_interval: 2}")
    run = _train(load_tiny, "run", *scaled, "run.max_rounds=6")
    lines = _lines(run)[1:]
    assert lines[0]["policy/loss_scale"] == 1e9
    assert sum(line["policy/overflow_steps"] for line in lines) > 0
    assert all(line["policy/skipped_steps"] == 0 for line in lines)
    last = _state(run)["policy"]["loss_scale"]
    assert last["value"] < 1e9
    common = (*scaled, "checkpoint.every_rounds=1")
    _train(load_tiny, "parts", *common, "run.max_rounds=4")
    parts = _train(load_tiny, "parts", *common, "run.max_rounds=6", "run.resume=latest")
    assert _state(parts)["policy"]["loss_scale"] == last


def test_a_critic_learns_and_restores_the_moments_of_returns(load_tiny: LoadTiny) -> None:
    keys = (
        *PPO,
        "critic={normalize_values: true, head_name: score}",
        "train.optimizer.value_lr=0.01",
        "checkpoint.every_rounds=1",
    )
    whole = _train(load_tiny, "whole", *keys)
    weights = _weights(whole, "critic")
    assert {"score.weight", "score.bias", "score.moments"} <= weights.keys()
    mean, square, gathered = weights["score.moments"].tolist()
    assert 0 < mean / gathered < 1  # rewards are 0 or 1, less a little KL
    assert mean / gathered == pytest.approx(square / gathered, rel=0.3)
    _train(load_tiny, "parts", *keys, "run.max_rounds=2")
    parts = _train(load_tiny, "parts", *keys, "run.resume=latest")
    _assert_equal(parts, whole)
    _assert_equal(parts, whole, role="critic")


LORA = ("model.lora={rank: 4}", "train.optimizer.lr=0.02")


def test_a_run_with_adapters_resumes_bit_exactly_and_exports_merged_weights(load_tiny: LoadTiny) -> None:
    keys = (*LORA, "algorithm.kl_coef=0.01", "checkpoint.every_rounds=1")
    whole = _train(load_tiny, "whole", *keys)
    assert all(".lora_" in name for name in _weights(whole))
    assert all(".lora_" in name for name in _weights(whole, "reference"))
    _train(load_tiny, "parts", *keys, "run.max_rounds=2")
    parts = _train(load_tiny, "parts", *keys, "run.resume=latest")
    _assert_equal(parts, whole)
    exported = AutoModelForCausalLM.from_pretrained(commands.export(whole))
    start = AutoModelForCausalLM.from_pretrained(
        commands.export(_train(load_tiny, "start", "run.max_rounds=1", "train.optimizer.lr=1e-12"))
    )
    changed = {
        name.split(".")[-2]
        for (name, one), (_, other) in zip(exported.named_parameters(), start.named_parameters(), strict=True)
        if not torch.allclose(one, other, atol=1e-6)
    }
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("estimator", ["k3", "full"])
def test_the_reference_of_adapters_is_the_policy_at_the_first_step(
    load_tiny: LoadTiny, estimator: str
) -> None:
    run = _train(load_tiny, "run", *LORA, "algorithm.kl_coef=0.01", f"algorithm.kl_estimator={estimator}")
    lines = _lines(run)
    assert lines[1]["policy/kl"] == pytest.approx(0.0, abs=1e-9)
    assert lines[3]["policy/kl"] > 1e-6


@pytest.mark.nightly
def test_adapters_learn_the_task(load_tiny: LoadTiny) -> None:
    # the frozen head of a random model gives logits below 1, which this temperature makes decisive
    keys = ("model.lora={rank: 8}", "train.optimizer.lr=0.01", "rollout.sampling.temperature=0.1")
    run = _train(load_tiny, "run", *keys, "run.max_rounds=60")
    rewards = [line["reward/mean"] for line in _lines(run) if "reward/mean" in line]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.3  # of 32 answers a round


def test_adapters_with_a_critic_train_both(load_tiny: LoadTiny) -> None:
    run = _train(load_tiny, "run", *LORA, *PPO)
    assert all(".lora_" in name for name in _weights(run))
    critic = _weights(run, "critic")
    assert not any(".lora_" in name for name in critic)
    assert "value_head.weight" in critic


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # inductor's own
def test_compiling_changes_weights_only_by_rounding(load_tiny: LoadTiny) -> None:
    plain = _train(load_tiny, "plain", "run.max_rounds=1", "algorithm.entropy_coef=0.01")
    other = _train(
        load_tiny, "other", "run.max_rounds=1", "algorithm.entropy_coef=0.01", "train.compile=true"
    )
    _assert_equal(other, plain, atol=1e-4)


def test_a_half_precision_policy_starts_from_what_its_warm_up_has_learned(load_tiny: LoadTiny) -> None:
    """Both train the same tensors, each through master weights of its own. The policy's rate changes no
    weight of bf16."""
    data = "data: [{kind: file, path: letters.jsonl, response_key: answer}]"
    sft = f"sft={{{data}, steps: 5, rows_per_step: 4, optimizer: {{lr: 3.0e-3}}}}"
    keys = ("model.dtype=bf16", "train.optimizer.lr=1e-9", "run.max_rounds=2", sft)
    warmed = _weights(_train(load_tiny, "warmed", *keys))
    alone = _weights(commands.sft(load_tiny("run.name=alone", *keys)).run_dir)
    for name, tensor in alone.items():
        assert torch.equal(warmed[name].bfloat16(), tensor.bfloat16()), name
