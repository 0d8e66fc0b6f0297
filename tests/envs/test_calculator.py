from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.envs.agents.calculator import MAX_CHARACTERS, CalculatorError, calculate, calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", "84"),
        (" 2 + 3 * 4 ", "14"),
        ("(2+3)*4", "20"),
        ("10-4-3", "3"),
        ("2**3**2", "512"),
        ("2^10", "1024"),
        ("-2^2", "-4"),
        ("2^-2", "0.25"),
        ("--5", "5"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("-7%3", "2"),
        ("8/2/2", "2"),
        ("0.1+0.2", "0.3"),
        ("1.5*4", "6"),
        (".5+1.", "1.5"),
        ("1/3", "0.333333333333"),
        ("2/3*3", "2"),
        ("1/1000000000000000", "0.000000000000001"),
        ("99999999999*99999999999", "9999999999800000000001"),
        ("(-1)^1000001", "-1"),
        ("0^0", "1"),
    ],
)
def test_expressions_have_their_exact_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "incomplete expression"),
        ("3+", "incomplete expression"),
        ("3 4", "unexpected 4"),
        ("(3", r"missing \)"),
        ("3)", r"unexpected \)"),
        ("abs(3)", "unexpected a"),
        ("__import__('os')", "unexpected _"),
        ("１+1", "unexpected １"),  # noqa: RUF001  # another script's digit
        ("1/0", "division by zero"),
        ("5%0", "division by zero"),
        ("0^-1", "division by zero"),
        ("2^0.5", "exponent is not a whole number"),
        ("9**9**9", "number too large"),
        ("10^300", "number too large"),
        ("2^(2^200)", "number too large"),
        ("9" * 100, "number too large"),
        ("1" * (MAX_CHARACTERS + 1), f"longer than {MAX_CHARACTERS} characters"),
        ("(" * 90 + "1" + ")" * 90, "nested too deep"),
        ("-" * 190 + "1", "nested too deep"),
    ],
)
def test_invalid_expressions_are_reported(expression: str, message: str) -> None:
    with pytest.raises(CalculatorError, match=message):
        calculate(expression)


_EXPRESSIONS = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
    max_leaves=6,
)


@given(_EXPRESSIONS)
def test_it_agrees_with_rational_arithmetic(expression: str) -> None:
    source = "".join(f"Fraction({w})" if w.isdigit() else w for w in _words(expression))
    try:
        expected = eval(source, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(CalculatorError, match="division by zero"):
            calculate(expression)
        return
    # 12 significant digits are right to half a unit of the last.
    assert abs(Fraction(calculate(expression)) - expected) <= abs(expected) * Fraction(1, 10**11)


def _words(expression: str) -> list[str]:
    for mark in "()+-*/":
        expression = expression.replace(mark, f" {mark} ")
    return expression.split()


@given(st.text(alphabet="0123456789+-*/%^(). eE_x", max_size=40) | st.text(max_size=40))
def test_any_input_gets_a_short_answer(text: str) -> None:
    answer = calculator(text)
    assert 0 < len(answer) <= 100
