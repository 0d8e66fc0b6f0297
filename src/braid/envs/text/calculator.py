"""The calculator tool: exact arithmetic on short expressions, safe for arbitrary input.

    sum     := product (("+" | "-") product)*
    product := unary (("*" | "/" | "//" | "%") unary)*
    unary   := ("-" | "+") unary | power
    power   := atom (("**" | "^") unary)?
    atom    := number | "(" sum ")"

`^` is exponentiation; `//` and `%` round down as in Python. Numbers are rationals, so 0.1 + 0.2 is 0.3. The
length and depth of an expression and the size of every intermediate result are bounded, which bounds the time
to under a millisecond.
"""

from __future__ import annotations

import re
from decimal import Context, Decimal
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_DEPTH = 20
MAX_BITS = 256
"""Maximum size of a numerator or denominator (77 decimal digits)."""
DIGITS = 12
"""Significant digits of non-integer results."""

_TOKEN = re.compile(r"\s*(?:([0-9]+\.?[0-9]*|\.[0-9]+)|(\*\*|//|[-+*/%^()]))")


class CalculatorError(ValueError):
    """The expression cannot be evaluated. The message is short, because the policy reads it."""


def calculate(expression: str) -> str:
    """Evaluate `expression`: integers are printed in full, other numbers with 12 significant digits.

    Raises CalculatorError for a syntax error, a division by zero, or an exceeded bound.
    """
    if len(expression) > MAX_CHARACTERS:
        raise CalculatorError(f"longer than {MAX_CHARACTERS} characters")
    parser = _Parser(_tokens(expression))
    value = parser.sum(0)
    if parser.token is not None:
        raise CalculatorError(f"unexpected {parser.token}")
    return _format(value)


async def calculator(text: str) -> str:
    """The tool function: returns "error: ..." for expressions that cannot be evaluated."""
    try:
        return calculate(text)
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
        number, operator = match.groups()
        out.append(operator if number is None else _bounded(Fraction(number)))
        place = match.end()
    return out


class _Parser:
    """Recursive-descent parser of the grammar above: one method per rule, which receives the nesting
    depth."""

    def __init__(self, tokens: list[str | Fraction]) -> None:
        self._tokens = tokens
        self._place = 0

    @property
    def token(self) -> str | Fraction | None:
        """The next token; None at the end."""
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _take(self, *operators: str) -> str | None:
        token = self.token
        if isinstance(token, str) and token in operators:
            self._place += 1
            return token
        return None

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while operator := self._take("+", "-"):
            right = self._product(depth)
            value = _bounded(value + right if operator == "+" else value - right)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._unary(depth)
        while operator := self._take("*", "/", "//", "%"):
            value = _bounded(_multiply(operator, value, self._unary(depth)))
        return value

    def _unary(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise CalculatorError("nested too deep")
        if sign := self._take("-", "+"):
            value = self._unary(depth + 1)
            return -value if sign == "-" else value
        return self._power(depth)

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        return _power(base, self._unary(depth + 1)) if self._take("**", "^") else base

    def _atom(self, depth: int) -> Fraction:
        if self._take("("):
            value = self.sum(depth + 1)
            if not self._take(")"):
                raise CalculatorError("missing )")
            return value
        token = self.token
        if not isinstance(token, Fraction):
            raise CalculatorError("incomplete expression" if token is None else f"unexpected {token}")
        self._place += 1
        return token


def _multiply(operator: str, left: Fraction, right: Fraction) -> Fraction:
    if operator == "*":
        return left * right
    if right == 0:
        raise CalculatorError("division by zero")
    if operator == "/":
        return left / right
    return Fraction(left // right) if operator == "//" else left % right


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
