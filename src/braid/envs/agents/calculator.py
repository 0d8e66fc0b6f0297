"""The calculator tool: exact arithmetic on short expressions, safe for arbitrary input.

Operators are those of Python, with `^` for exponentiation too. Numbers are rationals, so 0.1 + 0.2 is 0.3.
The length and depth of an expression and the size of every intermediate result are bounded, and with them the
time.
"""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_DEPTH = 20
MAX_BITS = 256
"""Maximum size of a numerator or denominator (77 decimal digits)."""
DIGITS = 12
"""Significant digits of non-integer results."""

_SIGN, _POWER = 3, 4
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "**": _POWER, "^": _POWER}
_OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction | int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
_TOKEN = re.compile(r"\s*(?:([0-9]+\.?[0-9]*|\.[0-9]+)|(\*\*|//|[-+*/%^()]))")


class CalculatorError(ValueError):
    """The expression cannot be evaluated. The message is short, because the policy reads it."""


def calculate(expression: str) -> str:
    """The value of `expression`: integers are printed in full, other numbers with 12 significant digits.

    Raises CalculatorError for a syntax error, a division by zero, or an exceeded bound.
    """
    if len(expression) > MAX_CHARACTERS:
        raise CalculatorError(f"longer than {MAX_CHARACTERS} characters")
    tokens = deque(_tokens(expression))
    value = _parse(tokens, 1, 0)
    if tokens:
        raise CalculatorError(f"unexpected {tokens[0]}")
    return _format(value)


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression exactly.

    Args:
        expression: Numbers, the operators + - * / // % **, and parentheses.

    Returns:
        The value, or "error: ..." if the expression cannot be evaluated.
    """
    try:
        return calculate(expression)
    except CalculatorError as error:
        return f"error: {error}"


def _tokens(expression: str) -> list[str | Fraction]:
    expression = expression.strip()
    out: list[str | Fraction] = []
    place = 0
    while place < len(expression):
        match = _TOKEN.match(expression, place)
        if match is None:
            raise CalculatorError(f"unexpected {expression[place:].lstrip()[0]}")
        number, sign = match.groups()
        out.append(sign if number is None else _bounded(Fraction(number)))
        place = match.end()
    return out


def _parse(tokens: deque[str | Fraction], lowest: int, depth: int) -> Fraction:
    """Take an operand, and what operators of precedence `lowest` and above apply to it."""
    if depth > MAX_DEPTH:
        raise CalculatorError("nested too deep")
    if not tokens:
        raise CalculatorError("incomplete expression")
    token = tokens.popleft()
    if token in ("-", "+"):
        value = _parse(tokens, _SIGN, depth + 1)
        value = -value if token == "-" else value
    elif token == "(":
        value = _parse(tokens, 1, depth + 1)
        if not tokens or tokens.popleft() != ")":
            raise CalculatorError("missing )")
    elif isinstance(token, Fraction):
        value = token
    else:
        raise CalculatorError(f"unexpected {token}")
    while tokens and isinstance(tokens[0], str) and _PRECEDENCE.get(tokens[0], 0) >= lowest:
        name = str(tokens.popleft())
        if _PRECEDENCE[name] == _POWER:  # its right operand may have a sign, and further powers
            value = _power(value, _parse(tokens, _SIGN, depth + 1))
        else:
            value = _bounded(_apply(name, value, _parse(tokens, _PRECEDENCE[name] + 1, depth)))
    return value


def _apply(name: str, left: Fraction, right: Fraction) -> Fraction:
    try:
        return Fraction(_OPERATIONS[name](left, right))
    except ZeroDivisionError as error:
        raise CalculatorError("division by zero") from error


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculatorError("exponent is not a whole number")
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    if base not in (0, 1, -1) and abs(exponent) > MAX_BITS:
        raise CalculatorError("number too large")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits - 1) * abs(exponent) > MAX_BITS:
        raise CalculatorError("number too large")
    return _bounded(Fraction(base ** (int(exponent) if abs(base) != 1 else int(exponent) % 2)))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError("number too large")
    return value


def _format(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    context = Context(prec=DIGITS)
    return f"{context.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize(context):f}"
