"""Metrics merge exactly for any partition of a round; undeclared ones are refused; their page is current."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.report.metrics import Metrics, Value
from braid.report.names import METRICS, as_markdown, describe, position


def collected(values: list[int]) -> Metrics:
    metrics = Metrics()
    for value in values:
        metrics.mean("reward/mean", value)
        metrics.add("rollout/tokens", value)
        metrics.max("rollout/output_length_max", value)
        metrics.min("policy/lr", value)
    return metrics


@given(st.lists(st.lists(st.integers(-1000, 1000), min_size=1), min_size=1))
def test_metrics_of_partial_rounds_merge_exactly(pieces: list[list[int]]) -> None:
    merged = Metrics()
    for piece in pieces:
        merged.merge(collected(piece))
    assert (
        merged.flat() == collected([v for piece in pieces for v in piece]).flat()
    )  # whole numbers add exactly


def test_a_mean_weights_parts_by_their_count() -> None:
    metrics = Metrics()
    metrics.mean("policy/loss", 10.0, 4)
    metrics.mean("policy/loss", 2.0, 2)
    assert metrics.value("policy/loss") == 2.0


def test_each_kind_merges_by_its_own_rule() -> None:
    assert Value("Mean", 3.0, 2.0).merge(Value("Mean", 1.0)).value == pytest.approx(4 / 3)
    assert Value("Sum", 3.0).merge(Value("Sum", 1.0)).value == 4
    assert Value("Min", 3.0).merge(Value("Min", 1.0)).value == 1
    assert Value("Max", 3.0).merge(Value("Max", 1.0)).value == 3
    assert math.isnan(Value("Mean", 0.0, 0.0).value)


@pytest.mark.parametrize("kind", ["Mean", "Sum", "Min", "Max"])
def test_nan_is_never_lost_in_a_merge(kind: Any) -> None:
    assert math.isnan(Value(kind, math.nan).merge(Value(kind, 1.0)).value)
    assert math.isnan(Value(kind, 1.0).merge(Value(kind, math.nan)).value)


def test_undeclared_names_are_refused_with_the_nearest_declared_one() -> None:
    with pytest.raises(
        AssertionError, match=r"'policy/entrop' is not declared, did you mean 'policy/entropy'\?.*names.py"
    ):
        Metrics().mean("policy/entrop", 1.0)


def test_a_name_keeps_its_kind() -> None:
    metrics = Metrics()
    metrics.mean("reward/mean", 1.0)
    with pytest.raises(AssertionError, match="'reward/mean' is a Mean, but the value is a Sum"):
        metrics.add("reward/mean", 1.0)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("eval/gsm8k/mean@8", "eval/<source>/mean@<n>"),
        ("eval/ALE/Pong-v5/pass@1", "eval/<source>/pass@<k>"),
        ("reward/part/exact match", "reward/part/<part>"),
        ("status/truncated", "status/<status>"),
        ("time/rollout_s", "time/<verb>_s"),
        ("time/round_s", "time/round_s"),
    ],
)
def test_names_with_places_find_their_line(name: str, line: str) -> None:
    assert describe(name).name == line


@pytest.mark.parametrize(
    "name", ["eval/gsm8k/mean@n", "eval/gsm8k/pass@", "reward/part/", "time/rollout", "status/"]
)
def test_names_that_only_look_like_a_pattern_are_refused(name: str) -> None:
    with pytest.raises(AssertionError, match="not declared"):
        position(name)


def test_names_are_in_the_order_of_the_table() -> None:
    metrics = Metrics()
    for name in ("time/rollout_s", "policy/kl", "reward/part/b", "reward/part/a", "reward/mean"):
        metrics.mean(name, 1.0)
    assert list(metrics.flat()) == [
        "reward/mean",
        "reward/part/a",
        "reward/part/b",
        "policy/kl",
        "time/rollout_s",
    ]


def test_only_times_rates_and_memory_differ_from_one_day_to_the_next() -> None:
    names = {m.name for m in METRICS if not m.is_reproducible}
    assert names == {
        "rollout/tokens_per_s",
        "train/tokens_per_s",
        "pipeline/trainer_wait_s",
        "pipeline/rollout_wait_s",
        "env/step_s",
        "env/steps_per_s",
        "env/reply_p<k>_s",
        "env/tool_s",
        "env/sample_s",
        "env/mix/<kind>/<name>_s",
        "flops/rollout_per_s",
        "flops/infer_per_s",
        "flops/train_per_s",
        "time/round_s",
        "time/score_s",
        "time/<verb>_s",
        "reward/time/<part>_s",
        "memory/peak_rss_bytes",
    }


def test_no_line_of_the_table_hides_another() -> None:
    for i, metric in enumerate(METRICS):
        example = metric.name.replace("<n>", "8").replace("<k>", "1").replace("<", "").replace(">", "")
        assert position(example) == i


def test_the_page_about_metrics_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text("utf-8") == as_markdown(), "write it anew: python -m tests.report.test_metrics"


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "metrics.md").write_text(as_markdown(), "utf-8")
