"""Mergeable metrics: each value carries what is needed to combine parts of a round exactly.

A mean is a sum and a count, so the mean over a round does not depend on how the round was split. Owns the
values and their merging; names.py declares the names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .names import position


@dataclass(frozen=True, slots=True)
class Value:
    """Accumulated value of a metric: a `Mean`, whose `number` is the sum over `count` items, a `Sum`, or a
    `Min` or `Max`, which are nan if any value is."""

    kind: Literal["Mean", "Sum", "Min", "Max"]
    number: float
    count: float = 1.0

    @property
    def value(self) -> float:
        """The number, of a mean divided by its count; nan if that is 0."""
        if self.kind == "Mean":
            return self.number / self.count if self.count else math.nan
        return self.number

    def merge(self, other: Value) -> Value:
        if self.kind in ("Mean", "Sum"):
            return Value(self.kind, self.number + other.number, self.count + other.count)
        pick = min if self.kind == "Min" else max
        has_nan = math.isnan(self.number) or math.isnan(other.number)
        return Value(self.kind, math.nan if has_nan else pick(self.number, other.number))


class Metrics:
    """Values by name. A name must be declared in names.py and keeps the kind of its first value."""

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}

    def mean(self, name: str, total: float, count: float = 1.0) -> None:
        """Add `total`, the sum over `count` items, to a mean."""
        self._put(name, Value("Mean", float(total), float(count)))

    def add(self, name: str, value: float) -> None:
        self._put(name, Value("Sum", float(value)))

    def min(self, name: str, value: float) -> None:
        self._put(name, Value("Min", float(value)))

    def max(self, name: str, value: float) -> None:
        self._put(name, Value("Max", float(value)))

    def value(self, name: str) -> float:
        """Return the current value. Raises KeyError for a name without one."""
        return self._values[name].value

    def merge(self, other: Metrics) -> None:
        """Merge the metrics of another worker or part of the round into these."""
        for name, value in other._values.items():
            self._put(name, value)

    def state(self) -> dict[str, tuple[Any, ...]]:
        """Return the state for `load`: name -> kind, number and count."""
        return {name: (value.kind, value.number, value.count) for name, value in self._values.items()}

    def load(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Replace all values by those of a `state()`."""
        self._values = {name: Value(*parts) for name, parts in state.items()}

    def flat(self) -> dict[str, float]:
        """Return name -> value, in the order of names.METRICS."""
        names = sorted(self._values, key=lambda name: (position(name), name))
        return {name: self._values[name].value for name in names}

    @classmethod
    def merged(cls, *several: Metrics) -> Metrics:
        """New metrics that combine those of several stages."""
        metrics = cls()
        for some in several:
            metrics.merge(some)
        return metrics

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _put(self, name: str, value: Value) -> None:
        position(name)
        old = self._values.get(name)
        assert old is None or old.kind == value.kind, (
            f"metric {name!r} is a {old.kind}, but the value is a {value.kind}"
        )
        self._values[name] = value if old is None else old.merge(value)
