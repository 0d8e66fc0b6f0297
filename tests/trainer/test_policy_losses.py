"""Policy recipes through whole rounds: quantities over whole steps, and skipped steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from braid.checkpoint.store import CheckpointStore
from braid.trainer import commands

from .conftest import LoadTiny


def _weights(run: Path) -> dict[str, torch.Tensor]:
    *_, state = CheckpointStore(run / "checkpoints").locate()
    return state["policy"]["weights"]


def _lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("recipe", "metrics"),
    [
        ("gspo", {"policy/clip_fraction"}),
        ("cispo", {"policy/clip_fraction"}),
        ("sapo", {"policy/ratio_mean"}),
        ("gmpo", {"policy/clip_fraction"}),
        ("luspo", {"policy/clip_fraction"}),
        ("vespo", {"policy/ratio_mean"}),
        ("opo", {"policy/ratio_mean"}),
        ("gpg", {"policy/ratio_mean"}),
        ("pass_at_k", {"policy/clip_fraction"}),
        ("gdpo", {"policy/clip_fraction"}),
        ("sequence_mask", {"policy/clip_fraction", "policy/masked_fraction"}),
        ("topr", {"policy/clip_fraction"}),
        ("dppo", {"policy/clip_fraction"}),
        ("clip_cov", {"policy/chosen_fraction", "policy/clip_fraction"}),
        ("kl_cov", {"policy/chosen_fraction"}),
        ("decoupled_ppo", {"policy/correction_mean", "policy/correction_masked_fraction"}),
    ],
)
def test_a_recipe_trains_and_reports_its_metrics(load_tiny: LoadTiny, recipe: str, metrics: set[str]) -> None:
    run = commands.train(load_tiny(f"algorithm.recipe={recipe}", "train.steps_per_pass=2")).run_dir
    for line in _lines(run)[1:]:
        assert metrics <= line.keys()
        assert line["policy/skipped_steps"] == 0
        assert line["policy/ratio_mean"] == pytest.approx(1.0, abs=0.2)  # two small steps


@pytest.mark.parametrize(
    ("overrides", "metrics"),
    [
        (["policy_loss={kind: kimi, tau: 0.5}", "reward_clip=0.3"], {"policy/penalty"}),
        (
            [
                "policy_loss={kind: masked_is, log_ratio_max: 1}",
                "old_logprobs=behavior",
                "turn_weighting=turns",
            ],
            {"policy/clip_fraction"},
        ),
        (
            ["logprob_level=chunk", "entropy_level=action", "entropy_coef=0.01", "aggregation=prompt_mean"],
            {"policy/clip_fraction"},
        ),
        (
            [
                "policy_loss={kind: importance_sampling, ratio_level: sequence_product}",
                "mask_long_failures=1000",
                "corrections=[{mode: mask_sequence, high: off}, {mode: mask, measure: difference, low: "
                "-0.5, high: 0.5}]",
            ],
            {"policy/correction_masked_fraction", "rollout/masked_trajectories"},
        ),
    ],
)
def test_parts_without_a_recipe_train(load_tiny: LoadTiny, overrides: list[str], metrics: set[str]) -> None:
    overrides = [f"algorithm.{override}" for override in overrides]
    run = commands.train(load_tiny("run.max_rounds=2", "train.steps_per_pass=2", *overrides)).run_dir
    for line in _lines(run)[1:]:
        assert metrics <= line.keys()
        assert line["policy/skipped_steps"] == 0


def test_interpolated_old_log_probs_of_a_synchronous_run_are_the_engines(load_tiny: LoadTiny) -> None:
    settings = ("algorithm.policy_loss.clip_high=0.01", "train.steps_per_pass=2", "checkpoint.at_end=true")
    ours, theirs = (
        _weights(
            commands.train(load_tiny(f"algorithm.old_logprobs={kind}", f"run.name={kind}", *settings)).run_dir
        )
        for kind in ("interpolated", "behavior")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_kl_cov_acts_on_the_configured_fraction_of_tokens(load_tiny: LoadTiny) -> None:
    run = commands.train(
        load_tiny("algorithm.recipe=kl_cov", "algorithm.policy_loss.cov_fraction=0.25")
    ).run_dir
    for line in _lines(run)[1:]:
        assert line["policy/chosen_fraction"] == pytest.approx(
            0.25, abs=0.02
        )  # of some 50 tokens, rounded down


def test_a_resumed_run_selects_the_same_tokens(load_tiny: LoadTiny) -> None:
    common = (
        "algorithm.recipe=clip_cov",
        "algorithm.policy_loss.cov_low=0",
        "algorithm.policy_loss.cov_fraction=0.2",
        "train.passes_per_round=2",
        "checkpoint.every_rounds=1",
    )
    whole = commands.train(load_tiny("run.name=whole", *common)).run_dir
    commands.train(load_tiny("run.name=parts", "run.max_rounds=2", *common))
    parts = commands.train(load_tiny("run.name=parts", "run.resume=latest", *common)).run_dir
    ours, theirs = _weights(parts), _weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(0 < line["policy/chosen_fraction"] <= 0.2 for line in _lines(whole)[1:])


def test_steps_past_the_early_stop_are_counted_and_change_nothing(load_tiny: LoadTiny) -> None:
    """A ratio starts at 1, so a bound of 1/2 stops every step; more of them than max_skipped_steps."""
    settings = ("algorithm.early_stop_ratio=0.5", "train.passes_per_round=2", "train.max_skipped_steps=1")
    run = commands.train(load_tiny(*settings, "checkpoint.every_rounds=1")).run_dir
    store = CheckpointStore(run / "checkpoints")
    weights = [store.locate(store.path(step))[2]["policy"]["weights"] for step in store.steps()]
    assert len(weights) > 1
    assert all(torch.equal(weights[0][name], weights[-1][name]) for name in weights[0])
    for line in _lines(run)[1:]:
        assert line["policy/early_stopped_steps"] == 2
        assert line["policy/skipped_steps"] == 0
