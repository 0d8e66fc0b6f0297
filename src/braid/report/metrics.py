"""Mergeable metrics: each value carries what is needed to combine parts of a round exactly.

A mean is a sum and a count, so the mean over a round does not depend on how the round was split. Owns the
values and their merging; names.py declares the names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from .names import position


class Value(Protocol):
    """Accumulated value of a metric."""

    @property
    def value(self) -> float: ...

    @property
    def numbers(self) -> tuple[float, ...]: ...

    def merge(self, other: Self) -> Self: ...


@dataclass(frozen=True, slots=True)
class Mean:
    """`sum` divided by `count`; nan if the count is 0."""

    sum: float
    count: float = 1.0

    @property
    def value(self) -> float:
        return self.sum / self.count if self.count else float("nan")

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.sum, self.count

    def merge(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Sum:
    """A total."""

    value: float

    @property
    def numbers(self) -> tuple[float, ...]:
        return (self.value,)

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Min:
    """Minimum; nan if any value is nan."""

    value: float

    @property
    def numbers(self) -> tuple[float, ...]:
        return (self.value,)

    def merge(self, other: Min) -> Min:
        return Min(min((self.value, other.value), key=_nan_first))


@dataclass(frozen=True, slots=True)
class Max:
    """Maximum; nan if any value is nan."""

    value: float

    @property
    def numbers(self) -> tuple[float, ...]:
        return (self.value,)

    def merge(self, other: Max) -> Max:
        return Max(-min((-self.value, -other.value), key=_nan_first))


def _nan_first(value: float) -> float:
    return -math.inf if math.isnan(value) else value


_KINDS: dict[str, Callable[..., Value]] = {kind.__name__: kind for kind in (Mean, Sum, Min, Max)}


class Metrics:
    """Values by name. A name must be declared in names.py and keeps the kind of its first value."""

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}

    def mean(self, name: str, total: float, count: float = 1.0) -> None:
        """Add `total`, the sum over `count` items, to a mean."""
        self._put(name, Mean(float(total), float(count)))

    def add(self, name: str, value: float) -> None:
        self._put(name, Sum(float(value)))

    def min(self, name: str, value: float) -> None:
        self._put(name, Min(float(value)))

    def max(self, name: str, value: float) -> None:
        self._put(name, Max(float(value)))

    def value(self, name: str) -> float:
        """Return the current value. Raises KeyError for a name without one."""
        return self._values[name].value

    def merge(self, other: Metrics) -> None:
        """Merge the metrics of another worker or part of the round into these."""
        for name, value in other._values.items():
            self._put(name, value)

    def state(self) -> dict[str, tuple[str, tuple[float, ...]]]:
        """Return the state for `load`: name -> kind and numbers."""
        return {name: (type(value).__name__, value.numbers) for name, value in self._values.items()}

    def load(self, state: Mapping[str, tuple[str, Sequence[float]]]) -> None:
        """Replace all values by those of a `state()`."""
        self._values = {name: _KINDS[kind](*numbers) for name, (kind, numbers) in state.items()}

    def flat(self) -> dict[str, float]:
        """Return name -> value, in the order of names.METRICS."""
        return {
            name: self._values[name].value for name in sorted(self._values, key=lambda n: (position(n), n))
        }

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _put(self, name: str, value: Value) -> None:
        position(name)
        old = self._values.get(name)
        assert old is None or type(old) is type(value), (
            f"metric {name!r} is a {type(old).__name__}, but the value is a {type(value).__name__}"
        )
        self._values[name] = value if old is None else old.merge(value)
