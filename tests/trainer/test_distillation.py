"""On-policy distillation: a student learns its teacher, the reference, without rewards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from braid.errors import ConfigError, ModelError
from braid.report.batches import read_batch
from braid.trainer import commands
from braid.types import Row

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


@pytest.fixture
def two_teachers(load_tiny: LoadTiny) -> tuple[Path, Path]:
    """Models with other random weights than the policy."""

    def make(seed: int) -> Path:
        made = load_tiny(f"run.name=teacher-{seed}", f"run.seed={seed}", "run.max_rounds=1")
        return commands.export(commands.train(made).run_dir)

    return make(11), make(12)


_SOURCES = (
    "data.train=[{kind: file, name: first, path: letters.jsonl, limit: 2}, "
    "{kind: file, name: second, path: letters.jsonl}]"
)
_ONE_ROUND = (
    "run.max_rounds=1",
    "run.if_exists=new",
    "report.batches_every_rounds=1",
    "rollout.prompts_per_round=6",
    _SOURCES,
)


def _taught(load_tiny: LoadTiny, reference: str, *keys: str) -> list[tuple[str, Row]]:
    """The rows of a first round, with their source."""
    run = commands.train(load_tiny(reference, *STUDENT, *_ONE_ROUND, *keys)).run_dir
    stored = read_batch(run / "batches" / "round_000001")
    return [(row.source, row) for row, _ in stored]


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        ("sampled token", ["ref_logprobs", "advantages"]),
        ("top 4, tail", ["top_tokens", "top_logprobs"]),
    ],
)
def test_each_row_has_the_kl_of_a_run_with_its_teacher_alone(
    load_tiny: LoadTiny, two_teachers: tuple[Path, Path], form: str, fields: list[str]
) -> None:
    _, *keys = FORMS[form]
    first, second = two_teachers
    both = f"reference.teachers=[{{path: {first}, sources: [first]}}, {{path: {second}, sources: [second]}}]"
    rows = _taught(load_tiny, both, *keys)
    alone = {
        "first": _taught(load_tiny, f"reference.path={first}", *keys),
        "second": _taught(load_tiny, f"reference.path={second}", *keys),
    }
    assert {source for source, _ in rows} == {"first", "second"}
    for i, (source, row) in enumerate(rows):
        for name in fields:
            # Rows are packed with others, which changes log-probs by rounding.
            expected, other = (alone[name_][i][1].fields[name] for name_ in (source, _other(source)))
            np.testing.assert_allclose(row.fields[name], expected, rtol=1e-5, atol=1e-6)
            assert not np.allclose(expected, other, atol=1e-3)


def _other(source: str) -> str:
    return {"first": "second", "second": "first"}[source]


def test_a_teacher_weighs_the_kl_of_its_rows(load_tiny: LoadTiny, two_teachers: tuple[Path, Path]) -> None:
    first, second = two_teachers

    def rows(weight: float) -> list[tuple[str, Row]]:
        teachers = f"[{{path: {first}, sources: [first]}}, {{path: {second}, sources: [second], kl_weight: {weight}}}]"
        return _taught(load_tiny, f"reference.teachers={teachers}", *FORMS["sampled token"][1:])

    for (source, row), (_, weighted) in zip(rows(1.0), rows(0.5), strict=True):
        factor = 0.5 if source == "second" else 1.0
        np.testing.assert_allclose(
            weighted.fields["advantages"], factor * row.fields["advantages"], rtol=1e-6
        )


@pytest.mark.parametrize(
    ("teachers", "form", "message"),
    [
        ("{path: a, sources: [first]}", "sampled token", "no teacher for rows of the source 'second'"),
        ("{path: a, sources: [first, second, third]}", "sampled token", "no source 'third'"),
        ("{path: a, sources: [first, first]}", "sampled token", "names the source 'first' twice"),
        ("{path: a, sources: [first, second]}", "full_forward", "compares with one reference, not with 1"),
    ],
)
def test_teachers_that_do_not_fit_the_run_are_refused(
    load_tiny: LoadTiny, two_teachers: tuple[Path, Path], teachers: str, form: str, message: str
) -> None:
    teachers = teachers.replace("path: a", f"path: {two_teachers[0]}")
    with pytest.raises(ConfigError, match=message):
        commands.train(load_tiny(f"reference.teachers=[{teachers}]", *STUDENT, *_ONE_ROUND, *FORMS[form][1:]))
