"""Metrics that merge: each value carries what it takes to add up parts of a round exactly.

A mean is a sum and a count, so the mean over a round does not depend on how the round was cut into pieces. Owns values
and their merging; which names exist is names.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from .names import position


class Value(Protocol):
    """A metric under collection."""

    @property
    def value(self) -> float: ...

    @property
    def numbers(self) -> tuple[float, ...]: ...

    def merge(self, other: Self) -> Self: ...


@dataclass(frozen=True, slots=True)
class Mean:
    """`sum` over `count` things; nan over none."""

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
    """The least; nan wins, so that it is not lost."""

    value: float

    @property
    def numbers(self) -> tuple[float, ...]:
        return (self.value,)

    def merge(self, other: Min) -> Min:
        return Min(min((self.value, other.value), key=_nan_first))


@dataclass(frozen=True, slots=True)
class Max:
    """The greatest; nan wins, so that it is not lost."""

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
    """Values by name. A name must be declared in names.py and keeps the kind it was first given."""

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}

    def mean(self, name: str, total: float, count: float = 1.0) -> None:
        """`total` is the sum over `count` things."""
        self._put(name, Mean(float(total), float(count)))

    def add(self, name: str, value: float) -> None:
        self._put(name, Sum(float(value)))

    def min(self, name: str, value: float) -> None:
        self._put(name, Min(float(value)))

    def max(self, name: str, value: float) -> None:
        self._put(name, Max(float(value)))

    def value(self, name: str) -> float:
        """The value so far. Raises KeyError for a name that nothing was put under."""
        return self._values[name].value

    def merge(self, other: Metrics) -> None:
        """Take in what another collector, of another worker or piece of the round, has gathered."""
        for name, value in other._values.items():
            self._put(name, value)

    def state(self) -> dict[str, tuple[str, tuple[float, ...]]]:
        """What `load` takes: name -> kind and numbers."""
        return {name: (type(value).__name__, value.numbers) for name, value in self._values.items()}

    def load(self, state: Mapping[str, tuple[str, Sequence[float]]]) -> None:
        """Take over a `state()`."""
        self._values = {name: _KINDS[kind](*numbers) for name, (kind, numbers) in state.items()}

    def flat(self) -> dict[str, float]:
        """Name -> value, in the order of the table of names."""
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
            f"metric {name!r} is a {type(old).__name__} and was given a {type(value).__name__}"
        )
        self._values[name] = value if old is None else old.merge(value)
