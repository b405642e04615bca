"""Decides with math-verify, and corrections to it, whether two expressions are equal. Only this file imports it.

It runs in reward workers only, for it can take unbounded time and memory. math-verify's own time limits are signals,
which C code ignores; they are off.

Corrections of `math_verify.verify`:

- Decimals are exact: math-verify rounds to six digits, so that 1.414214 would be the root of two.
- Two expressions that it calls equal must agree to 30 digits at three points: it ignores differences below 1e-15.
- Two equations that it calls equal must differ by a factor that is the same at three points, and have an unknown.
- Degrees inside an expression are degrees, `i` is the root of -1, primes and capital letters are not dropped.
"""

import logging
import re
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, normalize_latex
from math_verify import verify
from math_verify.parser import parse_latex_cached
from sympy import Basic, Eq, Expr, Float, I, N, Rational, Symbol

logging.getLogger("math_verify").disabled = True
for name in ("grader", "parser"):
    logging.getLogger(f"math_verify.{name}").disabled = True  # they warn that no time limit is set; the pool sets it

_STYLE = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\\[a-z]+|[a-z]|\)) ?\^\\circ(?![A-Za-z])")
_COMMAND, _LETTER = re.compile(r"\\[A-Za-z]+"), re.compile("[A-Za-z]")
_DIGITS, _CLOSE = 40, Rational(1, 10**30)
_PRIMES = ((2, 3, 5, 7, 11, 13), (17, 19, 23, 29, 31, 37), (41, 43, 47, 53, 59, 61))


def equal_expressions(answer: str, reference: str) -> bool:
    """Return whether two normalized expressions are equal; False where math-verify cannot parse one of them.

    Raises:
        MemoryError: the process is out of memory.
    """
    if _letters_differ(answer, reference):
        return False
    theirs = parse(reference)
    mine = None if theirs is None else parse(answer)
    if mine is None or theirs is None:
        return False
    try:
        equal = verify(theirs, mine, strict=True, timeout_seconds=None, raise_on_error=True)
        return bool(equal) and _agree(mine, theirs)
    except MemoryError:
        raise
    except Exception:  # sympy raises many kinds on text that a model generated
        return False


def parse(text: str) -> Basic | None:
    """Parse an expression, equation or inequality with exact numbers; None where math-verify cannot parse it."""
    text = _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    try:
        return _exact(parse_latex_cached(normalize_latex(text, config=_STYLE)))
    except MemoryError:
        raise
    except Exception:  # math-verify raises many kinds
        return None


def _exact(parsed: Any) -> Basic:
    """Return what math-verify parsed, a matrix too, with rational numbers for decimals and with `i` as a root of -1."""
    exact: dict[Basic, Basic] = {number: Rational(str(number)) for number in parsed.atoms(Float)}
    return parsed.xreplace(exact | {symbol: I for symbol in parsed.free_symbols if symbol.name == "i"})


def _letters_differ(one: str, other: str) -> bool:
    """Return whether a letter is a capital on one side and small on the other, or the number of primes differs."""
    mine, theirs = (set(_LETTER.findall(_COMMAND.sub(" ", text))) for text in (one, other))
    return one.count("'") != other.count("'") or bool({letter.swapcase() for letter in mine - theirs} & (theirs - mine))


def _agree(one: Basic, other: Basic) -> bool:
    """Check math-verify's result numerically; inequalities and others without a value pass."""
    if isinstance(one, Eq) and isinstance(other, Eq):
        pairs = _values(_difference(one), _difference(other))
        return bool(one.free_symbols) and all(
            a != 0 and b != 0 and _close(a * pairs[0][1], b * pairs[0][0]) for a, b in pairs
        )
    if isinstance(one, Expr) and isinstance(other, Expr):
        return all(_close(a, b) for a, b in _values(one, other))
    return True


def _difference(equation: Any) -> Expr:
    """Return the left side minus the right one, which sympy types as if nothing could be subtracted from them."""
    return equation.lhs - equation.rhs


def _values(one: Expr, other: Expr) -> list[tuple[Expr, Expr]]:
    """Evaluate both at three points, with symbols matched by name; points without a value are left out."""
    symbols: set[Any] = one.free_symbols | other.free_symbols  # sympy types them as if they had no name
    names = sorted({symbol.name for symbol in symbols})
    pairs = []
    for primes in _PRIMES:
        point = {name: Rational(primes[index % len(primes)], 7 + index) for index, name in enumerate(names)}
        at_point = {symbol: point[symbol.name] for symbol in symbols if isinstance(symbol, Symbol)}
        values = tuple(N(side.xreplace(at_point).doit(), _DIGITS) for side in (one, other))
        if all(value.is_number and value.is_finite for value in values):
            pairs.append(values)
    return pairs


def _close(one: Expr, other: Expr) -> bool:
    """Return whether two numbers agree to 30 digits."""
    return bool(abs(one - other) <= _CLOSE * max(abs(one), abs(other)))
