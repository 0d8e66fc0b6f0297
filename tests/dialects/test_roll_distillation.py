"""ROLL's mixed distillation (use_opd): translated to the same advantages as in ROLL, or refused with the
reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from braid.cli.main import main
from braid.config.model import BuildSpec
from braid.errors import ConfigError
from braid.models.build import build_model
from braid.models.causal_lm import CausalLM
from braid.models.loading import save_pretrained
from braid.models.tokenizer import character_tokenizer
from braid.plan.resolve import merge_recipe
from braid.training.advantages import compute_advantages
from braid.types import Row
from braid_dialects.load import read_config

from .conftest import SEEDS, laid_over
from .test_roll import SMALL, problems, read

TEACHER = {"use_opd": True, "teacher": {"model_args": {"model_name_or_path": "teacher"}}}
GROUP, LENGTHS = 4, (3, 1, 5, 2, 4, 4, 2, 6)
REWARDS = np.array([1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0])
IS_CUT = np.array([False, False, True, False, False, False, False, True])
"""Responses cut at the maximum length."""


def _logprobs() -> dict[str, np.ndarray]:
    """[B, T] float32 on a padded rectangle, as ROLL has them, and `values` of a critic."""
    generator = np.random.default_rng(3)
    shape = (len(LENGTHS), max(LENGTHS))
    logprobs = {name: generator.uniform(-3, 0, shape).astype(np.float32) for name in ("old", "teacher")}
    return logprobs | {"values": generator.normal(size=shape).astype(np.float32)}


def roll_advantages(roll: dict[str, Any], made: dict[str, np.ndarray]) -> np.ndarray:
    """compute_advantage and what comes before it in ROLL's RLVR pipeline, of one domain, in its order, in
    float64 [B, T]."""
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    if roll.get("max_len_mask"):
        mask &= ~IS_CUT[:, None]
    rewards = REWARDS.reshape(-1, GROUP)
    if roll["adv_estimator"] == "grpo":
        rewards = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    rewards = rewards.reshape(-1)
    if bound := roll.get("reward_clip"):
        rewards = rewards.clip(-bound, bound)
    at_token = np.zeros(mask.shape)
    at_token[np.arange(len(LENGTHS)), np.array(LENGTHS) - 1] = rewards
    if bound:
        at_token = at_token.clip(-bound, bound)
    at_token *= mask
    gamma, lam = roll.get("gamma", 1.0), roll.get("lambd", 0.95)
    advantages, after, value_after = np.zeros(mask.shape), np.zeros(len(mask)), np.zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        if roll["adv_estimator"] == "gae":
            values = made["values"][:, t] * mask[:, t]
            after = at_token[:, t] + gamma * value_after - values + gamma * lam * after
            value_after = values
        else:
            after = at_token[:, t] + gamma * after
        advantages[:, t] = after
    log_ratio = made["old"].astype(np.float64) - made["teacher"]
    penalties = {"kl": log_ratio, "abs": np.abs(log_ratio), "mse": log_ratio**2 / 2}
    coef = roll["teacher"].get("opd_kl_coef", roll.get("opd_kl_coef", 1.0))
    advantages = advantages - coef * penalties[roll.get("kl_penalty", "kl")] * mask
    if roll.get("whiten_advantages"):
        inside = advantages[mask]
        advantages = (advantages - inside.mean()) / np.sqrt(inside.var(ddof=1) + 1e-8)
    advantages = advantages * mask
    if bound := roll.get("advantage_clip"):
        advantages = advantages.clip(-bound, bound)
    return advantages


def _rows(made: dict[str, np.ndarray]) -> list[Row]:
    rows = []
    for i, length in enumerate(LENGTHS):
        names = {"old": "old_logprobs", "teacher": "ref_logprobs", "values": "values"}
        fields = {name: made[key][i, :length] for key, name in names.items()}
        fields["rewards"] = np.array([0.0] * (length - 1) + [REWARDS[i]], np.float32)
        everywhere, ids = np.ones(length, bool), {"input_ids": np.full(length, 7)}
        decision = np.zeros(length, np.int32)
        more = {"fields": fields, "decision": decision, "is_truncated": bool(IS_CUT[i]), "is_terminal": True}
        rows.append(Row(ids, everywhere, i // GROUP, i, **more))
    return rows


@pytest.mark.parametrize(
    "changes",
    [
        {"adv_estimator": "grpo"},
        {"adv_estimator": "grpo", "opd_kl_coef": 0.3, "whiten_advantages": True, "advantage_clip": 1.2},
        {"adv_estimator": "grpo", "gamma": 0.9, "reward_clip": 0.8, "kl_penalty": "abs"},
        {"adv_estimator": "reinforce", "gamma": 0.5, "max_len_mask": True, "whiten_advantages": True},
        {"adv_estimator": "gae", "lambd": 0.9, "kl_penalty": "mse", "whiten_advantages": True},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("coef", [None, 0.25])
def test_advantages_are_those_of_roll(tmp_path: Path, changes: dict[str, Any], coef: float | None) -> None:
    kl_coef = {} if coef is None else {"opd_kl_coef": coef}
    roll = {**TEACHER, **changes, "teacher": {**TEACHER["teacher"], **kl_coef}}
    config = read(tmp_path, roll).loaded.config
    assert (config.reference.path, config.algorithm.old_logprobs) == ("teacher", "recompute")
    recipe, made = merge_recipe(config, has_gpus=False), _logprobs()
    rows = _rows(made)

    compute_advantages(rows, recipe)

    expected = roll_advantages(roll, made)
    is_trained = ~(IS_CUT & bool(roll.get("max_len_mask")))
    for row, advantages, trained in zip(rows, expected, is_trained, strict=True):
        if trained:  # the loss leaves out the others in both
            # float32 of about 3, whitened by sums of 27 numbers in float64
            np.testing.assert_allclose(row.fields["advantages"], advantages[: len(row)], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, "braid has only one; set use_kl_loss to false"),
        ({"add_token_level_kl": True}, "braid has only one; set add_token_level_kl to false"),
        ({"kl_penalty": "full"}, "set kl_penalty to kl, abs or mse"),
        ({"force_disable_old_logprobs_recompute": True}, "set force_disable_old_logprobs_recompute to false"),
        ({"reference": {"model_args": {"model_name_or_path": "other"}}}, "braid has one reference"),
        ({"teacher": {"tag_included": ["math"]}}, "distils all rows"),
    ],
)
def test_what_differs_from_roll_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    assert text in problems(tmp_path, {"adv_estimator": "grpo", **TEACHER, **changes, **_merged(changes)})


def _merged(changes: dict[str, Any]) -> dict[str, Any]:
    return {"teacher": {**TEACHER["teacher"], **changes.get("teacher", {})}}


def test_teachers_of_several_domains_are_refused(tmp_path: Path) -> None:
    assert "several teachers are braid.reference.teachers" in problems(
        tmp_path, {"use_opd": True, "teacher": {"math": TEACHER["teacher"]}}
    )


def test_a_teacher_is_needed_for_distillation_and_only_there(tmp_path: Path) -> None:
    assert "set teacher.model_args.model_name_or_path" in problems(tmp_path, {"use_opd": True})
    assert "set use_opd to true" in problems(tmp_path, {"teacher": TEACHER["teacher"]})


def test_log_probs_of_older_policies_are_no_log_probs_before_the_update(tmp_path: Path) -> None:
    one_step = {"actor_train": {"training_args": {"gradient_accumulation_steps": 4}}, "init_kl_coef": 0.0}
    ahead = {**TEACHER, **one_step, "async_generation_ratio": 1}
    assert "set enable_old_logprobs_recompute to true" in problems(tmp_path, ahead)
    known = read(tmp_path, {**ahead, "enable_old_logprobs_recompute": True}).loaded.config.algorithm
    assert (known.kl_in, known.old_logprobs) == ("advantage", "recompute")


def _pure(**changes: Any) -> dict[str, Any]:
    """A file of pure distillation, in which the student has the keys of the actor."""
    roll = laid_over(SMALL, {"teacher": TEACHER["teacher"], **changes})
    student = {"student_train": roll.pop("actor_train"), "student_infer": roll.pop("actor_infer")}
    return {**roll, **student}


@pytest.mark.parametrize("estimator", ["grpo", "gae", "reinforce"])
def test_pure_distillation_learns_from_the_teacher_alone(tmp_path: Path, estimator: str) -> None:
    path = tmp_path / "roll.yaml"
    path.write_text(yaml.safe_dump(_pure(adv_estimator=estimator, opd_kl_coef=0.5)), "utf-8")
    config = read_config(path, (), dialect="roll").loaded.config
    assert (config.reference.path, config.reward.scale, config.rollout.group_size) == ("teacher", 0.0, 4)
    recipe, made = merge_recipe(config, has_gpus=False), _logprobs()
    rows = _rows(made)
    for row in rows:
        row.fields["rewards"] *= config.reward.scale

    compute_advantages(rows, recipe)

    for row, old, teacher in zip(rows, made["old"], made["teacher"], strict=True):
        expected = -0.5 * (old - teacher)[: len(row)]
        np.testing.assert_allclose(row.fields["advantages"], expected, atol=1e-6)  # float32 of about 3


@pytest.mark.slow
def test_a_file_of_distillation_on_answers_trains_two_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": letter, "answer": letter * 2} for letter in "abcdef"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = BuildSpec(
        hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, head_dim=8, characters="abcdef"
    )
    tokenizer = character_tokenizer(spec.characters)
    for seed, name in enumerate(("student", "teacher")):
        model = build_model(spec, tokenizer, dtype=torch.float32, seed=seed)
        save_pretrained(CausalLM(model), tokenizer, tmp_path / name)
    changes: dict[str, Any] = {
        "student_pretrain": "student", "teacher_pretrain": "teacher", "logits_topk": 4, "sequence_length": 64,
        "student": {
            "data_args": {"file_name": "rows.jsonl", "template": "native"},
            "model_args": {"attn_implementation": "sdpa"},
            "training_args": {"num_train_epochs": 1, "gradient_accumulation_steps": 1, "warmup_steps": 0},
        },
        "braid": {"run": {"device": "cpu", "output_dir": "out", "name": "run"}, "report": {"console": "none"}},
    }  # fmt: skip
    tree = laid_over(yaml.safe_load((SEEDS / "roll-distill.yaml").read_text("utf-8")), changes)
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", "theirs.yaml", "--backend", "single", "--engine", "native"]) == 0, (
        capsys.readouterr().err
    )
    lines = [json.loads(line) for line in (tmp_path / "out/run/metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "sft/divergence" in line]
    assert [line["step"] for line in trained] == [1, 2]
    assert all(line["sft/divergence"] > 0 for line in trained)


def test_a_file_of_distillation_sets_the_divergence_and_the_teacher(tmp_path: Path) -> None:
    def made(**changes: Any) -> Any:
        tree = yaml.safe_load((SEEDS / "roll-distill.yaml").read_text("utf-8"))
        (tmp_path / "roll.yaml").write_text(yaml.safe_dump(laid_over(tree, changes)), "utf-8")
        return read_config(tmp_path / "roll.yaml").loaded.config

    config = made()
    assert (config.reference.path, config.sft.shuffle, config.sft.rows_per_step) == (
        "Qwen/Qwen3-8B",
        True,
        16,
    )
    distillation = config.sft.distillation
    assert (distillation.weight, distillation.divergence, distillation.mixture) == (
        0.65,
        "skewed_forward_kl",
        0.2,
    )
    assert (distillation.top_k, distillation.rest) == (64, "renormalize")
    whole = made(kd_objective="reverse_kl", logits_topk=0).sft.distillation
    assert (whole.divergence, whole.top_k) == ("kl", None)
    with pytest.raises(ConfigError, match=r"kd_temperature.*set it to 1"):
        made(kd_temperature=2)
    with pytest.raises(ConfigError, match=r"computed over the likeliest tokens only"):
        made(kd_objective="adaptive_kl", logits_topk=0)


def test_pure_distillation_needs_a_teacher(tmp_path: Path) -> None:
    path = tmp_path / "roll.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in _pure().items() if k != "teacher"}), "utf-8")
    with pytest.raises(ConfigError, match=r"is_pure_opd.*needs a teacher"):
        read_config(path, (), dialect="roll")
