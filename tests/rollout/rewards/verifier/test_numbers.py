"""Which texts are numbers, which value and unit each one has, and which units agree."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackpot.rollout.rewards.verifier.latex import normalize
from jackpot.rollout.rewards.verifier.numbers import parse_quantity
from jackpot.rollout.rewards.verifier.units import LABEL, units_agree


def quantity_of(text, is_reference=False):
    """Return value and unit of a text, None where it is no number."""
    return parse_quantity(normalize(text), is_reference)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("18", 18, ""),
        ("-5", -5, ""),
        ("\N{MINUS SIGN}5", -5, ""),
        ("+5", 5, ""),
        ("007", 7, ""),
        ("5.", 5, ""),
        (".25", Fraction(1, 4), ""),
        ("1,234,567", 1_234_567, ""),
        (r"1{,}234", 1234, ""),
        (r"1,\!234,\! 567", 1_234_567, ""),
        (r"20\,000", 20_000, ""),
        ("$18$", 18, ""),
        ("**18**", 18, ""),
        ("1/3", Fraction(1, 3), ""),
        (r"-\frac{1}{3}", Fraction(-1, 3), ""),
        (r"\dfrac{-2}{4}", Fraction(-1, 2), ""),
        (r"\frac12", Fraction(1, 2), ""),
        (r"\frac 34", Fraction(3, 4), ""),
        (r"\frac{1}4", Fraction(1, 4), ""),
        (r"2\frac{1}{3}", Fraction(7, 3), ""),
        ("2 1/3", Fraction(7, 3), ""),
        (r"-15\frac{3}{5}", Fraction(-78, 5), ""),
        (r"\frac{2469}{20,\!000}", Fraction(2469, 20000), ""),
        (r"\mathbf{2340}", 2340, ""),
        ("$18", 18, "dollar"),
        (r"\$1,234.50", Fraction(2469, 2), "dollar"),
        (r"-\$5", -5, "dollar"),
        ("18 dollars", 18, "dollar"),
        (r"50\%", 50, "percent"),
        ("50 percent", 50, "percent"),
        (r"30^\circ", 30, "degree"),
        (r"30^{\circ}", 30, "degree"),
        ("30 degrees", 30, "degree"),
        (r"5\text{ cm}", 5, "centimeter"),
        (r"5 \mathrm{cm}^2", 5, "centimeter^2"),
        ("5 square feet", 5, "foot^2"),
        (r"20 \text{ sq. in}", 20, "inch^2"),
        (r"14 \text{ right triangles}", 14, LABEL),
        (r"14\text{ }", 14, ""),
        ("5 sec", 5, "second"),
        ("5 min", 5, "minute"),
        (r"\frac{11}{15}\text{ days}.", Fraction(11, 15), "day"),
    ],
)
def test_numbers_and_known_units_are_read_exactly(text, value, unit):
    assert quantity_of(text) == (value, unit)
    assert quantity_of(text, is_reference=True) == (value, unit)


NO_NUMBERS = [
    r"-",
    r"--5",
    r"1,23",
    r"12,34,567",
    r"1/0",
    r"\frac{1}{0}",
    r"1/2/3",
    r"3:5",
    r"12_5",
    r"5x",
    r"5m",
    r"1e5e",
    r"x",
    r"inf",
    r"nan",
    r"0x1F",
    r"5!",
    r"1.2.3",
    r"1_000",
    r"half",
    r"2^3",
]
NO_NUMBERS += ["", "5 m", "5 6", "5 dozen", "$5 million", r"5\text{ million}", "5 or 6", r"5\text{ or so}"]
NO_NUMBERS += [r"5\text{ remainder 2}", "5 remainder 2", r"\frac{1}{x}", r"\sqrt{4}", "$5 cents"]
NO_NUMBERS += ["18eggs", "3 eighths", r"3\text{ ninths}", "5 sin x", r"5\text{ lakh}", "5 factorial", r"\frac12xyz"]


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_nothing_else_is_a_number(text):
    assert quantity_of(text) is None
    assert quantity_of(text, is_reference=True) is None


def test_plain_words_are_a_label_in_an_answer_alone():
    assert quantity_of("18 eggs") == (18, LABEL)
    assert quantity_of("18 eggs", is_reference=True) is None


def test_two_known_units_must_be_the_same():
    assert units_agree("", "meter")
    assert units_agree("meter", "")
    assert units_agree("meter", "meter")
    assert not units_agree("meter", "centimeter")


def test_a_label_is_no_unit_where_the_reference_has_one():
    assert not units_agree(LABEL, "meter")
    assert units_agree(LABEL, "")
    assert units_agree(LABEL, LABEL)
    assert units_agree("meter", LABEL)


spellings = st.sampled_from(
    ["{0}/{1}", r"\frac{{{0}}}{{{1}}}", r"\dfrac{{{0}}}{{{1}}}", r"$\left.\frac{{{0}}}{{{1}}}\right.$"]
)


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**30), spellings)
def test_every_fraction_is_its_value_in_every_spelling(numerator, denominator, spelling):
    assert quantity_of(spelling.format(numerator, denominator)) == (Fraction(numerator, denominator), "")


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=7))
def test_every_decimal_is_its_value_with_and_without_separators(decimal):
    assert quantity_of(f"{decimal:f}") == (Fraction(decimal), "")
    assert quantity_of(f"{decimal:,f}") == (Fraction(decimal), "")


def test_a_power_of_ten_has_at_most_four_digits():
    """More would be a number that fills the memory, and is compared as text."""
    assert quantity_of(r"2\times 10^{9999}").value == 2 * 10**9999
    assert quantity_of(r"2\times 10^{10000}") is None
    assert quantity_of(r"2\times 10^{-10000}") is None
