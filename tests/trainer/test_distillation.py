"""On-policy distillation: a student learns its teacher, the reference, without rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from braid.errors import ModelError
from braid.trainer import commands

from .conftest import LoadTiny

STUDENT = (
    "run.seed=7",
    "run.max_rounds=12",
    "reward.scale=0",
    "algorithm.recipe=reinforce",
    "algorithm.reward_mean=none",
    "algorithm.kl_coef=1",
    "algorithm.kl_clamp=off",
)
_IN_LOSS = ("algorithm.kl_in=loss",)
FORMS = {
    "sampled token": ("reward/kl", "algorithm.kl_in=advantage", "algorithm.kl_estimator=k1"),
    **{
        name: ("policy/kl", "algorithm.kl_in=loss", f"algorithm.kl_estimator={name}")
        for name in ("full", "full_forward", "full_jensen_shannon")
    },
    "mixture": (
        "policy/kl",
        *_IN_LOSS,
        "algorithm.kl_estimator=full_jensen_shannon",
        "algorithm.kl_mixture=0.1",
    ),
    **{
        f"top 4, {rest}": (
            "policy/kl",
            *_IN_LOSS,
            f"algorithm.kl_estimator={name}",
            "algorithm.kl_top_k=4",
            f"algorithm.kl_rest={rest}",
            "algorithm.kl_ratio_clip=2",
            "train.steps_per_pass=2",
        )
        for rest, name in (("tail", "full_forward"), ("renormalize", "full"), ("drop", "full_jensen_shannon"))
    },
}


@pytest.fixture
def teacher(load_tiny: LoadTiny) -> Path:
    """A model that has learned the letters."""
    run = commands.train(load_tiny("run.name=teacher", "run.max_rounds=12", "eval.every_rounds=12")).run_dir
    return commands.export(run)


@pytest.mark.parametrize("form", FORMS)
def test_a_student_learns_its_teacher(load_tiny: LoadTiny, teacher: Path, form: str) -> None:
    metric, *keys = FORMS[form]
    run = commands.train(load_tiny(f"reference.path={teacher}", *STUDENT, *keys)).run_dir
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    distances = [line[metric] for line in rounds]
    assert sum(distances[-3:]) < 0.3 * sum(distances[:3])


@pytest.mark.parametrize("form", ["full_forward", "full_jensen_shannon"])
def test_a_teacher_with_another_vocabulary_is_refused(load_tiny: LoadTiny, form: str) -> None:
    other = "model.build.characters=abcdefghijklmnopqrstuvwxyz"
    folder = commands.export(commands.train(load_tiny("run.name=other", other)).run_dir)
    _, *keys = FORMS[form]
    with pytest.raises(ModelError, match=r"vocabulary has 16 tokens and the reference's 32"):
        commands.train(load_tiny(f"reference.path={folder}", *STUDENT, *keys))
