"""Equality of two expressions, decided with math-verify and corrections to it. Only this file imports math-verify.

The comparison runs in reward workers only, because it can take unbounded time and memory.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, normalize_latex
from math_verify import verify as math_verify
from math_verify.parser import parse_latex_cached
from sympy import Basic, Eq, Expr, Float, I, N, Rational

from jackpot.rollout.rewards.verifier.compare import compare

for name in ("math_verify", "math_verify.grader", "math_verify.parser"):
    logging.getLogger(name).disabled = True  # warns that no time limit is set, but the pool of workers sets one

_STYLE = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\\[a-z]+|[a-z]|\)) ?\^\\circ(?![A-Za-z])")
_LETTER = re.compile(r"\\[A-Za-z]+|([A-Za-z])")
_CLOSE = Rational(1, 10**30)  # largest relative difference of numbers that count as equal
# Numerators of the numbers that replace the symbols of expressions, at each of three points of comparison.
_PRIMES = ((2, 3, 5, 7, 11, 13), (17, 19, 23, 29, 31, 37), (41, 43, 47, 53, 59, 61))


def verify(*, answer: str, reference: str) -> float:
    """Return 1.0 where the final answer of a response equals the reference, else 0.0."""
    return float(compare(answer, reference, equal_expressions))


def equal_expressions(answer: str, reference: str) -> bool:
    """Return whether two normalized expressions are equal; False where math-verify cannot parse one of them.

    `math_verify.verify` is corrected as follows:

    - Decimals are exact: math-verify rounds to six digits, so that 1.414214 would be the root of two.
    - The values of two expressions must also agree to 30 digits, for three choices of the numbers that the symbols
      stand for: math-verify ignores differences below 1e-15.
    - Two equations are equal if `lhs - rhs` of one is a constant multiple of `lhs - rhs` of the other: math-verify
      compares solutions, so that all equations without a solution are equal.
    - A degree sign multiplies by pi / 180, `i` is the root of -1, and `x'`, `x` and `X` are different symbols.
    - The time limits of math-verify are off: they are signals, which C code ignores.

    Raises:
        MemoryError: the process is out of memory.
    """
    # The letters of each text, without those of commands such as `\pi`.
    given, wanted = (set(_LETTER.findall(text)) for text in (answer, reference))
    # A letter that is small in one text and capital in the other stands for two different symbols, as do x and x'.
    if answer.count("'") != reference.count("'") or {letter.swapcase() for letter in given - wanted} & (wanted - given):
        return False
    try:
        return _equal(parse(answer), parse(reference))
    except MemoryError:  # says nothing about the answer
        raise
    except Exception:  # sympy raises many kinds on text that a model generated
        return False


def parse(text: str) -> Basic:
    """Parse an expression, equation, inequality or matrix, with rational numbers for decimals and `i` as a root of -1.

    Raises:
        Exception: math-verify cannot parse the text.
    """
    # Write degrees as a product with pi / 180.
    text = _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    parsed: Any = parse_latex_cached(normalize_latex(text, config=_STYLE))
    # For each decimal in the parsed expression, the fraction that replaces it.
    exact: dict[Basic, Basic] = {decimal: Rational(str(decimal)) for decimal in parsed.atoms(Float)}
    return parsed.xreplace(exact | {symbol: I for symbol in parsed.free_symbols if symbol.name == "i"})


def _equal(answer: Any, reference: Any) -> bool:
    """Tell whether two parsed expressions are equal: both for math-verify and by their values at a few points.

    Of two equations only the values count. Sets, inequalities and others without a value are left to math-verify alone.
    """
    pair: tuple[Any, Any] = (answer, reference)
    # Two equations are equal if lhs - rhs of one is a constant multiple of lhs - rhs of the other: the ratio of the two
    # is at each of the three points what it is at the first point. The ratios are compared by cross multiplication.
    if isinstance(answer, Eq) and isinstance(reference, Eq):
        # For each point a pair: lhs - rhs of the answer, and lhs - rhs of the reference; `values[0]` is the first pair.
        values = [*_values(*(equation.lhs - equation.rhs for equation in pair))]
        has_one_ratio = all(a != 0 and b != 0 and _close(a * values[0][1], b * values[0][0]) for a, b in values)
        # An equation without symbols, such as 1 = 2, counts as unequal.
        return has_one_ratio and values != [] and answer.free_symbols != set()

    if not math_verify(reference, answer, strict=True, timeout_seconds=None, raise_on_error=True):
        return False
    has_values = isinstance(answer, Expr) and isinstance(reference, Expr)
    return not has_values or all(_close(a, b) for a, b in _values(answer, reference))


def _values(*expressions: Any) -> Iterator[list[Expr]]:
    """Yield, for each of three choices of numbers for the symbols (a point), the values of all expressions there.

    A point at which an expression has no value is left out. Symbols of one name get one number in all expressions.
    """
    names = sorted({symbol.name for expression in expressions for symbol in expression.free_symbols})
    for primes in _PRIMES:
        # The numbers are prime / 7, prime / 8, ...: they differ even where the same prime is used again.
        point = {name: Rational(primes[index % len(primes)], 7 + index) for index, name in enumerate(names)}
        values = [_value(expression, point) for expression in expressions]
        if all(value.is_number and value.is_finite for value in values):
            yield values


def _value(expression: Any, point: Mapping[str, Any]) -> Expr:
    """Return the value of an expression to 40 digits, where `point` gives the number for each symbol, by its name."""
    return N(expression.xreplace({symbol: point[symbol.name] for symbol in expression.free_symbols}).doit(), 40)


def _close(a: Expr, b: Expr) -> bool:
    """Return whether two numbers agree to 30 digits."""
    return bool(abs(a - b) <= _CLOSE * max(abs(a), abs(b)))
