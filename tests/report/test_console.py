"""Console output of a run."""

from __future__ import annotations

import io
import logging
import math
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from braid.report.sinks.console import Console, Mode, clock, printable, sparkline
from braid.report.streams import reward_prints_in

FIRST = {"eval/all/mean@1": 0.25, "eval/all/pass@1": 0.25, "time/round_s": 2.0}
ROUND = {"reward/mean": 0.5, "policy/kl": 0.0123, "rollout/output_length_mean": 24.0, "time/round_s": 1.5}


def console(mode: Mode = "plain", *, width: int = 80, is_terminal: bool = False) -> Console:
    screen = RichConsole(
        file=io.StringIO(), width=width, height=30, force_terminal=is_terminal, color_system=None, _environ={}
    )
    return Console(mode, title="train quickstart", folder=Path("runs/quickstart"), screen=screen)


def text_of(shown: Console) -> str:
    file = shown.screen.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def drawn(shown: Console) -> str:
    """The current live display."""
    with shown.screen.capture() as capture:
        shown.screen.print(shown._draw())
    return capture.get()


def test_a_plain_console_prints_one_line_per_round() -> None:
    with console() as shown:
        shown.num_rounds = 8
        shown.log(0, 0, FIRST)
        shown.log(1, 2, ROUND)
    lines = text_of(shown).splitlines()
    assert lines[0] == "round 0/8  accuracy 25.0%  2.0 s"
    assert lines[1].startswith(
        "round 1/8  reward 0.500  length 24.0 tokens  KL 0.0123 nats  1.5 s  0:00 left"
    )


@pytest.mark.parametrize(("share", "text"), [(0.44, "44%"), (0.002, "<1%"), (0.0, None)])
def test_invalid_trajectories_are_a_column(share: float, text: str | None) -> None:
    metrics = {"reward/mean": 0.5, "rollout/invalid_fraction": share, "eval/all/invalid_fraction": share}
    with console() as shown:
        shown.log(1, 1, metrics)
    line = (
        "round 1  reward 0.500\n"
        if text is None
        else f"round 1  reward 0.500  invalid {text}  eval invalid {text}\n"
    )
    assert text_of(shown) == line
    live = console("live")
    live.log(1, 1, metrics)
    assert ("invalid" in drawn(live)) == (text is not None)


def test_a_value_that_could_not_be_measured_is_a_dash(caplog: pytest.LogCaptureFixture) -> None:
    metrics: dict[str, float] = dict.fromkeys(
        ("reward/mean", "eval/all/pass@1", "policy/entropy", "sft/loss"), math.nan
    )
    with console() as shown:
        shown.log(1, 1, metrics)
    assert text_of(shown) == "round 1  reward -  loss -  accuracy -  entropy - nats\n"
    live = console("live")
    live.log(1, 1, metrics)
    live.log(2, 2, {"eval/all/pass@1": 0.5})
    assert "nan" not in drawn(live)
    assert not caplog.records


def test_a_simulators_run_counts_env_steps() -> None:
    with console() as shown:
        shown.counted = "action tokens"
        rates = {"rollout/tokens_per_s": 4000.0, "env/steps_per_s": 500.0, "train/tokens_per_s": 9000.0}
        shown.log(1, 1, {"rollout/output_length_mean": 195.0, **rates})
    assert text_of(shown) == (
        "round 1  length 195.0 action tokens  sampled 500 env steps/s  trained 9,000 action tokens/s\n"
    )


def test_auto_is_plain_where_there_is_no_terminal_and_live_on_one() -> None:
    assert console("auto").mode == "plain"
    assert console("auto", is_terminal=True).mode == "live"


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_the_live_display_fits_its_terminal(width: int) -> None:
    shown = console("live", width=width, is_terminal=True)
    shown.num_rounds = 300
    for i in range(1, 201):
        shown.log(
            i, 2 * i, {**FIRST, **ROUND, "reward/mean": i / 200, "time/rollout_s": 0.9, "time/update_s": 0.6}
        )
    with shown.phase("rollout"):
        shown.progress("rollout", 3, 9)
        picture = drawn(shown)
    assert all(len(line) <= min(width, 100) for line in picture.splitlines())
    for part in ("round 200/300", "rollout 3/9", "reward", "▁", "█"):
        assert part in picture


def test_the_live_display_shows_the_running_phase_and_results() -> None:
    shown = console("live", width=100, is_terminal=True)
    shown.num_rounds = 10
    shown.log(0, 0, FIRST)
    shown.log(1, 2, {**ROUND, "eval/all/mean@1": 0.75, "eval/all/pass@1": 0.75, "time/rollout_s": 0.9})
    shown.log(2, 4, ROUND | {"time/rollout_s": 0.9})
    with shown.phase("update"):
        picture = drawn(shown)
    for part in ("train quickstart", "runs/quickstart", "step 4", "elapsed", "left", "update", "last round"):
        assert part in picture
    assert (
        "accuracy        75.0%  initially 25.0%" in picture
    )  # the newest evaluation, though this round had none


def test_an_evaluation_in_other_units_than_passed_or_not_is_shown_as_it_is() -> None:
    with console() as shown:
        shown.log(0, 0, {"eval/all/mean@4": 183.5, "eval/all/pass@1": 0.5})
    assert "accuracy 50.0%  eval 183.500" in text_of(shown)


def test_dense_rewards_are_shown_with_their_range_and_not_as_an_accuracy_of_zero() -> None:
    dense = {"eval/all/mean@4": -0.25, "eval/all/reward_min": -1.5, "eval/all/reward_max": 0.625}
    with console() as shown:
        shown.log(0, 0, {**dense, "eval/all/pass@1": 0.0})
        shown.log(1, 2, {"eval/all/mean@4": 0.0, "eval/all/pass@1": 0.0})
        shown.log(2, 4, {**dense, "eval/all/pass@1": 0.125})
    assert text_of(shown).splitlines() == [
        "round 0  eval -0.250 (-1.5 to 0.625)",
        "round 1  accuracy 0.0%",
        "round 2  accuracy 12.5%  eval -0.250 (-1.5 to 0.625)",
    ]
    live = console("live", width=100, is_terminal=True)
    live.log(0, 0, {**dense, "eval/all/pass@1": 0.0})
    live.log(1, 2, {**dense, "eval/all/mean@4": 0.5, "eval/all/pass@1": 0.0})
    picture = drawn(live)
    assert "(-1.5 to 0.625)  initially -0.250" in picture
    assert "accuracy" not in picture


def test_a_resumed_run_shows_what_went_before() -> None:
    shown = console("live", is_terminal=True)
    shown.num_rounds = 4
    shown.go_on([{"round": 0, "step": 0, **FIRST}, {"round": 1, "step": 2, **ROUND, "policy/kl": None}])
    picture = drawn(shown)
    assert "round 1/4" in picture
    assert "25.0%" in picture


def test_numbers_that_are_not_finite_are_shown_not_fatal() -> None:
    shown = console("live", is_terminal=True)
    for value in (1.0, math.nan, math.inf, 2.0):
        shown.log(1, 1, {"reward/mean": value, "policy/kl": math.nan})
    (kl,) = [line.split() for line in drawn(shown).splitlines() if line.startswith("KL")]
    assert kl == ["KL", "-", "nats"]


def test_log_messages_and_warnings_are_printed_above_the_display_and_not_as_markup() -> None:
    with warnings.catch_warnings(), console("live", is_terminal=True, width=300) as shown:
        warnings.simplefilter("always")
        logging.getLogger("braid.anything").info("told")
        logging.getLogger("elsewhere").info("not told")
        logging.getLogger("elsewhere").warning("of [red]brackets[/red]")
        warnings.warn("from a library", stacklevel=1)
    text = text_of(shown)
    assert "told" in text
    assert "not told" not in text
    assert "warning: of [red]brackets[/red]" in text
    assert "UserWarning: from a library" in text


def test_logging_is_as_before_when_the_console_is_closed() -> None:
    before = (list(logging.getLogger().handlers), warnings.showwarning, logging.getLogger("braid").level)
    with console("live", is_terminal=True) as shown:
        pass
    shown.close()
    assert (
        list(logging.getLogger().handlers),
        warnings.showwarning,
        logging.getLogger("braid").level,
    ) == before


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_what_may_be_copied_is_one_line_however_narrow_the_terminal(mode: Mode) -> None:
    command = "braid train " + "a/long/path " * 20 + "run.resume=latest"
    with console(mode, is_terminal=True, width=40) as shown:
        shown.say(command)
        logging.getLogger("braid.anything").info("to resume: %s", command)
    lines = text_of(shown).splitlines()
    assert sum(line.endswith(command) for line in lines) == 2


def test_the_streams_are_the_terminals_again_once_the_display_is_closed(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    with console("live", is_terminal=True) as shown, reward_prints_in(tmp_path / "rewards.log"):
        shown.close()  # as at the end of a run
    assert (sys.stdout, sys.stderr) == before
    with console("live", is_terminal=True), reward_prints_in(tmp_path / "rewards.log"):
        pass
    assert (sys.stdout, sys.stderr) == before


def test_none_shows_warnings_only() -> None:
    with console("none") as shown:
        shown.say("hello")
        shown.log(1, 1, ROUND)
        shown.progress("warm_up", 1, 2)
        logging.getLogger("braid").warning("mind this")
    assert text_of(shown) == "warning: mind this\n"


def test_a_long_phase_reports_each_tenth_on_a_plain_console() -> None:
    with console() as shown, shown.phase("warm_up"):
        for i in range(1, 101):
            shown.progress("warm_up", i, 100)
    assert text_of(shown).splitlines() == [f"warm up {i}/100" for i in range(10, 101, 10)]


@given(st.lists(st.floats()), st.integers(1, 50))
def test_a_sparkline_fits_its_width_whatever_the_values(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= width


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([1, 1], 8) == "▄▄"
    assert sparkline([1, math.nan, 2], 8) == "▁ █"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (725, "12:05"), (10904, "3:01:44")]
)
def test_times_read_as_on_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_model_output_cannot_control_the_terminal() -> None:
    assert printable("a\x1b[2J\nb\r\nc\t\u202e") == "a[2J↵b↵c"
