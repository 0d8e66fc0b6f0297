"""Distillation: a student learns its teacher, the reference, on its own answers or on those of a file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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


_OFFLINE = (
    "data={}",
    "sft.data=[{kind: file, path: letters.jsonl, response_key: answer}]",
    "sft.rows_per_step=4",
    "sft.shuffle=false",
    "run.if_exists=new",
    "eval.every_rounds=0",
)
_EXAMPLES = [("a", "a"), ("b", "b"), ("c", "c"), ("d", "d")]


def _imitated(load_tiny: LoadTiny, *keys: str) -> list[dict[str, float]]:
    """The metrics of each step of `braid sft` on the four letters."""
    run = commands.sft(load_tiny(*_OFFLINE, *keys)).run_dir
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "sft/loss" in line]


@pytest.mark.parametrize(
    ("kind", "top_k", "rest"),
    [
        ("kl", None, None),
        ("forward_kl", None, None),
        ("jensen_shannon", None, None),
        ("forward_kl", 4, "renormalize"),
        ("skewed_forward_kl", 4, "renormalize"),
        ("adaptive_kl", 4, "tail"),
    ],
)
def test_the_loss_on_examples_is_cross_entropy_mixed_with_the_divergence(
    load_tiny: LoadTiny, two_teachers: tuple[Path, Path], kind: str, top_k: int | None, rest: str | None
) -> None:
    student, teacher = two_teachers
    keys = [
        "model.build=null",
        f"model.path={student}",
        f"reference.path={teacher}",
        "sft.steps=1",
        f"sft.distillation={{weight: 0.3, divergence: {kind}, mixture: 0.2, top_k: {top_k or 'null'}}}",
        *([] if rest is None else [f"sft.distillation.rest={rest}"]),
    ]
    (line,) = _imitated(load_tiny, *keys)
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in two_teachers]
    tokenizer = AutoTokenizer.from_pretrained(student)
    entropies, distances = [], []
    for prompt, answer in _EXAMPLES:
        ids = [*tokenizer.encode(prompt), *tokenizer.encode(answer), tokenizer.eos_token_id]
        with torch.no_grad():
            p, q = (model(torch.tensor([ids])).logits[0].double().log_softmax(-1) for model in models)
        for at in (1, 2):  # the letter and the end
            entropies.append(-float(p[at - 1, ids[at]]))
            events = range(p.shape[1]) if top_k is None else q[at - 1].topk(top_k).indices.tolist()
            student_probs, teacher_probs = (
                [math.exp(float(x[at - 1, event])) for event in events] for x in (p, q)
            )
            distances.append(_by_hand(student_probs, teacher_probs, kind, rest))
    assert line["sft/divergence"] == pytest.approx(sum(distances) / 8, rel=1e-4)
    expected = 0.7 * sum(entropies) / 8 + 0.3 * sum(distances) / 8
    assert line["sft/loss"] == pytest.approx(expected, rel=1e-4)


def _by_hand(p: list[float], q: list[float], kind: str, rest: str | None) -> float:
    """A divergence of two distributions, written out, with w = 0.2."""
    if rest == "renormalize":
        p, q = ([x / sum(probs) for x in probs] for probs in (p, q))
    if rest == "tail":
        p, q = ([*probs, 1 - sum(probs)] for probs in (p, q))

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    mixture = [0.2 * y + 0.8 * x for x, y in zip(p, q, strict=True)]
    if kind == "adaptive_kl":
        order = sorted(range(len(q)), key=lambda i: q[i])
        tail: list[int] = []
        while sum(q[i] for i in [*tail, order[len(tail)]]) <= 0.2:
            tail.append(order[len(tail)])
        gaps = [abs(x - y) for x, y in zip(p, q, strict=True)]
        share = sum(gap for i, gap in enumerate(gaps) if i not in tail) / sum(gaps)
        return share * kl(q, p) + (1 - share) * kl(p, q)
    return {
        "kl": kl(p, q),
        "forward_kl": kl(q, p),
        "jensen_shannon": 0.2 * kl(q, mixture) + 0.8 * kl(p, mixture),
        "skewed_forward_kl": kl(q, mixture),
    }[kind]


@pytest.mark.parametrize("top_k", ["null", "4"])
def test_a_student_learns_its_teacher_from_a_file(load_tiny: LoadTiny, teacher: Path, top_k: str) -> None:
    settings = f"sft.distillation={{weight: 1.0, top_k: {top_k}}}"
    keys = (f"reference.path={teacher}", "sft.steps=40", "sft.optimizer.lr=1e-2", settings)
    distances = [line["sft/divergence"] for line in _imitated(load_tiny, *keys)]
    assert distances[-1] < 0.1 * distances[0]


def test_distillation_on_examples_that_cannot_run_is_refused(load_tiny: LoadTiny, teacher: Path) -> None:
    settings = "sft.distillation={}"
    with pytest.raises(ConfigError, match=r"needs a teacher; set reference\.path"):
        commands.sft(load_tiny(*_OFFLINE, settings))
    with pytest.raises(ConfigError, match="starts with a warm-up on examples alone"):
        commands.train(load_tiny(*_OFFLINE[1:], f"reference.path={teacher}", settings))
    with pytest.raises(ConfigError, match="divergence=mixed_kl is computed over the likeliest tokens only"):
        load_tiny(*_OFFLINE, "sft.distillation={divergence: mixed_kl}")
