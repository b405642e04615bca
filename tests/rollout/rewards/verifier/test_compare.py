"""Answers compared without algebra: which are right, which are wrong, and which are left to algebra."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackpot.rollout.rewards.verifier.compare import compare, compare_without_algebra
from jackpot.rollout.rewards.verifier.extract import MAX_ANSWER_LENGTH

RIGHT = [  # answer, reference
    ("18", "18"),
    ("18.0", "18"),
    ("$18", "18"),
    ("18 eggs", "18"),
    ("x = 18", "18"),
    ("1,800", "1800"),
    (r"\frac{36}{2}", "18"),
    ("50", r"50\%"),
    (r"50\%", "50"),
    ("5", r"5\text{ m}"),
    (r"30^\circ", "30"),
    (r"\approx 8.24", r"\approx 8.24 \text{ mph}"),
    ("12_5", "12_{5}"),
    ("12", "12_5"),
    ("Evelyn", r"\text{Evelyn}"),
    (r"\textbf{evelyn}.", r"\text{Evelyn}"),
    ("(C)", r"\text{(C)}"),
    ("C", r"\text{(C)}"),
    (r"\text{D}", "D"),
    (r"\left( 1, \frac{4}{2} \right)", "(1,2)"),
    (r"[\frac12,\infty)", r"[0.5, +\infty)"),
    ("2,1", "1,2"),
    ("1 and 2", "1,2"),
    (r"\{2, 1\}", "1,2"),
    (r"x=1 \text{ or } x=2", "1,2"),
    ("x = 1, 2", "1,2"),
    ("1, 1, 2", "2, 1, 1"),
    ("1000, 2000", "1,000 and 2,000"),
    (r"6, 8, 10", r"6, 8\text{, and }10"),
    (r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{19}"),
    (r"\{-2, 1-\sqrt5, 1+\sqrt5\}", r"\{1\pm\sqrt{5},-2\}"),
    (r"(3,\infty) \cup (-\infty,2)", r"(-\infty, 2)\cup(3,\infty)"),
    (r"x \in [1,2]", "[1,2]"),
    ("H, E", r"\text{E, H}"),
    (r"\begin{bmatrix} 4 \\ -3 \end{bmatrix}", r"\begin{pmatrix}4\\-3\end{pmatrix}"),
    (r"\begin{pmatrix} 4 \\ -\frac{6}{2} \\ \end{pmatrix}", r"\begin{pmatrix}4\\-3\end{pmatrix}"),
    ("3 : 5", "3:5"),
    (r"y = 2x+3", "2x + 3"),
    ("2x+3", "y = 2x + 3"),
    (r"\dfrac{\pi}2", r"\frac{\pi}{2}"),
    ("2,15; -4,27", "2, 15, -4, 27"),
    ("(2, 15), (-4, 27)", "(-4, 27);(2, 15)"),
    ("infinity", r"\infty"),
    (r"\frac {40} 7", r"\frac{40}{7}"),
    (r"\frac{\sqrt3} {2}", r"\frac{\sqrt{3}}{2}"),
    ("1F_{16}", "1F_16"),
    ("1F", "1F_{16}"),
    ("**18**.", "18"),
    ("18 eggs", r"18\text{ eggs}"),
    ("5 meters", r"5\text{ marbles}"),  # any words may follow, where the reference has a label
    (r"\frac12 cups", "1/2"),
    (r"\frac{1}{2} x", r"\frac{1}{2}x"),
]
WRONG = [  # answer, reference
    ("", "18"),
    ("19", "18"),
    ("-18", "18"),
    ("18.000001", "18"),
    ("0.333333", "1/3"),
    ("18 or 19", "18"),
    ("18, 19", "18"),
    ("(18)(19)", r"\text{yes}"),
    ("18 = 19", "18"),
    (r"\ne 18", "18"),
    ("18 < 19", "18"),
    ("4 = 18", "18"),
    ("5 6", "30"),
    (r"5\text{ dozen}", "5"),
    (r"0.5", r"50\%"),
    (r"5\text{ cm}", r"5\text{ m}"),
    (r"5\text{ cm}", r"5\text{ cm}^2"),
    ("5 cents", r"\$5"),
    ("12_6", "12_5"),
    ("7", "12_5"),
    ("Eve", r"\text{Evelyn}"),
    ("18", r"\text{Evelyn}"),
    ("DCBA", r"\text{CBAD}"),
    ("cbad", r"\text{CBAD}"),
    ("c", "C"),
    ("x", "X"),
    ("C", "D"),
    ("C, D", "C"),
    ("(2,1)", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("(1,2]", "[1,2)"),
    ("1, 2", "(1,2)"),
    ("(1,2)", "1, 2"),
    ("(1,2,3)", "(1,2)"),
    ("(1,3)", "(1,2)"),
    ("1,2,3", "1,2"),
    ("1", "1,2"),
    ("1,1", "1,2"),
    ("1,1,2", "1,2,2"),
    ("x=1, y=2", "1, 2"),
    (r"1+\sqrt{19}", r"1 \pm \sqrt{19}"),
    (r"(-\infty, 2]\cup(3,\infty)", r"(-\infty, 2)\cup(3,\infty)"),
    (r"(-\infty, 2)", r"(-\infty, 2)\cup(3,\infty)"),
    (r"\begin{pmatrix} 4 & -3 \end{pmatrix}", r"\begin{pmatrix}4\\-3\end{pmatrix}"),
    (r"\begin{pmatrix} -3 \\ 4 \end{pmatrix}", r"\begin{pmatrix}4\\-3\end{pmatrix}"),
    ("(4, -3)", r"\begin{pmatrix}4\\-3\end{pmatrix}"),
    ("5:3", "3:5"),
    ("3/5", "3:5"),
    ("4/51", "4:51"),
    ("Picnic, Softball", r"\text{Softball, Picnic}"),
    ("x^2", "x^2 = 1"),
    ("x^2 = 1", "x^2"),
    (r"\text{two lines}", r"2x"),
    ("a", "a_1"),
    ("x", "x_2"),
    ("x", "x_{40}"),
    ("7", "7_1"),
    ("19", "19_8"),
    ("12_8", "12"),
    ("5_2", "5"),
    ("(12_8, 3)", "(12, 3)"),
    ("12_8 + x", "12_5 + x"),
    ("12_8 + x", "12 + x"),
    (r"\frac{12_8}{2}", "6"),
    (r"5\ldots", "5"),
    (r"0.333\ldots", "0.333"),
    ("0.333...", "0.333"),
    (r"5\mod 7", "5"),
    (r"5 \pmod{7}", "5"),
    (r"x + \cdots", "x"),
    ("3 cups", r"3\text{ meters}"),
    (r"5\text{ nanometers}", r"5\text{ meters}"),
    ("5 nanometers", r"5\text{ meters}"),
    ("5 meters", r"5\text{ nanometers}"),
    (r"5\text{ milligrams}", r"5\text{ grams}"),
    (r"5\text{ ms}", r"5\text{ m}"),
    (r"5\text{ eighths}", "5"),
]
UNKNOWN = [  # answer, reference
    (r"9 \cdot 2", "18"),
    (r"\sqrt{324}", "18"),
    ("x = 2y", "2y = x"),
    ("(x-1)(x+1)", "x^2-1"),
    (r"(\sqrt{4}, 1)", "(2, 1)"),
    (r"1, \sqrt{4}", "2, 1"),
    (r"10\sqrt3 \text{ feet}", r"10\sqrt{3}"),
    ("x < 3", "3 > x"),
    ("2**3", "8"),
    ("y_1", "x_1"),
    (r"\int^1_0 2x dx", "1"),
]


@pytest.mark.parametrize(("answer", "reference"), RIGHT)
def test_right_answers_are_right_without_algebra(answer, reference):
    assert compare_without_algebra(answer, reference) is True


@pytest.mark.parametrize(("answer", "reference"), WRONG)
def test_near_misses_are_wrong_without_algebra(answer, reference):
    assert compare_without_algebra(answer, reference) is False


@pytest.mark.parametrize(("answer", "reference"), UNKNOWN)
def test_only_expressions_are_left_to_algebra(answer, reference):
    assert compare_without_algebra(answer, reference) is None


def test_algebra_compares_members_and_its_results_are_combined():
    asked_pairs = []

    def algebra(answer, reference):
        asked_pairs.append((answer, reference))
        return answer == r"\sqrt{4}"

    assert compare(r"(\sqrt{4}, \frac{2}{2})", "(2, 1)", algebra) is True
    assert compare(r"(\sqrt{9}, \sqrt{4})", "(2, 2)", algebra) is False
    assert compare(r"\sqrt{9}, \sqrt{4}", "2, 3", algebra) is False
    assert asked_pairs[:2] == [(r"\sqrt{4}", "2"), (r"\sqrt{9}", "2")]


def test_a_long_answer_is_right_only_where_it_is_the_reference():
    text = "+".join("x" * MAX_ANSWER_LENGTH)
    assert compare_without_algebra(text, "x") is False
    assert compare_without_algebra(text, text) is True


@pytest.mark.parametrize("answer", ["x", "9" * 10_000_000], ids=["another answer", "itself"])
def test_a_reference_of_ten_megabytes_takes_no_time(answer):
    reference = "9" * 10_000_000
    start_time = time.process_time()

    assert compare_without_algebra(answer, reference) is (answer == reference)
    assert time.process_time() - start_time < 1.0  # seconds


def test_an_empty_reference_is_never_answered():
    assert compare_without_algebra("", "") is False


numbers = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**4)


@settings(max_examples=30)
@given(numbers, numbers)
def test_two_numbers_are_right_exactly_where_they_are_equal(reference, random_answer):
    for answer in (reference, random_answer, random_answer + Fraction(1, 10**40)):
        unreduced_answer = f"{3 * answer.numerator}/{3 * answer.denominator}"
        assert compare_without_algebra(str(answer), str(reference)) is (answer == reference)
        assert compare_without_algebra(unreduced_answer, str(reference)) is (answer == reference)


@settings(max_examples=30)
@given(st.lists(numbers, min_size=2, max_size=5), st.randoms())
def test_order_counts_in_tuples_and_not_in_lists(members, random):
    shuffled_members = random.sample(members, len(members))
    answer, reference = ", ".join(map(str, shuffled_members)), ", ".join(map(str, members))

    assert compare_without_algebra(answer, reference) is True
    assert compare_without_algebra(f"({answer})", f"({reference})") is (shuffled_members == members)
