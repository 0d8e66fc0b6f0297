"""Which of the time that a test waited for a core was the machine's fault."""

from __future__ import annotations

import pytest

from braid.isolation.sandbox import waited_for_others


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
