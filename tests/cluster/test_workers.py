"""A group's workers, called through what is typed as their class."""

from __future__ import annotations

import pytest
from tests.several import Several


class _Counter:
    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, list[tuple[int, str]]()

    def count(self, number: int, *, name: str) -> int:
        """The rank, after noting the call."""
        self.calls.append((number, name))
        return self.rank


def test_methods_of_the_class_are_called_on_the_first_worker_or_on_all() -> None:
    group = Several("counter", [lambda _, rank=rank: _Counter(rank) for rank in range(3)])
    assert group.first(_Counter).count(1, name="first") == 0
    assert group.every(_Counter).count(2, name="every") == 0
    calls = [worker._worker.calls for worker in group._groups]
    assert calls == [[(1, "first"), (2, "every")], [(2, "every")], [(2, "every")]]


def test_a_misspelt_method_fails_before_any_worker_is_called() -> None:
    group = Several("counter", [lambda _: _Counter(0)])
    for side in (group.first(_Counter), group.every(_Counter)):
        with pytest.raises(AttributeError, match=r"_Counter has no method 'recount'; did you mean 'count'\?"):
            side.recount()  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match=r"_Counter has no method 'rank'$"):
            side.rank()  # type: ignore[operator]
    assert not group._groups[0]._worker.calls
