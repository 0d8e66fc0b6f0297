"""OmegaConf resolvers for config values: `${mul:${rollout.group_size},2}`, `${not:${eval.before}}`,
`${now:%Y%m%d}`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import cache, reduce
from operator import add, floordiv, mul, sub, truediv

from omegaconf import OmegaConf

Number = int | float
MAX_NUMBER = 1e308
"""Largest absolute value: larger integers do not fit in a float."""


def _number(value: object) -> Number:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return value


def _over(operation: Callable[[Number, Number], Number]) -> Callable[..., Number]:
    def compute(*values: object) -> Number:
        if len(values) < 2:
            raise ValueError(f"needs two or more numbers, got {len(values)}")
        result = reduce(operation, map(_number, values))
        if abs(result) > MAX_NUMBER:
            raise ValueError(f"the result exceeds {MAX_NUMBER:.0e}")
        return result

    return compute


def _not(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")
    return not value


@cache
def _now(form: str) -> str:
    """Local time in strftime's form; the same text for the whole process, as in Hydra."""
    return datetime.now().strftime(form)


RESOLVERS: dict[str, Callable[..., object]] = {
    "add": _over(add),
    "sub": _over(sub),
    "subtract": _over(sub),
    "mul": _over(mul),
    "multiply": _over(mul),
    "div": _over(truediv),
    "int_div": _over(floordiv),
    "min": _over(min),
    "max": _over(max),
    "not": _not,
    "now": _now,
}
"""Resolver name -> function. Arithmetic takes two or more numbers, from left to right; `div` returns 2.5,
`int_div` 2."""


def register_resolvers() -> None:
    """Register the resolvers with OmegaConf, without replacing existing ones."""
    register = (
        getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    )  # from 2.4; before
    for name, function in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            register(name, function)
