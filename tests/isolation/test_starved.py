"""A test is not charged for the time that it waits for a core which other processes use."""

from __future__ import annotations

import pytest

from braid.isolation import sandbox
from braid.isolation.sandbox import MAX_WAIT, Deadline, SandboxError, waited_for_others


@pytest.mark.parametrize(
    ("threads_s", "computed_s", "expected"),
    [
        ([(1.0, 2.0), (0.1, 0.3)], 1.1, 1.9),  # a program, less what its tests computed
        ([(1.0, 2.0), (1.0, 2.0)], 2.0, 2.0),  # both, in turns
        ([(0.1, 0.7)] * 8, 0.8, 0.0),  # eight threads of a program on one core of an idle machine
        ([(0.2, 1.2)], 1.4, 0.0),  # six threads that have ended
        ([], 0.0, 0.0),
    ],
)
def test_a_program_does_not_make_a_machine_look_busy_by_its_own_threads(
    threads_s: list[tuple[float, float]], computed_s: float, expected: float
) -> None:
    assert waited_for_others(threads_s, computed_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("computed_s", "waited_s", "ends_after_s"),
    [
        (0.0, 0.0, 1.0),  # it sleeps
        (0.2, 0.8, 5.0),  # it computes for a fifth of the time, and waits for the rest
        (0.0, 0.8, 5.0),  # it sleeps for a fifth of the time
        (0.3, 1.4, 4.0),  # two of its threads wait at once; it has computed for its timeout
    ],
)
def test_time_spent_waiting_for_a_core_moves_the_deadline(
    monkeypatch: pytest.MonkeyPatch, computed_s: float, waited_s: float, ends_after_s: float
) -> None:
    """`computed_s` and `waited_s` are those of each second; the timeout is 1 s."""
    assert _end_s(monkeypatch, computed_s, waited_s) == pytest.approx(ends_after_s, abs=0.05)


def test_a_machine_that_is_too_busy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SandboxError, match=r"too busy: in 10\.0 s .* waited for a core for 9\.9 s and computed"
    ):
        _end_s(monkeypatch, 0.01, 0.99)


def _end_s(monkeypatch: pytest.MonkeyPatch, computed_s: float, waited_s: float) -> float:
    now = 5.0
    monkeypatch.setattr(sandbox.time, "monotonic", lambda: now)
    monkeypatch.setattr(sandbox, "_used_s", lambda: (computed_s * now, waited_s * now))
    deadline = Deadline(1.0)
    while not deadline.has_passed():
        assert now < 6 + MAX_WAIT
        now += 0.01
    return now - 5.0
