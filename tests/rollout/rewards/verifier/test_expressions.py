"""Equality by algebra: what is right, what is wrong, and what math-verify alone takes for equal and is not."""

import pytest
from math_verify import parse, verify

from jackpot.rollout.rewards.verifier.compare import compare
from jackpot.rollout.rewards.verifier.expressions import equal_expressions

EQUAL = [
    (r"9 \cdot 2", "18"),
    (r"1.5 \times 10^3", "1500"),
    (r"\frac{2}{\sqrt2}", r"\sqrt{2}"),
    ("2 sqrt(3)", r"2\sqrt{3}"),
    (r"10\sqrt3 \text{ feet}", r"10\sqrt{3}"),
    ("(x-1)(x+1)", "x^2-1"),
    ("0.5x", r"\frac{x}{2}"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"2\sin x\cos x", r"\sin 2x"),
    (r"\cos 60^\circ", "1/2"),
    (r"\cos(60^\circ)", "1/2"),
    (r"\sin x^\circ", r"\sin \frac{\pi x}{180}"),
    (r"\binom{5}{2}", "10"),
    ("5!", "120"),
    (r"\log_2 8", "3"),
    ("(1+i)^2", "2i"),
    (r"\frac{1}{2} + \frac{\sqrt{3}}{2} i", r"e^{i\pi/3}"),
    (r"2(2^{99}-1)", r"2^{100}-2"),
    ("2x^2 + 2y^2 = 2", "x^2 + y^2 = 1"),
    ("x = 2y", "2y = x"),
    ("3 > x", "x < 3"),
    (r"[\frac{2}{4}, \sqrt{4})", "[0.5, 2)"),
    ("2**3", "8"),
    ("2 ** -10", r"\frac{1}{1024}"),
    ("x**2 + 1", "x^2 + 1"),
    (r"\int^1_0 2x dx", "1"),
    (r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}", "-2"),
]
UNEQUAL = [
    (r"9 \cdot 3", "18"),
    ("18 dozen", "18"),
    ("(x-1)^2", "x^2-1"),
    (r"2^{100}-2", r"2^{100}-1"),
    ("2x^2 + 2y^2 = 3", "x^2 + y^2 = 1"),
    (r"1.56 = 56\%", r"0.56 = 56\%"),
    ("1 = 3", "1 = 2"),
    ("3 < x", "x < 3"),
    (r"x \le 3", "x < 3"),
    (r"[\sqrt{2}, 2)", r"[\sqrt3, 2)"),
    ("6 + 5i", "6 - 5i"),
    ("y = 5", "x = 5"),
    ("x=2, y=1", "x=1, y=2"),
    ("****", "x"),
    ("2**3", "23"),
    ("2**10", "20"),
    ("2**3**2", "64"),
    ("3 eighths", "3"),
    ("5 ninths", "5"),
    ("5 seventeenths", "5"),
    ("5 sin x", "5"),
    ("5 sec x", "5"),
    ("5 log n", "5"),
    ("5 factorial", "5"),
    ("5 lakh", "5"),
    ("5 crores", "5"),
    ("5 gross", "5"),
    ("5 inverse", "5"),
    ("5 negative", "5"),
    ("0.3 repeating", "0.3"),
    ("5xyz", "5"),
    (r"\frac12xyz", "1/2"),
    ("5 ms", r"5\text{ m}"),
    ("12_8 + x", "12_5 + x"),
    (r"\frac{", "x"),
    ("(" * 1500, "x"),
]
MISTAKES_OF_MATH_VERIFY = [  # each pair is equal to it
    (r"3^{-40}", r"3^{-41}"),
    (r"\frac{\pi}{10^{30}}", r"\frac{2\pi}{10^{30}}"),
    ("1.414214", r"\sqrt{2}"),
    ("0.333333", r"\frac{1}{3}"),
    ("0.0000001", "0.0000002"),
    (r"\cos(6^\circ)", r"\cos(6)"),
    ("x", "X"),
    ("x'", "x"),
    ("2x' + 1", "2x + 1"),
    (r"2\overline{AB}", r"2\overline{ab}"),
    (r"\pi r^2", r"\pi r^2 h"),
    ("12_6", "12_5"),
    ("4 = 5", "5"),
    ("0.5", r"50\%"),
    (r"4\!:\!51", r"\frac{4}{51}"),
    (r"5 \text{ cm}", r"5 \text{ m}"),
]


@pytest.mark.parametrize(("answer", "reference"), EQUAL)
def test_equal_expressions_are_right(answer, reference):
    assert compare(answer, reference, equal_expressions) is True


@pytest.mark.parametrize(("answer", "reference"), UNEQUAL)
def test_unequal_expressions_and_nonsense_are_wrong(answer, reference):
    assert compare(answer, reference, equal_expressions) is False


@pytest.mark.parametrize(("answer", "reference"), MISTAKES_OF_MATH_VERIFY)
def test_unequal_pairs_that_math_verify_calls_equal_are_wrong(answer, reference):
    assert verify(parse(f"${reference}$", parsing_timeout=None), parse(f"${answer}$", parsing_timeout=None))
    assert compare(answer, reference, equal_expressions) is False
